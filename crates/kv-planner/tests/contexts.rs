//! Laws of context parallelism: every token on the rank that owns it, once; and token
//! slots that are the pages counted otherwise. Over labelled bytes.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::{Dice, byte_map};
use kv_planner::*;
use proptest::prelude::*;

const PAGE: u64 = 3;

fn span(tokens: u64, page_offset: u64, prefix_tokens: u64) -> Span {
    Span { page_size: PAGE, prefix_tokens, page_offset, tokens }
}

/// Pairs of items, spelled out.
fn pairs(runs: &Runs) -> Vec<(i64, i64)> {
    let steps =
        runs.runs().iter().flat_map(|run| (0..run.count).map(move |step| (run.source + step, run.destination + step)));
    steps.map(|(from, to)| (from as i64, to as i64)).collect()
}

/// Size of the group, tokens, and where the request is cut in two chunks.
fn request() -> impl Strategy<Value = (u64, u64, u64, u64)> {
    (1u64..5, 0u64..40, any::<u64>(), any::<u64>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn whole_pages_go_to_the_ranks_in_turn((size, tokens, cut, seed) in request()) {
        let mut dice = Dice::new(seed);
        let pages = tokens.div_ceil(PAGE);
        let cut = cut % (pages + 1);
        let source = dice.pages(pages as usize, 60);
        let destination = dice.pages(pages.div_ceil(size) as usize, 60);
        let mut seen = BTreeSet::new();
        for rank in 0..size {
            let context = Context { rank, size };
            for slots in [Slots::Local, Slots::Global] {
                let mut moved = Vec::new();
                for (first, last) in [(0, cut), (cut, pages)] {
                    let chunk = &source[first as usize..last as usize];
                    let runs = page_interleaved(chunk, &destination, span(tokens, first, 2 * PAGE * size), context, slots).unwrap();
                    prop_assert_eq!(runs.context(), Some(context));
                    prop_assert_eq!(runs.slice(0, runs.page_count()).unwrap(), runs.clone());
                    moved.extend(pairs(&runs));
                }
                let mut wanted = Vec::new();
                for (page, from) in source.iter().enumerate() {
                    let (place, owner) = (destination[page / size as usize], page as u64 % size);
                    match slots {
                        Slots::Local if owner != rank => continue,
                        Slots::Local => wanted.push((*from, place)),
                        Slots::Global => wanted.push((*from, place * size as i64 + owner as i64)),
                    }
                }
                prop_assert_eq!(&moved, &wanted);
                if slots == Slots::Local {
                    prop_assert!(moved.iter().all(|(from, _)| seen.insert(*from)), "two ranks own a page");
                }
            }
        }
        prop_assert_eq!(seen.len() as u64, pages);
    }

    #[test]
    fn tokens_go_to_the_ranks_in_turn((size, tokens, cut, seed) in request()) {
        let mut dice = Dice::new(seed);
        let pages = tokens.div_ceil(PAGE);
        let cut = cut % (pages + 1);
        let source = dice.pages(pages as usize, 60);
        let destination = dice.pages(pages.div_ceil(size) as usize, 60);
        let slot = |pages: &[i64], token: u64| pages[(token / PAGE) as usize] * PAGE as i64 + (token % PAGE) as i64;
        for rank in 0..size {
            let context = Context { rank, size };
            let mut moved = Vec::new();
            for (first, last) in [(0, cut), (cut, pages)] {
                let chunk = &source[first as usize..last as usize];
                let runs = token_interleaved(chunk, &destination, span(tokens, first, 0), context).unwrap();
                prop_assert_eq!(runs.item_kind(), ItemKind::Token);
                moved.extend(pairs(&runs));
            }
            let own = (0..tokens).filter(|token| token % size == rank);
            let wanted: Vec<_> = own.map(|token| (slot(&source, token), slot(&destination, token / size))).collect();
            prop_assert_eq!(moved, wanted);
        }
    }

    /// Token slots are the same bytes as pages, for every head slice.
    #[test]
    fn a_page_by_tokens_is_the_page(
        (page_size, sizes, rank, seed) in (1u64..5, prop::sample::select(vec![(1u64, 1u64), (1, 2), (1, 4)]), 0u64..4, any::<u64>()),
        dim_first in any::<bool>(),
    ) {
        let axes = if dim_first { [Axis::Token, Axis::Dim, Axis::Head] } else { [Axis::Token, Axis::Head, Axis::Dim] };
        let local = rank_of(page_size, axes, (0, sizes.0), 4096, 0);
        let remote = rank_of(page_size, axes, (rank % sizes.1, sizes.1), 1 << 40, 0);
        let route = agree(Side::Rank(local), Side::Rank(remote)).unwrap().route(0, 0).unwrap();
        let mut dice = Dice::new(seed);
        let (from, to) = (dice.pages(3, ITEMS), dice.pages(3, ITEMS));
        let spread = |pages: &[i64]| -> Vec<i64> {
            pages.iter().flat_map(|page| (0..page_size as i64).map(move |token| page * page_size as i64 + token)).collect()
        };
        let by_page = Plan::new(route.clone(), Runs::new(&from, &to).unwrap()).unwrap();
        let tokens = Runs::of_kind(&spread(&from), &spread(&to), ItemKind::Token).unwrap();
        let by_token = Plan::new(route.by_token().unwrap(), tokens).unwrap();
        let map = |plan: &Plan| byte_map(&lower(plan, &Capabilities::default()).unwrap());
        prop_assert_eq!(map(&by_page), map(&by_token));
        prop_assert_eq!(by_page.nbytes(), by_token.nbytes());
        let beyond = Runs::of_kind(&[(ITEMS * page_size) as i64], &[page_size as i64], ItemKind::Token).unwrap();
        prop_assert_eq!(Plan::new(route.by_token().unwrap(), beyond).unwrap_err().kind, ErrorKind::PageOutOfRange);
        let last = (ITEMS * page_size) as i64 - 1;
        let last = Runs::of_kind(&[last], &[last], ItemKind::Token).unwrap();
        prop_assert!(Plan::new(route.by_token().unwrap(), last).is_ok());
        let kind = route.by_token().unwrap().by_token().unwrap_err().kind;
        prop_assert_eq!(kind, ErrorKind::ItemKindMismatch);
        let sliced = route.by_token().unwrap().slice(&Slice { layer_ids: Some(vec![0]), ..Slice::default() }).unwrap();
        prop_assert_eq!(sliced, route.by_token().unwrap());
    }
}

const ITEMS: u64 = 6;

fn rank_of(
    page_size: u64,
    axes: [Axis; 3],
    (tp_rank, tp_size): (u64, u64),
    address: u64,
    padding: u64,
) -> Arc<RankManifest> {
    let spec = ComponentSpec {
        component: Component::Key,
        part: Part::Target,
        layer_ids: vec![0],
        dtype: DType::Float16,
        total_heads: 4,
        dims: 3,
        axes,
        item_kind: ItemKind::Page,
        compression: 1,
        rows: 1,
        groups: vec![],
    };
    let layout = ModelLayout {
        components: vec![spec],
        page_size,
        fingerprint: "m".into(),
        kernel_block_size: None,
        format_version: 1,
    };
    let share = 4 / tp_size;
    let item_bytes = page_size * share * 6;
    let entry = BufferEntry {
        component: Component::Key,
        part: Part::Target,
        layer_id: 0,
        device: "cpu".into(),
        address,
        nbytes: ITEMS * (item_bytes + padding),
        item_stride: item_bytes + padding,
        item_bytes,
        head_range: (tp_rank * share, (tp_rank + 1) * share),
        occurrence: 0,
    };
    let placement = Placement { tp_rank, tp_size, ..Placement::default() };
    Arc::new(RankManifest::new(Arc::new(layout.validated().unwrap()), placement, vec![entry]).unwrap())
}

#[test]
fn slots_that_are_not_evenly_spaced_are_refused() {
    let usual = [Axis::Token, Axis::Head, Axis::Dim];
    for (axes, padding) in [(usual, 2), ([Axis::Head, Axis::Token, Axis::Dim], 0)] {
        let local = Side::Rank(rank_of(2, axes, (0, 1), 4096, padding));
        let remote = Side::Rank(rank_of(2, axes, (0, 1), 1 << 40, 0));
        for (from, to) in [(local.clone(), remote.clone()), (remote, local)] {
            let route = agree(from, to).unwrap().route(0, 0).unwrap();
            assert_eq!(route.by_token().unwrap_err().kind, ErrorKind::ItemKindMismatch);
        }
    }
}

/// Source pages, destination pages, and what they are refused for.
type Case = (Vec<i64>, Vec<i64>, Span, Context, ErrorKind);

#[test]
fn impossible_shares_are_refused() {
    let whole = Context { rank: 0, size: 2 };
    let virtual_page = 2 * PAGE;
    let cases: BTreeMap<&str, Case> = BTreeMap::from([
        ("prefix", (vec![1], vec![1], span(3, 0, virtual_page + PAGE), whole, ErrorKind::LengthError)),
        ("pages beyond the tokens", (vec![1, 2], vec![1], span(PAGE, 0, 0), whole, ErrorKind::LengthError)),
        ("offset beyond the tokens", (vec![1], vec![1], span(PAGE, 1, 0), whole, ErrorKind::LengthError)),
        ("offset beyond 64 bits", (vec![1], vec![1], span(PAGE, u64::MAX, 0), whole, ErrorKind::LengthError)),
        ("destination", (vec![1, 2, 3], vec![1], span(3 * PAGE, 0, 0), whole, ErrorKind::UnequalPages)),
        ("rank", (vec![1], vec![1], span(3, 0, 0), Context { rank: 2, size: 2 }, ErrorKind::PlacementError)),
        ("no ranks", (vec![1], vec![1], span(3, 0, 0), Context { rank: 0, size: 0 }, ErrorKind::PlacementError)),
        ("page size", (vec![1], vec![1], Span { page_size: 0, ..span(3, 0, 0) }, whole, ErrorKind::LengthError)),
        ("source page 0", (vec![0], vec![1], span(3, 0, 0), whole, ErrorKind::ReservedPage)),
        ("destination page 0", (vec![1], vec![0], span(3, 0, 0), whole, ErrorKind::ReservedPage)),
        ("a negative page", (vec![1], vec![-1], span(3, 0, 0), whole, ErrorKind::PageOutOfRange)),
        (
            "virtual page",
            (vec![1], vec![1], Span { page_size: 1 << 63, ..span(3, 0, 0) }, whole, ErrorKind::AddressOverflow),
        ),
    ]);
    for (name, (source, destination, span, context, kind)) in cases {
        let tokens = token_interleaved(&source, &destination, span, context);
        assert_eq!(tokens.unwrap_err().kind, kind, "{name}");
        let pages = page_interleaved(&source, &destination, span, context, Slots::Local);
        assert_eq!(pages.unwrap_err().kind, kind, "{name}");
    }
    let far = page_interleaved(&[1], &[i64::MAX], span(3, 0, 0), whole, Slots::Global);
    assert_eq!(far.unwrap_err().kind, ErrorKind::PageOutOfRange);
    let far = token_interleaved(&[i64::MAX / 2], &[1], span(3, 0, 0), whole);
    assert_eq!(far.unwrap_err().kind, ErrorKind::PageOutOfRange);
    assert!(page_interleaved(&[], &[], span(0, 0, virtual_page), whole, Slots::Local).unwrap().runs().is_empty());
    let nothing = page_interleaved(&[], &[], span(3 * PAGE, 1, 0), whole, Slots::Local);
    assert!(nothing.unwrap().runs().is_empty(), "a chunk without pages needs no destination");
}

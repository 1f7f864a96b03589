//! Numbers at the edges of their range, in JSON and in calls: each is a result or
//! a named refusal, and none panics. A panic fails the test by itself.

use std::sync::Arc;

use kv_planner::*;
use proptest::prelude::*;
use serde_json::Value as Json;

const EDGES: [u64; 13] =
    [0, 1, 2, 3, 255, (1 << 31) - 1, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, u64::MAX - 1, u64::MAX];

fn edge() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..4, 3 => prop::sample::select(EDGES.to_vec()), 1 => any::<u64>()]
}

fn spec(part: Part) -> impl Strategy<Value = ComponentSpec> {
    let dtype = prop::sample::select(DType::ALL.to_vec());
    let usual = if part == Part::Target { vec![0, 1] } else { vec![2] };
    let layers = prop_oneof![2 => Just(usual), 1 => prop::collection::vec(edge(), 1..4)];
    let dims = prop_oneof![6 => Just(1u64), 1 => edge()];
    let total_heads = prop_oneof![2 => 1u64..3, 2 => edge()];
    (layers, dtype, total_heads, dims).prop_map(move |(layer_ids, dtype, total_heads, dims)| ComponentSpec {
        component: Component::Key,
        part,
        layer_ids,
        dtype,
        total_heads,
        dims,
        axes: [Axis::Token, Axis::Head, Axis::Dim],
        item_kind: ItemKind::Page,
        compression: 1,
        rows: 1,
        groups: vec![],
    })
}

fn layout() -> impl Strategy<Value = ModelLayout> {
    let page = prop_oneof![6 => Just(1u64), 1 => edge()];
    (spec(Part::Target), prop::option::of(spec(Part::Draft)), page, prop::option::weighted(0.1, edge())).prop_map(
        |(target, draft, page_size, kernel_block_size)| ModelLayout {
            components: [Some(target), draft].into_iter().flatten().collect(),
            page_size,
            fingerprint: "m".into(),
            kernel_block_size,
            format_version: 1,
        },
    )
}

/// A rank and its size; often one that fits.
fn place() -> impl Strategy<Value = (u64, u64)> {
    let last = edge().prop_map(|size| (size.saturating_sub(1), size));
    prop_oneof![6 => Just((0, 1)), 1 => (edge(), edge()), 3 => last]
}

type Numbers = (u64, u64, u64, u64, u64, u64);

/// An entry for a layer of the layout, with lengths that follow from it where they can.
fn entry(layout: &ModelLayout, index: usize, (first, heads, address, stride, items, free): Numbers) -> BufferEntry {
    let spec = &layout.components[index % layout.components.len()];
    let total = if free % 8 == 7 { u64::MAX } else { spec.total_heads };
    let first = first.min(total);
    let head_range = (first, first + heads.min(total - first));
    let item_bytes = spec.item_bytes(layout.page_size, head_range.1 - first).unwrap_or(free);
    let item_stride = item_bytes.saturating_add(stride);
    let whole = items.checked_sub(1).map(|last| last.saturating_mul(item_stride).saturating_add(item_bytes));
    BufferEntry {
        component: spec.component,
        part: spec.part,
        layer_id: spec.layer_ids[index / layout.components.len() % spec.layer_ids.len()],
        device: "cpu".into(),
        address: address.saturating_add((index as u64) << 40),
        nbytes: whole.unwrap_or(0),
        item_stride,
        item_bytes,
        head_range,
        occurrence: 0,
    }
}

fn manifest() -> impl Strategy<Value = Result<RankManifest>> {
    let often = |usual: u64| prop_oneof![3 => Just(usual), 1 => edge()];
    let numbers = (often(0), often(u64::MAX), often(4096), often(0), often(0), edge());
    let entries = prop::collection::vec(numbers, 0..5);
    (layout(), [place(), place(), place()], entries).prop_map(|(layout, [pp, tp, dp], numbers)| {
        let ((pp_rank, pp_size), (tp_rank, tp_size), (dp_rank, dp_size)) = (pp, tp, dp);
        let placement = Placement { pp_rank, pp_size, tp_rank, tp_size, dp_rank, dp_size, ..Placement::default() };
        let layout = Arc::new(layout.validated()?);
        let entries = numbers.iter().enumerate().map(|(index, given)| entry(&layout, index, *given)).collect();
        RankManifest::new(layout, placement, entries)
    })
}

/// Everything that may follow once a manifest was taken.
fn use_it(manifest: RankManifest, limits: &Capabilities) -> Result<()> {
    let manifest = Arc::new(manifest);
    let _ = Deployment::new(vec![manifest.clone()]).map(|own| own.manifests().len());
    for entry in &manifest.entries {
        let _ = (entry.items(), entry.heads(), entry.name().to_string());
    }
    assert_eq!(RankManifest::from_json(&manifest.to_json())?, *manifest);
    let route = agree(Side::Rank(manifest.clone()), Side::Rank(manifest))?.route(0, 0)?;
    for pages in [&[1][..], &[i64::MAX], &[1, 2, i64::MAX - 1]] {
        if let Ok(plan) = Plan::new(route.clone(), Runs::new(pages, pages)?) {
            let _ = (plan.to_string(), lower(&plan, limits).map(|lowered| lowered.block_count));
        }
    }
    Ok(())
}

fn numbers_of(json: &mut Json) -> Vec<&mut Json> {
    match json {
        Json::Number(_) => vec![json],
        Json::Array(items) => items.iter_mut().flat_map(numbers_of).collect(),
        Json::Object(fields) => fields.values_mut().flat_map(numbers_of).collect(),
        _ => Vec::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, ..ProptestConfig::default() })]

    #[test]
    fn manifests(manifest in manifest(), block in prop::option::of(edge()), entries in prop::option::of(edge())) {
        let limits = Capabilities { max_entries_per_batch: entries, max_block_bytes: block, max_blocks: Some(64) };
        let _ = manifest.and_then(|manifest| use_it(manifest, &limits));
    }

    #[test]
    fn json(changes in prop::collection::vec((any::<prop::sample::Index>(), edge()), 1..6)) {
        let text = include_str!("extremes.json");
        let mut json: Json = serde_json::from_str(text).unwrap();
        RankManifest::from_json(text).unwrap();
        let mut numbers = numbers_of(&mut json);
        for (at, number) in changes {
            **at.get_mut(&mut numbers) = number.into();
        }
        let _ = ModelLayout::from_json(&json["layout"].to_string());
        let limits = Capabilities { max_blocks: Some(64), ..Capabilities::default() };
        let _ = RankManifest::from_json(&json.to_string()).and_then(|manifest| use_it(manifest, &limits));
    }

    #[test]
    fn steps(a in edge(), b in edge(), c in edge(), signed in any::<i64>(), fill in any::<f64>()) {
        let rows = if a < 1 << 48 { a % 64 } else { a };
        let _ = select_index(&[signed], rows, b, c);
        let _ = (page_count(a, b), split_heads(a, b, c));
        for dtype in DType::ALL {
            for fill in [Fill::Int(signed), Fill::Float(fill)] {
                let _ = RowField::new("a", *dtype, a, b, fill).and_then(|field| RowLayout::new(vec![field], c));
            }
        }
        for kind in SpeculativeKind::ALL {
            let _ = kv_lengths(*kind, &[signed, i64::MAX, i64::MIN], a);
        }
        let _ = Runs::new(&[signed], &[i64::MAX]).and_then(|runs| runs.slice(a, b));
        let _ = TierCounts::new(a, b, c, a).map(|counts| counts.outside());
        let _ = PrefixIndex::new(a, b, c).map(|index| index.pending_backup(b, c, &[NodeId(signed)]));
        let index = PrefixIndex::new(2, 8, 8).unwrap();
        let unnamed = Namespace::default();
        let _ = index.insert(&[signed, 1], &[signed], &unnamed, Tier::Host);
        let _ = (index.find(&[signed, 1], &unnamed, Some(a)), index.path(NodeId(signed)));
        let _ = (index.evict(Tier::Device, a, EvictOptions { keep_unbacked: b % 2 == 0 }), index.counts());
        let _ = page_hashes(&[signed; 3], a, None, true);
    }
}

/// Found by fuzzing: items of many rows took memory although there was none to move.
#[test]
fn an_empty_plan_of_large_items_needs_no_memory() {
    let spec = ComponentSpec {
        component: Component::Key,
        part: Part::Target,
        layer_ids: vec![0],
        dtype: DType::UInt8,
        total_heads: 2,
        dims: 1,
        axes: [Axis::Token, Axis::Head, Axis::Dim],
        item_kind: ItemKind::Page,
        compression: 1,
        rows: 1,
        groups: vec![],
    };
    let layout = ModelLayout {
        components: vec![spec],
        page_size: 1 << 50,
        fingerprint: "m".into(),
        kernel_block_size: None,
        format_version: 1,
    };
    let layout = Arc::new(layout.validated().unwrap());
    let rank = |address: u64, tp_size: u64| {
        let heads = 2 / tp_size;
        let item = heads << 50;
        let entry = BufferEntry {
            component: Component::Key,
            part: Part::Target,
            layer_id: 0,
            device: "cpu".into(),
            address,
            nbytes: 3 * item,
            item_stride: item,
            item_bytes: item,
            head_range: (0, heads),
            occurrence: 0,
        };
        let placement = Placement { tp_size, ..Placement::default() };
        Side::Rank(Arc::new(RankManifest::new(layout.clone(), placement, vec![entry]).unwrap()))
    };
    let route = agree(rank(4096, 1), rank(1 << 60, 2)).unwrap().route(0, 0).unwrap();
    assert_eq!(route.pairs()[0].rows, 1 << 50);
    let plan = |pages: &[i64]| Plan::new(route.clone(), Runs::new(pages, pages).unwrap()).unwrap();
    assert_eq!(lower(&plan(&[]), &Capabilities::default()).unwrap(), LoweredPlan::default());
    let all = Capabilities { max_entries_per_batch: Some(4), ..Capabilities::default() };
    assert_eq!(lower(&plan(&[1]), &all).unwrap_err().kind, ErrorKind::BlockLimitExceeded);
}

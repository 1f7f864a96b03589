//! Laws of plans, proved over a simulated memory of labelled bytes.

mod common;

use std::collections::BTreeMap;

use common::{Label, World, byte_map, bytes_of, state_world, world};
use kv_planner::*;
use proptest::prelude::*;

fn sizes() -> impl Strategy<Value = (u64, u64)> {
    (1u64..4, prop::sample::select(vec![1u64, 2, 4, 8]))
}

fn any_world() -> impl Strategy<Value = World> {
    (any::<u64>(), sizes(), sizes(), any::<bool>()).prop_map(|(seed, a, b, draft)| world(seed, a, b, draft))
}

fn limits() -> impl Strategy<Value = Capabilities> {
    (prop::option::of(1u64..6), prop::option::of(1u64..20)).prop_map(|(entries, bytes)| Capabilities {
        max_entries_per_batch: entries,
        max_block_bytes: bytes,
        max_blocks: None,
    })
}

fn blocks(lowered: &LoweredPlan) -> Vec<(u64, u64, u64)> {
    let rows = |batch: &Batch| -> Vec<_> {
        (0..batch.source.len()).map(|row| (batch.source[row], batch.destination[row], batch.nbytes[row])).collect()
    };
    lowered.batches.iter().flat_map(rows).collect()
}

/// What every destination rank holds afterwards: its own labels, on the paired items.
fn expected(world: &World) -> Vec<BTreeMap<u64, Label>> {
    let number = |page: &i64| *page as u64;
    let pages: BTreeMap<u64, u64> =
        world.destination_pages.iter().map(number).zip(world.source_pages.iter().map(number)).collect();
    let image = |manifest: &std::sync::Arc<RankManifest>| {
        let mut own = bytes_of(manifest);
        own.retain(|_, label| pages.contains_key(&label.1));
        own.values_mut().for_each(|label| label.1 = pages[&label.1]);
        own
    };
    world.agreement.remote.manifests().iter().map(image).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, ..ProptestConfig::default() })]

    /// Every destination byte of the request's pages gets its own label, once, and
    /// no other byte is written.
    #[test]
    fn every_byte_arrives_once_and_nothing_else(world in any_world(), capabilities in limits()) {
        prop_assert_eq!(world.received(&capabilities), expected(&world));
    }

    /// The same for states of several rows whose groups are sharded one by one.
    #[test]
    fn every_byte_of_a_state_arrives_once(
        seed in any::<u64>(), source in sizes(), destination in sizes(), draft in any::<bool>(), capabilities in limits()
    ) {
        let world = state_world(seed, source, destination, draft);
        prop_assert_eq!(world.received(&capabilities), expected(&world));
    }

    #[test]
    fn limits_are_kept_and_change_no_byte(world in any_world(), capabilities in limits()) {
        for local in 0..world.agreement.local.manifests().len() {
            let plan = Plan::new(world.agreement.route(local, 0).unwrap(), world.runs()).unwrap();
            let free = lower(&plan, &Capabilities::default()).unwrap();
            let bound = lower(&plan, &capabilities).unwrap();
            prop_assert_eq!(byte_map(&free), byte_map(&bound));
            prop_assert_eq!(free.block_count, plan.block_count());
            prop_assert_eq!(blocks(&free).len() as u64, free.block_count);
            prop_assert_eq!(blocks(&bound).len() as u64, bound.block_count);
            let most = capabilities.max_entries_per_batch.unwrap_or(u64::MAX);
            prop_assert!(bound.batches.iter().all(|batch| !batch.source.is_empty() && batch.source.len() as u64 <= most));
            let longest = capabilities.max_block_bytes.unwrap_or(u64::MAX);
            prop_assert!(blocks(&bound).iter().all(|block| block.2 <= longest));
            let exact = Capabilities { max_blocks: Some(bound.block_count), ..capabilities };
            prop_assert_eq!(lower(&plan, &exact).unwrap(), bound.clone());
            if bound.block_count > 0 {
                let tight = Capabilities { max_blocks: Some(bound.block_count - 1), ..capabilities };
                prop_assert_eq!(lower(&plan, &tight).unwrap_err().kind, ErrorKind::BlockLimitExceeded);
            }
        }
    }

    #[test]
    fn runs_cover_every_pair_once_in_order(pairs in prop::collection::btree_map(1i64..40, 1i64..40, 0..30), shuffle in any::<u64>()) {
        let mut pairs: Vec<(i64, i64)> = pairs.into_iter().collect();
        if shuffle % 2 == 0 {
            common::Dice::new(shuffle).shuffle(&mut pairs);
        }
        let (destination, source): (Vec<i64>, Vec<i64>) = pairs.iter().copied().unzip();
        let runs = Runs::new(&source, &destination).unwrap();
        let expanded: Vec<(i64, i64)> = runs
            .runs()
            .iter()
            .flat_map(|run| (0..run.count).map(|step| ((run.destination + step) as i64, (run.source + step) as i64)))
            .collect();
        prop_assert_eq!(&expanded, &pairs);
        let joins = |pair: &[(i64, i64)]| pair[1].0 - pair[0].0 == 1 && pair[1].1 - pair[0].1 == 1;
        let breaks = pairs.windows(2).filter(|pair| !joins(pair)).count() as u64;
        prop_assert_eq!(runs.run_count(), if pairs.is_empty() { 0 } else { breaks + 1 });
    }

    #[test]
    fn coalescing_never_changes_the_byte_map(world in any_world()) {
        for remote in 0..world.agreement.remote.manifests().len() {
            let route = world.agreement.route(0, remote).unwrap();
            let whole = lower(&Plan::new(route.clone(), world.runs()).unwrap(), &Capabilities::default()).unwrap();
            let mut single = BTreeMap::new();
            for (source, destination) in world.source_pages.iter().zip(&world.destination_pages) {
                let runs = Runs::new(&[*source], &[*destination]).unwrap();
                single.extend(byte_map(&lower(&Plan::new(route.clone(), runs).unwrap(), &Capabilities::default()).unwrap()));
            }
            prop_assert_eq!(byte_map(&whole), single);
        }
    }

    #[test]
    fn blocks_do_not_overlap_in_the_destination(world in any_world(), capabilities in limits()) {
        for local in 0..world.agreement.local.manifests().len() {
            for remote in 0..world.agreement.remote.manifests().len() {
                let plan = Plan::new(world.agreement.route(local, remote).unwrap(), world.runs()).unwrap();
                let mut spans: Vec<(u64, u64)> =
                    blocks(&lower(&plan, &capabilities).unwrap()).iter().map(|block| (block.1, block.1 + block.2)).collect();
                spans.sort_unstable();
                prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            }
        }
    }

    /// Whatever the stages and the order of entries, a destination receives the same.
    #[test]
    fn joining_stages_changes_nothing(seed in any::<u64>(), source in sizes(), draft in any::<bool>()) {
        let staged = world(seed, source, (1, 2), draft);
        let layout = staged.agreement.layout().clone();
        let joined = common::deployment(&mut common::Dice::new(seed ^ 1), &layout, 1, 1);
        let agreement = agree(Side::Deployment(joined), staged.agreement.remote.clone()).unwrap();
        let joined = World { agreement, kind: staged.kind, source_pages: staged.source_pages.clone(), destination_pages: staged.destination_pages.clone() };
        let free = Capabilities::default();
        prop_assert_eq!(staged.received(&free), joined.received(&free));
    }

    #[test]
    fn slices_partition_the_plan(world in any_world(), cut in 0u64..7) {
        let count = world.source_pages.len() as u64;
        let cut = cut.min(count);
        for local in 0..world.agreement.local.manifests().len() {
            let plan = Plan::new(world.agreement.route(local, 0).unwrap(), world.runs()).unwrap();
            let whole = byte_map(&lower(&plan, &Capabilities::default()).unwrap());
            let mut ids: Vec<u64> = world.agreement.layout().components.iter().flat_map(|spec| spec.layer_ids.clone()).collect();
            ids.sort_unstable();
            ids.dedup();
            let mut joined = BTreeMap::new();
            let mut nbytes = 0;
            for id in ids {
                for pages in [(0, cut), (cut, count)] {
                    let slice = Slice { layer_ids: Some(vec![id]), pages: Some(pages), ..Slice::default() };
                    let part = plan.slice(&slice).unwrap();
                    nbytes += part.nbytes();
                    joined.extend(byte_map(&lower(&part, &Capabilities::default()).unwrap()));
                }
            }
            prop_assert_eq!(&joined, &whole);
            prop_assert_eq!(nbytes, plan.nbytes());
            let mut by_name = BTreeMap::new();
            for part in Part::ALL {
                for spec in world.agreement.layout().components.iter().filter(|spec| spec.part == *part) {
                    let slice = Slice { parts: Some(vec![*part]), components: Some(vec![spec.component]), ..Slice::default() };
                    by_name.extend(byte_map(&lower(&plan.slice(&slice).unwrap(), &Capabilities::default()).unwrap()));
                }
            }
            prop_assert_eq!(&by_name, &whole);
        }
    }

    /// Without replicas the way back is the way there with the ends exchanged.
    #[test]
    fn reversing_plans_the_way_back(seed in any::<u64>(), pp in 1u64..4, qq in 1u64..4, draft in any::<bool>()) {
        let world = world(seed, (pp, 1), (qq, 1), draft);
        let back = world.agreement.reversed();
        prop_assert_eq!(&back.reversed(), &world.agreement);
        let runs_back = Runs::new(&world.destination_pages, &world.source_pages).unwrap();
        for local in 0..pp as usize {
            for remote in 0..qq as usize {
                let there = Plan::new(world.agreement.route(local, remote).unwrap(), world.runs()).unwrap();
                let again = Plan::new(back.route(remote, local).unwrap(), runs_back.clone()).unwrap();
                let map = byte_map(&lower(&there, &Capabilities::default()).unwrap());
                let inverse: BTreeMap<u64, u64> = map.into_iter().map(|(to, from)| (from, to)).collect();
                prop_assert_eq!(byte_map(&lower(&again, &Capabilities::default()).unwrap()), inverse);
            }
        }
    }

    /// A handshake between two ranks finds the same route as the whole deployments.
    #[test]
    fn two_ranks_agree_as_their_deployments_do(world in any_world()) {
        for (local, source) in world.agreement.local.manifests().iter().enumerate() {
            for (remote, destination) in world.agreement.remote.manifests().iter().enumerate() {
                let pair = agree(Side::Rank(source.clone()), Side::Rank(destination.clone())).unwrap();
                prop_assert_eq!(pair.route(0, 0).unwrap(), world.agreement.route(local, remote).unwrap());
            }
        }
    }

    #[test]
    fn json_reads_back(world in any_world()) {
        for manifest in world.agreement.local.manifests() {
            prop_assert_eq!(&RankManifest::from_json(&manifest.to_json()).unwrap(), manifest.as_ref());
        }
        let layout = world.agreement.layout();
        prop_assert_eq!(&ModelLayout::from_json(&layout.to_json()).unwrap(), layout.as_ref());
    }
}

//! Laws of lowering into registered memory.

mod common;

use common::{World, byte_map, world};
use kv_planner::*;
use proptest::prelude::*;

fn spans(manifest: &RankManifest) -> Vec<(u64, u64)> {
    manifest.entries.iter().map(|entry| (entry.address, entry.nbytes)).collect()
}

fn regions(manifest: &RankManifest, most: Option<u64>) -> Regions {
    Regions::new(&spans(manifest), RegionLimits { alignment: 8, max_bytes: most, max_regions: None }).unwrap()
}

fn any_world() -> impl Strategy<Value = World> {
    (any::<u64>(), 1u64..3, prop::sample::select(vec![1u64, 2]))
        .prop_map(|(seed, pp, tp)| world(seed, (pp, tp), (1, 2), true))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn blocks_stay_within_a_region_and_change_no_byte(
        world in any_world(),
        most in prop::sample::select(vec![None, Some(8u64), Some(24)]),
        entries in prop::option::of(1u64..5),
        bytes in prop::option::of(1u64..9),
    ) {
        let route = world.agreement.route(0, 0).unwrap();
        let (source, destination) = (regions(route.source(), most), regions(route.destination(), None));
        let plan = Plan::new(route, world.runs()).unwrap();
        let limits = Capabilities { max_entries_per_batch: entries, max_block_bytes: bytes, max_blocks: None };
        let bound = lower_within(&plan, &limits, Some(&source), Some(&destination)).unwrap();
        prop_assert_eq!(byte_map(&bound), byte_map(&lower(&plan, &Capabilities::default()).unwrap()));
        let mut blocks = 0;
        for batch in &bound.batches {
            prop_assert!(!batch.source.is_empty() && batch.source.len() as u64 <= entries.unwrap_or(u64::MAX));
            blocks += batch.source.len() as u64;
            for ((from, to), count) in batch.source.iter().zip(&batch.destination).zip(&batch.nbytes) {
                let inside = |regions: &Regions, start: u64| regions.spans().iter().any(|(a, b)| *a <= start && start + count <= *b);
                prop_assert!(inside(&source, *from) && inside(&destination, *to) && *count <= bytes.unwrap_or(u64::MAX));
            }
        }
        prop_assert_eq!((blocks, bound.total_bytes), (bound.block_count, plan.nbytes()));
        let exact = Capabilities { max_blocks: Some(blocks), ..limits };
        prop_assert_eq!(lower_within(&plan, &exact, Some(&source), Some(&destination)).unwrap(), bound.clone());
        if blocks > 0 {
            let tight = Capabilities { max_blocks: Some(blocks - 1), ..limits };
            let refused = lower_within(&plan, &tight, Some(&source), Some(&destination)).unwrap_err();
            prop_assert_eq!(refused.kind, ErrorKind::BlockLimitExceeded);
            let none = Regions::new(&[], RegionLimits { alignment: 8, max_bytes: None, max_regions: None }).unwrap();
            for (source, destination) in [(Some(&none), None), (None, Some(&none))] {
                let refused = lower_within(&plan, &limits, source, destination).unwrap_err();
                prop_assert_eq!(refused.kind, ErrorKind::UnregisteredMemory);
            }
            prop_assert_eq!(lower_within(&plan, &limits, None, None).unwrap(), lower(&plan, &limits).unwrap());
        }
    }
}

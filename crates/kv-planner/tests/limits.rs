//! Blocks of pages that lie together, at the edges of an engine's limits.

use std::sync::Arc;

use kv_planner::*;

const PAGE: u64 = 2;
const LAYERS: u64 = 3;

/// A rank that holds all of a model of one byte a token and layer.
fn rank(address: u64) -> Side {
    let spec = ComponentSpec {
        component: Component::Latent,
        part: Part::Target,
        layer_ids: (0..LAYERS).collect(),
        dtype: DType::UInt8,
        total_heads: 1,
        dims: 1,
        axes: [Axis::Token, Axis::Head, Axis::Dim],
        item_kind: ItemKind::Page,
        compression: 1,
        rows: 1,
        groups: vec![],
    };
    let layout = ModelLayout {
        components: vec![spec],
        page_size: PAGE,
        fingerprint: "m".into(),
        kernel_block_size: None,
        format_version: 1,
    };
    let layout = Arc::new(layout.validated().unwrap());
    let entry = |layer_id: u64| BufferEntry {
        component: Component::Latent,
        part: Part::Target,
        layer_id,
        device: "cpu".into(),
        address: address + 100 * layer_id,
        nbytes: 20,
        item_stride: PAGE,
        item_bytes: PAGE,
        head_range: (0, 1),
        occurrence: 0,
    };
    let entries = (0..LAYERS).map(entry).collect();
    Side::Rank(Arc::new(RankManifest::new(layout, Placement::default(), entries).unwrap()))
}

/// (source, destination, bytes) of every block of pages 3, 4, 5 to 1, 2, 3, and blocks of a batch.
fn lowered(limits: Capabilities) -> (Vec<(u64, u64, u64)>, Vec<usize>) {
    let route = agree(rank(1000), rank(9000)).unwrap().route(0, 0).unwrap();
    let plan = Plan::new(route, Runs::new(&[3, 4, 5], &[1, 2, 3]).unwrap()).unwrap();
    let lowered = lower(&plan, &limits).unwrap();
    assert_eq!(
        (lowered.total_bytes, lowered.block_count),
        (plan.nbytes(), kv_planner::lower::count(&plan, &limits).unwrap())
    );
    let rows = |batch: &Batch| -> Vec<(u64, u64, u64)> {
        (0..batch.source.len()).map(|row| (batch.source[row], batch.destination[row], batch.nbytes[row])).collect()
    };
    (lowered.batches.iter().flat_map(rows).collect(), lowered.batches.iter().map(|batch| batch.source.len()).collect())
}

#[test]
fn a_run_is_one_block_up_to_the_longest_and_is_cut_above_it() {
    let whole = |layer: u64| (1006 + 100 * layer, 9002 + 100 * layer, 6);
    let all: Vec<_> = (0..LAYERS).map(whole).collect();
    for bytes in [None, Some(7), Some(6)] {
        let limits = Capabilities { max_block_bytes: bytes, ..Capabilities::default() };
        assert_eq!(lowered(limits), (all.clone(), vec![3]));
    }
    for (longest, lengths) in [(5, vec![5, 1]), (4, vec![4, 2]), (3, vec![3, 3]), (1, vec![1; 6])] {
        let mut wanted = Vec::new();
        for (source, destination, _) in &all {
            let mut done = 0;
            for length in &lengths {
                wanted.push((source + done, destination + done, *length));
                done += length;
            }
        }
        let limits = Capabilities { max_block_bytes: Some(longest), ..Capabilities::default() };
        assert_eq!(lowered(limits).0, wanted, "{longest}");
    }
}

#[test]
fn batches_are_filled_one_after_another() {
    for (most, sizes) in [(1, vec![1, 1, 1]), (2, vec![2, 1]), (3, vec![3]), (4, vec![3])] {
        let limits = Capabilities { max_entries_per_batch: Some(most), ..Capabilities::default() };
        assert_eq!(lowered(limits).1, sizes);
        let limits = Capabilities { max_entries_per_batch: Some(most), max_block_bytes: Some(4), max_blocks: Some(6) };
        let (blocks, sizes) = lowered(limits);
        assert_eq!((blocks.len(), sizes.iter().sum()), (6, 6));
        assert!(sizes[..sizes.len() - 1].iter().all(|size| *size as u64 == most));
    }
}

//! Which replica sends, where ranks hold heads in other than the customary shares.

use std::sync::Arc;

use kv_planner::*;

const PAGE: u64 = 2;

fn layout(total_heads: u64) -> Arc<ModelLayout> {
    let spec = ComponentSpec {
        component: Component::Key,
        part: Part::Target,
        layer_ids: vec![0],
        dtype: DType::UInt8,
        total_heads,
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
    Arc::new(layout.validated().unwrap())
}

fn rank(total_heads: u64, placement: Placement, head_range: (u64, u64), items: u64) -> Arc<RankManifest> {
    let item_bytes = PAGE * (head_range.1 - head_range.0);
    let entry = BufferEntry {
        component: Component::Key,
        part: Part::Target,
        layer_id: 0,
        device: "cpu".into(),
        address: 64,
        nbytes: item_bytes * items,
        item_stride: item_bytes,
        item_bytes,
        head_range,
        occurrence: 0,
    };
    Arc::new(RankManifest::new(layout(total_heads), placement, vec![entry]).unwrap())
}

fn tp(tp_rank: u64, tp_size: u64) -> Placement {
    Placement { tp_rank, tp_size, ..Placement::default() }
}

fn side(manifests: Vec<Arc<RankManifest>>) -> Side {
    Side::Deployment(Arc::new(Deployment::new(manifests).unwrap()))
}

fn heads(agreement: &Agreement, local: usize, remote: usize) -> Vec<(u64, u64)> {
    agreement.route(local, remote).unwrap().pairs().iter().map(|pair| pair.source_heads).collect()
}

/// Rank 0 holds both heads, ranks 1 and 2 one each: rank 0 sends both in one piece.
#[test]
fn neighbouring_heads_of_one_sender_are_one_pair() {
    let local = side(vec![rank(2, tp(0, 3), (0, 2), 4), rank(2, tp(1, 3), (0, 1), 4), rank(2, tp(2, 3), (1, 2), 4)]);
    let agreement = agree(local, side(vec![rank(2, tp(0, 1), (0, 2), 4)])).unwrap();
    assert_eq!(heads(&agreement, 0, 0), [(0, 2)]);
    assert!(heads(&agreement, 1, 0).is_empty() && heads(&agreement, 2, 0).is_empty());
    assert_eq!(agreement.route(0, 0).unwrap().pairs()[0].rows, 1);
    let back = agreement.reversed();
    assert_eq!(
        (heads(&back, 0, 0), heads(&back, 0, 1), heads(&back, 0, 2)),
        (vec![(0, 2)], vec![(0, 1)], vec![(1, 2)])
    );
}

/// Ranks 0 and 1 hold overlapping ranges: each head still has one sender.
#[test]
fn overlapping_ranges_send_each_head_once() {
    let ranges = [(0, 2), (1, 3), (0, 3), (0, 3)];
    let manifests = ranges.iter().enumerate().map(|(index, range)| rank(3, tp(index as u64, 4), *range, 4));
    let agreement = agree(side(manifests.collect()), side(vec![rank(3, tp(0, 1), (0, 3), 4)])).unwrap();
    let mut sent: Vec<u64> = (0..4)
        .flat_map(|local| heads(&agreement, local, 0).into_iter().map(move |range| (local, range)))
        .flat_map(|(local, range)| (range.0..range.1).map(move |head| head + ranges[local].0))
        .collect();
    sent.sort_unstable();
    assert_eq!(sent, [0, 1, 2]);
    assert_eq!((heads(&agreement, 0, 0), heads(&agreement, 1, 0)), (vec![(0, 2)], vec![(1, 2)]));
}

#[test]
fn replicas_of_another_data_parallel_group_do_not_send() {
    let place = |dp_rank, tp_rank| Placement { dp_rank, dp_size: 2, ..tp(tp_rank, 2) };
    let local = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(dp, tp_rank)| rank(1, place(dp, tp_rank), (0, 1), 4));
    let remote = [0, 1].map(|tp_rank| rank(1, tp(tp_rank, 2), (0, 1), 4));
    let agreement = agree(side(local.to_vec()), side(remote.to_vec())).unwrap();
    for group in [0, 2] {
        for tp_rank in 0..2 {
            assert_eq!(heads(&agreement, group + tp_rank, tp_rank), [(0, 1)]);
            assert!(heads(&agreement, group + tp_rank, 1 - tp_rank).is_empty());
        }
    }
}

#[test]
fn pages_are_checked_against_both_ends() {
    let agreement = agree(Side::Rank(rank(1, tp(0, 1), (0, 1), 4)), Side::Rank(rank(1, tp(0, 1), (0, 1), 3))).unwrap();
    let plan = |source, destination| {
        let runs = Runs::new(&[source], &[destination]).unwrap();
        Plan::new(agreement.route(0, 0).unwrap(), runs).map_err(|error| error.detail.subject)
    };
    assert!(plan(3, 2).is_ok());
    assert_eq!(plan(4, 2).unwrap_err(), "source_pages for key/target layer 0");
    assert_eq!(plan(3, 3).unwrap_err(), "destination_pages for key/target layer 0");
}

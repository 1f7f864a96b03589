//! A rank that stands alone for its side must hold what its placement says.

use std::sync::Arc;

use kv_planner::*;

const BOTH: [Part; 2] = [Part::Target, Part::Draft];

fn spec(component: Component, part: Part, layer_ids: &[u64]) -> ComponentSpec {
    ComponentSpec {
        component,
        part,
        layer_ids: layer_ids.to_vec(),
        dtype: DType::UInt8,
        total_heads: 2,
        dims: 4,
        axes: [Axis::Token, Axis::Head, Axis::Dim],
        item_kind: ItemKind::Page,
        compression: 1,
        rows: 1,
        groups: vec![],
    }
}

fn layout() -> Arc<ModelLayout> {
    let components = vec![
        spec(Component::Key, Part::Target, &[0, 1, 1, 2]),
        spec(Component::IndexKey, Part::Target, &[1, 2]),
        spec(Component::Key, Part::Draft, &[3]),
    ];
    let layout =
        ModelLayout { components, page_size: 2, fingerprint: "m".into(), kernel_block_size: None, format_version: 1 };
    Arc::new(layout.validated().unwrap())
}

fn name(component: Component, part: Part, layer_id: u64, occurrence: u64) -> EntryName {
    EntryName { component, part, layer_id, occurrence }
}

/// A rank with the given heads of every name; `None` leaves the buffer out.
fn rank(placement: Placement, heads: impl Fn(EntryName) -> Option<(u64, u64)>) -> Side {
    let layout = layout();
    let mut entries = Vec::new();
    for spec in &layout.components {
        for (layer_id, count) in spec.counted_ids() {
            for occurrence in 0..count {
                let name = name(spec.component, spec.part, layer_id, occurrence);
                let Some(head_range) = heads(name) else { continue };
                let item_bytes = 8 * (head_range.1 - head_range.0);
                entries.push(BufferEntry {
                    component: spec.component,
                    part: spec.part,
                    layer_id,
                    device: "cpu".into(),
                    address: 1000 * (1 + entries.len() as u64),
                    nbytes: item_bytes * 4,
                    item_stride: item_bytes,
                    item_bytes,
                    head_range,
                    occurrence,
                });
            }
        }
    }
    Side::Rank(Arc::new(RankManifest::new(layout, placement, entries).unwrap()))
}

fn whole() -> Side {
    rank(Placement::default(), |_| Some((0, 2)))
}

fn stage(pp_rank: u64) -> Placement {
    Placement { pp_rank, pp_size: 2, ..Placement::default() }
}

fn tp(tp_rank: u64) -> Placement {
    Placement { tp_rank, tp_size: 2, ..Placement::default() }
}

fn differences(local: Side, remote: Side, parts: &[Part]) -> Vec<(String, String, String)> {
    match agree_on(local, remote, parts) {
        Ok(_) => Vec::new(),
        Err(error) => {
            assert_eq!(error.kind, ErrorKind::LayoutMismatch, "{error}");
            let found = error.detail.differences.into_iter();
            found
                .map(|one| {
                    assert!(!one.consequence.is_empty() && !one.remedy.is_empty());
                    (one.field, one.local.to_string(), one.remote.to_string())
                })
                .collect()
        }
    }
}

fn expect(found: Vec<(String, String, String)>, wanted: &[(&str, &str, &str)]) {
    let found: Vec<_> = found.iter().map(|(a, b, c)| (a.as_str(), b.as_str(), c.as_str())).collect();
    assert_eq!(found, wanted);
}

#[test]
fn every_forgotten_buffer_of_the_only_rank_is_found_on_either_side() {
    let all = layout();
    for spec in &all.components {
        for (layer_id, count) in spec.counted_ids() {
            for occurrence in 0..count {
                let gone = name(spec.component, spec.part, layer_id, occurrence);
                let partial = || rank(Placement::default(), |name| (name != gone).then_some((0, 2)));
                let field = gone.to_string();
                expect(differences(partial(), whole(), &BOTH), &[(&field, "absent", "heads 0..2")]);
                expect(differences(whole(), partial(), &BOTH), &[(&field, "heads 0..2", "absent")]);
                assert_eq!(differences(partial(), partial(), &BOTH).len(), 2, "both sides forgot the same buffer");
            }
        }
    }
}

#[test]
fn layers_that_miss_alike_are_one_difference() {
    let partial = rank(Placement::default(), |name| (name.component == Component::IndexKey).then_some((0, 2)));
    expect(
        differences(whole(), partial, &BOTH),
        &[
            ("key/target layers 0..2", "heads 0..2", "absent"),
            ("key/target layer 1 occurrence 1", "heads 0..2", "absent"),
            ("key/draft layer 3", "heads 0..2", "absent"),
        ],
    );
}

#[test]
fn only_the_parts_that_are_agreed_must_be_there() {
    let no_draft = || rank(Placement::default(), |name| (name.part == Part::Target).then_some((0, 2)));
    expect(differences(no_draft(), whole(), &[Part::Target]), &[]);
    expect(differences(no_draft(), whole(), &BOTH), &[("key/draft layer 3", "absent", "heads 0..2")]);
}

#[test]
fn the_only_tensor_parallel_rank_holds_all_heads() {
    let short = name(Component::Key, Part::Target, 2, 0);
    for place in [Placement::default(), stage(1)] {
        let partial = rank(place, |name| Some(if name == short { (0, 1) } else { (0, 2) }));
        expect(differences(partial, whole(), &BOTH), &[("key/target layer 2", "heads 0..1", "heads 0..2")]);
    }
    let none = rank(Placement::default(), |_| Some((0, 0)));
    assert_eq!(differences(none, whole(), &BOTH).len(), 4);
}

#[test]
fn one_of_several_ranks_holds_every_layer_and_some_heads_of_each_or_none_at_all() {
    let gone = name(Component::IndexKey, Part::Target, 2, 0);
    let partial = rank(tp(1), |name| (name != gone).then_some((1, 2)));
    expect(differences(partial, whole(), &BOTH), &[("index_key/target layer 2", "absent", "heads 1..2")]);
    let partial = rank(tp(1), |name| Some(if name == gone { (1, 1) } else { (1, 2) }));
    expect(differences(partial, whole(), &BOTH), &[("index_key/target layer 2", "heads 1..1", "heads 1..2")]);
    for heads in [(0, 1), (0, 2), (0, 0)] {
        expect(differences(rank(tp(0), |_| Some(heads)), whole(), &BOTH), &[]);
    }
}

#[test]
fn one_of_several_stages_holds_its_layers_whole() {
    let second = |name: EntryName| (name.layer_id >= 1).then_some((0, 2));
    expect(differences(rank(stage(1), second), whole(), &BOTH), &[]);
    expect(differences(rank(stage(0), |_| None), whole(), &BOTH), &[]);
    let gone = name(Component::Key, Part::Target, 1, 1);
    let partial = rank(stage(1), |name| if name == gone { None } else { second(name) });
    expect(differences(whole(), partial, &BOTH), &[("key/target layer 1 occurrence 1", "heads 0..2", "absent")]);
}

//! Owns the check that a rank on its own holds what its placement says it must. It
//! does not own the ranks of a side together, nor the comparison of two sides.

use std::collections::{BTreeMap, BTreeSet};

use crate::agree::id_list;
use crate::error::{Difference, Value};
use crate::heads::{HeadRange, split_heads};
use crate::layout::ComponentSpec;
use crate::manifest::{EntryName, RankManifest};
use crate::words::Part;

/// Which of two sides a rank speaks for: where its value stands in a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The sending side.
    Local,
    /// The receiving side.
    Remote,
}

/// What a rank has under a name that is not enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Held {
    Nothing,
    Heads(HeadRange),
}

/// What a rank lacks of what its placement alone says that it must hold:
///
/// 1. the only stage holds every name of the layout, and one stage of several holds
///    a layer whole or not at all; 2. the only tensor-parallel rank holds all heads of
///    what it holds; 3. one of several holds some, or, idle, none of a component.
pub(crate) fn lacks(rank: &RankManifest, end: End, parts: &[Part]) -> Vec<Difference> {
    let wanted = || rank.layout.components.iter().filter(|spec| parts.contains(&spec.part));
    let own: BTreeSet<u64> = rank.entries.iter().map(|entry| entry.layer_id).collect();
    let alone = rank.placement.pp_size == 1;
    let mut found = Vec::new();
    for spec in wanted() {
        let mut short: BTreeMap<(u64, Held), Vec<u64>> = BTreeMap::new();
        let idle = is_idle(rank, spec);
        for (layer_id, count) in spec.counted_ids() {
            if !alone && !own.contains(&layer_id) {
                continue;
            }
            for occurrence in 0..count {
                let name = EntryName { component: spec.component, part: spec.part, layer_id, occurrence };
                if let Some(held) = shortage(rank, spec, name, idle) {
                    short.entry((occurrence, held)).or_default().push(layer_id);
                }
            }
        }
        for ((occurrence, held), layers) in short {
            found.push(difference(rank, spec, occurrence, held, &layers, end));
        }
    }
    found
}

fn shortage(rank: &RankManifest, spec: &ComponentSpec, name: EntryName, idle: bool) -> Option<Held> {
    let Some((_, entry)) = rank.find(name) else { return Some(Held::Nothing) };
    let enough = match rank.placement.tp_size {
        1 => entry.head_range == (0, spec.total_heads),
        _ => entry.heads() > 0 || idle,
    };
    (!enough).then_some(Held::Heads(entry.head_range))
}

/// Whether the rank says that it holds no head of a component at all.
fn is_idle(rank: &RankManifest, spec: &ComponentSpec) -> bool {
    let mut same = rank.entries.iter().filter(|entry| entry.component == spec.component && entry.part == spec.part);
    same.all(|entry| entry.heads() == 0)
}

fn difference(
    rank: &RankManifest,
    spec: &ComponentSpec,
    occurrence: u64,
    held: Held,
    layers: &[u64],
    end: End,
) -> Difference {
    let place = &rank.placement;
    let span = |(start, stop): HeadRange| format!("heads {start}..{stop}");
    let expected = match split_heads(spec.total_heads, place.tp_rank, place.tp_size) {
        Ok(range) => span(range),
        Err(_) => format!("some of {}", span((0, spec.total_heads))),
    };
    let (own, why) = match held {
        Held::Nothing if place.pp_size == 1 => ("absent".to_owned(), "is its side's only stage and lacks them"),
        Held::Nothing => ("absent".to_owned(), "holds these layers otherwise and lacks these buffers"),
        Held::Heads(range) if place.tp_size == 1 => (span(range), "is its stage's only rank and lacks heads"),
        Held::Heads(range) => (span(range), "holds heads of other layers and none here"),
    };
    let (local, remote) = match end {
        End::Local => (own, expected),
        End::Remote => (expected, own),
    };
    let plural = if layers.len() == 1 { "" } else { "s" };
    let mut field = format!("{} layer{plural} {}", spec.name(), id_list(layers));
    if occurrence > 0 {
        field.push_str(&format!(" occurrence {occurrence}"));
    }
    Difference {
        field,
        local: Value::Text(local),
        remote: Value::Text(remote),
        consequence: format!("the rank {place} {why}, so they would never be sent or filled"),
        remedy: "publish a buffer for each, correct the placement, or take them out of the layout".into(),
    }
}

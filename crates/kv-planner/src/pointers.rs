//! Owns names for bare lists of pointers: peers that publish addresses in the field's
//! customary order and no names. A list that can be read in two ways gets none. It
//! does not own addresses, nor the routes that names lead to.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::agree::id_list;
use crate::error::{Difference, ErrorKind, PlanError, Result, Value};
use crate::layout::ModelLayout;
use crate::manifest::EntryName;
use crate::words::Part;

/// More layers than this are not tried window by window.
const MOST_LAYERS: usize = 1024;

/// Names of `count` pointers in the customary order: the target's components one after
/// another in the layout's order, each over its layers in the order of its ids, then
/// the draft's in the same way.
///
/// `layers` are the global ids of the layers whose buffers are in the list. Without
/// them a stage is taken to hold neighbouring target layers and all draft layers or
/// none, and there must be exactly one such stage with `count` buffers.
pub fn name_pointers(layout: &ModelLayout, count: u64, layers: Option<&[u64]>) -> Result<Vec<EntryName>> {
    let known: BTreeSet<u64> = layout.components.iter().flat_map(|spec| spec.layer_ids.iter().copied()).collect();
    if let Some(layers) = layers {
        if let Some(foreign) = layers.iter().find(|id| !known.contains(id)) {
            let all: Vec<u64> = known.iter().copied().collect();
            return Err(refuse("layers", *foreign, id_list(&all), "the layout has no such layer"));
        }
        let names = names(layout, &layers.iter().copied().collect());
        if names.len() as u64 != count {
            let why = format!(
                "layers {} have {} buffers, so pointers would be paired by chance",
                id_list(layers),
                names.len()
            );
            return Err(refuse("pointers", count, names.len(), &why));
        }
        return Ok(names);
    }
    match &readings(layout, count)?[..] {
        [layers] => Ok(names(layout, layers)),
        [] => Err(refuse("pointers", count, "no neighbouring layers", "no stage of the layout has that many buffers")),
        [first, second, ..] => {
            let spell = |layers: &BTreeSet<u64>| id_list(&layers.iter().copied().collect::<Vec<_>>());
            let both = format!("layers {}, or layers {}", spell(first), spell(second));
            Err(refuse("pointers", count, both, "the list can be read in more than one way"))
        }
    }
}

/// Positions of the source's names in the destination's list, in the order of the
/// source; every name of the source must be there, once on each side.
pub fn pair_names(source: &[EntryName], destination: &[EntryName]) -> Result<Vec<(u64, u64)>> {
    let there = positions("destination", destination)?;
    positions("source", source)?;
    let missing: Vec<&EntryName> = source.iter().filter(|name| !there.contains_key(name)).collect();
    if !missing.is_empty() {
        let absent = |name: &&EntryName| Difference {
            field: name.to_string(),
            local: "present".into(),
            remote: Value::Absent,
            consequence: "the buffer would be sent nowhere, or over another one".into(),
            remedy: "publish the buffer on the destination, or leave its part out on the source".into(),
        };
        return Err(PlanError::mismatch(missing.iter().map(absent).collect()));
    }
    Ok(source.iter().enumerate().map(|(position, name)| (position as u64, there[name])).collect())
}

fn positions(side: &str, names: &[EntryName]) -> Result<HashMap<EntryName, u64>> {
    let mut found = HashMap::with_capacity(names.len());
    for (position, name) in names.iter().enumerate() {
        if let Some(first) = found.insert(*name, position as u64) {
            let subject = format!("{side}[{position}] ({name})");
            return Err(refuse(&subject, first, position, "two pointers carry this name and either could be paired"));
        }
    }
    Ok(found)
}

fn refuse(subject: &str, local: impl Into<Value>, remote: impl Into<Value>, why: &str) -> PlanError {
    PlanError::new(
        ErrorKind::UnnamedPointers,
        subject,
        local,
        remote,
        why,
        "publish component, part, global layer id and occurrence of every pointer, or the global ids of the rank's layers",
    )
}

/// Names of the layout's buffers on some layers, in the customary order.
fn names(layout: &ModelLayout, layers: &BTreeSet<u64>) -> Vec<EntryName> {
    let mut names = Vec::new();
    for part in Part::ALL {
        for spec in layout.components.iter().filter(|spec| spec.part == *part) {
            let mut seen: BTreeMap<u64, u64> = BTreeMap::new();
            for layer_id in &spec.layer_ids {
                let next = seen.entry(*layer_id).or_insert(0);
                if layers.contains(layer_id) {
                    let (component, part, layer_id, occurrence) = (spec.component, *part, *layer_id, *next);
                    names.push(EntryName { component, part, layer_id, occurrence });
                }
                *next += 1;
            }
        }
    }
    names
}

/// Every stage that has `count` buffers: a window of target layers, with the draft's
/// layers or without.
fn readings(layout: &ModelLayout, count: u64) -> Result<Vec<BTreeSet<u64>>> {
    let buffers = |part: Part| -> BTreeMap<u64, u64> {
        let mut counts = BTreeMap::new();
        for spec in layout.components.iter().filter(|spec| spec.part == part) {
            spec.layer_ids.iter().for_each(|id| *counts.entry(*id).or_insert(0) += 1);
        }
        counts
    };
    let target: Vec<(u64, u64)> = buffers(Part::Target).into_iter().collect();
    let draft = buffers(Part::Draft);
    if target.len() > MOST_LAYERS {
        return Err(refuse("layers", target.len(), MOST_LAYERS, "there are too many layers to try every stage"));
    }
    let drafts: u64 = draft.values().sum();
    let mut found = Vec::new();
    for with_draft in [false, true] {
        let Some(wanted) = count.checked_sub(if with_draft { drafts } else { 0 }) else { continue };
        if with_draft && drafts == 0 {
            continue;
        }
        let ids = |window: &[(u64, u64)]| -> BTreeSet<u64> {
            let own = window.iter().map(|(id, _)| *id);
            if with_draft { own.chain(draft.keys().copied()).collect() } else { own.collect() }
        };
        if wanted == 0 {
            found.push(ids(&[]));
            continue;
        }
        for start in 0..target.len() {
            let mut sum = 0;
            for stop in start..target.len() {
                sum += target[stop].1;
                if sum == wanted {
                    found.push(ids(&target[start..=stop]));
                }
                if sum >= wanted {
                    break;
                }
            }
        }
    }
    Ok(found)
}

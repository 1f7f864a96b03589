//! Owns the check that the ranks of one side together hold every layer and head
//! once. It does not own the manifests' own invariants or the other side.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::address;
use crate::error::{ErrorKind, PlanError, Result, Value};
use crate::layout::{ComponentSpec, ModelLayout};
use crate::manifest::{EntryName, Placement, RankManifest};

/// The ranks of one side, in whole data-parallel groups: complete and disjoint.
///
/// A data-parallel group is a whole copy, so one of several can be a side.
///
/// Invariants: 1. one layout and one set of sizes; 2. every place of the groups that
/// are given taken once; 3. in each group every layer of every component is held by
/// one stage; 4. its ranks hold every head, and hold none twice unless there are more
/// tensor-parallel ranks than heads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Deployment {
    manifests: Vec<Arc<RankManifest>>,
}

fn incomplete(
    subject: String,
    local: impl Into<Value>,
    remote: impl Into<Value>,
    why: &str,
    remedy: &str,
) -> PlanError {
    PlanError::new(ErrorKind::IncompleteDeployment, subject, local, remote, why, remedy)
}

impl Deployment {
    /// Builds a deployment, or says what is missing, double or inconsistent.
    pub fn new(manifests: Vec<Arc<RankManifest>>) -> Result<Self> {
        let Some(first) = manifests.first() else {
            return Err(incomplete(
                "manifests".into(),
                0u64,
                1u64,
                "a side without ranks holds nothing",
                "give the manifest of every rank",
            ));
        };
        let mut places: BTreeMap<Placement, usize> = BTreeMap::new();
        for (index, manifest) in manifests.iter().enumerate() {
            let sizes_differ = manifest.placement.sizes() != first.placement.sizes();
            if sizes_differ || manifest.layout != first.layout {
                let what = if sizes_differ { "parallel sizes" } else { "layout" };
                return Err(PlanError::new(
                    ErrorKind::InconsistentDeployment,
                    format!("{what} of manifest {index}"),
                    manifest.placement.to_string(),
                    first.placement.to_string(),
                    "ranks of one side must share one layout and one parallel geometry",
                    "publish the same ModelLayout and sizes on every rank",
                ));
            }
            if let Some(other) = places.insert(manifest.placement, index) {
                return Err(PlanError::new(
                    ErrorKind::InconsistentDeployment,
                    format!("placement {}", manifest.placement),
                    index,
                    other,
                    "two manifests claim the same place",
                    "give each rank its own placement; a restarted rank replaces its old manifest",
                ));
            }
        }
        let [pp_size, tp_size, dcp_size, dp_size] = first.placement.sizes();
        let expected = address::product(&[pp_size, tp_size, dcp_size])?;
        let mut groups: BTreeMap<u64, u64> = BTreeMap::new();
        for manifest in &manifests {
            *groups.entry(manifest.placement.dp_rank).or_insert(0) += 1;
        }
        for (dp_rank, ranks) in groups {
            if ranks != expected {
                let group = if dp_size > 1 { format!(" of dp_rank {dp_rank}") } else { String::new() };
                return Err(incomplete(
                    format!("manifests{group}"),
                    ranks,
                    expected,
                    "ranks are missing",
                    "wait until every rank has published its manifest, or leave out the group as a whole",
                ));
            }
            (0..dcp_size).try_for_each(|dcp_rank| check_group(&manifests, (dp_rank, dcp_rank)))?;
        }
        Ok(Deployment { manifests })
    }

    /// Every rank, in the order given.
    pub fn manifests(&self) -> &[Arc<RankManifest>] {
        &self.manifests
    }

    /// The layout that all ranks share.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        &self.manifests[0].layout
    }
}

/// A rank's hold on a name: placement and head range.
type Hold = (Placement, (u64, u64));

/// Checks the ranks of one data-parallel group that hold the same tokens.
fn check_group(manifests: &[Arc<RankManifest>], group: (u64, u64)) -> Result<()> {
    let mut holds: HashMap<EntryName, Vec<Hold>> = HashMap::new();
    for manifest in manifests.iter().filter(|manifest| manifest.placement.group() == group) {
        for entry in manifest.entries.iter().filter(|entry| entry.heads() > 0) {
            holds.entry(entry.name()).or_default().push((manifest.placement, entry.head_range));
        }
    }
    for spec in &manifests[0].layout.components {
        for (layer_id, count) in spec.counted_ids() {
            for occurrence in 0..count {
                let name = EntryName { component: spec.component, part: spec.part, layer_id, occurrence };
                check_name(spec, name, holds.get_mut(&name).map(Vec::as_mut_slice).unwrap_or_default())?;
            }
        }
    }
    Ok(())
}

fn check_name(spec: &ComponentSpec, name: EntryName, holds: &mut [Hold]) -> Result<()> {
    if holds.is_empty() {
        return Err(incomplete(
            name.to_string(),
            "held by no rank",
            format!("heads 0..{}", spec.total_heads),
            "the layer would never be sent or received",
            "publish it on the stage that owns it, or take it out of the layout",
        ));
    }
    let stages: BTreeSet<u64> = holds.iter().map(|(placement, _)| placement.pp_rank).collect();
    if stages.len() > 1 {
        let stages: Vec<String> = stages.iter().map(u64::to_string).collect();
        return Err(incomplete(
            name.to_string(),
            format!("stages {}", stages.join(", ")),
            "one stage",
            "the layer is doubly owned, so two senders would write it",
            "publish each layer on one stage",
        ));
    }
    holds.sort_by_key(|(_, range)| *range);
    let mut covered = 0;
    for (index, (placement, range)) in holds.iter().enumerate() {
        if range.0 > covered {
            return Err(missing_heads(spec, name, covered, range.0));
        }
        if range.0 < covered && placement.tp_size <= spec.total_heads {
            let (other, other_range) = &holds[index - 1];
            return Err(incomplete(
                name.to_string(),
                format!("heads {}..{} on {placement}", range.0, range.1),
                format!("heads {}..{} on {other}", other_range.0, other_range.1),
                "a head range is doubly owned although there are no more ranks than heads",
                "give each rank its own share of the heads",
            ));
        }
        covered = covered.max(range.1);
    }
    if covered < spec.total_heads {
        return Err(missing_heads(spec, name, covered, spec.total_heads));
    }
    Ok(())
}

fn missing_heads(spec: &ComponentSpec, name: EntryName, start: u64, stop: u64) -> PlanError {
    incomplete(
        name.to_string(),
        format!("heads {start}..{stop} held by no rank"),
        format!("heads 0..{}", spec.total_heads),
        "those heads would never be sent or received",
        "check the head ranges that the ranks publish",
    )
}

//! Owns the comparison of two sides and, once they agree, which rank sends which
//! head to whom. It does not own the byte arithmetic of a route.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::complete::{End, lacks};
use crate::deployment::Deployment;
use crate::error::{Difference, ErrorKind, PlanError, Result, Value};
use crate::heads::{HeadRange, Owners, customary_owners, sends};
use crate::layout::{ComponentSpec, ModelLayout};
use crate::manifest::{BufferEntry, EntryName, RankManifest};
use crate::route::Route;
use crate::words::Part;

/// One side of an agreement: a whole deployment, or one rank of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Side {
    /// All ranks.
    Deployment(Arc<Deployment>),
    /// One rank; the others are known by its placement only.
    Rank(Arc<RankManifest>),
}

impl Side {
    /// The ranks that are known.
    pub fn manifests(&self) -> &[Arc<RankManifest>] {
        match self {
            Side::Deployment(deployment) => deployment.manifests(),
            Side::Rank(manifest) => std::slice::from_ref(manifest),
        }
    }

    /// The layout of this side.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        &self.manifests()[0].layout
    }

    /// Tensor-parallel ranks that hold `head` of `name` in the data-parallel group
    /// of rank `index`.
    fn owners(&self, index: usize, name: EntryName, entry: &BufferEntry, total: u64, head: u64) -> Owners {
        let own = &self.manifests()[index].placement;
        match self {
            Side::Rank(_) => customary_owners(total, own.tp_rank, own.tp_size, entry.head_range),
            Side::Deployment(_) => {
                let mut ranks: Vec<u64> = self
                    .holds(index, name)
                    .filter(|(_, range)| range.0 <= head && head < range.1)
                    .map(|(tp_rank, _)| tp_rank)
                    .collect();
                ranks.sort_unstable();
                Owners::Listed(ranks)
            }
        }
    }

    /// Rank and head range of every known hold on `name` in the group of `index`.
    fn holds(&self, index: usize, name: EntryName) -> impl Iterator<Item = (u64, HeadRange)> {
        let group = self.manifests()[index].placement.group();
        self.manifests()
            .iter()
            .filter(move |manifest| manifest.placement.group() == group)
            .filter_map(move |manifest| Some((manifest.placement.tp_rank, manifest.find(name)?.1.head_range)))
    }
}

/// Two sides that may transfer: the local one sends, the remote one receives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Agreement {
    /// Sending side.
    pub local: Side,
    /// Receiving side.
    pub remote: Side,
    /// Parts that were compared and are routed.
    pub parts: Vec<Part>,
}

impl Agreement {
    /// Layout of the sending side.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        self.local.layout()
    }

    /// The agreement of the opposite direction.
    pub fn reversed(&self) -> Agreement {
        Agreement { local: self.remote.clone(), remote: self.local.clone(), parts: self.parts.clone() }
    }

    /// What rank `local_index` sends to rank `remote_index`; may be empty.
    pub fn route(&self, local_index: usize, remote_index: usize) -> Result<Route> {
        let pick = |side: &Side, name: &str, index: usize| {
            side.manifests().get(index).cloned().ok_or_else(|| {
                PlanError::new(
                    ErrorKind::ArgumentError,
                    format!("{name}_index"),
                    index,
                    format!("an index below {}", side.manifests().len()),
                    "the side has no such rank",
                    "count the manifests of that side from 0",
                )
            })
        };
        let source = pick(&self.local, "local", local_index)?;
        source.placement.can_send()?;
        let destination = pick(&self.remote, "remote", remote_index)?;
        let share = |name: EntryName, from: &BufferEntry, to: &BufferEntry, total: u64, common: HeadRange| {
            self.share((local_index, from), (remote_index, to), name, total, common)
        };
        Route::build(source, destination, &self.parts, share)
    }

    /// The ranges within `common` that this source sends to this destination. The
    /// holders change only where some rank's range begins or ends.
    fn share(
        &self,
        (local_index, from): (usize, &BufferEntry),
        (remote_index, to): (usize, &BufferEntry),
        name: EntryName,
        total: u64,
        common: HeadRange,
    ) -> Vec<HeadRange> {
        let ranges = self.local.holds(local_index, name).chain(self.remote.holds(remote_index, name));
        let cuts: BTreeSet<u64> = ranges.flat_map(|(_, range)| [range.0, range.1]).collect();
        let cuts: Vec<u64> = cuts.range(common.0..=common.1).copied().collect();
        let from_rank = self.local.manifests()[local_index].placement.tp_rank;
        let to_rank = self.remote.manifests()[remote_index].placement.tp_rank;
        let mut mine: Vec<HeadRange> = Vec::new();
        for cut in cuts.windows(2) {
            let sources = self.local.owners(local_index, name, from, total, cut[0]);
            let receivers = self.remote.owners(remote_index, name, to, total, cut[0]);
            if sends(&sources, &receivers, from_rank, to_rank) {
                match mine.last_mut() {
                    Some(last) if last.1 == cut[0] => last.1 = cut[1],
                    _ => mine.push((cut[0], cut[1])),
                }
            }
        }
        mine
    }
}

/// Compares two sides over all their parts.
pub fn agree(local: Side, remote: Side) -> Result<Agreement> {
    agree_on(local, remote, &[Part::Target, Part::Draft])
}

/// Compares two sides over some parts; only those are routed afterwards. Leaving
/// the draft out is how a side without a draft model serves one that has it. A side
/// that is one rank must also hold what its placement says, as a deployment does.
pub fn agree_on(local: Side, remote: Side, parts: &[Part]) -> Result<Agreement> {
    if parts.is_empty() {
        return Err(PlanError::new(
            ErrorKind::ArgumentError,
            "parts",
            "an empty list",
            "target | draft",
            "nothing would be compared or sent",
            "name at least one part",
        ));
    }
    local.manifests()[0].placement.can_send()?;
    let differences = differences(&local, &remote, parts);
    if differences.is_empty() {
        let mut parts = parts.to_vec();
        parts.sort_unstable();
        parts.dedup();
        return Ok(Agreement { local, remote, parts });
    }
    Err(PlanError::mismatch(differences))
}

fn differ(
    found: &mut Vec<Difference>,
    field: impl Into<String>,
    local: impl Into<Value>,
    remote: impl Into<Value>,
    consequence: impl Into<String>,
    remedy: &str,
) {
    let (local, remote) = (local.into(), remote.into());
    if local != remote {
        let (field, consequence) = (field.into(), consequence.into());
        found.push(Difference { field, local, remote, consequence, remedy: remedy.to_owned() });
    }
}

fn differences(local: &Side, remote: &Side, parts: &[Part]) -> Vec<Difference> {
    let (ours, theirs) = (local.layout(), remote.layout());
    let mut found = Vec::new();
    differ(
        &mut found,
        "format_version",
        ours.format_version,
        theirs.format_version,
        "the sides may give the same field another meaning",
        "install the same version on both sides",
    );
    differ(
        &mut found,
        "fingerprint",
        ours.fingerprint.as_str(),
        theirs.fingerprint.as_str(),
        "the receiver would continue with another model's cache",
        "serve the same weights on both sides",
    );
    differ(
        &mut found,
        "page_size",
        ours.page_size,
        theirs.page_size,
        "a page of one side is not a page of the other, so tokens would land in wrong slots",
        "start both sides with the same page size",
    );
    differ(
        &mut found,
        "kernel_block_size",
        ours.effective_kernel_block(),
        theirs.effective_kernel_block(),
        "kernels would find tokens at other places inside a page",
        "start both sides with the same kernel block size",
    );
    let wanted = |spec: &&ComponentSpec| parts.contains(&spec.part);
    for mine in ours.components.iter().filter(wanted) {
        match theirs.find(mine.component, mine.part) {
            Some(other) => compare_specs(&mut found, local, remote, mine, other),
            None => differ(&mut found, mine.name(), "present", "absent", MISSING, ADD_IT),
        }
    }
    for other in theirs.components.iter().filter(wanted) {
        if ours.find(other.component, other.part).is_none() {
            differ(&mut found, other.name(), "absent", "present", MISSING, ADD_IT);
        }
    }
    for (side, end) in [(local, End::Local), (remote, End::Remote)] {
        if let Side::Rank(rank) = side {
            found.extend(lacks(rank, end, parts));
        }
    }
    found
}

const MISSING: &str = "one side has buffers that the other neither sends nor fills";
const ADD_IT: &str = "declare it on both sides, or agree on the parts that both have";

fn compare_specs(
    found: &mut Vec<Difference>,
    local: &Side,
    remote: &Side,
    mine: &ComponentSpec,
    other: &ComponentSpec,
) {
    let name = mine.name();
    let bytes = |side: &Side, spec: &ComponentSpec| {
        spec.item_bytes(side.layout().page_size, spec.total_heads).map_or("too many".into(), |n| n.to_string())
    };
    let lengths = format!(
        "an item of all heads is {} bytes locally and {} remotely, so bytes would be misread",
        bytes(local, mine),
        bytes(remote, other)
    );
    let same = "use the same value on both sides";
    differ(found, format!("{name}.dtype"), mine.dtype.as_str(), other.dtype.as_str(), lengths.as_str(), same);
    differ(found, format!("{name}.total_heads"), mine.total_heads, other.total_heads, lengths.as_str(), same);
    differ(found, format!("{name}.dims"), mine.dims, other.dims, lengths.as_str(), same);
    let ratio = "an entry of one side stands for other tokens than the other's";
    differ(found, format!("{name}.compression"), mine.compression, other.compression, ratio, same);
    let window = "a state of one side has another window, so its rows would be misread";
    differ(found, format!("{name}.rows"), mine.rows, other.rows, window, same);
    let spell = |spec: &ComponentSpec| spec.groups.iter().map(u64::to_string).collect::<Vec<_>>().join(" + ");
    let beside = "groups that are sharded one by one begin elsewhere, so heads would be mixed";
    differ(found, format!("{name}.groups"), spell(mine), spell(other), beside, same);
    let unit = "indices of one side count other things than the other's";
    differ(found, format!("{name}.item_kind"), mine.item_kind.as_str(), other.item_kind.as_str(), unit, same);
    if mine.axes != other.axes && !same_byte_order(local, remote, mine, other) {
        let spell = |spec: &ComponentSpec| spec.axes.map(|axis| axis.as_str()).join(",");
        let order = "bytes inside an item are ordered otherwise, so heads and tokens would be swapped";
        differ(
            found,
            format!("{name}.axes"),
            spell(mine),
            spell(other),
            order,
            "use the same axis order on both sides",
        );
    }
    let (ours, theirs) = (mine.counted_ids(), other.counted_ids());
    if ours != theirs {
        let consequence = format!(
            "only local: {}; only remote: {}; those layers would not be filled",
            surplus(&ours, &theirs),
            surplus(&theirs, &ours)
        );
        let (a, b) = (id_list(&mine.layer_ids), id_list(&other.layer_ids));
        found.push(Difference {
            field: format!("{name}.layer_ids"),
            local: a.into(),
            remote: b.into(),
            consequence,
            remedy: "publish the same global layer ids on both sides".into(),
        });
    }
}

/// Two axis orders are one when they differ only in axes of a single element, for
/// example when every rank holds one head.
fn same_byte_order(local: &Side, remote: &Side, mine: &ComponentSpec, other: &ComponentSpec) -> bool {
    let held = |side: &Side| {
        let entries = side.manifests().iter().flat_map(|manifest| manifest.entries.iter());
        entries
            .filter(|entry| entry.component == mine.component && entry.part == mine.part)
            .map(BufferEntry::heads)
            .max()
            .unwrap_or(0)
    };
    let heads = held(local).max(held(remote));
    mine.byte_order(local.layout().page_size, heads) == other.byte_order(remote.layout().page_size, heads)
}

fn surplus(own: &BTreeMap<u64, u64>, other: &BTreeMap<u64, u64>) -> String {
    let ids: Vec<u64> = own
        .iter()
        .flat_map(|(id, count)| {
            let extra = count.saturating_sub(other.get(id).copied().unwrap_or(0));
            std::iter::repeat_n(*id, extra as usize)
        })
        .collect();
    if ids.is_empty() { "none".into() } else { id_list(&ids) }
}

/// Layer ids as errors spell them: sorted, neighbours joined (`0..29, 47`).
pub(crate) fn id_list(ids: &[u64]) -> String {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for id in sorted {
        match spans.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(id) => *last = id,
            _ => spans.push((id, id)),
        }
    }
    let spell = |(first, last): &(u64, u64)| if first == last { first.to_string() } else { format!("{first}..{last}") };
    spans.iter().map(spell).collect::<Vec<_>>().join(", ")
}

//! Owns what one rank publishes: its placement and its named buffers. It does not
//! own what all ranks of a side hold together, nor the comparison of two sides.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::address;
use crate::error::{ErrorKind, PlanError, Result, Value};
use crate::heads::HeadRange;
use crate::layout::{ModelLayout, bad_json};
use crate::overlap::{Strided, first_shared};
use crate::words::{Component, Part};

/// Where a rank stands. Every rank is below its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Pipeline rank (stage).
    pub pp_rank: u64,
    /// Number of stages.
    pub pp_size: u64,
    /// Tensor-parallel rank.
    pub tp_rank: u64,
    /// Number of tensor-parallel ranks.
    pub tp_size: u64,
    /// Decode-context-parallel rank.
    pub dcp_rank: u64,
    /// Number of decode-context-parallel ranks.
    pub dcp_size: u64,
    /// Data-parallel rank.
    pub dp_rank: u64,
    /// Number of data-parallel ranks.
    pub dp_size: u64,
}

impl Default for Placement {
    fn default() -> Self {
        Placement { pp_rank: 0, pp_size: 1, tp_rank: 0, tp_size: 1, dcp_rank: 0, dcp_size: 1, dp_rank: 0, dp_size: 1 }
    }
}

impl Placement {
    /// Checks every rank against its size.
    pub fn validated(self) -> Result<Self> {
        for (name, rank, size) in [
            ("pp", self.pp_rank, self.pp_size),
            ("tp", self.tp_rank, self.tp_size),
            ("dcp", self.dcp_rank, self.dcp_size),
            ("dp", self.dp_rank, self.dp_size),
        ] {
            if rank >= size {
                return Err(PlanError::new(
                    ErrorKind::PlacementError,
                    format!("{name}_rank"),
                    rank,
                    size,
                    format!("the rank lies outside a group of {size}"),
                    format!("give a {name}_rank below {name}_size"),
                ));
            }
        }
        Ok(self)
    }

    /// Refuses a source that no plan exists for.
    pub(crate) fn can_send(&self) -> Result<()> {
        if self.dcp_size == 1 {
            return Ok(());
        }
        Err(PlanError::new(
            ErrorKind::UnsupportedPlacement,
            "local dcp_size",
            self.dcp_size,
            1u64,
            "tokens of a request are spread over ranks, and only the way from one rank to several is planned",
            "run the sending side with dcp_size 1",
        ))
    }

    /// Ranks of one group share a copy of the model's cache, and the same tokens.
    pub(crate) fn group(&self) -> (u64, u64) {
        (self.dp_rank, self.dcp_rank)
    }

    pub(crate) fn sizes(&self) -> [u64; 4] {
        [self.pp_size, self.tp_size, self.dcp_size, self.dp_size]
    }
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pp {}/{} tp {}/{}", self.pp_rank, self.pp_size, self.tp_rank, self.tp_size)?;
        if self.dcp_size > 1 {
            write!(f, " dcp {}/{}", self.dcp_rank, self.dcp_size)?;
        }
        if self.dp_size > 1 {
            write!(f, " dp {}/{}", self.dp_rank, self.dp_size)?;
        }
        Ok(())
    }
}

/// The name by which buffers are paired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryName {
    /// What the buffer holds.
    pub component: Component,
    /// The model that it belongs to.
    pub part: Part,
    /// Global layer id.
    pub layer_id: u64,
    /// Which buffer of several with the same layer id.
    pub occurrence: u64,
}

impl std::fmt::Display for EntryName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} layer {}", self.component, self.part, self.layer_id)?;
        if self.occurrence > 0 {
            write!(f, " occurrence {}", self.occurrence)?;
        }
        Ok(())
    }
}

/// One named buffer of a rank: items of `item_bytes`, `item_stride` apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BufferEntry {
    /// What the buffer holds.
    pub component: Component,
    /// The model that it belongs to.
    pub part: Part,
    /// Global layer id.
    pub layer_id: u64,
    /// Device that owns the address, for example `npu:0`.
    pub device: String,
    /// Address of item 0.
    pub address: u64,
    /// Bytes from the first to the last item.
    pub nbytes: u64,
    /// Bytes from one item to the next.
    pub item_stride: u64,
    /// Bytes of one item.
    pub item_bytes: u64,
    /// Global heads that the buffer holds, half open.
    pub head_range: HeadRange,
    /// Which buffer of several with the same layer id.
    pub occurrence: u64,
}

impl BufferEntry {
    /// The name by which the entry is paired.
    pub fn name(&self) -> EntryName {
        EntryName { component: self.component, part: self.part, layer_id: self.layer_id, occurrence: self.occurrence }
    }

    /// Number of whole items.
    pub fn items(&self) -> u64 {
        if self.item_bytes == 0 || self.item_stride == 0 || self.nbytes < self.item_bytes {
            return 0;
        }
        (self.nbytes - self.item_bytes) / self.item_stride + 1
    }

    /// Number of heads held.
    pub fn heads(&self) -> u64 {
        self.head_range.1.saturating_sub(self.head_range.0)
    }

    fn strided(&self) -> Strided {
        Strided { address: self.address, stride: self.item_stride, bytes: self.item_bytes, count: self.items() }
    }
}

/// Everything that one rank publishes.
///
/// Invariants: 1. each entry's name exists in the layout; 2. a name stands once;
/// 3. the head range lies within the total; 4. item bytes follow from the layout
/// and the head range; 5. the stride is at least an item; 6. `nbytes` ends with an
/// item or its padding; 7. the buffer ends within 64 bits and has an address and a
/// device; 8. no two entries share a byte.
#[derive(Debug, Clone, Serialize)]
pub struct RankManifest {
    /// Geometry shared by all ranks.
    pub layout: Arc<ModelLayout>,
    /// Where the rank stands.
    pub placement: Placement,
    /// Named buffers, in the order given.
    pub entries: Vec<BufferEntry>,
    #[serde(skip)]
    names: HashMap<EntryName, usize>,
}

impl PartialEq for RankManifest {
    fn eq(&self, other: &Self) -> bool {
        self.placement == other.placement && self.layout == other.layout && self.entries == other.entries
    }
}

impl Eq for RankManifest {}

impl std::hash::Hash for RankManifest {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (&self.layout, self.placement, &self.entries).hash(state);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestJson {
    layout: ModelLayout,
    placement: Placement,
    entries: Vec<BufferEntry>,
}

impl RankManifest {
    /// Builds a manifest, or names the first invariant that fails.
    pub fn new(layout: Arc<ModelLayout>, placement: Placement, entries: Vec<BufferEntry>) -> Result<Self> {
        let placement = placement.validated()?;
        let mut names = HashMap::with_capacity(entries.len());
        let counts = counted(&layout);
        for (index, entry) in entries.iter().enumerate() {
            check_entry(&layout, &counts, index, entry)?;
            if let Some(first) = names.insert(entry.name(), index) {
                return Err(broken(
                    index,
                    entry,
                    "name",
                    first,
                    index,
                    "two entries carry this name and a peer could pair either",
                    "number them by occurrence, or publish one",
                ));
            }
        }
        check_disjoint(&entries)?;
        Ok(RankManifest { layout, placement, entries, names })
    }

    /// Index and entry of a name, where this rank has it.
    pub fn find(&self, name: EntryName) -> Option<(usize, &BufferEntry)> {
        self.names.get(&name).map(|index| (*index, &self.entries[*index]))
    }

    /// The manifest as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads and validates a manifest.
    pub fn from_json(text: &str) -> Result<Self> {
        let read: ManifestJson = serde_json::from_str(text).map_err(|error| bad_json("RankManifest", &error))?;
        RankManifest::new(Arc::new(read.layout.validated()?), read.placement, read.entries)
    }
}

fn broken(
    index: usize,
    entry: &BufferEntry,
    field: &str,
    local: impl Into<Value>,
    remote: impl Into<Value>,
    consequence: &str,
    remedy: &str,
) -> PlanError {
    let subject = format!("entry {index} ({}).{field}", entry.name());
    PlanError::new(ErrorKind::ManifestError, subject, local, remote, consequence, remedy)
}

/// How many buffers each layer of each component has.
type Counts = HashMap<(Component, Part, u64), u64>;

fn counted(layout: &ModelLayout) -> Counts {
    let mut counts = Counts::new();
    for spec in &layout.components {
        for layer_id in &spec.layer_ids {
            *counts.entry((spec.component, spec.part, *layer_id)).or_insert(0) += 1;
        }
    }
    counts
}

fn check_entry(layout: &ModelLayout, counts: &Counts, index: usize, entry: &BufferEntry) -> Result<()> {
    let fail = |field, local: Value, remote: Value, consequence, remedy| {
        Err(broken(index, entry, field, local, remote, consequence, remedy))
    };
    let Some(spec) = layout.find(entry.component, entry.part) else {
        let known: Vec<String> = layout.components.iter().map(|spec| spec.name()).collect();
        return fail(
            "component",
            format!("{}/{}", entry.component, entry.part).into(),
            known.join(", ").into(),
            "the layout does not declare it, so no peer would send it",
            "declare the component in the layout",
        );
    };
    let occurrences = counts.get(&(entry.component, entry.part, entry.layer_id)).copied().unwrap_or(0);
    if occurrences == 0 {
        return fail(
            "layer_id",
            entry.layer_id.into(),
            crate::agree::id_list(&spec.layer_ids).into(),
            "the layout has no such layer for this component",
            "publish global layer ids, and list them all in the layout",
        );
    }
    if entry.occurrence >= occurrences {
        return fail(
            "occurrence",
            entry.occurrence.into(),
            occurrences.into(),
            "the layout lists the layer fewer times",
            "repeat the id in layer_ids, or count occurrences from 0",
        );
    }
    let (start, stop) = entry.head_range;
    if start > stop || stop > spec.total_heads {
        return fail(
            "head_range",
            format!("{start}..{stop}").into(),
            format!("0..{}", spec.total_heads).into(),
            "the range is not one of the model's heads",
            "give global head numbers, half open",
        );
    }
    let expected = spec.item_bytes(layout.page_size, stop - start)?;
    if entry.item_bytes != expected {
        return fail(
            "item_bytes",
            entry.item_bytes.into(),
            expected.into(),
            &format!("{} heads of {} x {} need another item length", stop - start, spec.dims, spec.dtype),
            "check dtype, head range, dims and page size against the buffer",
        );
    }
    if entry.item_stride < entry.item_bytes {
        return fail(
            "item_stride",
            entry.item_stride.into(),
            entry.item_bytes.into(),
            "items would overlap",
            "give bytes from one item to the next",
        );
    }
    let items = entry.items();
    let padding = entry.item_stride - entry.item_bytes;
    let whole = match items {
        0 => 0,
        items => address::at(entry.item_bytes, items - 1, entry.item_stride, 0)?,
    };
    if entry.nbytes.saturating_sub(whole) > if items == 0 { 0 } else { padding } {
        return fail(
            "nbytes",
            entry.nbytes.into(),
            whole.into(),
            "the buffer ends inside an item",
            "publish whole items only",
        );
    }
    address::at(entry.address, 1, entry.nbytes, 0)?;
    if entry.nbytes > 0 && entry.address == 0 {
        return fail("address", 0u64.into(), Value::Absent, "address 0 is no memory", "publish the buffer's address");
    }
    if entry.device.is_empty() {
        return fail(
            "device",
            "an empty text".into(),
            Value::Absent,
            "an engine could not register the buffer",
            "name the device, for example npu:0 or cpu",
        );
    }
    Ok(())
}

fn check_disjoint(entries: &[BufferEntry]) -> Result<()> {
    let mut order: Vec<usize> = (0..entries.len()).filter(|index| entries[*index].nbytes > 0).collect();
    order.sort_by_key(|index| (entries[*index].device.as_str(), entries[*index].address));
    for device in order.chunk_by(|a, b| entries[*a].device == entries[*b].device) {
        let buffers: Vec<Strided> = device.iter().map(|index| entries[*index].strided()).collect();
        if let Some((low, high)) = first_shared(&buffers) {
            let (first, second) = (device[low], device[high]);
            let (low, high) = (&entries[first], &entries[second]);
            return Err(broken(
                second,
                high,
                "address",
                format!("{:#x}", high.address),
                format!("{:#x} of entry {first} ({})", low.address, low.name()),
                "two entries share bytes, so one copy would overwrite the other",
                "publish each buffer once, with its own address and stride",
            ));
        }
    }
    Ok(())
}

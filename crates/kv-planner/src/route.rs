//! Owns what one rank sends to another inside one item: entry pairs, head slices
//! and strides. It does not own pages, nor the choice of the sender.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::address;
use crate::error::{ErrorKind, PlanError, Result};
use crate::heads::{HeadRange, intersect};
use crate::layout::ComponentSpec;
use crate::manifest::{BufferEntry, EntryName, RankManifest};
use crate::plan::Slice;
use crate::words::{Axis, Component, ItemKind, Part};

/// Bytes that one source entry gives to one destination entry, within one item:
/// `rows` pieces of `row_bytes`. Offsets and strides count from the item's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RoutePair {
    /// What the buffers hold.
    pub component: Component,
    /// The model that they belong to.
    pub part: Part,
    /// Global layer id.
    pub layer_id: u64,
    /// Which buffer of several with the same layer id.
    pub occurrence: u64,
    /// What an index of the buffers counts.
    pub item_kind: ItemKind,
    /// Index in the source manifest's entries.
    pub source_entry: usize,
    /// Index in the destination manifest's entries.
    pub destination_entry: usize,
    /// Heads within the source entry, from its first head.
    pub source_heads: HeadRange,
    /// Heads within the destination entry, from its first head.
    pub destination_heads: HeadRange,
    /// Pieces per item; 1 when the slice is contiguous on both sides.
    pub rows: u64,
    /// Bytes of one piece.
    pub row_bytes: u64,
    /// Offset of the first piece in a source item.
    pub source_offset: u64,
    /// From one piece to the next in a source item.
    pub source_row_stride: u64,
    /// Offset of the first piece in a destination item.
    pub destination_offset: u64,
    /// From one piece to the next in a destination item.
    pub destination_row_stride: u64,
}

/// Pairs of one source and one destination rank. Build it with
/// [`Agreement::route`](crate::agree::Agreement::route).
#[derive(Debug, Clone)]
pub struct Route {
    source: Arc<RankManifest>,
    destination: Arc<RankManifest>,
    pairs: Arc<[RoutePair]>,
    lanes: Arc<Lanes>,
    /// Items that a page is taken for: 1, or its tokens.
    per_page: u64,
}

/// Pairs as addresses: where item 0's first piece lies on both sides, pair by pair,
/// and how far apart items and pieces are. Every item below the entries' counts ends
/// within 64 bits, so sums over a lane need no further check.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lanes {
    pub(crate) sources: Vec<u64>,
    pub(crate) destinations: Vec<u64>,
    /// Steps of neighbouring pairs that share them, and how many do.
    pub(crate) groups: Vec<(Steps, usize)>,
    totals: Totals,
}

/// What the addresses of a lane have in common with those of others: all but the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Steps {
    /// From one item to the next.
    pub(crate) source_item: u64,
    pub(crate) destination_item: u64,
    /// From one piece to the next within an item.
    pub(crate) source_row: u64,
    pub(crate) destination_row: u64,
    pub(crate) rows: u64,
    pub(crate) row_bytes: u64,
}

impl Steps {
    /// Whether consecutive items are consecutive bytes on both sides.
    pub(crate) fn joins_items(&self) -> bool {
        self.rows == 1 && self.row_bytes == self.source_item && self.row_bytes == self.destination_item
    }

    /// Address of item 0's first piece, checked up to the end of the last item's last.
    fn base(&self, entry: &Items, offset: u64, (item, row): (u64, u64)) -> Result<u64> {
        let last = address::at(entry.address, entry.count.saturating_sub(1), item, offset)?;
        address::at(last, self.rows - 1, row, self.row_bytes)?;
        address::at(entry.address, 1, offset, 0)
    }
}

/// The items of an entry as a route counts them.
struct Items {
    address: u64,
    stride: u64,
    count: u64,
}

impl Items {
    fn of(entry: &BufferEntry, per_page: u64) -> Result<Items> {
        let count = address::product(&[entry.items(), per_page])?;
        Ok(Items { address: entry.address, stride: entry.item_stride / per_page, count })
    }
}

/// Sums over the pairs, so that a plan knows its size without walking them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    /// Bytes of one page over all pairs.
    pub(crate) bytes: u64,
    /// Blocks per page of pairs whose pages never join.
    pub(crate) blocks_per_page: u64,
    /// Blocks per run: pairs whose consecutive pages are one block.
    pub(crate) blocks_per_run: u64,
    /// Least number of items over the source entries.
    pub(crate) source_items: u64,
    /// Least number of items over the destination entries.
    pub(crate) destination_items: u64,
    /// The one kind of item of all pairs; none without pairs or with several kinds.
    pub(crate) item_kind: Option<ItemKind>,
}

impl PartialEq for Route {
    fn eq(&self, other: &Self) -> bool {
        self.pairs == other.pairs && self.source == other.source && self.destination == other.destination
    }
}

impl Eq for Route {}

impl std::hash::Hash for Route {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (&self.source, &self.destination, &self.pairs).hash(state);
    }
}

impl Route {
    /// Pairs every common name of the wanted parts. `share` says which of the common
    /// heads this source rank is the one to send.
    pub(crate) fn build(
        source: Arc<RankManifest>,
        destination: Arc<RankManifest>,
        parts: &[Part],
        share: impl Fn(EntryName, &BufferEntry, &BufferEntry, u64, HeadRange) -> Vec<HeadRange>,
    ) -> Result<Route> {
        let mut pairs = Vec::new();
        for (source_entry, from) in source.entries.iter().enumerate().filter(|(_, e)| parts.contains(&e.part)) {
            let name = from.name();
            let Some((destination_entry, to)) = destination.find(name) else { continue };
            let Some(common) = intersect(from.head_range, to.head_range) else { continue };
            let specs =
                (source.layout.spec(from.component, from.part)?, destination.layout.spec(to.component, to.part)?);
            let pages = (source.layout.page_size, destination.layout.page_size);
            let alike = from.head_range == to.head_range;
            for heads in share(name, from, to, specs.0.total_heads, common) {
                for dims in parts_of(specs.0, alike && heads == from.head_range) {
                    pairs.push(pair((source_entry, from), (destination_entry, to), specs, pages, heads, dims)?);
                }
            }
        }
        Route::from_pairs(source, destination, pairs.into(), 1)
    }

    fn from_pairs(
        source: Arc<RankManifest>,
        destination: Arc<RankManifest>,
        pairs: Arc<[RoutePair]>,
        per_page: u64,
    ) -> Result<Route> {
        let mut totals = Totals { source_items: u64::MAX, destination_items: u64::MAX, ..Totals::default() };
        let mut lanes = Lanes::default();
        for pair in pairs.iter() {
            let (from, to) = (&source.entries[pair.source_entry], &destination.entries[pair.destination_entry]);
            let (from, to) = (Items::of(from, per_page)?, Items::of(to, per_page)?);
            let steps = pair.steps(&from, &to);
            lanes.sources.push(steps.base(&from, pair.source_offset, (steps.source_item, steps.source_row))?);
            let strides = (steps.destination_item, steps.destination_row);
            lanes.destinations.push(steps.base(&to, pair.destination_offset, strides)?);
            totals.bytes = address::at(totals.bytes, pair.rows, pair.row_bytes, 0)?;
            totals.source_items = totals.source_items.min(from.count);
            totals.destination_items = totals.destination_items.min(to.count);
            if steps.joins_items() {
                totals.blocks_per_run += 1;
            } else {
                totals.blocks_per_page = address::at(totals.blocks_per_page, pair.rows, 1, 0)?;
            }
            match lanes.groups.last_mut() {
                Some((same, count)) if *same == steps => *count += 1,
                _ => lanes.groups.push((steps, 1)),
            }
        }
        totals.item_kind = pairs.first().map(|pair| pair.item_kind);
        if pairs.iter().any(|pair| Some(pair.item_kind) != totals.item_kind) {
            totals.item_kind = None;
        }
        lanes.totals = totals;
        Ok(Route { source, destination, pairs, lanes: Arc::new(lanes), per_page })
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// The sending rank.
    pub fn source(&self) -> &Arc<RankManifest> {
        &self.source
    }

    /// The receiving rank.
    pub fn destination(&self) -> &Arc<RankManifest> {
        &self.destination
    }

    /// All pairs, in the order of the source's entries.
    pub fn pairs(&self) -> &[RoutePair] {
        &self.pairs
    }

    pub(crate) fn totals(&self) -> &Totals {
        &self.lanes.totals
    }

    /// Items of an entry, as this route counts them.
    pub(crate) fn items(&self, entry: &BufferEntry) -> u64 {
        entry.items().saturating_mul(self.per_page)
    }

    /// Bytes of one item over all pairs.
    pub fn item_bytes(&self) -> u64 {
        self.lanes.totals.bytes
    }

    /// The same bytes with token slots for items: slot `page * page_size + offset`.
    ///
    /// Every pair must count pages whose outermost axis is the token, uncompressed and
    /// without bytes between two pages, on both sides.
    pub fn by_token(&self) -> Result<Route> {
        let page_size = self.source.layout.page_size;
        let mut pairs = Vec::with_capacity(self.pairs.len());
        for pair in self.pairs.iter() {
            let (from, to) =
                (&self.source.entries[pair.source_entry], &self.destination.entries[pair.destination_entry]);
            let spec = self.source.layout.spec(pair.component, pair.part)?;
            let other = self.destination.layout.spec(pair.component, pair.part)?;
            let first = |spec: &ComponentSpec| spec.axes[0] == Axis::Token && spec.compression == 1;
            let dense = |entry: &BufferEntry| entry.item_stride == entry.item_bytes;
            if pair.item_kind != ItemKind::Page || !first(spec) || !first(other) || !dense(from) || !dense(to) {
                return Err(PlanError::new(
                    ErrorKind::ItemKindMismatch,
                    format!("{} by token", pair.name()),
                    pair.item_kind.as_str(),
                    ItemKind::Token.as_str(),
                    "its token slots are not evenly spaced over the buffer",
                    "plan it by pages, or give it pages with the token axis outermost and nothing between them",
                ));
            }
            let mut own = RoutePair { item_kind: ItemKind::Token, ..*pair };
            if pair.rows == 1 {
                own.row_bytes = pair.row_bytes / page_size;
                (own.source_row_stride, own.destination_row_stride) = (own.row_bytes, own.row_bytes);
            } else {
                own.rows = pair.rows / page_size;
            }
            pairs.push(own);
        }
        Route::from_pairs(self.source.clone(), self.destination.clone(), pairs.into(), page_size)
    }

    /// The pairs that `slice` names; an id unknown to the layout is refused.
    pub fn slice(&self, slice: &Slice) -> Result<Route> {
        slice.check(&self.source.layout)?;
        let ids: Option<BTreeSet<u64>> = slice.layer_ids.as_ref().map(|ids| ids.iter().copied().collect());
        let kept = self.pairs.iter().filter(|pair| {
            ids.as_ref().is_none_or(|ids| ids.contains(&pair.layer_id))
                && slice.parts.as_ref().is_none_or(|parts| parts.contains(&pair.part))
                && slice.components.as_ref().is_none_or(|components| components.contains(&pair.component))
                && slice.item_kinds.as_ref().is_none_or(|kinds| kinds.contains(&pair.item_kind))
        });
        Route::from_pairs(self.source.clone(), self.destination.clone(), kept.copied().collect(), self.per_page)
    }
}

impl RoutePair {
    fn steps(&self, from: &Items, to: &Items) -> Steps {
        Steps {
            source_item: from.stride,
            destination_item: to.stride,
            source_row: self.source_row_stride,
            destination_row: self.destination_row_stride,
            rows: self.rows,
            row_bytes: self.row_bytes,
        }
    }

    /// The name by which the two entries were paired.
    pub fn name(&self) -> EntryName {
        EntryName { component: self.component, part: self.part, layer_id: self.layer_id, occurrence: self.occurrence }
    }
}

/// Position of a head slice inside an item: rows, bytes of a row, offset, stride.
struct Inside {
    rows: u64,
    row_bytes: u64,
    offset: u64,
    row_stride: u64,
}

/// Dims of a head that lie together: those before them, and their number.
type Dims = (u64, u64);

fn inside(
    spec: &ComponentSpec,
    page_size: u64,
    entry_heads: u64,
    heads: HeadRange,
    (before, dims): Dims,
) -> Result<Inside> {
    let mut outer = vec![1];
    let mut inner = vec![spec.dtype.itemsize()];
    let mut passed = false;
    let mut own = (0, 1, 1);
    for axis in &spec.axes {
        match axis {
            Axis::Head => passed = true,
            Axis::Token if passed => inner.push(spec.tokens(page_size)),
            Axis::Token => outer.push(spec.tokens(page_size)),
            Axis::Dim if passed => own = (before, dims, spec.dims),
            Axis::Dim => outer.push(spec.dims),
        }
    }
    let (before, dims, all) = own;
    let (rows, per_dim) = (address::product(&outer)?, address::product(&inner)?);
    let skipped = address::at(address::product(&[before, entry_heads])?, heads.0, dims, 0)?;
    Ok(Inside {
        rows,
        row_bytes: address::product(&[per_dim, dims, heads.1 - heads.0])?,
        offset: address::product(&[per_dim, skipped])?,
        row_stride: address::product(&[per_dim, all, entry_heads])?,
    })
}

/// Dims that are sent together: all of a head, or group by group where the two entries hold other heads.
fn parts_of(spec: &ComponentSpec, alike: bool) -> Vec<Dims> {
    if alike || spec.groups.is_empty() {
        return vec![(0, spec.dims)];
    }
    let mut before = 0;
    let part = |dims: &u64| {
        before += dims;
        (before - dims, *dims)
    };
    spec.groups.iter().map(part).collect()
}

fn pair(
    (source_entry, from): (usize, &BufferEntry),
    (destination_entry, to): (usize, &BufferEntry),
    specs: (&ComponentSpec, &ComponentSpec),
    pages: (u64, u64),
    heads: HeadRange,
    dims: Dims,
) -> Result<RoutePair> {
    let relative = |entry: &BufferEntry| (heads.0 - entry.head_range.0, heads.1 - entry.head_range.0);
    let (source_heads, destination_heads) = (relative(from), relative(to));
    let a = inside(specs.0, pages.0, from.heads(), source_heads, dims)?;
    let b = inside(specs.1, pages.1, to.heads(), destination_heads, dims)?;
    let contiguous = a.rows == 1 || (a.row_stride == a.row_bytes && b.row_stride == b.row_bytes);
    let (rows, row_bytes) =
        if contiguous { (1, address::product(&[a.rows, a.row_bytes])?) } else { (a.rows, a.row_bytes) };
    Ok(RoutePair {
        component: from.component,
        part: from.part,
        layer_id: from.layer_id,
        occurrence: from.occurrence,
        item_kind: specs.0.item_kind,
        source_entry,
        destination_entry,
        source_heads,
        destination_heads,
        rows,
        row_bytes,
        source_offset: a.offset,
        source_row_stride: if contiguous { row_bytes } else { a.row_stride },
        destination_offset: b.offset,
        destination_row_stride: if contiguous { row_bytes } else { b.row_stride },
    })
}

//! Owns what the fuzz targets do with bytes: whatever they are, an answer or a named
//! error, and answers that keep the laws. It needs no fuzzer: `tests/fuzzed.rs` runs the
//! same functions on a stable compiler.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::sync::Arc;

use kv_planner::*;

/// Reads numbers off a byte string; zeros behind its end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u64 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        u64::from(*first)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.byte() % limit
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// Mostly small, sometimes at an edge of 64 or 32 bits.
    fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..200 => small % 9,
            200..220 => self.byte() << 8 | self.byte(),
            220..230 => 1 << self.below(64),
            230..240 => (1 << self.below(64)) - 1,
            240..250 => u64::MAX - self.byte(),
            _ => u64::from(u32::MAX) + self.byte() - 1,
        }
    }

    fn list<T>(&mut self, most: u64, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(most + 1)).map(|_| item(self)).collect()
    }

    fn spec(&mut self) -> ComponentSpec {
        let mut axes = [Axis::Token, Axis::Head, Axis::Dim];
        axes.swap(self.below(3) as usize, self.below(3) as usize);
        if self.byte() > 250 {
            axes[0] = axes[1];
        }
        let mut spec = ComponentSpec {
            component: self.pick(Component::ALL),
            part: self.pick(Part::ALL),
            layer_ids: self.list(4, Bytes::number),
            dtype: self.pick(DType::ALL),
            total_heads: self.number(),
            dims: self.number(),
            axes,
            item_kind: self.pick(&[ItemKind::Page, ItemKind::Page, ItemKind::RequestRow, ItemKind::Token]),
            compression: 1,
            rows: 1,
            groups: Vec::new(),
        };
        match self.byte() {
            231.. => spec.compression = self.number(),
            216.. => spec.rows = self.number(),
            201.. => {
                spec.groups = self.list(3, |own| 1 + own.below(3));
                spec.dims = spec.groups.iter().sum();
                spec.item_kind = ItemKind::RequestRow;
            }
            _ => {}
        }
        spec
    }

    fn layout(&mut self) -> ModelLayout {
        ModelLayout {
            components: self.list(3, Bytes::spec),
            page_size: self.number(),
            fingerprint: ["", "model", "model", "model"][self.below(4) as usize].into(),
            kernel_block_size: (self.byte() > 200).then(|| self.number()),
            format_version: if self.byte() > 240 { self.number() } else { 1 },
        }
    }

    fn placement(&mut self) -> Placement {
        let size = |bytes: &mut Self| if bytes.byte() > 245 { bytes.number() } else { 1 + bytes.below(3) };
        let sizes = [size(self), size(self), if self.byte() > 200 { 2 } else { 1 }, size(self)];
        let mut rank = |size: u64| if self.byte() > 250 { self.number() } else { self.byte() % size.max(1) };
        Placement {
            pp_rank: rank(sizes[0]),
            pp_size: sizes[0],
            tp_rank: rank(sizes[1]),
            tp_size: sizes[1],
            dcp_rank: rank(sizes[2]),
            dcp_size: sizes[2],
            dp_rank: rank(sizes[3]),
            dp_size: sizes[3],
        }
    }

    /// A rank of the layout, right but for what the bytes change.
    fn rank(&mut self, layout: &Arc<ModelLayout>) -> Result<Arc<RankManifest>> {
        let placement = self.placement();
        let mut address = self.number().saturating_add(1);
        let mut entries = Vec::new();
        for spec in &layout.components {
            let mut seen = std::collections::BTreeMap::new();
            for layer_id in &spec.layer_ids {
                let occurrence = seen.entry(*layer_id).or_insert(0u64);
                *occurrence += 1;
                if self.byte() > 230 {
                    continue;
                }
                let head_range = match split_heads(spec.total_heads, placement.tp_rank, placement.tp_size) {
                    Ok(range) if self.byte() < 240 => range,
                    _ => (self.number(), self.number()),
                };
                let heads = head_range.1.saturating_sub(head_range.0);
                let item_bytes = spec.item_bytes(layout.page_size, heads).unwrap_or(8);
                let item_stride = item_bytes.saturating_add(if self.byte() > 200 { self.number() } else { 0 });
                let items = if self.byte() > 200 { self.below(6) } else { 6 };
                let nbytes = item_stride.saturating_mul(items.saturating_sub(1)).saturating_add(if items == 0 {
                    0
                } else {
                    item_bytes
                });
                entries.push(BufferEntry {
                    component: spec.component,
                    part: spec.part,
                    layer_id: *layer_id,
                    device: "npu:0".into(),
                    address,
                    nbytes: if self.byte() > 245 { self.number() } else { nbytes },
                    item_stride,
                    item_bytes: if self.byte() > 245 { self.number() } else { item_bytes },
                    head_range,
                    occurrence: *occurrence - 1,
                });
                address = address.wrapping_add(nbytes).wrapping_add(if self.byte() > 230 { self.number() } else { 0 });
            }
        }
        RankManifest::new(layout.clone(), placement, entries).map(Arc::new)
    }

    fn side(&mut self, layout: &Arc<ModelLayout>) -> Result<Side> {
        let ranks = self.list(2, |bytes| bytes.rank(layout));
        match ranks.into_iter().collect::<Result<Vec<_>>>() {
            Ok(ranks) if !ranks.is_empty() && self.0.first().is_some_and(|byte| byte % 2 == 0) => {
                Deployment::new(ranks).map(|side| Side::Deployment(Arc::new(side)))
            }
            _ => self.rank(layout).map(Side::Rank),
        }
    }

    /// Runs of up to five of the items 1..6, mostly possible ones.
    fn runs(&mut self, kind: ItemKind) -> Result<Runs> {
        let (count, first, step) = (self.below(6), self.below(5), 1 + self.below(4));
        let mut source: Vec<i64> = (0..count).map(|_| 1 + self.below(5) as i64).collect();
        let mut destination: Vec<i64> = (0..count).map(|turn| 1 + ((first + step * turn) % 5) as i64).collect();
        if self.byte() > 200 {
            source = self.list(6, |bytes| bytes.number() as i64);
        }
        if self.byte() > 200 {
            destination = self.list(6, |bytes| bytes.number() as i64);
        }
        Runs::of_kind(&source, &destination, kind)
    }
}

fn laws(error: &PlanError) {
    assert!(!error.detail.subject.is_empty() && !error.to_string().is_empty());
    assert_ne!(error.kind, ErrorKind::InternalError);
}

/// Any text as a manifest or a layout: what is read is written and read alike. Says
/// whether a manifest was read, or could be built of the bytes.
pub fn manifests(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let read = guarded(|| RankManifest::from_json(&text));
    read.as_ref().err().into_iter().for_each(laws);
    match guarded(|| ModelLayout::from_json(&text)) {
        Ok(layout) => assert_eq!(ModelLayout::from_json(&layout.to_json()).as_ref(), Ok(&layout)),
        Err(error) => laws(&error),
    }
    let mut bytes = Bytes(data);
    let built = guarded(|| {
        let layout = Arc::new(bytes.layout().validated()?);
        bytes.rank(&layout)
    });
    built.as_ref().err().into_iter().for_each(laws);
    let manifests: Vec<_> = read.into_iter().map(Arc::new).chain(built).collect();
    for manifest in &manifests {
        assert_eq!(RankManifest::from_json(&manifest.to_json()).as_ref(), Ok(manifest.as_ref()));
        assert!(!manifest.describe().is_empty());
    }
    !manifests.is_empty()
}

/// Two sides: they agree or say all that is wrong; an agreement has every route. Says
/// whether there was something to send.
pub fn agree(data: &[u8]) -> bool {
    let answer = guarded(|| agreement(&mut Bytes(data)));
    if let Err(error) = &answer {
        laws(error);
        assert_eq!(error.kind == ErrorKind::LayoutMismatch, !error.detail.differences.is_empty());
    }
    answer.is_ok_and(|agreement| agreement.route(0, 0).is_ok_and(|route| !route.pairs().is_empty()))
}

fn agreement(bytes: &mut Bytes<'_>) -> Result<Agreement> {
    let layout = Arc::new(bytes.layout().validated()?);
    let other = if bytes.byte() > 230 { Arc::new(bytes.layout().validated()?) } else { layout.clone() };
    let (local, remote) = (bytes.side(&layout)?, bytes.side(&other)?);
    let agreement = kv_planner::agree(local.clone(), remote.clone())?;
    assert!(!agreement.describe().is_empty());
    for (index, rank) in remote.manifests().iter().enumerate() {
        let mut written = BTreeSet::new();
        for source in 0..local.manifests().len() {
            let route = agreement.route(source, index)?;
            for pair in route.pairs() {
                let entry = &rank.entries[pair.destination_entry];
                assert!(pair.destination_heads.1 <= entry.heads());
                if !matches!(remote, Side::Rank(_)) && !matches!(local, Side::Rank(_)) && entry.heads() < 64 {
                    let group = local.manifests()[source].placement.dp_rank;
                    for head in pair.destination_heads.0..pair.destination_heads.1 {
                        assert!(written.insert((group, pair.destination_entry, head)), "a head is written twice");
                    }
                }
            }
        }
    }
    Ok(agreement)
}

/// A plan: lowered within any limits, its blocks are counted before and cover its bytes.
/// Says whether there were any.
pub fn lower(data: &[u8]) -> bool {
    let answer = guarded(|| lowered(&mut Bytes(data)));
    answer.as_ref().err().into_iter().for_each(laws);
    answer.is_ok_and(|blocks| blocks > 0)
}

fn lowered(bytes: &mut Bytes<'_>) -> Result<u64> {
    let agreement = agreement(bytes)?;
    let mut route = agreement.route(0, 0)?;
    if bytes.byte() > 230 {
        route = route.by_token()?;
    }
    let kind = route.pairs().first().map_or(ItemKind::Page, |pair| pair.item_kind);
    route = route.slice(&Slice { item_kinds: Some(vec![kind]), ..Slice::default() })?;
    let kind = if bytes.byte() > 230 { bytes.pick(ItemKind::ALL) } else { kind };
    let plan = Plan::new(route, bytes.runs(kind)?)?;
    let limit = |bytes: &mut Bytes<'_>| (bytes.byte() > 128).then(|| bytes.number());
    let capabilities = Capabilities {
        max_entries_per_batch: limit(bytes),
        max_block_bytes: limit(bytes),
        max_blocks: Some(limit(bytes).unwrap_or(1 << 16).min(1 << 16)),
    };
    let lowered = kv_planner::lower(&plan, &capabilities)?;
    assert_eq!(lowered.block_count, lower::count(&plan, &capabilities)?);
    assert_eq!(lowered.block_count, lowered.batches.iter().map(|batch| batch.source.len() as u64).sum::<u64>());
    let moved = lowered.batches.iter().flat_map(|batch| &batch.nbytes).map(|bytes| u128::from(*bytes)).sum::<u128>();
    assert_eq!(moved, u128::from(plan.nbytes()));
    let mut spans = Vec::new();
    for batch in &lowered.batches {
        assert!(batch.source.len() as u64 <= capabilities.max_entries_per_batch.unwrap_or(u64::MAX));
        for ((from, to), count) in batch.source.iter().zip(&batch.destination).zip(&batch.nbytes) {
            assert!(*count > 0 && *count <= capabilities.max_block_bytes.unwrap_or(u64::MAX));
            let inside = |entries: &[BufferEntry], start: u64| {
                entries.iter().any(|entry| {
                    entry.address <= start
                        && u128::from(start) + u128::from(*count)
                            <= u128::from(entry.address) + u128::from(entry.nbytes)
                })
            };
            assert!(inside(&plan.route().source().entries, *from), "a block reads outside every buffer");
            assert!(inside(&plan.route().destination().entries, *to), "a block writes outside every buffer");
            spans.push((*to, to + count));
        }
    }
    spans.sort_unstable();
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two blocks overlap in the destination");
    Ok(lowered.block_count)
}

//! Owns the simulated memory of the tests: every byte of a source carries a label
//! that says where it belongs. It uses none of the crate's arithmetic on purpose.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_planner::*;

/// Small reproducible generator, so that a world is a function of its seed.
#[derive(Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index as u64 + 1) as usize);
        }
    }

    /// `count` different pages out of `1..items`, sometimes consecutive.
    pub fn pages(&mut self, count: usize, items: u64) -> Vec<i64> {
        let mut pages: Vec<i64> = (1..items as i64).collect();
        if self.below(2) == 0 {
            self.shuffle(&mut pages);
        }
        let skip = self.below((pages.len() - count) as u64 + 1) as usize;
        pages.into_iter().skip(skip).take(count).collect()
    }
}

pub const ITEMS: u64 = 7;

/// A layout with components on some layers only, unequal widths and a draft.
pub fn layout(dice: &mut Dice, components: &[Component], draft: bool) -> Arc<ModelLayout> {
    let orders = [
        [Axis::Token, Axis::Head, Axis::Dim],
        [Axis::Head, Axis::Token, Axis::Dim],
        [Axis::Token, Axis::Dim, Axis::Head],
        [Axis::Dim, Axis::Head, Axis::Token],
    ];
    let layers = 1 + dice.below(5);
    let mut specs = Vec::new();
    for part in [Part::Target, Part::Draft].into_iter().take(1 + usize::from(draft)) {
        let range = if part == Part::Target { 0..layers } else { layers..layers + 1 + dice.below(3) };
        for component in components {
            let mut ids: Vec<u64> = range.clone().filter(|_| dice.below(4) > 0).collect();
            if ids.is_empty() {
                ids.push(range.start);
            }
            if dice.below(4) == 0 {
                ids.push(ids[0]);
            }
            dice.shuffle(&mut ids);
            specs.push(ComponentSpec {
                component: *component,
                part,
                layer_ids: ids,
                dtype: dice.pick(&[DType::Float16, DType::UInt8, DType::Float32]),
                total_heads: dice.pick(&[1, 2, 4, 8]),
                dims: 1 + dice.below(3),
                axes: dice.pick(&orders),
                item_kind: ItemKind::Page,
                compression: dice.pick(&[1, 1, 2]),
                rows: 1,
                groups: vec![],
            });
        }
    }
    let compressed = specs.iter().any(|spec| spec.compression == 2);
    let layout = ModelLayout {
        components: specs,
        page_size: if compressed { 2 + 2 * dice.below(2) } else { 1 + dice.below(4) },
        fingerprint: "model".into(),
        kernel_block_size: None,
        format_version: 1,
    };
    Arc::new(layout.validated().unwrap())
}

/// All ranks of one side, with layers dealt to stages at random and entries in
/// random order at random addresses.
pub fn deployment(dice: &mut Dice, layout: &Arc<ModelLayout>, pp_size: u64, tp_size: u64) -> Arc<Deployment> {
    let mut stage_of = BTreeMap::new();
    for spec in &layout.components {
        for id in &spec.layer_ids {
            stage_of.entry(*id).or_insert_with(|| dice.below(pp_size));
        }
    }
    let mut manifests = Vec::new();
    for pp_rank in 0..pp_size {
        for tp_rank in 0..tp_size {
            let mut entries = Vec::new();
            for spec in &layout.components {
                let mut seen: BTreeMap<u64, u64> = BTreeMap::new();
                for id in &spec.layer_ids {
                    let occurrence = seen.entry(*id).or_insert(0);
                    if stage_of[id] == pp_rank {
                        entries.push(entry(dice, layout, spec, *id, *occurrence, tp_rank, tp_size));
                    }
                    *occurrence += 1;
                }
            }
            dice.shuffle(&mut entries);
            let mut address = 64 + dice.below(64);
            for entry in &mut entries {
                entry.address = address;
                address += entry.nbytes + dice.below(9);
            }
            let placement = Placement { pp_rank, pp_size, tp_rank, tp_size, ..Placement::default() };
            manifests.push(Arc::new(RankManifest::new(layout.clone(), placement, entries).unwrap()));
        }
    }
    dice.shuffle(&mut manifests);
    Arc::new(Deployment::new(manifests).unwrap())
}

fn entry(
    dice: &mut Dice,
    layout: &ModelLayout,
    spec: &ComponentSpec,
    layer_id: u64,
    occurrence: u64,
    tp_rank: u64,
    tp_size: u64,
) -> BufferEntry {
    let head_range = if tp_size <= spec.total_heads {
        let share = spec.total_heads / tp_size;
        (tp_rank * share, tp_rank * share + share)
    } else {
        let head = tp_rank / (tp_size / spec.total_heads);
        (head, head + 1)
    };
    let item_bytes = tokens(layout, spec) * (head_range.1 - head_range.0) * spec.dims * spec.dtype.itemsize();
    let item_stride = item_bytes + dice.pick(&[0, 0, 3]);
    BufferEntry {
        component: spec.component,
        part: spec.part,
        layer_id,
        device: "cpu".into(),
        address: 1,
        nbytes: (ITEMS - 1) * item_stride + item_bytes,
        item_stride,
        item_bytes,
        head_range,
        occurrence,
    }
}

/// Where a byte belongs: name, page, token, global head, dim, byte of the element.
pub type Label = (EntryName, u64, u64, u64, u64, u64);

fn tokens(layout: &ModelLayout, spec: &ComponentSpec) -> u64 {
    if spec.item_kind == ItemKind::Page { layout.page_size / spec.compression } else { spec.rows }
}

/// (token, head, dim) of every element of an item, in the order of memory: groups lie just outside the heads.
fn elements(layout: &ModelLayout, spec: &ComponentSpec, heads: u64) -> Vec<(u64, u64, u64)> {
    let groups = if spec.groups.is_empty() { vec![spec.dims] } else { spec.groups.clone() };
    let mut indices = vec![(0, 0, 0, 0)];
    for axis in spec.axes {
        let mut next = Vec::new();
        for (token, group, head, dim) in indices {
            match axis {
                Axis::Token => next.extend((0..tokens(layout, spec)).map(|token| (token, group, head, dim))),
                Axis::Head => next
                    .extend((0..groups.len()).flat_map(|group| (0..heads).map(move |head| (token, group, head, dim)))),
                Axis::Dim => next.extend((0..groups[group]).map(|dim| (token, group, head, dim))),
            }
        }
        indices = next;
    }
    let place = |(token, group, head, dim)| (token, head, groups[..group].iter().sum::<u64>() + dim);
    indices.into_iter().map(place).collect()
}

/// Address of every labelled byte of a rank.
pub fn bytes_of(manifest: &RankManifest) -> BTreeMap<u64, Label> {
    let layout = &manifest.layout;
    let mut bytes = BTreeMap::new();
    for entry in &manifest.entries {
        let same = |spec: &&ComponentSpec| spec.component == entry.component && spec.part == entry.part;
        let spec = layout.components.iter().find(same).unwrap();
        let order = elements(layout, spec, entry.head_range.1 - entry.head_range.0);
        for item in 0..ITEMS {
            for (element, (token, head, dim)) in order.iter().enumerate() {
                for byte in 0..spec.dtype.itemsize() {
                    let inside = element as u64 * spec.dtype.itemsize() + byte;
                    let address = entry.address + item * entry.item_stride + inside;
                    let label = (entry.name(), item, *token, entry.head_range.0 + head, *dim, byte);
                    assert!(bytes.insert(address, label).is_none());
                }
            }
        }
    }
    bytes
}

/// Source address of every destination byte that the blocks write.
pub fn byte_map(lowered: &LoweredPlan) -> BTreeMap<u64, u64> {
    let mut map = BTreeMap::new();
    for batch in &lowered.batches {
        for ((source, destination), nbytes) in batch.source.iter().zip(&batch.destination).zip(&batch.nbytes) {
            assert!(*nbytes > 0, "an empty block");
            for byte in 0..*nbytes {
                assert!(map.insert(destination + byte, source + byte).is_none(), "a byte is written twice");
            }
        }
    }
    map
}

/// Two sides that agree, and page pairs of a request.
#[derive(Debug)]
pub struct World {
    pub agreement: Agreement,
    pub source_pages: Vec<i64>,
    pub destination_pages: Vec<i64>,
    pub kind: ItemKind,
}

pub fn world(seed: u64, source: (u64, u64), destination: (u64, u64), draft: bool) -> World {
    let mut dice = Dice::new(seed);
    let components = [Component::Key, Component::Value, Component::IndexKey];
    let kinds = 1 + dice.below(3) as usize;
    let layout = layout(&mut dice, &components[..kinds], draft);
    between(dice, &layout, source, destination, ItemKind::Page)
}

/// Two sides with states of several rows, whose groups are sharded one by one.
pub fn state_world(seed: u64, source: (u64, u64), destination: (u64, u64), draft: bool) -> World {
    let mut dice = Dice::new(seed);
    let mut own = ModelLayout::clone(&layout(&mut dice, &[Component::State], draft));
    for spec in &mut own.components {
        spec.item_kind = ItemKind::RequestRow;
        spec.compression = 1;
        spec.rows = 1 + dice.below(3);
        spec.groups = (0..1 + dice.below(3)).map(|_| 1 + dice.below(3)).collect();
        spec.dims = spec.groups.iter().sum();
        let place = |axis| spec.axes.iter().position(|own| *own == axis).unwrap();
        let (head, dim) = (place(Axis::Head), place(Axis::Dim));
        spec.axes.swap(head, if dim < head { dim } else { head });
    }
    let layout = Arc::new(own.validated().unwrap());
    between(dice, &layout, source, destination, ItemKind::RequestRow)
}

fn between(
    mut dice: Dice,
    layout: &Arc<ModelLayout>,
    source: (u64, u64),
    destination: (u64, u64),
    kind: ItemKind,
) -> World {
    let local = deployment(&mut dice, layout, source.0, source.1);
    let remote = deployment(&mut dice, layout, destination.0, destination.1);
    let count = dice.below(ITEMS) as usize;
    World {
        agreement: agree(Side::Deployment(local), Side::Deployment(remote)).unwrap(),
        source_pages: dice.pages(count, ITEMS),
        destination_pages: dice.pages(count, ITEMS),
        kind,
    }
}

impl World {
    pub fn runs(&self) -> Runs {
        Runs::of_kind(&self.source_pages, &self.destination_pages, self.kind).unwrap()
    }

    /// Label that every byte of every destination rank receives.
    pub fn received(&self, capabilities: &Capabilities) -> Vec<BTreeMap<u64, Label>> {
        let sources: Vec<_> = self.agreement.local.manifests().iter().map(|manifest| bytes_of(manifest)).collect();
        let mut images = Vec::new();
        for remote in 0..self.agreement.remote.manifests().len() {
            let mut image = BTreeMap::new();
            for (local, labels) in sources.iter().enumerate() {
                let plan = Plan::new(self.agreement.route(local, remote).unwrap(), self.runs()).unwrap();
                let lowered = lower(&plan, capabilities).unwrap();
                let map = byte_map(&lowered);
                assert_eq!(map.len() as u64, plan.nbytes());
                assert_eq!(lowered.total_bytes, plan.nbytes());
                for (to, from) in map {
                    let label = labels.get(&from).expect("a byte outside every source buffer is read");
                    assert!(image.insert(to, *label).is_none(), "two source ranks write one byte");
                }
            }
            images.push(image);
        }
        images
    }
}

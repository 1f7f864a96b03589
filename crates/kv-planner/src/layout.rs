//! Owns what is the same on every rank of a deployment: components with their
//! geometry, page size, fingerprint. It does not own addresses or placement.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::address;
use crate::error::{ErrorKind, PlanError, Result};
use crate::words::{Axis, Component, DType, ItemKind, Part};

/// Geometry of one component of one part.
///
/// Invariants: 1. at least one layer id; 2. heads and dims are positive;
/// 3. `axes` names token, head and dim once each; 4. the compression is 1 or more, 1
/// where items are no pages, and the one of the component's name; 5. several rows and
/// groups are those of request rows; groups add up to the dims, and the head axis is
/// outside the dim axis. A layer id that stands k times means k buffers, told apart by
/// their occurrence 0..k.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComponentSpec {
    /// What the buffers hold.
    pub component: Component,
    /// The model they belong to.
    pub part: Part,
    /// Global layer ids that have this component, over all stages.
    pub layer_ids: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// Heads over all tensor-parallel ranks.
    pub total_heads: u64,
    /// Elements of one head.
    pub dims: u64,
    /// Order of the axes inside an item, outermost first.
    pub axes: [Axis; 3],
    /// What one item is.
    pub item_kind: ItemKind,
    /// Tokens that one entry of a page stands for; 1 without compression.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub compression: u64,
    /// Entries along the token axis of a request's row, such as the window of a convolution.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub rows: u64,
    /// Dims of groups that lie side by side, each with all its heads, and are sharded one by one: an
    /// axis just outside the head axis. None where a head's dims lie together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<u64>,
}

fn one() -> u64 {
    1
}

fn is_one(number: &u64) -> bool {
    *number == 1
}

fn invalid(subject: String, local: impl Into<crate::Value>, consequence: &str, remedy: &str) -> PlanError {
    PlanError::new(ErrorKind::LayoutError, subject, local, crate::Value::Absent, consequence, remedy)
}

impl ComponentSpec {
    /// Name of the component and part, as errors spell it.
    pub fn name(&self) -> String {
        format!("{}/{}", self.component, self.part)
    }

    /// Layer ids with the number of times each stands, sorted by id.
    pub fn counted_ids(&self) -> BTreeMap<u64, u64> {
        let mut counts = BTreeMap::new();
        for id in &self.layer_ids {
            *counts.entry(*id).or_insert(0) += 1;
        }
        counts
    }

    /// Entries along the token axis of one item: token slots, fewer where entries are compressed, or a state's rows.
    pub fn tokens(&self, page_size: u64) -> u64 {
        match self.item_kind {
            ItemKind::Page => page_size / self.compression.max(1),
            ItemKind::RequestRow => self.rows,
            ItemKind::Token => 1,
        }
    }

    /// Bytes of one item that holds `heads` heads.
    pub fn item_bytes(&self, page_size: u64, heads: u64) -> Result<u64> {
        address::product(&[self.tokens(page_size), heads, self.dims, self.dtype.itemsize()])
    }

    /// Axes with more than one element, outermost first: what fixes the byte order.
    pub fn byte_order(&self, page_size: u64, heads: u64) -> Vec<Axis> {
        let extent = |axis: &Axis| match axis {
            Axis::Token => self.tokens(page_size),
            Axis::Head => heads.max(self.groups.len() as u64),
            Axis::Dim => self.dims,
        };
        self.axes.iter().copied().filter(|axis| extent(axis) > 1).collect()
    }

    /// Checks the invariants.
    pub fn validate(&self) -> Result<()> {
        let name = self.name();
        if self.layer_ids.is_empty() {
            return Err(invalid(
                format!("{name}.layer_ids"),
                "an empty list",
                "the component would exist on no layer",
                "leave the component out, or list its global layer ids",
            ));
        }
        for (field, value) in [("total_heads", self.total_heads), ("dims", self.dims)] {
            if value == 0 {
                return Err(invalid(format!("{name}.{field}"), value, "an item would have no bytes", "give 1 or more"));
            }
        }
        if BTreeSet::from(self.axes).len() != 3 {
            let given: Vec<&str> = self.axes.iter().map(|axis| axis.as_str()).collect();
            return Err(invalid(
                format!("{name}.axes"),
                given.join(", "),
                "an axis is named twice, so the order of bytes is undefined",
                "name token, head and dim once each",
            ));
        }
        let named = self.component.compression().unwrap_or(self.compression);
        if self.compression == 0 || self.compression != named {
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                format!("{name}.compression"),
                self.compression,
                named.max(1),
                "an entry would stand for another number of tokens than its name says",
                "give the tokens of one entry, 1 without compression",
            ));
        }
        if self.compression > 1 && self.item_kind != ItemKind::Page {
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                format!("{name}.compression"),
                self.compression,
                1u64,
                "only pages hold entries that stand for several tokens",
                "give item_kind 'page', or no compression",
            ));
        }
        self.validate_rows(&name)?;
        self.item_bytes(self.compression, self.total_heads).map(|_| ())
    }

    fn validate_rows(&self, name: &str) -> Result<()> {
        if self.rows == 0 {
            return Err(invalid(format!("{name}.rows"), 0u64, "an item would have no bytes", "give 1 or more"));
        }
        if (self.rows > 1 || !self.groups.is_empty()) && self.item_kind != ItemKind::RequestRow {
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                format!("{name}.item_kind"),
                self.item_kind.as_str(),
                ItemKind::RequestRow.as_str(),
                "only a request's row has rows and groups of its own; a page has its tokens",
                "give item_kind 'request_row', or neither rows nor groups",
            ));
        }
        let sum = self.groups.iter().try_fold(0u64, |sum, dims| sum.checked_add(*dims));
        if !self.groups.is_empty() && (sum != Some(self.dims) || self.groups.contains(&0)) {
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                format!("{name}.groups"),
                self.groups.iter().map(u64::to_string).collect::<Vec<_>>().join(" + "),
                self.dims,
                "the groups do not make up a head, so bytes would be left out or sent twice",
                "give dims, each 1 or more, that add up to the head's",
            ));
        }
        let place = |axis: Axis| self.axes.iter().position(|own| *own == axis);
        if !self.groups.is_empty() && place(Axis::Dim) < place(Axis::Head) {
            return Err(invalid(
                format!("{name}.axes"),
                self.axes.map(|axis| axis.as_str()).join(", "),
                "groups lie side by side, each with all its heads, which needs the heads outside the dims",
                "name head before dim, or give no groups",
            ));
        }
        Ok(())
    }
}

/// Geometry that all ranks of a deployment share.
///
/// Invariants: 1. at least one component, each (component, part) once; 2. page
/// size positive, a multiple of the kernel block size and of every compression; 3. a fingerprint;
/// 4. target and draft layer ids are disjoint, because ids are global.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelLayout {
    /// Components in the order in which they were given.
    pub components: Vec<ComponentSpec>,
    /// Token slots of a page.
    pub page_size: u64,
    /// Identity of the model weights.
    pub fingerprint: String,
    /// Block size of the attention kernel; `None` means the page size.
    pub kernel_block_size: Option<u64>,
    /// Version of the layout's meaning.
    pub format_version: u64,
}

impl ModelLayout {
    /// Checks the invariants and returns the layout.
    pub fn validated(self) -> Result<Self> {
        if self.components.is_empty() {
            return Err(invalid(
                "components".into(),
                "an empty list",
                "there would be nothing to move",
                "declare at least one",
            ));
        }
        let mut seen = BTreeSet::new();
        for spec in &self.components {
            spec.validate()?;
            if !seen.insert((spec.component, spec.part)) {
                return Err(invalid(
                    "components".into(),
                    format!("{} twice", spec.name()),
                    "entries could not tell the two apart",
                    "join their layer ids in one spec",
                ));
            }
        }
        if self.page_size == 0 {
            return Err(invalid("page_size".into(), 0u64, "a page would hold no token", "give 1 or more"));
        }
        if let Some(spec) = self.components.iter().find(|spec| !self.page_size.is_multiple_of(spec.compression)) {
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                format!("{}.compression", spec.name()),
                spec.compression,
                self.page_size,
                "an entry would stand for tokens of two pages",
                "choose a page size that is a multiple of every compression",
            ));
        }
        if let Some(block) = self.kernel_block_size
            && (block == 0 || !self.page_size.is_multiple_of(block))
        {
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                "kernel_block_size",
                block,
                self.page_size,
                "a kernel block would straddle two pages",
                "choose a block size that divides the page size",
            ));
        }
        if self.fingerprint.is_empty() {
            return Err(invalid(
                "fingerprint".into(),
                "an empty text",
                "caches of two models could not be told apart",
                "give a digest of the model's weights and configuration",
            ));
        }
        if self.format_version == 0 {
            return Err(invalid("format_version".into(), 0u64, "versions start at 1", "give 1 or more"));
        }
        let ids = |part: Part| -> BTreeSet<u64> {
            self.components.iter().filter(|spec| spec.part == part).flat_map(|spec| spec.layer_ids.clone()).collect()
        };
        let (target, draft) = (ids(Part::Target), ids(Part::Draft));
        if let Some(shared) = target.intersection(&draft).next() {
            let first_free = target.last().and_then(|last| last.checked_add(1));
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                "draft layer_ids",
                *shared,
                first_free.map_or_else(|| "no id after the target's last".into(), crate::Value::from),
                format!("layer id {shared} would name a target and a draft layer, and ids are global over the model"),
                first_free.map_or_else(
                    || "number the target's layers from 0, and draft layers after them".to_owned(),
                    |first| format!("number draft layers after the target's, from {first}"),
                ),
            ));
        }
        Ok(self)
    }

    /// The component's spec, or an error that lists what the layout has.
    pub fn spec(&self, component: Component, part: Part) -> Result<&ComponentSpec> {
        self.find(component, part).ok_or_else(|| {
            let known: Vec<String> = self.components.iter().map(ComponentSpec::name).collect();
            PlanError::new(
                ErrorKind::LayoutError,
                "component",
                format!("{component}/{part}"),
                known.join(", "),
                "the layout has no such component",
                "ask for one that the layout declares",
            )
        })
    }

    /// The component's spec where the layout has one.
    pub fn find(&self, component: Component, part: Part) -> Option<&ComponentSpec> {
        self.components.iter().find(|spec| spec.component == component && spec.part == part)
    }

    /// Bytes of one item with all heads, or with `heads` of them.
    pub fn item_bytes(&self, component: Component, part: Part, heads: Option<u64>) -> Result<u64> {
        let spec = self.spec(component, part)?;
        let heads = heads.unwrap_or(spec.total_heads);
        if heads > spec.total_heads {
            return Err(PlanError::new(
                ErrorKind::LayoutError,
                "heads",
                heads,
                spec.total_heads,
                "a rank cannot hold more heads than the model has",
                "give at most the total",
            ));
        }
        spec.item_bytes(self.page_size, heads)
    }

    /// Block size that kernels see.
    pub fn effective_kernel_block(&self) -> u64 {
        self.kernel_block_size.unwrap_or(self.page_size)
    }

    /// The layout as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads and validates a layout.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str::<ModelLayout>(text).map_err(|error| bad_json("ModelLayout", &error))?.validated()
    }
}

/// The error of a text that is not the JSON of `what`.
pub(crate) fn bad_json(what: &str, error: &serde_json::Error) -> PlanError {
    PlanError::new(
        ErrorKind::FormatError,
        format!("{what} JSON"),
        error.to_string(),
        crate::Value::Absent,
        "the text cannot be read as this type",
        "send what to_json() of the same version produced",
    )
}

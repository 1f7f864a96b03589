//! Owns the arithmetic of moving paged KV caches: who holds what, which bytes
//! go where, and in which blocks. It does not own memory, engines, processes or
//! Python: a plan is data, and nothing here reads or writes through an address.
//!
//! The order of use is [`ModelLayout`] → [`RankManifest`] → [`Deployment`] →
//! [`agree()`] → [`Route`] × [`Runs`] = [`Plan`] → [`lower()`].
#![forbid(unsafe_code)]

mod address;
pub mod agree;
mod complete;
pub mod deployment;
pub mod error;
pub mod guard;
pub mod heads;
pub mod layout;
pub mod lengths;
pub mod lower;
pub mod manifest;
mod offsets;
mod overlap;
pub mod plan;
pub mod prefix;
pub mod route;
pub mod rows;
pub mod runs;
pub mod select;
pub mod words;

pub use agree::{Agreement, Side, agree, agree_on};
pub use deployment::Deployment;
pub use error::{Difference, ErrorKind, PlanError, Result, Value};
pub use guard::guarded;
pub use heads::split_heads;
pub use layout::{ComponentSpec, ModelLayout};
pub use lengths::{SpeculativeKind, first_draft_id, kv_lengths, page_count};
pub use lower::{Batch, Capabilities, LoweredPlan, lower, lower_into};
pub use manifest::{BufferEntry, EntryName, Placement, RankManifest};
pub use plan::{Plan, Slice};
pub use prefix::{
    EvictOptions, Eviction, Inserted, LockId, Namespace, NodeId, PrefixCounts, PrefixIndex, PrefixMatch, Tier,
    TierCounts, page_hashes,
};
pub use route::{Route, RoutePair};
pub use rows::{Fill, RowField, RowLayout};
pub use runs::{Run, Runs};
pub use select::select_index;
pub use words::{Axis, Component, DType, ItemKind, Part};

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
pub mod describe;
pub mod error;
pub mod guard;
pub mod heads;
pub mod interleave;
pub mod layout;
pub mod lower;
pub mod manifest;
mod offsets;
mod overlap;
pub mod plan;
pub mod pointers;
pub mod prefix;
pub mod regions;
pub mod route;
pub mod runs;
pub mod states;
pub mod steps;
pub mod within;
pub mod words;

pub use agree::{Agreement, Side, agree, agree_on};
pub use deployment::Deployment;
pub use describe::Describe;
pub use error::{Difference, ErrorKind, PlanError, Result, Value};
pub use guard::guarded;
pub use heads::split_heads;
pub use interleave::{Context, Slots, Span, page_interleaved, token_interleaved};
pub use layout::{ComponentSpec, ModelLayout};
pub use lower::{Batch, Capabilities, LoweredPlan, lower, lower_into};
pub use manifest::{BufferEntry, EntryName, Placement, RankManifest};
pub use plan::{Plan, Slice};
pub use pointers::{name_pointers, pair_names};
pub use prefix::{
    EvictOptions, Eviction, Inserted, LockId, Namespace, NodeId, PrefixCounts, PrefixIndex, PrefixMatch,
    PrefixStatistics, Tier, TierCounts, page_hashes,
};
pub use regions::{RegionLimits, Regions};
pub use route::{Route, RoutePair};
pub use runs::{Run, Runs};
pub use states::{StateBuffer, StateGroup, StatePiece, StateRoute};
pub use steps::{
    Fill, Moves, RowField, RowLayout, SpeculativeKind, WidenedLengths, accepted_moves, addressable, draft_lengths,
    first_draft_id, first_valid, kv_lengths, last_accepted, local_lengths, page_capacity, page_count, placeholders_fit,
    query_ends, select_index, token_capacity, token_offsets, widened_lengths, window_pages,
};
pub use within::lower_within;
pub use words::{Axis, Component, DType, ItemKind, Part};

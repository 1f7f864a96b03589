//! Owns the prefix index: which whole pages of which token sequences are held,
//! on the device and on the host, and the hash chain of pages. It does not own
//! pages' bytes, their allocation, or any copy: it is told when one has ended.
//!
//! [`PrefixIndex`] is the crate's only stateful type. It has its own lock, and
//! every method is one atomic step: it is refused as a whole or done as a whole.

mod account;
mod attach;
mod evict;
mod hash;
mod index;
mod node;
mod pin;
mod statistics;
#[cfg(test)]
mod tests;
mod texts;
mod tree;
mod walk;
mod withdraw;

pub use account::{PrefixCounts, TierCounts};
pub use evict::{EvictOptions, Eviction};
pub use hash::{Namespace, page_hashes};
pub use index::PrefixIndex;
pub use node::{NodeId, Tier};
pub use pin::LockId;
pub use statistics::PrefixStatistics;
pub use walk::{Inserted, PrefixMatch};

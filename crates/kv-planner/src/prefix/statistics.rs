//! Owns the totals of what an index has done since it was made. It does not own counts
//! of the present, which are the accounts'.

use super::node::Tier;

/// Totals since the index was made; refused calls count nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PrefixStatistics {
    /// Matches, locked ones included.
    pub matches: u64,
    /// Tokens that matches asked for, up to their limits.
    pub asked_tokens: u64,
    /// Tokens that matches found in either tier.
    pub matched_tokens: u64,
    /// Pages that inserts gave to the index, in either tier.
    pub inserted_pages: u64,
    /// Pages that inserts handed back, because the index had others of their content.
    pub duplicate_pages: u64,
    /// Pages recorded as copied to the host.
    pub backed_up_pages: u64,
    /// Pages recorded as copied back to the device.
    pub loaded_pages: u64,
    /// Device pages that left.
    pub evicted_device_pages: u64,
    /// Host pages that left.
    pub evicted_host_pages: u64,
}

impl PrefixStatistics {
    pub(super) fn evicted(&mut self, tier: Tier, pages: u64) {
        match tier {
            Tier::Device => self.evicted_device_pages += pages,
            Tier::Host => self.evicted_host_pages += pages,
        }
    }

    pub(super) fn attached(&mut self, tier: Tier, pages: u64) {
        match tier {
            Tier::Device => self.loaded_pages += pages,
            Tier::Host => self.backed_up_pages += pages,
        }
    }
}

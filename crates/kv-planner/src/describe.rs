//! Owns what every type says about itself in plain words, for people. It does not own
//! a format that programs read: that is JSON. Long because one place for all words keeps them alike.

use crate::agree::{Agreement, id_list};
use crate::deployment::Deployment;
use crate::error::Difference;
use crate::layout::{ComponentSpec, ModelLayout};
use crate::lower::Capabilities;
use crate::manifest::{BufferEntry, Placement, RankManifest};
use crate::plan::Plan;
use crate::prefix::{Eviction, Inserted, PrefixCounts, PrefixIndex, PrefixMatch, PrefixStatistics, TierCounts};
use crate::regions::Regions;
use crate::route::{Route, RoutePair};
use crate::runs::Runs;
use crate::states::StateRoute;
use crate::steps::{RowField, RowLayout};

/// Says in plain words what a value is: a line, and more lines where it has parts.
pub trait Describe {
    /// The text, without a line break at its end.
    fn describe(&self) -> String;
}

/// A number with a binary unit where that is exact enough to be read: `1536 bytes`, `2.5 MiB`.
pub fn bytes(number: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let exact = |power: u32| number >= 1 << power && number.trailing_zeros() >= power;
    match UNITS.iter().find(|(_, power)| number >= 10 << power || exact(*power)) {
        None => format!("{number} bytes"),
        Some((name, power)) if exact(*power) => format!("{} {name}", number >> power),
        Some((name, power)) => format!("{:.1} {name}", number as f64 / (1u64 << power) as f64),
    }
}

fn counted(number: u64, singular: &str, plural: &str) -> String {
    format!("{number} {}", if number == 1 { singular } else { plural })
}

fn lines<T>(head: String, items: impl Iterator<Item = T>, line: impl Fn(T) -> String) -> String {
    items.fold(head, |text, item| text + "\n  " + &line(item).replace('\n', "\n  "))
}

impl Describe for ComponentSpec {
    fn describe(&self) -> String {
        let axes = self.axes.map(|axis| axis.as_str()).join(" × ");
        let ratio =
            if self.compression == 1 { String::new() } else { format!(", one entry for {} tokens", self.compression) };
        let rows = if self.rows == 1 { String::new() } else { format!(", {} rows", self.rows) };
        let groups: Vec<String> = self.groups.iter().map(u64::to_string).collect();
        let groups = if groups.is_empty() {
            String::new()
        } else {
            format!(", in groups of {} elements of every head, side by side", groups.join(" + "))
        };
        format!(
            "{} on layers {}: {} of {} {} elements, a {} is {axes}{ratio}{rows}{groups}",
            self.name(),
            id_list(&self.layer_ids),
            counted(self.total_heads, "head", "heads"),
            self.dims,
            self.dtype,
            self.item_kind.as_str().replace('_', " "),
        )
    }
}

impl Describe for ModelLayout {
    fn describe(&self) -> String {
        let head = format!(
            "layout of model {:?}, format {}: pages of {} tokens, kernel blocks of {}",
            self.fingerprint,
            self.format_version,
            self.page_size,
            self.effective_kernel_block()
        );
        lines(head, self.components.iter(), |spec| {
            let item = self.item_bytes(spec.component, spec.part, None).map_or_else(|_| "too many bytes".into(), bytes);
            format!("{}; {item} with all heads", spec.describe())
        })
    }
}

impl Describe for Placement {
    fn describe(&self) -> String {
        let mut text = format!(
            "pipeline stage {} of {}, tensor-parallel rank {} of {}",
            self.pp_rank, self.pp_size, self.tp_rank, self.tp_size
        );
        if self.dcp_size > 1 {
            text += &format!(", context-parallel rank {} of {}", self.dcp_rank, self.dcp_size);
        }
        if self.dp_size > 1 {
            text += &format!(", data-parallel rank {} of {}", self.dp_rank, self.dp_size);
        }
        text
    }
}

impl Describe for BufferEntry {
    fn describe(&self) -> String {
        format!(
            "{}: heads {}..{} in {} of {}, {} apart, at {:#x} on {}",
            self.name(),
            self.head_range.0,
            self.head_range.1,
            counted(self.items(), "item", "items"),
            bytes(self.item_bytes),
            bytes(self.item_stride),
            self.address,
            self.device
        )
    }
}

impl Describe for RankManifest {
    fn describe(&self) -> String {
        let total = self.entries.iter().map(|entry| u128::from(entry.nbytes)).sum::<u128>();
        let total = u64::try_from(total).map_or_else(|_| format!("{total} bytes"), bytes);
        let head = format!(
            "rank at {}: {}, {total}",
            self.placement.describe(),
            counted(self.entries.len() as u64, "buffer", "buffers")
        );
        lines(head, self.entries.iter(), BufferEntry::describe)
    }
}

impl Describe for Deployment {
    fn describe(&self) -> String {
        let ranks = self.manifests();
        let head = format!(
            "deployment of {} of model {:?}",
            counted(ranks.len() as u64, "rank", "ranks"),
            self.layout().fingerprint
        );
        lines(head, ranks.iter().enumerate(), |(index, rank)| {
            let mut layers: Vec<u64> = rank.entries.iter().map(|entry| entry.layer_id).collect();
            layers.sort_unstable();
            layers.dedup();
            format!(
                "{index}: {}, layers {}",
                rank.placement.describe(),
                if layers.is_empty() { "none".into() } else { id_list(&layers) }
            )
        })
    }
}

impl Describe for Difference {
    fn describe(&self) -> String {
        format!(
            "{}\n  local: {}\n  remote: {}\n  consequence: {}\n  remedy: {}",
            self.field, self.local, self.remote, self.consequence, self.remedy
        )
    }
}

impl Describe for Agreement {
    fn describe(&self) -> String {
        let parts: Vec<&str> = self.parts.iter().map(|part| part.as_str()).collect();
        let side = |side: &crate::agree::Side| {
            lines(String::new(), side.manifests().iter().enumerate(), |(index, rank)| {
                format!("{index}: {}", rank.placement.describe())
            })
        };
        format!("agreement on {}\nsends:{}\nreceives:{}", parts.join(" and "), side(&self.local), side(&self.remote))
    }
}

impl Describe for RoutePair {
    fn describe(&self) -> String {
        let pieces = if self.rows == 1 {
            bytes(self.row_bytes)
        } else {
            format!("{} pieces of {}", self.rows, bytes(self.row_bytes))
        };
        format!(
            "{}: heads {}..{} of source buffer {} to heads {}..{} of destination buffer {}, {pieces} a {}",
            self.name(),
            self.source_heads.0,
            self.source_heads.1,
            self.source_entry,
            self.destination_heads.0,
            self.destination_heads.1,
            self.destination_entry,
            self.item_kind.as_str().replace('_', " ")
        )
    }
}

impl Describe for Route {
    fn describe(&self) -> String {
        let (from, to) = (self.source().placement.describe(), self.destination().placement.describe());
        let head = match self.pairs() {
            [] => format!("nothing from {from} to {to}"),
            pairs => format!(
                "{} from {from} to {to}, {} an item",
                counted(pairs.len() as u64, "pair", "pairs"),
                bytes(self.item_bytes())
            ),
        };
        lines(head, self.pairs().iter(), RoutePair::describe)
    }
}

impl Describe for Runs {
    fn describe(&self) -> String {
        let kind = self.item_kind().as_str().replace('_', " ");
        let share = self.context().map_or_else(String::new, |own| {
            format!(", the share of context-parallel rank {} of {}", own.rank, own.size)
        });
        let head = format!(
            "{} in {}{share}",
            counted(self.page_count(), &kind, &format!("{kind}s")),
            counted(self.run_count(), "run", "runs")
        );
        lines(head, self.runs().iter().take(16), |run| {
            format!("{} from {} to {}", run.count, run.source, run.destination)
        }) + if self.run_count() > 16 { "\n  …" } else { "" }
    }
}

impl Describe for Plan {
    fn describe(&self) -> String {
        let head = format!("plan: {} in {}", bytes(self.nbytes()), counted(self.block_count(), "block", "blocks"));
        lines(head, [self.runs().describe(), self.route().describe()].into_iter(), |part| part)
    }
}

impl Describe for Capabilities {
    fn describe(&self) -> String {
        let spell = |limit: Option<u64>| limit.map_or_else(|| "any number of".into(), |limit| limit.to_string());
        let longest =
            self.max_block_bytes.map_or_else(|| "of any length".into(), |limit| format!("of at most {}", bytes(limit)));
        format!(
            "{} blocks a batch, {longest}; {} blocks a plan",
            spell(self.max_entries_per_batch),
            spell(self.max_blocks)
        )
    }
}

impl Describe for Regions {
    fn describe(&self) -> String {
        let head = format!("{} of {}", counted(self.spans().len() as u64, "region", "regions"), bytes(self.nbytes()));
        lines(head, self.spans().iter(), |(start, end)| format!("{start:#x}..{end:#x}, {}", bytes(end - start)))
    }
}

impl Describe for StateRoute {
    fn describe(&self) -> String {
        let head = format!(
            "{} a request: a state of {} on the source, {} on the destination",
            counted(self.blocks_per_request(), "block", "blocks"),
            bytes(self.source_bytes()),
            bytes(self.destination_bytes())
        );
        lines(head, self.pieces().iter(), |piece| {
            format!("{} from {} to {} of a row", bytes(piece.bytes), piece.source, piece.destination)
        })
    }
}

impl Describe for RowField {
    fn describe(&self) -> String {
        let place = self.offset.map_or_else(|| "not placed yet".into(), |offset| format!("at byte {offset}"));
        format!(
            "{}: {} × {} {}, {}, {place}, padded with {}",
            self.name,
            self.rows,
            self.width,
            self.dtype,
            bytes(self.nbytes),
            self.fill
        )
    }
}

impl Describe for RowLayout {
    fn describe(&self) -> String {
        let head = format!("arena of {}, fields aligned to {}", bytes(self.nbytes()), bytes(self.alignment()));
        lines(head, self.fields().iter(), RowField::describe)
    }
}

impl Describe for TierCounts {
    fn describe(&self) -> String {
        format!(
            "{} of {} held: {} evictable, {} protected",
            self.held,
            counted(self.capacity, "page", "pages"),
            self.evictable,
            self.protected
        )
    }
}

impl Describe for PrefixCounts {
    fn describe(&self) -> String {
        format!(
            "device: {}\nhost: {}\n{} in {}, {}",
            self.device.describe(),
            self.host.describe(),
            counted(self.nodes, "node", "nodes"),
            counted(self.namespaces, "namespace", "namespaces"),
            counted(self.locks, "lock", "locks")
        )
    }
}

impl Describe for PrefixIndex {
    fn describe(&self) -> String {
        let head = format!("prefix index of pages of {} tokens", self.page_size());
        match self.counts() {
            Ok(counts) => format!("{head}\n  {}", counts.describe().replace('\n', "\n  ")),
            Err(error) => format!("{head}\n  {error}"),
        }
    }
}

impl Describe for PrefixMatch {
    fn describe(&self) -> String {
        format!(
            "match of {}: {} on the device, {} on the host",
            counted(self.tokens(), "token", "tokens"),
            self.device_tokens(),
            self.host_tokens()
        )
    }
}

impl Describe for PrefixStatistics {
    fn describe(&self) -> String {
        let share = |part: u64, all: u64| if all == 0 { 0.0 } else { 100.0 * part as f64 / all as f64 };
        format!(
            "{}: {} of {} found ({:.1} %)\n{} inserted, {} duplicate\n{} backed up, {} loaded\nevicted: {} device, {} host",
            counted(self.matches, "match", "matches"),
            self.matched_tokens,
            counted(self.asked_tokens, "token", "tokens"),
            share(self.matched_tokens, self.asked_tokens),
            counted(self.inserted_pages, "page", "pages"),
            self.duplicate_pages,
            counted(self.backed_up_pages, "page", "pages"),
            self.loaded_pages,
            self.evicted_device_pages,
            self.evicted_host_pages
        )
    }
}

impl Describe for Inserted {
    fn describe(&self) -> String {
        format!(
            "{}: {} taken over, {} duplicate and the caller's to release, {} the index's already",
            counted(self.nodes.len() as u64, "page", "pages"),
            self.taken.len(),
            self.duplicate.len(),
            self.shared.len()
        )
    }
}

impl Describe for Eviction {
    fn describe(&self) -> String {
        let waiting = match self.needs_backup.len() {
            0 => String::new(),
            nodes => format!(", {nodes} to back up first"),
        };
        format!(
            "{} freed: {} left the index, {} stay in the other tier; {} wanted and not freed{waiting}",
            counted(self.pages.len() as u64, "page", "pages"),
            self.removed.len(),
            self.kept.len(),
            self.shortfall
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_a_unit_where_it_is_exact_or_large() {
        let spelled = [0, 1, 1000, 1024, 1536, 10240, 10241, 1 << 20, (1 << 20) + 1, 5 << 30, u64::MAX].map(bytes);
        let wanted = [
            "0 bytes",
            "1 bytes",
            "1000 bytes",
            "1 KiB",
            "1536 bytes",
            "10 KiB",
            "10.0 KiB",
            "1 MiB",
            "1024.0 KiB",
            "5 GiB",
            "16777216.0 TiB",
        ];
        assert_eq!(spelled, wanted);
    }
}

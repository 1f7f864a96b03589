//! Owns the slices of a recurrent state whose groups are sharded independently, such as
//! the convolution inputs of a linear-attention layer. It does not own states that all
//! ranks hold alike: those are components of a layout.

use crate::address;
use crate::error::{ErrorKind, PlanError, Result};
use crate::heads::{HeadRange, customary_owners, intersect, sends, split_heads};
use crate::lower::Batch;
use crate::runs::Runs;
use crate::words::ItemKind;

/// One group of a state: `heads` over all ranks, each `bytes` long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateGroup {
    /// Heads, or channels, over all tensor-parallel ranks.
    pub heads: u64,
    /// Bytes of one of them in one row.
    pub bytes: u64,
}

/// A tensor-parallel rank and the number of ranks.
pub type Share = (u64, u64);

/// Bytes of one row of a request's state that one rank sends to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StatePiece {
    /// Offset in a row of the source.
    pub source: u64,
    /// Offset in a row of the destination.
    pub destination: u64,
    /// Length.
    pub bytes: u64,
}

/// What one rank sends to another of a state of `rows` rows of groups side by side.
///
/// Invariants: 1. every group divides over both sides' ranks or replicates evenly;
/// 2. rows and group lengths are positive; 3. over all source ranks, every byte of a
/// destination's state is sent once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StateRoute {
    rows: u64,
    pieces: Vec<StatePiece>,
    source_row: u64,
    destination_row: u64,
}

impl StateRoute {
    /// The pieces of every group, in order.
    pub fn new(groups: &[StateGroup], rows: u64, source: Share, destination: Share) -> Result<StateRoute> {
        let empty = |subject: String, why: &str| {
            let remedy = "give the widths of the state as the model has them";
            PlanError::new(ErrorKind::LayoutError, subject, 0u64, 1u64, why, remedy)
        };
        if rows == 0 || groups.is_empty() {
            let subject = if rows == 0 { "rows" } else { "groups" };
            return Err(empty(subject.into(), "the state would have no bytes"));
        }
        let mut route = StateRoute { rows, pieces: Vec::new(), source_row: 0, destination_row: 0 };
        for (position, group) in groups.iter().enumerate() {
            if group.bytes == 0 {
                return Err(empty(format!("groups[{position}]"), "the group would have no bytes"));
            }
            let own = split_heads(group.heads, source.0, source.1)?;
            let wanted = split_heads(group.heads, destination.0, destination.1)?;
            let sources = customary_owners(group.heads, source.0, source.1, own);
            let receivers = customary_owners(group.heads, destination.0, destination.1, wanted);
            if let Some(common) = intersect(own, wanted)
                && sends(&sources, &receivers, source.0, destination.0)
            {
                let at = |row: u64, range: HeadRange| address::at(row, common.0 - range.0, group.bytes, 0);
                let (from, to) = (at(route.source_row, own)?, at(route.destination_row, wanted)?);
                let bytes = address::product(&[common.1 - common.0, group.bytes])?;
                match route.pieces.last_mut() {
                    Some(last) if last.source + last.bytes == from && last.destination + last.bytes == to => {
                        last.bytes += bytes;
                    }
                    _ => route.pieces.push(StatePiece { source: from, destination: to, bytes }),
                }
            }
            let width = |row: u64, range: HeadRange| address::at(row, range.1 - range.0, group.bytes, 0);
            route.source_row = width(route.source_row, own)?;
            route.destination_row = width(route.destination_row, wanted)?;
        }
        address::product(&[rows, route.source_row])?;
        address::product(&[rows, route.destination_row])?;
        Ok(route)
    }

    /// Pieces of one row, neighbours joined.
    pub fn pieces(&self) -> &[StatePiece] {
        &self.pieces
    }

    /// Bytes of one request's state on the source rank.
    pub fn source_bytes(&self) -> u64 {
        self.rows * self.source_row
    }

    /// Bytes of one request's state on the destination rank.
    pub fn destination_bytes(&self) -> u64 {
        self.rows * self.destination_row
    }

    /// Blocks that one request takes.
    pub fn blocks_per_request(&self) -> u64 {
        if self.joins_rows() { 1 } else { self.rows * self.pieces.len() as u64 }
    }

    /// Whether a request's state is one block: all of it, alike on both sides.
    fn joins_rows(&self) -> bool {
        let whole = StatePiece { source: 0, destination: 0, bytes: self.source_row };
        self.source_row == self.destination_row && self.pieces == [whole]
    }

    /// Blocks that move the states of some requests between two buffers.
    pub fn lower(&self, source: StateBuffer, destination: StateBuffer, requests: &Runs) -> Result<Batch> {
        if requests.item_kind() != ItemKind::RequestRow {
            return Err(PlanError::new(
                ErrorKind::ItemKindMismatch,
                "requests",
                requests.item_kind().as_str(),
                ItemKind::RequestRow.as_str(),
                "pages would be taken for requests, of which each has one state",
                "make the runs with item_kind 'request_row'",
            ));
        }
        let last = requests.last_items();
        source.check("source", self.source_bytes(), last.map(|last| last.0))?;
        destination.check("destination", self.destination_bytes(), last.map(|last| last.1))?;
        let mut batch = Batch::default();
        for run in requests.runs() {
            for step in 0..run.count {
                let from = source.address + (run.source + step) * source.stride;
                let to = destination.address + (run.destination + step) * destination.stride;
                if self.joins_rows() {
                    batch.push(from, to, self.source_bytes());
                    continue;
                }
                for row in 0..self.rows {
                    for piece in &self.pieces {
                        let source = from + row * self.source_row + piece.source;
                        batch.push(source, to + row * self.destination_row + piece.destination, piece.bytes);
                    }
                }
            }
        }
        Ok(batch)
    }
}

/// A buffer of states, one an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateBuffer {
    /// Address of item 0.
    pub address: u64,
    /// Bytes from one item to the next.
    pub stride: u64,
    /// Items.
    pub items: u64,
}

impl StateBuffer {
    fn check(&self, side: &str, bytes: u64, last: Option<u64>) -> Result<()> {
        if self.stride < bytes {
            return Err(PlanError::new(
                ErrorKind::ManifestError,
                format!("{side}.stride"),
                self.stride,
                bytes,
                "states of two requests would overlap",
                "give bytes from one request's state to the next; both sides need the same rows and groups",
            ));
        }
        if let Some(last) = last.filter(|last| *last >= self.items) {
            return Err(PlanError::new(
                ErrorKind::PageOutOfRange,
                format!("{side} request row"),
                last,
                self.items,
                "the row lies beyond the buffer and would address foreign memory",
                "give rows below the buffer's number of items",
            ));
        }
        address::at(self.address, self.items, self.stride, 0).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(widths: &[u64]) -> Vec<StateGroup> {
        widths.iter().map(|heads| StateGroup { heads: *heads, bytes: 1 }).collect()
    }

    #[test]
    fn groups_are_sharded_one_by_one() {
        let piece = |source, destination, bytes| StatePiece { source, destination, bytes };
        let route = StateRoute::new(&channels(&[8, 8, 16]), 1, (0, 1), (1, 2)).unwrap();
        assert_eq!(route.pieces(), [piece(4, 0, 4), piece(12, 4, 4), piece(24, 8, 8)]);
        assert_eq!((route.source_bytes(), route.destination_bytes()), (32, 16));
        let back = StateRoute::new(&channels(&[8, 8, 16]), 1, (1, 2), (0, 1)).unwrap();
        assert_eq!(back.pieces(), [piece(0, 4, 4), piece(4, 12, 4), piece(8, 24, 8)]);
    }

    #[test]
    fn equal_shards_are_one_block() {
        let route = StateRoute::new(&channels(&[8, 16]), 3, (1, 2), (1, 2)).unwrap();
        assert_eq!((route.pieces().len(), route.blocks_per_request(), route.source_bytes()), (1, 1, 36));
        assert!(StateRoute::new(&channels(&[8]), 1, (0, 2), (1, 2)).unwrap().pieces().is_empty());
    }

    #[test]
    fn every_destination_byte_is_sent_once_whatever_the_sizes() {
        let groups = [StateGroup { heads: 2, bytes: 3 }, StateGroup { heads: 8, bytes: 1 }];
        let label = |group: usize, head: u64, byte: u64| (group, head, byte);
        for source_size in [1, 2, 4, 8] {
            for destination_size in [1, 2, 4, 8] {
                for rank in 0..destination_size {
                    let layout = |share: Share| -> Vec<(usize, u64, u64)> {
                        let parts = groups.iter().enumerate().flat_map(|(number, group)| {
                            let (start, stop) = split_heads(group.heads, share.0, share.1).unwrap();
                            let heads =
                                (start..stop).flat_map(move |head| (0..group.bytes).map(move |byte| (head, byte)));
                            heads.map(move |(head, byte)| label(number, head, byte))
                        });
                        parts.collect()
                    };
                    let wanted = layout((rank, destination_size));
                    let mut received = vec![None; wanted.len()];
                    for source in 0..source_size {
                        let route =
                            StateRoute::new(&groups, 2, (source, source_size), (rank, destination_size)).unwrap();
                        let own = layout((source, source_size));
                        for piece in route.pieces() {
                            for byte in 0..piece.bytes {
                                let place = &mut received[(piece.destination + byte) as usize];
                                assert!(place.replace(own[(piece.source + byte) as usize]).is_none());
                            }
                        }
                    }
                    assert_eq!(received, wanted.iter().copied().map(Some).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn rows_of_requests_are_exact() {
        let route = StateRoute::new(&channels(&[4, 4]), 2, (0, 1), (1, 2)).unwrap();
        let buffer = |address, stride| StateBuffer { address, stride, items: 4 };
        let rows = Runs::of_kind(&[3], &[1], ItemKind::RequestRow).unwrap();
        let batch = route.lower(buffer(1000, 16), buffer(2000, 10), &rows).unwrap();
        assert_eq!(batch.source, [1050, 1054, 1058, 1062]);
        assert_eq!(batch.destination, [2010, 2012, 2014, 2016]);
        assert_eq!(batch.nbytes, [2; 4]);
        let kind = |result: Result<Batch>| result.unwrap_err().kind;
        assert_eq!(kind(route.lower(buffer(1000, 15), buffer(2000, 10), &rows)), ErrorKind::ManifestError);
        let far = Runs::of_kind(&[1], &[4], ItemKind::RequestRow).unwrap();
        assert_eq!(kind(route.lower(buffer(1000, 16), buffer(2000, 10), &far)), ErrorKind::PageOutOfRange);
        let pages = Runs::new(&[1], &[1]).unwrap();
        assert_eq!(kind(route.lower(buffer(1000, 16), buffer(2000, 10), &pages)), ErrorKind::ItemKindMismatch);
        let high = route.lower(buffer(u64::MAX - 20, 16), buffer(2000, 10), &rows);
        assert_eq!(kind(high), ErrorKind::AddressOverflow);
        for (groups, rows) in [(vec![], 1), (channels(&[4]), 0), (vec![StateGroup { heads: 4, bytes: 0 }], 1)] {
            assert_eq!(StateRoute::new(&groups, rows, (0, 1), (0, 1)).unwrap_err().kind, ErrorKind::LayoutError);
        }
        assert_eq!(StateRoute::new(&channels(&[3]), 1, (0, 2), (0, 1)).unwrap_err().kind, ErrorKind::HeadsDoNotSplit);
    }
}

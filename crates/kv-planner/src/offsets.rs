//! Owns the offsets of blocks from the bases of a lane, split to a longest block.
//! Buffers of one geometry share them, so that an address is one addition. It does
//! not own batches or their limits.

use std::ops::Range;

use crate::address;
use crate::error::Result;
use crate::lower::{Batch, no_memory};
use crate::route::Steps;
use crate::runs::Runs;

/// Number of blocks that `bytes` become when none is longer than `limit`.
#[inline]
pub(crate) fn pieces(bytes: u64, limit: u64) -> u64 {
    bytes.div_ceil(limit)
}

/// The one block of a lane, relative to its bases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    source: u64,
    destination: u64,
    pub(crate) bytes: u64,
}

impl Block {
    /// The block of a single run, where its items are consecutive bytes on both sides.
    pub(crate) fn only(steps: &Steps, runs: &Runs) -> Option<Block> {
        let [run] = runs.runs() else { return None };
        steps.joins_items().then(|| Block {
            source: run.source * steps.source_item,
            destination: run.destination * steps.destination_item,
            bytes: run.count * steps.row_bytes,
        })
    }

    /// Appends the block of every lane with these bases.
    pub(crate) fn append(&self, bases: (&[u64], &[u64]), batch: &mut Batch) {
        shift(&mut batch.source, bases.0, self.source);
        shift(&mut batch.destination, bases.1, self.destination);
        batch.nbytes.resize(batch.nbytes.len() + bases.0.len(), self.bytes);
    }
}

/// Lengths of blocks: the same for all, or one each.
enum Lengths {
    Same(u64),
    Each(Vec<u64>),
}

/// Blocks relative to a base on either side.
#[derive(Default)]
struct Columns {
    source: Vec<u64>,
    destination: Vec<u64>,
}

impl Columns {
    fn with_room(room: u64) -> Result<Columns> {
        let mut columns = Columns::default();
        let size = usize::try_from(room).unwrap_or(usize::MAX);
        for column in [&mut columns.source, &mut columns.destination] {
            column.try_reserve_exact(size).map_err(|_| no_memory(room))?;
        }
        Ok(columns)
    }
}

/// Offsets of all blocks of every lane with the same steps: `outer` × `inner`.
///
/// `outer` are runs or their pieces, or items; `inner` are the rows of an item, or
/// their pieces, where an item is more than one block.
pub(crate) struct Offsets {
    pub(crate) steps: Steps,
    outer: Columns,
    inner: Option<Columns>,
    lengths: Lengths,
    len: usize,
}

impl Offsets {
    /// Lays the runs out. The items were checked against the entries, and a lane's
    /// last byte was checked when the route was made, so offsets do not overflow.
    pub(crate) fn new(steps: Steps, runs: &Runs, limit: u64) -> Result<Offsets> {
        if steps.joins_items() { Offsets::joined(steps, runs, limit) } else { Offsets::scattered(steps, runs, limit) }
    }

    /// A block a run, or its pieces: items are consecutive bytes on both sides.
    fn joined(steps: Steps, runs: &Runs, limit: u64) -> Result<Offsets> {
        let mut blocks = 0;
        for run in runs.runs() {
            blocks += pieces(address::product(&[run.count, steps.row_bytes])?, limit);
        }
        let mut outer = Columns::with_room(blocks)?;
        let single = runs.run_count() == runs.page_count() && steps.row_bytes <= limit;
        let mut lengths = Vec::new();
        for run in runs.runs() {
            let bytes = run.count * steps.row_bytes;
            let (from, to) = (run.source * steps.source_item, run.destination * steps.destination_item);
            if bytes <= limit {
                outer.source.push(from);
                outer.destination.push(to);
                if !single {
                    lengths.push(bytes);
                }
                continue;
            }
            let mut done = 0;
            while done < bytes {
                let piece = limit.min(bytes - done);
                outer.source.push(from + done);
                outer.destination.push(to + done);
                lengths.push(piece);
                done += piece;
            }
        }
        let lengths = if single { Lengths::Same(steps.row_bytes) } else { Lengths::Each(lengths) };
        Ok(Offsets { steps, len: outer.source.len(), outer, inner: None, lengths })
    }

    /// A block a row of every item, or its pieces.
    fn scattered(steps: Steps, runs: &Runs, limit: u64) -> Result<Offsets> {
        let mut outer = Columns::with_room(runs.page_count())?;
        for run in runs.runs() {
            let items = (0..run.count).map(|step| (run.source + step, run.destination + step));
            outer.source.extend(items.clone().map(|(from, _)| from * steps.source_item));
            outer.destination.extend(items.map(|(_, to)| to * steps.destination_item));
        }
        let items = outer.source.len();
        let per_row = pieces(steps.row_bytes, limit);
        let per_item = address::product(&[steps.rows, per_row])?;
        if per_item == 1 {
            let lengths = Lengths::Same(steps.row_bytes);
            return Ok(Offsets { steps, len: items, outer, inner: None, lengths });
        }
        let mut inner = Columns::with_room(per_item)?;
        let mut lengths = Vec::new();
        for row in 0..steps.rows {
            for piece in 0..per_row {
                let skip = piece * limit;
                inner.source.push(row * steps.source_row + skip);
                inner.destination.push(row * steps.destination_row + skip);
                if per_row > 1 {
                    lengths.push(limit.min(steps.row_bytes - skip));
                }
            }
        }
        let lengths = if per_row > 1 { Lengths::Each(lengths) } else { Lengths::Same(steps.row_bytes) };
        let len = items.checked_mul(inner.source.len()).ok_or_else(|| no_memory(per_item))?;
        Ok(Offsets { steps, len, outer, inner: Some(inner), lengths })
    }

    /// Blocks of a lane.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends the blocks `range` of the lane with these bases.
    pub(crate) fn append(&self, range: Range<usize>, bases: (u64, u64), batch: &mut Batch) {
        match &self.inner {
            None => {
                shift(&mut batch.source, &self.outer.source[range.clone()], bases.0);
                shift(&mut batch.destination, &self.outer.destination[range.clone()], bases.1);
                self.lengths.append(range, &mut batch.nbytes);
            }
            Some(inner) => {
                let width = inner.source.len();
                let mut next = range.start;
                while next < range.end {
                    let (item, first) = (next / width, next % width);
                    let last = width.min(first + (range.end - next));
                    let (from, to) = (self.outer.source[item], self.outer.destination[item]);
                    shift(&mut batch.source, &inner.source[first..last], bases.0.wrapping_add(from));
                    shift(&mut batch.destination, &inner.destination[first..last], bases.1.wrapping_add(to));
                    self.lengths.append(first..last, &mut batch.nbytes);
                    next += last - first;
                }
            }
        }
    }
}

/// Appends `base` plus every offset. The sums do not wrap: the route has checked the
/// largest of the lane. A checked sum would cost one branch a block.
#[inline]
fn shift(column: &mut Vec<u64>, offsets: &[u64], base: u64) {
    column.extend(offsets.iter().map(|offset| base.wrapping_add(*offset)));
}

impl Lengths {
    #[inline]
    fn append(&self, range: Range<usize>, column: &mut Vec<u64>) {
        match self {
            Lengths::Same(bytes) => column.resize(column.len() + range.len(), *bytes),
            Lengths::Each(each) => column.extend_from_slice(&each[range]),
        }
    }
}

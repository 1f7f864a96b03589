//! Owns the step from a checked plan to blocks of addresses within an engine's
//! limits. It is the only place that sums addresses; it does not copy a byte.

use crate::address::{self, Lane};
use crate::error::{ErrorKind, PlanError, Result};
use crate::plan::Plan;
use crate::route::RoutePair;
use crate::runs::Runs;

/// What an engine takes in one call; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Capabilities {
    /// Blocks in one batch.
    pub max_entries_per_batch: Option<u64>,
    /// Bytes in one block; longer ones are split.
    pub max_block_bytes: Option<u64>,
    /// Blocks of one plan; more are refused before anything is produced.
    pub max_blocks: Option<u64>,
}

impl Capabilities {
    /// Refuses limits under which nothing could move.
    pub fn validated(self) -> Result<Self> {
        for (name, limit) in
            [("max_entries_per_batch", self.max_entries_per_batch), ("max_block_bytes", self.max_block_bytes)]
        {
            if limit == Some(0) {
                return Err(PlanError::new(
                    ErrorKind::ArgumentError,
                    name,
                    0u64,
                    "1 or more, or no limit",
                    "nothing could be moved within this limit",
                    "raise the limit",
                ));
            }
        }
        Ok(self)
    }
}

/// Blocks for one call of an engine: three columns of equal length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Source addresses.
    pub source: Vec<u64>,
    /// Destination addresses.
    pub destination: Vec<u64>,
    /// Bytes of each block.
    pub nbytes: Vec<u64>,
}

/// A plan as blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoweredPlan {
    /// Batches in the order in which to submit them; none for an empty plan.
    pub batches: Vec<Batch>,
    /// Blocks over all batches.
    pub block_count: u64,
    /// Bytes over all batches.
    pub total_bytes: u64,
}

/// Turns a plan into batches of blocks.
///
/// Blocks come pair by pair, then run by run. Consecutive pages are one block
/// where they are consecutive bytes on both sides, and never across entries.
pub fn lower(plan: &Plan, capabilities: &Capabilities) -> Result<LoweredPlan> {
    let capabilities = capabilities.validated()?;
    let block_count = count(plan, &capabilities)?;
    if let Some(limit) = capabilities.max_blocks
        && block_count > limit
    {
        return Err(too_many(block_count, limit));
    }
    let mut sink = Sink::new(&capabilities, block_count);
    if let Some(last) = plan.runs().last_items() {
        let route = plan.route();
        for pair in route.pairs() {
            let from = &route.source().entries[pair.source_entry];
            let to = &route.destination().entries[pair.destination_entry];
            let lanes = (
                Lane::new(from.address, from.item_stride, pair.source_offset, last.0)?,
                Lane::new(to.address, to.item_stride, pair.destination_offset, last.1)?,
            );
            if pair.joins_pages(from, to) {
                joined(plan.runs(), pair, lanes, &mut sink)?;
            } else {
                let rows = (
                    Lane::new(lanes.0.get(last.0), pair.source_row_stride, 0, pair.rows - 1)?,
                    Lane::new(lanes.1.get(last.1), pair.destination_row_stride, 0, pair.rows - 1)?,
                );
                scattered(plan.runs(), pair, lanes, rows, &mut sink)?;
            }
        }
    }
    Ok(LoweredPlan { batches: sink.finish(), block_count, total_bytes: plan.nbytes() })
}

/// One block a run: its pages are consecutive bytes on both sides.
fn joined(runs: &Runs, pair: &RoutePair, lanes: (Lane, Lane), sink: &mut Sink) -> Result<()> {
    for run in runs.runs() {
        let bytes = run.count * pair.row_bytes;
        sink.push(lanes.0.get(run.source), lanes.1.get(run.destination), bytes)?;
    }
    Ok(())
}

/// One block a row of every page. `rows` are the rows of the last page, which lie
/// as far from its start as those of any page.
fn scattered(runs: &Runs, pair: &RoutePair, lanes: (Lane, Lane), rows: (Lane, Lane), sink: &mut Sink) -> Result<()> {
    for run in runs.runs() {
        for step in 0..run.count {
            let source = rows.0.moved(lanes.0.get(run.source + step));
            let destination = rows.1.moved(lanes.1.get(run.destination + step));
            for row in 0..pair.rows {
                sink.push(source.get(row), destination.get(row), pair.row_bytes)?;
            }
        }
    }
    Ok(())
}

/// Number of blocks after splitting, without making any.
pub fn count(plan: &Plan, capabilities: &Capabilities) -> Result<u64> {
    let Some(limit) = capabilities.max_block_bytes else {
        return Ok(plan.block_count());
    };
    let route = plan.route();
    let mut total = 0;
    for pair in route.pairs() {
        let from = &route.source().entries[pair.source_entry];
        let to = &route.destination().entries[pair.destination_entry];
        if pair.joins_pages(from, to) {
            for run in plan.runs().runs() {
                let bytes = address::product(&[run.count, pair.row_bytes])?;
                total = address::at(total, bytes.div_ceil(limit), 1, 0)?;
            }
        } else {
            let pieces = address::product(&[pair.rows, pair.row_bytes.div_ceil(limit)])?;
            total = address::at(total, plan.runs().page_count(), pieces, 0)?;
        }
    }
    Ok(total)
}

fn too_many(blocks: u64, limit: u64) -> PlanError {
    PlanError::new(
        ErrorKind::BlockLimitExceeded,
        "blocks",
        blocks,
        limit,
        "the engine would be given more blocks than it takes",
        "send in chunks (slice by pages or layers), or give both sides the same heads per rank",
    )
}

fn no_memory(blocks: u64) -> PlanError {
    PlanError::new(
        ErrorKind::BlockLimitExceeded,
        "blocks",
        blocks,
        "the memory of this process",
        "there is no room for so many addresses",
        "send in chunks (slice by pages or layers), or bound the entries of a batch",
    )
}

/// Collects blocks, splits long ones and closes full batches.
struct Sink {
    batches: Vec<Batch>,
    open: Batch,
    per_batch: usize,
    max_bytes: u64,
    left: u64,
}

impl Sink {
    fn new(capabilities: &Capabilities, blocks: u64) -> Self {
        let per_batch = capabilities.max_entries_per_batch.unwrap_or(u64::MAX);
        Sink {
            batches: Vec::new(),
            open: Batch::default(),
            per_batch: usize::try_from(per_batch).unwrap_or(usize::MAX),
            max_bytes: capabilities.max_block_bytes.unwrap_or(u64::MAX),
            left: blocks,
        }
    }

    #[inline]
    fn push(&mut self, source: u64, destination: u64, bytes: u64) -> Result<()> {
        if bytes <= self.max_bytes {
            return self.push_one(source, destination, bytes);
        }
        let mut done = 0;
        while done < bytes {
            let piece = self.max_bytes.min(bytes - done);
            self.push_one(address::at(source, 1, done, 0)?, address::at(destination, 1, done, 0)?, piece)?;
            done += piece;
        }
        Ok(())
    }

    #[inline]
    fn push_one(&mut self, source: u64, destination: u64, bytes: u64) -> Result<()> {
        if self.open.source.is_empty() {
            self.reserve()?;
        }
        self.open.source.push(source);
        self.open.destination.push(destination);
        self.open.nbytes.push(bytes);
        if self.open.source.len() == self.per_batch {
            self.close();
        }
        Ok(())
    }

    /// Makes room for the whole next batch, or refuses where memory lacks.
    fn reserve(&mut self) -> Result<()> {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX).min(self.per_batch);
        let columns = [&mut self.open.source, &mut self.open.destination, &mut self.open.nbytes];
        for column in columns {
            column.try_reserve_exact(room).map_err(|_| no_memory(self.left))?;
        }
        Ok(())
    }

    fn close(&mut self) {
        self.left = self.left.saturating_sub(self.open.source.len() as u64);
        self.batches.push(std::mem::take(&mut self.open));
    }

    fn finish(mut self) -> Vec<Batch> {
        if !self.open.source.is_empty() {
            self.close();
        }
        self.batches
    }
}

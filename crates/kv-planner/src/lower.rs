//! Owns the step from a checked plan to blocks of addresses within an engine's
//! limits. It sums addresses and does not copy a byte; where the columns' memory
//! comes from is the caller's choice.

use crate::address;
use crate::error::{ErrorKind, PlanError, Result};
use crate::offsets::{Block, Offsets, pieces};
use crate::plan::Plan;

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

impl Batch {
    pub(crate) fn push(&mut self, source: u64, destination: u64, bytes: u64) {
        self.source.push(source);
        self.destination.push(destination);
        self.nbytes.push(bytes);
    }
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

/// Geometries whose offsets are kept while lowering: keys and values, index keys and
/// their scales. With more, offsets are laid out again, and memory stays small.
const KEPT: usize = 4;

/// Turns a plan into batches of blocks.
///
/// Blocks come pair by pair, then run by run. Consecutive pages are one block
/// where they are consecutive bytes on both sides, and never across entries.
pub fn lower(plan: &Plan, capabilities: &Capabilities) -> Result<LoweredPlan> {
    lower_into(plan, capabilities, |_| Vec::new())
}

/// Does what [`lower()`] does with columns that `column` gives out, each asked for
/// with the number of blocks that it will hold; what they held is overwritten.
pub fn lower_into(
    plan: &Plan,
    capabilities: &Capabilities,
    column: impl FnMut(usize) -> Vec<u64>,
) -> Result<LoweredPlan> {
    let capabilities = capabilities.validated()?;
    let block_count = count(plan, &capabilities)?;
    if let Some(limit) = capabilities.max_blocks
        && block_count > limit
    {
        return Err(too_many(block_count, limit));
    }
    if block_count == 0 {
        return Ok(LoweredPlan::default());
    }
    let mut sink = Sink::new(&capabilities, block_count, column);
    let mut known: Vec<Offsets> = Vec::new();
    let lanes = plan.route().lanes();
    let mut done = 0;
    for (steps, count) in &lanes.groups {
        let group = done..done + count;
        let bases = (&lanes.sources[group.clone()], &lanes.destinations[group]);
        done += count;
        if let Some(block) = Block::only(steps, plan.runs()).filter(|block| block.bytes <= sink.max_bytes)
            && *count <= sink.room()
        {
            sink.fill_each(block, bases)?;
            continue;
        }
        let offsets = match known.iter().position(|offsets| offsets.steps == *steps) {
            Some(position) => &known[position],
            None => {
                known.truncate(KEPT - 1);
                known.push(Offsets::new(*steps, plan.runs(), sink.max_bytes)?);
                &known[known.len() - 1]
            }
        };
        bases.0.iter().zip(bases.1).try_for_each(|(from, to)| sink.fill(offsets, (*from, *to)))?;
    }
    Ok(LoweredPlan { batches: sink.finish(), block_count, total_bytes: plan.nbytes() })
}

/// Number of blocks after splitting, without making any.
pub fn count(plan: &Plan, capabilities: &Capabilities) -> Result<u64> {
    let Some(limit) = capabilities.max_block_bytes else {
        return Ok(plan.block_count());
    };
    let mut total: u64 = 0;
    let mut joined: Option<(u64, u64)> = None;
    for (steps, lanes) in &plan.route().lanes().groups {
        let blocks = if steps.joins_items() {
            match joined {
                Some((row_bytes, blocks)) if row_bytes == steps.row_bytes => blocks,
                _ => {
                    let mut blocks: u64 = 0;
                    for run in plan.runs().runs() {
                        let bytes = address::product(&[run.count, steps.row_bytes])?;
                        blocks = address::at(blocks, pieces(bytes, limit), 1, 0)?;
                    }
                    joined = Some((steps.row_bytes, blocks));
                    blocks
                }
            }
        } else {
            address::product(&[plan.runs().page_count(), steps.rows, pieces(steps.row_bytes, limit)])?
        };
        total = address::at(total, blocks, *lanes as u64, 0)?;
    }
    Ok(total)
}

/// The refusal of more blocks than a limit.
pub(crate) fn too_many(blocks: u64, limit: u64) -> PlanError {
    PlanError::new(
        ErrorKind::BlockLimitExceeded,
        "blocks",
        blocks,
        limit,
        "the engine would be given more blocks than it takes",
        "send in chunks (slice by pages or layers), or give both sides the same heads per rank",
    )
}

/// The refusal of more addresses than there is memory for.
pub(crate) fn no_memory(blocks: u64) -> PlanError {
    PlanError::new(
        ErrorKind::BlockLimitExceeded,
        "blocks",
        blocks,
        "the memory of this process",
        "there is no room for so many addresses",
        "send in chunks (slice by pages or layers), or bound the entries of a batch",
    )
}

/// Collects blocks and closes full batches.
struct Sink<F> {
    batches: Vec<Batch>,
    open: Batch,
    per_batch: usize,
    max_bytes: u64,
    left: u64,
    column: F,
}

impl<F: FnMut(usize) -> Vec<u64>> Sink<F> {
    fn new(capabilities: &Capabilities, blocks: u64, column: F) -> Self {
        let per_batch = capabilities.max_entries_per_batch.unwrap_or(u64::MAX);
        Sink {
            batches: Vec::new(),
            open: Batch::default(),
            per_batch: usize::try_from(per_batch).unwrap_or(usize::MAX),
            max_bytes: capabilities.max_block_bytes.unwrap_or(u64::MAX),
            left: blocks,
            column,
        }
    }

    /// Appends the one block of each of several lanes.
    fn fill_each(&mut self, block: Block, bases: (&[u64], &[u64])) -> Result<()> {
        if self.open.source.is_empty() {
            self.reserve()?;
        }
        block.append(bases, &mut self.open);
        self.close_if_full();
        Ok(())
    }

    /// Appends every block of one lane.
    fn fill(&mut self, offsets: &Offsets, bases: (u64, u64)) -> Result<()> {
        let mut done = 0;
        while done < offsets.len() {
            if self.open.source.is_empty() {
                self.reserve()?;
            }
            let stop = offsets.len().min(done.saturating_add(self.room()));
            offsets.append(done..stop, bases, &mut self.open);
            done = stop;
            self.close_if_full();
        }
        Ok(())
    }

    /// Blocks that the open batch still takes.
    fn room(&self) -> usize {
        self.per_batch - self.open.source.len()
    }

    fn close_if_full(&mut self) {
        if self.room() == 0 {
            self.close();
        }
    }

    /// Makes room for the whole next batch, or refuses where memory lacks.
    fn reserve(&mut self) -> Result<()> {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX).min(self.per_batch);
        for column in [&mut self.open.source, &mut self.open.destination, &mut self.open.nbytes] {
            *column = (self.column)(room);
            column.clear();
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

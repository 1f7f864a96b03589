//! Owns lowering into registered memory: blocks cut where a region ends, and refused
//! where memory is not registered. It does not own regions or the addresses of a plan.

use crate::error::Result;
use crate::lower::{Batch, Capabilities, LoweredPlan, lower, no_memory, too_many};
use crate::plan::Plan;
use crate::regions::Regions;

/// Lowers a plan as [`lower()`] does, with every block within one region of each side
/// that has regions. The number of blocks is counted, and compared with the limit,
/// before a batch is made.
pub fn lower_within(
    plan: &Plan,
    capabilities: &Capabilities,
    source: Option<&Regions>,
    destination: Option<&Regions>,
) -> Result<LoweredPlan> {
    let capabilities = capabilities.validated()?;
    let whole = Capabilities { max_entries_per_batch: None, max_blocks: None, ..capabilities };
    let lowered = lower(plan, &whole)?;
    let cuts = |from: u64, to: u64, bytes: u64| -> Result<u64> {
        let left = |regions: Option<&Regions>, side: &str, address: u64| {
            regions.map_or(Ok(u64::MAX), |regions| regions.left(side, address))
        };
        Ok(bytes.min(left(source, "source", from)?).min(left(destination, "destination", to)?))
    };
    let mut blocks = 0;
    each(&lowered, cuts, |_, _, _| blocks += 1)?;
    if let Some(limit) = capabilities.max_blocks
        && blocks > limit
    {
        return Err(too_many(blocks, limit));
    }
    let most = capabilities.max_entries_per_batch.unwrap_or(u64::MAX);
    let mut batches: Vec<Batch> = Vec::new();
    let mut left = blocks;
    let mut room = 0;
    let mut failed = Ok(());
    each(&lowered, cuts, |from, to, bytes| {
        if room == 0 {
            room = left.min(most);
            batches.push(Batch::default());
            failed = failed.clone().and_then(|()| reserve(&mut batches, room));
        }
        if failed.is_ok()
            && let Some(batch) = batches.last_mut()
        {
            batch.push(from, to, bytes);
        }
        room -= 1;
        left -= 1;
    })?;
    failed.map(|()| LoweredPlan { batches, block_count: blocks, total_bytes: lowered.total_bytes })
}

fn reserve(batches: &mut [Batch], room: u64) -> Result<()> {
    let Some(batch) = batches.last_mut() else { return Ok(()) };
    let size = usize::try_from(room).unwrap_or(usize::MAX);
    for column in [&mut batch.source, &mut batch.destination, &mut batch.nbytes] {
        column.try_reserve_exact(size).map_err(|_| no_memory(room))?;
    }
    Ok(())
}

/// Walks the pieces of every block; `piece` says how long the one that begins there may be.
fn each(
    lowered: &LoweredPlan,
    piece: impl Fn(u64, u64, u64) -> Result<u64>,
    mut take: impl FnMut(u64, u64, u64),
) -> Result<()> {
    for batch in &lowered.batches {
        for ((from, to), bytes) in batch.source.iter().zip(&batch.destination).zip(&batch.nbytes) {
            let mut done = 0;
            while done < *bytes {
                let length = piece(from + done, to + done, bytes - done)?;
                take(from + done, to + done, length);
                done += length;
            }
        }
    }
    Ok(())
}

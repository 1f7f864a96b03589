//! Owns the pairs of pages and tokens between a side without decode context
//! parallelism and one rank of a side with it. It does not own buffers or routes.

use crate::address;
use crate::error::{ErrorKind, PlanError, Result};
use crate::runs::{Runs, usable};
use crate::words::ItemKind;

/// A rank among those that share a request's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context {
    /// Decode-context-parallel rank.
    pub rank: u64,
    /// Number of such ranks.
    pub size: u64,
}

/// What a rank's buffer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Slots {
    /// The rank's own share of the tokens.
    Local,
    /// All tokens, page by page in one virtual page of `size` pages: index keys that every
    /// rank searches, and draft pages.
    Global,
}

/// Which tokens of a request are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// Tokens of a page, on either side.
    pub page_size: u64,
    /// Tokens before the request's first destination page, already there.
    pub prefix_tokens: u64,
    /// Pages of the request, behind the prefix, before the first source page given.
    pub page_offset: u64,
    /// Tokens of the request behind the prefix, over all its chunks.
    pub tokens: u64,
}

fn refuse(subject: &str, local: u64, remote: u64, why: &str, remedy: &str) -> PlanError {
    PlanError::new(ErrorKind::LengthError, subject, local, remote, why, remedy)
}

impl Span {
    fn check(&self, context: Context, pages: u64, virtual_pages: u64) -> Result<()> {
        if context.rank >= context.size {
            let why = "the rank lies outside its group";
            let kind = ErrorKind::PlacementError;
            let remedy = "give a dcp_rank below dcp_size";
            return Err(PlanError::new(kind, "dcp_rank", context.rank, context.size, why, remedy));
        }
        if self.page_size == 0 {
            return Err(refuse("page_size", 0, 1, "a page would hold no token", "give 1 or more"));
        }
        let virtual_page = address::product(&[self.page_size, context.size])?;
        if !self.prefix_tokens.is_multiple_of(virtual_page) {
            return Err(refuse(
                "prefix_tokens",
                self.prefix_tokens,
                virtual_page,
                "the request would begin inside a virtual page, and tokens would go to the wrong rank",
                "give a prefix of whole virtual pages: page_size * dcp_size tokens each",
            ));
        }
        let all = self.tokens.div_ceil(self.page_size);
        let given = self.page_offset.checked_add(pages).filter(|end| *end <= all);
        let end = given.ok_or_else(|| {
            let why = "there are more pages than the request's tokens fill";
            refuse(
                "page_offset + source_pages",
                self.page_offset.saturating_add(pages),
                all,
                why,
                "trim the pages to the tokens",
            )
        })?;
        let needed = end.div_ceil(context.size);
        if pages > 0 && needed > virtual_pages {
            return Err(PlanError::new(
                ErrorKind::UnequalPages,
                "destination_pages",
                virtual_pages,
                needed,
                "the last pages would have no place",
                "give a destination page for every page_size * dcp_size tokens of the request",
            ));
        }
        Ok(())
    }
}

fn global(position: usize, page: i64, context: Context, owner: u64) -> Result<i64> {
    let number = address::at(0, usable("destination_pages", position, page)?, context.size, owner)?;
    i64::try_from(number).map_err(|_| global_overflow(page))
}

fn global_overflow(page: i64) -> PlanError {
    PlanError::new(
        ErrorKind::PageOutOfRange,
        "pages",
        page,
        i64::MAX,
        "its slots have no 64-bit numbers",
        "give pages that the allocator handed out",
    )
}

/// Page pairs for one rank where whole pages go to the ranks in turn: page `k` of the
/// request to rank `k % size`, in the rank's page of number `destination[k / size]`.
pub fn page_interleaved(
    source: &[i64],
    destination: &[i64],
    span: Span,
    context: Context,
    slots: Slots,
) -> Result<Runs> {
    span.check(context, source.len() as u64, destination.len() as u64)?;
    let (mut from, mut to) = (Vec::new(), Vec::new());
    for (position, page) in source.iter().enumerate() {
        let number = span.page_offset + position as u64;
        let (owner, super_page) = (number % context.size, (number / context.size) as usize);
        let place = destination[super_page];
        match slots {
            Slots::Local if owner == context.rank => to.push(place),
            Slots::Local => continue,
            Slots::Global => to.push(global(super_page, place, context, owner)?),
        }
        from.push(*page);
    }
    Ok(Runs::of_kind(&from, &to, ItemKind::Page)?.within(context))
}

/// Token pairs for one rank where tokens go to the ranks in turn: token `t` of the
/// request to rank `t % size`, as the rank's token `t / size`. Items are token slots:
/// page × page size + offset.
pub fn token_interleaved(source: &[i64], destination: &[i64], span: Span, context: Context) -> Result<Runs> {
    span.check(context, source.len() as u64, destination.len() as u64)?;
    let size = span.page_size;
    let slot = |argument: &str, pages: &[i64], token: u64| -> Result<i64> {
        let position = (token / size) as usize;
        let page = usable(argument, position, pages[position])?;
        let slot = address::at(0, page, size, token % size)?;
        i64::try_from(slot).map_err(|_| global_overflow(pages[position]))
    };
    let first = span.page_offset * size;
    let stop = span.tokens.min(first + source.len() as u64 * size);
    let skip = (context.rank + context.size - first % context.size) % context.size;
    let (mut from, mut to) = (Vec::new(), Vec::new());
    let mut token = first + skip;
    while token < stop {
        from.push(slot("source_pages", source, token - first)?);
        to.push(slot("destination_pages", destination, token / context.size)?);
        token += context.size;
    }
    Ok(Runs::of_kind(&from, &to, ItemKind::Token)?.within(context))
}

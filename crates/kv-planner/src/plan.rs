//! Owns the plan: a route joined with runs, symbolic and checked. It does not own
//! addresses; those are summed in `lower` alone.

use crate::address;
use crate::error::{ErrorKind, PlanError, Result};
use crate::interleave::Context;
use crate::layout::ModelLayout;
use crate::route::Route;
use crate::runs::Runs;
use crate::words::{Component, ItemKind, Part};

/// What to keep of a plan or a route; `None` keeps everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slice {
    /// Global layer ids.
    pub layer_ids: Option<Vec<u64>>,
    /// Parts.
    pub parts: Option<Vec<Part>>,
    /// Components.
    pub components: Option<Vec<Component>>,
    /// Item kinds.
    pub item_kinds: Option<Vec<ItemKind>>,
    /// Positions of page pairs, half open.
    pub pages: Option<(u64, u64)>,
}

impl Slice {
    /// Refuses names that the layout does not have.
    pub(crate) fn check(&self, layout: &ModelLayout) -> Result<()> {
        for id in self.layer_ids.iter().flatten() {
            if !layout.components.iter().any(|spec| spec.layer_ids.contains(id)) {
                let known: Vec<u64> = layout.components.iter().flat_map(|spec| spec.layer_ids.clone()).collect();
                return Err(unknown("layer_ids", id.to_string(), crate::agree::id_list(&dedup(known))));
            }
        }
        for component in self.components.iter().flatten() {
            if !layout.components.iter().any(|spec| spec.component == *component) {
                let known: Vec<String> = layout.components.iter().map(|spec| spec.name()).collect();
                return Err(unknown("components", component.to_string(), known.join(", ")));
            }
        }
        Ok(())
    }
}

fn dedup(mut ids: Vec<u64>) -> Vec<u64> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn unknown(field: &str, asked: String, known: String) -> PlanError {
    PlanError::new(
        ErrorKind::SliceError,
        field,
        asked,
        known,
        "the slice would silently be empty",
        "name what the layout declares",
    )
}

/// `Route` × `Runs`: which bytes of which pages go where.
///
/// Invariants: 1. the runs count the route's kind of item; 2. they are the share of
/// the destination's context-parallel rank, but for request rows, which every rank has; 3. every item exists in both entries of
/// every pair.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    route: Route,
    runs: Runs,
    nbytes: u64,
    block_count: u64,
}

impl Plan {
    /// Joins a route with runs after checking every page against every entry.
    pub fn new(route: Route, runs: Runs) -> Result<Plan> {
        if route.totals().item_kind != Some(runs.item_kind())
            && let Some(pair) = route.pairs().iter().find(|pair| pair.item_kind != runs.item_kind())
        {
            return Err(PlanError::new(
                ErrorKind::ItemKindMismatch,
                format!("runs for {}", pair.name()),
                runs.item_kind().as_str(),
                pair.item_kind.as_str(),
                "the indices would be taken for another unit",
                "slice the route by item_kinds and plan each kind with its own runs",
            ));
        }
        let place = &route.destination().placement;
        let shared = place.dcp_size > 1 && runs.item_kind() != ItemKind::RequestRow;
        let wanted = shared.then_some(Context { rank: place.dcp_rank, size: place.dcp_size });
        if runs.context() != wanted && !route.pairs().is_empty() {
            return Err(other_context(runs.context(), wanted));
        }
        if let Some((source, destination)) = runs.last_items() {
            let totals = route.totals();
            if source >= totals.source_items || destination >= totals.destination_items {
                return Err(out_of_range(&route, source, destination));
            }
        }
        let totals = route.totals();
        let nbytes = address::product(&[totals.bytes, runs.page_count()])?;
        let per_run = address::product(&[totals.blocks_per_run, runs.run_count()])?;
        let block_count = address::at(per_run, runs.page_count(), totals.blocks_per_page, 0)?;
        Ok(Plan { route, runs, nbytes, block_count })
    }

    /// The route.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The page pairs.
    pub fn runs(&self) -> &Runs {
        &self.runs
    }

    /// Bytes to move.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Blocks to move when no block is split.
    pub fn block_count(&self) -> u64 {
        self.block_count
    }

    /// The part of the plan that `slice` names.
    pub fn slice(&self, slice: &Slice) -> Result<Plan> {
        let route = self.route.slice(slice)?;
        let runs = match slice.pages {
            Some((start, stop)) => self.runs.slice(start, stop)?,
            None => self.runs.clone(),
        };
        Plan::new(route, runs)
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let route = &self.route;
        writeln!(
            f,
            "plan: {} -> {}: {} pairs, {} {} items in {} runs, {} bytes in {} blocks",
            route.source().placement,
            route.destination().placement,
            route.pairs().len(),
            self.runs.page_count(),
            self.runs.item_kind(),
            self.runs.run_count(),
            self.nbytes,
            self.block_count
        )?;
        for pair in route.pairs() {
            writeln!(
                f,
                "  {}: entry {} heads {}..{} -> entry {} heads {}..{}, {} x {} bytes",
                pair.name(),
                pair.source_entry,
                pair.source_heads.0,
                pair.source_heads.1,
                pair.destination_entry,
                pair.destination_heads.0,
                pair.destination_heads.1,
                pair.rows,
                pair.row_bytes
            )?;
        }
        Ok(())
    }
}

fn other_context(runs: Option<Context>, route: Option<Context>) -> PlanError {
    let spell = |context: Option<Context>| match context {
        None => "all tokens of a request".to_owned(),
        Some(context) => format!("the share of dcp {}/{}", context.rank, context.size),
    };
    PlanError::new(
        ErrorKind::ContextMismatch,
        "runs",
        spell(runs),
        spell(route),
        "tokens would go to ranks that do not own them",
        "make the runs with page_interleaved or token_interleaved for the destination's dcp rank and size",
    )
}

fn out_of_range(route: &Route, source: u64, destination: u64) -> PlanError {
    for pair in route.pairs() {
        let sides = [
            ("source", source, &route.source().entries[pair.source_entry]),
            ("destination", destination, &route.destination().entries[pair.destination_entry]),
        ];
        for (side, page, entry) in sides {
            let items = route.items(entry);
            if page >= items {
                return PlanError::new(
                    ErrorKind::PageOutOfRange,
                    format!("{side}_pages for {}", entry.name()),
                    page,
                    items,
                    "the page lies beyond the buffer and would address foreign memory",
                    "give pages below the entry's number of items",
                );
            }
        }
    }
    unreachable!("the least number of items belongs to some entry")
}

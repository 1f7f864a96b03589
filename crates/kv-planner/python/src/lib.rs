//! Owns the extension module `kv_planner._native`: extract, call, map the error,
//! wrap. It does not own a rule; those are in the core crate.

mod agree;
mod arrays;
mod contexts;
mod errors;
mod layout;
mod lower;
mod manifest;
mod plan;
mod pointers;
mod prefix;
mod prefix_hash;
mod prefix_results;
mod recycle;
mod regions;
mod states;
mod step_lengths;
mod steps;
mod views;

use pyo3::prelude::*;

/// Native part of kv_planner.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::agree::{PyAgreement, PyRoute, PyRoutePair, agree};
    #[pymodule_export]
    use crate::contexts::{page_interleaved, token_interleaved};
    #[pymodule_export]
    use crate::errors::PyDifference;
    #[pymodule_export]
    use crate::layout::{PyComponentSpec, PyModelLayout};
    #[pymodule_export]
    use crate::lower::{PyBatch, PyCapabilities, PyLoweredPlan, lower};
    #[pymodule_export]
    use crate::manifest::{PyBufferEntry, PyDeployment, PyPlacement, PyRankManifest};
    #[pymodule_export]
    use crate::plan::{PyPlan, PyRuns};
    #[pymodule_export]
    use crate::pointers::{name_pointers, pair_names};
    #[pymodule_export]
    use crate::prefix::PyPrefixIndex;
    #[pymodule_export]
    use crate::prefix_hash::{page_digests, page_hashes};
    #[pymodule_export]
    use crate::prefix_results::{
        PyEviction, PyInsertResult, PyPrefixCounts, PyPrefixLock, PyPrefixMatch, PyPrefixStatistics, PyTierCounts,
    };
    #[pymodule_export]
    use crate::regions::PyRegions;
    #[pymodule_export]
    use crate::states::PyStateRoute;
    #[pymodule_export]
    use crate::step_lengths::{
        accepted_moves, addressable, draft_lengths, first_valid, last_accepted, local_lengths, page_capacity,
        placeholders_fit, query_ends, token_capacity, token_offsets, widened_lengths, window_pages,
    };
    #[pymodule_export]
    use crate::steps::{PyRowField, PyRowLayout, first_draft_id, kv_lengths, page_count, select_index, split_heads};
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("BUILD_PROFILE", if cfg!(debug_assertions) { "debug" } else { "release" })?;
        let names = kv_planner::ErrorKind::ALL.iter().map(|kind| kind.name());
        module.add("ERROR_KINDS", PyTuple::new(module.py(), names.collect::<Vec<_>>())?)
    }
}

//! Owns the Python faces of `name_pointers` and `pair_names`. It does not own the
//! customary order.

use kv_planner::{Component, EntryName, Part};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{array, count, counts, refuse_value, sequence};
use crate::errors::{OrRaise, guarded};
use crate::layout::PyModelLayout;

/// Columns of source positions and destination positions.
type Positions = (Py<PyArray1<u64>>, Py<PyArray1<u64>>);

/// Names the pointers of a bare list, which a peer published in the field's customary order.
///
/// The order is: the target's components one after another as the layout lists them, each over its layers in the order of
/// its ids; then the draft's in the same way. The answer is exact or an error; lengths are never divided to guess groups.
///
/// Args:
///     layout: Geometry of the model.
///     pointers: How many there are.
///     layers: Global ids of the layers whose buffers are in the list, the draft's included. Without them a stage is taken
///         to hold neighbouring target layers and all draft layers or none; exactly one such stage must have that many buffers.
///
/// Returns:
///     (component, part, layer id, occurrence) of every pointer, in order.
///
/// Raises:
///     UnnamedPointers: The list can be read in no way, or in several; the text says what to publish.
#[pyfunction]
#[pyo3(signature = (layout, pointers, *, layers=None))]
pub fn name_pointers<'py>(
    py: Python<'py>,
    layout: &PyModelLayout,
    pointers: &Bound<'py, PyAny>,
    layers: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyTuple>> {
    let pointers = count("pointers", pointers)?;
    let layers = layers.map(|ids| counts("layers", ids)).transpose()?;
    let names = guarded(|| kv_planner::name_pointers(&layout.0, pointers, layers.as_deref()))?;
    let tuple = |name: &EntryName| (name.component.as_str(), name.part.as_str(), name.layer_id, name.occurrence);
    PyTuple::new(py, names.iter().map(tuple).collect::<Vec<_>>())
}

fn names(argument: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<EntryName>> {
    let mut names = Vec::new();
    for item in sequence(argument, "names (component, part, layer id, occurrence)", value)? {
        let item = item?;
        let expected = "names (component, part, layer id, occurrence)";
        let (component, part, layer_id, occurrence): (String, String, u64, u64) =
            item.extract().map_err(|_| refuse_value(argument, expected, &item))?;
        let (component, part) = (Component::parse(&component).or_raise()?, Part::parse(&part).or_raise()?);
        names.push(EntryName { component, part, layer_id, occurrence });
    }
    Ok(names)
}

/// Pairs two lists of names: which source pointer goes to which destination pointer.
///
/// Args:
///     source: Names of the sending side, all of which the receiving side must have.
///     destination: Names of the receiving side; it may have more.
///
/// Returns:
///     Positions in the source's list and in the destination's, in the source's order. Shape: [len(source)]; dtype uint64.
///
/// Raises:
///     LayoutMismatch: Names that the destination lacks, all at once.
///     UnnamedPointers: A name stands twice on one side.
#[pyfunction]
pub fn pair_names(py: Python<'_>, source: &Bound<'_, PyAny>, destination: &Bound<'_, PyAny>) -> PyResult<Positions> {
    let (source, destination) = (names("source", source)?, names("destination", destination)?);
    let pairs = guarded(|| kv_planner::pair_names(&source, &destination))?;
    let (from, to) = pairs.into_iter().unzip();
    Ok((array(py, from)?, array(py, to)?))
}

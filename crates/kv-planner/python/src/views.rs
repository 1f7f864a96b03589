//! Owns the unsafe code of the package: reading an array where it lies, showing memory
//! of ours as one, and calling a loop that is compiled for wide registers. It does not
//! own what is read, shown or called.
#![allow(unsafe_code)]

use kv_planner::{ItemKind, Runs};
use numpy::ndarray::ArrayView1;
use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::npyffi::objects::_PyArray_GET_ITEM_DATA;
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::recycle::Owner;

/// The items of an aligned, contiguous 1-D array of int64. Whoever reads them keeps the
/// GIL and calls no Python meanwhile.
pub fn in_place<'a>(value: &'a Bound<'_, PyAny>) -> Option<&'a [i64]> {
    let array = value.cast::<PyArray1<i64>>().ok()?;
    if !array.is_c_contiguous() || !(array.data() as usize).is_multiple_of(align_of::<i64>()) {
        return None;
    }
    // SAFETY: type, dimension, layout and alignment were checked above; nobody can write
    // to the array or free it while its reader holds the GIL and a reference to it.
    unsafe { array.as_slice().ok() }
}

/// The array, which nobody writes any more.
pub fn read_only<T: Element>(array: Bound<'_, PyArray1<T>>) -> Bound<'_, PyArray1<T>> {
    // SAFETY: the array was made by the caller and is not shared yet, so nobody else
    // reads its flags now. A checked borrow of rust-numpy does the same five times slower.
    unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags &= !NPY_ARRAY_WRITEABLE };
    array
}

/// An array over the column of its owner.
pub fn shown(owner: Bound<'_, Owner>) -> Bound<'_, PyArray1<u64>> {
    let column: *const [u64] = owner.get().column();
    // SAFETY: the array holds a reference to the owner, whose column nobody changes while
    // it lives (the class is frozen and the field private), so the data outlive the array.
    unsafe { PyArray1::borrow_from_array(&ArrayView1::from(&*column), owner.into_any()) }
}

/// `Runs::of_kind`, compiled for registers of 256 bits where the processor has them.
pub fn runs(source: &[i64], destination: &[i64], kind: ItemKind) -> kv_planner::Result<Runs> {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide(source: &[i64], destination: &[i64], kind: ItemKind) -> kv_planner::Result<Runs> {
            Runs::of_kind(source, destination, kind)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, which is all that the function asks for.
            return unsafe { wide(source, destination, kind) };
        }
    }
    Runs::of_kind(source, destination, kind)
}

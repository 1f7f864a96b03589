//! Owns the border at which a panic becomes an error, for callers that must not
//! unwind. It does not own any rule: a panic is a defect of this crate.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{ErrorKind, PlanError, Result};

/// Runs `call`; a panic inside it comes back as [`ErrorKind::InternalError`].
pub fn guarded<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        Err(PlanError::new(
            ErrorKind::InternalError,
            "kv_planner",
            message(payload.as_ref()),
            "no panic",
            "the call has no result, and what it was changing may be half changed",
            "report this text with the arguments; make a prefix index that was being changed anew",
        ))
    })
}

fn message(payload: &(dyn Any + Send)) -> String {
    let literal = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = literal.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a text".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_pass_and_panics_become_errors() {
        assert_eq!(guarded(|| Ok(3)), Ok(3));
        let refused = PlanError::new(ErrorKind::LengthError, "a", 1u64, 2u64, "b", "c");
        assert_eq!(guarded(|| Err::<u64, _>(refused.clone())), Err(refused));
        let overflow = |last: u64| guarded(move || Ok(last.checked_add(1).expect("the sum fits")));
        for (result, text) in [
            (overflow(u64::MAX), "the sum fits"),
            (guarded(|| panic!("row {}", 7)), "row 7"),
            (guarded(|| std::panic::panic_any(1)), "a panic without a text"),
        ] {
            let error = result.unwrap_err();
            assert_eq!((error.kind, &error.detail.local), (ErrorKind::InternalError, &text.into()));
        }
    }
}

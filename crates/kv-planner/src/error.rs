//! Owns the one error type of the crate and the catalogue of its kinds. It does
//! not own any check: the modules that check build the error where they fail.

use std::fmt;

/// A local or remote value that an error reports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Value {
    /// There is no value on this side.
    Absent,
    /// A number: a count, an id, a length in bytes or an address.
    Int(i128),
    /// A name or a list spelled out.
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Absent => f.write_str("absent"),
            Value::Int(number) => write!(f, "{number}"),
            Value::Text(text) => f.write_str(text),
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Value::Text(text)
    }
}

macro_rules! value_from_int {
    ($($int:ty),*) => {$(
        impl From<$int> for Value {
            fn from(number: $int) -> Self {
                Value::Int(number as i128)
            }
        }
    )*};
}
value_from_int!(u64, i64, usize, i128, u32);

/// One field on which two layouts differ.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Difference {
    /// Name of the field, for example `page_size` or `key/target.dtype`.
    pub field: String,
    /// Value on the local (source) side.
    pub local: Value,
    /// Value on the remote (destination) side.
    pub remote: Value,
    /// What would happen if the transfer went on.
    pub consequence: String,
    /// What to change.
    pub remedy: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: local {}, remote {}; {}; {}", self.field, self.local, self.remote, self.consequence, self.remedy)
    }
}

macro_rules! error_kinds {
    ($($(#[$doc:meta])* $kind:ident),* $(,)?) => {
        /// The rule that was broken. The Python class has the same name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ErrorKind { $($(#[$doc])* $kind),* }

        impl ErrorKind {
            /// Every kind, in the order of the catalogue.
            pub const ALL: &'static [ErrorKind] = &[$(ErrorKind::$kind),*];

            /// Name of the kind, the same in Rust and in Python.
            pub fn name(self) -> &'static str {
                match self { $(ErrorKind::$kind => stringify!($kind)),* }
            }
        }
    };
}

error_kinds! {
    /// An argument has the wrong type, shape or range for any use.
    ArgumentError,
    /// A component or a model layout is not valid by itself.
    LayoutError,
    /// Ranks and sizes of a placement contradict each other.
    PlacementError,
    /// A rank's manifest breaks one of its invariants.
    ManifestError,
    /// A text is not the JSON of the type that was asked for.
    FormatError,
    /// Manifests of one side do not belong to one deployment.
    InconsistentDeployment,
    /// A layer or a head range is missing or doubly owned.
    IncompleteDeployment,
    /// A bare list of pointers can be named in no way, or in several.
    UnnamedPointers,
    /// Two sides differ in a field that the transfer depends on.
    LayoutMismatch,
    /// A placement that no plan exists for, such as context parallelism.
    UnsupportedPlacement,
    /// A number of heads that a number of ranks neither divides nor replicates.
    HeadsDoNotSplit,
    /// Two lists of pages, or pages and tokens, are not equally many.
    UnequalPages,
    /// Page 0 was named; it is reserved for padding.
    ReservedPage,
    /// A page is negative or beyond a buffer.
    PageOutOfRange,
    /// A destination page is named twice.
    DuplicateDestination,
    /// Runs of one kind of item were joined with a route of another kind.
    ItemKindMismatch,
    /// Runs of one context-parallel rank, or of none, were joined with another's route.
    ContextMismatch,
    /// A slice names something that the layout or the runs do not have.
    SliceError,
    /// A plan would lower to more blocks than the engine takes.
    BlockLimitExceeded,
    /// More regions than an engine registers.
    RegionLimitExceeded,
    /// A block lies outside the registered regions.
    UnregisteredMemory,
    /// An address sum leaves the 64-bit range.
    AddressOverflow,
    /// Fields of a row layout contradict each other.
    RowLayoutError,
    /// Lengths, draft counts or widths of a step are impossible.
    LengthError,
    /// A token id that the page hash and the prefix index do not represent.
    TokenOutOfRange,
    /// A page given to the prefix index is held by another of its nodes.
    PageAlreadyHeld,
    /// A node or a match of the prefix index is no longer what it was.
    StaleNode,
    /// A page would enter a tier before its parent did.
    TierOrder,
    /// A node already has, or does not have, a page in the tier.
    TierConflict,
    /// A lock is released twice, is foreign, or stands in the way.
    LockError,
    /// Counts of a tier do not add up.
    AccountingError,
    /// The crate itself failed; no argument is to blame.
    InternalError,
}

/// What a broken rule says; see [`PlanError`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detail {
    /// The argument or field that is wrong.
    pub subject: String,
    /// The value given on the local side.
    pub local: Value,
    /// The value that it contradicts, or that the remote side has.
    pub remote: Value,
    /// What would happen otherwise.
    pub consequence: String,
    /// What to change.
    pub remedy: String,
    /// All differences of a layout mismatch; empty for other kinds.
    pub differences: Vec<Difference>,
}

/// A refusal: which rule, which values, with what consequence, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub struct PlanError {
    /// The rule that was broken.
    pub kind: ErrorKind,
    /// The values and the advice.
    pub detail: Box<Detail>,
}

impl PlanError {
    /// Builds an error; `local` and `remote` are the two contradicting values.
    pub fn new(
        kind: ErrorKind,
        subject: impl Into<String>,
        local: impl Into<Value>,
        remote: impl Into<Value>,
        consequence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let detail = Detail {
            subject: subject.into(),
            local: local.into(),
            remote: remote.into(),
            consequence: consequence.into(),
            remedy: remedy.into(),
            differences: Vec::new(),
        };
        PlanError { kind, detail: Box::new(detail) }
    }

    /// Builds the error of two layouts from all their differences.
    pub fn mismatch(differences: Vec<Difference>) -> Self {
        let first = differences.first().cloned().unwrap_or(Difference {
            field: "layout".into(),
            local: Value::Absent,
            remote: Value::Absent,
            consequence: String::new(),
            remedy: String::new(),
        });
        let mut error = PlanError::new(
            ErrorKind::LayoutMismatch,
            first.field,
            first.local,
            first.remote,
            first.consequence,
            first.remedy,
        );
        error.detail.differences = differences;
        error
    }

    fn text(&self) -> String {
        let detail = &self.detail;
        if !detail.differences.is_empty() {
            let lines: Vec<String> = detail.differences.iter().map(Difference::to_string).collect();
            let plural = if lines.len() == 1 { "" } else { "s" };
            return format!("{} difference{plural}: {}", lines.len(), lines.join(" | "));
        }
        let values = match (&detail.local, &detail.remote) {
            (local, expected) if self.kind == ErrorKind::ArgumentError => format!("expected {expected}, got {local}; "),
            (Value::Absent, Value::Absent) => String::new(),
            (local, Value::Absent) => format!("got {local}; "),
            (local, remote) => format!("{local} against {remote}; "),
        };
        format!("{}: {values}{}; {}", detail.subject, detail.consequence, detail.remedy)
    }
}

/// Result of every fallible function of the crate.
pub type Result<T> = std::result::Result<T, PlanError>;

//! Owns the arena of a step's per-request and per-token inputs: names, dtypes,
//! offsets, fills. It does not own memory.

use crate::address;
use crate::error::{ErrorKind, PlanError, Result, Value};
use crate::words::DType;

/// Value of padded rows.
#[derive(Debug, Clone, Copy)]
pub enum Fill {
    /// For every dtype.
    Int(i64),
    /// For floating dtypes.
    Float(f64),
}

impl PartialEq for Fill {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Fill {}

impl std::hash::Hash for Fill {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl Fill {
    fn key(&self) -> (bool, u64) {
        match self {
            Fill::Int(number) => (false, *number as u64),
            Fill::Float(number) => (true, number.to_bits()),
        }
    }

    /// Whether the dtype has the value: within an integer's range, or at most a
    /// float's largest finite number, an infinity where it has one, or not a number.
    fn fits(self, dtype: DType) -> bool {
        let range = match dtype {
            DType::Int8 => -128..=127,
            DType::UInt8 => 0..=255,
            DType::Bool => 0..=1,
            DType::Int32 => i64::from(i32::MIN)..=i64::from(i32::MAX),
            DType::Int64 => i64::MIN..=i64::MAX,
            DType::Float32 => return self.fits_float(f64::from(f32::MAX), true),
            DType::BFloat16 => return self.fits_float(f64::from(f32::from_bits(0x7f7f_0000)), true),
            DType::Float16 => return self.fits_float(65504.0, true),
            DType::Float8E5M2 => return self.fits_float(57344.0, true),
            DType::Float8E4M3Fn => return self.fits_float(448.0, false),
        };
        matches!(self, Fill::Int(number) if range.contains(&number))
    }

    fn fits_float(self, largest: f64, infinities: bool) -> bool {
        let number = match self {
            Fill::Int(number) => number as f64,
            Fill::Float(number) => number,
        };
        number.is_nan() || (infinities && number.is_infinite()) || number.abs() <= largest
    }
}

impl std::fmt::Display for Fill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fill::Int(number) => write!(f, "{number}"),
            Fill::Float(number) => write!(f, "{number}"),
        }
    }
}

/// One input: `rows` rows of `width` elements. `offset` is set by a layout.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RowField {
    /// Name, unique within a layout.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Rows.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
    /// Value of padded rows.
    pub fill: Fill,
    /// Offset in the arena in bytes, once placed.
    pub offset: Option<u64>,
    /// Bytes of all rows.
    pub nbytes: u64,
}

fn refuse(subject: String, local: impl Into<Value>, remote: impl Into<Value>, why: &str, remedy: &str) -> PlanError {
    PlanError::new(ErrorKind::RowLayoutError, subject, local, remote, why, remedy)
}

impl RowField {
    /// Builds an unplaced field.
    pub fn new(name: &str, dtype: DType, rows: u64, width: u64, fill: Fill) -> Result<RowField> {
        if name.is_empty() {
            return Err(refuse("name".into(), "an empty text", Value::Absent, "a field needs a name", "name it"));
        }
        for (what, count) in [("rows", rows), ("width", width)] {
            if count == 0 {
                return Err(refuse(format!("{name}.{what}"), 0u64, 1u64, "the field would be empty", "give 1 or more"));
            }
        }
        if !fill.fits(dtype) {
            return Err(refuse(
                format!("{name}.fill"),
                fill.to_string(),
                dtype.as_str(),
                "padded rows could not hold the value",
                "give a fill that the dtype represents",
            ));
        }
        let nbytes = address::product(&[rows, width, dtype.itemsize()])?;
        Ok(RowField { name: name.to_owned(), dtype, rows, width, fill, offset: None, nbytes })
    }

    /// Offset in the arena; a field outside a layout has none.
    pub fn placed_offset(&self) -> Result<u64> {
        self.offset.ok_or_else(|| {
            refuse(
                format!("{}.offset", self.name),
                "unplaced",
                Value::Absent,
                "the field belongs to no arena yet",
                "take it from RowLayout.field(name)",
            )
        })
    }
}

/// Fields in one arena, each aligned, in the order given.
///
/// Invariants: 1. names are unique; 2. the alignment is a power of two and at
/// least every element's size; 3. fields do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RowLayout {
    fields: Vec<RowField>,
    alignment: u64,
    nbytes: u64,
}

impl RowLayout {
    /// Places the fields one after another.
    pub fn new(fields: Vec<RowField>, alignment: u64) -> Result<RowLayout> {
        if fields.is_empty() {
            return Err(refuse("fields".into(), 0u64, 1u64, "the arena would be empty", "give at least one field"));
        }
        let widest = fields.iter().map(|field| field.dtype.itemsize()).max().unwrap_or(1);
        if !alignment.is_power_of_two() || alignment < widest {
            return Err(refuse(
                "alignment".into(),
                alignment,
                widest,
                "views of the arena would be misaligned",
                "give a power of two of at least the widest element",
            ));
        }
        let mut placed: Vec<RowField> = Vec::with_capacity(fields.len());
        let mut end = 0;
        for mut field in fields {
            if placed.iter().any(|other| other.name == field.name) {
                return Err(refuse(
                    "fields".into(),
                    field.name,
                    Value::Absent,
                    "two fields have this name",
                    "give each field its own name",
                ));
            }
            field.offset = Some(end);
            end = aligned(address::at(end, 1, field.nbytes, 0)?, alignment)?;
            placed.push(field);
        }
        Ok(RowLayout { fields: placed, alignment, nbytes: end })
    }

    /// Bytes of the arena.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Alignment of every field in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Placed fields.
    pub fn fields(&self) -> &[RowField] {
        &self.fields
    }

    /// The placed field of this name.
    pub fn field(&self, name: &str) -> Result<&RowField> {
        self.fields.iter().find(|field| field.name == name).ok_or_else(|| {
            let known: Vec<&str> = self.fields.iter().map(|field| field.name.as_str()).collect();
            refuse("field".into(), name, known.join(", "), "the arena has no such field", "ask for a declared one")
        })
    }
}

fn aligned(end: u64, alignment: u64) -> Result<u64> {
    address::product(&[end.div_ceil(alignment), alignment])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(name: &str, dtype: DType, rows: u64, width: u64) -> RowField {
        RowField::new(name, dtype, rows, width, Fill::Int(0)).unwrap()
    }

    #[test]
    fn fields_follow_each_other_aligned() {
        let layout = RowLayout::new(
            vec![field("a", DType::Int32, 3, 1), field("b", DType::Int64, 4, 5), field("c", DType::Bool, 1, 1)],
            64,
        )
        .unwrap();
        let offsets: Vec<_> = layout.fields().iter().map(|field| field.offset).collect();
        assert_eq!(offsets, [Some(0), Some(64), Some(256)]);
        assert_eq!(layout.nbytes(), 320);
        assert_eq!(layout.field("b").unwrap().nbytes, 160);
    }

    #[test]
    fn refusals_are_named() {
        let kind = |result: Result<RowLayout>| result.unwrap_err().kind;
        assert_eq!(kind(RowLayout::new(vec![], 64)), ErrorKind::RowLayoutError);
        assert_eq!(kind(RowLayout::new(vec![field("a", DType::Int64, 1, 1)], 4)), ErrorKind::RowLayoutError);
        assert_eq!(kind(RowLayout::new(vec![field("a", DType::Int64, 1, 1)], 24)), ErrorKind::RowLayoutError);
        let twice = vec![field("a", DType::Bool, 1, 1), field("a", DType::Bool, 1, 1)];
        assert_eq!(kind(RowLayout::new(twice, 64)), ErrorKind::RowLayoutError);
        assert!(RowField::new("a", DType::Int32, 1, 1, Fill::Int(1 << 31)).is_err());
        assert!(RowField::new("a", DType::Int32, 1, 1, Fill::Float(1.0)).is_err());
        assert!(RowField::new("a", DType::Float16, 1, 1, Fill::Float(1.0)).is_ok());
        assert!(field("a", DType::Bool, 1, 1).placed_offset().is_err());
    }

    #[test]
    fn a_float_fill_is_at_most_the_largest_finite_number() {
        let bfloat = f64::from(2.0f32.powi(127) * (2.0 - 2.0f32.powi(-7)));
        for (dtype, largest, infinities) in [
            (DType::Float32, f64::from(f32::MAX), true),
            (DType::BFloat16, bfloat, true),
            (DType::Float16, 65504.0, true),
            (DType::Float8E5M2, 57344.0, true),
            (DType::Float8E4M3Fn, 448.0, false),
        ] {
            let fits = |number| RowField::new("a", dtype, 1, 1, Fill::Float(number)).is_ok();
            for sign in [1.0, -1.0] {
                assert!(fits(sign * largest) && fits(sign * 0.0), "{dtype}");
                assert!(!fits(sign * largest.next_up()) && !fits(sign * f64::MAX), "{dtype}");
                assert_eq!(fits(sign * f64::INFINITY), infinities, "{dtype}");
            }
            assert!(fits(f64::NAN), "{dtype}");
            for number in [449, 57345, 65505, i64::MIN, i64::MAX] {
                let known = number.unsigned_abs() as f64 <= largest;
                assert_eq!(RowField::new("a", dtype, 1, 1, Fill::Int(number)).is_ok(), known, "{dtype} {number}");
            }
        }
    }
}

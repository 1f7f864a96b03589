//! Owns the closed vocabularies (component, part, item kind, axis, dtype) and
//! their spelling. It does not own what a layout does with them.

use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, PlanError, Result};

macro_rules! vocabulary {
    ($(#[$doc:meta])* $name:ident, $argument:literal, { $($(#[$item_doc:meta])* $item:ident = $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$item_doc])* #[serde(rename = $text)] $item),* }

        impl $name {
            /// Every word of this vocabulary.
            pub const ALL: &'static [$name] = &[$($name::$item),*];

            /// The word as it is spelled in Python and in JSON.
            pub fn as_str(self) -> &'static str {
                match self { $($name::$item => $text),* }
            }

            /// Reads a word; an unknown one is refused with the list of known ones.
            pub fn parse(text: &str) -> Result<Self> {
                match text {
                    $($text => Ok($name::$item),)*
                    _ => Err(PlanError::new(
                        ErrorKind::ArgumentError,
                        $argument,
                        text,
                        [$($text),*].join(" | "),
                        "the word has no meaning here",
                        "use one of the listed words",
                    )),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

vocabulary!(
    /// What a buffer holds.
    Component, "component", {
        /// Attention keys.
        Key = "key",
        /// Attention values; their width may differ from the keys'.
        Value = "value",
        /// Compressed latent of multi-head latent attention.
        Latent = "latent",
        /// Latent of layers that keep one entry for 4 tokens.
        LatentC4 = "latent_c4",
        /// Latent of layers that keep one entry for 128 tokens.
        LatentC128 = "latent_c128",
        /// Rotary part that goes with a latent.
        Rope = "rope",
        /// Keys of a sparse-attention indexer.
        IndexKey = "index_key",
        /// Scales of quantised index keys.
        IndexScale = "index_scale",
        /// Recurrent state.
        State = "state",
    }
);
vocabulary!(
    /// Which model a layer belongs to.
    Part, "part", {
        /// The model that is served.
        Target = "target",
        /// The speculative draft model.
        Draft = "draft",
    }
);
vocabulary!(
    /// What one item of a buffer is, that is, what its index counts.
    ItemKind, "item_kind", {
        /// A page of token slots.
        Page = "page",
        /// One row per request.
        RequestRow = "request_row",
        /// One token slot.
        Token = "token",
    }
);
vocabulary!(
    /// An axis inside an item.
    Axis, "axis", {
        /// Token slots of a page.
        Token = "token",
        /// Heads.
        Head = "head",
        /// Elements of one head.
        Dim = "dim",
    }
);
vocabulary!(
    /// Element type.
    DType, "dtype", {
        /// IEEE 754 binary32.
        Float32 = "float32",
        /// IEEE 754 binary16.
        Float16 = "float16",
        /// Brain float.
        BFloat16 = "bfloat16",
        /// Signed 8-bit integer.
        Int8 = "int8",
        /// Unsigned 8-bit integer.
        UInt8 = "uint8",
        /// Signed 32-bit integer.
        Int32 = "int32",
        /// Signed 64-bit integer.
        Int64 = "int64",
        /// 8-bit float, 4 exponent bits, finite.
        Float8E4M3Fn = "float8_e4m3fn",
        /// 8-bit float, 5 exponent bits.
        Float8E5M2 = "float8_e5m2",
        /// One byte, 0 or 1.
        Bool = "bool",
    }
);

impl Component {
    /// Tokens of one entry, where the component itself says so.
    pub fn compression(self) -> Option<u64> {
        match self {
            Component::LatentC4 => Some(4),
            Component::LatentC128 => Some(128),
            _ => None,
        }
    }
}

impl DType {
    /// Bytes of one element.
    pub fn itemsize(self) -> u64 {
        match self {
            DType::Int64 => 8,
            DType::Float32 | DType::Int32 => 4,
            DType::Float16 | DType::BFloat16 => 2,
            DType::Int8 | DType::UInt8 | DType::Float8E4M3Fn | DType::Float8E5M2 | DType::Bool => 1,
        }
    }
}

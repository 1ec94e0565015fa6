//! Slots in fewer bytes, for checkpoints that nobody computes with. What comes back is not exact.
//!
//! A slot is a run of parts, each padded to 64 bytes: recurrent states, f32 `[head][value][key]`
//! with the key index contiguous, and plain bytes (windows, the hidden row). A packed slot has the
//! same parts in the same order, each padded to 64 bytes; only the states change:
//!
//! ```text
//! slot          | S f32 [H][V][K]              | window | S ...           | window | hidden row |
//! packed, bf16  | S bf16 [H][V][K]    | window | S ...  | window | hidden row |
//! packed, int8  | scales f32 [H][K], then S i8 [H][V][K] | window | ...     | hidden row |
//! ```
//!
//! **bf16**: each value rounded to the nearest, ties to even. Infinities and NaN stay what they
//! are; what lies beyond the largest bf16 becomes an infinity.
//!
//! **int8**: each key channel of a head has one scale, `max over v of |S[v][k]| / 127`, and each
//! value is the nearest whole number of scales, ties to even, within -127..=127. A channel of zeros
//! has scale 0. A channel that holds an infinity or a NaN has a NaN for its scale, so that all of
//! it comes back as NaN and none as a number. A scale other than 0 is at least the least normal
//! number: a subnormal scale would be off by more than the half step that the rounding is. The
//! largest f32 of all, whose scale is rounded up, comes back as an infinity.
//!
//! What came back once, and is finite, is kept exactly from then on, by either.
//!
//! Key channels and not rows share a scale, because the decay gate acts on key channels: one that
//! remembers long and one that forgets at once differ by orders of magnitude in every row.
//!
//! Padding is neither read nor written.

mod cpu;
pub mod naive;

pub use cpu::{pack, unpack};

use half::bf16;

use crate::arena::Arena;

/// Parts of slots and of packed slots start at multiples of this many bytes.
pub const PART_ALIGN: usize = 64;

/// The most steps a value of 8 bits is away from 0.
const MOST_STEPS: f32 = 127.0;

/// How the states of a packed slot are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PackedDtype {
    /// 16 bits: the upper half of an f32, rounded.
    Bf16,
    /// 8 bits, with an f32 scale per head and key channel.
    Int8,
}

/// A part of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A recurrent state, f32 `[heads][value_dim][key_dim]`.
    State {
        /// Value heads.
        heads: usize,
        /// Width of a value.
        value_dim: usize,
        /// Width of a key.
        key_dim: usize,
    },
    /// Bytes that are kept as they are.
    Plain {
        /// How many.
        bytes: usize,
    },
}

impl Part {
    /// Bytes in a slot, without padding.
    pub fn slot_bytes(self) -> usize {
        match self {
            Part::State { heads, value_dim, key_dim } => {
                heads * value_dim * key_dim * size_of::<f32>()
            }
            Part::Plain { bytes } => bytes,
        }
    }

    /// Bytes in a packed slot, without padding.
    pub fn packed_bytes(self, dtype: PackedDtype) -> usize {
        match (self, dtype) {
            (Part::Plain { bytes }, _) => bytes,
            (Part::State { heads, value_dim, key_dim }, PackedDtype::Bf16) => {
                heads * value_dim * key_dim * size_of::<bf16>()
            }
            (Part::State { heads, value_dim, key_dim }, PackedDtype::Int8) => {
                heads * key_dim * (size_of::<f32>() + value_dim)
            }
        }
    }
}

/// How the slots of a model are packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    dtype: PackedDtype,
    parts: Vec<Part>,
}

impl Packing {
    /// Slots of these parts, in their order, packed with `dtype`.
    ///
    /// # Panics
    /// When a state has no values.
    pub fn new(dtype: PackedDtype, parts: Vec<Part>) -> Packing {
        for part in &parts {
            if let Part::State { heads, value_dim, key_dim } = part {
                assert!(heads * value_dim * key_dim > 0, "a state without values: {part:?}");
            }
        }
        Packing { dtype, parts }
    }

    /// How states are stored.
    pub fn dtype(&self) -> PackedDtype {
        self.dtype
    }

    /// Bytes of a slot, with padding.
    pub fn slot_bytes(&self) -> usize {
        let bytes = self.parts.iter().map(|part| part.slot_bytes().next_multiple_of(PART_ALIGN));
        bytes.sum()
    }

    /// Bytes of a packed slot, with padding.
    pub fn packed_bytes(&self) -> usize {
        let bytes = self.parts.iter().map(|part| part.packed_bytes(self.dtype));
        bytes.map(|bytes| bytes.next_multiple_of(PART_ALIGN)).sum()
    }

    /// Each part with its offset in the slot and in the packed slot at these offsets.
    fn places(&self, slot: usize, packed: usize) -> impl Iterator<Item = (Part, usize, usize)> {
        let mut at = (slot, packed);
        self.parts.iter().map(move |part| {
            let here = at;
            at.0 += part.slot_bytes().next_multiple_of(PART_ALIGN);
            at.1 += part.packed_bytes(self.dtype).next_multiple_of(PART_ALIGN);
            (*part, here.0, here.1)
        })
    }

    /// Asserts that a slot and a packed slot lie inside their arenas, at multiples of 64 bytes.
    fn check(&self, (slots, slot): (&Arena, usize), (packeds, packed): (&Arena, usize)) {
        for (arena, at, bytes) in
            [(slots, slot, self.slot_bytes()), (packeds, packed, self.packed_bytes())]
        {
            assert!(at.is_multiple_of(PART_ALIGN), "offset {at} is not a multiple of {PART_ALIGN}");
            let is_inside = at.checked_add(bytes).is_some_and(|end| end <= arena.bytes());
            assert!(is_inside, "{bytes} bytes at {at} leave an arena of {} bytes", arena.bytes());
        }
    }
}

#[cfg(test)]
mod tests;

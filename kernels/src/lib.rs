//! The bytes and the arithmetic.
pub mod device;
pub mod file;
pub mod kda;
pub mod matrix;
pub mod moe;
pub mod rope;
pub mod simd;
pub mod span;
pub mod threads;

pub use file::MappedFile;
pub use matrix::{Dtype, Matrix};

pub use span::{BLOCK_LEN, CELL_LEN, Form, NO_SLOT, SEGMENT_LEN, Snapshot, Span};

//! The bytes and the arithmetic of deltapool.
//!
//! An operator is a folder or a file with a **naive** form, written from the formula, and a fast
//! form for the CPU that is held to it. The naive form is the definition. Operators take a batch
//! as plain rows and a list of [`Span`]s: which rows belong to one sequence, where its state is
//! read and written, which blocks hold its tokens. They know no requests, allocate nothing (working
//! memory is passed in), and give a row the same bits whatever rows stand beside it, however a
//! prompt was cut on the grid, and however many threads run.
//!
//! ```text
//! Isa::run -> Kernel (generic over Simd)     one dispatch table
//! Gang::run -> tasks on disjoint parts       who computes is chance, what comes out is not
//! Arena                                      slots and blocks, as byte offsets
//! Cpu::meter                                 what operators do and how long it takes, if asked
//! ```
//!
//! All `unsafe` of the project is in this crate.

pub mod activation;
pub mod arena;
pub mod attention;
pub mod ceilings;
pub mod clock;
pub mod conv;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod gemm;
pub mod gqa;
pub mod kda;
pub mod matrix;
pub mod meter;
pub mod mla;
pub mod moe;
mod narrow;
pub mod norm;
pub mod pack;
pub mod panels;
pub mod quant;
pub mod rope;
pub mod rows;
pub mod scratch;
pub mod simd;
pub mod span;
pub mod threads;

pub use arena::{Arena, ArenaError};
pub use attention::{KvDtype, KvPlace, Paged};
pub use device::{Compute, Cpu};
pub use matrix::{Dtype, Matrix, Values};
pub use narrow::{Forms, NarrowRows};
pub use pack::{PackedDtype, Packing};
pub use panels::{PANEL_LEN, PackedMatrix, Panels, StoredPanels};
pub use quant::{Quantization, QuantizedPanels};
pub use rows::{Rows, RowsMut};
pub use scratch::Scratch;
pub use simd::Isa;
pub use span::{BLOCK_LEN, CELL_LEN, Form, NO_SLOT, SEGMENT_LEN, Snapshot, Span, Spans};

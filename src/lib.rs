//! deltapool: an inference engine for hybrid linear-attention models.
//!
//! A step is five verbs: **plan, lower, forward, sample, commit**. `scheduler` decides and writes a
//! plan of sequences and units; `engine::lower` turns it into flat arrays; `models` runs them with
//! the operators of the `kernels` crate; `engine::sampler` draws; the engine commits. The pools of
//! the `state_pool` crate account for every block and every slot on the way.
//!
//! ```no_run
//! use deltapool::config::EngineConfig;
//! use deltapool::engine::Engine;
//! use deltapool::models::{Model, ModelFiles};
//! use deltapool::request::{Request, SamplingParams};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let files = ModelFiles::open("path/to/model".as_ref())?;
//! let model = Model::new(&files, files.load(&mut |_, _| {})?);
//! let config = EngineConfig { max_num_batched_tokens: 512, max_model_len: 4096, threads: 2 };
//! let mut engine = Engine::new(model, files.defaults, None, kernels::Isa::best(), config)?;
//! let request = Request {
//!     prompt: vec![1, 2, 3],
//!     max_tokens: 16,
//!     sampling: SamplingParams::default(),
//!     stop: Vec::new(),
//!     stop_token_ids: Vec::new(),
//!     ignore_eos: false,
//! };
//! for event in engine.generate(request, 42)? {
//!     println!("{:?}", event?.token);
//! }
//! # Ok(())
//! # }
//! ```

pub mod cli;
pub mod config;
pub mod engine;
pub mod inspect;
pub mod models;
pub mod request;
pub mod scheduler;
pub mod text;
pub mod weights;

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
//! use deltapool::models::ModelFiles;
//! use deltapool::request::Request;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let files = ModelFiles::open("path/to/model".as_ref())?;
//! let config = EngineConfig { max_model_len: Some(4096), ..EngineConfig::default() };
//! let engine = Engine::builder(files).config(config).build()?;
//! // As many as you like: each handle is a `Stream` of events, and a blocking iterator of them.
//! let answer = engine.submit(Request::new(vec![1, 2, 3], 16))?;
//! for event in answer {
//!     println!("{:?}", event.token);
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
pub mod server;
pub mod simulate;
pub mod text;
pub mod weights;

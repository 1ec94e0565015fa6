//! One prompt with two endings under tokio: the handle is a `Stream`, and the engine keeps its own
//! thread, so no runtime is blocked.
//!
//! `cargo run --release --example tokio`

use std::error::Error;
use std::sync::Arc;

use deltapool::engine::Engine;
use deltapool::models::ModelFiles;
use deltapool::request::{Request, SamplingParams};
use deltapool::text::{Specials, TextFiles, Tokenizer};
use tokio_stream::StreamExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let tokenizer = Arc::new(Tokenizer::from_files(&TextFiles::embedded())?);
    let builder = Engine::builder(ModelFiles::embedded()?).tokenizer(Some(Arc::clone(&tokenizer)));
    // Loading blocks; a server does it before it listens, or on a blocking thread.
    let engine = tokio::task::spawn_blocking(|| builder.build()).await??;
    let prompt = tokenizer.encode_prompt("Once upon a time", Specials::Plain)?;
    let sampling = SamplingParams { temperature: 0.8, seed: Some(1), ..SamplingParams::default() };
    // The prompt is computed once; each answer goes on from a copy-on-write fork of its state.
    let request = Request { n: 2, sampling, ..Request::new(prompt, 30) };
    let mut answer = engine.submit(request)?;
    let mut endings = [String::new(), String::new()];
    while let Some(event) = answer.next().await {
        endings[event.choice].push_str(&event.text);
        if let Some(finish) = event.finish {
            let (reason, figures) = (finish.reason.as_str(), finish.figures);
            println!("{}: {reason} after {} tokens", event.choice, figures.generated_tokens);
        }
    }
    endings.iter().for_each(|ending| println!("\nOnce upon a time{ending}"));
    Ok(())
}

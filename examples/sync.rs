//! Three stories at once, with threads and nothing else: each handle is an iterator.
//!
//! `cargo run --release --example sync`

use std::error::Error;
use std::sync::Arc;
use std::thread;

use deltapool::engine::Engine;
use deltapool::models::ModelFiles;
use deltapool::request::{Request, SamplingParams};
use deltapool::text::{Specials, TextFiles, Tokenizer};

fn main() -> Result<(), Box<dyn Error>> {
    // `ModelFiles::open` and `TextFiles::read` take a folder instead.
    let tokenizer = Arc::new(Tokenizer::from_files(&TextFiles::embedded())?);
    let builder = Engine::builder(ModelFiles::embedded()?).tokenizer(Some(Arc::clone(&tokenizer)));
    let engine = builder.build()?;
    println!("sequences of up to {} tokens\n", engine.limits().max_model_len);
    let beginnings = ["Once upon a time", "Tom had a red ball", "The old dog"];
    thread::scope(|scope| {
        let told = beginnings.map(|beginning| {
            let (engine, tokenizer) = (&engine, &tokenizer);
            scope.spawn(move || -> Result<String, Box<dyn Error + Send + Sync>> {
                let prompt = tokenizer.encode_prompt(beginning, Specials::Plain)?;
                let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
                let request = Request { sampling, ..Request::new(prompt, 40) };
                // Dropping the handle before its end would cancel the request.
                Ok(engine.submit(request)?.into_iter().map(|event| event.text).collect())
            })
        });
        for (beginning, story) in beginnings.iter().zip(told) {
            let story = story.join().map_err(|_| "a thread panicked")?;
            println!("{beginning}{}\n", story.map_err(|error| error.to_string())?);
        }
        Ok::<(), Box<dyn Error>>(())
    })?;
    let stats = engine.stats();
    println!("{} steps, up to {} stories in one", stats.scheduler.steps, stats.most_running);
    Ok(())
}

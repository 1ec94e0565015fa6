//! What clients of a server see: what it costs beside the engine, and what continuous batching
//! gains. With `DELTAPOOL_MODEL=DIR` another model than the one in the binary is measured.
//!
//! `cargo bench --bench serving [overhead|batching]`.

mod batching;
mod overhead;

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use deltapool::config::EngineConfig;
use deltapool::engine::Engine;
use deltapool::models::ModelFiles;
use deltapool::server::{self, Address, Bind, ServedModel, ServerConfig};
use deltapool::text::{AnswerFormat, ChatTemplate, TextFiles, Tokenizer};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    // The test runner asks every bench what it has.
    if args.iter().any(|arg| arg == "--list") {
        return;
    }
    let files = Files::open();
    let asked = |name: &str| args.iter().any(|arg| arg == name);
    if asked("overhead") || !asked("batching") {
        overhead::run(&files);
    }
    if asked("batching") || !asked("overhead") {
        batching::run(&files);
    }
    // The servers end with the process.
    std::process::exit(0);
}

/// The model that is measured.
struct Files {
    dir: Option<PathBuf>,
    text: TextFiles,
    tokenizer: Arc<Tokenizer>,
}

impl Files {
    fn open() -> Files {
        let dir = std::env::var_os("DELTAPOOL_MODEL").map(PathBuf::from);
        let text = match &dir {
            Some(dir) => TextFiles::read(dir).expect("a tokenizer"),
            None => TextFiles::embedded(),
        };
        let tokenizer = Arc::new(Tokenizer::from_files(&text).expect("a tokenizer"));
        Files { dir, text, tokenizer }
    }

    fn engine(&self, config: EngineConfig) -> Engine {
        let files = match &self.dir {
            Some(dir) => ModelFiles::open(dir).expect("a model"),
            None => ModelFiles::embedded().expect("the model is sound"),
        };
        let builder = Engine::builder(files).config(config);
        builder.tokenizer(Some(self.tokenizer.clone())).build().expect("it is built")
    }
}

/// Starts a server in this process.
fn serve(files: &Files, config: EngineConfig) -> SocketAddr {
    let (engine, tokenizer) = (files.engine(config), &files.tokenizer);
    let model = ServedModel {
        names: vec!["model".to_owned()],
        format: AnswerFormat::none(),
        tokenizer: tokenizer.clone(),
        template: ChatTemplate::from_files(&files.text),
        sampling: Default::default(),
        vocab_size: tokenizer.vocab_size(),
        meta: serde_json::Map::new(),
        fingerprint: String::new(),
    };
    let bind = Bind::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let config = ServerConfig { bind, ..ServerConfig::default() };
    let (ready, place) = channel();
    thread::spawn(move || {
        let outcome = server::run(engine, model, config, |place| {
            ready.send(place.clone()).expect("somebody waits");
            Ok(())
        });
        outcome.expect("it serves");
    });
    match place.recv_timeout(Duration::from_secs(60)).expect("it starts") {
        Address::Tcp(address) => address,
        Address::Unix(_) => unreachable!("a port was asked for"),
    }
}

/// The requests differ, and are the same in every run.
fn prompt(index: usize) -> Vec<u32> {
    (0..16).map(|i| 3 + ((index * 131 + i * 17) % 2900) as u32).collect()
}

/// One request on a connection of its own, for so many tokens; every one is an event of the stream.
/// Returns how many came.
fn post(address: SocketAddr, index: usize, tokens: usize) -> usize {
    let body = serde_json::json!({
        "prompt": prompt(index), "max_tokens": tokens, "ignore_eos": true, "seed": index,
        "stream": true, "stream_options": {"include_usage": true},
    })
    .to_string();
    let mut stream = TcpStream::connect(address).expect("it listens");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("it reads");
    let mut answer = String::new();
    BufReader::new(stream).read_to_string(&mut answer).expect("it answers");
    let usage = answer.split("\"completion_tokens\":").nth(1).expect("usage");
    let digits = usage.split(|c: char| !c.is_ascii_digit()).next().expect("a number");
    digits.parse().expect("a number")
}

/// Least, middle and greatest.
fn spread(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [values[0], values[values.len() / 2], values[values.len() - 1]]
}

//! What serving costs beside running: the processor time of a token that comes over HTTP, less that
//! of the same token of the same request handed to the engine.
//!
//! Both arms hand over the same 200 requests at once, as `deltapool batch` does, each from a thread
//! of its own that hears every token; the engine runs 32 of them at a time. Were there only 32
//! threads, each with its next request after its last, then a request that comes by a connection
//! would miss a step for which one without comes in time, and the figure would tell of fuller
//! steps. The threads count their own time, which is taken off; what the system does for the reader
//! of a connection inside the writer's call stays in the figure. The last column has what the
//! server's own threads took: it varies far less than the difference of two large numbers. With
//! `DELTAPOOL_MODEL=DIR` another model than the one in the binary is measured.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use cpu_time::{ProcessTime, ThreadTime};
use deltapool::config::EngineConfig;
use deltapool::engine::Engine;
use deltapool::models::ModelFiles;
use deltapool::request::Request;
use deltapool::server::{self, Address, Bind, ServedModel, ServerConfig};
use deltapool::text::{AnswerFormat, ChatTemplate, TextFiles, Tokenizer};

const REQUESTS: usize = 200;
/// Requests that the engine runs at a time.
const RUNNING: usize = 32;
const TOKENS: usize = 64;
const ROUNDS: usize = 9;

fn main() {
    // The test runner asks every bench what it has.
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    let dir = std::env::var_os("DELTAPOOL_MODEL").map(std::path::PathBuf::from);
    let files = || match &dir {
        Some(dir) => ModelFiles::open(dir).expect("a model"),
        None => ModelFiles::embedded().expect("the model is sound"),
    };
    let text = match &dir {
        Some(dir) => TextFiles::read(dir).expect("a tokenizer"),
        None => TextFiles::embedded(),
    };
    let tokenizer = std::sync::Arc::new(Tokenizer::from_files(&text).expect("a tokenizer"));
    let config = EngineConfig { max_num_seqs: Some(RUNNING), ..EngineConfig::default() };
    let engine = |files| {
        let builder = Engine::builder(files).config(config);
        builder.tokenizer(Some(tokenizer.clone())).build().expect("it is built")
    };
    let direct = engine(files());
    let address = serve(engine(files()), &tokenizer, &text);
    let mut extra = Vec::new();
    println!("round  engine us/token  server us/token  difference  in http threads");
    for round in 0..ROUNDS {
        let engine = run(|i| submit(&direct, i));
        let before = http_time();
        let server = run(|i| post(address, i));
        let http = (http_time() - before).as_secs_f64() * 1e6 / (REQUESTS * TOKENS) as f64;
        let difference = server - engine;
        println!("{round:>5}  {engine:>15.1}  {server:>15.1}  {difference:>10.1}  {http:>15.1}");
        extra.push(server - engine);
    }
    extra.sort_by(f64::total_cmp);
    let [min, median, max] = [extra[0], extra[ROUNDS / 2], extra[ROUNDS - 1]];
    println!("serving costs {min:.1} / {median:.1} / {max:.1} us a token (min / median / max)");
    std::process::exit(0);
}

/// Starts a server in this process.
fn serve(engine: Engine, tokenizer: &std::sync::Arc<Tokenizer>, text: &TextFiles) -> SocketAddr {
    let model = ServedModel {
        names: vec!["model".to_owned()],
        format: AnswerFormat::none(),
        tokenizer: tokenizer.clone(),
        template: ChatTemplate::from_files(text),
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

/// Processor time of a token, in microseconds, without that of the threads that ask.
fn run(ask: impl Fn(usize) -> usize + Sync) -> f64 {
    let start = ProcessTime::now();
    let (tokens, asking) = thread::scope(|scope| {
        let client = |index| {
            let ask = &ask;
            scope.spawn(move || {
                let start = ThreadTime::now();
                (ask(index), start.elapsed())
            })
        };
        let clients: Vec<_> = (0..REQUESTS).map(client).collect();
        let results = clients.into_iter().map(|client| client.join().expect("it ends"));
        results.fold((0, Duration::ZERO), |all, one| (all.0 + one.0, all.1 + one.1))
    });
    assert_eq!(tokens, REQUESTS * TOKENS);
    (start.elapsed() - asking).as_secs_f64() * 1e6 / tokens as f64
}

/// Processor time of the server's own threads so far, where the system tells it.
fn http_time() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let time = |dir: std::path::PathBuf| {
        let name = std::fs::read_to_string(dir.join("comm")).ok()?;
        let times = std::fs::read_to_string(dir.join("schedstat")).ok()?;
        let nanoseconds = times.split(' ').next()?.parse().ok()?;
        name.starts_with("deltapool-http").then(|| Duration::from_nanos(nanoseconds))
    };
    threads.filter_map(|thread| time(thread.path())).sum()
}

fn submit(engine: &Engine, index: usize) -> usize {
    let mut request = Request { ignore_eos: true, ..Request::new(prompt(index), TOKENS) };
    request.sampling.seed = Some(index as u64);
    let handle = engine.submit(request).expect("it is taken");
    handle.into_iter().filter(|event| event.token.is_some()).count()
}

/// One request on a connection of its own; every token is an event of the stream.
fn post(address: SocketAddr, index: usize) -> usize {
    let body = serde_json::json!({
        "prompt": prompt(index), "max_tokens": TOKENS, "ignore_eos": true, "seed": index,
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

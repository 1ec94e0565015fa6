//! What serving costs beside running: the processor time of a token that comes over HTTP, less that
//! of the same token of the same request handed to the engine.
//!
//! Both arms hand over the same 200 requests at once, as `deltapool batch` does, each from a thread
//! of its own that hears every token; the engine runs 32 of them at a time. Were there only 32
//! threads, each with its next request after its last, then a request that comes by a connection
//! would miss a step for which one without comes in time, and the figure would tell of fuller
//! steps. The threads count their own time, which is taken off; what the system does for the reader
//! of a connection inside the writer's call stays in the figure. The last column has what the
//! server's own threads took: it varies far less than the difference of two large numbers.

use std::thread;
use std::time::Duration;

use cpu_time::{ProcessTime, ThreadTime};
use deltapool::config::EngineConfig;
use deltapool::engine::Engine;
use deltapool::request::Request;

use super::{Files, post, prompt, serve, spread};

const REQUESTS: usize = 200;
/// Requests that the engine runs at a time.
const RUNNING: usize = 32;
const TOKENS: usize = 64;
const ROUNDS: usize = 9;

/// Measures and prints.
pub fn run(files: &Files) {
    let config = EngineConfig { max_num_seqs: Some(RUNNING), ..EngineConfig::default() };
    let (direct, address) = (files.engine(config), serve(files, config));
    let mut extra = Vec::new();
    println!("round  engine us/token  server us/token  difference  in http threads");
    for round in 0..ROUNDS {
        let engine = token_time(|i| submit(&direct, i));
        let before = http_time();
        let server = token_time(|i| post(address, i, TOKENS));
        let http = (http_time() - before).as_secs_f64() * 1e6 / (REQUESTS * TOKENS) as f64;
        let difference = server - engine;
        println!("{round:>5}  {engine:>15.1}  {server:>15.1}  {difference:>10.1}  {http:>15.1}");
        extra.push(difference);
    }
    let [min, median, max] = spread(&mut extra);
    println!("serving costs {min:.1} / {median:.1} / {max:.1} us a token (min / median / max)");
}

/// Processor time of a token, in microseconds, without that of the threads that ask.
fn token_time(ask: impl Fn(usize) -> usize + Sync) -> f64 {
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

//! Many clients at once, clients that leave, and clients that dawdle: the server serves on, and
//! afterwards everything is as before.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Reply, Server};

/// A thousand threads of clients need little memory each.
const STACK_BYTES: usize = 128 << 10;

/// A number that looks random, the same in every run.
fn noise(seed: usize) -> usize {
    let mixed = (seed as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) as usize >> 16
}

/// Times as many, in the long form.
fn times() -> usize {
    std::env::var("DELTAPOOL_TIMES").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

/// Runs `client` with each of `0..count`, all at once; returns what they return.
fn at_once<T: Send>(count: usize, client: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let spawn = |index| {
            let client = &client;
            let builder = thread::Builder::new().stack_size(STACK_BYTES);
            builder.spawn_scoped(scope, move || client(index)).expect("a thread")
        };
        let clients: Vec<_> = (0..count).map(spawn).collect();
        clients.into_iter().map(|client| client.join().expect("no client fails")).collect()
    })
}

fn post(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

/// Pages that are free once everything that is kept has been given back.
fn free_pages(server: &Server) -> Vec<u64> {
    server.wait_until_idle();
    assert_eq!(server.post("/reset_prefix_cache", &json!({})).status, 200);
    let is_free = |load: &Value| {
        ["device", "host"].iter().all(|tier| {
            let pool = &load["pools"][*tier];
            pool["free_pages"] == pool["pages"]
        })
    };
    let load = server.wait_for_load("free pools", is_free);
    ["device", "host"].iter().filter_map(|t| load["pools"][*t]["free_pages"].as_u64()).collect()
}

/// Resident memory of the server, in MiB.
fn resident_mib(server: &Server) -> usize {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", server.id())).expect("Linux");
    let pages: usize = statm.split(' ').nth(1).and_then(|text| text.parse().ok()).expect("pages");
    (pages * 4096) >> 20
}

#[test]
fn a_thousand_streams_at_once_all_end_whole() {
    const TOKENS: usize = 8;
    let limits = ["--host-memory", "64MiB", "--max-num-queued-reqs", "2000"];
    let server = Server::start(&limits);
    let start = free_pages(&server);
    let client = |index: usize| {
        let prompt: Vec<usize> = (0..8).map(|i| 3 + noise(index * 8 + i) % 3000).collect();
        let body = json!({
            "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": true, "seed": index,
            "stream": true, "stream_options": {"include_usage": true},
        });
        let mut reply = server.post("/v1/completions", &body);
        assert_eq!(reply.status, 200);
        let (mut text, mut gaps) = (Vec::new(), Vec::new());
        let mut last = None;
        while let Some(piece) = reply.piece() {
            let now = Instant::now();
            gaps.extend(last.map(|last| now - last));
            last = Some(now);
            text.extend(piece);
        }
        let text = String::from_utf8(text).expect("characters are whole");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert!(text.contains(&format!("\"completion_tokens\":{TOKENS}")), "{text}");
        gaps
    };
    let mut gaps: Vec<Duration> = at_once(1000, client).into_iter().flatten().collect();
    gaps.sort_unstable();
    let p99 = gaps.get(gaps.len() * 99 / 100).copied().unwrap_or_default();
    println!("1,000 streams of {TOKENS} tokens: P99 between two pieces {p99:.1?}");
    assert_eq!(free_pages(&server), start);
}

/// They leave before their request is whole, while it waits, while its prompt is computed, while it
/// is answered, as a stream and not.
#[test]
fn clients_that_leave_at_any_moment_leave_nothing_behind() {
    let limits = [
        ["--host-memory", "16MiB"],
        ["--device-memory", "8MiB"],
        ["--max-num-queued-reqs", "4000"],
    ];
    let server = Server::start(limits.as_flattened());
    let start = free_pages(&server);
    let rounds = times();
    let mut resident = Vec::new();
    for round in 0..rounds {
        at_once(200, |client| {
            let seed = round * 200 + client;
            let length = 1 + noise(seed) % 900;
            let prompt: Vec<usize> =
                (0..length).map(|i| 3 + noise(seed ^ (i / 64)) % 3000).collect();
            let body = json!({
                "prompt": prompt, "max_tokens": 1 + noise(seed + 1) % 400, "ignore_eos": true,
                "stream": seed.is_multiple_of(2), "n": 1 + noise(seed + 2) % 3,
            });
            let bytes = post("/v1/completions", &body);
            let sent = if seed.is_multiple_of(5) { noise(seed) % bytes.len() } else { bytes.len() };
            let mut stream = server.connect();
            let _ = stream.write_all(&bytes[..sent]);
            let stays = Duration::from_millis((noise(seed + 3) % 300) as u64);
            let _ = stream.set_read_timeout(Some(stays.max(Duration::from_millis(1))));
            let _ = stream.read(&mut [0; 64]);
        });
        server.wait_until_idle();
        resident.push(resident_mib(&server));
    }
    println!("resident after each round of 200: {resident:?} MiB");
    let (first, last) = (resident[0], *resident.last().expect("a round"));
    assert!(last < first + 64, "memory grows: {resident:?} MiB");
    assert_eq!(free_pages(&server), start);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn clients_that_do_not_read_hold_nobody_up() {
    let server = Server::start(&[]);
    let body = json!({
        "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": true, "stream": true,
    });
    let silent: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(&post("/v1/completions", &body)).expect("it is sent");
            stream
        })
        .collect();
    server.wait_for_load("all of them", |load| load["answers"] == 20);
    let reply = server.post("/v1/completions", &json!({"prompt": "A fox", "max_tokens": 5}));
    assert_eq!(reply.json()["usage"]["completion_tokens"], 5);
    drop(silent);
    server.wait_until_idle();
}

#[test]
fn clients_that_send_byte_by_byte_hold_nobody_up() {
    let server = Server::start(&[]);
    let slow: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: local").expect("it is sent");
            stream
        })
        .collect();
    let reply = server.post("/v1/completions", &json!({"prompt": "A fox", "max_tokens": 5}));
    assert_eq!(reply.status, 200);
    for mut stream in slow {
        let _ = stream.write_all(b"host\r\nContent-Length: 5000\r\n\r\n{");
    }
    assert_eq!(server.get("/health").status, 200);
    server.wait_until_idle();
}

#[test]
fn what_would_wait_too_long_is_told_when_to_come_again() {
    let server = Server::start(&["--max-num-queued-reqs", "1"]);
    let body = json!({
        "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": true, "stream": true,
    });
    let running = Reply::read({
        let mut stream = server.connect();
        stream.write_all(&post("/v1/completions", &body)).expect("it is sent");
        stream
    });
    assert_eq!(running.status, 200);
    let reply = server.post("/v1/completions", &json!({"prompt": "A fox", "max_tokens": 5}));
    assert_eq!(reply.status, 503);
    let seconds: u64 = reply.header("retry-after").and_then(|s| s.parse().ok()).expect("seconds");
    assert!((1..=60).contains(&seconds), "{seconds}");
    assert!(reply.header("retry-after-ms").is_some());
    assert_eq!(reply.json()["error"]["code"], "queue_full");
    assert_eq!(server.get("/ready").status, 503);
    assert_eq!(server.get("/health").status, 200);
    drop(running);
    server.wait_until_idle();
    let reply = server.post("/v1/completions", &json!({"prompt": "A fox", "max_tokens": 5}));
    assert_eq!(reply.status, 200);
}

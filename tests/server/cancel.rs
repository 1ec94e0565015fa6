//! Requests that end before their answer does.

use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Reply, Server};

/// Answers of a request that would take long.
const ANSWERS: usize = 8;

/// A request that would take long.
fn endless(prompt: &str, stream: bool) -> Value {
    json!({
        "prompt": prompt, "max_tokens": 8000, "ignore_eos": true, "stream": stream, "n": ANSWERS,
        "temperature": 0,
    })
}

/// Sends a request and leaves its answer unread.
fn ask(server: &Server, body: &Value, id: &str) -> TcpStream {
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nX-Request-Id: {id}\r\n\r\n",
        body.len()
    );
    let mut stream = server.connect();
    stream.write_all((head + &body).as_bytes()).expect("the server reads");
    stream
}

/// Waits until so many answers have been ended before they were whole.
fn wait_for_aborts(server: &Server, expected: usize) {
    let start = Instant::now();
    loop {
        let metrics = server.get("/metrics").text();
        let line = metrics.lines().find(|line| {
            line.starts_with("vllm:request_success_total") && line.contains("\"abort\"")
        });
        let count = line.and_then(|line| line.rsplit(' ').next()).expect("a count");
        if count == expected.to_string() {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "{count} of {expected} were ended");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_client_that_leaves_while_its_request_waits_runs_or_prefills_cancels_it() {
    let server = Server::start(&["--max-num-seqs", "8", "--max-num-batched-tokens", "64"]);
    let before = server.wait_until_idle();
    let long = "Lily went to the park and saw a big dog. ".repeat(150);
    let mut aborts = 0;
    for stream in [false, true] {
        // In decoding, and behind it in the queue.
        let first = ask(&server, &endless("Once", stream), "first");
        server.wait_for_load("the first to be decoded", |load| {
            load["running"].as_u64() > Some(0) && load["prompt_backlog"] == 0
        });
        let second = ask(&server, &endless("Twice", stream), "second");
        server.wait_for_load("the second to wait", |load| load["answers"] == 2 * ANSWERS);
        drop(second);
        wait_for_aborts(&server, aborts + ANSWERS);
        server.wait_for_load("the second to be gone", |load| load["answers"] == ANSWERS);
        drop(first);
        wait_for_aborts(&server, aborts + 2 * ANSWERS);
        server.wait_until_idle();
        // In the prompt.
        let third = ask(&server, &endless(&long, stream), "third");
        server.wait_for_load("the third to run", |load| load["running"].as_u64() > Some(0));
        drop(third);
        aborts += 3 * ANSWERS;
        wait_for_aborts(&server, aborts);
        server.wait_until_idle();
    }
    // All of it is free again once nothing is kept for later.
    server.post("/reset_prefix_cache", &json!({}));
    let emptied = server.wait_for_load("empty pools", |load| {
        load["pools"]["device"]["blocks"] == 0 && load["pools"]["device"]["slots"] == 0
    });
    assert_eq!(emptied["pools"], before["pools"]);
}

/// A late abort of a name that was used again ended the new request elsewhere (smg 2426).
#[test]
fn aborting_a_name_ends_the_request_that_had_it_and_not_the_one_that_has_it_next() {
    let server = Server::start(&[]);
    for _ in 0..20 {
        server.wait_until_idle();
        let old = ask(&server, &endless("Once", true), "story");
        server.wait_for_load("the old one to run", |load| load["running"].as_u64() > Some(0));
        let aborted = server.request("DELETE", "/v1/requests/story", &[], b"");
        assert_eq!(aborted.status, 200);
        let body =
            json!({ "prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": true });
        let next = Reply::read(ask(&server, &body, "story"));
        let next = next.json()["choices"][0].clone();
        assert_eq!((next["finish_reason"].as_str()), Some("length"), "{next}");
        let old = Reply::read(old);
        let reasons: Vec<Value> = old
            .events()
            .iter()
            .filter_map(|(_, chunk)| chunk["choices"][0].get("finish_reason").cloned())
            .filter(|reason| !reason.is_null())
            .collect();
        assert_eq!(reasons, vec![json!("abort"); ANSWERS]);
    }
    assert_eq!(server.request("DELETE", "/v1/requests/story", &[], b"").status, 404);
    // By either name of the field.
    for field in ["request_id", "rid"] {
        server.wait_until_idle();
        let old = ask(&server, &endless("Once", true), "story");
        server.wait_for_load("it to run", |load| load["running"].as_u64() > Some(0));
        assert_eq!(server.post("/abort_request", &json!({ field: "story" })).status, 200);
        assert!(Reply::read(old).text().contains("\"finish_reason\":\"abort\""));
    }
    let error = server.post("/abort_request", &json!({})).json();
    assert_eq!(error["error"]["param"], "request_id");
}

/// A limit of the prefix cache made a server take requests and do nothing, and a client that left
/// made one panic elsewhere (mistral.rs 1470 and 1376).
#[test]
fn a_small_cache_and_clients_that_leave_do_not_stop_the_server() {
    let server = Server::start(&["--device-memory", "4MiB", "--host-memory", "0"]);
    let body = json!({ "prompt": "Once", "max_tokens": 4, "temperature": 0 });
    let before = server.post("/v1/completions", &body).json()["choices"].clone();
    for round in 0..30 {
        let prompt = format!("{round} {}", "Lily went to the park. ".repeat(20 + round));
        let body = json!({
            "prompt": prompt, "max_tokens": 200, "ignore_eos": true, "stream": round % 2 == 0,
        });
        let stream = ask(&server, &body, &format!("round-{round}"));
        server.wait_for_load("it to run or to have ended", |load| {
            load["running"].as_u64() > Some(0) || load["answers"] == 0
        });
        drop(stream);
    }
    server.wait_until_idle();
    let after = server.post("/v1/completions", &body).json()["choices"].clone();
    assert_eq!(after, before);
}

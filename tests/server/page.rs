//! The page as a file, and what it reads. That it works in a browser is shown by `tests/page`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::{Value, json};

use crate::support::{Reply, Server};

const PAGE: &str = include_str!("../../src/server/page.html");

#[test]
fn the_page_is_one_small_file_that_loads_nothing_from_elsewhere() {
    assert!(PAGE.len() < 60_000, "{} bytes", PAGE.len());
    // The namespace of SVG is a name, not an address: it is taken from an element of the page.
    let outside: Vec<&str> = ["http://", "https://", "//cdn", "@import", "url("]
        .into_iter()
        .filter(|word| PAGE.replace("http://www.w3.org/2000/svg", "").contains(word))
        .collect();
    assert!(outside.is_empty(), "{outside:?}");
    // What a model says is text, never markup.
    assert!(!PAGE.contains("innerHTML") && !PAGE.contains("insertAdjacentHTML"));
}

#[test]
fn the_page_may_load_and_ask_only_its_own_server() {
    let server = Server::start(&["--api-key", "secret"]);
    let reply = server.get("/");
    assert_eq!(
        (reply.status, reply.header("content-type")),
        (200, Some("text/html; charset=utf-8"))
    );
    let policy = reply.header("content-security-policy").expect("a policy");
    assert!(policy.starts_with("default-src 'self' 'unsafe-inline';"), "{policy}");
    assert!(policy.contains("frame-ancestors 'none'"), "{policy}");
    assert_eq!(reply.text(), PAGE);
    let icon = server.get("/favicon.ico");
    assert_eq!((icon.status, icon.header("content-type")), (200, Some("image/svg+xml")));
}

#[test]
fn a_snapshot_tells_of_pools_steps_and_requests() {
    let server = Server::start(&[]);
    let before = server.get("/v1/engine/snapshot").json();
    assert_eq!((&before["steps"], &before["last_step"]), (&json!([]), &json!(0)));
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 7, "ignore_eos": true });
    server.post("/v1/completions", &body);
    server.wait_until_idle();
    let now = server.get("/v1/engine/snapshot").json();
    assert_eq!(now["model"], "tiny");
    for pool in now["pools"].as_array().expect("pools") {
        let of = |name: &str| pool[name].as_u64().expect(name);
        assert_eq!(of("used") + of("cached") + of("free"), of("total"), "{pool}");
        assert!(of("unit_bytes") > 0, "{pool}");
    }
    let steps = now["steps"].as_array().expect("steps");
    assert_eq!(now["last_step"], steps.last().expect("a step")["n"]);
    let decoding: u64 = steps.iter().filter_map(|step| step["decode_seqs"].as_u64()).sum();
    let prompt: u64 = steps.iter().filter_map(|step| step["prefill_tokens"].as_u64()).sum();
    assert_eq!(decoding, 6, "the first of seven tokens is drawn in the step of the prompt");
    assert_eq!(prompt, now["prefix"]["miss"].as_u64().expect("a count"));
    let all = |of: &Value| {
        of["counts"].as_array().expect("counts").iter().filter_map(Value::as_u64).sum::<u64>()
    };
    assert_eq!((all(&now["ttft"]), all(&now["itl"])), (1, 6));
}

/// The next snapshot of a stream of them.
fn next(reply: &mut Reply) -> Value {
    let bytes = reply.piece().expect("it goes on");
    let text = String::from_utf8(bytes).expect("it is text");
    let data = text.strip_prefix("data: ").expect("an event");
    serde_json::from_str(data.trim_end()).expect("it is JSON")
}

#[test]
fn the_events_show_a_request_at_work_and_every_step_once() {
    let server = Server::start(&[]);
    let mut events = server.get("/v1/engine/events");
    assert_eq!(events.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(next(&mut events)["seqs"], json!([]));
    let body = json!({ "prompt": "Once", "max_tokens": 500, "ignore_eos": true });
    let seen = AtomicBool::new(false);
    thread::scope(|scope| {
        // One request may be over between two events.
        scope.spawn(|| {
            while !seen.load(Ordering::Relaxed) {
                server.post("/v1/completions", &body);
            }
        });
        let mut last = 0;
        while !seen.load(Ordering::Relaxed) {
            let now = next(&mut events);
            for step in now["steps"].as_array().expect("steps") {
                let number = step["n"].as_u64().expect("a number");
                assert!(number > last, "step {number} after {last}");
                last = number;
            }
            let seq = &now["seqs"][0];
            let is_seen = seq["state"] == "decode" && seq["generated"].as_u64() > Some(0);
            seen.store(is_seen, Ordering::Relaxed);
            if is_seen {
                assert!(seq["blocks"].as_u64() > Some(0), "{seq}");
                assert!(now["pools"][0]["used"].as_u64() > Some(0), "{now}");
            }
        }
    });
}

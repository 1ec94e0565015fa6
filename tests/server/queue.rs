//! Requests that wait: who goes first, who gives way, and what they hear meanwhile.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Reply, Server};

const TEXT: &str = "/v1/completions";

fn endless() -> Value {
    json!({ "prompt": "Once", "max_tokens": 8000, "ignore_eos": true, "stream": true })
}

fn short(more: Value) -> Value {
    let mut body = json!({ "prompt": "A fox", "max_tokens": 2 });
    body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
    body
}

/// A server that computes one answer at a time, and has begun an endless one.
fn busy(args: &[&str]) -> (Server, Reply) {
    let server = Server::start(&[&["--max-num-seqs", "1"], args].concat());
    let mut body = endless();
    if args.contains(&"priority") {
        body["priority"] = (-9).into();
    }
    let mut running = server.post(TEXT, &body);
    assert_eq!(running.status, 200);
    running.piece().expect("a token");
    (server, running)
}

#[test]
fn a_full_queue_lets_a_better_request_in_for_the_worst_that_waits() {
    let (server, running) =
        busy(&["--scheduling-policy", "priority", "--max-num-queued-reqs", "3"]);
    let text = short(json!({})).to_string();
    let headers = [("X-Vllm-Priority", "-3")];
    thread::scope(|scope| {
        let ask = |priority: i32, count: usize| {
            let body = short(json!({ "priority": priority }));
            let server = &server;
            let asked = scope.spawn(move || server.post(TEXT, &body));
            server.wait_for_load("it to wait", |load| load["answers"] == count);
            asked
        };
        let (worst, bad) = (ask(9, 2), ask(5, 3));
        let refused = |priority: i32| server.post(TEXT, &short(json!({ "priority": priority })));
        let equal = refused(9);
        assert_eq!(equal.status, 503, "it is no better than the worst");
        assert_eq!(equal.json()["error"]["code"], "queue_full");
        // What could never run ends nobody.
        let huge = server.post(TEXT, &short(json!({ "priority": 1, "temperature": 11 })));
        assert_eq!(huge.status, 400);
        let huge = json!({ "priority": 1, "logit_bias": { "999999": 1 } });
        assert_eq!(server.post(TEXT, &short(huge)).status, 400);
        assert!(!worst.is_finished());
        // The header says it as well as the body.
        let better = scope.spawn(|| server.request("POST", TEXT, &headers, text.as_bytes()));
        let evicted = worst.join().expect("an answer");
        assert_eq!(evicted.status, 503);
        assert!(
            evicted.header("retry-after").is_some() && evicted.header("retry-after-ms").is_some()
        );
        assert_eq!(evicted.json()["error"]["code"], "queue_full");
        assert_eq!(server.get("/load").json()["answers"], 3);
        let best = ask(-5, 3);
        assert_eq!(bad.join().expect("an answer").status, 503, "now that was the worst");
        // Those that run are never ended for one that waits.
        assert_eq!(refused(4).status, 503);
        drop(running);
        assert_eq!(better.join().expect("an answer").status, 200);
        assert_eq!(best.join().expect("an answer").status, 200);
    });
    server.wait_until_idle();
    let metrics = server.get("/metrics").text();
    let rejected = metrics.lines().find(|line| {
        line.starts_with("vllm:admission_rejections_total") && line.contains("queue_full")
    });
    assert!(rejected.is_some_and(|line| line.ends_with(" 4")), "{rejected:?}");
}

#[test]
fn a_long_backlog_makes_room_as_a_full_queue_does() {
    let (server, running) =
        busy(&["--scheduling-policy", "priority", "--max-num-queued-tokens", "100"]);
    let long = "a dog ran to the park and ".repeat(10);
    let body = short(json!({ "prompt": long, "priority": 9, "stream": true }));
    let better = short(json!({ "prompt": format!("Now {long}"), "priority": 1 }));
    thread::scope(|scope| {
        let waits = scope.spawn(|| server.post(TEXT, &body));
        server.wait_for_load("it to wait", |load| load["answers"] == 2);
        let other = short(json!({ "prompt": format!("Then {long}"), "priority": 9 }));
        assert_eq!(server.post(TEXT, &other).json()["error"]["code"], "backlog_full");
        let better = scope.spawn(|| server.post(TEXT, &better));
        assert_eq!(waits.join().expect("an answer").status, 503);
        drop(running);
        assert_eq!(better.join().expect("an answer").status, 200);
    });
}

/// What is kept of a prompt is not among the tokens that wait, and so frees none of them.
#[test]
fn who_gives_way_counts_with_what_it_adds_to_the_backlog() {
    let story = "Once upon a time there was a dog who liked to run in the park. ".repeat(20);
    let (priority, limit) =
        (["--scheduling-policy", "priority"], ["--max-num-queued-tokens", "800"]);
    let server = Server::start(&[["--max-num-seqs", "1"], priority, limit].concat());
    let tokens = server.post("/tokenize", &json!({ "prompt": story })).json()["count"].as_u64();
    let tokens = tokens.expect("a count");
    assert!((300..390).contains(&tokens), "two fit, two and a half do not: {tokens}");
    assert_eq!(server.post(TEXT, &short(json!({ "prompt": story }))).status, 200);
    let mut body = endless();
    body["priority"] = (-9).into();
    let mut running = server.post(TEXT, &body);
    running.piece().expect("a token");
    thread::scope(|scope| {
        let ask = |text: String, priority: i32, count: usize| {
            let body = short(json!({ "prompt": text, "priority": priority }));
            let server = &server;
            let asked = scope.spawn(move || server.post(TEXT, &body));
            server.wait_for_load("it to wait", |load| load["answers"] == count);
            asked
        };
        let unknown = ask(format!("Then {story}"), 5, 2);
        let known = ask(story.clone(), 9, 3);
        server.wait_for_load("what is known", |load| {
            load["prompt_backlog"].as_u64().is_some_and(|backlog| backlog < tokens + 150)
        });
        let better = ask(format!("Now {story}{}", &story[..story.len() / 2]), 1, 2);
        assert_eq!(known.join().expect("an answer").status, 503, "it is the worst");
        assert_eq!(unknown.join().expect("an answer").status, 503, "the worst was not enough");
        drop(running);
        assert_eq!(better.join().expect("an answer").status, 200);
    });
}

#[test]
fn a_request_of_several_prompts_that_is_refused_ends_nobody() {
    let (server, running) =
        busy(&["--scheduling-policy", "priority", "--max-num-queued-reqs", "3"]);
    thread::scope(|scope| {
        let waits = scope.spawn(|| server.post(TEXT, &short(json!({ "priority": 9 }))));
        server.wait_for_load("it to wait", |load| load["answers"] == 2);
        let more = json!({ "prompt": ["One", "Two", "Three"], "priority": 1 });
        assert_eq!(server.post(TEXT, &short(more)).json()["error"]["code"], "queue_full");
        let never = json!({ "prompt": [[5], [999_999]], "priority": 1 });
        assert_eq!(server.post(TEXT, &short(never)).status, 400);
        assert_eq!(server.get("/load").json()["answers"], 2);
        assert!(!waits.is_finished());
        // Two find room, if the worst gives way.
        let two = json!({ "prompt": ["One", "Two"], "priority": 1 });
        let two = scope.spawn(|| server.post(TEXT, &short(two)));
        assert_eq!(waits.join().expect("an answer").status, 503);
        drop(running);
        let answer = two.join().expect("an answer").json();
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(2), "{answer}");
    });
    server.wait_until_idle();
}

/// Such requests once were told to come back later, for ever.
#[test]
fn a_request_of_more_answers_than_may_wait_is_refused_for_good() {
    let server = Server::start(&["--max-num-queued-reqs", "4"]);
    let (one, five) = (json!("A fox"), json!(["A", "B", "C", "D", "E"]));
    for (prompt, n, param) in
        [(&one, 5, "n"), (&five, 1, "prompt"), (&json!(["A", "B", "C"]), 2, "n")]
    {
        let reply = server.post(TEXT, &short(json!({ "prompt": prompt, "n": n })));
        assert_eq!((reply.status, reply.header("retry-after")), (400, None));
        let error = reply.json()["error"].clone();
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("invalid_value")));
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains("allowed: 4 "), "{message}");
    }
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "n": 5 });
    assert_eq!(server.post("/v1/chat/completions", &chat).status, 400);
    let fits = server.post(TEXT, &short(json!({ "prompt": ["A", "B"], "n": 2 })));
    assert_eq!(fits.status, 200);
}

#[test]
fn priorities_are_for_servers_that_have_them() {
    let server = Server::start(&[]);
    let error = server.post(TEXT, &short(json!({ "priority": 1 })));
    assert_eq!((error.status, error.json()["error"]["param"].as_str()), (400, Some("priority")));
    let text = short(json!({})).to_string();
    for (value, param) in [("1", "priority"), ("high", "X-Vllm-Priority")] {
        let headers = [("X-Vllm-Priority", value)];
        let error = server.request("POST", TEXT, &headers, text.as_bytes());
        assert_eq!(error.status, 400, "{value}");
        assert_eq!(error.json()["error"]["param"], param);
    }
}

#[test]
fn a_stream_that_waits_is_kept_alive_by_comments() {
    let (server, running) = busy(&["--sse-keep-alive", "0.1"]);
    let mut waits = server.post(TEXT, &short(json!({ "stream": true })));
    assert_eq!(waits.status, 200, "it waited for longer than a comment is due");
    for _ in 0..2 {
        assert_eq!(waits.piece().as_deref(), Some(&b": keep-alive\n\n"[..]));
    }
    drop(running);
    assert!(waits.text().ends_with("data: [DONE]\n\n"));
}

#[test]
fn who_waits_or_runs_for_longer_than_it_wants_to_is_told_so() {
    let (server, running) = busy(&[]);
    let start = Instant::now();
    let reply = server.post(TEXT, &short(json!({ "max_queue_ms": 200 })));
    assert_eq!(reply.status, 503);
    assert!(start.elapsed() >= Duration::from_millis(200));
    assert!(reply.header("retry-after").is_some());
    assert_eq!(reply.json()["error"]["code"], "queue_timeout");
    drop(running);
    let mut body = endless();
    body["stream"] = false.into();
    body["timeout_s"] = 0.3.into();
    let answer = server.post(TEXT, &body).json();
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&json!("length"), &json!("timeout"))
    );
    assert!(choice["text"].as_str().is_some_and(|text| !text.is_empty()));
    server.wait_until_idle();
}

/// What is waited for behind the head of the answer has its time limits all the same.
#[test]
fn who_waits_behind_the_first_keep_alive_is_told_too() {
    let (server, running) = busy(&["--sse-keep-alive", "0.1"]);
    let routes = [
        (TEXT, json!({ "prompt": "A fox" })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "Hi" }] })),
        ("/v1/messages", json!({ "messages": [{ "role": "user", "content": "Hi" }] })),
    ];
    let model = server.get("/v1/models").json()["data"][0]["id"].clone();
    for (path, mut body) in routes {
        body["model"] = model.clone();
        body["max_tokens"] = 2.into();
        body["max_queue_ms"] = 500.into();
        let start = Instant::now();
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 503, "{path}");
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(500) && took < Duration::from_secs(60), "{took:?}");
    }
    drop(running);
    server.wait_until_idle();
}

/// The step counter is read, no token is asked for.
#[test]
fn an_engine_that_ends_no_step_for_too_long_is_not_healthy() {
    let (server, running) = busy(&["--stall-timeout", "1e-9"]);
    let start = Instant::now();
    while server.get("/health").status == 200 {
        assert!(start.elapsed() < Duration::from_secs(60), "no step takes no time");
    }
    assert_eq!(server.get("/live").status, 200);
    drop(running);
    server.wait_until_idle();
    let start = Instant::now();
    while server.get("/health").status != 200 {
        assert!(start.elapsed() < Duration::from_secs(60), "it has nothing to do");
    }
    assert_eq!(server.get("/ready?strict=1").status, 200);
}

#[test]
fn readiness_can_ask_that_nobody_waits() {
    let (server, running) = busy(&[]);
    assert_eq!(server.get("/ready?strict=1").status, 200);
    thread::scope(|scope| {
        let waits = scope.spawn(|| server.post(TEXT, &short(json!({}))));
        server.wait_for_load("it to wait", |load| load["waiting"] == 1);
        assert_eq!((server.get("/ready").status, server.get("/ready?strict=1").status), (200, 503));
        let code = server.get("/ready?strict=1").json()["error"]["code"].clone();
        assert_eq!(code, "requests_waiting", "the queue is not full");
        // What is shown may be as old as a view is.
        let start = Instant::now();
        loop {
            let slots = server.get("/slots").json();
            let states = slots.as_array().expect("a list").iter().map(|slot| &slot["state"]);
            let states: Vec<&Value> = states.collect();
            if states == ["decode", "waiting"] {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{slots}");
        }
        drop(running);
        assert_eq!(waits.join().expect("an answer").status, 200);
    });
}

#[test]
fn a_body_that_does_not_come_is_waited_for_only_so_long() {
    let server = Server::start(&["--body-timeout", "0.2"]);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{";
    let reply = server.send(head.as_bytes());
    assert_eq!(reply.status, 408);
    assert_eq!(reply.json()["error"]["code"], "request_timeout");
}

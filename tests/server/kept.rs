//! What is kept of prompts for later ones, and what is said of it.

use serde_json::{Value, json};

use crate::support::Server;

const CHAT: &str = "/v1/chat/completions";

fn story() -> String {
    "Lily went to the park and saw a big dog. ".repeat(20)
}

/// Cached and written tokens of an answer.
fn kept(answer: &Value) -> (u64, u64) {
    let details = &answer["usage"]["prompt_tokens_details"];
    let number = |name: &str| details[name].as_u64().unwrap_or_else(|| panic!("{answer}"));
    (number("cached_tokens"), number("cache_write_tokens"))
}

fn ask(server: &Server, parts: Value, more: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": parts }], "max_tokens": 1, "temperature": 0,
    });
    body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
    server.post(CHAT, &body).json()
}

fn parts(question: &str, mark: Value) -> Value {
    let mut first = json!({ "type": "text", "text": story() });
    first.as_object_mut().expect("a part").extend(mark.as_object().expect("fields").clone());
    json!([first, { "type": "text", "text": question }])
}

#[test]
fn a_breakpoint_keeps_the_state_at_the_grid_position_at_or_below_it() {
    let server = Server::start(&[]);
    let mark = json!({ "prompt_cache_breakpoint": { "mode": "explicit", "ttl": "30m" } });
    let explicit = json!({ "prompt_cache_options": { "mode": "explicit" } });
    let one = "Who was there, and what was the weather like on that day? ".repeat(20);
    let other = "And what did she say to it when it came to her? ".repeat(20);
    ask(&server, parts(&one, json!({})), explicit.clone());
    let unmarked = ask(&server, parts(&other, json!({})), explicit.clone());
    assert_eq!(kept(&unmarked).0, 0, "the state where the two part was not kept");
    assert_eq!(server.post("/reset_prefix_cache", &json!({})).status, 200);
    let (cached, written) = kept(&ask(&server, parts(&one, mark.clone()), explicit.clone()));
    assert!(cached == 0 && written > 64 && written.is_multiple_of(64), "{cached} {written}");
    let (cached, _) = kept(&ask(&server, parts(&other, mark.clone()), explicit));
    // The mark stands behind the story.
    let text = json!({ "messages": [{ "role": "user", "content": story() }] });
    let marked = server.post("/tokenize", &text).json()["count"].as_u64().expect("a count");
    assert!(cached.is_multiple_of(64), "{cached}");
    assert!(cached + 64 + 20 > marked && cached <= marked, "{cached} of {marked}");
    let marked =
        |text: &str| json!({ "type": "text", "text": text, "prompt_cache_breakpoint": {} });
    let five = ["a", "b", "c", "d", "e"].map(marked).into_iter().collect();
    assert_eq!(ask(&server, five, json!({}))["error"]["code"], "invalid_value");
    let options = json!({ "prompt_cache_options": { "mode": "sometimes" } });
    let error = ask(&server, json!("x"), options);
    assert_eq!(error["error"]["param"], "prompt_cache_options.mode");
}

/// What is reported as written is what was written: where nothing is kept, nothing was.
#[test]
fn a_mark_that_nothing_was_kept_for_counts_nothing() {
    let server = Server::start(&["--no-prefix-cache"]);
    let marked =
        json!([{ "type": "text", "text": story(), "cache_control": { "type": "ephemeral" } }]);
    let body = json!({
        "model": "tiny", "max_tokens": 1, "system": marked,
        "messages": [{ "role": "user", "content": "Who went to the park?" }],
    });
    let count = server.post("/v1/messages/count_tokens", &body).json()["input_tokens"].clone();
    let usage = server.post("/v1/messages", &body).json()["usage"].clone();
    assert_eq!(usage["cache_creation_input_tokens"], 0, "{usage}");
    assert_eq!(usage["input_tokens"], count);
    let mark = json!({ "prompt_cache_breakpoint": {} });
    assert_eq!(kept(&ask(&server, parts("Who?", mark), json!({}))), (0, 0));
}

#[test]
fn prompts_of_different_salts_share_nothing() {
    let server = Server::start(&[]);
    let ask = |salt: Value| {
        let body = json!({ "prompt": story(), "max_tokens": 1, "cache_salt": salt });
        kept(&server.post("/v1/completions", &body).json()).0
    };
    assert_eq!(ask(json!("one")), 0);
    assert!(ask(json!("one")) > 0);
    assert_eq!((ask(json!("two")), ask(Value::Null)), (0, 0));
    assert!(ask(json!("two")) > 0 && ask(Value::Null) > 0);
    for salt in ["a@b", "a/b", "a\\b", "a\0b", ""] {
        let body = json!({ "prompt": "x", "max_tokens": 1, "cache_salt": salt });
        assert_eq!(server.post("/v1/completions", &body).json()["error"]["param"], "cache_salt");
    }
}

/// A client that gives up and comes again finds what was computed for it.
#[test]
fn what_was_computed_for_a_client_that_left_is_there_when_it_comes_again() {
    let server = Server::start(&[]);
    let body = |tokens: usize, stream: bool| json!({ "prompt": story(), "max_tokens": tokens, "ignore_eos": true, "stream": stream });
    let mut left = server.post("/v1/completions", &body(8000, true));
    while !left.piece().expect("a token").windows(8).any(|part| part == b"\"text\":\"") {}
    drop(left);
    server.wait_until_idle();
    let again = server.post("/v1/completions", &body(1, false)).json();
    assert!(kept(&again).0 > 64, "{again}");
}

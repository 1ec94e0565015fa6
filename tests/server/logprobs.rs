//! Logprobs of prompts.

use serde_json::{Value, json};

use crate::support::{Reply, Server};

const TEXT: &str = "/v1/completions";

fn ask(server: &Server, fields: Value) -> Reply {
    let mut body = json!({ "temperature": 0, "max_tokens": 4 });
    body.as_object_mut().expect("fields").extend(fields.as_object().expect("fields").clone());
    server.post(TEXT, &body)
}

fn choices(server: &Server, fields: Value) -> Vec<Value> {
    let shown = fields.to_string();
    let reply = ask(server, fields);
    assert_eq!(reply.status, 200, "{shown}");
    reply.json()["choices"].as_array().expect("choices").clone()
}

fn numbers(values: &Value) -> Vec<Option<f64>> {
    values.as_array().expect("a list").iter().map(Value::as_f64).collect()
}

/// Several hundred tokens.
fn story() -> String {
    "Once upon a time there was a dog who liked to run in the park. ".repeat(20)
}

#[test]
fn an_echo_has_the_logprobs_of_the_prompt_before_those_of_the_answer() {
    let server = Server::start(&[]);
    let fields = json!({ "prompt": "Once upon a time", "echo": true, "logprobs": 2 });
    let choice = &choices(&server, fields.clone())[0];
    let text = choice["text"].as_str().expect("a text");
    assert!(text.starts_with("Once upon a time there"), "{text}");
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().expect("tokens");
    let prompt_tokens = tokens.len() - 4;
    let values = numbers(&logprobs["token_logprobs"]);
    assert_eq!(values[0], None, "the first token follows nothing");
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert!(values[1..].iter().all(|value| value.is_some_and(|value| value <= 0.0)), "{values:?}");
    for (token, top) in
        tokens.iter().zip(logprobs["top_logprobs"].as_array().expect("maps")).skip(1)
    {
        let top = top.as_object().expect("a map");
        assert!((2..=3).contains(&top.len()), "two, and the token itself: {top:?}");
        assert!(top.contains_key(token.as_str().expect("a text")), "{token} {top:?}");
    }
    for (offset, token) in numbers(&logprobs["text_offset"]).iter().zip(tokens) {
        let token = token.as_str().expect("a text");
        // What begins a text is not part of it.
        if !token.starts_with('<') {
            assert!(text[offset.expect("an offset") as usize..].starts_with(token), "{token:?}");
        }
    }
    let answer: String =
        tokens[prompt_tokens..].iter().map(|t| t.as_str().expect("text")).collect();
    assert!(text.ends_with(&answer), "{answer:?}");
    // Nothing has to be generated, and then nothing is.
    let mut only = fields.clone();
    only["max_tokens"] = 0.into();
    let only = &choices(&server, only)[0];
    assert_eq!(
        (&only["text"], &only["finish_reason"]),
        (&json!("Once upon a time"), &json!("length"))
    );
    assert_eq!(numbers(&only["logprobs"]["token_logprobs"]), values[..prompt_tokens]);
    // Every choice of every prompt has those of its own prompt.
    let mut several = fields;
    several["prompt"] = json!(["Once upon a time", "The dog"]);
    several["n"] = 2.into();
    let several = choices(&server, several);
    assert_eq!(several[0]["logprobs"], *logprobs);
    assert_eq!(several[1]["logprobs"], *logprobs);
    assert_eq!(several[2]["logprobs"], several[3]["logprobs"]);
    assert!(several[3]["text"].as_str().expect("a text").starts_with("The dog"));
}

#[test]
fn a_streamed_echo_has_the_same_logprobs_as_the_whole_answer() {
    let server = Server::start(&[]);
    let fields = json!({ "prompt": story(), "echo": true, "logprobs": 1, "n": 2, "stream": true });
    let mut joined = vec![json!({}), json!({})];
    let reply = ask(&server, fields.clone());
    for (_, chunk) in reply.events() {
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            let joined = &mut joined[choice["index"].as_u64().expect("an index") as usize];
            for (name, values) in choice["logprobs"].as_object().expect("logprobs") {
                if joined[name].is_null() {
                    joined[name] = json!([]);
                }
                let all = joined[name].as_array_mut().expect("a list");
                all.extend(values.as_array().expect("a list").clone());
            }
        }
    }
    let mut whole = fields;
    whole["stream"] = false.into();
    for (choice, joined) in choices(&server, whole).iter().zip(joined) {
        assert_eq!(choice["logprobs"], joined);
    }
}

/// What the model said of its own answer when it wrote it is what it says of it in a prompt.
#[test]
fn the_logprobs_of_a_prompt_are_those_with_which_it_was_written() {
    let server = Server::start(&[]);
    let asked = json!({
        "prompt": story(), "max_tokens": 40, "logprobs": 0, "return_token_ids": true,
        "ignore_eos": true,
    });
    let written = &choices(&server, asked)[0];
    let ids = |name: &str| written[name].as_array().expect("ids").clone();
    let prompt = [ids("prompt_token_ids"), ids("token_ids")].concat();
    let echoed = json!({ "prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 0 });
    let echoed = numbers(&choices(&server, echoed)[0]["logprobs"]["token_logprobs"]);
    let written = numbers(&written["logprobs"]["token_logprobs"]);
    let behind = &echoed[echoed.len() - written.len()..];
    for (one, other) in written.iter().zip(behind) {
        let difference = one.expect("a number") - other.expect("a number");
        assert!(difference.abs() < 1e-3, "{written:?} {behind:?}");
    }
}

/// An engine elsewhere died of prompt logprobs on a prompt that it knew (vLLM 8268 and 5344).
#[test]
fn a_known_prompt_has_the_logprobs_of_an_unknown_one_bit_for_bit() {
    let fields = json!({ "prompt": story(), "prompt_logprobs": 3, "logprobs": 3, "n": 2 });
    let cold = choices(&Server::start(&["--no-prefix-cache"]), fields.clone());
    let server = Server::start(&[]);
    choices(&server, json!({ "prompt": story() }));
    let known = ask(&server, json!({ "prompt": story() })).json();
    assert!(known["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));
    let answer = ask(&server, fields.clone()).json();
    assert_eq!(answer["choices"], Value::from(cold.clone()));
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    // In a crowd, a cell at a time, and pushed out again and again.
    for args in [
        &["--max-num-batched-tokens", "64", "--max-num-seqs", "8"][..],
        &["--park-every", "2", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"],
        &[
            "--park-every",
            "1",
            "--host-memory",
            "0",
            "--max-num-batched-tokens",
            "128",
            "--max-num-seqs",
            "8",
        ],
    ] {
        let server = Server::start(args);
        let crowd = json!({
            "prompt": "A crowd", "n": 4, "max_tokens": 200, "ignore_eos": true, "stream": true,
        });
        let crowd = server.post(TEXT, &crowd);
        assert_eq!(choices(&server, fields.clone()), cold, "{args:?}");
        drop(crowd);
    }
}

#[test]
fn prompt_logprobs_name_each_token_with_its_rank() {
    let server = Server::start(&[]);
    let fields = json!({
        "prompt": "Once upon a time", "prompt_logprobs": 2, "return_token_ids": true,
        "max_tokens": 0,
    });
    let choice = &choices(&server, fields)[0];
    let ids = choice["prompt_token_ids"].as_array().expect("ids");
    let list = choice["prompt_logprobs"].as_array().expect("a list");
    assert_eq!(list.len(), ids.len());
    assert_eq!(list[0], Value::Null);
    for (id, map) in ids.iter().zip(list).skip(1) {
        let map = map.as_object().expect("a map");
        let own = &map[&id.to_string()];
        let rank = own["rank"].as_u64().expect("a rank");
        let decoded = server.post("/detokenize", &json!({ "tokens": [id] })).json();
        assert_eq!(own["decoded_token"], decoded["prompt"]);
        assert_eq!(map.len(), if rank <= 2 { 2 } else { 3 }, "{map:?}");
        let mut ranked: Vec<(u64, f64)> = map
            .values()
            .map(|e| {
                (e["rank"].as_u64().expect("a rank"), e["logprob"].as_f64().expect("a number"))
            })
            .collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        assert_eq!((ranked[0].0, ranked[1].0), (1, 2));
        assert!(ranked.is_sorted_by(|a, b| a.1 >= b.1), "{ranked:?}");
    }
}

#[test]
fn logprobs_of_a_prompt_that_cannot_be_had_are_refused_by_name() {
    let server = Server::start(&[]);
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "prompt_logprobs": 1 });
    let reply = server.post("/v1/chat/completions", &chat);
    let error = reply.json();
    assert_eq!(error["error"]["code"], "unsupported_parameter", "{error}");
    assert_eq!(error["error"]["param"], "prompt_logprobs");
    for fields in [
        json!({ "prompt_logprobs": 21 }),
        json!({ "prompt_logprobs": -1 }),
        json!({ "prompt_logprobs": "x" }),
        json!({ "prompt_logprobs": 1, "stream": true }),
    ] {
        let mut body = json!({ "prompt": "Once" });
        body.as_object_mut().expect("fields").extend(fields.as_object().expect("fields").clone());
        let reply = ask(&server, body);
        assert_eq!(reply.status, 400, "{}", fields.to_string().get(..60).unwrap_or_default());
        assert_eq!(reply.json()["error"]["param"], "prompt_logprobs");
    }
}

/// All choices have the entries of their prompt until they are sent: many times a long prompt is
/// more than a server should hold for one request.
#[test]
fn more_entries_of_prompts_than_a_request_may_have_are_refused_by_name() {
    let server = Server::start(&[]);
    let long = json!(vec![5; 1000]);
    for (fields, param) in [
        (json!({ "prompt": long, "n": 16, "echo": true, "logprobs": 20 }), "logprobs"),
        (json!({ "prompt": long, "n": 16, "prompt_logprobs": 20 }), "prompt_logprobs"),
        (json!({ "prompt": vec![long.clone(); 13], "echo": true, "logprobs": 20 }), "logprobs"),
    ] {
        let reply = ask(&server, fields);
        assert_eq!(reply.status, 400, "{param}");
        let error = reply.json();
        assert_eq!(error["error"]["param"], param, "{error}");
        assert_eq!(error["error"]["code"], "invalid_value");
    }
    // One of each is let in.
    let one = json!({ "prompt": long, "echo": true, "logprobs": 20, "max_tokens": 1 });
    assert_eq!(numbers(&choices(&server, one)[0]["logprobs"]["token_logprobs"]).len(), 1001);
}

#[test]
fn every_choice_of_a_prompt_of_one_token_has_its_place_in_the_logprobs_once() {
    let server = Server::start(&[]);
    let fields = json!({ "prompt": [5], "n": 2, "echo": true, "logprobs": 1, "ignore_eos": true });
    for choice in choices(&server, fields.clone()) {
        let values = numbers(&choice["logprobs"]["token_logprobs"]);
        assert_eq!(values.len(), 1 + 4, "{choice}");
        assert!(values[0].is_none() && values[1..].iter().all(Option::is_some), "{choice}");
    }
    let mut streamed = fields;
    streamed["stream"] = true.into();
    let mut counts = [0, 0];
    for (_, chunk) in ask(&server, streamed).events() {
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().expect("an index") as usize;
            counts[index] += numbers(&choice["logprobs"]["token_logprobs"]).len();
        }
    }
    assert_eq!(counts, [5, 5]);
}

/// A request that only wants its prompt back computes nothing, and is held against the same rules.
#[test]
fn an_echo_of_nothing_but_the_prompt_is_refused_as_any_request_is() {
    let server = Server::start(&[]);
    for (fields, param) in [
        (json!({ "prompt": vec![5; 9000] }), "prompt"),
        (json!({ "prompt": "Once", "priority": 1 }), "priority"),
        (json!({ "prompt": [999_999] }), "prompt"),
    ] {
        let mut body = json!({ "echo": true, "max_tokens": 0 });
        body.as_object_mut().expect("fields").extend(fields.as_object().expect("fields").clone());
        let reply = ask(&server, body);
        assert_eq!(reply.status, 400, "{param}");
        assert_eq!(reply.json()["error"]["param"], param);
    }
    let all = json!({ "prompt": vec![5; 8192], "echo": true, "max_tokens": 0 });
    assert_eq!(choices(&server, all)[0]["finish_reason"], "length");
}

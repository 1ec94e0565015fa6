//! The streams of OpenAI's API, event by event.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::support::{Reply, Server};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A token that ends the embedded model's answers.
const EOS: u32 = 1;

/// A request for an answer to a prompt, for either route.
fn body(path: &str, more: Value) -> Value {
    let mut body = match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "Once upon a time" }] }),
        _ => json!({ "prompt": "Once upon a time" }),
    };
    body["temperature"] = 0.into();
    body["max_tokens"] = 6.into();
    let more = more.as_object().expect("fields").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

/// The chunks of a stream, which ends as it should.
fn chunks(reply: Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("cache-control"), Some("no-cache"));
    assert_eq!(reply.header("x-accel-buffering"), Some("no"));
    let mut events = reply.events();
    assert_eq!(events.pop().expect("an event").1, "[DONE]");
    assert!(events.iter().all(|(name, _)| name.is_empty()), "this API has no names of events");
    events.into_iter().map(|(_, data)| data).collect()
}

fn text_of(choice: &Value) -> &str {
    let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
    text.or(choice["message"]["content"].as_str()).unwrap_or_default()
}

/// The tokens of the model's vocabulary that are these texts.
fn token(server: &Server, text: &str) -> u32 {
    let ids = server.post("/tokenize", &json!({ "content": text })).json()["tokens"].clone();
    let ids = ids.as_array().expect("tokens").clone();
    assert_eq!(ids.len(), 1, "{text:?} is one token");
    u32::try_from(ids[0].as_u64().expect("an id")).expect("a small id")
}

#[test]
fn a_chat_streams_its_role_its_content_its_end_and_its_usage_in_this_order() {
    let server = Server::start(&[]);
    let stream = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let all = chunks(server.post(CHAT, &body(CHAT, stream)));
    let (usage, chunks) = all.split_last().expect("chunks");
    let (last, deltas) = chunks.split_last().expect("chunks");
    assert_eq!(deltas[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let text: String = deltas.iter().map(|chunk| text_of(&chunk["choices"][0])).collect();
    assert_eq!(text, " there was a young girl named");
    for chunk in deltas {
        assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
        assert_eq!(chunk.get("usage"), Some(&Value::Null));
    }
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 6);
    let same = |name: &str| all.iter().all(|chunk| chunk[name] == all[0][name]);
    assert!(same("id") && same("created") && same("model") && same("system_fingerprint"));
    assert!(all.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
}

#[test]
fn a_completion_streams_the_text_of_the_whole_answer_and_continuous_usage() {
    let server = Server::start(&[]);
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    let stream = json!({ "stream": true, "stream_options": options });
    let all = chunks(server.post(TEXT, &body(TEXT, stream)));
    let text: String = all.iter().map(|chunk| text_of(&chunk["choices"][0])).collect();
    let whole = server.post(TEXT, &body(TEXT, json!({}))).json();
    assert_eq!(text, text_of(&whole["choices"][0]));
    let counts: Vec<u64> =
        all.iter().filter_map(|chunk| chunk["usage"]["completion_tokens"].as_u64()).collect();
    assert_eq!(counts, [1, 2, 3, 4, 5, 6, 6]);
    assert!(all.iter().all(|chunk| chunk["object"] == "text_completion"));
}

#[test]
fn the_fields_of_a_chunk_stand_in_their_order_and_what_was_not_asked_for_is_not_there() {
    let server = Server::start(&[]);
    let plain = json!({ "stream": true, "max_tokens": 1 });
    let ids = json!({ "stream": true, "max_tokens": 1, "return_token_ids": true });
    let line = |path, fields: &Value, index: usize| {
        let text = server.post(path, &body(path, fields.clone())).text();
        let event = text.split("\n\n").nth(index).expect("an event").to_owned();
        let (head, choices) = event.split_once(",\"choices\":").expect("choices");
        let names = ["id", "object", "created", "model", "system_fingerprint"];
        let places = names.map(|name| head.find(&format!("\"{name}\":")));
        assert!(places[0] == Some("data: {".len()) && places.is_sorted(), "{head}");
        choices.to_owned()
    };
    let role = r#"[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    assert_eq!(line(CHAT, &plain, 0), role);
    let delta =
        r#"[{"index":0,"delta":{"content":" there"},"logprobs":null,"finish_reason":null}]}"#;
    assert_eq!(line(CHAT, &plain, 1), delta);
    let end =
        r#"[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}]}"#;
    assert_eq!(line(CHAT, &plain, 2), end);
    let text = r#"[{"index":0,"text":" there","logprobs":null,"finish_reason":"length""#;
    let text = format!("{text},\"stop_reason\":null");
    assert_eq!(line(TEXT, &plain, 0), format!("{text}}}]}}"));
    let with_ids = line(TEXT, &ids, 0);
    assert!(with_ids.starts_with(&format!("{text},\"token_ids\":[")), "{with_ids}");
    assert!(with_ids.contains("],\"prompt_token_ids\":["), "{with_ids}");
}

/// Others sent a reason twice, none, or an empty one, or with several choices only that of the last
/// (SGLang 8417 and 3912, vLLM 27572).
#[test]
fn each_of_three_choices_with_three_different_ends_has_exactly_one_reason_and_null_before() {
    let server = Server::start(&[]);
    let (stop, other) = (token(&server, "x"), token(&server, "y"));
    let bias: BTreeMap<String, i32> =
        [EOS, stop, other].iter().map(|id| (id.to_string(), 100)).collect();
    for path in [CHAT, TEXT] {
        let mut found = false;
        for seed in 0..200 {
            let fields = json!({
                "stream": true, "n": 3, "seed": seed, "max_tokens": 2, "temperature": 10,
                "logit_bias": bias, "stop": "x",
            });
            let mut ends: BTreeMap<u64, Vec<(String, Value)>> = BTreeMap::new();
            for chunk in chunks(server.post(path, &body(path, fields))) {
                for choice in chunk["choices"].as_array().expect("choices") {
                    let ends = ends.entry(choice["index"].as_u64().expect("an index")).or_default();
                    assert!(ends.is_empty(), "nothing follows the end: {chunk}");
                    assert!(choice.get("finish_reason").is_some(), "the reason is told: {chunk}");
                    if let Some(reason) = choice["finish_reason"].as_str() {
                        ends.push((reason.to_owned(), choice["stop_reason"].clone()));
                    }
                }
            }
            assert_eq!(ends.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
            assert!(ends.values().all(|ends| ends.len() == 1), "{ends:?}");
            let kinds: BTreeSet<String> =
                ends.values().map(|ends| format!("{:?}", ends[0])).collect();
            if kinds.len() == 3 {
                let length = ends.values().any(|ends| ends[0].0 == "length");
                let text = ends.values().any(|ends| ends[0] == ("stop".to_owned(), json!("x")));
                let eos = ends.values().any(|ends| ends[0] == ("stop".to_owned(), Value::Null));
                assert!(length && text && eos, "{ends:?}");
                found = true;
                break;
            }
        }
        assert!(found, "some seed gives all three ends");
    }
}

#[test]
fn a_character_of_several_tokens_is_never_split() {
    let server = Server::start(&[]);
    // The bytes of é, each a token: one draws the other as the penalty grows.
    let ids = server.post("/tokenize", &json!({ "content": "é" })).json()["tokens"].clone();
    let ids = ids.as_array().expect("tokens").clone();
    assert_eq!(ids.len(), 2, "the two bytes are two tokens");
    let bias: BTreeMap<String, i32> = ids.iter().map(|id| (id.to_string(), 100)).collect();
    let fields = json!({
        "max_tokens": 60, "logit_bias": bias, "frequency_penalty": 2, "return_token_ids": true,
    });
    for path in [CHAT, TEXT] {
        let whole = server.post(path, &body(path, fields.clone())).json()["choices"][0].clone();
        let text = text_of(&whole);
        assert!(text.contains('é'), "{text}");
        let mut streamed = body(path, fields.clone());
        streamed["stream"] = true.into();
        let all = chunks(server.post(path, &streamed));
        let pieces: String = all.iter().map(|chunk| text_of(&chunk["choices"][0])).collect();
        assert_eq!(pieces, text);
        let decoded = server.post("/detokenize", &json!({ "tokens": whole["token_ids"] })).json();
        assert_eq!(decoded["prompt"], text);
    }
}

#[test]
fn no_part_of_a_stop_string_leaks_however_the_tokens_lie() {
    let server = Server::start(&[]);
    for path in [CHAT, TEXT] {
        let whole = server.post(path, &body(path, json!({ "max_tokens": 12 }))).json();
        let whole = text_of(&whole["choices"][0]).to_owned();
        for begin in 1..whole.len() - 6 {
            let stop = &whole[begin..begin + 6];
            let fields = json!({ "max_tokens": 12, "stop": [stop], "stream": true });
            let all = chunks(server.post(path, &body(path, fields)));
            let text: String = all.iter().map(|chunk| text_of(&chunk["choices"][0])).collect();
            assert_eq!(text, whole[..whole.find(stop).expect("it is there")], "{stop:?}");
            let last = &all.last().expect("a chunk")["choices"][0];
            assert_eq!(
                (&last["finish_reason"], &last["stop_reason"]),
                (&json!("stop"), &json!(stop))
            );
        }
    }
}

#[test]
fn errors_that_come_before_the_headers_keep_their_status() {
    let server = Server::start(&["--max-model-len", "64"]);
    for path in [CHAT, TEXT] {
        let long = "a dog ".repeat(100);
        let long = match path {
            CHAT => json!({ "messages": [{ "role": "user", "content": long }] }),
            _ => json!({ "prompt": long }),
        };
        for (fields, status, code) in [
            (long, 400, "context_length_exceeded"),
            (json!({ "model": "other" }), 404, "model_not_found"),
            (json!({ "temperature": -1 }), 400, "invalid_value"),
            (json!({ "logit_bias": { "999999": 1 } }), 400, "invalid_value"),
        ] {
            for stream in [false, true] {
                let mut body = body(path, fields.clone());
                body["stream"] = stream.into();
                let reply = server.post(path, &body);
                assert_eq!(reply.status, status, "{body}");
                assert_eq!(reply.header("content-type"), Some("application/json"));
                let error = reply.json()["error"].clone();
                assert_eq!(error["code"], code, "{body}");
                let names_it = |param: &str| body.get(param).is_some() || param.contains('.');
                assert!(error["param"].as_str().is_some_and(names_it), "{body}: {error}");
            }
        }
        let options = json!({ "stream_options": { "include_usage": true } });
        let error = server.post(path, &body(path, options)).json();
        assert_eq!(error["error"]["param"], "stream_options");
    }
}

/// Seeded answers differed between runs under load elsewhere, and users asked how to pin them (vLLM
/// 16945 and 1595).
#[test]
fn a_seed_gives_the_same_answer_alone_in_a_crowd_and_pushed_out_and_its_copies_differ() {
    let seeded = |n: usize| {
        json!({
            "seed": 1, "n": n, "temperature": 1, "top_k": 50, "max_tokens": 24,
            "ignore_eos": true,
        })
    };
    let texts = |server: &Server, n: usize| -> Vec<String> {
        let answer = server.post(TEXT, &body(TEXT, seeded(n))).json();
        let choices = answer["choices"].as_array().expect("choices").clone();
        choices.iter().map(|choice| text_of(choice).to_owned()).collect()
    };
    let server = Server::start(&[]);
    let alone = texts(&server, 1);
    assert_eq!(texts(&server, 1), alone);
    let copies = texts(&server, 4);
    assert_eq!(copies[0], alone[0]);
    assert_eq!(copies.iter().collect::<BTreeSet<_>>().len(), 4, "{copies:?}");
    let crowd = json!({ "n": 8, "max_tokens": 400, "ignore_eos": true, "stream": true });
    let crowd = server.post(TEXT, &body(TEXT, crowd));
    assert_eq!(texts(&server, 4), copies);
    drop(crowd);
    // Every sequence is pushed out again and again.
    let server = Server::start(&["--park-every", "3"]);
    assert_eq!(texts(&server, 4), copies);
}

#[test]
fn a_chat_tells_its_role_as_soon_as_it_is_begun() {
    let server = Server::start(&["--max-num-batched-tokens", "64", "--max-num-seqs", "8"]);
    let long = "a dog ran to the park. ".repeat(200);
    let fields =
        json!({ "messages": [{ "role": "user", "content": long }], "stream": true, "n": 2 });
    let mut reply = server.post(CHAT, &body(CHAT, fields));
    assert_eq!(reply.status, 200);
    // Before any token: the prompt takes many steps.
    let first = String::from_utf8(reply.piece().expect("a chunk")).expect("text");
    assert!(first.contains(r#""delta":{"role":"assistant","content":""}"#), "{first}");
    assert!(!first.contains(r#""delta":{"content""#), "{first}");
    assert!(server.get("/load").json()["prompt_backlog"].as_u64() > Some(0));
    let rest = first + &reply.text();
    assert_eq!(rest.matches(r#""role""#).count(), 2, "once for each choice");
}

#[test]
fn usage_tells_how_many_tokens_were_reasoning() {
    let dir = tempfile::tempdir().expect("a folder");
    let template = dir.path().join("template.jinja");
    let text = "{{ messages[0].content }}<think>{% if false %}</think>{% endif %}";
    std::fs::write(&template, text).expect("a file");
    let thinking = Server::start(&["--chat-template", crate::program::arg(&template)]);
    for (server, tokens) in [(&thinking, 6), (&Server::start(&[]), 0)] {
        let answer = server.post(CHAT, &body(CHAT, json!({}))).json();
        let details = &answer["usage"]["completion_tokens_details"];
        assert_eq!(details["reasoning_tokens"], tokens, "{answer}");
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["reasoning"].is_string(), tokens > 0, "{message}");
        assert_eq!(message["reasoning"], message["reasoning_content"]);
    }
}

//! Fields of a request: those that are served, those that are refused, and those that nobody knows.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::program::arg;
use crate::start::serve;
use crate::support::{Reply, Server};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn body(path: &str, more: Value) -> Value {
    let mut body = match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "Once upon a time" }] }),
        _ => json!({ "prompt": "Once upon a time" }),
    };
    body["temperature"] = 0.into();
    body["max_tokens"] = 4.into();
    body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
    body
}

fn ask(server: &Server, path: &str, more: Value) -> Reply {
    server.post(path, &body(path, more))
}

fn text(server: &Server, more: Value) -> String {
    let shown = more.to_string();
    let reply = ask(server, TEXT, more);
    assert_eq!(reply.status, 200, "{shown}");
    reply.json()["choices"][0]["text"].as_str().expect("a text").to_owned()
}

#[test]
fn what_would_change_the_answer_and_is_not_served_is_refused_by_name() {
    let server = Server::start(&[]);
    let fields = [
        ("use_beam_search", json!(true)),
        ("audio", json!({ "voice": "x" })),
        ("modalities", json!(["text", "audio"])),
        ("functions", json!([{ "name": "f" }])),
        ("function_call", json!("auto")),
        ("guided_json", json!({})),
        ("guided_regex", json!("a+")),
        ("guided_choice", json!(["a"])),
        ("guided_grammar", json!("root ::= x")),
        ("regex", json!("a+")),
        ("ebnf", json!("root ::= x")),
        ("grammar", json!("root ::= x")),
        ("json_schema", json!({})),
        ("structural_tag", json!({})),
        ("bad_words", json!(["dog"])),
        ("allowed_token_ids", json!([1])),
        ("logits_processors", json!(["f"])),
        ("custom_logit_processor", json!("f")),
        ("prompt_embeds", json!("AAAA")),
        ("documents", json!([{ "text": "x" }])),
        ("lora_path", json!("x")),
        ("stop_regex", json!("a+")),
        ("n_predict", json!(3)),
        ("best_of", json!(2)),
        ("session", json!("mine")),
        ("on_disconnect", json!("park")),
        ("thinking_token_budget", json!(5)),
        ("typical_p", json!(0.5)),
        ("mirostat", json!(2)),
        ("dry_multiplier", json!(0.8)),
        ("xtc_probability", json!(0.1)),
        ("top_n_sigma", json!(1)),
    ];
    for path in [CHAT, TEXT] {
        let own = match path {
            CHAT => [("prompt_logprobs", json!(1)), ("chat_template", json!("x"))],
            _ => [("suffix", json!("end")), ("best_of", json!(3))],
        };
        for (name, value) in fields.iter().cloned().chain(own) {
            let reply = ask(&server, path, json!({ name: value }));
            assert_eq!(reply.status, 400, "{path} {name}");
            let error = reply.json()["error"].clone();
            assert_eq!(
                (&error["code"], &error["param"]),
                (&json!("unsupported_parameter"), &json!(name))
            );
        }
    }
    let image = json!([{ "type": "image_url", "image_url": { "url": "data:," } }]);
    let image = json!({ "messages": [{ "role": "user", "content": image }] });
    let error = ask(&server, CHAT, image).json()["error"].clone();
    assert_eq!(error["code"], "unsupported_content");
    assert_eq!(error["param"], "messages[0].content[0].type", "{error}");
}

#[test]
fn what_asks_for_nothing_or_changes_no_answer_is_taken() {
    let server = Server::start(&["--strict-params"]);
    let plain = text(&server, json!({}));
    for fields in [
        json!({ "functions": null, "audio": false, "ebnf": "", "bad_words": [], "stop": null }),
        json!({ "typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "dry_multiplier": 0.0,
                "xtc_probability": 0, "dynatemp_range": 0, "top_n_sigma": -1 }),
        json!({ "user": "me", "metadata": { "a": "b" }, "store": true, "service_tier": "auto",
                "safety_identifier": "x", "prediction": { "type": "content", "content": "x" },
                "verbosity": "low", "prompt_cache_key": "k", "session_id": "s" }),
        json!({ "modalities": ["text"], "best_of": 1, "n": 1, "top_k": -1, "seed": -5,
                "repeat_penalty": 1.0, "skip_special_tokens": true,
                "spaces_between_special_tokens": false, "min_p": 0, "max_completion_tokens": 4 }),
    ] {
        assert_eq!(text(&server, fields.clone()), plain, "{fields}");
        assert_eq!(ask(&server, CHAT, fields.clone()).status, 200, "{fields}");
    }
    assert_eq!(ask(&server, TEXT, json!({ "suffix": "" })).status, 200);
    // Elsewhere a null here was an error.
    assert_eq!(ask(&server, CHAT, json!({ "top_logprobs": null })).status, 200);
    let error = ask(&server, TEXT, json!({ "temprature": 1 })).json();
    assert_eq!(error["error"]["param"], "temprature");
}

#[test]
fn unknown_fields_are_ignored_named_and_counted() {
    let server = Server::start(&[]);
    for path in [CHAT, TEXT, "/v1/messages"] {
        let mut body = body(path, json!({ "temprature": 1, "b\u{e9}\r\n": [], "model": "tiny" }));
        if path == "/v1/messages" {
            body["messages"] = json!([{ "role": "user", "content": "Hi" }]);
            body.as_object_mut().expect("fields").remove("prompt");
        }
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.header("x-ignored-params"), Some("temprature,b"), "{path}");
    }
    let metrics = server.get("/metrics").text();
    let count = |name: &str| {
        let line = metrics
            .lines()
            .find(|line| line.starts_with("deltapool_ignored_params_total") && line.contains(name));
        line.and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    assert_eq!(count("name=\"temprature\"").as_deref(), Some("3"));
    assert_eq!(count("name=\"other\"").as_deref(), Some("3"), "its name is not for a label");
}

#[test]
fn a_prompt_is_cut_to_its_last_tokens_where_that_is_asked_for() {
    let server = Server::start(&["--max-model-len", "128"]);
    let long = "a dog ran to the big park and the cat sat on the mat. ".repeat(30);
    assert_eq!(ask(&server, TEXT, json!({ "prompt": long })).status, 400);
    for path in [TEXT, CHAT] {
        let mut more = json!({ "truncate_prompt_tokens": 50, "return_token_ids": true });
        match path {
            TEXT => more["prompt"] = long.as_str().into(),
            _ => more["messages"] = json!([{ "role": "user", "content": long }]),
        }
        let answer = ask(&server, path, more.clone()).json();
        assert_eq!(answer["usage"]["prompt_tokens"], 50, "{answer}");
        more["truncate_prompt_tokens"] = (-1).into();
        let answer = ask(&server, path, more.clone()).json();
        assert_eq!(answer["usage"]["prompt_tokens"], 124, "what fits beside the answer");
        for wrong in [json!(0), json!(-2), json!(129), json!("x")] {
            more["truncate_prompt_tokens"] = wrong;
            let error = ask(&server, path, more.clone()).json();
            assert_eq!(error["error"]["param"], "truncate_prompt_tokens");
        }
    }
    let ids = |more: Value| {
        let mut body = json!({ "prompt": "A dog ran", "return_token_ids": true });
        body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
        let answer = ask(&server, TEXT, body).json();
        answer["choices"][0]["prompt_token_ids"].as_array().expect("ids").clone()
    };
    let all = ids(json!({}));
    assert_eq!(ids(json!({ "truncate_prompt_tokens": 2 })), all[all.len() - 2..]);
    let bare = server.post("/tokenize", &json!({ "content": "A dog ran" })).json();
    assert_eq!(Value::from(ids(json!({ "add_special_tokens": false }))), bare["tokens"]);
    let echoed = text(
        &server,
        json!({
            "prompt": "A dog ran", "echo": true, "truncate_prompt_tokens": 1, "max_tokens": 0,
        }),
    );
    assert!("A dog ran".ends_with(&echoed) && echoed.len() < 9, "{echoed:?}");
}

/// The first lines that a server says when it cannot start, and its exit code.
fn refused(args: &[&str]) -> (Option<i32>, String) {
    let output = serve(args, &[]);
    (output.status.code(), String::from_utf8(output.stderr).expect("text"))
}

#[test]
fn what_a_request_does_not_say_is_as_the_models_files_say() {
    let dir = tempfile::tempdir().expect("a folder");
    let write = |text: &str| {
        fs::write(dir.path().join("generation_config.json"), text).expect("it is written");
    };
    write(r#"{"temperature": 0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.5, "x": 1}"#);
    let args = ["--generation-config", arg(dir.path())];
    let server = Server::start(&args);
    let sampling = server.get("/props").json()["default_sampling"].clone();
    assert_eq!((&sampling["temperature"], &sampling["top_k"]), (&json!(0.0), &json!(20)));
    assert_eq!((&sampling["repetition_penalty"], &sampling["min_p"]), (&json!(1.5), &json!(0.0)));
    let long = json!({ "max_tokens": 40, "ignore_eos": true });
    let with = |server: &Server, more: Value| {
        let mut body = long.clone();
        body["temperature"] = Value::Null;
        body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
        text(server, body)
    };
    let unsaid = with(&server, json!({}));
    assert_eq!(with(&server, json!({ "temperature": 0, "repetition_penalty": 1.5 })), unsaid);
    // What a request says counts, though it be the API's own default.
    let plain =
        json!({ "repetition_penalty": 1, "top_k": 0, "top_p": 1, "temperature": 1, "seed": 1 });
    let api = Server::start(&["--generation-config", "vllm"]);
    assert_eq!(with(&server, plain), with(&api, json!({ "seed": 1 })));
    for (text, says) in [
        (r#"{"temperature": "hot"}"#, "temperature is \"hot\"; it must be a number, 0 or more"),
        (r#"{"top_p": 1.5, "top_k": 0.5}"#, "top_k is 0.5; it must be an integer"),
        (r#"{"top_p": "#, "not a JSON object"),
        ("[]", "not a JSON object"),
    ] {
        write(text);
        let (code, said) = refused(&args);
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains(says) && said.contains("generation_config.json"), "{said}");
    }
    // The model's own, unless that is not asked for.
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-model");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(assets.join(file), dir.path().join(file)).expect("a copy");
    }
    let folder = arg(dir.path());
    for (text, said) in [
        (r#"{"eos_token_id": 1, "temperature": 0.25}"#, Some(0.25)),
        (r#"{"eos_token_id": 1}"#, Some(1.0)),
        (r#"{"eos_token_id": 1, "temperature": -1}"#, None),
    ] {
        write(text);
        match said {
            None => assert_eq!(refused(&[folder]).0, Some(3)),
            Some(temperature) => {
                let props = Server::start(&[folder]).get("/props").json();
                assert_eq!(props["default_sampling"]["temperature"], temperature);
            }
        }
    }
    let props = Server::start(&[folder, "--generation-config", "vllm"]).get("/props").json();
    assert_eq!(props["default_sampling"]["temperature"], 1.0);
    let none = tempfile::tempdir().expect("a folder");
    assert_eq!(refused(&["--generation-config", arg(none.path())]).0, Some(3));
}

#[test]
fn fields_of_sampling_and_length_do_what_they_say() {
    let server = Server::start(&[]);
    let choice = |path: &str, more: Value| ask(&server, path, more).json()["choices"][0].clone();
    // The newer name of a length wins.
    let lengths = json!({ "max_tokens": 9, "max_completion_tokens": 2, "return_token_ids": true });
    let ids = choice(TEXT, lengths)["token_ids"].clone();
    assert_eq!(ids.as_array().map(Vec::len), Some(2));
    let (first, second) = (ids[0].clone(), ids[1].clone());
    let stopped = choice(TEXT, json!({ "stop_token_ids": [second] }));
    assert_eq!((&stopped["finish_reason"], &stopped["stop_reason"]), (&json!("stop"), &second));
    let late = json!({ "stop_token_ids": [first], "min_tokens": 3, "return_token_ids": true });
    assert!(choice(TEXT, late)["token_ids"].as_array().is_some_and(|ids| ids.len() >= 3));
    let text = choice(TEXT, json!({}))["text"].as_str().expect("a text").to_owned();
    let stop = &text[2..5];
    for (includes, expected) in [(false, &text[..2]), (true, &text[..5])] {
        let more = json!({ "stop": stop, "include_stop_str_in_output": includes });
        let stopped = choice(TEXT, more);
        assert_eq!(
            (stopped["text"].as_str(), stopped["stop_reason"].as_str()),
            (Some(expected), Some(stop))
        );
    }
    let logprobs = json!({ "logprobs": true, "top_logprobs": 3, "max_tokens": 2 });
    let content = choice(CHAT, logprobs.clone())["logprobs"]["content"].clone();
    for token in content.as_array().expect("a list") {
        let top = token["top_logprobs"].as_array().expect("a list");
        assert_eq!(
            (top.len(), &top[0]["token"], &top[0]["logprob"]),
            (3, &token["token"], &token["logprob"])
        );
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).expect("bytes");
        assert_eq!(String::from_utf8(bytes).ok().as_deref(), token["token"].as_str());
    }
    let mut as_ids = logprobs;
    as_ids["return_tokens_as_token_ids"] = true.into();
    let named = choice(CHAT, as_ids)["logprobs"]["content"][0]["token"].clone();
    assert!(named.as_str().is_some_and(|name| name.starts_with("token_id:")), "{named}");
    // A bias rules a token out, or in.
    let banned = json!({ "logit_bias": { first.to_string(): -100 }, "return_token_ids": true });
    assert_ne!(choice(TEXT, banned)["token_ids"][0], first);
}

#[test]
fn lists_that_are_too_long_are_refused() {
    let server = Server::start(&[]);
    let biases: serde_json::Map<String, Value> =
        (0..1025).map(|id| (id.to_string(), 1.into())).collect();
    for (path, more) in [
        (TEXT, json!({ "prompt": vec!["x"; 257] })),
        (TEXT, json!({ "logit_bias": biases })),
        (TEXT, json!({ "stop": vec!["x"; 17] })),
        (TEXT, json!({ "stop": "x".repeat(257) })),
        (TEXT, json!({ "n": 17 })),
        (TEXT, json!({ "logprobs": 21 })),
        (CHAT, json!({ "top_logprobs": 21, "logprobs": true })),
        (CHAT, json!({ "top_logprobs": 2 })),
        (CHAT, json!({ "reasoning_effort": "enormous" })),
    ] {
        let param = more.as_object().and_then(|fields| fields.keys().next()).expect("a field");
        let error = ask(&server, path, more.clone()).json()["error"].clone();
        assert_eq!(error["param"], param.as_str(), "{error}");
    }
    let prompts = json!({ "prompt": vec!["x"; 3], "n": 2, "max_tokens": 1 });
    let answer = ask(&server, TEXT, prompts).json();
    let choices = answer["choices"].as_array().expect("choices");
    let indices: Vec<_> = choices.iter().filter_map(|choice| choice["index"].as_u64()).collect();
    assert_eq!(indices, [0, 1, 2, 3, 4, 5]);
}

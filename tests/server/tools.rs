//! Tools, formats and what conversations find again, on the embedded model: it calls tools as JSON
//! objects and only when it must.

use serde_json::{Value, json};

use crate::support::Server;

fn weather() -> Value {
    json!([{
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"enum": ["Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["town", "days"],
                "additionalProperties": false,
            },
        },
    }])
}

fn ask(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[test]
fn a_tool_that_must_be_called_is_called_with_arguments_of_its_schema() {
    let server = Server::start(&[]);
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for (seed, choice) in [json!("required"), named].into_iter().cycle().take(6).enumerate() {
        let body = json!({
            "messages": ask("How is the weather?"), "tools": weather(), "tool_choice": choice,
            "seed": seed, "temperature": 1.0, "max_tokens": 200, "parallel_tool_calls": false,
        });
        let answer = server.post("/v1/chat/completions", &body).json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let calls = choice["message"]["tool_calls"].as_array().expect("calls");
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0]["function"]["name"], "weather");
        let arguments = calls[0]["function"]["arguments"].as_str().expect("a text");
        let arguments: Value = serde_json::from_str(arguments).expect("it is JSON");
        assert!(["Oslo", "Rome"].contains(&arguments["town"].as_str().expect("a town")));
        assert!((1..=9).contains(&arguments["days"].as_i64().expect("days")));
    }
}

/// The pieces of a call come in the order in which clients put them together.
#[test]
fn a_streamed_call_begins_with_its_name_and_its_arguments_join_to_json() {
    let server = Server::start(&[]);
    let body = json!({
        "messages": ask("How is the weather?"), "tools": weather(), "tool_choice": "required",
        "seed": 1, "stream": true, "parallel_tool_calls": false, "max_tokens": 200,
    });
    let mut arguments = String::new();
    let mut finish = Vec::new();
    for (_, event) in server.post("/v1/chat/completions", &body).events() {
        let Some(choice) = event["choices"].get(0) else { continue };
        finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        let Some(call) = choice["delta"]["tool_calls"].get(0) else { continue };
        assert_eq!(call["index"], 0);
        if arguments.is_empty() && call["id"].is_string() {
            assert_eq!(call["type"], "function");
            assert_eq!(call["function"], json!({"name": "weather", "arguments": ""}));
        } else {
            assert!(call.get("id").is_none(), "{call}");
            arguments.push_str(call["function"]["arguments"].as_str().expect("a piece"));
        }
    }
    assert!(serde_json::from_str::<Value>(&arguments).expect("it is JSON")["town"].is_string());
    assert_eq!(finish, ["tool_calls"]);
}

#[test]
fn a_schema_of_the_answer_holds_whatever_the_seed() {
    let server = Server::start(&[]);
    let schema = json!({
        "type": "object",
        "properties": {"name": {"enum": ["fox", "owl"]}, "age": {"type": "integer"}},
        "required": ["name", "age"], "additionalProperties": false,
    });
    for seed in 0..4 {
        let format = json!({
            "type": "json_schema", "json_schema": {"name": "animal", "schema": schema},
        });
        let body = json!({
            "messages": ask("Which animal?"), "response_format": format, "seed": seed,
            "max_tokens": 100,
        });
        let answer = server.post("/v1/chat/completions", &body).json();
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "stop" {
            let text = choice["message"]["content"].as_str().expect("a text");
            let animal: Value = serde_json::from_str(text).expect("it is JSON");
            assert!(["fox", "owl"].contains(&animal["name"].as_str().expect("a name")));
        }
    }
    let body = json!({
        "prompt": "The fox said", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9,
    });
    let answer = server.post("/v1/completions", &body).json();
    assert!(["yes", "no"].contains(&answer["choices"][0]["text"].as_str().expect("a text")));
}

#[test]
fn what_cannot_be_held_to_is_refused_before_anything_is_computed() {
    let server = Server::start(&[]);
    let call = |more: Value| {
        let mut body = json!({"messages": ask("Hello"), "max_tokens": 5});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        let reply = server.post("/v1/chat/completions", &body);
        (reply.status, reply.json()["error"]["param"].as_str().map(str::to_owned))
    };
    let refused = |more: Value, param: &str| {
        assert_eq!(call(more.clone()), (400, Some(param.to_owned())), "{more}");
    };
    refused(json!({"tools": [], "tool_choice": "required"}), "tool_choice");
    let unknown = json!({"type": "function", "function": {"name": "nothing"}});
    refused(json!({"tools": weather(), "tool_choice": unknown}), "tool_choice");
    refused(json!({"tools": [{"type": "function"}]}), "tools[0].function");
    refused(json!({"structured_outputs": {"regex": "("}}), "structured_outputs.regex");
    refused(json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs");
    refused(json!({"guided_json": {"type": "object"}}), "guided_json");
    refused(json!({"response_format": {"type": "xml"}}), "response_format.type");
    refused(
        json!({"continue_final_message": true, "add_generation_prompt": true}),
        "continue_final_message",
    );
}

/// Arguments were malformed in the second turn elsewhere, or the server failed (llama.cpp 22072,
/// vLLM 47194).
#[test]
fn calls_in_both_of_two_turns_are_json_whole_and_streamed() {
    let server = Server::start(&[]);
    for seed in 0..15 {
        let mut messages = vec![json!({"role": "user", "content": "How is the weather?"})];
        for choice in [json!("required"), json!("auto")] {
            let stream = seed % 2 == 0;
            let body = json!({
                "messages": messages, "tools": weather(), "tool_choice": choice, "seed": seed,
                "max_tokens": 200, "parallel_tool_calls": false, "stream": stream,
            });
            let reply = server.post("/v1/chat/completions", &body);
            assert_eq!(reply.status, 200, "{seed}");
            let mut message = if stream {
                joined(reply.events())
            } else {
                reply.json()["choices"][0]["message"].clone()
            };
            let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
            assert!(choice == "auto" || calls.len() == 1, "{message}");
            for call in &calls {
                let text = call["function"]["arguments"].as_str().expect("text");
                serde_json::from_str::<Value>(text).unwrap_or_else(|e| panic!("{e}: {message}"));
            }
            message["role"] = "assistant".into();
            let id = calls.first().map(|call| call["id"].clone());
            messages.push(message);
            if let Some(id) = id {
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": "It rains."}));
            }
        }
    }
}

/// The message that the deltas of a stream with at most one call make.
fn joined(events: Vec<(String, Value)>) -> Value {
    let (mut content, mut call) = (String::new(), Value::Null);
    for (_, chunk) in events {
        let delta = &chunk["choices"][0]["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        for piece in delta["tool_calls"].as_array().into_iter().flatten() {
            if call.is_null() {
                assert!(piece["id"].is_string() && piece["function"]["name"].is_string());
                call = piece.clone();
                continue;
            }
            let more = piece["function"]["arguments"].as_str().expect("a piece");
            let all = call["function"]["arguments"].as_str().expect("text").to_owned() + more;
            call["function"]["arguments"] = all.into();
        }
    }
    match call {
        Value::Null => json!({"content": content}),
        call => json!({"content": content, "tool_calls": [call]}),
    }
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
}

/// Nobody asked for anything to be kept.
#[test]
fn the_second_conversation_with_the_same_beginning_does_not_compute_it_again() {
    let server = Server::start(&[]);
    let system = "You tell stories of animals that live in the forest. ".repeat(20);
    let ask = |text: &str| {
        let messages = json!([
            {"role": "system", "content": system},
            {"role": "user", "content": text},
        ]);
        let body = json!({"messages": messages, "max_tokens": 4, "temperature": 0});
        server.post("/v1/chat/completions", &body).json()
    };
    let first = ask("Tell me of the fox that came to the river and met a bear.");
    assert_eq!(cached(&first), 0);
    let second = ask("And what did the owl say to the mouse?");
    let prompt = second["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert!(cached(&second) + 63 + 20 >= prompt, "{} of {prompt}", cached(&second));
}

/// The client sends an answer back in another form: arguments with other spaces and another order.
#[test]
fn a_turn_after_a_tool_call_goes_on_from_the_state_behind_it() {
    let server = Server::start(&[]);
    let question = format!("How is the weather? {}", "Tell me all of it. ".repeat(30));
    let mut messages = vec![json!({"role": "user", "content": question})];
    let body = |messages: &[Value], choice: &str| {
        json!({
            "messages": messages, "tools": weather(), "tool_choice": choice, "seed": 3,
            "max_tokens": 200, "parallel_tool_calls": false,
        })
    };
    let first = server.post("/v1/chat/completions", &body(&messages, "required")).json();
    let usage = &first["usage"];
    let absorbed = usage["total_tokens"].as_u64().expect("a number") - 1;
    let mut message = first["choices"][0]["message"].clone();
    let call = &mut message["tool_calls"][0];
    let arguments: Value =
        serde_json::from_str(call["function"]["arguments"].as_str().expect("text")).expect("JSON");
    let (town, days) = (&arguments["town"], &arguments["days"]);
    call["function"]["arguments"] = format!("{{ \"days\" :  {days}, \"town\": {town} }}").into();
    let id = call["id"].clone();
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": id, "content": "It rains."}));
    let second = server.post("/v1/chat/completions", &body(&messages, "none")).json();
    assert!(cached(&second) >= absorbed, "{} of {absorbed}", cached(&second));
}

/// The same in Anthropic's API, whose calls are blocks.
#[test]
fn a_turn_after_a_tool_use_goes_on_from_the_state_behind_it() {
    let server = Server::start(&[]);
    let mut tool = weather()[0]["function"].clone();
    tool["input_schema"] = tool.as_object_mut().expect("an object").remove("parameters").into();
    let question = format!("How is the weather? {}", "Tell me all of it. ".repeat(30));
    let mut messages = vec![json!({"role": "user", "content": question})];
    let body = |messages: &[Value], choice: &str| {
        let choice = json!({"type": choice});
        json!({
            "model": "tiny", "messages": messages, "tools": [tool], "tool_choice": choice,
            "seed": 3, "max_tokens": 200,
        })
    };
    let mut first = body(&messages, "any");
    first["tool_choice"]["disable_parallel_tool_use"] = true.into();
    let first = server.post("/v1/messages", &first).json();
    assert_eq!(first["stop_reason"], "tool_use", "{first}");
    let usage = &first["usage"];
    let count = |name: &str| usage[name].as_u64().expect("a number");
    let absorbed = count("input_tokens") + count("output_tokens") - 1;
    let id = first["content"][0]["id"].clone();
    messages.push(json!({"role": "assistant", "content": first["content"]}));
    let result = json!({"type": "tool_result", "tool_use_id": id, "content": "It rains."});
    messages.push(json!({"role": "user", "content": [result]}));
    let second = server.post("/v1/messages", &body(&messages, "none")).json();
    let cached = second["usage"]["cache_read_input_tokens"].as_u64().expect("a number");
    assert!(cached >= absorbed, "{cached} of {absorbed}: {second}");
}

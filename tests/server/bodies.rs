//! What a client may send, well formed or not: always an answer, and never the end of the server.

use std::io::Write;

use serde_json::{Value, json};

use crate::support::{Reply, Server};

const ROUTES: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/abort_request",
];

/// The message of an error in any of the shapes.
fn message(error: &Value) -> &str {
    error["error"]["message"].as_str().unwrap_or_else(|| panic!("no message: {error}"))
}

#[test]
fn a_body_that_is_no_json_object_is_refused() {
    let server = Server::start(&[]);
    let deep = "[".repeat(100_000);
    let deep_object = format!("{}1{}", "{\"a\":".repeat(200), "}".repeat(200));
    let bodies: [&[u8]; 14] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\"text\"",
        b"1e999",
        b"{\"temperature\": NaN}",
        b"{\"temperature\": Infinity}",
        b"{\"temperature\": 1e999}",
        b"{'a': 1}",
        b"{\"prompt\": \"\xff\xfe\"}",
        b"{\"prompt\": \"\\ud800\"}",
        deep.as_bytes(),
        deep_object.as_bytes(),
    ];
    for route in ROUTES {
        for body in bodies {
            let reply = server.request("POST", route, &[], body);
            let shown = String::from_utf8_lossy(&body[..body.len().min(40)]).into_owned();
            assert_eq!(reply.status, 400, "{route}: {shown}");
            let error = reply.json();
            assert!(message(&error).len() < 300, "{route}: {shown}: {error}");
        }
    }
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn fields_of_the_wrong_type_and_numbers_out_of_range_are_refused_by_name() {
    let server = Server::start(&[]);
    let huge = json!(1e300);
    let integer: Value = serde_json::from_str("123456789012345678901234567890").expect("a number");
    let wrong = [json!("x"), json!({ "a": 1 }), json!([[]]), json!(-7), huge, integer, json!(0.5)];
    let numbers = [
        "max_tokens",
        "top_k",
        "n",
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "logit_bias",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "stream",
        "stream_options",
        "priority",
        "cache_salt",
        "timeout_s",
        "max_queue_ms",
        "model",
        "modalities",
        "metrics",
        "return_token_ids",
    ];
    // What is a value of the field all the same.
    let fits = |field: &str, value: &Value| match field {
        "temperature" | "top_p" | "min_p" | "presence_penalty" | "frequency_penalty"
        | "timeout_s" | "max_queue_ms" => *value == json!(0.5),
        "repetition_penalty" => value.as_f64().is_some_and(|x| x > 0.0 && x < 1e38),
        "seed" => *value == json!(-7),
        "stop" | "cache_salt" => *value == json!("x"),
        _ => false,
    };
    for (route, base) in [
        ("/v1/completions", json!({ "prompt": "Once", "max_tokens": 1 })),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": "Once" }], "max_tokens": 1 }),
        ),
    ] {
        for field in numbers {
            for value in wrong.iter().filter(|value| !fits(field, value)) {
                let mut body = base.clone();
                body[field] = value.clone();
                let reply = server.post(route, &body);
                let expected = if field == "model" && *value == json!("x") { 404 } else { 400 };
                assert_eq!(reply.status, expected, "{route}: {field}: {value}");
                let error = reply.json();
                let param = error["error"]["param"].as_str().unwrap_or_default();
                assert!(param.starts_with(field), "{route}: {field}: {value}: {error}");
                assert!(message(&error).len() < 300);
            }
        }
    }
    for field in ["prompt", "messages"] {
        let route = if field == "prompt" { "/v1/completions" } else { "/v1/chat/completions" };
        for value in
            [json!(1), json!({}), json!(true), json!([]), json!([{}]), json!([null]), json!([-1])]
        {
            let reply = server.post(route, &json!({ field: value, "max_tokens": 1 }));
            assert_eq!(reply.status, 400, "{field}: {value}");
            let error = reply.json();
            let param = error["error"]["param"].as_str().unwrap_or_default();
            assert!(param.starts_with(field), "{field}: {value}: {error}");
        }
    }
}

#[test]
fn bodies_come_whole_in_chunks_or_after_a_question_and_have_a_limit() {
    let server = Server::start(&[]);
    let body =
        json!({ "prompt": "Once upon a time", "max_tokens": 2, "temperature": 0 }).to_string();
    let expected = " there was";
    let head = |rest: &str| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Connection: close\r\n{rest}\r\n\r\n"
        )
    };
    let (first, second) = body.split_at(7);
    let chunked = format!(
        "{}{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        head("Transfer-Encoding: chunked"),
        first.len(),
        second.len()
    );
    let answer = server.send(chunked.as_bytes()).json();
    assert_eq!(answer["choices"][0]["text"], expected);
    // A client that asks first hears 100 before it sends anything.
    let mut stream = server.connect();
    let asks = head(&format!("Content-Length: {}\r\nExpect: 100-continue", body.len()));
    stream.write_all(asks.as_bytes()).expect("the server reads");
    let mut go_on = [0; 25];
    std::io::Read::read_exact(&mut stream, &mut go_on).expect("an answer to the question");
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).expect("the server reads");
    assert_eq!(Reply::read(stream).json()["choices"][0]["text"], expected);
    // More than the limit, announced or not.
    let long = head(&format!("Content-Length: {}", 33 << 20));
    for route in ["/v1/completions", "/v1/messages"] {
        let reply = server.send(long.replace("/v1/completions", route).as_bytes());
        assert_eq!(reply.status, 413);
        let error = reply.json();
        assert!(message(&error).contains("longer than"), "{error}");
    }
}

#[test]
fn only_json_is_taken_as_json() {
    let server = Server::start(&[]);
    let body = br#"{"prompt": "Once", "max_tokens": 1}"#;
    for (kind, status) in [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ] {
        let reply = server.request("POST", "/v1/completions", &[("Content-Type", kind)], body);
        assert_eq!(reply.status, status, "{kind}");
    }
}

#[test]
fn each_route_says_which_methods_it_has_and_get_has_a_head() {
    let server = Server::start(&[]);
    for path in ["/health", "/ready", "/live", "/ping", "/version", "/props", "/load", "/v1/models"]
    {
        let reply = server.request("HEAD", path, &[], b"");
        assert_eq!(reply.status, 200, "{path}");
        assert!(reply.header("content-length").is_some(), "{path}");
    }
    for (method, path) in
        [("GET", "/v1/completions"), ("DELETE", "/health"), ("GET", "/v1/messages")]
    {
        let reply = server.request(method, path, &[], b"");
        assert_eq!(reply.status, 405, "{method} {path}");
        assert!(reply.header("allow").is_some(), "{method} {path}");
    }
    let error = server.post("/v1/embeddings", &json!({ "input": "x" }));
    assert_eq!(error.status, 404);
    assert_eq!(error.json()["error"]["code"], "route_not_supported");
    let error = server.get("/nowhere");
    assert_eq!(error.status, 404);
    assert_eq!(error.json()["error"]["code"], "route_not_found");
}

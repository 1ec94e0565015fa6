//! Who may ask, and what is asked for in vain.

use serde_json::{Value, json};

use crate::support::{Reply, Server};

fn raw(server: &Server, head: &str) -> Reply {
    server.send(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes())
}

fn code(reply: Reply) -> Value {
    reply.json()["error"]["code"].clone()
}

/// A page elsewhere can point a name of its own at this machine, and its requests bear that name.
#[test]
fn a_server_on_loopback_answers_to_its_own_names_alone() {
    let server = Server::start(&["--allowed-host", "box.example"]);
    for (host, status) in [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("BOX.example", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ] {
        let reply = raw(&server, &format!("GET /live HTTP/1.1\r\nHost: {host}"));
        assert_eq!(reply.status, status, "{host}");
        if status == 403 {
            assert_eq!(code(reply), "host_not_allowed");
        }
    }
    // A client of old says no name, and hears the end of the connection.
    let reply = server.send(b"GET /live HTTP/1.0\r\n\r\n");
    assert_eq!(reply.status, 200);
}

#[test]
fn everything_but_probes_and_the_page_needs_a_key() {
    let server =
        Server::start(&["--api-key", "one", "--api-key", "two", "--admin-api-key", "root"]);
    for path in ["/health", "/ready", "/live", "/ping", "/"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let guarded = [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/load"),
        ("GET", "/slots"),
        ("GET", "/props"),
        ("GET", "/v1/engine/snapshot"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/tokenize"),
        ("POST", "/abort_request"),
        ("DELETE", "/v1/requests/x"),
        ("GET", "/nowhere"),
    ];
    for (method, path) in guarded {
        for headers in [&[][..], &[("Authorization", "Bearer three")], &[("x-api-key", "")]] {
            let reply = server.request(method, path, headers, b"{}");
            assert_eq!(reply.status, 401, "{method} {path}");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        }
        let error = server.request(method, path, &[], b"{}").json();
        assert_eq!(error["error"]["type"], "authentication_error", "{path}");
        for headers in [("Authorization", "Bearer two"), ("x-api-key", "one")] {
            let reply = server.request(method, path, &[headers], b"{}");
            assert_ne!(reply.status, 401, "{method} {path} {headers:?}");
        }
    }
    let reset =
        |key: &str| server.request("POST", "/reset_prefix_cache", &[("x-api-key", key)], b"");
    assert_eq!((reset("one").status, reset("root").status), (403, 200));
    assert_eq!(code(reset("two")), "admin_only");
}

/// Without a key the route is open to this machine, and so to every page that a browser on it shows.
#[test]
fn pages_of_other_sites_clear_no_prefix_cache() {
    let server = Server::start(&[]);
    let status = |headers: &[(&str, &str)]| {
        server.request("POST", "/reset_prefix_cache", headers, b"").status
    };
    assert_eq!(status(&[]), 200);
    assert_eq!(status(&[("Origin", "http://localhost")]), 200);
    assert_eq!(status(&[("Sec-Fetch-Site", "same-origin")]), 200);
    assert_eq!(status(&[("Origin", "https://other.example")]), 403);
    assert_eq!(status(&[("Origin", "null")]), 403);
    assert_eq!(status(&[("Sec-Fetch-Site", "cross-site")]), 403);
    assert_eq!(server.request("GET", "/flush_cache", &[], b"").status, 405);
}

#[test]
fn pages_of_other_sites_may_ask_only_where_their_origin_is_named() {
    let asked = |server: &Server, origin: &str| {
        let head = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost";
        let asks = "Access-Control-Request-Method: POST";
        let reply = raw(server, &format!("{head}\r\nOrigin: {origin}\r\n{asks}"));
        assert_eq!(reply.header("access-control-allow-credentials"), None);
        reply.header("access-control-allow-origin").map(str::to_owned)
    };
    let (one, other) = ("https://one.example", "https://other.example");
    let server = Server::start(&[]);
    assert_eq!(asked(&server, one), None);
    // Case is no part of an origin; browsers send it small.
    let server = Server::start(&["--cors-origin", "https://One.example"]);
    assert_eq!(asked(&server, one).as_deref(), Some(one));
    let server = Server::start(&["--cors-origin", one]);
    assert_eq!(asked(&server, one).as_deref(), Some(one));
    assert_eq!(asked(&server, other), None);
    let server = Server::start(&["--cors-origin", "*"]);
    assert_eq!(asked(&server, other).as_deref(), Some("*"));
}

/// By the Fetch standard a star does not stand for Authorization, and hides what is not named.
#[test]
fn pages_of_a_named_origin_may_send_keys_and_read_what_the_server_tells() {
    let server = Server::start(&["--cors-origin", "https://one.example"]);
    let origin = "Host: localhost\r\nOrigin: https://one.example";
    let asks = "Access-Control-Request-Method: POST\r\n\
                Access-Control-Request-Headers: authorization,content-type,x-stainless-lang";
    let head = format!("OPTIONS /v1/chat/completions HTTP/1.1\r\n{origin}\r\n{asks}");
    let allowed = raw(&server, &head);
    let allowed = allowed.header("access-control-allow-headers").expect("a list").to_owned();
    assert_eq!(allowed, "authorization,content-type,x-stainless-lang");
    let answer = raw(&server, &format!("GET /v1/models HTTP/1.1\r\n{origin}"));
    let shown = answer.header("access-control-expose-headers").expect("a list").to_owned();
    for name in ["x-request-id", "x-ignored-params", "retry-after"] {
        assert!(shown.split(',').any(|shown| shown.trim() == name), "{name} is not in {shown}");
    }
}

#[test]
fn addresses_and_headers_have_a_limit() {
    let server = Server::start(&[]);
    let long = "a".repeat(9000);
    let reply = raw(&server, &format!("GET /live?{long} HTTP/1.1\r\nHost: localhost"));
    assert_eq!(reply.status, 414);
    let many: String = (0..200).map(|i| format!("\r\nX-{i}: y")).collect();
    assert_eq!(raw(&server, &format!("GET /live HTTP/1.1\r\nHost: localhost{many}")).status, 431);
    for (bytes, status) in [(30_000, 200), (33_000, 431), (40_000, 431), (100_000, 431)] {
        let large = "a".repeat(bytes);
        let head = format!("GET /live HTTP/1.1\r\nHost: localhost\r\nX-Large: {large}");
        assert_eq!(raw(&server, &head).status, status, "{bytes}");
    }
    assert_eq!(server.get("/live").status, 200);
}

#[test]
fn an_answer_bears_the_name_that_its_client_gave() {
    let server = Server::start(&[]);
    let body = json!({ "prompt": "Once", "max_tokens": 1, "metrics": true, "request_id": "mine" });
    let text = body.to_string();
    let ask = |headers: &[(&str, &str)]| {
        let reply = server.request("POST", "/v1/completions", headers, text.as_bytes());
        let name = reply.header("x-request-id").expect("a name").to_owned();
        let answer = reply.json();
        assert_eq!(answer["metrics"]["request_id"], name.as_str());
        (name, answer["id"].as_str().expect("an id").to_owned())
    };
    assert_eq!(ask(&[]), ("mine".to_owned(), "cmpl-mine".to_owned()));
    let other = ("other".to_owned(), "cmpl-other".to_owned());
    assert_eq!(ask(&[("X-Request-Id", "other"), ("traceparent", "00-4bf9-00f0-01")]), other);
    let mut unnamed = body;
    unnamed["request_id"] = Value::Null;
    let ids: Vec<Value> =
        (0..2).map(|_| server.post("/v1/completions", &unnamed).json()["id"].clone()).collect();
    assert_ne!(ids[0], ids[1]);
    for id in [json!("two words"), json!(""), json!("x".repeat(129)), json!(3)] {
        unnamed["request_id"] = id;
        let error = server.post("/v1/completions", &unnamed).json();
        assert_eq!(error["error"]["param"], "request_id", "{error}");
    }
}

#[test]
fn a_refused_request_has_the_name_of_its_body_too() {
    let server = Server::start(&[]);
    let said = json!([{ "role": "user", "content": "Hi" }]);
    for (path, mut body) in [
        ("/v1/completions", json!({ "prompt": "Once", "temperature": 11 })),
        ("/v1/completions", json!({})),
        ("/v1/chat/completions", json!({ "messages": said, "max_tokens": 1_000_000, "n": 0 })),
        ("/v1/messages", json!({ "messages": said, "max_tokens": 0 })),
    ] {
        body["request_id"] = "mine".into();
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path}");
        assert_eq!(reply.header("x-request-id"), Some("mine"), "{path}");
        let error = reply.json();
        if path == "/v1/messages" {
            assert_eq!(error["request_id"], "mine", "{error}");
        }
    }
}

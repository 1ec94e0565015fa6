//! The description of the interface that the server gives of itself.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::Server;

/// A method in lower case, and a path.
type Operation = (String, String);

/// The operations of the router, read from its source: `.route("/path", get(...))`.
fn routes() -> BTreeSet<Operation> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/server/mod.rs");
    let source = fs::read_to_string(path).expect("the source of the router");
    let mut routes = BTreeSet::new();
    for rest in source.split(".route(").skip(1) {
        let mut quoted = rest.split('"');
        let path = quoted.nth(1).expect("a path").replace("{*", "{");
        let handlers = rest.split("\n        .").next().expect("its handlers");
        let has = |method: &&&str| handlers.contains(&format!("{method}("));
        let methods = ["get", "post", "put", "delete", "any"].iter().filter(has);
        routes.extend(methods.map(|method| (method.to_string(), path.clone())));
    }
    routes
}

fn described(document: &Value) -> BTreeSet<Operation> {
    let paths = document["paths"].as_object().expect("paths");
    let methods = paths.iter().flat_map(|(path, methods)| {
        let methods = methods.as_object().expect("methods");
        methods.keys().map(|method| (method.clone(), path.clone()))
    });
    methods.collect()
}

#[test]
fn every_route_is_described_and_every_description_is_a_route() {
    let server = Server::start(&[]);
    let document = server.get("/openapi.json").json();
    let (routes, described) = (routes(), described(&document));
    assert!(routes.len() > 15, "the routes were found: {routes:?}");
    let undescribed: Vec<_> = routes.difference(&described).collect();
    let unrouted: Vec<_> = described.difference(&routes).collect();
    assert!(undescribed.is_empty() && unrouted.is_empty(), "{undescribed:?} {unrouted:?}");
    // What the source says is what the program does.
    for (method, path) in &described {
        if method == "get" {
            assert_ne!(server.get(&path.replace("{id}", "tiny")).status, 404, "{path}");
        }
    }
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn every_reference_leads_somewhere_and_every_part_is_used() {
    let document = Server::start(&[]).get("/openapi.json").json();
    let mut used = BTreeSet::new();
    references(&document, &mut used);
    for reference in &used {
        let pointer = reference.strip_prefix('#').expect("a part of this document");
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
    for kind in ["parameters", "requestBodies", "responses", "schemas"] {
        for name in document["components"][kind].as_object().expect("parts").keys() {
            assert!(used.contains(&format!("#/components/{kind}/{name}")), "{name} is used");
        }
    }
}

fn references(value: &Value, used: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            used.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|value| references(value, used));
        }
        Value::Array(list) => list.iter().for_each(|value| references(value, used)),
        _ => {}
    }
}

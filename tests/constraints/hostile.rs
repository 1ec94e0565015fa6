//! Constraints made to cost time, memory or stack: each is refused or compiled in good time, and
//! whatever is compiled keeps its cost per token within limits.

use std::fmt::Write;
use std::time::{Duration, Instant};

use deltapool::request::{Constraint, Request};
use serde_json::{Value, json};

use super::{answers, engine, request_of};

/// Generous: the limits stop work after tenths of a second on a machine at rest.
const LIMIT: Duration = Duration::from_secs(20);

fn nested(depth: usize, wrap: impl Fn(Value) -> Value) -> Value {
    (0..depth).fold(json!({"type": "null"}), |inner, _| wrap(inner))
}

/// A schema of `count` definitions, each made of the next.
fn chain(count: usize, link: impl Fn(String) -> Value) -> Value {
    let mut defs = serde_json::Map::new();
    for i in 0..count {
        defs.insert(format!("d{i}"), link(format!("#/$defs/d{}", i + 1)));
    }
    defs.insert(format!("d{count}"), json!({"type": "null"}));
    json!({"$defs": defs, "$ref": "#/$defs/d0"})
}

fn rules(count: usize, rule: impl Fn(usize) -> String) -> Constraint {
    let mut text = String::from("start: r0\n");
    for i in 0..count {
        writeln!(text, "r{i}: {}", rule(i)).expect("a string takes all");
    }
    writeln!(text, "r{count}: \"x\"").expect("a string takes all");
    Constraint::Grammar(text)
}

fn hostile() -> Vec<(&'static str, Constraint)> {
    let schema = Constraint::JsonSchema;
    let regex = |text: &str| Constraint::Regex(text.to_owned());
    let array = |inner: Value| json!({"type": "array", "items": inner});
    let terminals = (0..8_000).fold("start: T0\n".to_owned(), |mut text, i| {
        writeln!(text, "T{i}: T{} \"a\"", i + 1).expect("a string takes all");
        text
    }) + "T8000: \"b\"\n";
    let terms: Vec<String> = (0..40).map(|i| format!("/.*a{i}.*/")).collect();
    let mut linked = chain(40, |next| json!({"$ref": next}));
    for i in 0..40 {
        linked["$defs"][format!("d{i}")]["pattern"] = format!("a{i}").into();
    }
    vec![
        ("nested arrays", schema(nested(120, array))),
        ("nested anyOf", schema(nested(120, |v| json!({"anyOf": [v, {"type": "string"}]})))),
        ("nested allOf", schema(nested(14, |v| json!({"allOf": [v.clone(), v]})))),
        ("a chain of references", schema(chain(4_000, |next| json!({"$ref": next})))),
        ("a chain of arrays", schema(chain(4_000, |next| array(json!({"$ref": next}))))),
        (
            "allOf both ways",
            schema(chain(24, |next| json!({"allOf": [{"$ref": next}, {"$ref": next}]}))),
        ),
        (
            "anyOf both ways",
            schema(chain(24, |next| json!({"anyOf": [{"$ref": next}, {"$ref": next}]}))),
        ),
        ("intersections", schema(json!({"allOf": patterns(200)}))),
        (
            "nested intersections",
            schema(patterns(60).into_iter().fold(json!({}), |inner, mut outer| {
                outer["anyOf"] = json!([inner]);
                outer
            })),
        ),
        ("linked intersections", schema(linked)),
        (
            "intersections in a grammar",
            Constraint::Grammar(format!("start: %json {}", json!({"allOf": patterns(40)}))),
        ),
        (
            "intersected terminals",
            Constraint::Grammar(format!("start: T\nT: {}\n", terms.join(" & "))),
        ),
        (
            "terminals that are not",
            Constraint::Grammar(format!("start: T\nT: {}\n", terms.join(" & ~"))),
        ),
        (
            "what no alternative matches",
            Constraint::Grammar(format!("start: T\nT: ~{}\n", terms.join("|").replace("/|/", "|"))),
        ),
        ("a reference to itself", schema(json!({"$ref": "#"}))),
        ("allOf of itself", schema(json!({"allOf": [{"$ref": "#"}, {"type": "object"}]}))),
        (
            "long strings",
            schema(json!({"type": "string", "minLength": 900_000, "maxLength": 1_000_000})),
        ),
        ("long arrays", schema(json!({"type": "array", "items": {}, "minItems": 1_000_000}))),
        ("a pattern", schema(json!({"type": "string", "pattern": "^(a|aa)+$(a{1,500}){1,500}"}))),
        ("many properties", schema(many_properties(3_000))),
        ("repeated repeats", regex("((a{1,200}){1,200}){1,200}")),
        ("far alternatives", regex("(.*a.{30})|(.*b.{30})|(.*c.{30})")),
        ("nested groups", regex(&("(".repeat(20_000) + &")".repeat(20_000)))),
        ("nested stars", regex(&("(".repeat(200) + "a" + &")*".repeat(200)))),
        ("a long literal", regex(&"ab".repeat(100_000))),
        (
            "nested brackets",
            Constraint::Grammar(format!(
                "start: {}\"a\"{}\n",
                "(".repeat(50_000),
                ")".repeat(50_000)
            )),
        ),
        ("a chain of rules", rules(8_000, |i| format!("r{} \"a\"", i + 1))),
        ("rules both ways", rules(40, |i| format!("r{0} r{0}", i + 1))),
        ("a chain of terminals", Constraint::Grammar(terminals)),
        ("ambiguity", Constraint::Grammar("start: a\na: a a | \"x\" | \"\"\n".to_owned())),
        (
            "left recursion",
            Constraint::Grammar("start: start start start | \"\" | /[a-z ]/\n".to_owned()),
        ),
        ("a terminal of itself", Constraint::Grammar("start: T\nT: T \"a\" | \"b\"\n".to_owned())),
        (
            "texts",
            Constraint::Choice((0..1_024).map(|i| format!("{i}{}", "x".repeat(200))).collect()),
        ),
    ]
}

/// Schemas of texts that contain something each.
fn patterns(count: usize) -> Vec<Value> {
    (0..count).map(|i| json!({"type": "string", "pattern": format!("a{i}")})).collect()
}

fn many_properties(count: usize) -> Value {
    let properties: serde_json::Map<String, Value> =
        (0..count).map(|i| (format!("property_{i}"), json!({"type": "string"}))).collect();
    json!({"type": "object", "properties": properties})
}

#[test]
fn hostile_constraints_are_refused_or_kept_within_limits() {
    let engine = engine();
    for (what, constraint) in hostile() {
        let start = Instant::now();
        let request = Request { constraint: Some(constraint), ..request_of(8) };
        let told = match engine.submit(request) {
            Ok(handle) => {
                let last = handle.into_iter().last().and_then(|event| event.finish);
                format!("{:?}", last.expect("it ends").reason)
            }
            Err(error) => error.to_string(),
        };
        let taken = start.elapsed();
        println!("{what}: {taken:?}: {told:.200}");
        assert!(taken < LIMIT, "{what} took {taken:?}: {told}");
    }
    assert_eq!(answers(&engine, request_of(3))[0].1, 3, "the engine goes on");
}

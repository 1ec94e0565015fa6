//! Constrained answers: what comes out is what was asked for, whatever the seed and whatever runs
//! beside it; and what cannot be asked for is refused before it is queued.
#![cfg(feature = "embedded-model")]

#[path = "constraints/hostile.rs"]
mod hostile;

use std::collections::BTreeSet;
use std::sync::Arc;

use deltapool::config::EngineConfig;
use deltapool::engine::{Engine, SubmitError};
use deltapool::models::ModelFiles;
use deltapool::request::{Constraint, FinishReason, Request, SamplingParams, StopCause};
use deltapool::text::{AnswerFormat, AnswerParser, Piece, Specials, TextFiles, Tokenizer, Tool};
use serde_json::{Value, json};

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_files(&TextFiles::embedded()).expect("the tokenizer is sound"))
}

fn engine_with(config: EngineConfig) -> Engine {
    let files = ModelFiles::embedded().expect("the model is sound");
    let config = EngineConfig { threads: 1, ..config };
    Engine::builder(files).tokenizer(Some(tokenizer())).config(config).build().expect("an engine")
}

fn engine() -> Engine {
    engine_with(EngineConfig::one_sequence(1_000))
}

fn request(text: &str, seed: u64, max_tokens: usize) -> Request {
    let prompt = tokenizer().encode_prompt(text, Specials::Plain).expect("it encodes");
    let sampling = SamplingParams { seed: Some(seed), ..SamplingParams::default() };
    Request { sampling, ..Request::new(prompt, max_tokens) }
}

fn constrained(constraint: &Constraint, seed: u64) -> Request {
    Request { constraint: Some(constraint.clone()), ..request("Once upon a time", seed, 300) }
}

/// Text, tokens and end of each answer.
fn answers(engine: &Engine, request: Request) -> Vec<(String, usize, FinishReason)> {
    let mut answers = vec![(String::new(), 0, FinishReason::Length); request.n];
    for event in engine.submit(request).expect("it is taken") {
        let answer = &mut answers[event.choice];
        answer.0.push_str(&event.text);
        answer.1 += usize::from(event.token.is_some());
        if let Some(finish) = event.finish {
            answer.2 = finish.reason;
        }
    }
    answers
}

fn answer(engine: &Engine, request: Request) -> (String, FinishReason) {
    let (text, _, reason) = answers(engine, request).remove(0);
    (text, reason)
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "likes": {"type": "array", "items": {"enum": ["tea", "soup"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

#[test]
fn a_schema_is_kept_whatever_the_seed() {
    let engine = engine();
    for seed in 0..12 {
        let constraint = Constraint::JsonSchema(person());
        let (text, reason) = answer(&engine, constrained(&constraint, seed));
        assert!(matches!(reason, FinishReason::Stop(_)), "{reason:?}: {text}");
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(value["name"].as_str().is_some_and(|name| name.chars().count() <= 12), "{text}");
        assert!(value["age"].as_u64().is_some_and(|age| age <= 120), "{text}");
        let likes = value["likes"].as_array();
        assert!(likes.is_none_or(|likes| likes.len() <= 3), "{text}");
        let keys: BTreeSet<&String> = value.as_object().expect("an object").keys().collect();
        assert!(keys.iter().all(|key| ["name", "age", "likes"].contains(&key.as_str())), "{text}");
    }
}

#[test]
fn any_json_object_is_an_object_of_valid_json() {
    let engine = engine();
    let closing = tokenizer().encode("}\"", Specials::Plain).expect("it encodes");
    let mut ended = 0;
    for seed in 0..12 {
        let mut request = constrained(&Constraint::JsonObject, seed);
        // Else the model tells a story in it.
        request.sampling.logit_bias = closing.iter().map(|id| (*id, 6.0)).collect();
        let (text, reason) = answer(&engine, request);
        match reason {
            FinishReason::Stop(_) => {
                ended += 1;
                let value: Value =
                    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
                assert!(value.is_object(), "{text}");
            }
            FinishReason::Length => assert!(text.starts_with('{'), "{text}"),
            other => panic!("{other:?}: {text}"),
        }
    }
    assert!(ended > 0, "all objects are endless");
}

#[test]
fn a_regex_a_choice_and_a_grammar_are_kept() {
    let engine = engine();
    let regex = Constraint::Regex(r"[A-Z][a-z]{2,5} [0-9]{3}/[^\s]é".to_owned());
    let texts = ["yes", "yes, indeed", "no\n\"'\\", "\u{7f}é🙂"].map(str::to_owned);
    let choice = Constraint::Choice(texts.to_vec());
    let lark = "start: item (\", \" item){1,3}\nitem: \"<\" /[a-f]{2}/ \">\"\n";
    let grammar = Constraint::Grammar(lark.to_owned());
    let mut chosen = BTreeSet::new();
    for seed in 0..20 {
        let (text, reason) = answer(&engine, constrained(&regex, seed));
        assert_eq!(reason, FinishReason::Stop(StopCause::Constraint), "{text}");
        let (word, rest) = text.split_once(' ').expect("a space");
        assert!(word.starts_with(|c: char| c.is_ascii_uppercase()), "{text}");
        assert!((3..=6).contains(&word.len()), "{text}");
        assert!(rest.as_bytes()[3] == b'/' && rest.ends_with('é'), "{text}");
        let (text, reason) = answer(&engine, constrained(&choice, seed));
        assert!(matches!(reason, FinishReason::Stop(_)), "{reason:?}");
        assert!(texts.contains(&text), "{text}");
        chosen.insert(text);
        let (text, reason) = answer(&engine, constrained(&grammar, seed));
        assert!(matches!(reason, FinishReason::Stop(_)), "{reason:?}");
        let items: Vec<&str> = text.split(", ").collect();
        assert!((2..=4).contains(&items.len()), "{text}");
        assert!(items.iter().all(|item| item.len() == 4 && item.starts_with('<')), "{text}");
    }
    assert!(chosen.len() > 1, "the seed makes no difference: {chosen:?}");
}

/// "yes" is complete and may go on: whoever stops there says so with the end of sequence, and
/// whoever has said all ends without one.
#[test]
fn the_end_of_sequence_is_allowed_exactly_where_the_answer_is_complete() {
    let engine = engine();
    let eos = tokenizer().eos().expect("it has one").id;
    let texts = ["yes".to_owned(), "yes and no".to_owned()];
    let constraint = Constraint::Choice(texts.to_vec());
    let mut seen = BTreeSet::new();
    for (bias, seed) in [(100.0, 0), (-100.0, 1), (100.0, 2), (-100.0, 3)] {
        let mut request = constrained(&constraint, seed);
        request.sampling.logit_bias = [(eos, bias)].into();
        let (text, reason) = answer(&engine, request);
        let cause = if bias > 0.0 { StopCause::Eos } else { StopCause::Constraint };
        assert_eq!(reason, FinishReason::Stop(cause), "{text}");
        assert_eq!(text, texts[usize::from(bias < 0.0)]);
        seen.insert(text);
    }
    assert_eq!(seen.len(), 2);
    // To ignore the end of sequence is to go on where one may.
    let mut request = Request { ignore_eos: true, ..constrained(&constraint, 1) };
    request.sampling.logit_bias = [(eos, 100.0)].into();
    let all = (texts[1].clone(), FinishReason::Stop(StopCause::Constraint));
    assert_eq!(answer(&engine, request), all);
    // So it is within `min_tokens`.
    let mut request = Request { min_tokens: 4, ..constrained(&constraint, 1) };
    request.sampling.logit_bias = [(eos, 100.0)].into();
    assert_eq!(answer(&engine, request).0, texts[1]);
}

#[test]
fn a_constrained_answer_is_the_same_whatever_runs_beside_it() {
    let kinds = [
        Constraint::JsonSchema(person()),
        Constraint::Regex("([a-z]{1,8} ){20}[.]".to_owned()),
        Constraint::JsonObject,
    ];
    let requests: Vec<Request> = (0..12)
        .map(|i| {
            let constraint = kinds.get(i % 4).cloned();
            let n = 1 + i % 3;
            let prompt = "There was a small house. ".repeat(1 + i * 3);
            Request { constraint, n, ..request(&prompt, i as u64, 60 + i * 5) }
        })
        .collect();
    let alone: Vec<_> = {
        let engine = engine_with(EngineConfig {
            prefix_cache: false,
            max_num_seqs: Some(8),
            ..EngineConfig::default()
        });
        requests.iter().map(|request| answers(&engine, request.clone())).collect()
    };
    for park_every in [None, Some(3)] {
        let engine = engine_with(EngineConfig { park_every, ..EngineConfig::default() });
        let handles: Vec<_> = requests
            .iter()
            .map(|request| engine.submit(request.clone()).expect("it is taken"))
            .collect();
        for (i, (handle, alone)) in handles.into_iter().zip(&alone).enumerate() {
            let mut together = vec![String::new(); alone.len()];
            for event in handle {
                together[event.choice].push_str(&event.text);
            }
            let alone: Vec<&String> = alone.iter().map(|(text, ..)| text).collect();
            assert_eq!(together.iter().collect::<Vec<_>>(), alone, "request {i}");
        }
        let stats = engine.stats().scheduler;
        assert!(park_every.is_none() || stats.parked > 0, "nothing was parked");
    }
}

#[test]
fn what_leaves_no_token_fails_with_a_reason() {
    let engine = engine();
    let constraint = Constraint::Grammar("start: \"\"\n".to_owned());
    let request = Request { ignore_eos: true, ..constrained(&constraint, 0) };
    let (text, reason) = answer(&engine, request);
    let FinishReason::Failed(told) = reason else { panic!("{reason:?}: {text}") };
    assert!(
        told.starts_with("token 5: the constraint and the ends ruled out leave none"),
        "{told}"
    );
    // The engine goes on.
    assert_eq!(answers(&engine, request_of(3))[0].1, 3);
}

fn request_of(max_tokens: usize) -> Request {
    Request { ignore_eos: true, ..request("Once", 1, max_tokens) }
}

#[test]
fn a_constraint_that_makes_no_sense_is_refused_by_its_field() {
    let engine = engine();
    for (constraint, field, word) in [
        (Constraint::JsonSchema(json!(3)), "json_schema", "neither an object"),
        (Constraint::JsonSchema(json!({"type": "strnig"})), "json_schema", "strnig"),
        (Constraint::JsonSchema(json!({"$ref": "#/no/where"})), "json_schema", "no/where"),
        (Constraint::JsonSchema(json!({"$ref": "http://a.b/c"})), "json_schema", "http://a.b/c"),
        (
            Constraint::JsonSchema(json!({"type": "array", "uniqueItems": true})),
            "json_schema",
            "uniqueItems",
        ),
        (Constraint::Regex("a(b".to_owned()), "regex", "unclosed"),
        (Constraint::Regex(r"(a)\1".to_owned()), "regex", "backreference"),
        (Constraint::Grammar("start: other\n".to_owned()), "grammar", "other"),
        (Constraint::Grammar("start: \"a\n".to_owned()), "grammar", "lexer error"),
        (Constraint::Grammar("start: <|no_such|>\n".to_owned()), "grammar", "no_such"),
    ] {
        let request = Request { constraint: Some(constraint.clone()), ..request_of(3) };
        let Err(error) = engine.submit(request) else { panic!("{constraint:?} was taken") };
        assert!(matches!(error, SubmitError::Constraint(_)), "{error:?}");
        let told = error.to_string();
        assert!(told.starts_with(&format!("{field}: ")) && told.contains(word), "{told}");
        assert!(told.len() < 600 && !told.contains("src/"), "{told}");
    }
    let files = ModelFiles::embedded().expect("the model is sound");
    let config = EngineConfig { threads: 1, ..EngineConfig::one_sequence(100) };
    let bare = Engine::builder(files).config(config).build().expect("an engine");
    let request = Request { constraint: Some(Constraint::JsonObject), ..request_of(3) };
    let error = bare.submit(request).expect_err("there is no tokenizer").to_string();
    assert_eq!(error, "json_object: needs a tokenizer, and the model has none");
}

#[test]
fn nothing_ends_an_answer_before_min_tokens() {
    let engine = engine();
    let tokenizer = tokenizer();
    let eos = tokenizer.eos().expect("it has one").id;
    let named = tokenizer.encode(" named", Specials::Plain).expect("it encodes");
    let mut wants_to_end = Request { stop_token_ids: named.clone(), ..request("Once", 7, 60) };
    wants_to_end.sampling.logit_bias = [(eos, 50.0), (named[0], 50.0)].into();
    for min_tokens in [0, 1, 20, 60] {
        let request = Request { min_tokens, ..wants_to_end.clone() };
        let (_, tokens, reason) = answers(&engine, request).remove(0);
        assert_eq!(tokens, (min_tokens + 1).min(60));
        assert_eq!(reason.as_str(), if min_tokens < 60 { "stop" } else { "length" });
    }
    // A stop string in the first tokens does not count, the next one does.
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let tale = Request { sampling: greedy, ..request("Once upon a time", 0, 60) };
    let (free, _) = answer(&engine, tale.clone());
    let stop = vec!["a".to_owned()];
    let (text, reason) =
        answer(&engine, Request { stop: stop.clone(), min_tokens: 10, ..tale.clone() });
    assert_eq!(reason, FinishReason::Stop(StopCause::Text("a".to_owned())));
    let (early, _) = answer(&engine, Request { max_tokens: 10, ..tale });
    let next = early.len() + free[early.len()..].find('a').expect("there are many");
    assert_eq!(text, free[..next]);
}

#[test]
fn the_stop_text_is_left_in_where_asked() {
    let engine = engine();
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let tale = Request { sampling: greedy, ..request("Once upon a time", 0, 50) };
    for (stop, expected) in [
        ("named Cl", " there was a young girl named Cl"),
        (" girl", " there was a young girl"),
        ("you", " there was a you"),
    ] {
        let request =
            Request { stop: vec![stop.to_owned()], include_stop_text: true, ..tale.clone() };
        let (text, reason) = answer(&engine, request);
        assert_eq!((text.as_str(), reason.as_str()), (expected, "stop"));
    }
}

#[test]
fn special_tokens_are_written_out_where_asked() {
    let engine = engine();
    let (bos, eos) = (0, tokenizer().eos().expect("it has one").id);
    for (skip_special_tokens, expected) in [(true, ""), (false, "<|bos|><|bos|><|bos|>")] {
        let mut request = Request { skip_special_tokens, ..request("Once", 1, 3) };
        request.sampling.logit_bias = [(bos, 100.0)].into();
        assert_eq!(answer(&engine, request).0, expected);
        // The one that ends the answer is no part of it.
        let mut request = Request { skip_special_tokens, ..request_of(3) };
        request.ignore_eos = false;
        request.sampling.logit_bias = [(eos, 100.0)].into();
        assert_eq!(answer(&engine, request).0, "");
    }
}

/// A model that knows of no tools calls one all the same, with arguments of its schema.
#[test]
fn forced_calls_have_valid_arguments_whatever_the_seed() {
    let engine = engine();
    let format = AnswerFormat::detect(None, Some(&tokenizer()));
    let tool = |name: &str, parameters| Tool {
        name: name.to_owned(),
        description: None,
        parameters: Some(parameters),
    };
    let tools =
        [tool("greet", person()), tool("wait", json!({"type": "object", "maxProperties": 0}))];
    let mut called = BTreeSet::new();
    for seed in 0..16 {
        let several = seed % 2 == 1;
        let grammar = format.force(&tools, several, "").expect("there are tools");
        let mut request = constrained(&Constraint::Grammar(grammar), seed);
        request.max_tokens = 900;
        let mut parser = AnswerParser::new(&format, &tools, "", true);
        let mut pieces = Vec::new();
        for event in engine.submit(request).expect("it is taken") {
            pieces.extend(parser.push(&event.text));
            let reason = event.finish.map(|finish| finish.reason);
            assert!(matches!(reason, None | Some(FinishReason::Stop(_))), "{reason:?}: {pieces:?}");
        }
        pieces.extend(parser.finish());
        let mut calls: Vec<(String, String)> = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Call { name, .. } => calls.push((name, String::new())),
                Piece::Arguments { index, text } => calls[index].1.push_str(&text),
                other => panic!("{other:?}"),
            }
        }
        assert!(!calls.is_empty() && (several || calls.len() == 1), "{calls:?}");
        for (name, arguments) in calls {
            let value: Value = serde_json::from_str(&arguments).expect("JSON");
            match name.as_str() {
                "greet" => assert!(value["age"].is_u64() && value["name"].is_string(), "{value}"),
                "wait" => assert_eq!(value, json!({})),
                other => panic!("{other}"),
            }
            called.insert(name);
        }
    }
    assert_eq!(called.len(), 2, "one tool is never called");
}

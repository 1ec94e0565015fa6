//! What a caller may ask for: every range, and the exact words of each refusal.

use deltapool::request::{Constraint, InvalidParam, Request, SamplingParams};

#[test]
fn invalid_parameters_are_told_by_field_value_and_range() {
    type Change = fn(&mut SamplingParams);
    let table: &[(Change, &str)] = &[
        (|p| p.temperature = -0.5, "temperature is -0.5, allowed: 0 or more, finite"),
        (|p| p.temperature = f32::NAN, "temperature is NaN, allowed: 0 or more, finite"),
        (|p| p.temperature = f32::INFINITY, "temperature is inf, allowed: 0 or more, finite"),
        (|p| p.top_p = 0.0, "top_p is 0, allowed: above 0, at most 1"),
        (|p| p.top_p = 1.5, "top_p is 1.5, allowed: above 0, at most 1"),
        (|p| p.top_p = f32::NAN, "top_p is NaN, allowed: above 0, at most 1"),
        (|p| p.min_p = -0.1, "min_p is -0.1, allowed: 0 to 1"),
        (|p| p.min_p = 1.1, "min_p is 1.1, allowed: 0 to 1"),
        (|p| p.min_p = f32::NAN, "min_p is NaN, allowed: 0 to 1"),
        (|p| p.repetition_penalty = 0.0, "repetition_penalty is 0, allowed: above 0, finite"),
        (
            |p| p.repetition_penalty = f32::NAN,
            "repetition_penalty is NaN, allowed: above 0, finite",
        ),
        (|p| p.presence_penalty = 2.5, "presence_penalty is 2.5, allowed: -2 to 2"),
        (|p| p.presence_penalty = f32::NAN, "presence_penalty is NaN, allowed: -2 to 2"),
        (|p| p.frequency_penalty = -3.0, "frequency_penalty is -3, allowed: -2 to 2"),
        (|p| p.frequency_penalty = f32::NAN, "frequency_penalty is NaN, allowed: -2 to 2"),
        (|p| set_bias(p, 5, 101.0), "logit_bias is 101 for token 5, allowed: -100 to 100"),
        (|p| set_bias(p, 5, f32::NAN), "logit_bias is NaN for token 5, allowed: -100 to 100"),
        (|p| set_bias(p, 100, 1.0), "logit_bias is token 100, allowed: tokens 0 to 99"),
        (|p| p.logprobs = Some(21), "logprobs is 21, allowed: 0 to 20"),
    ];
    for (change, text) in table {
        let mut params = SamplingParams::default();
        assert_eq!(params.check(100), Ok(()));
        change(&mut params);
        assert_eq!(params.check(100).map_err(|e: InvalidParam| e.to_string()), Err((*text).into()));
    }
    let edges = SamplingParams {
        temperature: 0.0,
        top_p: 1.0,
        min_p: 1.0,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: [(0, -100.0), (99, 100.0)].into(),
        logprobs: Some(20),
        ..SamplingParams::default()
    };
    assert_eq!(edges.check(100), Ok(()));
    let many = SamplingParams {
        logit_bias: (0..1025).map(|id| (id, 0.0)).collect(),
        ..SamplingParams::default()
    };
    let told = many.check(2000).expect_err("too many").to_string();
    assert_eq!(told, "logit_bias is 1025, allowed: 1024 entries at most");
}

fn set_bias(params: &mut SamplingParams, id: u32, bias: f32) {
    params.logit_bias = [(id, bias)].into();
}

#[test]
fn invalid_requests_are_told_by_field_value_and_range() {
    type Change = fn(&mut Request);
    let table: &[(Change, &str)] = &[
        (|r| r.prompt.clear(), "prompt is empty, allowed: at least one token"),
        (|r| r.prompt.push(100), "prompt is token 100, allowed: tokens 0 to 99"),
        (|r| r.max_tokens = 0, "max_tokens is 0, allowed: 1 or more"),
        (|r| r.n = 0, "n is 0, allowed: 1 to 128"),
        (|r| r.n = 129, "n is 129, allowed: 1 to 128"),
        (|r| r.stop = vec!["x".into(); 17], "stop is 17, allowed: 16 strings at most"),
        (
            |r| r.stop = vec![String::new()],
            "stop is a string of 0 bytes, allowed: strings of 1 to 256 bytes",
        ),
        (
            |r| r.stop = vec!["x".repeat(257)],
            "stop is a string of 257 bytes, allowed: strings of 1 to 256 bytes",
        ),
        (
            |r| r.stop_token_ids = vec![3, 400],
            "stop_token_ids is token 400, allowed: tokens 0 to 99",
        ),
        (|r| r.sampling.top_p = 7.0, "top_p is 7, allowed: above 0, at most 1"),
        (|r| r.min_tokens = 2, "min_tokens is 2, allowed: 0 to 1, the most tokens to generate"),
        (|r| r.prompt_logprobs = Some(21), "prompt_logprobs is 21, allowed: 0 to 20"),
        (
            |r| (r.prompt, r.prompt_logprobs) = (vec![1; 8193], Some(0)),
            "prompt_logprobs is for a prompt of 8193 tokens, allowed: prompts of 8192 tokens at most",
        ),
        (
            |r| constrain(r, Constraint::Regex(String::new())),
            "regex is 0 bytes, allowed: 1 to 262144 bytes",
        ),
        (
            |r| constrain(r, Constraint::Grammar(" ".repeat(262_145))),
            "grammar is 262145 bytes, allowed: 1 to 262144 bytes",
        ),
        (
            |r| constrain(r, Constraint::Choice(vec![])),
            "choice is 0 texts, allowed: 1 to 1024 texts",
        ),
        (
            |r| constrain(r, Constraint::Choice(vec!["a".into(), String::new()])),
            "choice is an empty text, allowed: texts of 1 byte or more",
        ),
    ];
    let sound = Request {
        stop: vec!["\n\n".into()],
        stop_token_ids: vec![0],
        ..Request::new(vec![1, 2, 99], 1)
    };
    assert_eq!(sound.check(100), Ok(()));
    let scored = Request { max_tokens: 0, prompt_logprobs: Some(0), ..sound.clone() };
    assert_eq!(scored.check(100), Ok(()), "a prompt can be asked about without an answer");
    for (change, text) in table {
        let mut request = sound.clone();
        change(&mut request);
        assert_eq!(request.check(100).map_err(|e| e.to_string()), Err((*text).into()));
    }
}

fn constrain(request: &mut Request, constraint: Constraint) {
    request.constraint = Some(constraint);
}

#[test]
fn parameters_read_as_json_refuse_unknown_names() {
    let text = r#"{"temperature": 0.5, "top_k": 40, "logit_bias": {"12": -3.5}, "seed": 9}"#;
    let params: SamplingParams = serde_json::from_str(text).expect("the names are known");
    let expected = SamplingParams {
        temperature: 0.5,
        top_k: 40,
        logit_bias: [(12, -3.5)].into(),
        seed: Some(9),
        ..SamplingParams::default()
    };
    assert_eq!(params, expected);
    let error = serde_json::from_str::<SamplingParams>(r#"{"temprature": 1}"#).expect_err("a typo");
    assert!(error.to_string().starts_with("unknown field `temprature`"), "{error}");
}

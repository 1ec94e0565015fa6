//! The fields that all generating routes have in common.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};
use serde_json::Value;

use super::answers::Patience;
use super::app::App;
use super::error::ApiError;
use super::fields::{Fields, FromJson};
use crate::request::{Request, SamplingParams};

/// Most choices of a request.
const MAX_CHOICES: usize = 16;

/// Longest time a request may ask to wait or to run for: a day.
const MAX_PATIENCE_S: f64 = 86_400.0;

const PRIORITY_HEADER: HeaderName = HeaderName::from_static("x-vllm-priority");

/// Fields that are known and change no answer.
const IGNORED: [&str; 10] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prediction",
    "verbosity",
    "prompt_cache_key",
    "session_id",
    "spaces_between_special_tokens",
];

/// Fields that would change the answer, and what to use instead where there is something.
const REFUSED: [(&str, &str); 28] = [
    ("use_beam_search", ""),
    ("audio", ""),
    ("functions", "; use tools"),
    ("function_call", "; use tool_choice"),
    ("guided_json", STRUCTURE),
    ("guided_regex", STRUCTURE),
    ("guided_choice", STRUCTURE),
    ("guided_grammar", STRUCTURE),
    ("regex", STRUCTURE),
    ("ebnf", STRUCTURE),
    ("grammar", STRUCTURE),
    ("json_schema", STRUCTURE),
    ("structural_tag", STRUCTURE),
    ("bad_words", "; use logit_bias"),
    ("allowed_token_ids", "; use logit_bias or structured_outputs"),
    ("logits_processors", ""),
    ("custom_logit_processor", ""),
    ("prompt_embeds", ""),
    ("documents", "; write them into a message"),
    ("mm_processor_kwargs", ""),
    ("lora_path", ""),
    ("stop_regex", "; use stop"),
    ("n_predict", "; use max_tokens"),
    ("prompt_logprobs", " here; /v1/completions has it"),
    ("add_special_tokens", " here; /v1/completions has it"),
    ("session", ""),
    ("on_disconnect", ""),
    ("thinking_token_budget", ""),
];

const STRUCTURE: &str = "; use response_format or structured_outputs";

/// Samplers of llama.cpp that are not served, and the value with which each is off: its front ends
/// send all of them.
const SAMPLERS: [(&str, f64); 7] = [
    ("typical_p", 1.0),
    ("tfs_z", 1.0),
    ("mirostat", 0.0),
    ("dry_multiplier", 0.0),
    ("xtc_probability", 0.0),
    ("dynatemp_range", 0.0),
    ("top_n_sigma", -1.0),
];

/// What a request of any generating route says beside its prompt.
#[derive(Debug)]
pub struct Common {
    /// The request, its prompt and its length still open.
    pub request: Request,
    /// Most tokens to generate, if it says.
    pub max_tokens: Option<usize>,
    /// Tokens of a prompt that are kept, its last, if not all are.
    pub kept_tokens: Option<usize>,
    /// How the answer is sent.
    pub delivery: Delivery,
    /// How long it may take.
    pub patience: Patience,
}

/// How an answer is sent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Delivery {
    /// As a stream of events.
    pub stream: bool,
    /// With the usage in the last event.
    pub include_usage: bool,
    /// With the usage so far in every event.
    pub continuous_usage: bool,
    /// With token ids beside the text.
    pub token_ids: bool,
    /// With tokens of logprobs written as `token_id:17`.
    pub tokens_as_ids: bool,
    /// With figures of what it cost.
    pub metrics: bool,
}

impl Delivery {
    /// The usage of a chunk: that so far, or the null that stands for it until the last.
    pub fn chunk_usage(self, usage: impl FnOnce() -> Value) -> Option<Value> {
        if self.continuous_usage {
            Some(usage())
        } else {
            self.include_usage.then_some(Value::Null)
        }
    }
}

/// Takes the common fields.
///
/// # Errors
/// The first field that is wrong or not served.
pub fn take(app: &App, fields: &mut Fields, headers: &HeaderMap) -> Result<Common, ApiError> {
    fields.refuse(&REFUSED)?;
    fields.refuse_unless(&SAMPLERS)?;
    fields.ignore(&IGNORED);
    refuse_modalities(fields)?;
    let newer = fields.take("max_completion_tokens")?;
    let older = fields.take("max_tokens")?;
    let n: usize = fields.or("n", 1)?;
    if !(1..=MAX_CHOICES).contains(&n) {
        return Err(ApiError::value("n", format!("n is {n}, allowed: 1 to {MAX_CHOICES}")));
    }
    let best_of: usize = fields.or("best_of", n)?;
    if best_of != n {
        let message = "best_of other than n is not supported";
        return Err(ApiError::unsupported("best_of", message));
    }
    let request = Request {
        sampling: sampling(&app.model.sampling, fields)?,
        stop: stop(fields)?,
        stop_token_ids: fields.or("stop_token_ids", Vec::new())?,
        ignore_eos: fields.or("ignore_eos", false)?,
        min_tokens: fields.or("min_tokens", 0)?,
        include_stop_text: fields.or("include_stop_str_in_output", false)?,
        skip_special_tokens: fields.or("skip_special_tokens", true)?,
        n,
        priority: priority(fields, headers)?,
        program_id: fields.take("program_id")?,
        cache_salt: fields.take("cache_salt")?,
        tells_start: true,
        ..Request::new(Vec::new(), 1)
    };
    let max_tokens = newer.or(older);
    Ok(Common {
        request,
        max_tokens,
        kept_tokens: kept_tokens(app, fields, max_tokens)?,
        delivery: delivery(app, fields)?,
        patience: patience(fields)?,
    })
}

/// A prompt is cut to so many of its last tokens; to those that fit beside the answer with -1.
fn kept_tokens(
    app: &App,
    fields: &mut Fields,
    max_tokens: Option<usize>,
) -> Result<Option<usize>, ApiError> {
    const FIELD: &str = "truncate_prompt_tokens";
    let Some(asked) = fields.take::<i64>(FIELD)? else { return Ok(None) };
    let most = app.engine.limits().max_model_len;
    let kept = match asked {
        -1 => Some(most.saturating_sub(max_tokens.unwrap_or(1)).max(1)),
        asked => usize::try_from(asked).ok().filter(|kept| (1..=most).contains(kept)),
    };
    let allowed = || format!("{FIELD} is {asked}, allowed: -1, or 1 to {most}");
    kept.map(Some).ok_or_else(|| ApiError::value(FIELD, allowed()))
}

/// Only text goes in and out.
fn refuse_modalities(fields: &mut Fields) -> Result<(), ApiError> {
    let kinds: Vec<String> = fields.or("modalities", vec!["text".to_owned()])?;
    if kinds == ["text"] {
        return Ok(());
    }
    Err(ApiError::unsupported("modalities", "modalities other than text are not supported"))
}

fn sampling(default: &SamplingParams, fields: &mut Fields) -> Result<SamplingParams, ApiError> {
    let temperature: Option<f32> = fields.take("temperature")?;
    if let Some(temperature) = temperature.filter(|t| !(0.0..=10.0).contains(t)) {
        let message = format!("temperature is {temperature}, allowed: 0 to 10");
        return Err(ApiError::value("temperature", message));
    }
    let temperature = temperature.unwrap_or(default.temperature);
    let repeat = fields.take("repeat_penalty")?;
    let repetition = fields.take("repetition_penalty")?.or(repeat);
    let top_k: Option<i64> = fields.take("top_k")?;
    if let Some(top_k) = top_k.filter(|top_k| *top_k < -1) {
        let message = format!("top_k is {top_k}, allowed: -1 and 0, which keep all, or more");
        return Err(ApiError::value("top_k", message));
    }
    Ok(SamplingParams {
        // Below this the likeliest token is all that is left.
        temperature: if temperature < 1e-5 { 0.0 } else { temperature },
        top_k: top_k.map_or(default.top_k, |top_k| usize::try_from(top_k).unwrap_or(0)),
        top_p: fields.or("top_p", default.top_p)?,
        min_p: fields.or("min_p", default.min_p)?,
        repetition_penalty: repetition.unwrap_or(default.repetition_penalty),
        presence_penalty: fields.or("presence_penalty", default.presence_penalty)?,
        frequency_penalty: fields.or("frequency_penalty", default.frequency_penalty)?,
        logit_bias: logit_bias(fields)?,
        seed: fields.take::<i64>("seed")?.map(i64::cast_unsigned),
        logprobs: None,
    })
}

/// Token ids are the keys of an object, and so strings.
fn logit_bias(fields: &mut Fields) -> Result<BTreeMap<u32, f32>, ApiError> {
    let Some(object) = fields.object("logit_bias")? else { return Ok(BTreeMap::new()) };
    let mut biases = BTreeMap::new();
    for (id, bias) in object.rest() {
        let path = format!("logit_bias.{}", id.chars().take(20).collect::<String>());
        let Ok(token) = id.parse() else {
            return Err(ApiError::value(path.clone(), format!("{path} is no token id")));
        };
        let value = f32::from_json(&bias)
            .ok_or_else(|| ApiError::wrong_type(path, f32::EXPECTED, &bias))?;
        biases.insert(token, value);
    }
    Ok(biases)
}

/// One stop string, or a list of them.
fn stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    match fields.raw("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text]),
        Some(list) => Vec::from_json(&list)
            .ok_or_else(|| ApiError::wrong_type("stop", "a string or an array of strings", &list)),
    }
}

/// From the body, or else from a header.
fn priority(fields: &mut Fields, headers: &HeaderMap) -> Result<Option<i32>, ApiError> {
    let body = fields.take("priority")?;
    let Some(header) = headers.get(PRIORITY_HEADER) else { return Ok(body) };
    let number = header.to_str().ok().and_then(|text| text.trim().parse().ok());
    let number = number.ok_or_else(|| {
        ApiError::value("X-Vllm-Priority", "X-Vllm-Priority: expected an integer of 32 bits")
    })?;
    Ok(body.or(Some(number)))
}

fn delivery(app: &App, fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.or("stream", false)?;
    let mut delivery = Delivery {
        stream,
        token_ids: fields.or("return_token_ids", false)?,
        tokens_as_ids: fields.or("return_tokens_as_token_ids", false)?,
        metrics: fields.or("metrics", false)? || app.config.per_request_metrics,
        ..Delivery::default()
    };
    if let Some(mut options) = fields.object("stream_options")? {
        if !stream {
            let message = "stream_options is allowed only with stream";
            return Err(ApiError::value("stream_options", message));
        }
        delivery.include_usage = options.or("include_usage", false)?;
        delivery.continuous_usage = options.or("continuous_usage_stats", false)?;
    }
    Ok(delivery)
}

fn patience(fields: &mut Fields) -> Result<Patience, ApiError> {
    let mut seconds = |name: &str, per_second: f64| -> Result<Option<Duration>, ApiError> {
        let Some(value) = fields.take::<f64>(name)? else { return Ok(None) };
        let seconds = value / per_second;
        if seconds > 0.0 && seconds <= MAX_PATIENCE_S {
            return Ok(Some(Duration::from_secs_f64(seconds)));
        }
        let most = MAX_PATIENCE_S * per_second;
        // As the client wrote it: some numbers have hundreds of digits.
        let value = Value::from(value);
        let message = format!("{name} is {value}, allowed: above 0, at most {most}");
        Err(ApiError::value(name, message))
    };
    Ok(Patience { total: seconds("timeout_s", 1.0)?, queue: seconds("max_queue_ms", 1e3)? })
}

/// Most tokens of an answer to a prompt of `prompt_tokens` tokens: what was asked for, or
/// `default`, and never more than the context leaves.
///
/// # Errors
/// A prompt that leaves no room.
pub fn room(
    app: &App,
    prompt_tokens: usize,
    asked: Option<usize>,
    default: Option<usize>,
) -> Result<usize, ApiError> {
    let limit = app.engine.limits().max_model_len;
    let needed = prompt_tokens + usize::from(asked != Some(0));
    if needed > limit {
        return Err(ApiError::too_long(needed, limit));
    }
    let left = limit - prompt_tokens;
    Ok(asked.or(default).unwrap_or(left).min(left))
}

//! `POST /v1/completions`.

use std::mem;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Serialize;
use serde_json::Value;

use super::Ignored;
use super::chunks::{Chunks, Envelope, Told};
use super::logprobs::{Lists, TokenNames};
use crate::request::{Event, Request};
use crate::server::answers::{Answers, Several, failure};
use crate::server::app::{App, Shared};
use crate::server::body::Body;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, FromJson};
use crate::server::guard::RequestName;
use crate::server::params::{self, Common};
use crate::server::{encode, sse, structure};
use crate::text::Specials;

/// Most prompts of a request.
const MAX_PROMPTS: usize = 256;

/// Tokens of an answer when nobody says.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Most alternatives of a token by the API's own rules; the server's limit may be lower.
const MAX_LOGPROBS: usize = 20;

/// Completes prompts.
pub async fn handle(
    State(app): State<Shared>,
    Extension(name): Extension<RequestName>,
    headers: HeaderMap,
    Body(mut fields): Body,
) -> Result<Response, ApiError> {
    let model = app.model_name(fields.take("model")?)?;
    let echo = fields.or("echo", false)?;
    let logprobs = logprobs(&app, &mut fields)?;
    if echo && logprobs.is_some() {
        let message = "echo together with logprobs is not supported";
        return Err(ApiError::unsupported("echo", message));
    }
    fields.refuse(&[("suffix", "")])?;
    let constraint = structure::take(&mut fields)?;
    let prompts = prompts(&mut fields)?;
    let mut common = params::take(&app, &mut fields, &headers)?;
    common.request.sampling.logprobs = logprobs;
    common.request.constraint = constraint;
    let ignored = Ignored::of(&app, fields)?;
    let mut completion = Completion::submit(&app, model, &name.0, prompts, common, echo)?;
    completion.answers.begin(app.patience()).await?;
    let response = if completion.envelope.delivery.stream {
        let first = completion.news_at_once();
        sse::response(Chunks::new(completion, first), app.config.sse_keep_alive)
    } else {
        Json(completion.collect().await?).into_response()
    };
    Ok(ignored.tell(response))
}

/// A number of alternatives; true is none of them, as in chats.
fn logprobs(app: &App, fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = match fields.raw("logprobs") {
        None | Some(Value::Bool(false)) => return Ok(None),
        Some(Value::Bool(true)) => 0,
        Some(value) => usize::from_json(&value)
            .ok_or_else(|| ApiError::wrong_type("logprobs", usize::EXPECTED, &value))?,
    };
    let most = app.config.max_logprobs.min(MAX_LOGPROBS);
    if wanted > most {
        let message = format!("logprobs is {wanted}, allowed: 0 to {most}");
        return Err(ApiError::value("logprobs", message));
    }
    Ok(Some(wanted))
}

/// A text or token ids.
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// A text, token ids, or a list of either.
fn prompts(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a string, an array of strings, of token ids or of arrays of token ids";
    let value = fields.raw("prompt").ok_or_else(|| ApiError::missing("prompt"))?;
    let wrong = |value: &Value| ApiError::wrong_type("prompt", EXPECTED, value);
    let list = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(list) if list.is_empty() => {
            return Err(ApiError::value("prompt", "prompt is empty"));
        }
        Value::Array(list) => list,
        other => return Err(wrong(&other)),
    };
    if list[0].is_number() {
        let list = Value::Array(list);
        return Ok(vec![Prompt::Ids(Vec::from_json(&list).ok_or_else(|| wrong(&list))?)]);
    }
    if list.len() > MAX_PROMPTS {
        let message = format!("prompt has {} elements, {MAX_PROMPTS} at most", list.len());
        return Err(ApiError::value("prompt", message));
    }
    list.into_iter()
        .map(|element| match element {
            Value::String(text) => Ok(Prompt::Text(text)),
            other => Vec::from_json(&other).map(Prompt::Ids).ok_or_else(|| wrong(&other)),
        })
        .collect()
}

/// The completions of one request in the making.
struct Completion {
    app: Shared,
    envelope: Envelope,
    /// Answers of each prompt; none for a request that only wants its prompts back.
    answers: Several,
    choices: Vec<Choice>,
    /// Choices of each prompt.
    n: usize,
}

/// One choice in the making.
#[derive(Default)]
struct Choice {
    /// What a stream has not sent yet.
    text: String,
    logprobs: Option<Lists>,
    token_ids: Vec<u32>,
    /// The prompt's ids, for the first chunk.
    prompt_ids: Option<Vec<u32>>,
    finish: Option<(&'static str, Value)>,
}

impl Completion {
    fn submit(
        app: &Shared,
        model: String,
        name: &str,
        prompts: Vec<Prompt>,
        common: Common,
        echo: bool,
    ) -> Result<Completion, ApiError> {
        let Common { request, max_tokens, delivery, patience } = common;
        if max_tokens == Some(0) && !echo {
            let message = "max_tokens is 0, which only makes sense with echo";
            return Err(ApiError::value("max_tokens", message));
        }
        let n = request.n;
        let mut all = Vec::new();
        let mut choices = Vec::new();
        for prompt in prompts {
            let (ids, text) = match prompt {
                Prompt::Ids(ids) => {
                    let text = if echo { app.model.tokenizer.decode(&ids) } else { String::new() };
                    (ids, text)
                }
                Prompt::Text(text) => {
                    let ids = encode(|| app.model.tokenizer.encode_prompt(&text, Specials::Parse))?;
                    (ids, if echo { text } else { String::new() })
                }
            };
            let choice = || Choice {
                text: text.clone(),
                logprobs: request.sampling.logprobs.map(|_| Lists::after(text.chars().count())),
                prompt_ids: delivery.token_ids.then(|| ids.clone()),
                ..Choice::default()
            };
            choices.extend((0..n).map(|_| choice()));
            let prompt_tokens = ids.len();
            let mut request = Request { prompt: ids, ..request.clone() };
            if max_tokens == Some(0) {
                // Nothing is generated; what could not run is refused all the same.
                request
                    .check(app.model.vocab_size)
                    .map_err(|e| ApiError::value(e.field, e.to_string()))?;
                continue;
            }
            let default = Some(DEFAULT_MAX_TOKENS);
            request.max_tokens = params::room(app, prompt_tokens, max_tokens, default)?;
            all.push(Answers::new(app.submit(request, name)?, prompt_tokens, patience));
        }
        if all.is_empty() {
            for choice in &mut choices {
                choice.finish = Some(("length", Value::Null));
            }
        }
        Ok(Completion {
            app: app.clone(),
            envelope: Envelope::new(app, "cmpl-", model, delivery),
            answers: Several::new(all),
            choices,
            n,
        })
    }

    /// Takes an event of a prompt in; returns the index of its choice.
    fn take_in(&mut self, prompt: usize, event: Event) -> Result<usize, ApiError> {
        if let Some(error) = failure(&event) {
            return Err(error);
        }
        let names = TokenNames {
            tokenizer: &self.app.model.tokenizer,
            as_ids: self.envelope.delivery.tokens_as_ids,
        };
        let index = prompt * self.n + event.choice;
        let choice = &mut self.choices[index];
        choice.text.push_str(&event.text);
        if let (Some(lists), Some(id), Some(logprobs)) =
            (&mut choice.logprobs, event.token, &event.logprobs)
        {
            lists.push(names, id, logprobs);
        }
        if self.envelope.delivery.token_ids {
            choice.token_ids.extend(event.token);
        }
        let answers = &self.answers.all[prompt];
        choice.finish = event.finish.as_ref().map(|finish| answers.reason(&finish.reason));
        Ok(index)
    }

    /// What a choice has that has not been sent.
    fn part(&mut self, index: usize) -> Part {
        let choice = &mut self.choices[index];
        let (finish_reason, stop_reason) = choice.finish.take().unzip();
        let wants_ids = self.envelope.delivery.token_ids;
        Part {
            index,
            text: mem::take(&mut choice.text),
            logprobs: choice.logprobs.as_mut().map(Lists::take),
            finish_reason,
            stop_reason,
            token_ids: wants_ids.then(|| mem::take(&mut choice.token_ids)),
            prompt_token_ids: choice.prompt_ids.take(),
        }
    }

    async fn collect(mut self) -> Result<Value, ApiError> {
        while let Some((prompt, event)) = self.answers.next().await {
            self.take_in(prompt, event?)?;
        }
        let parts: Vec<Part> = (0..self.choices.len()).map(|index| self.part(index)).collect();
        Ok(self.envelope.whole(Completion::KIND, &parts, &self.answers))
    }

    fn chunk(&mut self, index: usize) -> String {
        let part = self.part(index);
        self.envelope.chunk(Completion::KIND, part, &self.answers)
    }

    /// The chunks of a request that only wants its prompts back.
    fn news_at_once(&mut self) -> String {
        let ended = |index: &usize| self.choices[*index].finish.is_some();
        let ended: Vec<usize> = match self.answers.all.is_empty() {
            true => (0..self.choices.len()).filter(ended).collect(),
            false => Vec::new(),
        };
        ended.into_iter().map(|index| self.chunk(index)).collect()
    }

    /// Whether a choice has something to send.
    fn has_news(&self, index: usize) -> bool {
        let choice = &self.choices[index];
        let has_tokens =
            !choice.token_ids.is_empty() || choice.logprobs.as_ref().is_some_and(Lists::has_any);
        !choice.text.is_empty() || choice.finish.is_some() || has_tokens
    }
}

/// The choice of an answer or chunk. What is not there is not written, or is null.
#[derive(Serialize)]
struct Part {
    index: usize,
    text: String,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
}

impl Told for Completion {
    const KIND: &str = "text_completion";

    fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    fn answers(&self) -> &Several {
        &self.answers
    }

    fn answers_mut(&mut self) -> &mut Several {
        &mut self.answers
    }

    fn tell(&mut self, prompt: usize, event: Event) -> Result<String, ApiError> {
        let index = self.take_in(prompt, event)?;
        Ok(if self.has_news(index) { self.chunk(index) } else { String::new() })
    }
}

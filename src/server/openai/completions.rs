//! `POST /v1/completions`.

use std::mem;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use tokio::task::block_in_place;

use super::Ignored;
use super::chunks::{Chunks, Envelope, Told};
use super::logprobs::{self, Lists, TokenNames};
use super::prompts::{self, Echo, Encoded};
use crate::request::{Event, PromptLogprobs, Request};
use crate::server::answers::{Answers, Several, failure};
use crate::server::app::{App, Shared};
use crate::server::body::Named;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, FromJson};
use crate::server::guard::RequestName;
use crate::server::params::{self, Common};
use crate::server::{sse, structure};

/// Tokens of an answer when nobody says.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Most alternatives of a token by the API's own rules; the server's limit may be lower.
const MAX_LOGPROBS: usize = 20;

/// Most entries of logprobs of the prompts of a request, in all its choices: a token with its
/// alternatives has one for each. They are some hundred bytes each until they are sent.
const MAX_PROMPT_ENTRIES: usize = 250_000;

/// Completes prompts.
pub async fn handle(
    State(app): State<Shared>,
    headers: HeaderMap,
    Named(name, fields): Named,
) -> Response {
    let answer = answer(app, &name, &headers, fields).await;
    name.tell(answer.into_response())
}

async fn answer(
    app: Shared,
    name: &RequestName,
    headers: &HeaderMap,
    mut fields: Fields,
) -> Result<Response, ApiError> {
    let model = app.model_name(fields.take("model")?)?;
    let echo = fields.or("echo", false)?;
    let logprobs = logprobs(&app, &mut fields)?;
    let of_prompt = prompt_logprobs(&app, &mut fields)?;
    fields.refuse(&[("suffix", "")])?;
    let adds_specials = fields.or("add_special_tokens", true)?;
    let constraint = structure::take(&mut fields)?;
    let prompts = prompts::take(&mut fields)?;
    let mut common = params::take(&app, &mut fields, headers)?;
    common.request.sampling.logprobs = logprobs;
    common.request.constraint = constraint;
    let echo = Echo { text: echo, logprobs: logprobs.filter(|_| echo), of_prompt };
    common.request.prompt_logprobs = echo.logprobs.max(of_prompt);
    if of_prompt.is_some() && common.delivery.stream {
        let message = "prompt_logprobs is not supported with stream; use echo with logprobs";
        return Err(ApiError::unsupported("prompt_logprobs", message));
    }
    let ignored = Ignored::of(&app, fields)?;
    let form = (adds_specials, common.kept_tokens);
    let prompts = prompts.into_iter().map(|prompt| prompt.encode(&app, form, echo.text));
    let prompts: Vec<Encoded> = prompts.collect::<Result<_, _>>()?;
    check_entries(&prompts, common.request.n, echo)?;
    let mut completion = Completion::submit(&app, model, name, prompts, common, echo)?;
    completion.answers.begin(app.wait_for_headers()).await?;
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
    check_top(app, "logprobs", wanted).map(Some)
}

/// How many alternatives of each token of the prompt are wanted in its `prompt_logprobs`.
fn prompt_logprobs(app: &App, fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    const FIELD: &str = "prompt_logprobs";
    fields.take(FIELD)?.map(|wanted| check_top(app, FIELD, wanted)).transpose()
}

fn check_top(app: &App, field: &str, wanted: usize) -> Result<usize, ApiError> {
    let most = app.config.max_logprobs.min(MAX_LOGPROBS);
    if wanted > most {
        return Err(ApiError::value(field, format!("{field} is {wanted}, allowed: 0 to {most}")));
    }
    Ok(wanted)
}

/// Refuses logprobs of prompts that would take too much memory.
fn check_entries(prompts: &[Encoded], n: usize, echo: Echo) -> Result<(), ApiError> {
    let of_token = |top: Option<usize>| top.map_or(0, |top| top + 1);
    let (echoed, told) = (of_token(echo.logprobs), of_token(echo.of_prompt));
    let tokens: usize = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let entries = tokens * n * (echoed + told);
    if entries <= MAX_PROMPT_ENTRIES {
        return Ok(());
    }
    let field = if told > 0 { "prompt_logprobs" } else { "logprobs" };
    let message = format!(
        "{field}: {tokens} prompt tokens in {n} choices, each with its alternatives, are {entries} \
         entries, allowed: {MAX_PROMPT_ENTRIES}"
    );
    Err(ApiError::value(field, message))
}

/// The completions of one request in the making.
struct Completion {
    app: Shared,
    envelope: Envelope,
    echo: Echo,
    /// The prompts, where logprobs of them are told.
    prompts: Vec<Vec<u32>>,
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
    prompt_logprobs: Option<Value>,
    /// Logprobs of the prompt are to come: it is sent with them.
    is_held: bool,
    token_ids: Vec<u32>,
    /// The prompt's ids, for the first chunk.
    prompt_ids: Option<Vec<u32>>,
    finish: Option<(&'static str, Value)>,
}

impl Choice {
    /// Takes the logprobs of the prompt in, before anything else of the answer.
    fn take_scores(
        &mut self,
        names: TokenNames<'_>,
        prompt: &[u32],
        scores: &[PromptLogprobs],
        echo: Echo,
    ) {
        self.is_held = false;
        if let (Some(lists), Some(top)) = (&mut self.logprobs, echo.logprobs) {
            lists.push_prompt(names, prompt, (scores, top), self.text.chars().count());
        }
        let of_prompt = echo.of_prompt.map(|top| logprobs::of_prompt(names, prompt, scores, top));
        self.prompt_logprobs = of_prompt;
    }
}

impl Completion {
    fn submit(
        app: &Shared,
        model: String,
        name: &RequestName,
        prompts: Vec<Encoded>,
        common: Common,
        echo: Echo,
    ) -> Result<Completion, ApiError> {
        let Common { request, max_tokens, delivery, patience, .. } = common;
        if max_tokens == Some(0) && !echo.text && !echo.has_logprobs() {
            let message = "max_tokens is 0, which only makes sense with echo or prompt_logprobs";
            return Err(ApiError::value("max_tokens", message));
        }
        let n = request.n;
        let (mut requests, mut choices, mut told) = (Vec::new(), Vec::new(), Vec::new());
        for Encoded { ids, text } in prompts {
            let choice = || Choice {
                text: text.clone(),
                logprobs: request.sampling.logprobs.map(|_| match echo.logprobs {
                    Some(_) => Lists::default(),
                    None => Lists::after(text.chars().count()),
                }),
                is_held: echo.has_logprobs(),
                prompt_ids: delivery.token_ids.then(|| ids.clone()),
                ..Choice::default()
            };
            choices.extend((0..n).map(|_| choice()));
            let prompt_tokens = ids.len();
            if echo.has_logprobs() {
                told.push(ids.clone());
            }
            let mut request = Request { prompt: ids, ..request.clone() };
            let default = Some(DEFAULT_MAX_TOKENS);
            let room = params::room(app, prompt_tokens, max_tokens, default);
            request.max_tokens = room.map_err(|error| error.of("prompt"))?;
            if max_tokens == Some(0) && !echo.has_logprobs() {
                // Nothing is computed; what could not be scored is refused all the same.
                request.prompt_logprobs = Some(0);
                block_in_place(|| app.engine.check(&request))?;
                continue;
            }
            requests.push(request);
        }
        let prompt_tokens: Vec<usize> = requests.iter().map(|r| r.prompt.len()).collect();
        let live = app.submit_all(requests, &name.id)?.into_iter().zip(prompt_tokens);
        let all: Vec<_> = live.map(|(live, tokens)| Answers::new(live, tokens, patience)).collect();
        if all.is_empty() {
            for choice in &mut choices {
                choice.finish = Some(("length", Value::Null));
            }
        }
        Ok(Completion {
            app: app.clone(),
            envelope: Envelope::new(app, name.answer_id("cmpl-"), model, delivery),
            echo,
            prompts: told,
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
        if let Some(scores) = &event.prompt_logprobs {
            let ids = &self.prompts[prompt];
            let choices = &mut self.choices[prompt * self.n..(prompt + 1) * self.n];
            // Some hundred thousand entries take a while.
            block_in_place(|| {
                for choice in choices.iter_mut().filter(|choice| choice.is_held) {
                    choice.take_scores(names, ids, scores, self.echo);
                }
            });
        }
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
            prompt_logprobs: choice.prompt_logprobs.take(),
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
        let has_text = !choice.text.is_empty() && !choice.is_held;
        has_text || choice.finish.is_some() || has_tokens
    }
}

/// The choice of an answer or chunk. What is not there is not written, or is null.
#[derive(Serialize)]
struct Part {
    index: usize,
    text: String,
    logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
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

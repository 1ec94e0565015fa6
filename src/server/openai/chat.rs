//! `POST /v1/chat/completions`.

use std::mem;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value, json};

use super::Ignored;
use super::logprobs::{self, TokenNames};
use super::message::Message;
use crate::request::Event;
use crate::server::answers::{Answers, failure, metrics};
use crate::server::app::{App, Shared};
use crate::server::body::Body;
use crate::server::conversation::{Conversation, Prompt};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::guard::RequestName;
use crate::server::params::{self, Common, Delivery};
use crate::server::replay;
use crate::server::{now, random_id, sse, structure};
use crate::text::AnswerParser;

/// Answers a conversation.
pub async fn handle(
    State(app): State<Shared>,
    Extension(name): Extension<RequestName>,
    headers: HeaderMap,
    Body(mut fields): Body,
) -> Result<Response, ApiError> {
    let model = app.model_name(fields.take("model")?)?;
    let conversation = Conversation::take(&app, &mut fields)?;
    let logprobs = logprobs(&app, &mut fields)?;
    let constraint = structure::take(&mut fields)?;
    fields.refuse(&[("thinking_token_budget", "")])?;
    let mut common = params::take(&app, &mut fields, &headers)?;
    common.request.sampling.logprobs = logprobs;
    common.request.constraint = constraint;
    let ignored = Ignored::of(&app, fields)?;
    let mut chat = Chat::submit(&app, model, &name.0, &conversation, common)?;
    chat.answers.begin(app.patience()).await?;
    let response = if chat.delivery.stream {
        sse::response(chat, app.config.sse_keep_alive)
    } else {
        Json(chat.collect().await?).into_response()
    };
    Ok(ignored.tell(response))
}

/// Whether logprobs are wanted, and how many alternatives beside each token.
fn logprobs(app: &App, fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.or("logprobs", false)?;
    let top: Option<usize> = fields.take("top_logprobs")?;
    let most = app.config.max_logprobs;
    match top {
        Some(top) if top > most => {
            let message = format!("top_logprobs is {top}, allowed: 0 to {most}");
            Err(ApiError::value("top_logprobs", message))
        }
        Some(top) if top > 0 && !wanted => {
            let message = "top_logprobs is allowed only with logprobs";
            Err(ApiError::value("top_logprobs", message))
        }
        top => Ok(wanted.then(|| top.unwrap_or(0))),
    }
}

/// The answers to one conversation in the making.
struct Chat {
    app: Shared,
    id: String,
    created: u64,
    model: String,
    delivery: Delivery,
    answers: Answers,
    choices: Vec<Choice>,
    prompt: Prompt,
    with_logprobs: bool,
    /// Only the first call of an answer is told of.
    is_single: bool,
    has_usage_left: bool,
    is_done: bool,
}

/// One answer in the making.
struct Choice {
    parser: Option<AnswerParser>,
    message: Message,
    /// Tokens so far.
    tokens: Vec<u32>,
    /// What a stream has not sent yet: deltas, and what goes with the next of them.
    deltas: Vec<Value>,
    logprobs: Vec<Value>,
    token_ids: Vec<u32>,
    has_role: bool,
    finish: Option<(&'static str, Value)>,
}

impl Choice {
    fn new(parser: AnswerParser) -> Choice {
        Choice {
            parser: Some(parser),
            message: Message::default(),
            tokens: Vec::new(),
            deltas: Vec::new(),
            logprobs: Vec::new(),
            token_ids: Vec::new(),
            has_role: false,
            finish: None,
        }
    }
}

impl Chat {
    fn submit(
        app: &Shared,
        model: String,
        name: &str,
        conversation: &Conversation,
        common: Common,
    ) -> Result<Chat, ApiError> {
        let Common { mut request, max_tokens, delivery, patience } = common;
        let tools = &conversation.tools;
        let mut prompt = conversation.prompt(app)?;
        let prompt_tokens = prompt.ids.len();
        request.max_tokens = params::room(app, prompt_tokens, max_tokens, None)?;
        (request.prompt, request.checkpoint_at) =
            (prompt.ids.clone(), mem::take(&mut prompt.marks));
        let format = &app.model.format;
        let is_forced = tools.hold(&mut request, format, &prompt.text, "response_format")?;
        let parser = || AnswerParser::new(format, tools.callable(), &prompt.text, is_forced);
        let choices = (0..request.n).map(|_| Choice::new(parser())).collect();
        let with_logprobs = request.sampling.logprobs.is_some();
        let answers = Answers::new(app.submit(request, name)?, prompt_tokens, patience);
        Ok(Chat {
            app: app.clone(),
            id: random_id("chatcmpl-"),
            created: now(),
            model,
            delivery,
            answers,
            choices,
            prompt,
            with_logprobs,
            is_single: !tools.parallel,
            has_usage_left: delivery.include_usage,
            is_done: false,
        })
    }

    /// Takes an event in; returns the index of its choice.
    fn take_in(&mut self, event: Event) -> Result<usize, ApiError> {
        if let Some(error) = failure(&event) {
            return Err(error);
        }
        let names = TokenNames {
            tokenizer: &self.app.model.tokenizer,
            as_ids: self.delivery.tokens_as_ids,
        };
        let choice = &mut self.choices[event.choice];
        choice.tokens.extend(event.token);
        if let (Some(id), Some(logprobs)) = (event.token, &event.logprobs) {
            choice.logprobs.push(logprobs::chat(names, id, logprobs));
        }
        if self.delivery.token_ids {
            choice.token_ids.extend(event.token);
        }
        let mut pieces = choice.parser.as_mut().map_or(Vec::new(), |p| p.push(&event.text));
        if let Some(finish) = &event.finish {
            pieces.extend(choice.parser.take().map_or(Vec::new(), AnswerParser::finish));
            choice.finish = Some(self.answers.reason(&finish.reason));
        }
        for piece in pieces {
            if let Some(delta) = choice.message.take_in(piece, self.is_single) {
                choice.deltas.push(delta);
            }
        }
        if let Some(finish) = &event.finish {
            if let (Some((reason, _)), false) =
                (&mut choice.finish, choice.message.calls.is_empty())
                && *reason == "stop"
            {
                *reason = "tool_calls";
            }
            let Choice { tokens, message, .. } = &self.choices[event.choice];
            let said = (message.reasoning.as_str(), message.content.as_str());
            let calls = replay::parts(&message.calls);
            self.app.replay.remember(&self.prompt, tokens, &finish.reason, said, calls);
        }
        Ok(event.choice)
    }

    /// The fields of a choice beside its message or delta.
    fn rest(&mut self, index: usize) -> Map<String, Value> {
        let choice = &mut self.choices[index];
        let mut rest = Map::new();
        let logprobs = mem::take(&mut choice.logprobs);
        let logprobs = self.with_logprobs.then(|| json!({ "content": logprobs }));
        rest.insert("logprobs".to_owned(), logprobs.into());
        if self.delivery.token_ids {
            rest.insert("token_ids".to_owned(), mem::take(&mut choice.token_ids).into());
        }
        rest
    }

    fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.app.model.fingerprint,
            "choices": choices,
        })
    }

    async fn collect(mut self) -> Result<Value, ApiError> {
        while let Some(event) = self.answers.next().await {
            self.take_in(event?)?;
        }
        let mut choices = Vec::with_capacity(self.choices.len());
        for index in 0..self.choices.len() {
            let (reason, stop) = self.choices[index].finish.take().unzip();
            let mut choice = Map::new();
            choice.insert("index".to_owned(), index.into());
            choice.insert("message".to_owned(), self.choices[index].message.to_json());
            choice.extend(self.rest(index));
            choice.insert("finish_reason".to_owned(), reason.into());
            choice.insert("stop_reason".to_owned(), stop.into());
            choices.push(choice.into());
        }
        let mut object = self.object("chat.completion", choices);
        object["usage"] = self.answers.usage();
        if self.delivery.metrics {
            object["metrics"] = metrics(&self.answers.figures);
        }
        if self.delivery.token_ids {
            object["prompt_token_ids"] = self.prompt.ids.into();
        }
        Ok(object)
    }

    fn chunk(&self, choice: Value) -> String {
        let mut object = self.object("chat.completion.chunk", vec![choice]);
        self.delivery.add_usage(&mut object, || self.answers.usage());
        sse::event(None, &object)
    }

    /// What a choice has to send, in the order in which clients expect it.
    fn news(&mut self, index: usize) -> String {
        let mut text = String::new();
        if !mem::replace(&mut self.choices[index].has_role, true) {
            let delta = json!({ "role": "assistant", "content": "" });
            let mut choice = json!({ "index": index, "delta": delta, "finish_reason": null });
            if self.delivery.token_ids {
                choice["prompt_token_ids"] = self.prompt.ids.as_slice().into();
            }
            text.push_str(&self.chunk(choice));
        }
        let mut deltas = mem::take(&mut self.choices[index].deltas);
        let choice = &self.choices[index];
        if deltas.is_empty() && (!choice.logprobs.is_empty() || !choice.token_ids.is_empty()) {
            deltas.push(json!({ "content": "" }));
        }
        for delta in deltas {
            let mut choice = Map::new();
            choice.insert("index".to_owned(), index.into());
            choice.insert("delta".to_owned(), delta);
            choice.extend(self.rest(index));
            choice.insert("finish_reason".to_owned(), Value::Null);
            text.push_str(&self.chunk(choice.into()));
        }
        if let Some((reason, stop)) = self.choices[index].finish.take() {
            let choice = json!({
                "index": index,
                "delta": {},
                "logprobs": null,
                "finish_reason": reason,
                "stop_reason": stop,
            });
            text.push_str(&self.chunk(choice));
        }
        text
    }
}

impl sse::Source for Chat {
    async fn next(&mut self) -> Option<String> {
        if self.is_done {
            return None;
        }
        while let Some(event) = self.answers.next().await {
            match event.and_then(|event| self.take_in(event)) {
                Ok(index) => {
                    let news = self.news(index);
                    if !news.is_empty() {
                        return Some(news);
                    }
                }
                Err(error) => {
                    self.is_done = true;
                    return Some(super::broken_off(&error));
                }
            }
        }
        self.is_done = true;
        if !mem::take(&mut self.has_usage_left) {
            return Some(sse::DONE.to_owned());
        }
        let mut last = self.object("chat.completion.chunk", Vec::new());
        last["usage"] = self.answers.usage();
        if self.delivery.metrics {
            last["metrics"] = metrics(&self.answers.figures);
        }
        Some(sse::event(None, &last) + sse::DONE)
    }
}

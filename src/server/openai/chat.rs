//! `POST /v1/chat/completions`.

use std::mem;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Ignored;
use super::chunks::{Chunks, Envelope, Told};
use super::logprobs::{self, TokenNames};
use super::message::{Delta, Message};
use crate::request::Event;
use crate::server::answers::{Answers, Several, failure};
use crate::server::app::{App, Shared};
use crate::server::body::Named;
use crate::server::conversation::{Conversation, Prompt};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::guard::RequestName;
use crate::server::params::{self, Common};
use crate::server::replay;
use crate::server::{sse, structure};
use crate::text::{AnswerParser, Piece};

/// Answers a conversation.
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
    let conversation = Conversation::take(&app, &mut fields)?;
    let logprobs = logprobs(&app, &mut fields)?;
    let constraint = structure::take(&mut fields)?;
    let mut common = params::take(&app, &mut fields, headers)?;
    common.request.sampling.logprobs = logprobs;
    common.request.constraint = constraint;
    let ignored = Ignored::of(&app, fields)?;
    let mut chat = Chat::submit(&app, model, name, &conversation, common)?;
    chat.answers.begin(app.wait_for_headers()).await?;
    let response = if chat.envelope.delivery.stream {
        sse::response(Chunks::new(chat, String::new()), app.config.sse_keep_alive)
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
    envelope: Envelope,
    /// Those of its one prompt.
    answers: Several,
    choices: Vec<Choice>,
    prompt: Prompt,
    with_logprobs: bool,
    /// Only the first call of an answer is told of.
    is_single: bool,
}

/// One answer in the making.
struct Choice {
    parser: Option<AnswerParser>,
    message: Message,
    /// Tokens so far.
    tokens: Vec<u32>,
    /// What a stream has not sent yet: deltas, and what goes with the next of them.
    deltas: Vec<Delta>,
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
        name: &RequestName,
        conversation: &Conversation,
        common: Common,
    ) -> Result<Chat, ApiError> {
        let Common { mut request, max_tokens, kept_tokens, delivery, patience, .. } = common;
        let tools = &conversation.tools;
        let mut prompt = conversation.prompt(app)?;
        prompt.keep_last(kept_tokens);
        let prompt_tokens = prompt.ids.len();
        request.max_tokens = params::room(app, prompt_tokens, max_tokens, None)?;
        (request.prompt, request.checkpoint_at) =
            (prompt.ids.clone(), mem::take(&mut prompt.marks));
        let format = &app.model.format;
        let is_forced = tools.hold(&mut request, format, &prompt.text, "response_format")?;
        let parser = || AnswerParser::new(format, tools.callable(), &prompt.text, is_forced);
        let choices = (0..request.n).map(|_| Choice::new(parser())).collect();
        let with_logprobs = request.sampling.logprobs.is_some();
        let answers = Answers::new(app.submit(request, &name.id)?, prompt_tokens, patience);
        Ok(Chat {
            app: app.clone(),
            envelope: Envelope::new(app, name.answer_id("chatcmpl-"), model, delivery),
            answers: Several::new(vec![answers]),
            choices,
            prompt,
            with_logprobs,
            is_single: !tools.parallel,
        })
    }

    /// Takes an event in; returns the index of its choice.
    fn take_in(&mut self, event: Event) -> Result<usize, ApiError> {
        if let Some(error) = failure(&event) {
            return Err(error);
        }
        let names = TokenNames {
            tokenizer: &self.app.model.tokenizer,
            as_ids: self.envelope.delivery.tokens_as_ids,
        };
        let choice = &mut self.choices[event.choice];
        choice.tokens.extend(event.token);
        if let (Some(id), Some(logprobs)) = (event.token, &event.logprobs) {
            choice.logprobs.push(logprobs::chat(names, id, logprobs));
        }
        if self.envelope.delivery.token_ids {
            choice.token_ids.extend(event.token);
        }
        let was_reasoning = choice.parser.as_ref().is_some_and(AnswerParser::is_reasoning);
        let mut pieces = choice.parser.as_mut().map_or(Vec::new(), |p| p.push(&event.text));
        let reasons = was_reasoning || pieces.iter().any(|p| matches!(p, Piece::Reasoning(_)));
        self.answers.all[0].reasoning_tokens += usize::from(reasons && event.token.is_some());
        if let Some(finish) = &event.finish {
            pieces.extend(choice.parser.take().map_or(Vec::new(), AnswerParser::finish));
            choice.finish = Some(self.answers.all[0].reason(&finish.reason));
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

    /// The log-probabilities of a choice that have not been sent, or null.
    fn take_logprobs(&mut self, index: usize) -> Value {
        let logprobs = mem::take(&mut self.choices[index].logprobs);
        self.with_logprobs.then(|| json!({ "content": logprobs })).into()
    }

    /// The token ids of a choice that have not been sent, where they are wanted.
    fn take_ids(&mut self, index: usize) -> Option<Vec<u32>> {
        let is_wanted = self.envelope.delivery.token_ids;
        is_wanted.then(|| mem::take(&mut self.choices[index].token_ids))
    }

    async fn collect(mut self) -> Result<Value, ApiError> {
        while let Some((_, event)) = self.answers.next().await {
            self.take_in(event?)?;
        }
        let mut choices: Vec<Value> = Vec::with_capacity(self.choices.len());
        for index in 0..self.choices.len() {
            let (reason, stop) = self.choices[index].finish.take().unzip();
            let mut choice = Map::new();
            choice.insert("index".to_owned(), index.into());
            choice.insert("message".to_owned(), self.choices[index].message.to_json());
            choice.insert("logprobs".to_owned(), self.take_logprobs(index));
            if let Some(ids) = self.take_ids(index) {
                choice.insert("token_ids".to_owned(), ids.into());
            }
            choice.insert("finish_reason".to_owned(), reason.into());
            choice.insert("stop_reason".to_owned(), stop.into());
            choices.push(choice.into());
        }
        let mut object = self.envelope.whole("chat.completion", &choices, &self.answers);
        if self.envelope.delivery.token_ids {
            object["prompt_token_ids"] = self.prompt.ids.into();
        }
        Ok(object)
    }

    fn chunk(&self, part: Part<'_>) -> String {
        self.envelope.chunk(Chat::KIND, part, &self.answers)
    }

    /// What a choice has to send, in the order in which clients expect it.
    fn news(&mut self, index: usize) -> String {
        let mut text = String::new();
        if !mem::replace(&mut self.choices[index].has_role, true) {
            let delta = Delta::Role { role: "assistant", content: "" };
            let wants_ids = self.envelope.delivery.token_ids;
            let prompt_token_ids = wants_ids.then_some(self.prompt.ids.as_slice());
            text.push_str(&self.chunk(Part { prompt_token_ids, ..Part::new(index, delta) }));
        }
        let mut deltas = mem::take(&mut self.choices[index].deltas);
        let choice = &self.choices[index];
        if deltas.is_empty() && (!choice.logprobs.is_empty() || !choice.token_ids.is_empty()) {
            deltas.push(Delta::Content { content: String::new() });
        }
        for delta in deltas {
            let (logprobs, token_ids) = (Some(self.take_logprobs(index)), self.take_ids(index));
            text.push_str(&self.chunk(Part { logprobs, token_ids, ..Part::new(index, delta) }));
        }
        if let Some((reason, stop)) = self.choices[index].finish.take() {
            text.push_str(&self.chunk(Part {
                logprobs: Some(Value::Null),
                finish_reason: Some(reason),
                stop_reason: Some(stop),
                ..Part::new(index, Delta::None {})
            }));
        }
        text
    }
}

/// The choice of a chunk. What is not there is not written; what is null is.
#[derive(Serialize)]
struct Part<'a> {
    index: usize,
    delta: Delta,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

impl Part<'_> {
    fn new(index: usize, delta: Delta) -> Self {
        Part {
            index,
            delta,
            logprobs: None,
            token_ids: None,
            finish_reason: None,
            stop_reason: None,
            prompt_token_ids: None,
        }
    }
}

impl Told for Chat {
    const KIND: &str = "chat.completion.chunk";

    fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    fn answers(&self) -> &Several {
        &self.answers
    }

    fn answers_mut(&mut self) -> &mut Several {
        &mut self.answers
    }

    fn tell(&mut self, _prompt: usize, event: Event) -> Result<String, ApiError> {
        let index = self.take_in(event)?;
        Ok(self.news(index))
    }
}

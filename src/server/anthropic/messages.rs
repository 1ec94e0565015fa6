//! `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::mem;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::blocks::Blocks;
use super::{error_body, request};
use crate::request::{Event, FinishReason, StopCause};
use crate::server::answers::{Answers, failure};
use crate::server::app::Shared;
use crate::server::body::{Body, Named};
use crate::server::conversation::{Conversation, Prompt};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::guard::RequestName;
use crate::server::openai::Ignored;
use crate::server::params::{self, Common};
use crate::server::{random_id, sse, structure};
use crate::text::AnswerParser;

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
    fields: Fields,
) -> Result<Response, ApiError> {
    let mut fields = request::chat(fields)?;
    let model = app.model_name(Some(fields.need("model")?))?;
    let conversation = Conversation::take(&app, &mut fields)?;
    let constraint = structure::take(&mut fields)?;
    let mut common = params::take(&app, &mut fields, headers)?;
    common.request.constraint = constraint;
    let ignored = Ignored::of(&app, fields)?;
    let stream = common.delivery.stream;
    let mut message = Message::submit(&app, model, name.id.clone(), &conversation, common)?;
    message.answers.begin(app.wait_for_headers()).await?;
    let response = if stream {
        sse::response(message, app.config.sse_keep_alive)
    } else {
        Json(message.collect().await?).into_response()
    };
    Ok(ignored.tell(response))
}

/// Counts the tokens of a conversation.
pub async fn count_tokens(
    State(app): State<Shared>,
    Body(fields): Body,
) -> Result<Response, ApiError> {
    let mut fields = request::chat(fields)?;
    app.model_name(Some(fields.need("model")?))?;
    let conversation = Conversation::take(&app, &mut fields)?;
    structure::take(&mut fields)?;
    let ignored = Ignored::of(&app, fields)?;
    let tokens = conversation.prompt(&app)?.ids.len();
    Ok(ignored.tell(Json(json!({ "input_tokens": tokens })).into_response()))
}

/// An answer in the making.
struct Message {
    app: Shared,
    id: String,
    model: String,
    request_id: String,
    prompt: Prompt,
    answers: Answers,
    /// Tokens so far.
    tokens: Vec<u32>,
    parser: Option<AnswerParser>,
    /// Only the first call is told of.
    is_single: bool,
    blocks: Blocks,
    phase: Phase,
}

/// Where a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Start,
    Blocks,
    End,
}

impl Message {
    fn submit(
        app: &Shared,
        model: String,
        request_id: String,
        conversation: &Conversation,
        common: Common,
    ) -> Result<Message, ApiError> {
        let Common { mut request, max_tokens, kept_tokens, patience, .. } = common;
        let asked = max_tokens.ok_or_else(|| ApiError::missing("max_tokens"))?;
        let tools = &conversation.tools;
        let mut prompt = conversation.prompt(app)?;
        prompt.keep_last(kept_tokens);
        let prompt_tokens = prompt.ids.len();
        request.max_tokens = params::room(app, prompt_tokens, Some(asked), None)?;
        (request.prompt, request.checkpoint_at) =
            (prompt.ids.clone(), mem::take(&mut prompt.marks));
        let format = &app.model.format;
        let is_forced = tools.hold(&mut request, format, &prompt.text, "output_config.format")?;
        let parser = AnswerParser::new(format, tools.callable(), &prompt.text, is_forced);
        let answers = Answers::new(app.submit(request, &request_id)?, prompt_tokens, patience);
        Ok(Message {
            app: app.clone(),
            id: random_id("msg_"),
            model,
            request_id,
            prompt,
            answers,
            tokens: Vec::new(),
            parser: Some(parser),
            is_single: !tools.parallel,
            blocks: Blocks::default(),
            phase: Phase::Start,
        })
    }

    /// Takes an event in; the reason and the stop sequence when it is the last.
    fn take_in(&mut self, event: &Event) -> Result<Option<(&'static str, Value)>, ApiError> {
        if let Some(error) = failure(event) {
            return Err(error);
        }
        self.tokens.extend(event.token);
        let mut pieces = self.parser.as_mut().map_or(Vec::new(), |p| p.push(&event.text));
        if event.finish.is_some() {
            pieces.extend(self.parser.take().map_or(Vec::new(), AnswerParser::finish));
        }
        for piece in pieces {
            self.blocks.take_in(piece, self.is_single);
        }
        let Some(finish) = &event.finish else { return Ok(None) };
        self.blocks.close();
        let (said, thought) = self.blocks.texts();
        let calls = self.blocks.calls().map(|call| (call.name.as_str(), call.arguments.as_str()));
        let texts = (thought.as_str(), said.as_str());
        self.app.replay.remember(&self.prompt, &self.tokens, &finish.reason, texts, calls);
        let reason = match &finish.reason {
            FinishReason::Stop(StopCause::Text(text)) => ("stop_sequence", text.as_str().into()),
            FinishReason::Stop(_) if self.blocks.has_calls() => ("tool_use", Value::Null),
            FinishReason::Stop(_) => ("end_turn", Value::Null),
            FinishReason::Cancelled if !self.answers.is_late() => return Err(aborted()),
            _ => ("max_tokens", Value::Null),
        };
        Ok(Some(reason))
    }

    /// What the answer has cost so far. What was not computed is known when it ends.
    fn usage(&self) -> Value {
        let prompt = self.answers.prompt_tokens;
        let first = self.answers.figures.first();
        let cached = first.map_or(0, |figures| figures.cached_tokens);
        let created = first.map_or(0, |figures| figures.cache_write_tokens);
        json!({
            "input_tokens": prompt - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": self.answers.generated_tokens,
        })
    }

    fn object(&self, content: Vec<Value>, (reason, sequence): (Value, Value)) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self.usage(),
        })
    }

    async fn collect(mut self) -> Result<Value, ApiError> {
        let mut end = (Value::Null, Value::Null);
        while let Some(event) = self.answers.next().await {
            if let Some((reason, sequence)) = self.take_in(&event?)? {
                end = (reason.into(), sequence);
            }
        }
        let content = self.blocks.content();
        Ok(self.object(content, end))
    }

    /// The first events of a stream.
    fn start(&self) -> String {
        let message = self.object(Vec::new(), (Value::Null, Value::Null));
        let start = json!({ "type": "message_start", "message": message });
        let ping = json!({ "type": "ping" });
        sse::event(Some("message_start"), &start) + &sse::event(Some("ping"), &ping)
    }

    /// The last events of a stream.
    fn end(&self, reason: &str, sequence: &Value) -> String {
        let delta = json!({
            "type": "message_delta",
            "delta": { "stop_reason": reason, "stop_sequence": sequence },
            "usage": self.usage(),
        });
        let stop = json!({ "type": "message_stop" });
        sse::event(Some("message_delta"), &delta) + &sse::event(Some("message_stop"), &stop)
    }
}

impl sse::Source for Message {
    async fn next(&mut self) -> Option<String> {
        match self.phase {
            Phase::Start => {
                self.phase = Phase::Blocks;
                return Some(self.start());
            }
            Phase::Blocks => {}
            Phase::End => return None,
        }
        while let Some(event) = self.answers.next().await {
            match event.and_then(|event| self.take_in(&event)) {
                Ok(None) => {
                    let events = self.blocks.take_events();
                    if !events.is_empty() {
                        return Some(events);
                    }
                }
                Ok(Some((reason, sequence))) => {
                    self.phase = Phase::End;
                    return Some(self.blocks.take_events() + &self.end(reason, &sequence));
                }
                Err(error) => {
                    self.phase = Phase::End;
                    let body = error_body(&error, &self.request_id);
                    return Some(sse::event(Some("error"), &body));
                }
            }
        }
        self.phase = Phase::End;
        None
    }
}

/// The client itself, or one who knows the request's name, ended it: there is no word for that
/// among the reasons of a message.
fn aborted() -> ApiError {
    ApiError::invalid("request_aborted", "the request was aborted")
}

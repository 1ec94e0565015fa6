//! What both routes write: an object around the choices of an answer, whole or in chunks.

use serde::Serialize;
use serde_json::{Value, json};

use crate::request::Event;
use crate::server::answers::Several;
use crate::server::app::App;
use crate::server::error::ApiError;
use crate::server::params::Delivery;
use crate::server::{now, sse};

/// What all objects of a request have in common.
#[derive(Debug)]
pub struct Envelope {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    /// How the answer is sent.
    pub delivery: Delivery,
}

/// An object of the API. It is written as it stands, without a tree of values in between: one is
/// written for each token.
#[derive(Serialize)]
struct Object<'a, C> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

impl Envelope {
    /// For a new answer of `model`, which is called `id`.
    pub fn new(app: &App, id: String, model: String, delivery: Delivery) -> Envelope {
        let fingerprint = app.model.fingerprint.clone();
        Envelope { id, created: now(), model, fingerprint, delivery }
    }

    /// The whole answer.
    pub fn whole(&self, kind: &str, choices: &[impl Serialize], answers: &Several) -> Value {
        let object = self.object(kind, choices, Some(answers.usage()));
        let mut object = serde_json::to_value(object).expect("its keys are strings");
        if self.delivery.metrics {
            object["metrics"] = answers.metrics();
        }
        object
    }

    /// A chunk with a part of one choice, as an event.
    pub fn chunk(&self, kind: &str, part: impl Serialize, answers: &Several) -> String {
        let usage = self.delivery.chunk_usage(|| answers.usage());
        sse::event(None, &self.object(kind, &[part], usage))
    }

    fn object<'a, C>(
        &'a self,
        kind: &'a str,
        choices: &'a [C],
        usage: Option<Value>,
    ) -> Object<'a, C> {
        Object {
            id: &self.id,
            object: kind,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            usage,
        }
    }
}

/// Answers that can be told in chunks.
pub trait Told: Send + 'static {
    /// The name of a chunk.
    const KIND: &str;

    /// What all chunks have in common.
    fn envelope(&self) -> &Envelope;

    /// Where its events come from.
    fn answers(&self) -> &Several;

    /// Where its events come from, to hear them.
    fn answers_mut(&mut self) -> &mut Several;

    /// The chunks that tell of an event of prompt `prompt`; empty when there is nothing to tell.
    ///
    /// # Errors
    /// What ends the stream.
    fn tell(&mut self, prompt: usize, event: Event) -> Result<String, ApiError>;
}

/// A stream of chunks.
pub struct Chunks<T> {
    told: T,
    /// What is sent before anything is heard.
    first: String,
    is_done: bool,
}

impl<T: Told> Chunks<T> {
    /// The chunks of `told`, after those of `first`.
    pub fn new(told: T, first: String) -> Chunks<T> {
        Chunks { told, first, is_done: false }
    }

    /// The usage of all, where it was asked for, and the end.
    fn end(&self) -> String {
        let (envelope, answers) = (self.told.envelope(), self.told.answers());
        if !envelope.delivery.include_usage {
            return sse::DONE.to_owned();
        }
        sse::event(None, &envelope.whole(T::KIND, &[(); 0], answers)) + sse::DONE
    }
}

impl<T: Told> sse::Source for Chunks<T> {
    async fn next(&mut self) -> Option<String> {
        if !self.first.is_empty() {
            return Some(std::mem::take(&mut self.first));
        }
        if self.is_done {
            return None;
        }
        while let Some((prompt, event)) = self.told.answers_mut().next().await {
            match event.and_then(|event| self.told.tell(prompt, event)) {
                Ok(text) if text.is_empty() => {}
                Ok(text) => return Some(text),
                Err(error) => {
                    self.is_done = true;
                    return Some(broken_off(&error));
                }
            }
        }
        self.is_done = true;
        Some(self.end())
    }
}

/// The end of a stream that cannot go on.
fn broken_off(error: &ApiError) -> String {
    sse::event(None, &json!({ "error": error.object() })) + sse::DONE
}

//! What all requests share: the engine, the model's text, limits, and who is being served.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::block_in_place;

use super::config::ServerConfig;
use super::error::ApiError;
use super::guard::Keys;
use super::metrics::{Metrics, Watch};
use super::queue::{Lack, Place, Queue};
use super::replay::Replay;
use crate::engine::{Engine, Handle, RequestId, SubmitError};
use crate::request::{Event, Request, SamplingParams};
use crate::text::AnswerFormat;
use crate::text::{ChatTemplate, TextError, Tokenizer};

/// A model as clients see it.
pub struct ServedModel {
    /// The names it answers to, the first of which it calls itself.
    pub names: Vec<String>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, or why there is none.
    pub template: Result<ChatTemplate, TextError>,
    /// How it marks reasoning and tool calls.
    pub format: AnswerFormat,
    /// Tokens of the model.
    pub vocab_size: usize,
    /// How tokens are chosen where a request does not say.
    pub sampling: SamplingParams,
    /// Further facts, as `meta` of `/v1/models` and in `/props`.
    pub meta: Map<String, Value>,
    /// Twelve hexadecimal digits that change with the model, its precision or its tokenizer.
    pub fingerprint: String,
}

/// Where a server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It takes requests.
    Open,
    /// It was told to end, and takes requests for a little longer.
    Leaving,
    /// It finishes what it has.
    Draining,
}

impl Phase {
    /// The word that clients see.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Open => "open",
            Phase::Leaving => "leaving",
            Phase::Draining => "draining",
        }
    }
}

/// What all requests share.
pub struct App {
    /// The engine.
    pub engine: Engine,
    /// The model.
    pub model: ServedModel,
    /// Limits.
    pub config: ServerConfig,
    /// Who may ask.
    pub keys: Keys,
    /// What the requests so far met.
    pub metrics: Metrics,
    /// When the server started, in seconds since 1970.
    pub started: u64,
    /// Answers that conversations may send back.
    pub replay: Replay,
    phase: watch::Sender<Phase>,
    /// The requests being served, by the names that their clients gave them.
    served: Mutex<HashMap<Box<str>, Vec<RequestId>>>,
    queue: Arc<Queue>,
}

/// An [`App`] as handlers get it.
pub type Shared = Arc<App>;

impl App {
    /// A server's state at its start.
    pub fn new(engine: Engine, model: ServedModel, config: ServerConfig) -> App {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        App {
            engine,
            model,
            keys: Keys::new(&config),
            config,
            metrics: Metrics::new(),
            started: now.map_or(0, |since| since.as_secs()),
            replay: Replay::default(),
            phase: watch::Sender::new(Phase::Open),
            served: Mutex::default(),
            queue: Arc::default(),
        }
    }

    /// Where the server is in its life.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Goes on to the next phase of its life.
    pub fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// The name under which a request asked for the model.
    ///
    /// # Errors
    /// Another model's name.
    pub fn model_name(&self, asked: Option<String>) -> Result<String, ApiError> {
        let names = &self.model.names;
        match asked {
            None => Ok(names[0].clone()),
            Some(name) if self.config.any_model || names.contains(&name) => Ok(name),
            Some(name) => {
                let short: String = name.chars().take(100).collect();
                let message = format!("the model {short:?} does not exist; here is {:?}", names[0]);
                let status = StatusCode::NOT_FOUND;
                let kind = "invalid_request_error";
                Err(ApiError::new(status, kind, "model_not_found", message).of("model"))
            }
        }
    }

    /// How long an answer's headers wait for its beginning, so that an error can still have a
    /// status of its own.
    pub fn wait_for_headers(&self) -> Duration {
        match self.config.sse_keep_alive {
            Duration::ZERO => Duration::from_secs(15),
            keep_alive => keep_alive,
        }
    }

    /// Hands the one prompt of a request to the engine; see [`App::submit_all`].
    ///
    /// # Errors
    /// A server that has too much to do or ends, or a request that can never run.
    pub fn submit(self: &Arc<App>, request: Request, name: &str) -> Result<Live, ApiError> {
        let mut all = self.submit_all(vec![request], name)?;
        Ok(all.pop().expect("one was submitted"))
    }

    /// Hands the prompts of a request to the engine, under the name that its client knows: all or
    /// none.
    ///
    /// # Errors
    /// A server that has too much to do or ends, a prompt that can never run, or more answers than
    /// may ever wait.
    pub fn submit_all(
        self: &Arc<App>,
        requests: Vec<Request>,
        name: &str,
    ) -> Result<Vec<Live>, ApiError> {
        // The prompts of a request came with one set of fields, and so have one priority.
        let Some(first) = requests.first() else { return Ok(Vec::new()) };
        let priority = first.priority.unwrap_or(0);
        let mut place = self.admit(&requests, priority).inspect_err(|error| {
            // A request that makes no sense is the client's matter, no sign of load.
            if error.retry_after.is_some() {
                self.metrics.reject(error);
            }
        })?;
        let mut taken = Vec::with_capacity(requests.len());
        for request in requests {
            let (choices, max_tokens) = (request.n, request.max_tokens);
            // One that is refused ends those before it: who is dropped is cancelled.
            taken.push((self.hand_over(request)?, choices, max_tokens));
        }
        let prompts = taken.iter().map(|(handle, ..)| (handle.id(), handle.backlog()));
        place.wait(prompts.collect(), priority);
        let place = Arc::new(place);
        let mut all = Vec::with_capacity(taken.len());
        for (handle, choices, max_tokens) in taken {
            let watch = Watch::new(&self.metrics, place.since(), choices, max_tokens);
            self.served().entry(name.into()).or_default().push(handle.id());
            let (place, app) = (Arc::clone(&place), Arc::clone(self));
            all.push(Live { handle, place, watch, app, name: name.into() });
        }
        Ok(all)
    }

    fn hand_over(&self, request: Request) -> Result<Handle, SubmitError> {
        match request.constraint {
            // It is compiled, which can take seconds.
            Some(_) => block_in_place(|| self.engine.submit(request)),
            None => self.engine.submit(request),
        }
    }

    /// Refuses what would wait for too long, unless one that waits gives way to it.
    ///
    /// Requests that come at the same moment count the same places, so for that moment a few more
    /// may be let in than the limits say: they keep the load bounded, and nothing relies on them.
    fn admit(&self, requests: &[Request], priority: i32) -> Result<Place, ApiError> {
        if self.phase() == Phase::Draining {
            return Err(ApiError::draining());
        }
        let (there, tokens) = (self.answers(), self.queue.staying(self.engine.prompt_backlog()));
        let answers: usize = requests.iter().map(|request| request.n).sum();
        let new_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
        let (most, most_tokens) =
            (self.config.max_num_queued_reqs, self.config.max_num_queued_tokens);
        if answers > most {
            return Err(too_many(requests, answers, most));
        }
        let mut lack = Lack { answers: (there + answers).saturating_sub(most), tokens: 0 };
        // A request that is longer than the limit is taken when nothing else waits.
        if tokens > 0 {
            lack.tokens = (tokens + new_tokens).saturating_sub(most_tokens);
        }
        if lack == Lack::default() || self.make_room(requests, priority, lack)? {
            return Ok(self.queue.take(answers));
        }
        let (code, message) = match lack.answers {
            0 => ("backlog_full", format!("{tokens} prompt tokens wait, and {most_tokens} may")),
            _ => ("queue_full", format!("{there} answers wait or run, and {most} may")),
        };
        Err(ApiError::overloaded(code, message, self.retry_after(tokens)))
    }

    /// Where there are priorities, ends requests that wait with a higher number than `priority`
    /// until there is room for `requests`; whether there is.
    ///
    /// # Errors
    /// One that can never run: nobody is ended for it.
    fn make_room(&self, requests: &[Request], priority: i32, lack: Lack) -> Result<bool, ApiError> {
        if !self.engine.limits().has_priorities() {
            return Ok(false);
        }
        let check = || requests.iter().try_for_each(|request| self.engine.check(request));
        block_in_place(check)?;
        let evicted = self.queue.evict(priority, lack);
        evicted.iter().flatten().for_each(|id| self.engine.cancel(*id));
        Ok(evicted.is_some())
    }

    /// Answers that wait or run.
    pub fn answers(&self) -> usize {
        self.queue.answers()
    }

    /// How long `tokens` prompt tokens take, from 1 to 60 seconds.
    fn retry_after(&self, tokens: usize) -> Duration {
        let measured = self.engine.cost().tokens_per_second;
        let rate = if measured.is_finite() { measured } else { self.mean_rate() };
        Duration::from_secs_f64((tokens as f64 / rate).clamp(1.0, 60.0))
    }

    /// Prompt tokens computed per second since the start, 1 at least.
    fn mean_rate(&self) -> f64 {
        let seconds = super::now().saturating_sub(self.started).max(1);
        (self.engine.stats().scheduler.prompt_tokens as f64 / seconds as f64).max(1.0)
    }

    /// Ends the requests of a name; whether there were any.
    pub fn abort(&self, name: &str) -> bool {
        let Some(ids) = self.served().remove(name) else { return false };
        ids.into_iter().for_each(|id| self.engine.cancel(id));
        true
    }

    fn served(&self) -> MutexGuard<'_, HashMap<Box<str>, Vec<RequestId>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request of this name has ended.
    fn forget(&self, name: &str, ended: RequestId) {
        let mut served = self.served();
        if let Some(ids) = served.get_mut(name) {
            ids.retain(|id| *id != ended);
            if ids.is_empty() {
                served.remove(name);
            }
        }
    }
}

/// A request that has no place even in an empty queue: another try would meet the same.
fn too_many(requests: &[Request], answers: usize, most: usize) -> ApiError {
    let (prompts, n) = (requests.len(), requests.first().map_or(1, |request| request.n));
    let param = if n > 1 { "n" } else { "prompt" };
    let message = format!(
        "{param}: {answers} answers (prompts: {prompts}, n: {n}), allowed: {most} in a request \
         (--max-num-queued-reqs)"
    );
    ApiError::value(param, message)
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("config", &self.config).finish_non_exhaustive()
    }
}

/// A request that the engine has taken. Dropping it cancels it.
#[derive(Debug)]
pub struct Live {
    /// What is heard of it.
    pub handle: Handle,
    /// The place of its request among those that wait or run.
    pub place: Arc<Place>,
    /// What it meets.
    watch: Watch,
    /// The server.
    pub app: Shared,
    name: Box<str>,
}

impl Live {
    /// The name that its client knows.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counts an event of it.
    pub fn heard(&mut self, event: &Event) {
        self.watch.heard(&self.app.metrics, event);
    }

    /// Why it was ended, if a request of a better priority has its place.
    pub fn evicted(&self) -> Option<ApiError> {
        let message = "a request of a better priority has taken the place of this one";
        self.place.is_evicted().then(|| {
            let after = self.app.retry_after(self.app.engine.prompt_backlog());
            ApiError::overloaded("queue_full", message.to_owned(), after)
        })
    }

    /// Counts that the server ends it with an error before it began.
    pub fn refused(&mut self, error: &ApiError) {
        self.watch.refused(&self.app.metrics, error);
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.watch.left(&self.app.metrics);
        self.app.forget(&self.name, self.handle.id());
    }
}

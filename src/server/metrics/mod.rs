//! `GET /metrics`: what requests met, counted here as their events are heard, and what the engine
//! has done and holds, read from it when it is asked for.
//!
//! The first block has vLLM's names, so that autoscalers, routers and dashboards made for it work;
//! of these only `lora_requests_info` and `engine_sleep_state` are left out, since there are no
//! adapters here and an engine does not sleep. The second block, `deltapool_*`, is ours. Times are
//! in seconds, measured where an answer is heard, so that they hold what a client waits for.

mod engine;
mod histogram;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::app::Shared;
use super::error::ApiError;
use crate::request::{Event, Figures, Finish, FinishReason};

pub use engine::units;
pub use histogram::Histogram;

const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1., 2.5, 5., 7.5, 10., 20.,
    40., 80., 160., 640., 2560.,
];
const PER_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1., 2.5, 5., 7.5, 10., 20., 40.,
    80.,
];
/// As the one above, but finer where a small model is.
const FINE: &[f64] = &[
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.,
    2.5, 5., 10.,
];
const WHOLE: &[f64] = &[
    0.3, 0.5, 0.8, 1., 1.5, 2., 2.5, 5., 10., 15., 20., 30., 40., 50., 60., 120., 240., 480., 960.,
    1920., 7680.,
];
const TOKENS: &[f64] = &[
    1., 2., 5., 10., 20., 50., 100., 200., 500., 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
];
const CHOICES: &[f64] = &[1., 2., 5., 10., 20.];
const PREEMPTIONS: &[f64] = &[1., 2., 3., 4., 5., 10., 20.];

/// Why a prompt's reuse went no deeper, as [`Figures::miss_reason`] has it.
const MISS_REASONS: [&str; 4] = ["never_taken", "no_slot", "evicted", "not_exact"];

/// Ignored fields that are told apart by their names.
const MAX_IGNORED_NAMES: usize = 100;

type Label = [(&'static str, &'static str); 1];
type Counters = Family<Label, Counter>;

/// What the requests so far met.
#[derive(Debug)]
pub struct Metrics {
    generated_tokens: Counter,
    recomputed_tokens: Counter,
    ended: Counters,
    rejected: Counters,
    missed: Counters,
    http_requests: Family<[(&'static str, String); 2], Counter>,
    ignored: Family<[(&'static str, String); 1], Counter>,
    /// The names in `ignored`.
    ignored_names: Mutex<BTreeSet<String>>,
    disconnects: Counter,
    ttft: Histogram,
    itl: Histogram,
    coarse_itl: Histogram,
    per_token: Histogram,
    whole: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prompt_tokens: Histogram,
    answer_tokens: Histogram,
    most_answer_tokens: Histogram,
    choices: Histogram,
    max_tokens: Histogram,
    preemptions: Histogram,
    computed_tokens: Histogram,
}

impl Metrics {
    /// Counters at zero.
    pub fn new() -> Metrics {
        let metrics = Metrics {
            generated_tokens: Counter::default(),
            recomputed_tokens: Counter::default(),
            ended: Family::default(),
            rejected: Family::default(),
            missed: Family::default(),
            http_requests: Family::default(),
            ignored: Family::default(),
            ignored_names: Mutex::default(),
            disconnects: Counter::default(),
            ttft: Histogram::new(TTFT),
            itl: Histogram::new(FINE),
            coarse_itl: Histogram::new(PER_TOKEN),
            per_token: Histogram::new(PER_TOKEN),
            whole: Histogram::new(WHOLE),
            queue: Histogram::new(WHOLE),
            inference: Histogram::new(WHOLE),
            prefill: Histogram::new(WHOLE),
            decode: Histogram::new(WHOLE),
            prompt_tokens: Histogram::new(TOKENS),
            answer_tokens: Histogram::new(TOKENS),
            most_answer_tokens: Histogram::new(TOKENS),
            choices: Histogram::new(CHOICES),
            max_tokens: Histogram::new(TOKENS),
            preemptions: Histogram::new(PREEMPTIONS),
            computed_tokens: Histogram::new(TOKENS),
        };
        // A rate over a counter that is not there yet misses its first increase.
        for reason in ["stop", "length", "abort", "error"] {
            drop(metrics.ended.get_or_create(&[("finished_reason", reason)]));
        }
        for reason in ["queue_full", "backlog_full", "queue_timeout", "draining"] {
            drop(metrics.rejected.get_or_create(&[("reason", reason)]));
        }
        for reason in MISS_REASONS {
            drop(metrics.missed.get_or_create(&[("reason", reason)]));
        }
        metrics
    }

    /// A request was not let in, or given up before it began.
    pub fn reject(&self, error: &ApiError) {
        self.rejected.get_or_create(&[("reason", error.code)]).inc();
    }

    /// Fields of a request were ignored. Clients choose their names: of these the first hundred are
    /// told apart.
    pub fn ignore(&self, names: &[String]) {
        let mut known = self.ignored_names.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            let is_plain = name.len() <= 64 && name.bytes().all(|byte| byte.is_ascii_graphic());
            let is_told = known.contains(name)
                || is_plain && known.len() < MAX_IGNORED_NAMES && known.insert(name.clone());
            let name = if is_told { name.clone() } else { "other".to_owned() };
            self.ignored.get_or_create(&[("name", name)]).inc();
        }
    }

    /// Requests that were not let in.
    pub fn rejections(&self) -> u64 {
        let reasons = ["queue_full", "backlog_full", "queue_timeout", "draining"];
        reasons.iter().map(|reason| get(&self.rejected, &[("reason", *reason)])).sum()
    }

    /// Prompts whose reuse went no deeper, by reason.
    pub fn misses(&self) -> impl Iterator<Item = (&'static str, u64)> {
        MISS_REASONS.iter().map(|reason| (*reason, get(&self.missed, &[("reason", *reason)])))
    }

    /// Requests whose client left before the end.
    pub fn disconnects(&self) -> u64 {
        self.disconnects.get()
    }

    /// Seconds to the first token.
    pub fn ttft(&self) -> &Histogram {
        &self.ttft
    }

    /// Seconds from one token to the next.
    pub fn itl(&self) -> &Histogram {
        &self.itl
    }

    fn register(&self, registry: &mut Registry) {
        let counters = [
            (&self.generated_tokens, "vllm:generation_tokens", "Tokens generated"),
            (
                &self.recomputed_tokens,
                "deltapool_recomputed_tokens",
                "Tokens computed again after a preemption, of requests that ended",
            ),
            (
                &self.disconnects,
                "deltapool_http_disconnects",
                "Requests whose client left before the end",
            ),
        ];
        for (counter, name, help) in counters {
            registry.register(name, help, counter.clone());
        }
        let families = [
            (&self.ended, "vllm:request_success", "Answers that ended, by reason"),
            (&self.rejected, "vllm:admission_rejections", "Requests not let in, by reason"),
            (
                &self.missed,
                "deltapool_prefix_misses",
                "Prompts for which a deeper state could have helped, by why there was none",
            ),
        ];
        for (family, name, help) in families {
            registry.register(name, help, family.clone());
        }
        let help = "Requests by route and status";
        registry.register("deltapool_http_requests", help, self.http_requests.clone());
        let help = "Fields of requests that nobody knows, by name";
        registry.register("deltapool_ignored_params", help, self.ignored.clone());
        for (histogram, name, help) in self.histograms() {
            registry.register(name, help, histogram.clone());
        }
    }

    fn histograms(&self) -> [(&Histogram, &'static str, &'static str); 16] {
        [
            (&self.ttft, "vllm:time_to_first_token_seconds", "Time to the first token"),
            (&self.coarse_itl, "vllm:inter_token_latency_seconds", "Time between tokens"),
            (&self.itl, "deltapool_itl_seconds", "Time between tokens, in finer steps"),
            (
                &self.per_token,
                "vllm:request_time_per_output_token_seconds",
                "Mean time between the tokens of an answer",
            ),
            (&self.whole, "vllm:e2e_request_latency_seconds", "Time from arrival to the end"),
            (&self.queue, "vllm:request_queue_time_seconds", "Time in the queue"),
            (&self.inference, "vllm:request_inference_time_seconds", "Time from queue to end"),
            (&self.prefill, "vllm:request_prefill_time_seconds", "Time from queue to first token"),
            (&self.decode, "vllm:request_decode_time_seconds", "Time from first token to last"),
            (&self.prompt_tokens, "vllm:request_prompt_tokens", "Tokens of the prompt"),
            (&self.answer_tokens, "vllm:request_generation_tokens", "Tokens of the answer"),
            (
                &self.most_answer_tokens,
                "vllm:request_max_num_generation_tokens",
                "Tokens of the longest answer of a request",
            ),
            (&self.choices, "vllm:request_params_n", "Answers asked for"),
            (&self.max_tokens, "vllm:request_params_max_tokens", "Most tokens asked for"),
            (&self.preemptions, "vllm:request_num_preemptions", "Times pushed out"),
            (
                &self.computed_tokens,
                "vllm:request_prefill_kv_computed_tokens",
                "Tokens of the prompt that were computed",
            ),
        ]
    }
}

fn get(counters: &Counters, label: &Label) -> u64 {
    counters.get(label).map_or(0, |counter| counter.get())
}

/// `GET /metrics`, in Prometheus' text format.
pub async fn metrics(State(app): State<Shared>) -> Response {
    let labels = [("model_name".into(), app.model.names[0].clone().into())];
    let mut registry =
        Registry::with_labels(labels.into_iter().chain([("engine".into(), "0".into())]));
    registry.register_collector(Box::new(engine::Sample::of(&app)));
    app.metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry).expect("a string takes everything");
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// Counts a request by its route and status.
pub async fn count(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>();
    let route = path.map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned());
    let response = next.run(request).await;
    let labels = [("route", route), ("code", response.status().as_str().to_owned())];
    app.metrics.http_requests.get_or_create(&labels).inc();
    response
}

/// What one request meets, from its arrival to its end.
#[derive(Debug)]
pub struct Watch {
    since: Instant,
    /// When each choice last had a token.
    last: Vec<Option<Instant>>,
    /// Choices that have not ended.
    open: usize,
    most_tokens: usize,
}

impl Watch {
    /// Watches a request for `choices` answers of up to `max_tokens` tokens.
    pub fn new(metrics: &Metrics, since: Instant, choices: usize, max_tokens: usize) -> Watch {
        metrics.choices.observe(choices as f64);
        metrics.max_tokens.observe(max_tokens as f64);
        Watch { since, last: vec![None; choices], open: choices, most_tokens: 0 }
    }

    /// Counts an event.
    pub fn heard(&mut self, metrics: &Metrics, event: &Event) {
        if event.token.is_some() {
            let now = Instant::now();
            metrics.generated_tokens.inc();
            match self.last[event.choice].replace(now) {
                None => metrics.ttft.observe((now - self.since).as_secs_f64()),
                Some(before) => {
                    let seconds = (now - before).as_secs_f64();
                    metrics.itl.observe(seconds);
                    metrics.coarse_itl.observe(seconds);
                }
            }
        }
        if let Some(finish) = &event.finish {
            self.open = self.open.saturating_sub(1);
            self.ended(metrics, finish, event.choice == 0);
        }
    }

    /// Counts the end of an answer; of a request's answers the `first` tells of the prompt.
    fn ended(&mut self, metrics: &Metrics, finish: &Finish, first: bool) {
        let Figures { prompt_tokens, generated_tokens, decode, .. } = finish.figures;
        let reason = match finish.reason {
            FinishReason::Cancelled => "abort",
            ref other => other.as_str(),
        };
        metrics.ended.get_or_create(&[("finished_reason", reason)]).inc();
        metrics.whole.observe(self.since.elapsed().as_secs_f64());
        metrics.prompt_tokens.observe(prompt_tokens as f64);
        metrics.answer_tokens.observe(generated_tokens as f64);
        metrics.preemptions.observe(finish.figures.preemptions as f64);
        metrics.recomputed_tokens.inc_by(finish.figures.recomputed_tokens);
        if let Some(queue) = finish.figures.queue {
            let prefill = finish.figures.time_to_first_token.saturating_sub(queue);
            let prefill = if generated_tokens > 0 { prefill } else { Duration::ZERO };
            metrics.queue.observe(queue.as_secs_f64());
            metrics.prefill.observe(prefill.as_secs_f64());
            metrics.decode.observe(decode.as_secs_f64());
            metrics.inference.observe((prefill + decode).as_secs_f64());
        }
        if generated_tokens > 1 {
            metrics.per_token.observe(decode.as_secs_f64() / (generated_tokens - 1) as f64);
        }
        if first {
            let computed = prompt_tokens.saturating_sub(finish.figures.cached_tokens);
            metrics.computed_tokens.observe(computed as f64);
            if let Some(reason) = finish.figures.miss_reason {
                metrics.missed.get_or_create(&[("reason", reason)]).inc();
            }
        }
        self.most_tokens = self.most_tokens.max(generated_tokens);
        if self.open == 0 {
            metrics.most_answer_tokens.observe(self.most_tokens as f64);
        }
    }

    /// The server itself ends the request with an error before it began.
    pub fn refused(&mut self, metrics: &Metrics, error: &ApiError) {
        self.open = 0;
        metrics.reject(error);
    }

    /// Nobody hears the request any more.
    pub fn left(&self, metrics: &Metrics) {
        if self.open > 0 {
            metrics.disconnects.inc();
            let label = [("finished_reason", "abort")];
            metrics.ended.get_or_create(&label).inc_by(self.open as u64);
        }
    }
}

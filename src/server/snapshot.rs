//! `GET /v1/engine/snapshot` and `GET /v1/engine/events`: the engine at one moment, and four times
//! a second, for the page and whoever else wants to look.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::app::{App, Phase, Shared};
use super::metrics::{self, Histogram};
use super::sse;
use crate::engine::{
    EngineView, PoolLayout, PoolUse, STEPS_KEPT, SequenceState, SequenceView, StepRecord,
};

/// Time between two events.
const PERIOD: Duration = Duration::from_millis(250);

/// Most steps that one event tells of, besides the first.
const STEPS_PER_EVENT: usize = 128;

/// `GET /v1/engine/snapshot`.
pub async fn snapshot(State(app): State<Shared>) -> Json<Value> {
    Json(taken(&app, 0, STEPS_KEPT).0)
}

/// `GET /v1/engine/events`: a snapshot at once, then one in each period with the steps since the
/// one before, until the client leaves or the server ends.
pub async fn events(State(app): State<Shared>) -> Response {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    sse::response(Watching { app, ticks, told: 0 }, Duration::ZERO)
}

/// Somebody who watches.
struct Watching {
    app: Shared,
    ticks: Interval,
    /// The last step that was told of.
    told: u64,
}

impl sse::Source for Watching {
    async fn next(&mut self) -> Option<String> {
        self.ticks.tick().await;
        // While it drains there is something to see.
        if self.app.phase() == Phase::Draining && self.app.answers() == 0 {
            return None;
        }
        let most = if self.told == 0 { STEPS_KEPT } else { STEPS_PER_EVENT };
        let (snapshot, told) = taken(&self.app, self.told, most);
        self.told = told;
        Some(sse::event(None, &snapshot))
    }
}

/// The engine now, with those of the last `most` steps that came after step `after`; and the number
/// of the last step.
fn taken(app: &App, after: u64, most: usize) -> (Value, u64) {
    let (engine, stats) = (&app.engine, app.engine.stats());
    let (view, steps) = (engine.view(), engine.steps_since(after, most));
    let (answers, waiting_tokens) = (app.answers(), app.engine.prompt_backlog());
    let told = steps.last().map_or(after, |step| step.number);
    let prefill = view.prefilling.min(stats.occupancy.running);
    let total = stats.occupancy.running
        + stats.occupancy.waiting
        + stats.occupancy.parked
        + stats.occupancy.in_flight;
    let snapshot = json!({
        "phase": app.phase().as_str(),
        "uptime_s": super::now().saturating_sub(app.started),
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.model.names[0],
        "fingerprint": app.model.fingerprint,
        "max_model_len": engine.limits().max_model_len,
        "pools": pools(app, &view),
        "pages": {
            "device": { "total": stats.device.pages, "free": stats.device.free_pages },
            "host": { "total": stats.host.pages, "free": stats.host.free_pages },
        },
        "states": {
            "waiting": stats.occupancy.waiting,
            "prefill": prefill,
            "decode": stats.occupancy.running - prefill,
            "moving": stats.occupancy.in_flight,
            "parked": stats.occupancy.parked,
        },
        "seqs": view.sequences.iter().map(sequence).collect::<Vec<_>>(),
        "seqs_not_shown": total.saturating_sub(view.sequences.len()),
        "steps": steps.iter().map(step).collect::<Vec<_>>(),
        "last_step": told,
        "itl": histogram(app.metrics.itl()),
        "ttft": histogram(app.metrics.ttft()),
        "prefix": prefix(app),
        "http": {
            "inflight": answers,
            "waiting_prompt_tokens": waiting_tokens,
            "rejected": app.metrics.rejections(),
            "disconnects": app.metrics.disconnects(),
        },
    });
    (snapshot, told)
}

fn pools(app: &App, view: &EngineView) -> Vec<Value> {
    let limits = app.engine.limits();
    let of = |tier: &'static str, used: &PoolUse, layout: &PoolLayout| {
        let units = metrics::units(used, layout).into_iter().map(move |(unit, count, bytes)| {
            json!({
                "tier": tier,
                "unit": unit,
                "unit_bytes": bytes,
                "used": count.used,
                "cached": count.cached,
                "free": count.free,
                "total": count.used + count.cached + count.free,
            })
        });
        units.collect::<Vec<_>>()
    };
    let host = if limits.host.pages > 0 { of("host", &view.host, &limits.host) } else { vec![] };
    [of("device", &view.device, &limits.device), host].concat()
}

fn sequence(sequence: &SequenceView) -> Value {
    json!({
        "id": format!("{}.{}", sequence.request.0, sequence.choice),
        "state": sequence.state.as_str(),
        "prompt": sequence.prompt_tokens,
        "computed": sequence.computed_tokens,
        "generated": sequence.generated_tokens,
        "blocks": sequence.blocks,
        "priority": sequence.priority,
        "preemptions": sequence.preemptions,
        "age_ms": u64::try_from(sequence.age.as_millis()).unwrap_or(u64::MAX),
    })
}

/// `GET /slots`: the sequences, in the shape in which llama.cpp shows what it works on.
pub async fn slots(State(app): State<Shared>) -> Json<Value> {
    let n_ctx = app.engine.limits().max_model_len;
    let view = app.engine.view();
    let slots = view.sequences.iter().enumerate().map(|(id, sequence)| {
        json!({
            "id": id,
            "id_task": sequence.request.0,
            "n_ctx": n_ctx,
            "is_processing": matches!(
                sequence.state, SequenceState::Prefill | SequenceState::Decode
            ),
            "state": sequence.state.as_str(),
            "n_prompt_tokens": sequence.prompt_tokens,
            "n_prompt_tokens_processed": sequence.computed_tokens.min(sequence.prompt_tokens),
            "n_decoded": sequence.generated_tokens,
        })
    });
    Json(slots.collect())
}

fn step(step: &StepRecord) -> Value {
    let mut map = Map::new();
    let blocked = &step.blocked;
    map.insert("n".to_owned(), step.number.into());
    map.insert("ms".to_owned(), (step.duration.as_micros() as f64 / 1e3).into());
    // Most of these are zero in most steps.
    for (name, count) in [
        ("prefill_tokens", step.prompt_tokens),
        ("decode_seqs", step.decoding),
        ("decode_tokens", step.generated_tokens),
        ("swap_out", step.copies_out),
        ("swap_in", step.copies_in),
        ("copies", step.block_copies),
    ] {
        if count > 0 {
            map.insert(name.to_owned(), count.into());
        }
    }
    let lacking = [("block", blocked.blocks), ("slot", blocked.slots), ("place", blocked.places)];
    let lacking: Vec<&str> = lacking.iter().filter(|(_, is)| *is).map(|(unit, _)| *unit).collect();
    if !lacking.is_empty() {
        map.insert("blocked".to_owned(), lacking.into());
    }
    map.into()
}

/// Bounds in seconds; one more count than bounds, the last for what is above all.
fn histogram(histogram: &Histogram) -> Value {
    json!({ "bounds": histogram.bounds(), "counts": histogram.counts() })
}

fn prefix(app: &App) -> Value {
    let engine = app.engine.stats();
    let (stats, tree) = (engine.scheduler, engine.tree);
    let misses: Map<String, Value> =
        app.metrics.misses().map(|(reason, count)| (reason.to_owned(), count.into())).collect();
    json!({
        "device": stats.cached_tokens - stats.host_cached_tokens,
        "host": stats.host_cached_tokens,
        "replayed": stats.matched_tokens - stats.cached_tokens,
        "miss": stats.admitted_tokens - stats.matched_tokens,
        "miss_reasons": misses,
        "checkpoints": { "device": tree.device.slots, "host": tree.host.slots },
        "tokens": tree.tokens,
        "evicted": tree.device.evicted,
        "preemptions": stats.parked + stats.recomputed,
        "swapped_bytes": stats.swapped_bytes,
    })
}

//! A line about the load every few seconds, while there is any.

use std::fmt;
use std::io::{Write, stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::app::Shared;
use crate::engine::{EngineStats, EngineView};

/// Tells the load on standard error until what it gives is dropped.
pub fn watch(app: &Shared) -> Option<Watch> {
    let every = app.config.status_every;
    if every.is_zero() || app.config.quiet {
        return None;
    }
    let app = Arc::downgrade(app);
    let task = tokio::spawn(async move {
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut before: Option<(EngineStats, Instant)> = None;
        loop {
            ticks.tick().await;
            let Some(app) = app.upgrade() else { return };
            let (now, at) = (app.engine.stats(), Instant::now());
            if let Some((earlier, since)) = before.replace((now, at))
                && let Some(status) =
                    Status::between((&earlier, &now), at - since, app.engine.view())
            {
                // Nobody may be left to read it.
                let _ = writeln!(stderr(), "{status}");
            }
        }
    });
    Some(Watch(task.abort_handle()))
}

/// Ends the lines when dropped.
#[derive(Debug)]
pub struct Watch(AbortHandle);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What was done between two looks, and what is where at the second.
#[derive(Debug)]
struct Status {
    /// Prompt tokens computed per second.
    prompt_rate: f64,
    /// Generated tokens per second.
    generation_rate: f64,
    /// Percent of the tokens of prompts that came onto the device that were not computed.
    prefix_hits: f64,
    now: EngineStats,
    view: EngineView,
}

impl Status {
    /// None when nothing was done and nothing is to do.
    fn between(
        (earlier, now): (&EngineStats, &EngineStats),
        time: Duration,
        view: EngineView,
    ) -> Option<Status> {
        let (before, after, place) = (&earlier.scheduler, &now.scheduler, now.occupancy);
        let at_work = place.running + place.waiting + place.parked + place.in_flight;
        if after.steps == before.steps && at_work == 0 {
            return None;
        }
        let part = |part: u64, whole: f64| if whole > 0.0 { part as f64 / whole } else { 0.0 };
        let seconds = time.as_secs_f64();
        let admitted = (after.admitted_tokens - before.admitted_tokens) as f64;
        Some(Status {
            prompt_rate: part(after.prompt_tokens - before.prompt_tokens, seconds),
            generation_rate: part(after.generated_tokens - before.generated_tokens, seconds),
            prefix_hits: part(after.cached_tokens - before.cached_tokens, admitted) * 100.0,
            now: *now,
            view,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, view) = (&self.now.occupancy, &self.view);
        let host = view.host.blocks.usage().max(view.host.slots.usage());
        write!(
            f,
            "prompt {:.1} tokens/s, generation {:.1} tokens/s, running {}, waiting {}, swapped {}, \
             device blocks {:.1} %, slots {:.1} %, host {:.1} %, prefix hits {:.1} %",
            self.prompt_rate,
            self.generation_rate,
            place.running,
            place.waiting,
            place.parked + place.in_flight,
            view.device.blocks.usage() * 100.0,
            view.device.slots.usage() * 100.0,
            host.max(view.host.packed.usage()) * 100.0,
            self.prefix_hits,
        )
    }
}

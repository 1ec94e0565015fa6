//! A line about the load every few seconds, while there is any.

use std::fmt;
use std::io::{Write, stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::app::Shared;
use crate::engine::{EngineStats, PoolStats};

/// Tells the load on standard error until what it gives is dropped.
pub fn watch(app: &Shared) -> Option<Watch> {
    let every = app.config.status_every;
    if every.is_zero() {
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
                && let Some(status) = Status::between(&earlier, &now, at - since)
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
    /// Prompt tokens per second, those that were not computed too.
    prompt_rate: f64,
    /// Generated tokens per second.
    generation_rate: f64,
    /// Percent of the prompt tokens that were not computed.
    prefix_hits: f64,
    now: EngineStats,
}

impl Status {
    /// None when nothing was done and nothing is to do.
    fn between(earlier: &EngineStats, now: &EngineStats, time: Duration) -> Option<Status> {
        let (before, after) = (&earlier.scheduler, &now.scheduler);
        let place = &now.occupancy;
        let at_work = place.running + place.waiting + place.parked + place.in_flight;
        if after.steps == before.steps && at_work == 0 {
            return None;
        }
        let seconds = time.as_secs_f64().max(1e-9);
        let cached = (after.cached_tokens - before.cached_tokens) as f64;
        let prompt = cached + (after.prompt_tokens - before.prompt_tokens) as f64;
        Some(Status {
            prompt_rate: prompt / seconds,
            generation_rate: (after.generated_tokens - before.generated_tokens) as f64 / seconds,
            prefix_hits: if prompt > 0.0 { cached / prompt * 100.0 } else { 0.0 },
            now: *now,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, now) = (&self.now.occupancy, &self.now);
        write!(
            f,
            "prompt {:.1} tokens/s, generation {:.1} tokens/s, running {}, waiting {}, swapped {}, \
             device {:.1} % (slots {}, blocks {}), host {:.1} %, prefix hits {:.1} %",
            self.prompt_rate,
            self.generation_rate,
            place.running,
            place.waiting,
            place.parked + place.in_flight,
            used(&now.device),
            now.device.slots.held,
            now.device.blocks.held,
            used(&now.host),
            self.prefix_hits,
        )
    }
}

/// Percent of the pages that hold something.
fn used(pool: &PoolStats) -> f64 {
    match pool.pages {
        0 => 0.0,
        pages => (pages - pool.free_pages) as f64 / pages as f64 * 100.0,
    }
}

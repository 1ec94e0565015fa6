//! A simulation as a Chrome trace, for <https://ui.perfetto.dev> and chrome://tracing: a track of
//! steps, one for each request with what it was doing, and counters of the pools.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::timeline::Timeline;
use crate::cli::CliError;
use crate::simulate::StepLine;

/// Processes of the trace: the engine's steps, and the requests.
const ENGINE: u32 = 1;
const REQUESTS: u32 = 2;

/// What is kept of a run for its trace.
#[derive(Debug, Default)]
pub struct ChromeTrace {
    events: Vec<Value>,
}

impl ChromeTrace {
    /// Takes a step.
    pub fn note(&mut self, line: &StepLine) {
        let name = match (line.prompt_tokens > 0, line.decodes > 0) {
            (true, true) => "mixed",
            (true, false) => "prefill",
            (false, true) => "decode",
            (false, false) => "copy",
        };
        let (ts, dur) = (microseconds(line.t), microseconds(line.seconds));
        self.events.push(json!({
            "ph": "X", "pid": ENGINE, "tid": 0, "name": name, "ts": ts, "dur": dur,
            "args": {
                "prompt_tokens": line.prompt_tokens, "decodes": line.decodes,
                "waiting": line.waiting, "parked": line.parked,
            },
        }));
        self.events.push(json!({
            "ph": "C", "pid": ENGINE, "tid": 0, "name": "device pages", "ts": ts,
            "args": {
                "slots": line.slot_pages, "blocks": line.block_pages, "free": line.free_pages,
            },
        }));
    }

    /// The trace, with the stays of the requests.
    fn with(mut self, timeline: &Timeline) -> Value {
        for (pid, name) in [(ENGINE, "engine"), (REQUESTS, "requests")] {
            let args = json!({ "name": name });
            self.events
                .push(json!({ "ph": "M", "pid": pid, "name": "process_name", "args": args }));
        }
        self.events.extend(timeline.stays.iter().map(|stay| {
            json!({
                "ph": "X", "pid": REQUESTS, "tid": stay.id, "name": stay.phase.as_str(),
                "ts": microseconds(stay.from), "dur": microseconds(stay.to - stay.from),
            })
        }));
        json!({ "traceEvents": self.events, "displayTimeUnit": "ms" })
    }

    /// Writes the trace.
    ///
    /// # Errors
    /// A file that cannot be written, by its name.
    pub fn write(self, timeline: &Timeline, path: &Path) -> Result<(), CliError> {
        let text = self.with(timeline).to_string();
        fs::write(path, text).map_err(|source| CliError::file(path, source))
    }
}

fn microseconds(seconds: f64) -> f64 {
    // Nanoseconds are the clock's: no more digits are meant.
    (seconds * 1e9).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::super::timeline::{Phase, Stay};
    use super::*;

    #[test]
    fn steps_requests_and_pools_have_tracks_of_their_own() {
        let mut trace = ChromeTrace::default();
        trace.note(&StepLine { t: 0.5, seconds: 0.25, decodes: 3, ..StepLine::default() });
        let stays = vec![Stay { id: 9, phase: Phase::Waiting, from: 0.1, to: 0.5 }];
        let trace = trace.with(&Timeline { stays, ..Timeline::default() });
        let events = trace["traceEvents"].as_array().expect("a list");
        let named = |name: &str| events.iter().find(|event| event["name"] == name).expect(name);
        assert_eq!(named("decode")["dur"], 250_000.0);
        assert_eq!((&named("waiting")["tid"], &named("waiting")["ts"]), (&json!(9), &json!(1e5)));
        assert_eq!(named("device pages")["ph"], "C");
        assert!(events.iter().all(|event| event["ph"].is_string() && event["pid"].is_u64()));
    }
}

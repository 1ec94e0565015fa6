//! What is kept of a simulation's steps for a chart over time, or of who was where.

use std::collections::HashMap;

use crate::simulate::{Happening, StepLine, Traffic, What};

/// Where a request is for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// In the queue.
    Waiting,
    /// Its prompt is computed.
    Prompt,
    /// It generates.
    Generating,
    /// It was pushed out: on the host, on its way there or back.
    PushedOut,
}

impl Phase {
    /// All of them.
    pub const ALL: [Phase; 4] =
        [Phase::Waiting, Phase::Prompt, Phase::Generating, Phase::PushedOut];

    /// The words for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Waiting => "waiting",
            Phase::Prompt => "prompt",
            Phase::Generating => "generating",
            Phase::PushedOut => "pushed out",
        }
    }
}

/// A request in a phase, from one second to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stay {
    /// The request.
    pub id: u64,
    /// The phase.
    pub phase: Phase,
    /// Its first second.
    pub from: f64,
    /// Its last one.
    pub to: f64,
}

/// A step as the charts over time have it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// When it began.
    pub t: f64,
    /// Sequences on the device, waiting and parked.
    pub sequences: [usize; 3],
    /// Pages of the device that hold slots, blocks and nothing.
    pub pages: [usize; 3],
    /// Requests that were pushed out.
    pub pushed_out: usize,
}

/// Tokens computed for a program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Service {
    /// At the end of which step.
    pub t: f64,
    /// For which program.
    pub program: usize,
    /// How many.
    pub tokens: usize,
}

/// The phase that a request is in, since when, and whether it has a first token.
#[derive(Debug, Clone, Copy)]
struct Open {
    phase: Phase,
    from: f64,
    has_token: bool,
}

/// What charts are drawn from.
#[derive(Debug, Default)]
pub struct Timeline {
    /// The steps.
    pub points: Vec<Point>,
    /// Who was where, in the order in which it ended.
    pub stays: Vec<Stay>,
    /// Seconds between two tokens of a request.
    pub gaps: Vec<f64>,
    /// Tokens computed for requests of programs.
    pub service: Vec<Service>,
}

impl Timeline {
    /// How many requests there were.
    pub fn requests(&self) -> usize {
        self.stays.iter().map(|stay| stay.id as usize + 1).max().unwrap_or(0)
    }
}

/// Follows a simulation from step to step.
#[derive(Debug, Default)]
pub struct Recorder {
    /// What is known so far.
    pub timeline: Timeline,
    /// The program of each request.
    programs: Vec<Option<usize>>,
    open: HashMap<u64, Open>,
    last_token: HashMap<u64, f64>,
}

impl Recorder {
    /// Of a traffic.
    pub fn new(traffic: &Traffic) -> Recorder {
        let programs = traffic.requests.iter().map(|request| request.program).collect();
        Recorder { programs, ..Recorder::default() }
    }

    /// Takes a step.
    pub fn note(&mut self, line: &StepLine) {
        let is_push = |event: &&Happening| matches!(event.what, What::SwapOut | What::Preempt);
        self.timeline.points.push(Point {
            t: line.t,
            sequences: [line.running, line.waiting, line.parked],
            pages: [line.slot_pages, line.block_pages, line.free_pages],
            pushed_out: line.events.iter().filter(is_push).count(),
        });
        line.events.iter().for_each(|event| self.happen(event));
        let now = line.t + line.seconds;
        for id in &line.tokens {
            if let Some(before) = self.last_token.insert(*id, now) {
                self.timeline.gaps.push(now - before);
            }
        }
        self.serve(line, now);
    }

    /// Who is served.
    fn serve(&mut self, line: &StepLine, now: f64) {
        let chunks = line.chunks.iter().map(|chunk| (chunk.id, chunk.tokens));
        for (id, tokens) in line.decode.iter().map(|id| (*id, 1)).chain(chunks) {
            if let Some(program) = self.programs[id as usize] {
                self.timeline.service.push(Service { t: now, program, tokens });
            }
        }
    }

    fn happen(&mut self, event: &Happening) {
        let before = self.open.get(&event.id).copied();
        let has_token = before.is_some_and(|open| open.has_token) || event.what == What::First;
        let next = match event.what {
            What::Arrive | What::Preempt => Some(Phase::Waiting),
            What::Admit | What::Resume | What::First if has_token => Some(Phase::Generating),
            What::Admit | What::Resume | What::First => Some(Phase::Prompt),
            What::SwapOut | What::Parked | What::SwapIn => Some(Phase::PushedOut),
            What::Finish => None,
            What::Restore | What::Checkpoint => return,
        };
        if let Some(Open { phase, from, .. }) = before
            && Some(phase) != next
            && from < event.t
        {
            self.timeline.stays.push(Stay { id: event.id, phase, from, to: event.t });
        }
        let Some(phase) = next else {
            self.open.remove(&event.id);
            self.last_token.remove(&event.id);
            return;
        };
        let from = before.filter(|open| open.phase == phase).map_or(event.t, |open| open.from);
        self.open.insert(event.id, Open { phase, from, has_token });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::Chunk;
    use crate::simulate::traffic::Arrival;

    fn traffic() -> Traffic {
        let request = |program| Arrival {
            at: std::time::Duration::ZERO,
            follows: None,
            prompt: Default::default(),
            answer: Default::default(),
            program: Some(program),
        };
        Traffic { name: String::new(), requests: vec![request(7), request(8)], open: None }
    }

    fn step(t: f64, happenings: &[(u64, What, f64)]) -> StepLine {
        let events =
            happenings.iter().map(|(id, what, t)| Happening { id: *id, what: *what, t: *t });
        StepLine { t, seconds: 1.0, events: events.collect(), ..StepLine::default() }
    }

    #[test]
    fn a_request_is_in_one_phase_at_a_time_from_its_arrival_to_its_end() {
        let mut recorder = Recorder::new(&traffic());
        use What::{Admit, Arrive, Finish, First, Parked, Preempt, Resume, SwapIn, SwapOut};
        recorder.note(&step(1.0, &[(0, Arrive, 0.5), (0, Admit, 1.0), (0, First, 2.0)]));
        recorder.note(&step(2.0, &[(0, SwapOut, 3.0), (0, Parked, 3.5), (0, SwapIn, 4.0)]));
        recorder.note(&step(4.0, &[(0, Resume, 5.0), (0, Preempt, 6.0), (0, Admit, 7.0)]));
        recorder.note(&step(7.0, &[(0, Finish, 8.0)]));
        let stays: Vec<_> =
            recorder.timeline.stays.iter().map(|s| (s.phase, s.from, s.to)).collect();
        let expected = [
            (Phase::Waiting, 0.5, 1.0),
            (Phase::Prompt, 1.0, 2.0),
            (Phase::Generating, 2.0, 3.0),
            (Phase::PushedOut, 3.0, 5.0),
            (Phase::Generating, 5.0, 6.0),
            (Phase::Waiting, 6.0, 7.0),
            (Phase::Generating, 7.0, 8.0),
        ];
        assert_eq!(stays, expected);
        assert_eq!(
            recorder.timeline.points.iter().map(|p| p.pushed_out).collect::<Vec<_>>(),
            [0, 1, 1, 0]
        );
    }

    #[test]
    fn gaps_and_service_are_counted_at_the_end_of_a_step() {
        let mut recorder = Recorder::new(&traffic());
        let chunks = vec![Chunk { id: 1, start: 64, tokens: 5 }];
        recorder.note(&StepLine { tokens: vec![0], chunks, ..step(1.0, &[]) });
        recorder.note(&StepLine { tokens: vec![0], decode: vec![0], ..step(4.0, &[]) });
        assert_eq!(recorder.timeline.gaps, [3.0]);
        let service = recorder.timeline.service.iter().map(|s| (s.t, s.program, s.tokens));
        assert_eq!(service.collect::<Vec<_>>(), [(2.0, 8, 5), (5.0, 7, 1)]);
    }
}

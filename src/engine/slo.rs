//! Steps held to a time: a model of what a step takes, fitted as they run, says how many tokens and
//! how many sequences the next ones may have (SEEDS.md F20, F21).
//!
//! A step's time is taken as linear in four figures of it: one, its rows of generated tokens, the
//! tokens these attend to, and its rows of prompts. Recursive least squares with forgetting follow
//! what the machine does. Until enough is known, and beyond twice what was tried, the model is not
//! trusted: prompts begin with one cell a step. What kept to the time is allowed again, and more in
//! proportion to the time that was left: a mixture of experts costs less for each row the more
//! there are, and a line through few rows would hold the engine there.

use std::time::Duration;

use crate::config::LEAST_MAX_NUM_BATCHED_TOKENS;
use crate::scheduler::{Caps, Form, StepPlan};

/// Figures of a step.
const FIGURES: usize = 4;

type Figures = [f64; FIGURES];

/// What brings the figures to about one.
const SCALE: Figures = [1.0, 1.0 / 32.0, 1.0 / 65_536.0, 1.0 / 256.0];

/// What a step's weight falls to with each step after it.
const FORGETTING: f64 = 0.995;

/// The most that the uncertainty of a weight may grow to while nothing is learned of it.
const MOST_VARIANCE: f64 = 1e6;

/// Steps before the model is trusted.
const LEAST_STEPS: u64 = 8;

/// Of the time that a step may take, the part that it is planned for: steps vary.
const PLANNED_PART: f64 = 0.9;

/// By how much what kept to the time grows at most.
const MOST_GROWTH: f64 = 1.25;

/// Holds steps to a time.
#[derive(Debug)]
pub(super) struct StepControl {
    /// The longest that a step should take, in seconds.
    target: f64,
    /// Seconds for each scaled figure.
    weights: Figures,
    /// Its uncertainty, up to a factor.
    variance: [Figures; FIGURES],
    steps: u64,
    /// Most rows of prompts in a step so far.
    most_prompt_rows: usize,
    /// Rows of prompts, and sequences that generate, that would have kept to the time by the last
    /// steps with such.
    kept_rows: f64,
    kept_decodes: f64,
}

/// What a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct StepLoad {
    decodes: usize,
    decode_context: usize,
    prompt_rows: usize,
}

impl StepLoad {
    pub fn of(plan: &StepPlan) -> StepLoad {
        let mut load = StepLoad::default();
        for span in &plan.spans {
            match span.form {
                Form::Step => {
                    load.decodes += span.rows;
                    load.decode_context += span.rows * (span.start + span.rows);
                }
                Form::Chunk => load.prompt_rows += span.rows,
            }
        }
        load
    }

    fn figures(&self) -> Figures {
        let figures =
            [1.0, self.decodes as f64, self.decode_context as f64, self.prompt_rows as f64];
        std::array::from_fn(|i| figures[i] * SCALE[i])
    }
}

impl StepControl {
    pub fn new(target: Duration) -> StepControl {
        let mut variance = [[0.0; FIGURES]; FIGURES];
        (0..FIGURES).for_each(|i| variance[i][i] = 1e3);
        let target = target.as_secs_f64();
        StepControl {
            target,
            weights: [0.0; FIGURES],
            variance,
            steps: 0,
            most_prompt_rows: 0,
            kept_rows: 0.0,
            kept_decodes: 0.0,
        }
    }

    /// Learns from a step that took so long; returns what holds for the next ones, while about as
    /// many sequences generate as did in this one.
    pub fn note(&mut self, load: StepLoad, time: Duration) -> Caps {
        if load != StepLoad::default() {
            self.learn(&load.figures(), time.as_secs_f64());
            self.most_prompt_rows = self.most_prompt_rows.max(load.prompt_rows);
            self.steps += 1;
            let part = PLANNED_PART * self.target / time.as_secs_f64().max(1e-9);
            match load.prompt_rows {
                0 => keep(&mut self.kept_decodes, load.decodes, part),
                rows => keep(&mut self.kept_rows, rows, part),
            }
        }
        self.caps(load)
    }

    /// A step of recursive least squares.
    fn learn(&mut self, x: &Figures, seconds: f64) {
        let v = &mut self.variance;
        let product: Figures = std::array::from_fn(|i| dot(&v[i], x));
        let gain = FORGETTING + dot(&product, x);
        let error = seconds - dot(&self.weights, x);
        for i in 0..FIGURES {
            self.weights[i] += product[i] / gain * error;
            for j in 0..FIGURES {
                v[i][j] = (v[i][j] - product[i] * product[j] / gain) / FORGETTING;
            }
        }
        if v.iter().flatten().any(|value| value.abs() > MOST_VARIANCE) {
            v.iter_mut().flatten().for_each(|value| *value *= FORGETTING);
        }
    }

    /// Seconds of a step, no figure of which makes it shorter.
    fn seconds(&self, load: StepLoad) -> f64 {
        let weights: Figures = std::array::from_fn(|i| self.weights[i].max(0.0));
        dot(&weights, &load.figures())
    }

    fn caps(&self, now: StepLoad) -> Caps {
        if self.steps < LEAST_STEPS {
            let rows = LEAST_MAX_NUM_BATCHED_TOKENS;
            return Caps { max_prompt_tokens: Some(rows), max_num_seqs: None };
        }
        let left = PLANNED_PART * self.target - self.seconds(StepLoad { prompt_rows: 0, ..now });
        let row = self.weights[3].max(0.0) * SCALE[3];
        let rows = if left <= 0.0 { 0.0 } else { left / row.max(1e-12) };
        let most = (2 * self.most_prompt_rows).max(LEAST_MAX_NUM_BATCHED_TOKENS);
        let rows = most.min(rows.max(self.kept_rows) as usize);
        Caps { max_prompt_tokens: Some(rows), max_num_seqs: self.most_decodes(now) }
    }

    /// How many sequences like those that generate now may do so: twice as many at most.
    fn most_decodes(&self, now: StepLoad) -> Option<usize> {
        if now.decodes == 0 {
            return None;
        }
        let fixed = self.weights[0].max(0.0) * SCALE[0];
        let each = (self.seconds(StepLoad { prompt_rows: 0, ..now }) - fixed) / now.decodes as f64;
        let left = (PLANNED_PART * self.target - fixed).max(0.0);
        let most = if each > 0.0 { left / each } else { f64::INFINITY };
        Some((most.max(self.kept_decodes) as usize).clamp(1, 2 * now.decodes))
    }
}

/// Notes that a step with so many took the planned time over `part`.
fn keep(kept: &mut f64, count: usize, part: f64) {
    let count = count as f64;
    *kept = match part {
        // A quarter more at most, and one more at least.
        part if part >= MOST_GROWTH => kept.max((count * MOST_GROWTH).ceil()),
        part if part >= 1.0 => kept.max(count * part),
        part => kept.min(count * part),
    };
}

fn dot(a: &Figures, b: &Figures) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine: 2 ms a step, 0.3 ms a sequence, 1 us a token attended to, 0.1 ms a prompt row.
    fn time(load: StepLoad) -> Duration {
        let seconds = 2e-3
            + 3e-4 * load.decodes as f64
            + 1e-6 * load.decode_context as f64
            + 1e-4 * load.prompt_rows as f64;
        Duration::from_secs_f64(seconds)
    }

    /// Steps of growing contexts, prompts of what is allowed in every third.
    fn run(control: &mut StepControl, decodes: usize, steps: usize) -> (Caps, StepLoad) {
        let mut caps = control.caps(StepLoad::default());
        let mut load = StepLoad::default();
        for step in 0..steps {
            let tokens = caps.max_prompt_tokens.expect("a cap");
            load = StepLoad {
                decodes,
                decode_context: decodes * (200 + step),
                prompt_rows: if step % 3 == 0 { tokens } else { 0 },
            };
            caps = control.note(load, time(load));
        }
        (caps, load)
    }

    #[test]
    fn a_step_gets_as_many_tokens_as_its_time_allows() {
        let mut control = StepControl::new(Duration::from_millis(50));
        let (caps, load) = run(&mut control, 8, 300);
        let fixed = time(StepLoad { prompt_rows: 0, ..load }).as_secs_f64();
        let rows = (0.9 * 0.050 - fixed) / 1e-4;
        let got = caps.max_prompt_tokens.expect("a cap") as f64;
        assert!((got / rows - 1.0).abs() < 0.05, "{got} rows, {rows} would do");
    }

    #[test]
    fn no_more_sequences_run_than_generate_in_time() {
        let mut control = StepControl::new(Duration::from_millis(10));
        for decodes in [4, 8, 12, 16] {
            run(&mut control, decodes, 60);
        }
        let (caps, load) = run(&mut control, 12, 60);
        let each = 3e-4 + 1e-6 * (load.decode_context / load.decodes) as f64;
        let most = (0.9 * 10e-3 - 2e-3) / each;
        let got = caps.max_num_seqs.expect("a cap") as f64;
        assert!((got / most - 1.0).abs() < 0.12, "{got} sequences, {most} would do");
    }

    #[test]
    fn prompts_begin_with_a_cell_a_step_and_never_more_than_double() {
        let mut control = StepControl::new(Duration::from_secs(10));
        let mut most = 0;
        for _ in 0..40 {
            let tokens = control.caps(StepLoad::default()).max_prompt_tokens.expect("a cap");
            assert!(tokens <= (2 * most).max(LEAST_MAX_NUM_BATCHED_TOKENS), "{tokens}, {most}");
            let load = StepLoad { prompt_rows: tokens.min(4096), ..StepLoad::default() };
            control.note(load, time(load));
            most = most.max(load.prompt_rows);
        }
        assert_eq!(most, 4096);
    }
}

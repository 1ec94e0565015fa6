//! The order of prefills (SEEDS.md section 3.4): a prompt of 8,192 first in the queue, 20 of 512
//! behind it, one at a time.

use super::super::formulas::*;
use super::Tolerance::{Exact, Relative};
use super::Verdict::{Agrees, Differs};
use super::inputs::*;
use super::mixed::full_prefill;
use super::{Claim, Worked};

/// TFLOP per ms waited, as lecture B gives it.
const LECTURE_K: f64 = 1.31;

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "C50",
        claim: "Mean time to the first token, first come, first served",
        lecture: Some("436 ms"),
        expected: &[436.29],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F22: mean of the sums of S_i / pi",
        work: || {
            Worked::by(|w| {
                let queue = Queue::new(w);
                w.note("the long one, then 20 short ones behind it");
                queue.mean(w, &queue.jobs().fcfs());
            })
        },
    },
    Claim {
        id: "C51",
        claim: "Mean time to the first token, shortest first",
        lecture: Some("169 ms"),
        expected: &[169.72],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F22: mean of the sums of S_i / pi",
        work: || {
            Worked::by(|w| {
                let queue = Queue::new(w);
                w.note("20 short ones, then the long one behind them");
                queue.mean(w, &queue.jobs().shortest_first());
            })
        },
    },
    Claim {
        id: "C52",
        claim: "First token of the long one, first come and shortest first; of the last short one, \
                first come",
        lecture: Some("294; 578; 578 ms"),
        expected: &[294.1, 578.5, 578.5],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F22",
        work: || {
            Worked::by(|w| {
                let queue = Queue::new(w);
                let fcfs = queue.jobs().done(&queue.jobs().fcfs());
                let shortest = queue.jobs().done(&queue.jobs().shortest_first());
                let [long, short] = queue.shown();
                w.result(&format!("{long} / 0.495"), fcfs[0], "ms");
                w.result(&format!("(20 x {short} + {long}) / 0.495"), shortest[0], "ms");
                w.result(&format!("({long} + 20 x {short}) / 0.495"), fcfs[20], "ms");
            })
        },
    },
    Claim {
        id: "C53",
        claim: "Ageing that answers the long one within 400 ms: k by the lecture's formula; first \
                token of the long one at k = 1.31; k from which on 7 short ones go first",
        lecture: Some("1.31 TFLOP/ms"),
        expected: &[1.307, 407.9, 1.393],
        tolerance: Relative(0.002),
        verdict: Differs { why: "at 1.31 eight short ones go first: 408 ms" },
        formula: "F23: (S_long - S_short) / waited",
        work: || Worked::by(ageing_constant),
    },
    Claim {
        id: "C54",
        claim: "Mean time to the first token when the long one goes after 7 short ones, over that \
                of shortest first; mean at k = 1.31",
        lecture: Some("324 ms"),
        expected: &[343.0, 2.02, 329.7],
        tolerance: Relative(0.002),
        verdict: Differs { why: "the lecture's sum is wrong" },
        formula: "F22, F23 with promotion",
        work: || {
            Worked::by(|w| {
                let queue = Queue::new(w);
                w.note("k = 1.4: 7 short, the long one, 13 short");
                let aged = queue.mean(w, &queue.jobs().promotion(1.4));
                let shortest = queue.jobs().mean_done(&queue.jobs().shortest_first());
                w.result(&format!("{aged:.2} / {shortest:.2}"), aged / shortest, "x");
                w.note("k = 1.31: 8 short, the long one, 12 short");
                queue.mean(w, &queue.jobs().promotion(LECTURE_K));
                for k in [1.0, 2.0] {
                    let mean = queue.jobs().mean_done(&queue.jobs().promotion(k));
                    w.step(&format!("k = {k}"), mean, "ms");
                }
            })
        },
    },
    Claim {
        id: "C55",
        claim: "Places that differ from shortest first when all arrive together and the key is \
                cost - k waited, k = 0.5, 1.31, 5",
        lecture: Some("implied to work"),
        expected: &[0.0, 0.0, 0.0],
        tolerance: Exact,
        verdict: Differs { why: "all wait equally long, so no k reorders anything" },
        formula: "F23: cost - k waited, waited alike for all",
        work: || Worked::by(ageing_of_equals),
    },
];

/// The jobs in TFLOP, time in ms.
struct Queue {
    costs: Vec<f64>,
}

impl Queue {
    fn new(w: &mut Worked) -> Queue {
        let (long, short) = (full_prefill(8192.0) / 1e12, full_prefill(512.0) / 1e12);
        w.note(&format!("S(8192) = {long:.3}, S(512) = {short:.4} TFLOP, pi = 0.495 TFLOP/ms"));
        let mut costs = vec![short; 21];
        costs[0] = long;
        Queue { costs }
    }

    fn jobs(&self) -> Jobs<'_> {
        Jobs { costs: &self.costs, rate: COMPUTE / 1e15 }
    }

    /// Costs of the long one and of a short one, for people.
    fn shown(&self) -> [String; 2] {
        [format!("{:.3}", self.costs[0]), format!("{:.4}", self.costs[1])]
    }

    /// F22: the mean, with how often each cost is in the sums of those behind it.
    fn mean(&self, w: &mut Worked, order: &[usize]) -> f64 {
        let [long, short] = self.shown();
        let before = order.iter().position(|job| *job == 0).expect("every job is served");
        let text =
            format!("(({} x {long} + {} x {short}) / 0.495) / 21", 21 - before, 210 + before);
        w.result(&text, self.jobs().mean_done(order), "ms")
    }
}

pub(super) fn ageing_constant(w: &mut Worked) {
    let queue = Queue::new(w);
    let (long, short, rate) = (queue.costs[0], queue.costs[1], queue.jobs().rate);
    let [l, s] = queue.shown();
    let text = format!("({l} - {s}) / (400 - {l} / 0.495)");
    w.result(&text, (long - short) / (400.0 - long / rate), "TFLOP/ms");
    let order = queue.jobs().promotion(LECTURE_K);
    let text = format!("k = 1.31, 8 short ones first: (8 x {s} + {l}) / 0.495");
    w.result(&text, queue.jobs().done(&order)[0], "ms");
    let text = format!("({l} - {s}) / (7 x {s} / 0.495)");
    let least = w.result(&text, promotion_threshold(long, short, 7, rate), "TFLOP/ms");
    let order = queue.jobs().promotion(least * 1.0001);
    w.step("from there on its first token", queue.jobs().done(&order)[0], "ms");
}

pub(super) fn ageing_of_equals(w: &mut Worked) {
    let queue = Queue::new(w);
    let shortest = queue.jobs().shortest_first();
    let ahead = queue.costs[0] - queue.costs[1];
    for k in [0.5, LECTURE_K, 5.0] {
        let aged = queue.jobs().linear_ageing(k);
        let differ = aged.iter().zip(&shortest).filter(|(a, b)| a != b).count();
        let [l, s] = queue.shown();
        let text = format!("({l} - {k} t) - ({s} - {k} t) is {ahead:.2} at any t; places changed");
        w.result(&text, differ as f64, "places");
    }
}

/// The mean when the long one goes after 7 short ones.
pub(super) fn aged_mean(w: &mut Worked) {
    let queue = Queue::new(w);
    queue.mean(w, &queue.jobs().promotion(1.4));
}

/// How many go before the long one at the lecture's k, and what becomes of it.
pub(super) fn shorts_first(w: &mut Worked) {
    let queue = Queue::new(w);
    let order = queue.jobs().promotion(LECTURE_K);
    let place = order.iter().position(|job| *job == 0).expect("every job is served");
    let [l, s] = queue.shown();
    w.result(&format!("ceil(({l} - {s}) / (1.31 x {s} / 0.495))"), place as f64, "");
    let text = format!("({place} x {s} + {l}) / 0.495");
    w.result(&text, queue.jobs().done(&order)[0], "ms");
}

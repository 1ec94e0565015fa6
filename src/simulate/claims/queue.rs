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
        claim: "Mean time to the first token, first come first served",
        lecture: Some("436 ms"),
        expected: &[436.29],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F22: mean of the sums of S_i / pi",
        work: || {
            Worked::by(|w| {
                let queue = Queue::new(w);
                w.note("294.1, then 20 of 14.22 behind it");
                w.result("mean", queue.mean(&queue.jobs().fcfs()), "ms");
            })
        },
    },
    Claim {
        id: "C51",
        claim: "The same, shortest first",
        lecture: Some("169 ms"),
        expected: &[169.72],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F22: mean of the sums of S_i / pi",
        work: || {
            Worked::by(|w| {
                let queue = Queue::new(w);
                w.note("20 of 14.22, then 294.1 behind them");
                w.result("mean", queue.mean(&queue.jobs().shortest_first()), "ms");
            })
        },
    },
    Claim {
        id: "C52",
        claim: "The long one first come and shortest first, and the last short one first come",
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
                w.result("S(8192) / pi", fcfs[0], "ms");
                w.result("20 S(512) / pi + S(8192) / pi", shortest[0], "ms");
                w.result("the last short one", fcfs[20], "ms");
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
        claim: "Mean when the long one goes after 7 short ones, over that of shortest first; mean \
                at k = 1.31",
        lecture: Some("324 ms"),
        expected: &[343.0, 2.02, 329.7],
        tolerance: Relative(0.002),
        verdict: Differs { why: "the lecture's sum is wrong" },
        formula: "F22, F23 with promotion",
        work: || {
            Worked::by(|w| {
                let queue = Queue::new(w);
                let mean = |k| queue.mean(&queue.jobs().promotion(k));
                let aged = w.result("k = 1.4: 7 short, the long one, 13 short", mean(1.4), "ms");
                let shortest = queue.mean(&queue.jobs().shortest_first());
                w.result(&format!("over {shortest:.1} ms"), aged / shortest, "x");
                w.result("k = 1.31: 8 short ones first", mean(LECTURE_K), "ms");
                for k in [1.0, 2.0] {
                    w.step(&format!("k = {k}"), mean(k), "ms");
                }
            })
        },
    },
    Claim {
        id: "C55",
        claim: "Places that differ from shortest first when all arrive together and the key is \
                cost - k waited, k = 0.5, 1.31, 5",
        lecture: Some("ageing lets the long one overtake"),
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

    fn mean(&self, order: &[usize]) -> f64 {
        self.jobs().mean_done(order)
    }
}

pub(super) fn ageing_constant(w: &mut Worked) {
    let queue = Queue::new(w);
    let (long, short, rate) = (queue.costs[0], queue.costs[1], queue.jobs().rate);
    let text = "(S(8192) - S(512)) / (400 - S(8192) / pi)";
    w.result(text, (long - short) / (400.0 - long / rate), "TFLOP/ms");
    let order = queue.jobs().promotion(LECTURE_K);
    w.result("k = 1.31: its first token", queue.jobs().done(&order)[0], "ms");
    let text = "(S(8192) - S(512)) / (7 S(512) / pi)";
    let least = w.result(text, promotion_threshold(long, short, 7, rate), "TFLOP/ms");
    let order = queue.jobs().promotion(least * 1.0001);
    w.step("from there on its first token", queue.jobs().done(&order)[0], "ms");
}

pub(super) fn ageing_of_equals(w: &mut Worked) {
    let queue = Queue::new(w);
    let shortest = queue.jobs().shortest_first();
    for k in [0.5, LECTURE_K, 5.0] {
        let aged = queue.jobs().linear_ageing(k);
        let differ = aged.iter().zip(&shortest).filter(|(a, b)| a != b).count();
        w.result(&format!("k = {k}"), differ as f64, "places");
    }
}

/// The mean when the long one goes after 7 short ones.
pub(super) fn aged_mean(w: &mut Worked) {
    let queue = Queue::new(w);
    w.result("mean at k = 1.4", queue.mean(&queue.jobs().promotion(1.4)), "ms");
}

/// How many go before the long one at the lecture's k, and what becomes of it.
pub(super) fn shorts_first(w: &mut Worked) {
    let queue = Queue::new(w);
    let order = queue.jobs().promotion(LECTURE_K);
    let place = order.iter().position(|job| *job == 0).expect("every job is served");
    w.result("short ones before it", place as f64, "");
    w.result("its first token", queue.jobs().done(&order)[0], "ms");
}

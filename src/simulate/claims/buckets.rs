//! Graph buckets (SEEDS.md section 3.6): 70B, context 4,096, batches uniform on 1 to 256.

use super::super::formulas::*;
use super::Tolerance::Relative;
use super::Verdict::{Added, Agrees, Differs};
use super::batching::step_seconds;
use super::inputs::*;
use super::{Claim, Worked};

const LARGEST: usize = 256;
const CONTEXT_OF_BUCKETS: f64 = 4096.0;

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "B1",
        claim: "Time of a row's context; of the step of 256; of the mean step",
        lecture: Some("167 ms"),
        expected: &[460.3, 167.0, 108.3],
        tolerance: Relative(0.001),
        verdict: Agrees,
        formula: "F18, F6: L kv / (beta MBU); t(256); t(128.5)",
        work: || {
            Worked::by(|w| {
                w.result("4096 x 320e3 / 2.8475e12", row_seconds() * 1e6, "us");
                w.result("(140e9 + 256 x 4096 x 320e3) / 2.8475e12", seconds(256.0) * 1e3, "ms");
                w.result("(140e9 + 128.5 x 4096 x 320e3) / 2.8475e12", seconds(128.5) * 1e3, "ms");
            })
        },
    },
    Claim {
        id: "B1-every",
        claim: "Buckets of every batch: graphs; mean and worst padding; waste in ms, of the \
                largest and of the mean step in %",
        lecture: Some("256; 0; 0 ms; 0 %"),
        expected: &[256.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F18: E[padding] L kv / (beta MBU)",
        work: || waste(&(1..=LARGEST).collect::<Vec<_>>()),
    },
    Claim {
        id: "B1-8",
        claim: "Buckets of every 8: graphs; mean and worst padding; waste in ms, of the largest \
                and of the mean step in %",
        lecture: Some("32; 3.5; 1.6 ms; 1.0 %"),
        expected: &[32.0, 3.5, 7.0, 1.611, 0.96, 1.49],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F18: E[padding] = (g - 1) / 2",
        work: || waste(&stride(8)),
    },
    Claim {
        id: "B1-16",
        claim: "Buckets of every 16: graphs; mean and worst padding; waste in ms, of the largest \
                and of the mean step in %",
        lecture: Some("16; 7.5; 3.5 ms; 2.1 %"),
        expected: &[16.0, 7.5, 15.0, 3.452, 2.07, 3.19],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F18: E[padding] = (g - 1) / 2",
        work: || waste(&stride(16)),
    },
    Claim {
        id: "B1-pow2",
        claim: "Buckets of powers of 2: graphs; mean and worst padding; waste in ms, of the \
                largest and of the mean step in %",
        lecture: Some("9; 42.2; 19.4 ms; 12 %"),
        expected: &[9.0, 10_795.0 / 256.0, 127.0, 19.41, 11.6, 17.9],
        tolerance: Relative(0.01),
        verdict: Differs { why: "12 % is of the largest step; of the mean one it is 18 %" },
        formula: "F18: E[padding] L kv / (beta MBU)",
        work: || waste(&(0..=8).map(|power| 1 << power).collect::<Vec<_>>()),
    },
    Claim {
        id: "B1-mixed",
        claim: "Buckets of 1, 2, 4 and every 8: graphs; mean and worst padding; waste in ms, of \
                the largest and of the mean step in %",
        lecture: None,
        expected: &[35.0, 875.0 / 256.0, 7.0, 1.573, 0.94, 1.45],
        tolerance: Relative(0.01),
        verdict: Added,
        formula: "F18: E[padding] L kv / (beta MBU)",
        work: || waste(&[vec![1, 2, 4], stride(8)].concat()),
    },
];

fn stride(step: usize) -> Vec<usize> {
    (step..=LARGEST).step_by(step).collect()
}

fn seconds(batch: f64) -> f64 {
    step_seconds(&model("70b-gqa"), batch, CONTEXT_OF_BUCKETS, BANDWIDTH_A)
}

/// Seconds to read the context of one row: what the lecture charges a padding row.
fn row_seconds() -> f64 {
    CONTEXT_OF_BUCKETS * model("70b-gqa").kv_bytes / BANDWIDTH_A
}

fn waste(buckets: &[usize]) -> Worked {
    Worked::by(|w| {
        w.result("graphs", buckets.len() as f64, "");
        let (mean, worst) = mean_padding(LARGEST, buckets);
        let text = format!("mean padding, {} / 256", mean * LARGEST as f64);
        w.result(&text, mean, "rows");
        w.result("worst", worst as f64, "rows");
        let wasted = mean * row_seconds();
        w.result(&format!("{mean:.3} x 460.3 us"), wasted * 1e3, "ms");
        w.result("over the step of 256", wasted / seconds(256.0) * 100.0, "%");
        let middle = (LARGEST + 1) as f64 / 2.0;
        w.result("over the mean step", wasted / seconds(middle) * 100.0, "%");
    })
}

//! What the lectures reckon with (SEEDS.md section 1).

use super::super::hardware::HardwareProfile;
use super::super::model::ModelProfile;

/// Peak bf16 arithmetic of the H100 by its data sheet, FLOP/s.
pub const H100_FLOPS: f64 = 989e12;
/// The same as lecture A rounds it.
pub const H100_FLOPS_A: f64 = 990e12;
/// What both lectures reach of it, FLOP/s.
pub const COMPUTE: f64 = 495e12;
/// Peak memory bandwidth of the H100, B/s; lecture B reaches all of it.
pub const BANDWIDTH: f64 = 3.35e12;
/// What lecture A reaches of it, B/s.
pub const BANDWIDTH_A: f64 = 2.8475e12;
/// The link between device and host, B/s each way.
pub const LINK: f64 = 64e9;
/// Decodes and their context in the worked examples of lecture A.
pub const BATCH: f64 = 32.0;
/// Tokens of context of each.
pub const CONTEXT: f64 = 2048.0;
/// Tokens of context in the throughput table of lecture B.
pub const CONTEXT_B: f64 = 640.0;
/// Mean output length of lecture A, tokens.
pub const MEAN: f64 = 128.0;

/// The hardware profile of that name.
pub fn hardware(name: &str) -> HardwareProfile {
    HardwareProfile::preset(name).expect("claims name presets that exist")
}

/// The model profile of that name.
pub fn model(name: &str) -> ModelProfile {
    ModelProfile::preset(name).expect("claims name presets that exist")
}

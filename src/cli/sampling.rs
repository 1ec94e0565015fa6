//! How an answer's tokens are chosen, for the commands that give one.

use clap::Args;

use crate::request::{InvalidParam, SamplingParams};

/// How each token is chosen, and what ends the answer.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Randomness of the choice; 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.0, value_name = "T", allow_negative_numbers = true)]
    pub temperature: f32,
    /// Choose among the likeliest tokens that together have this probability.
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    pub top_p: f32,
    /// Choose among this many of the likeliest tokens; 0 for all.
    #[arg(long, default_value_t = 0, value_name = "K", allow_negative_numbers = true)]
    pub top_k: usize,
    /// Choose among tokens with at least this fraction of the likeliest one's probability.
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    pub min_p: f32,
    /// Seed of the choice: the same seed gives the same answer; default: a random one.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Stop before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

impl SamplingArgs {
    /// What a request says of it.
    pub fn params(&self) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed,
            ..SamplingParams::default()
        }
    }
}

/// A parameter's error with the name of its flag: `top_p is 2` becomes `--top-p is 2`.
pub fn flag_spelling(error: &InvalidParam) -> String {
    let flag = match error.field {
        "prompt" => "the prompt".to_owned(),
        field => format!("--{}", field.replace('_', "-")),
    };
    format!("{flag} is {}, allowed: {}", error.value, error.allowed)
}

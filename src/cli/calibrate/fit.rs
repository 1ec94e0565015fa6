//! From step times to a profile by which [`step_cost`](crate::simulate::step_cost) gives them back.
//!
//! ```text
//! step     = overhead + products + decodes + chunks                       (phased)
//! products = max(weights / bandwidth, 2 P rows / (peak * gemm_efficiency(rows)))
//! decodes  = max((kv and states) / bandwidth, attention / (peak * decode_attention_efficiency))
//! chunks   = max((kv and states) / bandwidth, attention / (peak * chunk_attention_efficiency))
//! ```
//!
//! What is not a product (convolutions, states, norms, sampling) goes with the rows, so it is in
//! `gemm_efficiency`: few rows are taken to be generated tokens, a cell and more of them a prompt.

use crate::cli::bench::line::Line;
use crate::simulate::ModelProfile;

/// A step that was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decode {
    /// Sequences that generated a token each.
    pub sequences: usize,
    /// Their contexts together, in tokens.
    pub context: f64,
    /// How long it took.
    pub seconds: f64,
}

/// A step that computed a piece of one prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chunk {
    /// Tokens before it.
    pub start: usize,
    /// Its tokens.
    pub rows: usize,
    /// How long it took.
    pub seconds: f64,
}

/// What is known of a machine with a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples {
    /// Bandwidth of reads of much memory, B/s.
    pub stream: f64,
    /// The best rate of a product, FLOP/s.
    pub product_flops: f64,
    /// Seconds of a step that are not the executor's.
    pub overhead: f64,
    /// Batches of short contexts, sequences ascending, fewer than rows of any chunk.
    pub decodes: Vec<Decode>,
    /// One sequence of a long context.
    pub long_decode: Decode,
    /// Prompts of one step, rows ascending.
    pub prompts: Vec<Chunk>,
    /// The steps of a long prompt, all of as many rows.
    pub chunks: Vec<Chunk>,
}

/// The fitted parts of a profile.
#[derive(Debug, Clone, PartialEq)]
pub struct Fitted {
    /// Bandwidth: that of long reads, or more where weights lie in a cache. B/s.
    pub bandwidth: f64,
    /// Arithmetic: the best of products and attention, FLOP/s.
    pub flops: f64,
    /// Share of it by rows.
    pub gemm_efficiency: Vec<(usize, f64)>,
    /// Share of it that attention of prompts reaches.
    pub chunk_attention: f64,
    /// Share of it that attention of generated tokens reaches.
    pub decode_attention: f64,
    /// Prompt tokens a second, but for attention, in steps as long as those of the long prompt.
    pub prefill_tokens_per_second: f64,
    /// Seconds of attention a pair.
    pub pair_seconds: f64,
}

/// The profile's parts from `samples` of a model.
pub fn fit(model: &ModelProfile, samples: &Samples) -> Fitted {
    let net = |seconds: f64| (seconds - samples.overhead).max(f64::MIN_POSITIVE);
    let (first_chunk, per_pair) = line(&samples.chunks);
    let decodes = samples.decodes.iter().chain([&samples.long_decode]);
    let read = decodes.map(|step| {
        let bytes = model.weight_bytes(step.sequences as f64) + decode_bytes(model, step);
        bytes / net(step.seconds)
    });
    let chunks = samples.prompts.iter().chain(&samples.chunks).map(|chunk| {
        let bytes = model.weight_bytes(chunk.rows as f64) + chunk_bytes(model, chunk);
        bytes / net(chunk.seconds)
    });
    let bandwidth = read.chain(chunks).fold(samples.stream, f64::max);
    // Rates of attention, FLOP/s; none where it takes no time that can be told from noise.
    let chunk_rate = (per_pair > 0.0).then(|| model.attention / per_pair);
    let decode_rate = decode_rate(model, samples, bandwidth);
    let chunk_attention = |chunk: &Chunk| {
        let computed = chunk_rate.map_or(0.0, |rate| chunk_flops(model, chunk) / rate);
        computed.max(chunk_bytes(model, chunk) / bandwidth)
    };
    let decode_attention = |step: &Decode| {
        let computed = decode_rate.map_or(0.0, |rate| model.attention * step.context / rate);
        computed.max(decode_bytes(model, step) / bandwidth)
    };
    // Seconds of the products, by rows.
    let mut products: Vec<(usize, f64)> = Vec::new();
    for step in &samples.decodes {
        products.push((step.sequences, net(step.seconds) - decode_attention(step)));
    }
    for chunk in &samples.prompts {
        products.push((chunk.rows, net(chunk.seconds) - chunk_attention(chunk)));
    }
    if let Some(chunk) = samples.chunks.first() {
        let first = Chunk { start: 0, seconds: first_chunk, ..*chunk };
        products.retain(|(rows, _)| *rows < chunk.rows);
        products.push((chunk.rows, net(first.seconds) - chunk_attention(&first)));
    }
    products.retain(|(_, seconds)| *seconds > 0.0);
    let rate = |(rows, seconds): &(usize, f64)| 2.0 * model.active_params * *rows as f64 / seconds;
    let rates = products.iter().map(rate).chain(chunk_rate).chain(decode_rate);
    let flops = rates.fold(samples.product_flops, f64::max);
    let rows = samples.chunks.first().map_or(1, |chunk| chunk.rows) as f64;
    let token_seconds = (first_chunk - rows * rows / 2.0 * per_pair) / rows;
    Fitted {
        bandwidth,
        flops,
        gemm_efficiency: products.iter().map(|point| (point.0, rate(point) / flops)).collect(),
        chunk_attention: chunk_rate.map_or(1.0, |rate| rate / flops),
        decode_attention: decode_rate.map_or(1.0, |rate| rate / flops),
        prefill_tokens_per_second: 1.0 / token_seconds.max(first_chunk / rows / 100.0),
        pair_seconds: per_pair,
    }
}

fn decode_bytes(model: &ModelProfile, step: &Decode) -> f64 {
    step.context * model.kv_per_token() + 2.0 * model.state() * step.sequences as f64
}

fn chunk_bytes(model: &ModelProfile, chunk: &Chunk) -> f64 {
    (chunk.start + chunk.rows) as f64 * model.kv_per_token() + 2.0 * model.state()
}

fn chunk_flops(model: &ModelProfile, chunk: &Chunk) -> f64 {
    model.chunk_attention(chunk.start, chunk.rows)
}

/// Seconds of the first chunk of a long prompt, and of each pair of a token and one before it:
/// the straight line through the chunks that is off the least, and never one that falls.
fn line(chunks: &[Chunk]) -> (f64, f64) {
    let points: Vec<(f64, f64)> =
        chunks.iter().map(|chunk| (chunk.start as f64, chunk.seconds)).collect();
    let line = Line::through(&points).rising();
    let rows = chunks.first().map_or(1, |chunk| chunk.rows) as f64;
    (line.at(0.0), line.slope / rows)
}

/// The rate of attention of generated tokens by which a sequence of a long context takes as much
/// longer than one of a short context as it did. None where reading the context takes that long.
fn decode_rate(model: &ModelProfile, samples: &Samples, bandwidth: f64) -> Option<f64> {
    let long = &samples.long_decode;
    let short = samples.decodes.iter().find(|step| step.sequences == long.sequences)?;
    let longer = long.seconds - short.seconds;
    if longer <= 0.0 {
        return None;
    }
    let read = decode_bytes(model, short) / bandwidth;
    let whole = model.attention * long.context / (read + longer);
    // With a short context, does attention take longer than what it reads?
    let rate = match model.attention * short.context / whole <= read {
        true => whole,
        false => model.attention * (long.context - short.context) / longer,
    };
    let bytes = decode_bytes(model, long) / bandwidth;
    (model.attention * long.context / rate > bytes).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{HardwareProfile, StepModel, StepWork, step_cost};

    /// A machine that a fit should find: products of few rows are slow, attention is slower.
    fn machine() -> HardwareProfile {
        HardwareProfile {
            memory_bandwidth: 20e9,
            mbu: 1.0,
            flops: 400e9,
            mfu: 1.0,
            gemm_efficiency: vec![(1, 0.2), (8, 0.5), (64, 0.7), (512, 0.9)],
            chunk_attention_efficiency: 0.25,
            decode_attention_efficiency: 0.02,
            step_overhead: 50e-6,
            ..HardwareProfile::preset("h100").expect("a preset")
        }
    }

    fn seconds(hardware: &HardwareProfile, decode: (usize, f64), chunks: &[(usize, usize)]) -> f64 {
        let model = ModelProfile::preset("kimi-linear").expect("a preset");
        let (decodes, decode_context) = decode;
        let work = StepWork { decodes, decode_context, chunks, dead_context: 0.0 };
        step_cost(StepModel::Phased, hardware, &model, &work).seconds
    }

    fn samples(hardware: &HardwareProfile) -> Samples {
        let decode = |sequences: usize, context: f64| Decode {
            sequences,
            context,
            seconds: seconds(hardware, (sequences, context), &[]),
        };
        let chunk = |start: usize, rows: usize| Chunk {
            start,
            rows,
            seconds: seconds(hardware, (0, 0.0), &[(start, rows)]),
        };
        Samples {
            stream: 20e9,
            product_flops: 360e9,
            overhead: hardware.step_overhead,
            decodes: [1, 2, 4, 8, 16, 32].map(|n| decode(n, 70.0 * n as f64)).to_vec(),
            long_decode: decode(1, 4100.0),
            prompts: [64, 128, 256].map(|rows| chunk(0, rows)).to_vec(),
            chunks: (0..8).map(|i| chunk(512 * i, 512)).collect(),
        }
    }

    #[test]
    fn a_fit_gives_back_the_steps_it_was_made_from_and_those_between() {
        let hardware = machine();
        let model = ModelProfile::preset("kimi-linear").expect("a preset");
        let fitted = fit(&model, &samples(&hardware));
        let found = HardwareProfile {
            memory_bandwidth: fitted.bandwidth,
            flops: fitted.flops,
            gemm_efficiency: fitted.gemm_efficiency,
            chunk_attention_efficiency: fitted.chunk_attention,
            decode_attention_efficiency: fitted.decode_attention,
            ..hardware.clone()
        };
        found.check("found").unwrap_or_else(|error| panic!("{error}"));
        for (decode, chunks) in [
            ((1, 70.0), vec![]),
            ((32, 2240.0), vec![]),
            ((6, 6000.0), vec![]),
            ((0, 0.0), vec![(0, 64)]),
            ((0, 0.0), vec![(3584, 512)]),
            ((8, 4000.0), vec![(1024, 448)]),
        ] {
            let (told, wanted) =
                (seconds(&found, decode, &chunks), seconds(&hardware, decode, &chunks));
            let off = told / wanted - 1.0;
            assert!(off.abs() < 0.05, "{decode:?} {chunks:?}: {told} for {wanted}");
        }
        let pair = model.attention / (400e9 * 0.25);
        assert!((fitted.pair_seconds / pair - 1.0).abs() < 0.01);
    }

    /// Weights that lie in a cache are read faster than memory, and noise may make a long context
    /// the faster one: the profile stays one that can be used.
    #[test]
    fn steps_that_are_too_fast_give_a_sound_profile() {
        let model = ModelProfile::preset("kimi-linear").expect("a preset");
        let mut samples = samples(&machine());
        samples.stream = 1e9;
        samples.long_decode.seconds = samples.decodes[0].seconds / 2.0;
        samples.chunks.reverse();
        for (chunk, start) in samples.chunks.iter_mut().zip((0..8).map(|i| 512 * i)) {
            chunk.start = start;
        }
        let fitted = fit(&model, &samples);
        assert!(fitted.bandwidth > 10e9 && fitted.pair_seconds == 0.0);
        let found = HardwareProfile {
            memory_bandwidth: fitted.bandwidth,
            flops: fitted.flops,
            gemm_efficiency: fitted.gemm_efficiency,
            chunk_attention_efficiency: fitted.chunk_attention,
            decode_attention_efficiency: fitted.decode_attention,
            ..machine()
        };
        found.check("found").unwrap_or_else(|error| panic!("{error}"));
        assert!(fitted.prefill_tokens_per_second.is_finite());
    }
}

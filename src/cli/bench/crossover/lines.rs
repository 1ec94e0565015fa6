//! The model lines: what swap and recomputation take by a handful of constants, and where they
//! cross (SEEDS.md F12, F13, F14, F16, F17).

use serde::Serialize;

use crate::simulate::{HardwareProfile, ModelProfile};

/// Constants of the lines. Field names are the keys of the JSON form.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lines {
    /// V: bytes of a sequence's slot.
    pub slot_bytes: f64,
    /// kv: bytes of a token in the blocks.
    pub kv_bytes_per_token: f64,
    /// From device to host, B/s.
    pub link_out_bytes_per_second: f64,
    /// From host to device, B/s.
    pub link_in_bytes_per_second: f64,
    /// Before the first byte of either way moves.
    pub link_latency_seconds: f64,
    /// 1/R: a token computed, but for attention.
    pub token_seconds: f64,
    /// Attention of a token to one before it.
    pub pair_seconds: f64,
}

impl Lines {
    /// The lines of a model on some hardware: R is the model's own rate where it has one, attention
    /// included, or else what its FLOPs take.
    pub fn modelled(hardware: &HardwareProfile, model: &ModelProfile) -> Lines {
        let (token_seconds, pair_seconds) = hardware.prefill_seconds(model);
        Lines {
            slot_bytes: model.state(),
            kv_bytes_per_token: model.kv_per_token(),
            link_out_bytes_per_second: hardware.link_out,
            link_in_bytes_per_second: hardware.link_in,
            link_latency_seconds: hardware.link_latency,
            token_seconds,
            pair_seconds,
        }
    }

    /// Bytes that a sequence of `tokens` tokens holds: V + L kv.
    pub fn held_bytes(&self, tokens: f64) -> f64 {
        self.slot_bytes + tokens * self.kv_bytes_per_token
    }

    /// Seconds to copy a sequence out.
    pub fn out_seconds(&self, tokens: f64) -> f64 {
        self.link_latency_seconds + self.held_bytes(tokens) / self.link_out_bytes_per_second
    }

    /// Seconds to copy a sequence in.
    pub fn in_seconds(&self, tokens: f64) -> f64 {
        self.link_latency_seconds + self.held_bytes(tokens) / self.link_in_bytes_per_second
    }

    /// Seconds to swap a sequence out and in (F13, F16).
    pub fn swap_seconds(&self, tokens: f64) -> f64 {
        self.out_seconds(tokens) + self.in_seconds(tokens)
    }

    /// Seconds to compute a sequence from its first token (F12; F16 where pairs cost nothing).
    pub fn recompute_seconds(&self, tokens: f64) -> f64 {
        self.token_seconds * tokens + self.pair_seconds * tokens * tokens / 2.0
    }

    /// Seconds to copy the checkpoint at token `from` in and to compute what follows it (F17).
    pub fn restore_seconds(&self, from: f64, tokens: f64) -> f64 {
        self.in_seconds(from) + self.recompute_seconds(tokens) - self.recompute_seconds(from)
    }

    /// The lines without the cost of attention, as F16 has them.
    pub fn linear(self) -> Lines {
        Lines { pair_seconds: 0.0, ..self }
    }

    /// L*: the length below which recomputing takes less than swapping; 0 where swap wins at every
    /// length, none where recomputation does.
    ///
    /// The one positive root of `c L^2 + (a - s) L - S = 0` with `c` half the cost of a pair, `a`
    /// of a token, `s` the link's of a token both ways and `S` its of the slot. It is F14 where
    /// `S = 0` and F16 where `c = 0`.
    pub fn crossover(&self) -> Option<f64> {
        let ways = 1.0 / self.link_out_bytes_per_second + 1.0 / self.link_in_bytes_per_second;
        let square = self.pair_seconds / 2.0;
        let linear = self.token_seconds - self.kv_bytes_per_token * ways;
        let fixed = self.slot_bytes * ways + 2.0 * self.link_latency_seconds;
        let root = (linear * linear + 4.0 * square * fixed).sqrt();
        // Of the two forms of the root the one that subtracts nothing.
        let tokens = match linear > 0.0 {
            true => 2.0 * fixed / (linear + root),
            false => (root - linear) / (2.0 * square),
        };
        tokens.is_finite().then_some(tokens)
    }
}

/// The costs of a token and of a pair, `(a, p)`, that come nearest to `seconds` of prompts:
/// `(tokens, seconds)`, by least squares of the relative error; neither is below 0.
///
/// # Panics
/// When there is no prompt.
pub fn fit(prompts: &[(usize, f64)]) -> (f64, f64) {
    assert!(!prompts.is_empty(), "a rate is of something");
    // t = a L + p L^2 / 2, each equation divided by t.
    let rows = prompts.iter().map(|(tokens, seconds)| {
        let tokens = *tokens as f64;
        (tokens / seconds, tokens * tokens / 2.0 / seconds)
    });
    let (mut xx, mut xy, mut yy, mut x, mut y) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (token, pair) in rows {
        xx += token * token;
        xy += token * pair;
        yy += pair * pair;
        x += token;
        y += pair;
    }
    let determinant = xx * yy - xy * xy;
    if determinant > 1e-9 * xx * yy {
        let (token, pair) = ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant);
        if token > 0.0 && pair >= 0.0 {
            return (token, pair);
        }
    }
    (x / xx, 0.0)
}

/// Where the measured times of swap and recomputation cross, between two lengths; none outside of
/// those measured. `points` are `(tokens, swap, recompute)`, tokens ascending. Between lengths
/// either time is taken for a power of the length.
pub fn measured_crossover(points: &[(usize, f64, f64)]) -> Option<f64> {
    let lead = |point: &(usize, f64, f64)| (point.1 / point.2).ln();
    points.windows(2).find(|pair| lead(&pair[0]) > 0.0 && lead(&pair[1]) <= 0.0).map(|pair| {
        let way = lead(&pair[0]) / (lead(&pair[0]) - lead(&pair[1]));
        let (low, high) = (pair[0].0 as f64, pair[1].0 as f64);
        low * (high / low).powf(way)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::formulas;

    fn lines(name: &str, link_gbps: f64) -> Lines {
        let hardware = HardwareProfile::preset("h100-seed-a").expect("a preset");
        let link = link_gbps * 1e9;
        Lines::modelled(&hardware.with_link(link), &ModelProfile::preset(name).expect("a preset"))
    }

    fn assert_near(told: Option<f64>, wanted: Option<f64>, what: &str) {
        match (told, wanted) {
            (None, None) => {}
            (Some(told), Some(wanted)) => {
                let error = if wanted == 0.0 { told } else { told / wanted - 1.0 };
                assert!(error.abs() < 0.005, "{what}: {told}, SEEDS {wanted}");
            }
            other => panic!("{what}: {other:?}"),
        }
    }

    /// SEEDS.md M8. Its 22 tokens at 38.5 GB/s lie where two nearly equal numbers are subtracted,
    /// and are not to be had to 0.5 % from rounded parameters: ours are exact, and give 18.6.
    #[test]
    fn models_of_attention_cross_where_m8_says() {
        for (name, table) in [
            (
                "7b-mha",
                &[(64., 0.), (36., 3593.), (32., 10_468.), (25., 27_793.), (16., 72_343.)][..],
            ),
            ("7b-gqa8", &[(10., 0.), (9., 3593.), (8., 10_468.), (6., 31_093.)]),
            ("70b-gqa", &[(2.2, 3052.), (2., 14_038.), (1.5, 54_321.), (1., 134_888.)]),
            ("70b-mla34", &[(0.25, 0.), (0.2, 21_591.)]),
        ] {
            for (link, wanted) in table {
                let told = lines(name, *link).crossover();
                assert_near(told, Some(*wanted), &format!("{name} at {link}"));
            }
        }
        let told = lines("7b-mha", 38.5).crossover().expect("it crosses");
        assert!((18.0..23.0).contains(&told), "{told}");
    }

    /// SEEDS.md M9, which leaves attention out.
    #[test]
    fn models_with_states_cross_where_m9_says() {
        let links = [64., 32., 16., 8., 4., 1.];
        let tokens = |values: [f64; 6]| values.map(|x| x.is_finite().then_some(x));
        for (name, wanted) in [
            ("k3", [31.0, 62.2, 125., 255., 527., 2639.]),
            ("k3-real", [64.1, 129., 260., 528., 1091., 5464.]),
            ("kimi-linear", [114., 234., 488., 1074., 2684., f64::INFINITY]),
            ("qwen3-next", [213., 456., 1067., 3232., f64::INFINITY, f64::INFINITY]),
        ] {
            for (link, wanted) in links.iter().zip(tokens(wanted)) {
                let told = lines(name, *link).linear().crossover();
                assert_near(told, wanted, &format!("{name} at {link}"));
            }
        }
        // At 100 tokens a second of prefill, below 9 tokens at every link.
        for link in links {
            let slow = Lines { token_seconds: 0.01, ..lines("kimi-linear", link).linear() };
            assert!(slow.crossover().expect("it crosses") < 9.0, "{link}");
        }
    }

    #[test]
    fn the_lines_are_the_formulas_of_the_theory() {
        let is = |told: f64, wanted: f64| {
            assert!((told / wanted - 1.0).abs() < 1e-9, "{told}, by formula {wanted}");
        };
        let hardware = HardwareProfile::preset("h100-seed-a").expect("a preset");
        let (compute, link) = (hardware.peak_compute(), 2e9);
        let model = ModelProfile::preset("70b-gqa").expect("a preset");
        let (params, attention, kv) = (model.active_params, model.attention, model.kv_bytes);
        let dense = lines("70b-gqa", 2.0);
        let cross = formulas::dense_crossover(params, attention, kv, link, compute);
        is(dense.crossover().expect("it crosses"), cross);
        let recompute = formulas::recompute_seconds(params, attention, 4096.0, compute);
        is(dense.recompute_seconds(4096.0), recompute);
        is(dense.swap_seconds(4096.0), formulas::swap_seconds(0.0, 4096.0, kv, link));
        let k3 = lines("k3", 2.0);
        let (state, kv, rate) = (k3.slot_bytes, k3.kv_bytes_per_token, 4550.0);
        let cross = formulas::hybrid_crossover(state, kv, link, rate);
        is(k3.crossover().expect("it crosses"), cross);
        is(k3.swap_seconds(8192.0), formulas::swap_seconds(state, 8192.0, kv, link));
        let kept = (6144.0, 8192.0);
        let restored = formulas::checkpoint_seconds((state, kv), kept, link, rate);
        is(k3.restore_seconds(kept.0, kept.1), restored);
    }

    /// Attention makes recomputing dearer, so some length is always long enough to swap.
    #[test]
    fn attention_moves_the_crossover_down() {
        for (name, link) in [("kimi-linear", 1.0), ("kimi-linear", 8.0), ("qwen3-next", 4.0)] {
            let lines = lines(name, link);
            let tokens = lines.crossover().expect("it crosses");
            let (swap, again) = (lines.swap_seconds(tokens), lines.recompute_seconds(tokens));
            assert!((swap / again - 1.0).abs() < 1e-9, "{name} at {link}: {swap} {again}");
            assert!(lines.linear().crossover().is_none_or(|linear| tokens < linear));
        }
    }

    #[test]
    fn a_rate_is_found_from_prompts_and_attention_never_makes_them_faster() {
        let seconds = |tokens: usize| 1e-4 * tokens as f64 + 1e-9 * (tokens * tokens) as f64;
        let prompts = [64, 512, 4096].map(|tokens| (tokens, seconds(tokens)));
        let (token, pair) = fit(&prompts);
        assert!((token / 1e-4 - 1.0).abs() < 1e-9 && (pair / 2e-9 - 1.0).abs() < 1e-9);
        assert_eq!(fit(&prompts[..1]), (prompts[0].1 / 64.0, 0.0));
        let (token, pair) = fit(&[(64, 0.02), (512, 0.1), (4096, 0.7)]);
        assert!(token > 0.0 && pair == 0.0);
    }

    #[test]
    fn measured_times_cross_between_two_lengths_or_outside_of_all() {
        let points = [(64, 4.0, 1.0), (128, 4.0, 2.0), (256, 4.0, 8.0)];
        let tokens = measured_crossover(&points).expect("they cross");
        assert!((tokens - 128.0 * 2f64.sqrt()).abs() < 1e-9, "{tokens}");
        assert_eq!(measured_crossover(&points[..2]), None);
        assert_eq!(measured_crossover(&points[2..]), None);
    }
}

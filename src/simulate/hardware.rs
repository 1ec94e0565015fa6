//! Hardware as a step's time depends on it: bandwidth, arithmetic, the link to the host.
//!
//! A profile is a preset ([`PRESETS`]) or a JSON or TOML file with the fields of
//! [`HardwareProfile`]; nothing else is understood and nothing is guessed.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::model::ModelProfile;

/// What a step runs on: one accelerator, its memory and its link to the host.
///
/// Units are bytes, FLOPs and seconds; a rate is per second. A peak is what a data sheet prints,
/// `mbu` and `mfu` are the shares of it that are reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardwareProfile {
    /// Its name, as reports print it.
    pub name: String,
    /// Peak bandwidth of the device's memory, B/s.
    pub memory_bandwidth: f64,
    /// Share of `memory_bandwidth` that large reads reach, above 0, at most 1.
    pub mbu: f64,
    /// Peak arithmetic, FLOP/s.
    pub flops: f64,
    /// Share of `flops` that large products reach, above 0, at most 1.
    pub mfu: f64,
    /// Share of `flops * mfu` that a product of so many rows reaches, `(rows, share)`, rows
    /// ascending; linear between points, level outside. Empty: every product reaches all of it.
    #[serde(default)]
    pub gemm_efficiency: Vec<(usize, f64)>,
    /// Share of `flops * mfu` that the attention of prompts reaches, above 0, at most 1.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub chunk_attention_efficiency: f64,
    /// Share of `flops * mfu` that the attention of generated tokens reaches.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub decode_attention_efficiency: f64,
    /// Bandwidth from device to host, B/s.
    pub link_out: f64,
    /// Bandwidth from host to device, B/s.
    pub link_in: f64,
    /// Seconds before the first byte of a copy moves.
    #[serde(default)]
    pub link_latency: f64,
    /// Bytes of the device's memory, weights included.
    pub memory_bytes: u64,
    /// Bytes of the host's memory for what leaves the device.
    pub host_memory_bytes: u64,
    /// Seconds each step costs whatever is in it: launches, sampling, the scheduler.
    #[serde(default)]
    pub step_overhead: f64,
    /// Price of an hour, in any currency.
    #[serde(default)]
    pub price_per_hour: Option<f64>,
    /// What it was measured with; none of a data sheet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
}

fn whole() -> f64 {
    1.0
}

fn is_whole(share: &f64) -> bool {
    *share == whole()
}

/// The machine and the model that a profile was measured with: for another of either it says
/// nothing of what steps take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The processor, as the system names it.
    pub processor: Option<String>,
    /// The instruction set that kernels were run with.
    pub isa: String,
    /// Threads that computed.
    pub threads: usize,
    /// What the model was called.
    pub model: String,
    /// Of its config, its precision and the bytes of its weights.
    pub fingerprint: String,
    /// Prompt tokens computed a second, but for attention.
    pub prefill_tokens_per_second: f64,
    /// Seconds of attention for each pair of a token and one before it.
    pub pair_seconds: f64,
}

/// Names that [`HardwareProfile::preset`] knows.
pub const PRESETS: &[&str] = &["h100-seed-a", "h100-seed-b", "h100", "h200"];

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Neither a preset nor a file.
    #[error("{name} is no preset and no such file can be read ({source}); presets: {presets}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// The presets there are.
        presets: String,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not JSON or TOML of a profile; the reason names the key.
    #[error("{path}: {reason}")]
    Text {
        /// The file.
        path: String,
        /// What the parser said.
        reason: String,
    },
    /// A value is out of its range.
    #[error("{place}: {key} is {value}; it must be {allowed}")]
    Value {
        /// The file, or the profile's name.
        place: String,
        /// The field.
        key: String,
        /// What it says.
        value: String,
        /// What would do.
        allowed: &'static str,
    },
}

/// Beyond these no machine is, and sums of steps no time.
const RATES: RangeInclusive<f64> = 1e-3..=1e24;
const RATE: &str = "a number from 0.001 to 1e24";
const SHARES: RangeInclusive<f64> = 1e-6..=1.0;
const SHARE: &str = "from 0.000001 to 1";
const DELAYS: RangeInclusive<f64> = 0.0..=1e6;
const DELAY: &str = "a number of seconds from 0 to 1000000";

impl HardwareProfile {
    /// Bandwidth that reads reach, B/s.
    pub fn bandwidth(&self) -> f64 {
        self.memory_bandwidth * self.mbu
    }

    /// Arithmetic that large products and attention reach, FLOP/s.
    pub fn peak_compute(&self) -> f64 {
        self.flops * self.mfu
    }

    /// Arithmetic that a product of `rows` rows reaches, FLOP/s.
    pub fn compute(&self, rows: usize) -> f64 {
        self.peak_compute() * self.efficiency(rows)
    }

    fn efficiency(&self, rows: usize) -> f64 {
        let points = &self.gemm_efficiency;
        let after = points.partition_point(|point| point.0 <= rows);
        match (after.checked_sub(1).map(|before| points[before]), points.get(after)) {
            (None, None) => 1.0,
            (Some(point), None) => point.1,
            (None, Some(point)) => point.1,
            (Some(low), Some(high)) => {
                let way = (rows - low.0) as f64 / (high.0 - low.0) as f64;
                low.1 + way * (high.1 - low.1)
            }
        }
    }

    /// One rate for the link both ways: a swap takes as long by it.
    pub fn link(&self) -> f64 {
        2.0 / (1.0 / self.link_out + 1.0 / self.link_in)
    }

    /// The same profile with a link of this rate each way.
    pub fn with_link(self, bytes_per_second: f64) -> HardwareProfile {
        HardwareProfile { link_out: bytes_per_second, link_in: bytes_per_second, ..self }
    }

    /// What a token of a prompt of `model` takes in a step full of them, and each pair of one and
    /// one before it, in seconds (F12): by the model's own rate where it has one, attention
    /// included, or else by its FLOPs.
    pub fn prefill_seconds(&self, model: &ModelProfile) -> (f64, f64) {
        if let Some(rate) = model.prefill_rate {
            return (1.0 / rate, 0.0);
        }
        let attention = self.peak_compute() * self.chunk_attention_efficiency;
        (2.0 * model.active_params / self.compute(usize::MAX), model.attention / attention)
    }

    /// Seconds for `bytes` to leave the device, latency included; 0 for no bytes.
    pub fn out_seconds(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { self.link_latency + bytes / self.link_out } else { 0.0 }
    }

    /// Seconds for `bytes` to come back, latency included; 0 for no bytes.
    pub fn in_seconds(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { self.link_latency + bytes / self.link_in } else { 0.0 }
    }

    /// The profile of that name, if there is one.
    ///
    /// `h100-seed-a` and `h100-seed-b` are the H100 as the two lectures reckon with it (SEEDS.md
    /// section 1): 3,350 GB/s, of which lecture A reaches 85 % and lecture B all, and 495 TFLOP/s.
    /// `h100` and `h200` are the SXM boards by their data sheets: memory, bandwidth, dense bf16
    /// arithmetic, PCIe 5 x16 (64 GB/s each way). Their `mbu` of 0.85 is what streaming reads of
    /// weights reach on such memory, their `mfu` of 0.5 what whole prefills reach; measure your
    /// own machine before you trust either. Host memory is no figure of a board: 256 GB stand for
    /// one board's share of a usual host. Latency and overhead are 0, as in the lectures.
    pub fn preset(name: &str) -> Option<HardwareProfile> {
        let name = *PRESETS.iter().find(|preset| **preset == name)?;
        let lecture = name.starts_with("h100-seed");
        Some(HardwareProfile {
            name: name.to_owned(),
            memory_bandwidth: if name == "h200" { 4.8e12 } else { 3.35e12 },
            mbu: if name == "h100-seed-b" { 1.0 } else { 0.85 },
            flops: if lecture { 990e12 } else { 989e12 },
            mfu: 0.5,
            gemm_efficiency: Vec::new(),
            chunk_attention_efficiency: whole(),
            decode_attention_efficiency: whole(),
            link_out: 64e9,
            link_in: 64e9,
            link_latency: 0.0,
            memory_bytes: if name == "h200" { 141_000_000_000 } else { 80_000_000_000 },
            host_memory_bytes: 256_000_000_000,
            step_overhead: 0.0,
            price_per_hour: None,
            calibration: None,
        })
    }

    /// The preset of that name, else the profile in the file at that path: TOML if it ends in
    /// `.toml`, JSON otherwise.
    ///
    /// # Errors
    /// There is neither; the file is no profile; a value is out of range. The key is named.
    pub fn read(path: &str) -> Result<HardwareProfile, ProfileError> {
        if let Some(preset) = HardwareProfile::preset(path) {
            return Ok(preset);
        }
        let text = fs::read_to_string(path).map_err(|source| ProfileError::Unknown {
            name: path.to_owned(),
            presets: PRESETS.join(", "),
            source,
        })?;
        let is_toml = Path::new(path).extension().is_some_and(|end| end == "toml");
        let profile: Result<HardwareProfile, String> = match is_toml {
            true => toml::from_str(&text).map_err(|error| error.to_string().trim_end().into()),
            false => serde_json::from_str(&text).map_err(|error| error.to_string()),
        };
        let profile =
            profile.map_err(|reason| ProfileError::Text { path: path.to_owned(), reason })?;
        profile.check(path)?;
        Ok(profile)
    }

    /// Refuses values out of range; `place` says where they come from.
    ///
    /// # Errors
    /// The first of them, with its key and what is allowed.
    pub fn check(&self, place: &str) -> Result<(), ProfileError> {
        let wrong = |key: &str, value: String, allowed| {
            Err(ProfileError::Value { place: place.into(), key: key.into(), value, allowed })
        };
        let rates = [
            ("memory_bandwidth", self.memory_bandwidth),
            ("flops", self.flops),
            ("link_out", self.link_out),
            ("link_in", self.link_in),
            ("price_per_hour", self.price_per_hour.unwrap_or(1.0)),
            ("memory_bytes", self.memory_bytes as f64),
            ("host_memory_bytes", self.host_memory_bytes as f64),
        ];
        if let Some((key, value)) = rates.iter().find(|(_, v)| !RATES.contains(v)) {
            return wrong(key, value.to_string(), RATE);
        }
        let shares = self.gemm_efficiency.iter().map(|point| ("gemm_efficiency", point.1));
        let single = [
            ("mbu", self.mbu),
            ("mfu", self.mfu),
            ("chunk_attention_efficiency", self.chunk_attention_efficiency),
            ("decode_attention_efficiency", self.decode_attention_efficiency),
        ];
        let shares = single.into_iter().chain(shares);
        for (key, value) in shares {
            if !SHARES.contains(&value) {
                return wrong(key, value.to_string(), SHARE);
            }
        }
        if let Some(rate) = self.calibration.as_ref().map(|c| c.prefill_tokens_per_second)
            && !RATES.contains(&rate)
        {
            return wrong("calibration.prefill_tokens_per_second", rate.to_string(), RATE);
        }
        let pair = self.calibration.as_ref().map_or(0.0, |calibration| calibration.pair_seconds);
        let delays = [
            ("link_latency", self.link_latency),
            ("step_overhead", self.step_overhead),
            ("calibration.pair_seconds", pair),
        ];
        if let Some((key, value)) = delays.iter().find(|(_, v)| !DELAYS.contains(v)) {
            return wrong(key, value.to_string(), DELAY);
        }
        let is_descending = |pair: &[(usize, f64)]| pair[0].0 >= pair[1].0;
        match self.gemm_efficiency.windows(2).find(|pair| is_descending(pair)) {
            Some(pair) => {
                let value = format!("{} rows before {}", pair[0].0, pair[1].0);
                wrong("gemm_efficiency", value, "points with ascending rows")
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(ending: &str, text: &str) -> Result<HardwareProfile, String> {
        let file = tempfile::Builder::new().suffix(ending).tempfile().expect("a file");
        fs::write(file.path(), text).expect("written");
        let path = file.path().to_str().expect("a path of text").to_owned();
        let error = |error: ProfileError| error.to_string().replace(&path, "FILE");
        HardwareProfile::read(&path).map_err(error)
    }

    #[test]
    fn a_profile_is_read_as_json_and_as_toml() {
        let h200 = HardwareProfile::preset("h200").expect("a preset");
        let json = serde_json::to_string(&h200).expect("numbers");
        assert_eq!(written(".json", &json), Ok(h200.clone()));
        let toml = "name = 'h200'\nmemory_bandwidth = 4800000000000\nmbu = 0.85\nflops = 989e12\n\
                    mfu = 0.5\nlink_out = 64e9\nlink_in = 64e9\nmemory_bytes = 141000000000\n\
                    host_memory_bytes = 256000000000\n";
        assert_eq!(written(".toml", toml), Ok(h200.clone()));
        let curve = format!("{toml}gemm_efficiency = [[1, 0.25], [64, 1.0]]\n");
        let curved = written(".toml", &curve).expect("a curve");
        assert_eq!(curved.gemm_efficiency, [(1, 0.25), (64, 1.0)]);
    }

    #[test]
    fn what_is_wrong_with_a_profile_is_named() {
        let h100 = serde_json::to_value(HardwareProfile::preset("h100")).expect("numbers");
        for (key, value, told) in [
            ("mbu", "1.5", "FILE: mbu is 1.5; it must be from 0.000001 to 1"),
            ("gemm_efficiency", "[[8,1e-300]]", "FILE: gemm_efficiency is 0.0000"),
            ("step_overhead", "1e300", "FILE: step_overhead is 1000"),
            ("mfu", "0", "FILE: mfu is 0; it must be from 0.000001 to 1"),
            ("flops", "-1", "FILE: flops is -1; it must be a number from 0.001 to 1e24"),
            ("link_in", "0", "FILE: link_in is 0; it must be a number from 0.001 to 1e24"),
            (
                "memory_bytes",
                "0",
                "FILE: memory_bytes is 0; it must be a number from 0.001 to 1e24",
            ),
            ("price_per_hour", "0", "FILE: price_per_hour is 0; it must be a number from 0.001"),
            ("step_overhead", "-0.5", "FILE: step_overhead is -0.5; it must be a number of"),
            ("gemm_efficiency", "[[8,0.5],[8,0.6]]", "FILE: gemm_efficiency is 8 rows before 8;"),
            ("decode_attention_efficiency", "0", "FILE: decode_attention_efficiency is 0; it must"),
            (
                "gemm_efficiency",
                "[[8,1.5]]",
                "FILE: gemm_efficiency is 1.5; it must be from 0.000001",
            ),
            ("hbm_bw", "1", "FILE: unknown field `hbm_bw`"),
            ("flops", "\"fast\"", "FILE: invalid type: string \"fast\", expected f64"),
        ] {
            let mut profile = h100.clone();
            profile[key] = serde_json::from_str(value).expect("JSON");
            let error = written(".json", &profile.to_string()).expect_err(key);
            assert!(error.starts_with(told), "{error}");
        }
        let mut missing = h100.clone();
        missing.as_object_mut().expect("an object").remove("mbu");
        let error = written(".json", &missing.to_string()).expect_err("a missing key");
        assert!(error.starts_with("FILE: missing field `mbu`"), "{error}");
        let error = HardwareProfile::read("h300").expect_err("no such preset").to_string();
        assert!(error.starts_with("h300 is no preset"), "{error}");
        assert!(error.ends_with("presets: h100-seed-a, h100-seed-b, h100, h200"), "{error}");
    }

    #[test]
    fn all_presets_are_in_range() {
        for name in PRESETS {
            let preset = HardwareProfile::preset(name).expect("a preset");
            assert_eq!(preset.name, *name);
            preset.check(name).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    #[test]
    fn efficiency_is_linear_between_points_and_level_outside() {
        let mut profile = HardwareProfile::preset("h100-seed-a").expect("a preset");
        assert_eq!(profile.compute(1), 495e12);
        profile.gemm_efficiency = vec![(4, 0.25), (8, 0.75)];
        let shares = [1, 4, 6, 8, 4096].map(|rows| profile.compute(rows) / 495e12);
        assert_eq!(shares, [0.25, 0.25, 0.5, 0.75, 0.75]);
    }
}

//! A reader of `config.json` that never guesses.
//!
//! A family asks for the keys it knows, and [`Config::settled`] says all that is wrong at once:
//! keys that are missing, values of the wrong kind, values that would change the arithmetic in a
//! way we do not implement, and keys that nobody asked for. A silent default produces fluent
//! nonsense.
//!
//! Keys are dotted paths (`linear_attn_config.num_heads`). Where the file has a `text_config`, a
//! key is looked up there first. A key has the other names that [`ALIASES`] gives it.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Names that mean the same, the one that families use first.
const ALIASES: &[&[&str]] = &[
    &["num_experts", "n_routed_experts", "num_local_experts"],
    &["num_experts_per_token", "num_experts_per_tok"],
    &["num_shared_experts", "n_shared_experts"],
    &["moe_renormalize", "norm_topk_prob"],
    &["num_expert_group", "n_group"],
    &["moe_router_activation_func", "scoring_func"],
    &["model_max_length", "max_position_embeddings"],
    &["rope_theta", "rope_parameters.rope_theta"],
    &["rope_scaling.rope_type", "rope_scaling.type", "rope_parameters.rope_type"],
    &["rope_scaling.factor", "rope_parameters.factor"],
    &["rope_scaling.low_freq_factor", "rope_parameters.low_freq_factor"],
    &["rope_scaling.high_freq_factor", "rope_parameters.high_freq_factor"],
    &[
        "rope_scaling.original_max_position_embeddings",
        "rope_parameters.original_max_position_embeddings",
    ],
];

/// Keys that say nothing about the arithmetic, in any family. `eos_token_id` and `bos_token_id` are
/// read by `generation.rs`.
const INERT: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// No size in a model comes near this; one that does is a mistake in the file.
const SIZE_LIMIT: u64 = 1 << 31;

/// One thing that is wrong with a `config.json`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigFault {
    /// A key is not there, under any of its names.
    #[error("{} is missing", .names.join(" | "))]
    Missing {
        /// The key's names.
        names: Vec<String>,
    },
    /// A value is not of the kind it must be.
    #[error("{key} is {value}; it must be {wanted}")]
    Wrong {
        /// The key.
        key: String,
        /// What the file says.
        value: String,
        /// What would do.
        wanted: String,
    },
    /// A value asks for arithmetic that is not implemented.
    #[error("{key} is {value}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The key.
        key: String,
        /// What the file says.
        value: String,
        /// What would do.
        supported: String,
    },
    /// A key that the family does not know.
    #[error("{key} is not understood")]
    Unknown {
        /// The key.
        key: String,
    },
    /// Values that do not go together.
    #[error("{0}")]
    Contradiction(String),
}

/// A `config.json` being read.
///
/// After a fault a read returns a harmless value (1, none, false); nothing may be made of it before
/// [`Config::settled`] has passed.
#[derive(Debug)]
pub struct Config<'a> {
    /// Where keys are looked up: `text_config` first if there is one, then the top.
    levels: Vec<(&'static str, &'a Map<String, Value>)>,
    understood: BTreeSet<String>,
    faults: Vec<ConfigFault>,
}

struct Entry<'a> {
    key: String,
    value: &'a Value,
}

impl<'a> Config<'a> {
    /// A reader of `top`, the object that `config.json` holds.
    pub fn new(top: &'a Map<String, Value>) -> Config<'a> {
        let nested = top.get("text_config").and_then(Value::as_object);
        let levels = nested.map(|n| ("text_config.", n)).into_iter().chain([("", top)]).collect();
        let mut config = Config { levels, understood: BTreeSet::new(), faults: Vec::new() };
        config.inert(INERT);
        config.only("quantization_config", &["null"]);
        config
    }

    /// Says that `keys` are known and change nothing, whatever their values.
    pub fn inert(&mut self, keys: &[&str]) {
        self.understood.extend(keys.iter().map(|key| (*key).to_owned()));
    }

    /// A size: a whole number above zero.
    pub fn size(&mut self, key: &str) -> usize {
        self.size_up_to(key, SIZE_LIMIT)
    }

    /// A size up to `most`, for what is kept in a list.
    pub fn size_up_to(&mut self, key: &str, most: u64) -> usize {
        match self.required(key) {
            Some(entry) => self.whole(entry, 1, most),
            None => 1,
        }
    }

    /// A number of things of which there may be none.
    pub fn count(&mut self, key: &str) -> usize {
        match self.required(key) {
            Some(entry) => self.whole(entry, 0, SIZE_LIMIT),
            None => 1,
        }
    }

    /// A size, none when the key is absent or null.
    pub fn optional_size(&mut self, key: &str) -> Option<usize> {
        let entry = self.find(key)?;
        Some(self.whole(entry, 1, SIZE_LIMIT))
    }

    /// A finite number above zero.
    pub fn positive(&mut self, key: &str) -> f64 {
        let Some(entry) = self.required(key) else { return 1.0 };
        match entry.value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => number,
            _ => self.wrong(entry, "a number above 0", 1.0),
        }
    }

    /// A finite number below zero, none when the key is absent or null.
    pub fn optional_negative(&mut self, key: &str) -> Option<f64> {
        let entry = self.find(key)?;
        match entry.value.as_f64() {
            Some(number) if number < 0.0 && number.is_finite() => Some(number),
            _ => self.wrong(entry, "a number below 0", None),
        }
    }

    /// True or false.
    pub fn flag(&mut self, key: &str) -> bool {
        let Some(entry) = self.required(key) else { return false };
        match entry.value.as_bool() {
            Some(flag) => flag,
            None => self.wrong(entry, "true or false", false),
        }
    }

    /// A text, none when the key is absent or null.
    pub fn optional_text(&mut self, key: &str) -> Option<&'a str> {
        let entry = self.find(key)?;
        let value = entry.value;
        value.as_str().or_else(|| self.wrong(entry, "a text", None))
    }

    /// A list of whole numbers above zero.
    pub fn sizes(&mut self, key: &str) -> Vec<usize> {
        let Some(entry) = self.required(key) else { return Vec::new() };
        let size = |v: &Value| v.as_u64().filter(|n| (1..=SIZE_LIMIT).contains(n));
        let list = entry.value.as_array().map(|list| list.iter().map(size));
        match list.and_then(|list| list.map(|n| n.map(|n| n as usize)).collect()) {
            Some(sizes) => sizes,
            None => self.wrong(entry, "a list of whole numbers above 0", Vec::new()),
        }
    }

    /// Accepts `key` only with one of the values `supported`, written as JSON; `null` among them
    /// stands for an absent key too.
    pub fn only(&mut self, key: &str, supported: &[&str]) {
        let entry = match self.find(key) {
            Some(entry) => entry,
            None if supported.contains(&"null") => return,
            None => return self.missing(key),
        };
        let value = entry.value.to_string();
        if !supported.contains(&value.as_str()) {
            let key = entry.key;
            self.faults.push(ConfigFault::Unsupported {
                key,
                value,
                supported: supported.join(", "),
            });
        }
    }

    /// Accepts `key` only when it is absent or a list of nothing but `supported`.
    pub fn only_list_of(&mut self, key: &str, supported: &str) {
        let Some(entry) = self.find(key) else { return };
        let all = entry.value.as_array().is_some_and(|list| list.iter().all(|v| v == supported));
        if !all {
            let value = entry.value.to_string();
            let supported = format!("a list of nothing but {supported:?}");
            self.faults.push(ConfigFault::Unsupported { key: entry.key, value, supported });
        }
    }

    /// Says `otherwise` unless `holds`.
    pub fn rule(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.faults.push(ConfigFault::Contradiction(otherwise()));
        }
    }

    /// Passes when nothing is wrong and no key is left that nobody asked for.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn settled(&mut self) -> Result<(), Vec<ConfigFault>> {
        let mut unknown = Vec::new();
        for (prefix, map) in &self.levels {
            for (key, value) in map.iter() {
                let followed = prefix.is_empty() && key == "text_config" && value.is_object();
                if !followed {
                    self.collect_unknown(key, value, prefix, &mut unknown);
                }
            }
        }
        let mut faults = std::mem::take(&mut self.faults);
        faults.extend(unknown.into_iter().map(|key| ConfigFault::Unknown { key }));
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    fn collect_unknown(&self, path: &str, value: &Value, prefix: &str, unknown: &mut Vec<String>) {
        if self.understood.contains(path) {
            return;
        }
        let inside = format!("{path}.");
        match value.as_object() {
            Some(map) if self.understood.iter().any(|key| key.starts_with(&inside)) => {
                for (key, value) in map {
                    self.collect_unknown(&format!("{inside}{key}"), value, prefix, unknown);
                }
            }
            // A group of keys we know, switched off.
            _ if value.is_null() && self.understood.iter().any(|k| k.starts_with(&inside)) => {}
            _ => unknown.push(format!("{prefix}{path}")),
        }
    }

    /// The value of `key` under any of its names; null counts as absent.
    fn find(&mut self, key: &str) -> Option<Entry<'a>> {
        let names = names(key);
        self.understood.extend(names.iter().map(|name| (*name).to_owned()));
        for (prefix, map) in &self.levels {
            let mut entries = names.iter().filter_map(|name| {
                let value = name.split('.').try_fold(None, |at: Option<&Value>, step| match at {
                    None => map.get(step).map(Some),
                    Some(value) => value.get(step).map(Some),
                });
                let value = value.flatten().filter(|value| !value.is_null())?;
                Some(Entry { key: format!("{prefix}{name}"), value })
            });
            let Some(first) = entries.next() else { continue };
            if let Some(other) = entries.find(|other| other.value != first.value) {
                let message = format!(
                    "{} is {} but {} is {}; they mean the same",
                    first.key, first.value, other.key, other.value
                );
                self.faults.push(ConfigFault::Contradiction(message));
            }
            return Some(first);
        }
        None
    }

    fn required(&mut self, key: &str) -> Option<Entry<'a>> {
        let entry = self.find(key);
        if entry.is_none() {
            self.missing(key);
        }
        entry
    }

    fn missing(&mut self, key: &str) {
        let names = names(key).into_iter().map(str::to_owned).collect();
        self.faults.push(ConfigFault::Missing { names });
    }

    fn whole(&mut self, entry: Entry<'_>, least: u64, most: u64) -> usize {
        match entry.value.as_u64().filter(|n| (least..=most).contains(n)) {
            Some(number) => number as usize,
            None => self.wrong(entry, &format!("a whole number from {least} to {most}"), 1),
        }
    }

    fn wrong<T>(&mut self, entry: Entry<'_>, wanted: &str, instead: T) -> T {
        let (value, wanted) = (entry.value.to_string(), wanted.to_owned());
        self.faults.push(ConfigFault::Wrong { key: entry.key, value, wanted });
        instead
    }
}

/// All names of `key`, itself first.
fn names(key: &str) -> Vec<&str> {
    match ALIASES.iter().find(|alike| alike[0] == key) {
        Some(alike) => alike.to_vec(),
        None => vec![key],
    }
}

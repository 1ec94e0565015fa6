//! What a model folder says about generating: where to stop, how to begin.

use serde_json::{Map, Value};

use super::config::ConfigFault;

/// What a model folder says about generating.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GenerationDefaults {
    /// Tokens that end a turn, by the model's files: those of `generation_config.json` if it names
    /// any, else those of `config.json`; the engine adds the tokenizer's end of sequence. Empty
    /// when both say null: generation then ends at its limit.
    pub stop_tokens: Vec<u32>,
    /// Token that begins a text, by the same rule.
    pub bos_token: Option<u32>,
}

/// How a model folder's `generation_config.json` says that tokens are chosen, where a request does
/// not say. What is absent there is none here.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SamplingDefaults {
    /// `temperature`, 0 or more.
    pub temperature: Option<f32>,
    /// `top_k`: this many of the likeliest tokens are kept; 0 keeps all.
    pub top_k: Option<usize>,
    /// `top_p`, above 0 and at most 1.
    pub top_p: Option<f32>,
    /// `min_p`, 0 to 1.
    pub min_p: Option<f32>,
    /// `repetition_penalty`, above 0.
    pub repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// Reads the keys that are there.
    ///
    /// # Errors
    /// All values that are not what they must be.
    pub(super) fn read(map: &Map<String, Value>) -> Result<SamplingDefaults, Vec<ConfigFault>> {
        let mut faults = Vec::new();
        let mut number = |key: &str, fits: fn(f32) -> bool, wanted: &str| {
            let value = map.get(key).filter(|value| !value.is_null())?;
            let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && fits(*x));
            if number.is_none() {
                faults.push(wrong(key, value, wanted));
            }
            number
        };
        let (temperature, top_p, min_p, repetition_penalty) = (
            number("temperature", |x| x >= 0.0, "a number, 0 or more"),
            number("top_p", |x| x > 0.0 && x <= 1.0, "a number above 0, at most 1"),
            number("min_p", |x| (0.0..=1.0).contains(&x), "a number from 0 to 1"),
            number("repetition_penalty", |x| x > 0.0, "a number above 0"),
        );
        let top_k = map.get("top_k").filter(|value| !value.is_null()).and_then(|value| {
            let top_k = value.as_i64().filter(|top_k| *top_k >= -1);
            if top_k.is_none() {
                faults.push(wrong("top_k", value, "an integer; -1 and 0 keep all tokens"));
            }
            top_k.map(|top_k| usize::try_from(top_k).unwrap_or(0))
        });
        match faults.is_empty() {
            true => Ok(SamplingDefaults { temperature, top_k, top_p, min_p, repetition_penalty }),
            false => Err(faults),
        }
    }
}

fn wrong(key: &str, value: &Value, wanted: &str) -> ConfigFault {
    ConfigFault::Wrong { key: key.to_owned(), value: value.to_string(), wanted: wanted.to_owned() }
}

/// The objects that may hold token ids, the strongest first, with a name for messages.
type Sources<'a> = [(&'static str, &'a Map<String, Value>)];

impl GenerationDefaults {
    /// Reads `eos_token_id` and `bos_token_id`. `sources` are the objects that may hold them.
    ///
    /// # Errors
    /// Ids that are not ids, or that lie outside a vocabulary of `vocab_size`; no `eos_token_id`
    /// anywhere.
    pub(super) fn read(
        sources: &Sources<'_>,
        vocab_size: usize,
    ) -> Result<GenerationDefaults, Vec<ConfigFault>> {
        let mut faults = Vec::new();
        if sources.iter().all(|(_, map)| !map.contains_key("eos_token_id")) {
            faults.push(ConfigFault::Missing { names: vec!["eos_token_id".to_owned()] });
        }
        let stop_tokens = read_ids(sources, "eos_token_id", vocab_size, &mut faults);
        let bos_token = read_ids(sources, "bos_token_id", vocab_size, &mut faults).first().copied();
        if faults.is_empty() {
            Ok(GenerationDefaults { stop_tokens, bos_token })
        } else {
            Err(faults)
        }
    }
}

/// One id or a list of them.
fn read_ids(
    sources: &Sources<'_>,
    key: &str,
    vocab_size: usize,
    faults: &mut Vec<ConfigFault>,
) -> Vec<u32> {
    let given = sources.iter().find_map(|(file, map)| {
        let value = map.get(key).filter(|value| !value.is_null())?;
        Some((file, value))
    });
    let Some((file, value)) = given else { return Vec::new() };
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let id = |value: &Value| {
        let id = value.as_u64().filter(|&id| id < vocab_size as u64)?;
        u32::try_from(id).ok()
    };
    list.iter().map(id).collect::<Option<Vec<u32>>>().unwrap_or_else(|| {
        faults.push(ConfigFault::Wrong {
            key: format!("{key} ({file})"),
            value: value.to_string(),
            wanted: format!("a token below {vocab_size}, or a list of such"),
        });
        Vec::new()
    })
}

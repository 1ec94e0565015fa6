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

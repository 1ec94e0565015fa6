//! A model as the clients of a server see it.

use std::borrow::Cow;
use std::fs;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::args::{GenerationConfig, ServeArgs};
use crate::cli::CliError;
use crate::cli::loading::Files;
use crate::models::SamplingDefaults;
use crate::models::spec::{Mixer, ModelSpec};
use crate::request::SamplingParams;
use crate::server::ServedModel;
use crate::text::{AnswerFormat, ChatTemplate, Tokenizer};

/// The model of `files`, whose chat template an argument may replace.
///
/// # Errors
/// A chat template that cannot be read.
pub fn served(
    args: &ServeArgs,
    files: &mut Files,
    tokenizer: Arc<Tokenizer>,
) -> Result<ServedModel, CliError> {
    let template = match &args.answers.chat_template {
        None => ChatTemplate::from_files(&files.text),
        Some(path) => {
            let named = |source| args.settings.file_error("chat-template", path, source);
            let bytes = fs::read(path).map_err(named)?;
            files.text.chat_template = Some(Cow::Owned(bytes));
            // One that was asked for and does not work is an error at once.
            Ok(ChatTemplate::from_files(&files.text)?)
        }
    };
    Ok(ServedModel {
        names: names(args),
        format: AnswerFormat::detect(template.as_ref().ok(), Some(&tokenizer)),
        tokenizer,
        template,
        vocab_size: files.model.spec.vocab_size,
        sampling: sampling(&args.answers.generation_config, files)?,
        meta: meta(&files.model.spec),
        fingerprint: fingerprint(files),
    })
}

/// How tokens are chosen where a request does not say.
fn sampling(config: &GenerationConfig, files: &Files) -> Result<SamplingParams, CliError> {
    let said = match config {
        GenerationConfig::Auto => files.model.sampling_defaults()?,
        GenerationConfig::Api => SamplingDefaults::default(),
        GenerationConfig::Folder(dir) => SamplingDefaults::open(dir)?,
    };
    let api = SamplingParams::default();
    Ok(SamplingParams {
        temperature: said.temperature.unwrap_or(api.temperature),
        top_k: said.top_k.unwrap_or(api.top_k),
        top_p: said.top_p.unwrap_or(api.top_p),
        min_p: said.min_p.unwrap_or(api.min_p),
        repetition_penalty: said.repetition_penalty.unwrap_or(api.repetition_penalty),
        ..api
    })
}

/// The names that were given, or that of the folder.
fn names(args: &ServeArgs) -> Vec<String> {
    if !args.answers.served_model_name.is_empty() {
        return args.answers.served_model_name.clone();
    }
    let folder = args.common.model.as_ref().and_then(|dir| dir.canonicalize().ok());
    let name = folder.as_ref().and_then(|dir| dir.file_name());
    vec![name.map_or_else(|| "tiny".to_owned(), |name| name.to_string_lossy().into_owned())]
}

/// Facts of the model, as `/v1/models` gives them.
fn meta(spec: &ModelSpec) -> Map<String, Value> {
    let count = |is: fn(&Mixer) -> bool| spec.layers.iter().filter(|l| is(&l.mixer)).count();
    let recurrent = spec.layers.iter().filter_map(|layer| match &layer.mixer {
        Mixer::Kda(kda) => Some(kda.state_values() + kda.window_values()),
        _ => None,
    });
    let state_values: usize = recurrent.sum::<usize>();
    let token_values: usize = spec.layers.iter().map(|l| l.mixer.values_per_token()).sum();
    [
        ("n_vocab", spec.vocab_size),
        ("n_ctx_train", spec.context),
        ("n_params", spec.parameters()),
        ("kda_layers", count(|mixer| matches!(mixer, Mixer::Kda(_)))),
        ("mla_layers", count(|mixer| matches!(mixer, Mixer::Mla(_)))),
        ("gqa_layers", count(|mixer| matches!(mixer, Mixer::Gqa(_)))),
        ("state_bytes_per_seq", state_values * size_of::<f32>()),
        ("kv_bytes_per_token", token_values * spec.kv_dtype.bytes()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value.into()))
    .collect()
}

/// Changes with the model's config, its precision and its tokenizer.
fn fingerprint(files: &Files) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{:?}", files.model.spec).as_bytes());
    let text = &files.text;
    for file in
        [&text.tokenizer_json, &text.tiktoken_model, &text.tokenizer_config, &text.chat_template]
    {
        let bytes = file.as_deref().unwrap_or_default();
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    }
    hasher.finalize().to_hex()[..12].to_owned()
}

//! `deltapool serve`: an HTTP server for the clients of OpenAI's and Anthropic's APIs.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use kernels::Isa;
use serde_json::{Map, Value};

use super::CliError;
use super::common::CommonArgs;
use super::limits::{EngineArgs, Shown};
use super::loading::{Files, Progress};
use super::output::grouped;
use crate::models::spec::{Mixer, ModelSpec};
use crate::server::{self, Bind, Outcome, ServedModel, ServerConfig};
use crate::text::AnswerFormat;
use crate::text::{ChatTemplate, TextError};

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Address to listen on; anything but loopback lets other machines in.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one, which is printed.
    #[arg(short, long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Listen on a socket in the file system instead, for this user alone.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"])]
    pub uds: Option<PathBuf>,
    /// Name of the model in the API; several may be given. Default: the folder's name.
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// A key that requests must carry; several may be given. Without one everybody may ask.
    #[arg(long, value_name = "KEY", env = "DELTAPOOL_API_KEY", hide_env_values = true)]
    pub api_key: Vec<String>,
    /// The key of the routes that change the server; without one they are open to this machine.
    #[arg(long, value_name = "KEY", env = "DELTAPOOL_ADMIN_API_KEY", hide_env_values = true)]
    pub admin_api_key: Option<String>,
    /// Which model, how it is computed, and what is printed.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Limits of the engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &ServeArgs, isa: Isa) -> Result<(), CliError> {
    let start = Instant::now();
    let quiet = args.common.quiet;
    let files = Files::open(&args.common, isa)?;
    let tokenizer = files.tokenizer()?.ok_or(TextError::NoTokenizer)?;
    let template = ChatTemplate::from_files(&files.text);
    let model = ServedModel {
        names: names(args),
        format: AnswerFormat::detect(template.as_ref().ok(), Some(&tokenizer)),
        tokenizer: tokenizer.clone(),
        template,
        vocab_size: files.model.spec.vocab_size,
        meta: meta(&files.model.spec),
        fingerprint: fingerprint(&files),
    };
    let engine = args.engine.config(args.common.threads());
    let (engine, ()) = files.engine(Some(tokenizer), isa, engine, Progress::bar_or_lines(quiet), |limits| {
        if !quiet {
            eprintln!("{}", Shown(limits));
        }
        Ok(())
    })?;
    let config = config(args);
    let limits = engine.limits();
    let ready = format!(
        "model {}  context {}  {} pages",
        model.names[0],
        grouped(limits.max_model_len),
        grouped(limits.device.pages)
    );
    let bind = config.bind.clone();
    let outcome = server::run(engine, model, config, |place| {
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("ready in {seconds:.1} s: {place}  {ready}");
    });
    match outcome {
        Ok(Outcome::Drained) => Ok(()),
        Ok(Outcome::Cut(answers)) => Err(CliError::Cut(answers)),
        Err(source) => Err(CliError::Listen { place: shown(&bind), source }),
    }
}

fn config(args: &ServeArgs) -> ServerConfig {
    let bind = match &args.uds {
        Some(path) => Bind::Unix(path.clone()),
        None => Bind::Tcp { host: args.host.clone(), port: args.port },
    };
    ServerConfig {
        bind,
        api_keys: args.api_key.clone(),
        admin_api_key: args.admin_api_key.clone(),
        ..ServerConfig::default()
    }
}

fn shown(bind: &Bind) -> String {
    match bind {
        Bind::Tcp { host, port } => format!("{host}:{port}"),
        Bind::Unix(path) => path.display().to_string(),
    }
}

/// The names that were given, or that of the folder.
fn names(args: &ServeArgs) -> Vec<String> {
    if !args.served_model_name.is_empty() {
        return args.served_model_name.clone();
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

//! The flags of `serve`, and the values they take.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use super::settings::Settings;
use super::values::{
    Bytes, Seconds, at_least_one, connections, parse_host, parse_logprobs, parse_origin,
    parse_some_time,
};
use crate::cli::CliError;
use crate::cli::common::CommonArgs;
use crate::cli::limits::{EngineArgs, at_least_one_token};
use crate::config::{Device, EngineConfig};
use crate::engine::EngineError;
use crate::server::{Bind, ServerConfig};

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = SOURCES)]
pub struct ServeArgs {
    /// Folder of the model, as --model.
    #[arg(value_name = "MODEL")]
    pub folder: Option<PathBuf>,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Settings in TOML, named as the flags: max-num-seqs = 64.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the settings, print each with where it comes from, and end; the model is not looked
    /// at.
    #[arg(long)]
    pub print_config: bool,
    /// Where it listens.
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Whom it lets in.
    #[command(flatten)]
    pub access: AccessArgs,
    /// What it answers.
    #[command(flatten)]
    pub answers: AnswerArgs,
    /// How much it takes, and how it ends.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Limits of the engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Where the values of the others come from.
    #[arg(skip)]
    pub settings: Settings,
}

const SOURCES: &str = "\
A flag wins over its environment variable (DELTAPOOL_MAX_NUM_SEQS for --max-num-seqs), which wins
over --config, which wins over the default. In the file, keys may stand at the top or in a table
[serve]. Switches take a value as well: --no-ui=false.

SIGTERM and Ctrl-C let running answers end, within --shutdown-timeout; a second one cuts them.

Exit codes: 0 all was answered, 1 failed, 2 wrong usage, 3 model not loadable or not supported,
4 not enough memory or no device, 5 address in use, 74 no listening there, 75 answers cut short.";

/// Where a server listens.
#[derive(Debug, Args)]
#[command(next_help_heading = "Listening")]
pub struct ListenArgs {
    /// Address to listen on; anything but loopback lets other machines in.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one, which is printed.
    #[arg(short, long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Listen on a socket in the file system instead, for this user alone.
    #[arg(long, value_name = "PATH")]
    pub uds: Option<PathBuf>,
    /// Write the port to this file once requests are taken, and remove it at the end.
    #[arg(long, value_name = "FILE")]
    pub port_file: Option<PathBuf>,
    /// Connections at once.
    #[arg(
        long,
        value_name = "N",
        default_value_t = defaults().max_connections,
        value_parser = connections
    )]
    pub max_connections: usize,
    /// Longest body of a request: bytes, or 32MiB.
    #[arg(long, value_name = "SIZE", default_value_t = Bytes(defaults().max_body_bytes))]
    pub max_body: Bytes,
    /// Seconds for the headers of a request, and for the next request on a connection.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = Seconds(defaults().header_timeout),
        value_parser = parse_some_time
    )]
    pub header_timeout: Seconds,
    /// Seconds for the body of a request.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = Seconds(defaults().body_timeout),
        value_parser = parse_some_time
    )]
    pub body_timeout: Seconds,
    /// Seconds that an answer waits for a client that does not read.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = Seconds(defaults().write_timeout),
        value_parser = parse_some_time
    )]
    pub write_timeout: Seconds,
    /// Seconds of silence after which a stream gets a comment, so that nothing between takes it
    /// for dead; 0 for never.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().sse_keep_alive))]
    pub sse_keep_alive: Seconds,
}

/// Whom a server lets in.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// A key that requests must carry; several may be given. Without one everybody may ask.
    #[arg(long, value_name = "KEY", value_parser = NonEmptyStringValueParser::new())]
    pub api_key: Vec<String>,
    /// Such keys in a file, one a line, besides those of --api-key.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The key of the routes that change the server; without one they are open to this machine
    /// alone.
    #[arg(long, value_name = "KEY", value_parser = NonEmptyStringValueParser::new())]
    pub admin_api_key: Option<String>,
    /// Let /metrics be read without a key.
    #[arg(long)]
    pub metrics_public: bool,
    /// Origin of web pages that may ask, https://example.org or *; several may be given.
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origin)]
    pub cors_origin: Vec<String>,
    /// A further name under which a server on loopback is reached, without the port; several may
    /// be given.
    #[arg(long, value_name = "HOST", value_parser = parse_host)]
    pub allowed_host: Vec<String>,
    /// Do not serve the page at /.
    #[arg(long)]
    pub no_ui: bool,
}

/// What a server answers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Answers")]
pub struct AnswerArgs {
    /// Name of the model in the API; several may be given. Default: the folder's name.
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub served_model_name: Vec<String>,
    /// Take every model name for the one that is served.
    #[arg(long)]
    pub any_model: bool,
    /// A chat template, instead of the model's own.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// How tokens are chosen where a request does not say: auto as the model's
    /// generation_config.json says, vllm as the API says, or by such a file in another folder.
    #[arg(long, value_name = "auto|vllm|DIR", default_value = "auto")]
    pub generation_config: GenerationConfig,
    /// Refuse unknown fields of a request, instead of naming them in a header.
    #[arg(long)]
    pub strict_params: bool,
    /// Give figures with every answer, also where the request does not ask for them.
    #[arg(long)]
    pub per_request_metrics: bool,
    /// Most alternatives of a token that a request may ask for, 20 at most.
    #[arg(
        long,
        value_name = "N",
        default_value_t = defaults().max_logprobs,
        value_parser = parse_logprobs
    )]
    pub max_logprobs: usize,
}

/// How much a server takes, and how it ends.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Answers that wait or run at once; more are refused, to be asked for again later.
    #[arg(
        long,
        value_name = "N",
        default_value_t = defaults().max_num_queued_reqs,
        value_parser = at_least_one
    )]
    pub max_num_queued_reqs: usize,
    /// Prompt tokens that wait at once; more are refused. 4M is 4,194,304.
    #[arg(
        long,
        value_name = "N",
        default_value_t = defaults().max_num_queued_tokens,
        value_parser = at_least_one_token
    )]
    pub max_num_queued_tokens: usize,
    /// Seconds for answers that run when the server is told to end; 0 cuts them at once.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().shutdown_timeout))]
    pub shutdown_timeout: Seconds,
    /// Seconds in which requests are still taken after that, for a balancer that has not heard; 0
    /// for none.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().drain_delay))]
    pub drain_delay: Seconds,
    /// Seconds with work and without a step after which the server calls itself unhealthy.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = Seconds(defaults().stall_timeout),
        value_parser = parse_some_time
    )]
    pub stall_timeout: Seconds,
    /// Seconds between two lines about the load, while there is any; 0 for none.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().status_every))]
    pub status_every: Seconds,
}

fn defaults() -> ServerConfig {
    ServerConfig::default()
}

impl ServeArgs {
    /// What the server is told of it.
    ///
    /// # Errors
    /// Two places to listen on, or a file of keys that cannot be read.
    pub fn server(&self) -> Result<ServerConfig, CliError> {
        let (listen, access, answers, load) =
            (&self.listen, &self.access, &self.answers, &self.load);
        let mut api_keys = access.api_key.clone();
        if let Some(path) = &access.api_key_file {
            api_keys.extend(self.read_keys(path)?);
        }
        Ok(ServerConfig {
            bind: self.bind()?,
            api_keys,
            admin_api_key: access.admin_api_key.clone(),
            metrics_public: access.metrics_public,
            cors_origins: access.cors_origin.clone(),
            allowed_hosts: access.allowed_host.clone(),
            max_body_bytes: listen.max_body.0,
            max_connections: listen.max_connections,
            header_timeout: listen.header_timeout.0,
            body_timeout: listen.body_timeout.0,
            write_timeout: listen.write_timeout.0,
            sse_keep_alive: listen.sse_keep_alive.0,
            max_num_queued_reqs: load.max_num_queued_reqs,
            max_num_queued_tokens: load.max_num_queued_tokens,
            shutdown_timeout: load.shutdown_timeout.0,
            drain_delay: load.drain_delay.0,
            stall_timeout: load.stall_timeout.0,
            status_every: load.status_every.0,
            quiet: self.common.quiet,
            strict_params: answers.strict_params,
            any_model: answers.any_model,
            per_request_metrics: answers.per_request_metrics,
            max_logprobs: answers.max_logprobs,
            page: !access.no_ui,
        })
    }

    /// What the engine is told of it, on `device`.
    ///
    /// # Errors
    /// A limit that cannot work, whatever the model and the machine.
    pub fn limits(&self, device: Device) -> Result<EngineConfig, CliError> {
        let config = self.engine.config(self.common.threads(), device);
        let checked = config.check().map_err(|limit| CliError::from(EngineError::from(limit)));
        checked.map_err(|error| self.settings.located(error))?;
        Ok(config)
    }

    /// A socket or an address: what was said in the stronger place.
    fn bind(&self) -> Result<Bind, CliError> {
        let (socket, address) = self.settings.socket_and_address();
        let ListenArgs { host, port, port_file, .. } = &self.listen;
        match &self.listen.uds {
            Some(_) if socket.outranks(address) && port_file.is_some() => {
                Err(CliError::Usage("--port-file: a socket of --uds has no port".to_owned()))
            }
            Some(path) if socket.outranks(address) => Ok(Bind::Unix(path.clone())),
            Some(_) if !address.outranks(socket) => {
                let message = "--uds is instead of --host and --port; give one or the other";
                Err(CliError::Usage(message.to_owned()))
            }
            _ => {
                // An address of IPv6 may stand in brackets, as in the line that says where it is.
                let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
                Ok(Bind::Tcp { host: bare.unwrap_or(host).to_owned(), port: *port })
            }
        }
    }

    /// Keys, one a line; empty lines and those that begin with # are skipped.
    fn read_keys(&self, path: &Path) -> Result<Vec<String>, CliError> {
        const FLAG: &str = "api-key-file";
        let text = fs::read_to_string(path);
        let text = text.map_err(|source| self.settings.file_error(FLAG, path, source))?;
        let lines = text.lines().map(str::trim);
        let keys: Vec<String> = lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(str::to_owned)
            .collect();
        if keys.is_empty() {
            // An empty file must not open the server to everybody.
            let file = self.settings.spelled(FLAG, path);
            return Err(CliError::Usage(format!("{file}: no key in it")));
        }
        Ok(keys)
    }
}

/// Where it is said how tokens are chosen if a request does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GenerationConfig {
    /// In the model's own file, if it has one.
    Auto,
    /// In the API: the whole distribution, as the model gives it.
    Api,
    /// In the file of this folder.
    Folder(PathBuf),
}

impl FromStr for GenerationConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<GenerationConfig, String> {
        match text {
            "" => Err("auto, vllm or a folder".to_owned()),
            "auto" => Ok(GenerationConfig::Auto),
            "vllm" => Ok(GenerationConfig::Api),
            folder => Ok(GenerationConfig::Folder(folder.into())),
        }
    }
}

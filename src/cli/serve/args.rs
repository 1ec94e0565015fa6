//! The flags of `serve`, and the values they take.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use super::settings::Settings;
use crate::cli::CliError;
use crate::cli::common::CommonArgs;
use crate::cli::limits::EngineArgs;
use crate::config::parse_bytes;
use crate::request::MAX_LOGPROBS;
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
    /// Print every setting with where it comes from, and end.
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
4 not enough memory, 5 address in use, 74 no listening there, 75 answers cut short.";

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
    /// Write the port to this file once requests are taken.
    #[arg(long, value_name = "FILE")]
    pub port_file: Option<PathBuf>,
    /// Connections at once.
    #[arg(
        long,
        value_name = "N",
        default_value_t = defaults().max_connections,
        value_parser = at_least_one
    )]
    pub max_connections: usize,
    /// Longest body of a request: bytes, or 32MiB.
    #[arg(long, value_name = "SIZE", default_value_t = Bytes(defaults().max_body_bytes))]
    pub max_body: Bytes,
    /// Seconds for the headers of a request, and for the next request on a connection.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().header_timeout))]
    pub header_timeout: Seconds,
    /// Seconds for the body of a request.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().body_timeout))]
    pub body_timeout: Seconds,
    /// Seconds that an answer waits for a client that does not read.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().write_timeout))]
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
    /// Further such keys, one a line.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The key of the routes that change the server; without one they are open to this machine
    /// alone.
    #[arg(long, value_name = "KEY", value_parser = NonEmptyStringValueParser::new())]
    pub admin_api_key: Option<String>,
    /// Let figures be read without a key.
    #[arg(long)]
    pub metrics_public: bool,
    /// Origin of web pages that may ask, https://example.org or *; several may be given.
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origin)]
    pub cors_origin: Vec<String>,
    /// A further name under which a server on loopback is reached; several may be given.
    #[arg(long, value_name = "HOST", value_parser = NonEmptyStringValueParser::new())]
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
    /// Most alternatives of a token that a request may ask for.
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
    /// Prompt tokens that wait at once; more are refused.
    #[arg(
        long,
        value_name = "N",
        default_value_t = defaults().max_num_queued_tokens,
        value_parser = at_least_one
    )]
    pub max_num_queued_tokens: usize,
    /// Seconds for answers that run when the server is told to end.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().shutdown_timeout))]
    pub shutdown_timeout: Seconds,
    /// Seconds in which requests are still taken after that, for a balancer that has not heard.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().drain_delay))]
    pub drain_delay: Seconds,
    /// Seconds with work and without a step after which the server calls itself unhealthy.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(defaults().stall_timeout))]
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
            api_keys.extend(read_keys(path)?);
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
            status_every: if self.common.quiet { Duration::ZERO } else { load.status_every.0 },
            strict_params: answers.strict_params,
            any_model: answers.any_model,
            per_request_metrics: answers.per_request_metrics,
            max_logprobs: answers.max_logprobs,
            page: !access.no_ui,
        })
    }

    /// A socket or an address: what was said in the stronger place.
    fn bind(&self) -> Result<Bind, CliError> {
        let address = self.settings.source("host").min(self.settings.source("port"));
        let socket = self.settings.source("uds");
        match &self.listen.uds {
            Some(_) if socket < address && self.listen.port_file.is_some() => {
                Err(CliError::Usage("--port-file: a socket of --uds has no port".to_owned()))
            }
            Some(path) if socket < address => Ok(Bind::Unix(path.clone())),
            Some(_) if socket == address => {
                let message = "--uds is instead of --host and --port; give one or the other";
                Err(CliError::Usage(message.to_owned()))
            }
            _ => {
                let ListenArgs { host, port, .. } = &self.listen;
                Ok(Bind::Tcp { host: host.clone(), port: *port })
            }
        }
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

/// Keys, one a line; empty lines and those that begin with # are skipped.
fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|source| CliError::File { path: shown.to_string(), source })?;
    let lines = text.lines().map(str::trim);
    let keys: Vec<String> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if keys.is_empty() {
        // An empty file must not open the server to everybody.
        return Err(CliError::Usage(format!("--api-key-file {shown}: no key in it")));
    }
    Ok(keys)
}

/// A time in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Seconds(pub Duration);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Seconds, String> {
        let seconds: f64 =
            text.parse().map_err(|_| "seconds are a number, 0 or more".to_owned())?;
        let time = Duration::try_from_secs_f64(seconds);
        // A year: what is added to a point in time must not overflow.
        let time = time.ok().filter(|time| time.as_secs() <= 366 * 24 * 3600);
        time.map(Seconds).ok_or_else(|| "seconds are a number from 0 to a year's".to_owned())
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub usize);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let bytes = parse_bytes(text)?;
        if bytes == 0 { Err("no request fits in 0 bytes".to_owned()) } else { Ok(Bytes(bytes)) }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes.is_multiple_of(1 << 20) => write!(f, "{}MiB", bytes >> 20),
            bytes => write!(f, "{bytes}"),
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().map_err(|_| "a whole number, 1 or more".to_owned())?;
    // What a semaphore of the runtime can count.
    let most = usize::MAX >> 3;
    (1..=most).contains(&number).then_some(number).ok_or_else(|| format!("1 to {most}"))
}

fn parse_logprobs(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= MAX_LOGPROBS);
    number.ok_or_else(|| format!("0 to {MAX_LOGPROBS}"))
}

/// An origin as browsers send it: a scheme and a host, perhaps a port, and nothing behind.
fn parse_origin(text: &str) -> Result<String, String> {
    let host = text.split_once("://").map(|(_, host)| host);
    let is_origin = host.is_some_and(|host| {
        let mut bytes = host.bytes();
        !host.is_empty() && bytes.all(|byte| byte.is_ascii_graphic() && byte != b'/')
    });
    if text == "*" || is_origin {
        return Ok(text.to_owned());
    }
    Err("an origin is a scheme and a host, https://example.org, or * for all".to_owned())
}

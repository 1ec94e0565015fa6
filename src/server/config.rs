//! What a server listens on, whom it lets in, and its limits.

use std::path::PathBuf;
use std::time::Duration;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bind {
    /// A host name or address, and a port; port 0 takes a free one.
    Tcp {
        /// Host name or address.
        host: String,
        /// Port.
        port: u16,
    },
    /// A socket in the file system, for its owner alone.
    Unix(PathBuf),
}

/// Limits of a server, and whom it lets in.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerConfig {
    /// Where it listens.
    pub bind: Bind,
    /// Keys of which a request must carry one; with none, everybody may ask.
    pub api_keys: Vec<String>,
    /// The key of the routes that change the server; without one they are open to this machine
    /// alone.
    pub admin_api_key: Option<String>,
    /// Figures may be read without a key.
    pub metrics_public: bool,
    /// Origins of web pages that may ask; `*` for all. None by default.
    pub cors_origins: Vec<String>,
    /// Further names under which a server on loopback is reached.
    pub allowed_hosts: Vec<String>,
    /// Longest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// Connections at once.
    pub max_connections: usize,
    /// For the headers of a request, and for the next request on a connection.
    pub header_timeout: Duration,
    /// For the body of a request.
    pub body_timeout: Duration,
    /// Bytes of an answer may wait so long for a client that does not read.
    pub write_timeout: Duration,
    /// A comment is sent after so long a silence of a stream; never with zero.
    pub sse_keep_alive: Duration,
    /// Requests that wait or run; more are refused.
    pub max_num_queued_reqs: usize,
    /// Prompt tokens of requests that have not answered yet; more are refused.
    pub max_num_queued_tokens: usize,
    /// For requests that run when the server is told to end.
    pub shutdown_timeout: Duration,
    /// Requests are still taken so long after the server was told to end.
    pub drain_delay: Duration,
    /// With work to do and no step for so long, the server calls itself unhealthy.
    pub stall_timeout: Duration,
    /// A line about the load is told so often while there is any; never with zero.
    pub status_every: Duration,
    /// Nothing is said on standard error of how it goes.
    pub quiet: bool,
    /// Unknown fields of a request are an error; otherwise they are named in a header.
    pub strict_params: bool,
    /// Every model name is taken for the one that is there.
    pub any_model: bool,
    /// Answers carry figures even when the request does not ask for them.
    pub per_request_metrics: bool,
    /// Most alternatives of a token that a request may ask for.
    pub max_logprobs: usize,
    /// Serve the page at `/`.
    pub page: bool,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            bind: Bind::Tcp { host: "127.0.0.1".to_owned(), port: 8000 },
            api_keys: Vec::new(),
            admin_api_key: None,
            metrics_public: false,
            cors_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            max_body_bytes: 32 << 20,
            max_connections: 4096,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            sse_keep_alive: Duration::from_secs(15),
            max_num_queued_reqs: 1024,
            max_num_queued_tokens: 1 << 22,
            shutdown_timeout: Duration::from_secs(30),
            drain_delay: Duration::ZERO,
            stall_timeout: Duration::from_secs(120),
            status_every: Duration::from_secs(10),
            quiet: false,
            strict_params: false,
            any_model: false,
            per_request_metrics: false,
            max_logprobs: 20,
            page: true,
        }
    }
}

//! An HTTP server over an engine, with the routes that clients of OpenAI's and Anthropic's APIs
//! use.
//!
//! ```text
//!  connection --listen--> guard (name, host, key) --> body (JSON) --> fields --> request::Request
//!                                                                                     |
//!  client <-- sse / JSON <-- openai:: ... <-- answers (events of the engine) <-- app.submit
//! ```
//!
//! The engine keeps its own thread; the server has a runtime of its own and talks to it only by
//! requests and events. A request that can never run is refused before any header is sent; a
//! client that leaves drops its [`Handle`](crate::engine::Handle), which cancels its request within
//! a step, whether it waits, runs or is parked.

mod answers;
mod anthropic;
mod app;
mod body;
mod config;
mod conversation;
mod error;
mod fields;
mod guard;
mod info;
mod listen;
mod metrics;
mod openai;
mod page;
mod params;
mod queue;
mod replay;
mod snapshot;
mod sse;
mod status;
mod structure;
mod tokens;
mod tools;

use std::fmt::Write;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::{delete, get, post};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

pub use app::ServedModel;
pub use config::{Bind, ServerConfig};
pub use listen::{Address, Outcome, probe};

use crate::engine::Engine;
use crate::text::TextError;
use app::{App, Shared};
use error::ApiError;

/// Serves `engine` until a signal ends it. `on_ready` hears where it listens, once it does; when it
/// fails, so does the server.
///
/// # Errors
/// An address that cannot be listened on, or a runtime that the system refuses.
pub fn run(
    engine: Engine,
    model: ServedModel,
    config: ServerConfig,
    on_ready: impl FnOnce(&Address) -> io::Result<()>,
) -> io::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers())
        .thread_name("deltapool-http")
        .enable_all()
        .build()?;
    let app = Arc::new(App::new(engine, model, config));
    let outcome = runtime.block_on(listen::serve(Arc::clone(&app), router(&app), on_ready));
    // What handlers still hold ends with the runtime, and the engine with what they hold.
    runtime.shutdown_background();
    outcome
}

/// Threads that serve connections. One writes some tens of thousands of tokens a second, more than
/// the engine makes on a small machine, where a second would only be woken for the work of the
/// first, and push the engine's threads off their processors.
fn workers() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    (processors / 8).clamp(1, 4)
}

/// All routes.
fn router(app: &Shared) -> Router {
    let page = if app.config.page {
        Router::new().route("/", get(page::page)).route("/favicon.ico", get(page::icon))
    } else {
        Router::new()
    };
    let routes = page
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/messages", post(anthropic::messages::handle))
        .route("/v1/messages/count_tokens", post(anthropic::messages::count_tokens))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(tokens::apply_template))
        .route("/health", get(info::health))
        .route("/ready", get(info::ready))
        .route("/live", get(info::live))
        .route("/ping", get(info::live))
        .route("/version", get(info::version))
        .route("/props", get(info::props))
        .route("/load", get(info::load))
        .route("/slots", get(snapshot::slots))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/engine/snapshot", get(snapshot::snapshot))
        .route("/v1/engine/events", get(snapshot::events))
        .route("/openapi.json", get(info::openapi))
        .route("/abort_request", post(info::abort))
        .route("/v1/requests/{id}", delete(info::abort_by_path))
        .route("/reset_prefix_cache", post(info::reset_prefix_cache))
        .route("/flush_cache", post(info::reset_prefix_cache))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(Arc::clone(app));
    routes
        .layer(from_fn_with_state(Arc::clone(app), guard::guard))
        .layer(cors(&app.config))
        .layer(CatchPanicLayer::custom(|_| {
            ApiError::failed("a fault of the server; it goes on").into_response()
        }))
        .layer(from_fn(guard::name))
        .layer(from_fn_with_state(Arc::clone(app), metrics::count))
}

/// Pages of other sites may not ask, unless their origin is named.
fn cors(config: &ServerConfig) -> CorsLayer {
    let origins = &config.cors_origins;
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    let methods = [Method::GET, Method::POST, Method::DELETE, Method::OPTIONS];
    // By the names that the page asks for: a star would not stand for Authorization.
    let headers = AllowHeaders::mirror_request();
    let shown = TOLD_HEADERS.map(HeaderName::from_static);
    let layer = CorsLayer::new().allow_origin(allowed).allow_methods(methods);
    layer.allow_headers(headers).expose_headers(shown)
}

/// Headers of answers that pages of other origins may read.
const TOLD_HEADERS: [&str; 6] = [
    "x-request-id",
    "request-id",
    "x-ignored-params",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
];

/// Routes of other servers that clients may look for, by their first part after `/v1/`.
const NOT_SERVED: [&str; 9] = [
    "audio",
    "batches",
    "embeddings",
    "files",
    "images",
    "moderations",
    "rerank",
    "score",
    "videos",
];

async fn no_route(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(100).collect();
    let part = path.strip_prefix("/v1/").and_then(|rest| rest.split('/').next());
    if part.is_some_and(|part| NOT_SERVED.contains(&part)) {
        let message = format!("{path} is not served: this server continues text, and no more");
        return ApiError::not_found("route_not_supported", message);
    }
    let message = format!("there is no route {} {path}", request.method());
    ApiError::not_found("route_not_found", message)
}

async fn no_method(request: Request) -> ApiError {
    let message = format!("{} is not allowed here", request.method());
    let status = StatusCode::METHOD_NOT_ALLOWED;
    ApiError::new(status, "invalid_request_error", "method_not_allowed", message)
}

/// A name that nobody can foresee: 24 hexadecimal digits after `prefix`.
fn random_id(prefix: &str) -> String {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).expect("the system has random bytes");
    bytes.iter().fold(prefix.to_owned(), |mut id, byte| {
        write!(id, "{byte:02x}").expect("a string takes everything");
        id
    })
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Does what takes a processor for a while, without holding up the other connections.
fn encode<T>(work: impl FnOnce() -> Result<T, TextError>) -> Result<T, ApiError> {
    tokio::task::block_in_place(work).map_err(|error| ApiError::failed(error.to_string()))
}

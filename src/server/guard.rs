//! Who may ask: the Host header, keys, and the shape of a request before any of it is read.

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::anthropic::error_body;
use super::app::Shared;
use super::config::{Bind, ServerConfig};
use super::error::ApiError;

/// Longest path and query, in bytes.
const MAX_URI_BYTES: usize = 8192;

/// Most bytes of the headers of a request, names and values together.
pub const MAX_HEADER_BYTES: usize = 32 << 10;

/// Longest request id that is taken from a client, in bytes.
const MAX_ID_BYTES: usize = 128;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The name that the SDKs of Anthropic read.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Probes, and what a browser needs before a key can be typed in.
const PUBLIC: [&str; 7] = ["/", "/health", "/ready", "/live", "/ping", "/version", "/favicon.ico"];

/// Routes that change the server.
const ADMIN: [&str; 2] = ["/reset_prefix_cache", "/flush_cache"];

/// The other side of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// It is on this machine.
    pub is_local: bool,
}

/// The name of a request: the client's, or ours.
#[derive(Debug, Clone)]
pub struct RequestName {
    /// The name.
    pub id: String,
    /// It is the client's.
    pub is_given: bool,
}

impl RequestName {
    /// The name, unless the client has given none in the header and this one in the body.
    pub fn or_of_body(self, id: Option<String>) -> RequestName {
        match id.filter(|_| !self.is_given) {
            Some(id) => RequestName { id, is_given: true },
            None => self,
        }
    }

    /// What answers to the request are called: by the client's name or, without one, by one that
    /// nobody can foresee.
    pub fn answer_id(&self, prefix: &str) -> String {
        if self.is_given { format!("{prefix}{}", self.id) } else { super::random_id(prefix) }
    }

    /// The answer, with the name for its header.
    pub fn tell(self, mut response: Response) -> Response {
        response.extensions_mut().insert(self);
        response
    }
}

/// Whether a client may call a request so.
pub fn is_name(id: &str) -> bool {
    (1..=MAX_ID_BYTES).contains(&id.len()) && id.bytes().all(|b| (0x21..0x7f).contains(&b))
}

/// Digests of the keys: comparing digests takes a time that says nothing of a key.
pub struct Keys {
    api: Vec<blake3::Hash>,
    admin: Option<blake3::Hash>,
}

impl Keys {
    /// The keys of a configuration.
    pub fn new(config: &ServerConfig) -> Keys {
        let digest = |key: &String| blake3::hash(key.as_bytes());
        Keys {
            api: config.api_keys.iter().map(digest).collect(),
            admin: config.admin_api_key.as_ref().map(digest),
        }
    }

    /// Whether a request with these headers may ask for `path`.
    fn check(&self, path: &str, headers: &HeaderMap, peer: Peer) -> Result<(), ApiError> {
        let given = key_of(headers).map(blake3::hash);
        let is_admin = matches!((&self.admin, &given), (Some(key), Some(given)) if key == given);
        if ADMIN.contains(&path) {
            return match &self.admin {
                Some(_) if is_admin => Ok(()),
                Some(_) => Err(ApiError::forbidden("admin_only", "this route needs the admin key")),
                None if is_of_another_site(headers) => Err(ApiError::forbidden(
                    "admin_only",
                    "without --admin-api-key this route is not open to pages of other sites",
                )),
                None if peer.is_local => self.check_api(given, is_admin),
                None => Err(ApiError::forbidden(
                    "admin_only",
                    "without --admin-api-key this route is open to the server's machine alone",
                )),
            };
        }
        self.check_api(given, is_admin)
    }

    fn check_api(&self, given: Option<blake3::Hash>, is_admin: bool) -> Result<(), ApiError> {
        // All keys are compared, so that the time does not tell which one was close.
        let known = |given| self.api.iter().fold(false, |known, key| known | (*key == given));
        if self.api.is_empty() || is_admin || given.is_some_and(known) {
            return Ok(());
        }
        let message = match given {
            None => "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            Some(_) => "the key is not known here",
        };
        let status = StatusCode::UNAUTHORIZED;
        Err(ApiError::new(status, "authentication_error", "invalid_api_key", message))
    }
}

fn key_of(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get(X_API_KEY).map(HeaderValue::as_bytes))
}

/// Lets a request in, or says why not.
pub async fn guard(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>().copied().unwrap_or(Peer { is_local: false });
    let path = request.uri().path();
    let checked = check_uri(&request)
        .and_then(|()| check_size(request.headers()))
        .and_then(|()| check_host(&app.config, request.headers()))
        .and_then(|()| {
            let figures_are_public = app.config.metrics_public && path == "/metrics";
            if PUBLIC.contains(&path) || figures_are_public || request.method() == Method::OPTIONS {
                return Ok(());
            }
            app.keys.check(path, request.headers(), peer)
        });
    match checked {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check_uri(request: &Request) -> Result<(), ApiError> {
    let bytes = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    if bytes <= MAX_URI_BYTES {
        return Ok(());
    }
    let message = format!("the address has {bytes} bytes, {MAX_URI_BYTES} at most are taken");
    let status = StatusCode::URI_TOO_LONG;
    Err(ApiError::new(status, "invalid_request_error", "uri_too_long", message))
}

fn check_size(headers: &HeaderMap) -> Result<(), ApiError> {
    let sizes = headers.iter().map(|(name, value)| name.as_str().len() + value.len());
    let bytes: usize = sizes.sum();
    if bytes <= MAX_HEADER_BYTES {
        return Ok(());
    }
    let message = format!("the headers have {bytes} bytes, {MAX_HEADER_BYTES} at most are taken");
    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    Err(ApiError::new(status, "invalid_request_error", "headers_too_large", message))
}

/// A page on another site cannot reach a server on loopback through a name that it has pointed
/// here: the name would stand in the Host header.
fn check_host(config: &ServerConfig, headers: &HeaderMap) -> Result<(), ApiError> {
    let Bind::Tcp { host: bound, .. } = &config.bind else { return Ok(()) };
    if !is_loopback(bound) {
        return Ok(());
    }
    let Some(given) = headers.get(HOST).and_then(|host| host.to_str().ok()) else {
        return Ok(()); // HTTP/1.0
    };
    let host = given.parse::<Authority>().ok();
    let host = host.as_ref().map_or(given, Authority::host);
    let name = host.trim_matches(['[', ']']);
    if is_loopback(name) || config.allowed_hosts.iter().any(|h| h.eq_ignore_ascii_case(name)) {
        return Ok(());
    }
    let message = "this name is not one of the server's; --allowed-host adds it";
    Err(ApiError::forbidden("host_not_allowed", message))
}

/// Whether a host name or address is this machine alone.
pub fn is_loopback(host: &str) -> bool {
    let is_local = host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    is_local || host.eq_ignore_ascii_case("localhost")
}

/// Whether a page that another server has sent asks, as far as its browser says so.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let is_foreign = |origin: &str| {
        let place = origin.split_once("://").map_or(origin, |(_, place)| place);
        text("host").is_none_or(|host| !host.eq_ignore_ascii_case(place))
    };
    let is_from_elsewhere = |site: &str| !matches!(site, "same-origin" | "none");
    text("origin").is_some_and(is_foreign) || text("sec-fetch-site").is_some_and(is_from_elsewhere)
}

/// Gives every request a name, and every answer the same; errors of the Anthropic routes get that
/// API's shape.
pub async fn name(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(&X_REQUEST_ID).and_then(|value| value.to_str().ok());
    let given = given.filter(|id| is_name(id)).map(str::to_owned);
    let is_given = given.is_some();
    let id = given.unwrap_or_else(|| super::random_id("req-"));
    let is_anthropic = request.uri().path().starts_with("/v1/messages");
    request.extensions_mut().insert(RequestName { id: id.clone(), is_given });
    let mut response = next.run(request).await;
    let renamed = response.extensions_mut().remove::<RequestName>();
    let id = renamed.map_or(id, |name| name.id);
    if is_anthropic && let Some(error) = response.extensions().get::<ApiError>() {
        let body = axum::Json(error_body(error, &id));
        response = (error.status, error.headers(), body).into_response();
    }
    let value = HeaderValue::from_str(&id).expect("it is printable");
    if is_anthropic {
        response.headers_mut().insert(REQUEST_ID, value.clone());
    }
    response.headers_mut().insert(X_REQUEST_ID, value);
    response
}

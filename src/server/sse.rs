//! Server-sent events.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{Stream, unfold};
use serde_json::Value;
use tokio::time::timeout;

/// One event: `data: {...}`, with its name where the API has names.
pub fn event(name: Option<&str>, data: &Value) -> String {
    match name {
        Some(name) => format!("event: {name}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    }
}

/// The end of an OpenAI stream.
pub const DONE: &str = "data: [DONE]\n\n";

/// What gives a stream its events.
pub trait Source: Send + 'static {
    /// The next events as text, none at the end. Dropped and called again when a keep-alive is
    /// due in between: it must lose nothing then.
    fn next(&mut self) -> impl Future<Output = Option<String>> + Send;
}

/// The answer that streams `source`, with a comment after each silence of `keep_alive`; with zero
/// there is none.
pub fn response<S: Source>(source: S, keep_alive: Duration) -> Response {
    let headers = [
        (CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(stream(source, keep_alive))).into_response()
}

fn stream<S: Source>(
    source: S,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> {
    unfold(source, move |mut source| async move {
        let next = if keep_alive.is_zero() {
            source.next().await
        } else {
            match timeout(keep_alive, source.next()).await {
                Ok(next) => next,
                Err(_) => Some(": keep-alive\n\n".to_owned()),
            }
        };
        next.map(|text| (Ok(Bytes::from(text)), source))
    })
}

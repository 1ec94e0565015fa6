//! The body of a request: JSON of bounded size, in bounded time.

use axum::body::{Body as HttpBody, HttpBody as _};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;
use tokio::task::block_in_place;
use tokio::time::timeout;

use super::app::{App, Shared};
use super::error::ApiError;
use super::fields::Fields;
use super::guard::{self, RequestName};

/// A longer body takes more than about a millisecond to parse.
const LONG_BYTES: usize = 64 << 10;

/// A JSON object as the body of a request.
#[derive(Debug)]
pub struct Body(pub Fields);

impl FromRequest<Shared> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Shared) -> Result<Body, ApiError> {
        check_type(request.headers().get(CONTENT_TYPE))?;
        let bytes = read(app, request.into_body()).await?;
        // The parser itself refuses more than 128 levels.
        let parse = || serde_json::from_slice(&bytes);
        // What is long takes a while, in which the streams of the same thread must go on.
        let parsed = if bytes.len() > LONG_BYTES { block_in_place(parse) } else { parse() };
        match parsed {
            Ok(Value::Object(map)) => Ok(Body(Fields::of_body(map))),
            Ok(_) => Err(ApiError::invalid("invalid_json", "the body is not a JSON object")),
            Err(error) => {
                let message = format!("the body is not a JSON object: {error}");
                Err(ApiError::invalid("invalid_json", message))
            }
        }
    }
}

/// What a request is called, and its body. The name is taken before all else, so that what goes
/// wrong later is told under it.
#[derive(Debug)]
pub struct Named(pub RequestName, pub Fields);

impl FromRequest<Shared> for Named {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Shared) -> Result<Named, ApiError> {
        let name = request.extensions().get::<RequestName>();
        let name = name.expect("every request is named at the door").clone();
        let Body(mut fields) = Body::from_request(request, app).await?;
        Ok(Named(name_of(name, &mut fields)?, fields))
    }
}

/// The name in a header, or else in the body.
fn name_of(name: RequestName, fields: &mut Fields) -> Result<RequestName, ApiError> {
    let id: Option<String> = fields.take("request_id")?;
    if id.as_ref().is_some_and(|id| !guard::is_name(id)) {
        let message = "request_id: expected 1 to 128 printable characters without spaces";
        return Err(ApiError::value("request_id", message));
    }
    Ok(name.or_of_body(id))
}

/// A web page may send plain text or a form to any server without asking first; JSON it may not.
fn check_type(given: Option<&HeaderValue>) -> Result<(), ApiError> {
    let Some(given) = given else { return Ok(()) };
    let text = given.to_str().unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = essence == "application/json"
        || (essence.starts_with("application/") && essence.ends_with("+json"));
    if is_json {
        return Ok(());
    }
    let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    let message = "the body must be application/json";
    Err(ApiError::new(status, "invalid_request_error", "unsupported_media_type", message))
}

async fn read(app: &App, body: HttpBody) -> Result<Vec<u8>, ApiError> {
    let most = app.config.max_body_bytes;
    let refused = |status, code, message: String| {
        ApiError::new(status, "invalid_request_error", code, message)
    };
    let too_long = || {
        let message = format!("the body is longer than {most} bytes");
        refused(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    };
    // One that says so need not be sent.
    if body.size_hint().lower() > most as u64 {
        return Err(too_long());
    }
    match timeout(app.config.body_timeout, Limited::new(body, most).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes().into()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_long()),
        Ok(Err(_)) => Err(ApiError::invalid("invalid_json", "the body ends before its length")),
        Err(_) => {
            let message = "the body did not come in time".to_owned();
            Err(refused(StatusCode::REQUEST_TIMEOUT, "request_timeout", message))
        }
    }
}

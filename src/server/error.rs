//! What a client is told when its request is not served.
//!
//! Every error has a status, a type, a code that programs read and a message for people that names
//! the field. Messages carry no path and no address, and never more than a few words of the input.

use std::time::Duration;

use axum::Json;
use axum::http::header::{CONNECTION, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::engine::{Refused, SubmitError};
use crate::request::InvalidParam;

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Why a request is not served. Boxed: results that carry one stay small.
#[derive(Debug, Clone)]
pub struct ApiError(Box<Fault>);

/// What an [`ApiError`] says.
#[derive(Debug, Clone)]
pub struct Fault {
    /// HTTP status.
    pub status: StatusCode,
    /// `type` of the OpenAI shape.
    pub kind: &'static str,
    /// `code` of the OpenAI shape.
    pub code: &'static str,
    /// For people.
    pub message: String,
    /// The field, as a path: `messages[2].content`.
    pub param: Option<String>,
    /// When it is worth another try.
    pub retry_after: Option<Duration>,
    /// What SDKs that ask for it are told about another try; their own rules when none.
    pub should_retry: Option<bool>,
    /// Further fields of the error object.
    pub extra: Map<String, Value>,
}

const INVALID: &str = "invalid_request_error";
const DRAINING: &str = "draining";

impl ApiError {
    /// An error of `status`.
    pub fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        ApiError(Box::new(Fault {
            status,
            kind,
            code,
            message: message.into(),
            param: None,
            retry_after: None,
            should_retry: None,
            extra: Map::new(),
        }))
    }

    /// A request that makes no sense.
    pub fn invalid(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, INVALID, code, message)
    }

    /// A field whose value is not allowed.
    pub fn value(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::invalid("invalid_value", message).of(param)
    }

    /// A field of another type than expected.
    pub fn wrong_type(param: impl Into<String>, expected: &str, found: &Value) -> ApiError {
        let param = param.into();
        let message = format!("{param}: expected {expected}, got {}", described(found));
        ApiError::invalid("invalid_type", message).of(param)
    }

    /// A field that must be there and is not.
    pub fn missing(param: impl Into<String>) -> ApiError {
        let param = param.into();
        let message = format!("{param} is required");
        ApiError::invalid("missing_required_parameter", message).of(param)
    }

    /// A field that would change the answer and is not served here.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::invalid("unsupported_parameter", message).of(param)
    }

    /// A prompt of `tokens` tokens, or more together with its answer, where `limit` is the most.
    /// Some clients know it by the code, some by the sentence, some by the two numbers.
    pub fn too_long(tokens: usize, limit: usize) -> ApiError {
        let message = format!(
            "this model's maximum context length is {limit} tokens, but the request needs {tokens}"
        );
        let error = ApiError::invalid("context_length_exceeded", message);
        error.of("messages").with("n_prompt_tokens", tokens).with("n_ctx", limit)
    }

    /// Something that is not there.
    pub fn not_found(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", code, message)
    }

    /// Something that the caller may not do.
    pub fn forbidden(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", code, message)
    }

    /// A server that has too much to do.
    pub fn overloaded(code: &'static str, message: String, retry_after: Duration) -> ApiError {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut error = ApiError::new(status, "overloaded_error", code, message);
        error.0.retry_after = Some(retry_after);
        error
    }

    /// A server that takes nothing more.
    pub fn draining() -> ApiError {
        let message = "the server is shutting down and takes no more requests";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut error = ApiError::new(status, "unavailable_error", DRAINING, message);
        error.0.retry_after = Some(Duration::from_secs(1));
        error
    }

    /// A fault of ours.
    pub fn internal(message: impl Into<String>) -> ApiError {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        ApiError::new(status, "server_error", "internal_error", message)
    }

    /// A fault of ours that the request itself brings about: another try would meet it again.
    pub fn failed(message: impl Into<String>) -> ApiError {
        let mut error = ApiError::internal(message);
        error.0.should_retry = Some(false);
        error
    }

    /// The same, about the field `param`.
    pub fn of(mut self, param: impl Into<String>) -> ApiError {
        self.0.param = Some(param.into());
        self
    }

    /// The same, with a further field.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> ApiError {
        self.0.extra.insert(name.to_owned(), value.into());
        self
    }

    /// The error object in the OpenAI shape, without its envelope.
    pub fn object(&self) -> Value {
        let mut object = Map::new();
        object.insert("message".to_owned(), self.message.as_str().into());
        object.insert("type".to_owned(), self.kind.into());
        object.insert("param".to_owned(), self.param.as_deref().into());
        object.insert("code".to_owned(), self.code.into());
        object.extend(self.extra.clone());
        object.into()
    }

    /// Headers that go with it.
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(after) = self.retry_after {
            let seconds = after.as_millis().div_ceil(1000).max(1);
            headers.insert(RETRY_AFTER, HeaderValue::from(u64::try_from(seconds).unwrap_or(60)));
            let ms = u64::try_from(after.as_millis()).unwrap_or(60_000);
            headers.insert(RETRY_AFTER_MS, HeaderValue::from(ms));
        }
        if let Some(retry) = self.should_retry {
            let value = HeaderValue::from_static(if retry { "true" } else { "false" });
            headers.insert(SHOULD_RETRY, value);
        }
        if self.code == DRAINING {
            // The next request on the connection could not be taken either.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        headers
    }
}

impl std::ops::Deref for ApiError {
    type Target = Fault;

    fn deref(&self) -> &Fault {
        &self.0
    }
}

impl IntoResponse for ApiError {
    /// The OpenAI shape. The error itself goes along as an extension, for the layer that renders
    /// the routes of other shapes.
    fn into_response(self) -> Response {
        let body = Json(json!({ "error": self.object() }));
        let mut response = (self.status, self.headers(), body).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        match error {
            SubmitError::Param(param) => {
                let field = as_sent(param.field);
                let message = InvalidParam { field, ..param }.to_string();
                ApiError::value(field, message)
            }
            SubmitError::Refused(refused) => refused_by_limits(&refused),
            SubmitError::Constraint(error) => {
                let field = as_sent(error.field);
                ApiError::value(field, format!("{field}: {}", error.reason))
            }
            SubmitError::Draining => ApiError::draining(),
            SubmitError::Failed(fault) => ApiError::internal(&fault),
            SubmitError::Stopped => ApiError::internal("the engine has stopped"),
            SubmitError::StopWithoutTokenizer => ApiError::unsupported("stop", error.to_string()),
        }
    }
}

/// The path at which a client has sent a field. Other kinds of constraints have several.
fn as_sent(field: &'static str) -> &'static str {
    match field {
        "regex" => "structured_outputs.regex",
        "choice" => "structured_outputs.choice",
        other => other,
    }
}

/// What can never run, in the words that clients look for.
fn refused_by_limits(refused: &Refused) -> ApiError {
    match *refused {
        Refused::TooLong { tokens, max_model_len, .. } if tokens > max_model_len => {
            ApiError::too_long(tokens, max_model_len)
        }
        Refused::TooLong { tokens, device_tokens, .. } => {
            let message = format!(
                "{tokens} tokens, prompt and answer together, can never fit: the device memory \
                 holds one sequence of {device_tokens} tokens"
            );
            ApiError::invalid("exceeds_pool_capacity", message).of("max_tokens")
        }
        Refused::NoPriorities { .. } => ApiError::value("priority", refused.to_string()),
    }
}

/// A JSON type, with its article; a number as it is, since it may just be too large.
fn described(value: &Value) -> String {
    let name = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) => return number.to_string(),
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    name.to_owned()
}

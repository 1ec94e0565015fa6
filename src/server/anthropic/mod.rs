//! Anthropic's API: `/v1/messages` and what it counts.
//!
//! ```text
//!  body --request--> fields of a chat --Conversation, params--> Request
//!  client <-- events or JSON <-- Blocks <-- Answers
//! ```
//!
//! A request becomes the fields of a chat in OpenAI's shape, so that both are read, rendered and
//! checked by the same code; only answers and errors have a shape of their own.

mod blocks;
pub mod messages;
mod request;

use serde_json::{Value, json};

use super::error::ApiError;

/// An error in the shape of this API.
pub fn error_body(error: &ApiError, request_id: &str) -> Value {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 | 405 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    json!({
        "type": "error",
        "error": { "type": kind, "message": error.message },
        "request_id": request_id,
    })
}

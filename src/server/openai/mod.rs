//! The OpenAI API: completions and chat completions.

pub mod chat;
mod chunks;
pub mod completions;
mod logprobs;
mod message;
mod prompts;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;

const IGNORED_PARAMS: HeaderName = HeaderName::from_static("x-ignored-params");

/// Most characters of names in the header of ignored fields.
const MAX_HEADER_CHARS: usize = 1024;

/// The names of fields that nobody took.
#[derive(Debug)]
pub struct Ignored(Vec<String>);

impl Ignored {
    /// What is left of a body.
    ///
    /// # Errors
    /// Anything, where the server is strict.
    pub fn of(app: &App, fields: Fields) -> Result<Ignored, ApiError> {
        let names = fields.unknown();
        match names.first() {
            Some(name) if app.config.strict_params => {
                let name: String = name.chars().take(100).collect();
                Err(ApiError::unsupported(name.clone(), format!("unknown field {name:?}")))
            }
            _ => {
                app.metrics.ignore(&names);
                Ok(Ignored(names))
            }
        }
    }

    /// The answer, with the names in a header.
    pub fn tell(&self, mut response: Response) -> Response {
        if !self.0.is_empty() {
            let is_plain = |c: &char| c.is_ascii_graphic();
            let names: String = self.0.join(",").chars().filter(is_plain).collect();
            let names = &names[..names.len().min(MAX_HEADER_CHARS)];
            if let Ok(value) = HeaderValue::from_str(names) {
                response.headers_mut().insert(IGNORED_PARAMS, value);
            }
        }
        response
    }
}

//! Between text and tokens, for clients.

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use super::app::Shared;
use super::body::Body;
use super::conversation::Conversation;
use super::encode;
use super::error::ApiError;
use crate::text::Specials;

/// `POST /tokenize`: of a `prompt` or of `messages`; llama.cpp's `content` too, which gets nothing
/// put before it.
pub async fn tokenize(
    State(app): State<Shared>,
    Body(mut fields): Body,
) -> Result<Json<Value>, ApiError> {
    app.model_name(fields.take("model")?)?;
    let tokenizer = &app.model.tokenizer;
    let with_texts = fields.or("return_token_strs", false)?;
    let content: Option<String> = fields.take("content")?;
    let prompt: Option<String> = fields.take("prompt")?;
    // llama.cpp's field and vLLM's: each goes with the text that goes with it.
    let for_content = fields.or("add_special", false)?;
    let for_prompt = fields.or("add_special_tokens", true)?;
    let ids_of = |text: &str, adds: bool| {
        encode(|| match adds {
            true => tokenizer.encode_prompt(text, Specials::Parse),
            false => tokenizer.encode(text, Specials::Parse),
        })
    };
    let ids = match (content, prompt) {
        (Some(text), _) => ids_of(&text, for_content)?,
        (None, Some(text)) => ids_of(&text, for_prompt)?,
        (None, None) => Conversation::take(&app, &mut fields)?.prompt(&app)?.ids,
    };
    let mut answer = Map::new();
    answer.insert("count".to_owned(), ids.len().into());
    answer.insert("max_model_len".to_owned(), app.engine.limits().max_model_len.into());
    if with_texts {
        let texts = ids.iter().map(|id| tokenizer.decode_with_specials(&[*id]).into());
        answer.insert("token_strs".to_owned(), Value::Array(texts.collect()));
    }
    answer.insert("tokens".to_owned(), ids.into());
    Ok(Json(answer.into()))
}

/// `POST /detokenize`.
pub async fn detokenize(
    State(app): State<Shared>,
    Body(mut fields): Body,
) -> Result<Json<Value>, ApiError> {
    app.model_name(fields.take("model")?)?;
    let tokens: Vec<u32> = fields.need("tokens")?;
    if let Some(id) = tokens.iter().find(|id| **id as usize >= app.model.vocab_size) {
        let message = format!("tokens: {id} is no token of the model");
        return Err(ApiError::value("tokens", message));
    }
    let text = app.model.tokenizer.decode_with_specials(&tokens);
    Ok(Json(json!({ "prompt": text, "content": text })))
}

/// `POST /apply-template`: the text that the model would be given.
pub async fn apply_template(
    State(app): State<Shared>,
    Body(mut fields): Body,
) -> Result<Json<Value>, ApiError> {
    app.model_name(fields.take("model")?)?;
    let conversation = Conversation::take(&app, &mut fields)?;
    Ok(Json(json!({ "prompt": conversation.text(&app)? })))
}

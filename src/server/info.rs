//! What a server says of itself, and how it is told to let go of something.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use serde_json::{Map, Value, json};

use super::app::{App, Phase, Shared};
use super::body::Body;
use super::error::ApiError;
use crate::engine::{PoolLayout, PoolStats};

/// An element of `/v1/models`.
fn described(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.started,
        "owned_by": "deltapool",
        "root": app.model.names[0],
        "parent": null,
        "max_model_len": app.engine.limits().max_model_len,
        "meta": app.model.meta,
    })
}

/// `GET /v1/models`.
pub async fn models(State(app): State<Shared>) -> Json<Value> {
    let data: Vec<Value> = app.model.names.iter().map(|name| described(&app, name)).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// `GET /v1/models/{id}`; ids may contain `/`.
pub async fn model(
    State(app): State<Shared>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let name = app.model_name(Some(id))?;
    Ok(Json(described(&app, &name)))
}

/// `GET /health`: 200 while the engine gets on with its work.
pub async fn health(State(app): State<Shared>) -> Result<Json<Value>, ApiError> {
    if let Some(fault) = app.engine.fault() {
        return Err(unhealthy(fault));
    }
    match app.engine.pulse() {
        None => Err(unhealthy("the engine has stopped")),
        Some(silence) if silence > app.config.stall_timeout => {
            let seconds = silence.as_secs();
            Err(unhealthy(&format!("the engine has had work for {seconds} s and ended no step")))
        }
        Some(_) => Ok(Json(json!({ "status": "ok" }))),
    }
}

fn unhealthy(message: &str) -> ApiError {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    ApiError::new(status, "unavailable_error", "unhealthy", message)
}

/// `GET /ready`: 200 when requests are taken; with `?strict=1` only when none waits.
pub async fn ready(
    State(app): State<Shared>,
    Query(query): Query<Map<String, Value>>,
) -> Result<Json<Value>, ApiError> {
    if app.phase() != Phase::Open {
        return Err(ApiError::draining());
    }
    if let Some(fault) = app.engine.fault() {
        return Err(unhealthy(fault));
    }
    let answers = app.answers();
    let waits = app.engine.stats().occupancy.waiting;
    let is_strict = query.get("strict").is_some_and(|value| value != "0");
    let (code, message) = if answers >= app.config.max_num_queued_reqs {
        ("queue_full", format!("answers that wait or run: {answers}"))
    } else if is_strict && waits > 0 {
        ("requests_waiting", format!("sequences that wait: {waits}"))
    } else {
        return Ok(Json(json!({ "status": "ready" })));
    };
    Err(ApiError::overloaded(code, message, Duration::from_secs(1)))
}

/// `GET /live`: 200 while the process runs.
pub async fn live() -> Json<Value> {
    Json(json!({ "status": "live" }))
}

/// `GET /version`.
pub async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /props`: the model and the limits.
pub async fn props(State(app): State<Shared>) -> Json<Value> {
    let (limits, sampling) = (app.engine.limits(), &app.model.sampling);
    let tier = |tier: &PoolLayout| {
        json!({
            "bytes": tier.arena_bytes(),
            "pages": tier.pages,
            "page_bytes": tier.page_bytes,
            "block_bytes": tier.block_bytes,
            "slot_bytes": tier.slot_bytes,
        })
    };
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.model.names[0],
        "names": app.model.names,
        "system_fingerprint": app.model.fingerprint,
        "meta": app.model.meta,
        "default_sampling": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        },
        "has_chat_template": app.model.template.is_ok(),
        "limits": {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.config.max_num_batched_tokens,
            "max_num_queued_reqs": app.config.max_num_queued_reqs,
            "max_num_queued_tokens": app.config.max_num_queued_tokens,
            "max_logprobs": app.config.max_logprobs,
            "max_body_bytes": app.config.max_body_bytes,
        },
        "device": tier(&limits.device),
        "host": tier(&limits.host),
    }))
}

/// `GET /load`: how busy it is, cheap to ask for.
pub async fn load(State(app): State<Shared>) -> Json<Value> {
    let stats = app.engine.stats();
    let pool = |pool: &PoolStats| {
        json!({
            "pages": pool.pages,
            "free_pages": pool.free_pages,
            "blocks": pool.blocks.held,
            "slots": pool.slots.held,
        })
    };
    Json(json!({
        "running": stats.occupancy.running,
        "waiting": stats.occupancy.waiting,
        "swapped": stats.occupancy.parked + stats.occupancy.in_flight,
        "answers": app.answers(),
        "prompt_backlog": app.engine.prompt_backlog(),
        "pools": { "device": pool(&stats.device), "host": pool(&stats.host) },
    }))
}

/// `GET /openapi.json`: all routes, for programs.
pub async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], include_str!("openapi.json"))
}

/// `POST /abort_request`: ends the request that came with the id `request_id`, which SGLang calls
/// `rid`.
pub async fn abort(
    State(app): State<Shared>,
    Body(mut fields): Body,
) -> Result<Json<Value>, ApiError> {
    let rid = fields.take("rid")?;
    let id: Option<String> = fields.take("request_id")?.or(rid);
    let id = id.ok_or_else(|| ApiError::missing("request_id"))?;
    abort_by_path(State(app), Path(id)).await
}

/// `DELETE /v1/requests/{id}`.
pub async fn abort_by_path(
    State(app): State<Shared>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if app.abort(&id) {
        return Ok(Json(json!({ "request_id": id, "aborted": true })));
    }
    Err(ApiError::not_found("request_not_found", "no request of this id is being served"))
}

/// `POST /reset_prefix_cache`: gives back what is kept for later requests.
pub async fn reset_prefix_cache(State(app): State<Shared>) -> Json<Value> {
    app.engine.clear_prefix_cache();
    Json(json!({ "reset": true }))
}

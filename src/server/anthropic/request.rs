//! From a request of this API to the fields of a chat.

use serde_json::{Map, Value, json};

use crate::request::{MAX_STOP_BYTES, MAX_STOP_STRINGS};
use crate::server::error::ApiError;
use crate::server::fields::Fields;

/// What only this API has, and what chats have that it has not.
const REFUSED: [(&str, &str); 12] = [
    ("n", "; a message is one answer"),
    ("best_of", "; a message is one answer"),
    ("logprobs", ""),
    ("top_logprobs", ""),
    ("stop", "; use stop_sequences"),
    ("max_completion_tokens", "; use max_tokens"),
    ("stream_options", "; the usage is always there"),
    ("response_format", "; use output_config"),
    ("structured_outputs", "; use output_config"),
    ("continue_final_message", ""),
    ("container", ""),
    ("mcp_servers", ""),
];

/// The fields of a chat that asks for the same. What is unknown here is left as it is.
///
/// # Errors
/// The first field that is wrong or not served, by its name in this API.
pub fn chat(mut fields: Fields) -> Result<Fields, ApiError> {
    fields.refuse(&REFUSED)?;
    let mut messages = Vec::new();
    if let Some(system) = fields.raw("system") {
        let parts = texts("system".to_owned(), system)?;
        messages.push(json!({ "role": "system", "content": parts }));
    }
    let list = fields.list("messages")?.ok_or_else(|| ApiError::missing("messages"))?;
    if list.is_empty() {
        return Err(ApiError::value("messages", "messages: at least one is needed"));
    }
    for (path, message) in list {
        translate(Fields::of(path, message)?, &mut messages)?;
    }
    if messages.last().is_some_and(|last| last["role"] == "assistant") {
        let message = "the last message must be the user's: an answer is not continued here";
        return Err(ApiError::unsupported("messages", message));
    }
    if let Some(control) = cache_control(&mut fields)? {
        mark_end(&mut messages, control);
    }
    fields.put("messages", messages.into());
    tools(&mut fields)?;
    tool_choice(&mut fields)?;
    output_config(&mut fields)?;
    stop_sequences(&mut fields)?;
    thinking(&mut fields)?;
    Ok(fields)
}

/// One message becomes one, or, where it brings the results of tools, one for each of them and one
/// for what is said beside them.
fn translate(mut message: Fields, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let role: String = message.need("role")?;
    if !matches!(role.as_str(), "user" | "assistant") {
        let path = message.path("role");
        return Err(ApiError::value(path.clone(), format!("{path}: expected user or assistant")));
    }
    let path = message.path("content");
    let blocks = match message.raw("content") {
        None => return Err(ApiError::missing(path)),
        Some(Value::String(text)) => {
            out.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        Some(other) => {
            return Err(ApiError::wrong_type(path, "a string or an array of blocks", &other));
        }
    };
    let mut said = Said::default();
    for (i, block) in blocks.into_iter().enumerate() {
        said.take(&role, Fields::of(format!("{path}[{i}]"), block)?, out)?;
    }
    said.finish(&role, out);
    Ok(())
}

/// What a message says so far.
#[derive(Default)]
struct Said {
    texts: Vec<Value>,
    reasoning: String,
    calls: Vec<Value>,
    /// Kept at the end of what is said.
    cache_control: Option<Value>,
    has_results: bool,
}

impl Said {
    fn take(
        &mut self,
        role: &str,
        mut block: Fields,
        out: &mut Vec<Value>,
    ) -> Result<(), ApiError> {
        let kind: String = block.need("type")?;
        let control = cache_control(&mut block)?;
        match (kind.as_str(), role) {
            ("text", _) => {
                let text: String = block.need("text")?;
                self.texts.push(part(text, control));
            }
            ("thinking", "assistant") => {
                self.reasoning.push_str(&block.need::<String>("thinking")?);
                self.cache_control = control.or(self.cache_control.take());
            }
            ("tool_use", "assistant") => {
                self.calls.push(tool_use(block)?);
                self.cache_control = control.or(self.cache_control.take());
            }
            // Nobody but its maker can read it.
            ("redacted_thinking", "assistant") => {}
            ("tool_result", "user") => {
                self.has_results = true;
                out.push(tool_result(block, control)?);
            }
            _ => {
                let kind: String = kind.chars().take(40).collect();
                let message = format!("blocks of type {kind:?} are not supported by the {role}");
                let error = ApiError::invalid("unsupported_content", message);
                return Err(error.of(block.path("type")));
            }
        }
        Ok(())
    }

    fn finish(self, role: &str, out: &mut Vec<Value>) {
        if self.has_results && self.texts.is_empty() {
            return;
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), role.into());
        message.insert("content".to_owned(), self.texts.into());
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), self.reasoning.into());
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".to_owned(), self.calls.into());
        }
        if let Some(control) = self.cache_control {
            message.insert("cache_control".to_owned(), control);
        }
        out.push(message.into());
    }
}

/// A call of the assistant.
fn tool_use(mut block: Fields) -> Result<Value, ApiError> {
    let id: String = block.need("id")?;
    let name: String = block.need("name")?;
    let input: Map<String, Value> = block.need("input")?;
    let arguments = Value::from(input).to_string();
    Ok(json!({
        "id": id,
        "type": "function",
        "function": { "name": name, "arguments": arguments },
    }))
}

/// What a tool that was called says.
fn tool_result(mut block: Fields, control: Option<Value>) -> Result<Value, ApiError> {
    let id: String = block.need("tool_use_id")?;
    block.take::<bool>("is_error")?;
    let mut parts = match block.raw("content") {
        None => vec![part(String::new(), None)],
        Some(content) => texts(block.path("content"), content)?,
    };
    if let (Some(control), Some(last)) = (control, parts.last_mut()) {
        last["cache_control"] = control;
    }
    Ok(json!({ "role": "tool", "tool_call_id": id, "content": parts }))
}

/// A string, or blocks of text, as parts of a chat's message.
fn texts(path: String, value: Value) -> Result<Vec<Value>, ApiError> {
    let blocks = match value {
        Value::String(text) => return Ok(vec![part(text, None)]),
        Value::Array(blocks) => blocks,
        other => return Err(ApiError::wrong_type(path, "a string or an array of blocks", &other)),
    };
    let mut parts = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(format!("{path}[{i}]"), block)?;
        let kind: String = block.need("type")?;
        if kind != "text" {
            let kind: String = kind.chars().take(40).collect();
            let message = format!("blocks of type {kind:?} are not supported here, only text");
            let error = ApiError::invalid("unsupported_content", message);
            return Err(error.of(block.path("type")));
        }
        let text: String = block.need("text")?;
        let control = cache_control(&mut block)?;
        parts.push(part(text, control));
    }
    Ok(parts)
}

fn part(text: String, control: Option<Value>) -> Value {
    match control {
        Some(control) => json!({ "type": "text", "text": text, "cache_control": control }),
        None => json!({ "type": "text", "text": text }),
    }
}

/// A wish to keep the state at the end of something.
fn cache_control(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let Some(mut control) = fields.object("cache_control")? else { return Ok(None) };
    let kind: String = control.need("type")?;
    if kind != "ephemeral" {
        let path = control.path("type");
        return Err(ApiError::value(path.clone(), format!("{path}: expected ephemeral")));
    }
    match control.take::<String>("ttl")?.as_deref() {
        None | Some("5m" | "1h") => Ok(Some(json!({ "type": kind }))),
        Some(_) => {
            let path = control.path("ttl");
            Err(ApiError::value(path.clone(), format!("{path}: expected 5m or 1h")))
        }
    }
}

/// Keeps the state at the end of the last message.
fn mark_end(messages: &mut [Value], control: Value) {
    let Some(last) = messages.last_mut() else { return };
    if let Value::String(text) = &mut last["content"] {
        let text = std::mem::take(text);
        last["content"] = json!([part(text, None)]);
    }
    if let Some(part) = last["content"].as_array_mut().and_then(|parts| parts.last_mut()) {
        part["cache_control"] = control;
    }
}

/// Tools with their schemas. Those that a server of the API itself would run are not here.
fn tools(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(list) = fields.list("tools")? else { return Ok(()) };
    let mut tools = Vec::with_capacity(list.len());
    for (path, tool) in list {
        let mut tool = Fields::of(path, tool)?;
        let kind: String = tool.or("type", "custom".to_owned())?;
        if kind != "custom" {
            let path = tool.path("type");
            let kind: String = kind.chars().take(40).collect();
            let message = format!("{path}: tools of type {kind:?} are not run here, only custom");
            return Err(ApiError::unsupported(path, message));
        }
        let mut function = Map::new();
        function.insert("name".to_owned(), tool.need::<String>("name")?.into());
        if let Some(description) = tool.take::<String>("description")? {
            function.insert("description".to_owned(), description.into());
        }
        let schema: Map<String, Value> = tool.need("input_schema")?;
        function.insert("parameters".to_owned(), schema.into());
        let mut translated = json!({ "type": "function", "function": function });
        if let Some(control) = cache_control(&mut tool)? {
            translated["cache_control"] = control;
        }
        tools.push(translated);
    }
    fields.put("tools", tools.into());
    Ok(())
}

fn tool_choice(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok(()) };
    let kind: String = choice.need("type")?;
    let translated = match kind.as_str() {
        "auto" | "none" => json!(kind),
        "any" => json!("required"),
        "tool" => {
            let name: String = choice.need("name")?;
            json!({ "type": "function", "function": { "name": name } })
        }
        _ => {
            let message = "tool_choice.type: expected auto, any, tool or none";
            return Err(ApiError::value("tool_choice.type", message));
        }
    };
    if choice.or("disable_parallel_tool_use", false)? {
        fields.put("parallel_tool_calls", false.into());
    }
    fields.put("tool_choice", translated);
    Ok(())
}

/// How much effort the answer is worth, and what form it has.
fn output_config(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut config) = fields.object("output_config")? else { return Ok(()) };
    if let Some(effort) = config.take::<String>("effort")? {
        let effort = match effort.as_str() {
            "low" | "medium" | "high" | "max" => effort,
            "xhigh" => "max".to_owned(),
            _ => {
                let message = "output_config.effort: expected low, medium, high, xhigh or max";
                return Err(ApiError::value("output_config.effort", message));
            }
        };
        fields.put("reasoning_effort", effort.into());
    }
    let Some(mut format) = config.object("format")? else { return Ok(()) };
    let kind: String = format.need("type")?;
    if kind != "json_schema" {
        let path = format.path("type");
        return Err(ApiError::value(path.clone(), format!("{path}: expected json_schema")));
    }
    let schema: Map<String, Value> = format.need("schema")?;
    let schema = json!({ "name": "answer", "schema": schema });
    fields.put("response_format", json!({ "type": kind, "json_schema": schema }));
    Ok(())
}

fn stop_sequences(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(stops) = fields.take::<Vec<String>>("stop_sequences")? else { return Ok(()) };
    if stops.len() > MAX_STOP_STRINGS {
        let message = format!("stop_sequences: {MAX_STOP_STRINGS} at most");
        return Err(ApiError::value("stop_sequences", message));
    }
    if stops.iter().any(|stop| !(1..=MAX_STOP_BYTES).contains(&stop.len())) {
        let message = format!("stop_sequences: 1 to {MAX_STOP_BYTES} bytes each");
        return Err(ApiError::value("stop_sequences", message));
    }
    fields.put("stop", stops.into());
    Ok(())
}

/// Whether the model thinks, under the names that chat templates have for it. How long is up to the
/// model: a budget is no more than a wish.
fn thinking(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(()) };
    let kind: String = thinking.need("type")?;
    let thinks = match kind.as_str() {
        "enabled" | "adaptive" => true,
        "disabled" => false,
        _ => {
            let message = "thinking.type: expected enabled, adaptive or disabled";
            return Err(ApiError::value("thinking.type", message));
        }
    };
    thinking.take::<usize>("budget_tokens")?;
    let mut variables: Map<String, Value> = fields.or("chat_template_kwargs", Map::new())?;
    for name in ["thinking", "enable_thinking"] {
        variables.entry(name).or_insert(thinks.into());
    }
    fields.put("chat_template_kwargs", variables.into());
    Ok(())
}

//! A line of the input: a JSON object that becomes a request, or says what is wrong with it.
//!
//! Nothing is guessed: a field that is not known is an error, and every error names its field. A
//! field that is null counts as absent. What depends on the engine's limits is left to its door.

use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::constraint;
use crate::cli::CliError;
use crate::cli::loading::Files;
use crate::cli::prompt::{default_max_tokens, encode_chat, encode_text};
use crate::request::{InvalidParam, Request, SamplingParams};
use crate::text::{ChatTemplate, TextError, Tokenizer};

/// A day: nobody waits for longer.
const MAX_ARRIVAL_MS: f64 = 86_400_000.0;

/// A line, and what it asks for or why that cannot be told.
pub struct Line {
    /// Its number in the input, from 1.
    pub number: usize,
    /// The caller's name for it; null when the line cannot be read.
    pub id: Value,
    /// The request, or what is wrong with the line.
    pub work: Result<Work, String>,
}

/// What a line asks for.
pub struct Work {
    /// The request.
    pub request: Request,
    /// When it is submitted, counted from the start.
    pub arrival: Duration,
}

/// Makes requests of lines, as a model's files say.
pub struct LineReader {
    tokenizer: Option<Arc<Tokenizer>>,
    template: Result<ChatTemplate, TextError>,
    vocab_size: usize,
}

impl LineReader {
    /// A reader for the model of `files`.
    pub fn new(files: &Files, tokenizer: Option<Arc<Tokenizer>>) -> LineReader {
        let template = ChatTemplate::from_files(&files.text);
        LineReader { tokenizer, template, vocab_size: files.model.spec.vocab_size }
    }

    /// All lines of `input` that are not empty.
    ///
    /// # Errors
    /// When the input cannot be read on; a line that makes no sense is not an error of its own.
    pub fn read_all(
        &self,
        input: impl BufRead,
        max_model_len: usize,
    ) -> Result<Vec<Line>, std::io::Error> {
        let mut lines = Vec::new();
        for (index, bytes) in input.split(b'\n').enumerate() {
            let bytes = bytes?;
            let text = bytes.trim_ascii();
            if !text.is_empty() {
                lines.push(self.read(text, index + 1, lines.len(), max_model_len));
            }
        }
        Ok(lines)
    }

    /// The line `text`, whose place among the requests is `index`.
    fn read(&self, text: &[u8], number: usize, index: usize, max_model_len: usize) -> Line {
        let mut fields = match Fields::of(text) {
            Ok(fields) => fields,
            Err(error) => return Line { number, id: Value::Null, work: Err(error) },
        };
        let id = match fields.take::<Value>("id") {
            Ok(None) => index.into(),
            Ok(Some(id)) if id.is_string() || id.is_number() => id,
            _ => {
                let work = Err("id: expected a string or a number".to_owned());
                return Line { number, id: Value::Null, work };
            }
        };
        Line { number, id, work: self.work(fields, max_model_len) }
    }

    fn work(&self, mut fields: Fields, max_model_len: usize) -> Result<Work, String> {
        let source = Source::take(&mut fields)?;
        let max_tokens = fields.take("max_tokens")?;
        let arrival = fields.take("arrival_ms")?.unwrap_or(0.0);
        let mut request = Request {
            sampling: sampling(&mut fields)?,
            stop: stop(&mut fields)?,
            stop_token_ids: fields.take("stop_token_ids")?.unwrap_or_default(),
            include_stop_text: fields.take("include_stop_str_in_output")?.unwrap_or_default(),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or_default(),
            min_tokens: fields.take("min_tokens")?.unwrap_or_default(),
            skip_special_tokens: fields.take("skip_special_tokens")?.unwrap_or(true),
            constraint: constraint::take(&mut fields)?,
            n: fields.take("n")?.unwrap_or(1),
            priority: fields.take("priority")?,
            program_id: fields.take("program_id")?,
            cache_salt: fields.take("cache_salt")?,
            checkpoint_at: fields.take("checkpoint_at")?.unwrap_or_default(),
            ..Request::new(Vec::new(), 0)
        };
        fields.end()?;
        let prompt_field = source.field();
        request.prompt = self.prompt(source)?;
        let room = default_max_tokens(request.prompt.len(), max_model_len);
        request.max_tokens = max_tokens.unwrap_or(room);
        request.check(self.vocab_size).map_err(|error| {
            let field = if error.field == "prompt" { prompt_field } else { error.field };
            InvalidParam { field, ..error }.to_string()
        })?;
        if !(0.0..=MAX_ARRIVAL_MS).contains(&arrival) {
            let short =
                if arrival.abs() < 1e15 { arrival.to_string() } else { format!("{arrival:e}") };
            let (value, allowed) = (short, format!("0 to {MAX_ARRIVAL_MS}"));
            return Err(InvalidParam { field: "arrival_ms", value, allowed }.to_string());
        }
        let arrival = Duration::from_secs_f64(arrival / 1e3);
        Ok(Work { request, arrival })
    }

    fn prompt(&self, source: Source) -> Result<Vec<u32>, String> {
        let tokenizer = self.tokenizer.as_deref();
        let told = |error: CliError| error.to_string();
        match source {
            Source::Ids(ids) => Ok(ids),
            Source::Text(text) => encode_text(tokenizer, self.vocab_size, &text).map_err(told),
            Source::Messages(messages) => {
                let template = self.template.as_ref().map_err(TextError::to_string)?;
                encode_chat(tokenizer, self.vocab_size, template, &messages).map_err(told)
            }
        }
    }
}

/// What is to be continued.
enum Source {
    Text(String),
    Ids(Vec<u32>),
    Messages(Vec<Value>),
}

impl Source {
    /// The field it came in.
    fn field(&self) -> &'static str {
        match self {
            Source::Text(_) => "prompt",
            Source::Ids(_) => "prompt_ids",
            Source::Messages(_) => "messages",
        }
    }

    fn take(fields: &mut Fields) -> Result<Source, String> {
        let text = fields.take("prompt")?.map(Source::Text);
        let ids = fields.take("prompt_ids")?.map(Source::Ids);
        let messages = fields.take("messages")?.map(Source::Messages);
        let mut given = [text, ids, messages].into_iter().flatten();
        match (given.next(), given.count()) {
            (Some(Source::Messages(messages)), 0) => {
                let has_role = |message: &Value| message["role"].is_string();
                if messages.is_empty() || !messages.iter().all(has_role) {
                    return Err("messages: expected objects with a role, one or more".to_owned());
                }
                Ok(Source::Messages(messages))
            }
            (Some(source), 0) => Ok(source),
            (first, others) => {
                let given = usize::from(first.is_some()) + others;
                Err(format!("one of prompt, prompt_ids and messages is needed, {given} are given"))
            }
        }
    }
}

/// The sampling fields. Greedy unless told otherwise, as `generate` is.
fn sampling(fields: &mut Fields) -> Result<SamplingParams, String> {
    let default = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    Ok(SamplingParams {
        temperature: fields.take("temperature")?.unwrap_or(default.temperature),
        top_k: fields.take("top_k")?.unwrap_or(default.top_k),
        top_p: fields.take("top_p")?.unwrap_or(default.top_p),
        min_p: fields.take("min_p")?.unwrap_or(default.min_p),
        repetition_penalty: fields
            .take("repetition_penalty")?
            .unwrap_or(default.repetition_penalty),
        presence_penalty: fields.take("presence_penalty")?.unwrap_or(default.presence_penalty),
        frequency_penalty: fields.take("frequency_penalty")?.unwrap_or(default.frequency_penalty),
        logit_bias: fields.take("logit_bias")?.unwrap_or_default(),
        seed: fields.take("seed")?,
        logprobs: match fields.take::<Value>("logprobs")? {
            Some(Value::Bool(wanted)) => wanted.then_some(0),
            Some(number) => Some(typed("logprobs", number)?),
            None => None,
        },
    })
}

/// One stop string, or a list of them.
fn stop(fields: &mut Fields) -> Result<Vec<String>, String> {
    match fields.take("stop")? {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text]),
        Some(list) => typed("stop", list),
    }
}

/// The fields of a line that nobody has taken yet.
pub struct Fields(Map<String, Value>);

impl Fields {
    fn of(text: &[u8]) -> Result<Fields, String> {
        serde_json::from_slice(text).map(Fields).map_err(|error| {
            // The number of the line in the input is told elsewhere.
            let error = error.to_string().replacen(" at line 1 column", " at column", 1);
            format!("not a JSON object: {error}")
        })
    }

    /// The value of a field; none when it is absent or null.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, String> {
        match self.0.shift_remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => typed(name, value).map(Some),
        }
    }

    /// Refuses what is left.
    fn end(self) -> Result<(), String> {
        if self.0.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = self.0.into_iter().map(|(name, _)| name).collect();
        Err(format!("unknown field: {}", names.join(", ")))
    }
}

/// A value of a field as the type it is to have; the error names the field.
pub fn typed<T: DeserializeOwned>(name: &str, value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| format!("{name}: {error}"))
}

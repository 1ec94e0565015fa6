//! From the messages of a chat to the tokens of a prompt, and the positions in it to keep.
//!
//! A position is found by rendering the conversation once more with a mark in it: up to the mark
//! the two texts are the same. So it is right for every template, whatever that makes of a message.

use serde_json::{Map, Value, json};

use tokio::task::block_in_place;

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::replay::{self, Answer, Key};
use super::tools::{Call, Tools};
use crate::text::{self, ChatTemplate, Specials, TextError};

/// A character that no conversation begins with: it is for private use.
const MARK: char = '\u{e000}';

/// Stands for an answer that is put in as tokens.
const ANSWER: &str = "\u{e001}\u{e000}\u{e001}";

/// Positions to keep that are found in a conversation without being asked for.
const MAX_TURN_MARKS: usize = 4;

/// Most positions that a request may ask to keep.
const MAX_BREAKPOINTS: usize = 4;

/// Messages in the form that templates read.
#[derive(Debug)]
pub struct Conversation {
    messages: Vec<Value>,
    /// Tools that the model is told of.
    pub tools: Tools,
    /// Tool calls of each message, as the client sent them.
    calls: Vec<Vec<Call>>,
    variables: Map<String, Value>,
    add_generation_prompt: bool,
    /// The last message is an answer that has only begun.
    continues: bool,
    breakpoints: Vec<Breakpoint>,
    /// Positions are kept without being asked for.
    is_implicit: bool,
}

/// A place in a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Breakpoint {
    /// In a message, after so many bytes of its content.
    Message { message: usize, bytes: usize },
    /// Behind a tool.
    Tool(usize),
}

/// A rendered conversation.
#[derive(Debug)]
pub struct Prompt {
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Tokens after which the state is to be kept, ascending.
    pub marks: Vec<usize>,
    /// Its first tokens were cut off: they are no longer those of its text.
    pub is_cut: bool,
}

impl Prompt {
    /// Cuts it to its last `most` tokens, where there is a limit and it has more.
    pub fn keep_last(&mut self, most: Option<usize>) {
        let cut = most.map_or(0, |most| self.ids.len().saturating_sub(most));
        if cut > 0 {
            self.ids.drain(..cut);
            self.marks.retain(|mark| *mark > cut);
            self.marks.iter_mut().for_each(|mark| *mark -= cut);
            self.is_cut = true;
        }
    }
}

impl Conversation {
    /// Takes the fields that make a conversation.
    ///
    /// # Errors
    /// The first field that is wrong or not served.
    pub fn take(app: &App, fields: &mut Fields) -> Result<Conversation, ApiError> {
        let list = fields.list("messages")?.ok_or_else(|| ApiError::missing("messages"))?;
        if list.is_empty() {
            return Err(ApiError::value("messages", "messages is empty"));
        }
        let mut conversation = Conversation {
            messages: Vec::with_capacity(list.len()),
            calls: Vec::with_capacity(list.len()),
            tools: Tools::take(fields)?,
            variables: variables(fields)?,
            continues: false,
            add_generation_prompt: true,
            breakpoints: Vec::new(),
            is_implicit: true,
        };
        let marked = conversation.tools.marked.iter().copied();
        conversation.breakpoints.extend(marked.map(Breakpoint::Tool));
        for (path, message) in list {
            conversation.push(Fields::of(path, message)?)?;
        }
        conversation.take_ending(fields)?;
        conversation.take_cache_options(fields)?;
        let refused = [("chat_template", "; the server's own is used")];
        fields.refuse(&refused)?;
        template_of(app)?;
        Ok(conversation)
    }

    /// How the prompt ends: with the opening of an answer, or inside the last message.
    fn take_ending(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        self.continues = fields.or("continue_final_message", false)?;
        self.add_generation_prompt = fields.or("add_generation_prompt", !self.continues)?;
        if self.continues && self.add_generation_prompt {
            let message = "continue_final_message and add_generation_prompt exclude each other";
            return Err(ApiError::value("continue_final_message", message));
        }
        Ok(())
    }

    fn take_cache_options(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        if let Some(mut options) = fields.object("prompt_cache_options")? {
            self.is_implicit = match options.take::<String>("mode")?.as_deref() {
                None | Some("implicit") => true,
                Some("explicit") => false,
                Some(_) => {
                    let param = "prompt_cache_options.mode";
                    return Err(ApiError::value(param, format!("{param}: implicit or explicit")));
                }
            };
        }
        if self.breakpoints.len() > MAX_BREAKPOINTS {
            let asked = self.breakpoints.len();
            let message = format!("{asked} cache breakpoints, {MAX_BREAKPOINTS} at most");
            return Err(ApiError::value("messages", message));
        }
        Ok(())
    }

    /// Takes a message in.
    fn push(&mut self, mut message: Fields) -> Result<(), ApiError> {
        let role: String = message.need("role")?;
        let role = match role.as_str() {
            "developer" => "system",
            "system" | "user" | "assistant" | "tool" => &role,
            _ => {
                let path = message.path("role");
                let roles = "system, developer, user, assistant or tool";
                return Err(ApiError::value(path.clone(), format!("{path}: expected {roles}")));
            }
        };
        if message.raw("cache_control").is_some() {
            // What has no text of its own ends where the text of the next message begins.
            self.breakpoints
                .push(Breakpoint::Message { message: self.messages.len() + 1, bytes: 0 });
        }
        let mut read = Map::new();
        read.insert("role".to_owned(), role.into());
        let content = self.content(&mut message)?;
        let calls = Call::take_all(&mut message)?;
        if content.is_none() && (role != "assistant" || calls.is_empty()) {
            return Err(ApiError::missing(message.path("content")));
        }
        read.insert("content".to_owned(), content.unwrap_or_default().into());
        let reasoning = message.take::<String>("reasoning")?;
        if let Some(text) = message.take::<String>("reasoning_content")?.or(reasoning) {
            read.insert("reasoning_content".to_owned(), text.into());
        }
        if !calls.is_empty() {
            let calls: Vec<Value> = calls.iter().map(Call::to_json).collect();
            read.insert("tool_calls".to_owned(), calls.into());
        }
        if role == "tool" {
            let id: String = message.need("tool_call_id")?;
            read.insert("tool_call_id".to_owned(), id.into());
        }
        message.refuse(&[("audio", ""), ("function_call", "; use tool_calls")])?;
        // What else templates know of, a name for one.
        read.extend(message.rest());
        self.messages.push(read.into());
        self.calls.push(calls);
        Ok(())
    }

    /// A text, or parts of text, which are put together with line breaks.
    fn content(&mut self, message: &mut Fields) -> Result<Option<String>, ApiError> {
        let index = self.messages.len();
        let path = message.path("content");
        let parts = match message.raw("content") {
            None => return Ok(None),
            Some(Value::String(text)) => return Ok(Some(text)),
            Some(Value::Array(parts)) => parts,
            Some(other) => {
                return Err(ApiError::wrong_type(path, "a string or an array of parts", &other));
            }
        };
        let mut text = String::new();
        for (place, part) in parts.into_iter().enumerate() {
            let mut part = Fields::of(format!("{path}[{place}]"), part)?;
            let kind: String = part.need("type")?;
            if !matches!(kind.as_str(), "text" | "input_text" | "output_text") {
                let kind: String = kind.chars().take(40).collect();
                let message = format!("parts of type {kind:?} are not supported, only text");
                let error = ApiError::invalid("unsupported_content", message);
                return Err(error.of(part.path("type")));
            }
            if place > 0 {
                text.push('\n');
            }
            text.push_str(&part.need::<String>("text")?);
            let asked = part.raw("prompt_cache_breakpoint").or_else(|| part.raw("cache_control"));
            if asked.is_some_and(|asked| asked != false) {
                self.breakpoints.push(Breakpoint::Message { message: index, bytes: text.len() });
            }
        }
        Ok(Some(text))
    }

    /// The text that the model is given.
    ///
    /// # Errors
    /// What the template says to it.
    pub fn text(&self, app: &App) -> Result<String, ApiError> {
        self.render(template_of(app)?, &self.messages, &self.tools.rendered)
    }

    /// The tokens, and the positions in them to keep. Takes a processor for a while, and no other
    /// connection waits for it.
    ///
    /// # Errors
    /// What the template says to it.
    pub fn prompt(&self, app: &App) -> Result<Prompt, ApiError> {
        block_in_place(|| self.encoded(app))
    }

    fn encoded(&self, app: &App) -> Result<Prompt, ApiError> {
        let template = template_of(app)?;
        let text = self.render(template, &self.messages, &self.tools.rendered)?;
        let (mut ids, tail) = match self.replayed(app, template, &text) {
            Some((answer, tail)) => (answer.tokens.to_vec(), tail),
            None => (Vec::new(), text.clone()),
        };
        let tokenizer = &app.model.tokenizer;
        let replayed = ids.len();
        let new = tokenizer.encode(&tail, Specials::Parse);
        ids.extend(new.map_err(|error| ApiError::failed(error.to_string()))?);
        let ends = self.places().filter_map(|place| self.end_of(template, &text, place));
        let mut ends: Vec<usize> = ends.collect();
        ends.sort_unstable();
        ends.dedup();
        // The texts end alike; what lies before the tail was kept when it was new.
        let mut bytes = text.len().saturating_sub(tail.len());
        ends.retain(|end| replayed == 0 || *end > bytes);
        let mut marks = Vec::with_capacity(ends.len());
        // A position may lie inside a token: what ends before that counts.
        for (position, id) in ids.iter().enumerate().skip(replayed) {
            bytes += tokenizer.token_bytes(*id).map_or(0, <[u8]>::len);
            let passed = ends.iter().take_while(|end| **end < bytes).count();
            marks.extend(ends.drain(..passed).filter(|_| position > 0).map(|_| position));
        }
        // What is left ends with the prompt itself.
        marks.extend(ends.first().map(|_| ids.len()));
        marks.dedup();
        Ok(Prompt { text, ids, marks, is_cut: false })
    }

    /// The last answer in the conversation whose tokens are remembered, and the text behind it.
    fn replayed(&self, app: &App, template: &ChatTemplate, text: &str) -> Option<(Answer, String)> {
        let role = |index: &usize| self.messages[*index]["role"] == "assistant";
        let index = (0..self.messages.len()).rev().find(role)?;
        let answer = app.replay.get(self.key(template, index)?)?;
        // A template that leaves reasoning out means it.
        if !text.contains(answer.reasoning.trim()) {
            return None;
        }
        let mut messages = self.messages.clone();
        messages[index] = json!({ "role": "assistant", "content": ANSWER });
        let rendered = self.render(template, &messages, &self.tools.rendered).ok()?;
        let (_, tail) = rendered.split_once(ANSWER)?;
        (!tail.contains(ANSWER)).then(|| (answer, tail.to_owned()))
    }

    /// The name under which the answer at `index` would be remembered.
    fn key(&self, template: &ChatTemplate, index: usize) -> Option<Key> {
        let chat = self.chat(&self.messages[..index], &self.tools.rendered, true);
        let prompt = template.render(&chat).ok()?;
        let content = self.messages[index]["content"].as_str()?;
        Some(replay::key(&prompt, content, replay::parts(&self.calls[index])))
    }

    /// Places whose states are wanted: those that were marked, and where a later conversation is
    /// likely to part from this one: the end of what stands before the first turn, and the ends of
    /// the last turns.
    fn places(&self) -> impl Iterator<Item = Breakpoint> {
        let role = |index: usize| self.messages[index]["role"].as_str().unwrap_or_default();
        let is_implicit = self.is_implicit;
        let turns = (0..self.messages.len()).filter(move |index| role(*index) == "user");
        let turns: Vec<usize> = turns.filter(|_| is_implicit).collect();
        let first = turns.first().copied();
        let last = turns.iter().rev().take(MAX_TURN_MARKS).copied();
        let starts: Vec<usize> = first.into_iter().chain(last).collect();
        let starts = starts.into_iter().map(|message| Breakpoint::Message { message, bytes: 0 });
        self.breakpoints.iter().copied().chain(starts)
    }

    /// Bytes of the rendered `text` up to a place; none when the template does not show it.
    fn end_of(&self, template: &ChatTemplate, text: &str, place: Breakpoint) -> Option<usize> {
        let marked = match place {
            Breakpoint::Message { message, bytes } => {
                let mut messages = self.messages.clone();
                let content = messages.get(message)?["content"].as_str()?;
                let (before, after) = content.split_at(bytes);
                messages[message]["content"] = format!("{before}{MARK}{after}").into();
                self.render(template, &messages, &self.tools.rendered).ok()?
            }
            Breakpoint::Tool(index) => {
                let mut tools = self.tools.rendered[..=index].to_vec();
                let function = json!({ "name": MARK.to_string(), "parameters": {} });
                tools.push(json!({ "type": "function", "function": function }));
                self.render(template, &self.messages, &tools).ok()?
            }
        };
        let same = text.bytes().zip(marked.bytes()).take_while(|(a, b)| a == b).count();
        (marked != text).then_some(same)
    }

    fn chat<'a>(
        &'a self,
        messages: &'a [Value],
        tools: &'a [Value],
        add_generation_prompt: bool,
    ) -> text::Chat<'a> {
        text::Chat {
            messages,
            tools: (!tools.is_empty()).then_some(tools),
            add_generation_prompt,
            variables: &self.variables,
        }
    }

    fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        tools: &[Value],
    ) -> Result<String, ApiError> {
        let chat = self.chat(messages, tools, self.add_generation_prompt);
        let rendered = match self.continues {
            true => template.render_open(&chat),
            false => template.render(&chat),
        };
        rendered.map_err(|error| match error {
            TextError::ReservedVariable { .. } => {
                ApiError::value("chat_template_kwargs", error.to_string())
            }
            _ => ApiError::value("messages", error.to_string()),
        })
    }
}

fn template_of(app: &App) -> Result<&ChatTemplate, ApiError> {
    let template = app.model.template.as_ref();
    template.map_err(|error| ApiError::invalid("no_chat_template", error.to_string()))
}

/// Further variables of the template. How much a model is to reason is one of them.
fn variables(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut variables: Map<String, Value> = fields.or("chat_template_kwargs", Map::new())?;
    if let Some(effort) = fields.take::<String>("reasoning_effort")? {
        const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "max"];
        if !EFFORTS.contains(&effort.as_str()) {
            let message = format!("reasoning_effort: expected one of {}", EFFORTS.join(", "));
            return Err(ApiError::value("reasoning_effort", message));
        }
        if effort == "none" {
            variables.entry("enable_thinking").or_insert(false.into());
        }
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(variables)
}

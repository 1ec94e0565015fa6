//! Chat templates: messages to text by the model's own Jinja template.
//!
//! Templates are written for transformers, that is for Jinja2 in Python with `trim_blocks`,
//! `lstrip_blocks` and a few functions. What minijinja lacks of that is registered here: Python's
//! string and dict methods, `tojson` as `json.dumps` without HTML escapes, `raise_exception` and
//! `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value};

use super::TextError;
use super::date::strftime;
use super::files::{CHAT_TEMPLATE, TOKENIZER_CONFIG, TextFiles, TokenizerConfig, bad_key};
use super::python::Dumps;

/// The variables that are the chat itself.
const CHAT_VARIABLES: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// The special tokens that a template sees under these names.
const TOKEN_VARIABLES: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    default: String,
    /// The template for chats with tools, where the model has one of its own.
    tool_use: Option<String>,
    tokens: Map<String, Value>,
    /// Whether a template asks if a call's arguments are a string, and so takes one.
    takes_string_arguments: bool,
}

/// What a template renders.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    /// The messages as JSON objects, `role` and `content` and what else the model knows
    /// (`tool_calls`, `tool_call_id`, `reasoning_content`). The arguments of a call may be an
    /// object or, as in APIs, a string of JSON: a template that does not ask for strings is given
    /// the object, since with `tojson` it would quote a string once more; one that does is given
    /// the string, which is then rendered as the model wrote it.
    pub messages: &'a [Value],
    /// Descriptions of the tools, in the order they are shown.
    pub tools: Option<&'a [Value]>,
    /// Ends the text with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Further variables, for example `enable_thinking`.
    pub variables: &'a Map<String, Value>,
}

impl ChatTemplate {
    /// Compiles the template of a model's files: `chat_template.jinja`, else `chat_template` of
    /// `tokenizer_config.json`, which is a template or a list of named ones.
    pub fn from_files(files: &TextFiles) -> Result<Self, TextError> {
        let config = TokenizerConfig::read(files)?;
        let mut tokens = Map::new();
        for name in TOKEN_VARIABLES {
            if let Some(content) = config.token(name)? {
                tokens.insert(name.to_owned(), content.into());
            }
        }
        let mut template = Self {
            environment: environment(),
            default: String::new(),
            tool_use: None,
            tokens,
            takes_string_arguments: false,
        };
        match (&files.chat_template, config.get("chat_template")) {
            (Some(bytes), _) => {
                let source = std::str::from_utf8(bytes).map_err(|error| bad_template(&error))?;
                template.default = template.add(CHAT_TEMPLATE.to_owned(), source)?;
            }
            (None, Some(Value::String(source))) => {
                let name = format!("{TOKENIZER_CONFIG} chat_template");
                template.default = template.add(name, source)?;
            }
            (None, Some(Value::Array(list))) => template.add_named(list)?,
            (None, Some(_)) => {
                return Err(bad_key("chat_template", "is neither a string nor a list"));
            }
            (None, None) => return Err(TextError::NoChatTemplate),
        }
        let sources = template.sources();
        let asks = sources.iter().any(|source| source.contains("arguments is string"));
        template.takes_string_arguments = asks;
        Ok(template)
    }

    /// The texts of the templates that chats are rendered by.
    pub fn sources(&self) -> Vec<String> {
        let names = [Some(&self.default), self.tool_use.as_ref()].into_iter().flatten();
        let templates = names.filter_map(|name| self.environment.get_template(name).ok());
        templates.map(|template| template.source().to_owned()).collect()
    }

    /// [`ChatTemplate::render`] up to the end of the last message's content, for a model to go on
    /// with it. White space at that end is kept as far as the template keeps it.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], or a last message whose text is empty or not rendered.
    pub fn render_open(&self, chat: &Chat) -> Result<String, TextError> {
        let mut text = self.render(&Chat { add_generation_prompt: false, ..*chat })?;
        let content = chat.messages.last().map(|message| &message["content"]);
        let content = content.map(last_text).unwrap_or_default();
        let bare = content.trim();
        let start = Some(bare).filter(|bare| !bare.is_empty()).and_then(|bare| text.rfind(bare));
        let start = start.ok_or(TextError::NothingToContinue)?;
        let whole = content.trim_start();
        let kept = if text[start..].starts_with(whole) { whole } else { bare };
        text.truncate(start + kept.len());
        Ok(text)
    }

    /// The text of a chat. Encode it with [`Tokenizer::encode`](super::Tokenizer::encode) and
    /// [`Specials::Parse`](super::Specials::Parse): the template writes BOS itself.
    pub fn render(&self, chat: &Chat) -> Result<String, TextError> {
        // Templates may ask whether they were given documents; none are.
        let mut context = Map::from_iter([("documents".to_owned(), Value::Null)]);
        context.extend(self.tokens.clone());
        for (name, value) in chat.variables {
            if CHAT_VARIABLES.contains(&name.as_str()) {
                return Err(TextError::ReservedVariable { name: name.clone() });
            }
            context.insert(name.clone(), value.clone());
        }
        context.insert("messages".to_owned(), self.messages(chat.messages));
        context.insert("tools".to_owned(), chat.tools.map_or(Value::Null, Value::from));
        context.insert("add_generation_prompt".to_owned(), chat.add_generation_prompt.into());
        let name = self.tool_use.as_ref().filter(|_| chat.tools.is_some()).unwrap_or(&self.default);
        let template = self.environment.get_template(name).map_err(|e| failed(&e))?;
        template.render(minijinja::Value::from(Serde(&context))).map_err(|e| failed(&e))
    }

    /// The messages with the arguments of calls as the template wants them.
    fn messages(&self, messages: &[Value]) -> Value {
        let mut messages = messages.to_vec();
        if self.takes_string_arguments {
            return messages.into();
        }
        for message in &mut messages {
            let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
            for call in calls.into_iter().flatten() {
                let function =
                    if call.get("function").is_some() { &mut call["function"] } else { call };
                let parsed = function.get("arguments").and_then(Value::as_str).map(parse_object);
                if let Some(Some(object)) = parsed {
                    function["arguments"] = object;
                }
            }
        }
        messages.into()
    }

    fn add(&mut self, name: String, source: &str) -> Result<String, TextError> {
        self.environment
            .add_template_owned(name.clone(), source.to_owned())
            .map_err(|error| failed(&error))?;
        Ok(name)
    }

    /// The list form: `[{"name": "default", "template": ...}, {"name": "tool_use", ...}]`.
    fn add_named(&mut self, list: &[Value]) -> Result<(), TextError> {
        for (index, item) in list.iter().enumerate() {
            let field = |key: &str| item.get(key).and_then(Value::as_str);
            let (Some(name), Some(source)) = (field("name"), field("template")) else {
                let key = format!("chat_template[{index}]");
                return Err(bad_key(key, "has no name or no template"));
            };
            let added = self.add(format!("{TOKENIZER_CONFIG} chat_template {name}"), source)?;
            match name {
                "default" => self.default = added,
                "tool_use" => self.tool_use = Some(added),
                _ => {}
            }
        }
        if self.default.is_empty() {
            return Err(bad_key("chat_template", "has no template named default"));
        }
        Ok(())
    }
}

/// The words of `raise_exception`, found again in the chain of errors that rendering returns.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// A message's text: the content, or the last part of it that is text.
fn last_text(content: &Value) -> &str {
    let part = |parts: &'_ Vec<Value>| parts.iter().rposition(|part| part["text"].is_string());
    match content {
        Value::Array(parts) => part(parts).and_then(|i| parts[i]["text"].as_str()),
        content => content.as_str(),
    }
    .unwrap_or_default()
}

fn parse_object(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok().filter(Value::is_object)
}

fn bad_template(error: &dyn std::error::Error) -> TextError {
    TextError::BadFile { file: CHAT_TEMPLATE, detail: error.to_string() }
}

fn failed(error: &Error) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(this) = cause {
        if let Some(Raised(message)) = this.downcast_ref() {
            return TextError::TemplateRaised { message: message.clone() };
        }
        cause = this.source();
    }
    TextError::TemplateFailed { detail: error.to_string() }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are the default ones"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    // An error then says which expression failed, in every build.
    environment.set_debug(true);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// `tojson` as transformers defines it: `json.dumps` with `ensure_ascii=False`.
fn tojson(value: minijinja::Value, options: Kwargs) -> Result<String, Error> {
    let invalid = |detail: &str| Error::new(ErrorKind::InvalidOperation, detail.to_owned());
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let indent = match options.get::<Option<minijinja::Value>>("indent")? {
        Some(indent) if indent.kind() == ValueKind::String => Some(indent.to_string()),
        Some(indent) => {
            let width = indent.as_usize().ok_or_else(|| invalid("indent is not a width"))?;
            Some(" ".repeat(width))
        }
        None => None,
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let [item_separator, key_separator] = match separators.map(<[String; 2]>::try_from) {
        Some(Ok(separators)) => separators,
        Some(Err(_)) => return Err(invalid("separators are not two")),
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
    };
    let dumps = Dumps {
        item_separator,
        key_separator,
        indent,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let value = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(dumps.write(&value))
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(format: String) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(&format, now).map_err(|detail| Error::new(ErrorKind::InvalidOperation, detail))
}

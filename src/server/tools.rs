//! The tools of a request, and which of them the model is to call.

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::structure;
use crate::request::{Constraint, Request};
use crate::text::{AnswerFormat, Tool};

/// Most tools of a request.
const MAX_TOOLS: usize = 1024;

/// Longest name of a tool, in bytes.
const MAX_NAME_BYTES: usize = 128;

/// Whether the model calls a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// It does not.
    None,
    /// As it likes.
    Auto,
    /// It does, whichever.
    Required,
    /// It calls this one.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone)]
pub struct Tools {
    /// What they are.
    pub list: Vec<Tool>,
    /// Which of them is called.
    pub choice: ToolChoice,
    /// More than one call in an answer is told of.
    pub parallel: bool,
    /// As templates get them.
    pub rendered: Vec<Value>,
    /// Those behind which the state is to be kept.
    pub marked: Vec<usize>,
}

impl Tools {
    /// No tools at all.
    pub fn none() -> Tools {
        Tools {
            list: Vec::new(),
            choice: ToolChoice::None,
            parallel: true,
            rendered: Vec::new(),
            marked: Vec::new(),
        }
    }

    /// Takes `tools`, `tool_choice` and `parallel_tool_calls` of a chat.
    ///
    /// # Errors
    /// A tool without a name, a choice among no tools, or of one that is not there.
    pub fn take(fields: &mut Fields) -> Result<Tools, ApiError> {
        let mut tools =
            Tools { parallel: fields.or("parallel_tool_calls", true)?, ..Tools::none() };
        for (path, tool) in fields.list("tools")?.unwrap_or_default() {
            tools.push(Fields::of(path, tool)?)?;
        }
        let choice = match fields.raw("tool_choice") {
            None => return Ok(tools.choose(ToolChoice::Auto)),
            Some(Value::String(word)) => match word.as_str() {
                "none" => ToolChoice::None,
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                _ => {
                    let message = "tool_choice: expected none, auto, required or a function";
                    return Err(ApiError::value("tool_choice", message));
                }
            },
            Some(value) => {
                let mut choice = Fields::of("tool_choice".to_owned(), value)?;
                let function = choice.object("function")?;
                let function = function.ok_or_else(|| ApiError::missing("tool_choice.function"));
                ToolChoice::Named(function?.need("name")?)
            }
        };
        tools.check(&choice, "tool_choice")?;
        Ok(tools.choose(choice))
    }

    /// Adds a tool, with `name`, `description` and `parameters` in its `function`.
    fn push(&mut self, mut tool: Fields) -> Result<(), ApiError> {
        let kind: String = tool.or("type", "function".to_owned())?;
        if kind != "function" {
            let path = tool.path("type");
            return Err(ApiError::value(path.clone(), format!("{path}: expected function")));
        }
        if tool.raw("cache_control").is_some() {
            self.marked.push(self.list.len());
        }
        let path = tool.path("function");
        let mut function = tool.object("function")?.ok_or_else(|| ApiError::missing(path))?;
        let at = function.path("name");
        let name: String = function.need("name")?;
        let description = function.take("description")?;
        let parameters = function.take::<serde_json::Map<_, _>>("parameters")?.map(Value::from);
        self.add(&at, Tool { name, description, parameters })
    }

    /// Adds a tool whose name stands at the path `at`.
    ///
    /// # Errors
    /// A name that is empty, too long or there already, or too many tools.
    pub fn add(&mut self, at: &str, tool: Tool) -> Result<(), ApiError> {
        if !(1..=MAX_NAME_BYTES).contains(&tool.name.len()) {
            return Err(ApiError::value(at, format!("{at}: 1 to {MAX_NAME_BYTES} bytes")));
        }
        if self.list.iter().any(|other| other.name == tool.name) {
            return Err(ApiError::value(at, format!("{at}: another tool has the same name")));
        }
        if self.list.len() == MAX_TOOLS {
            return Err(ApiError::value("tools", format!("tools: {MAX_TOOLS} at most")));
        }
        self.rendered.push(tool.to_json());
        self.list.push(tool);
        Ok(())
    }

    /// Refuses a choice among no tools, or of one that is not there; `param` is its field.
    ///
    /// # Errors
    /// As said.
    pub fn check(&self, choice: &ToolChoice, param: &str) -> Result<(), ApiError> {
        if self.list.is_empty() && *choice != ToolChoice::None {
            return Err(ApiError::value(param, format!("{param} is allowed only with tools")));
        }
        match choice {
            ToolChoice::Named(name) if !self.list.iter().any(|tool| tool.name == *name) => {
                Err(ApiError::value(param, format!("{param}: no tool has the name that it gives")))
            }
            _ => Ok(()),
        }
    }

    /// The same tools, of which `choice` is called; without tools none is.
    pub fn choose(self, choice: ToolChoice) -> Tools {
        let choice = if self.list.is_empty() { ToolChoice::None } else { choice };
        Tools { choice, ..self }
    }

    /// Holds the answer to `prompt` to a call of the tool that must be called, or to its format in
    /// the model's own marks, and shows those that the answer is taken apart by. True when a call
    /// is forced.
    ///
    /// # Errors
    /// Both at once; `field` is what asked for the format.
    pub fn hold(
        &self,
        request: &mut Request,
        format: &AnswerFormat,
        prompt: &str,
        field: &str,
    ) -> Result<bool, ApiError> {
        if format.shows_specials() {
            request.skip_special_tokens = false;
        }
        let forced = self.force(format, prompt);
        let is_forced = forced.is_some();
        request.constraint = match (forced, request.constraint.take()) {
            (Some(_), Some(_)) => {
                let message = format!("a tool that must be called and {field} exclude each other");
                return Err(ApiError::value("tool_choice", message));
            }
            (Some(forced), None) => Some(forced),
            (None, asked) => asked.map(|asked| structure::enclose(asked, format, prompt)),
        };
        Ok(is_forced)
    }

    /// What makes the model call a tool that it must call, in an answer to `prompt`.
    fn force(&self, format: &AnswerFormat, prompt: &str) -> Option<Constraint> {
        let grammar = match &self.choice {
            ToolChoice::None | ToolChoice::Auto => None,
            ToolChoice::Required => format.force(&self.list, self.parallel, prompt),
            ToolChoice::Named(name) => {
                let named = self.list.iter().filter(|tool| tool.name == *name).cloned();
                format.force(&named.collect::<Vec<_>>(), false, prompt)
            }
        };
        grammar.map(Constraint::Grammar)
    }

    /// The tools that the model may call.
    pub fn callable(&self) -> &[Tool] {
        if self.choice == ToolChoice::None { &[] } else { &self.list }
    }
}

/// A call in an answer, as clients get it.
#[derive(Debug, Clone, Default)]
pub struct Call {
    /// Nobody can foresee it.
    pub id: String,
    /// The tool.
    pub name: String,
    /// What the model wrote: JSON if it wrote JSON.
    pub arguments: String,
}

impl Call {
    /// Those of a message.
    ///
    /// # Errors
    /// A field of another type than expected.
    pub fn take_all(message: &mut Fields) -> Result<Vec<Call>, ApiError> {
        let list = message.list("tool_calls")?.unwrap_or_default();
        list.into_iter()
            .map(|(path, call)| {
                let mut call = Fields::of(path, call)?;
                let path = call.path("function");
                let mut function =
                    call.object("function")?.ok_or_else(|| ApiError::missing(path))?;
                let arguments = match function.raw("arguments") {
                    None => String::new(),
                    Some(Value::String(text)) => text,
                    Some(value) => value.to_string(),
                };
                Ok(Call {
                    id: call.or("id", String::new())?,
                    name: function.need("name")?,
                    arguments,
                })
            })
            .collect()
    }

    /// In the OpenAI shape.
    pub fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "type": "function",
            "function": { "name": self.name, "arguments": self.arguments },
        })
    }
}

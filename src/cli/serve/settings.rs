//! Where settings come from: arguments, the environment, a file, defaults.
//!
//! ```text
//!  arguments ----parse--> matches, with the flags that were given
//!  + environment -parse--> matches   what the arguments gave is left alone
//!  + file --------parse--> matches   and what the environment gave
//! ```
//!
//! A weaker place only adds the arguments that no stronger one gave, so there is one way to read a
//! value, and one list of flags: clap's. What fails to parse is the fault of the place just added.

use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::builder::BoolishValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::{file, spelling};
use crate::cli::CliError;
use crate::engine::EngineError;

/// The command whose settings these are.
pub const COMMAND: &str = "serve";

/// Flags that settle where settings come from, or what is done with them.
pub const NO_SETTINGS: [&str; 4] = ["help", "version", "config", "print-config"];

/// A place that settings come from, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The command line.
    Flag,
    /// An environment variable.
    Environment,
    /// The file of `--config`.
    File,
    /// Nobody said.
    Default,
}

impl Source {
    /// Whether what is said here counts where `other` says something else.
    pub fn outranks(self, other: Source) -> bool {
        self < other
    }
}

/// All settings, for people and for `--config`.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    entries: Vec<Entry>,
    /// The file, if one was read.
    file: Option<PathBuf>,
    /// A line for each flag of another engine that changes nothing here.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone)]
struct Entry {
    name: String,
    values: Vec<String>,
    takes_many: bool,
    source: Source,
}

impl Settings {
    /// Where the value of a flag comes from; `name` is without dashes in front.
    fn source(&self, name: &str) -> Source {
        let entry = self.entries.iter().find(|entry| entry.name == name);
        entry.map_or(Source::Default, |entry| entry.source)
    }

    /// Where it is said that a socket is listened on, and where that an address is.
    pub fn socket_and_address(&self) -> (Source, Source) {
        (self.source("uds"), self.source("host").min(self.source("port")))
    }

    /// Whether a setting of a stronger place is instead of this one.
    fn is_overruled(&self, name: &str) -> bool {
        let (socket, address) = self.socket_and_address();
        match name {
            "host" | "port" => socket.outranks(address),
            "uds" => address.outranks(socket),
            _ => false,
        }
    }

    /// What a message about a setting begins with, when it was not given as a flag.
    fn place(&self, name: &str) -> String {
        match (self.source(name), &self.file) {
            (Source::Environment, _) => format!("environment variable {}: ", variable_of(name)),
            (Source::File, Some(file)) => format!("{}: ", file.display()),
            _ => String::new(),
        }
    }

    /// A setting whose value is a path, and where it was given, for a message.
    pub fn spelled(&self, name: &str, path: &Path) -> String {
        format!("{}--{name} {}", self.place(name), path.display())
    }

    /// The error of a file that a setting names.
    pub fn file_error(&self, name: &str, path: &Path, source: std::io::Error) -> CliError {
        CliError::File { path: self.spelled(name, path), source }
    }

    /// The same error, with the place of the setting that it is about.
    pub fn located(&self, error: CliError) -> CliError {
        match error {
            CliError::Engine(EngineError::Limit(limit)) => {
                let place = self.place(limit.flag.trim_start_matches('-'));
                CliError::Usage(format!("{place}{limit}"))
            }
            other => other,
        }
    }
}

/// Parses the arguments of the program, the second of which is `serve`, and fills in what the
/// environment and a file say.
///
/// # Errors
/// Whatever is wrong in one of the places; help and version are such errors, too.
pub fn parse(command: Command, args: Vec<OsString>) -> Result<(ArgMatches, Settings), CliError> {
    let command = command.mut_subcommand(COMMAND, |serve| serve.mut_args(with_value));
    let serve = command.find_subcommand(COMMAND).expect("it is a command");
    let (args, mut notes) = spelling::translate(args)?;
    let mut reading = Reading { matches: matches(&command, &args)?, args, given: HashMap::new() };
    reading.note_flags(serve)?;
    let environment = environment(serve);
    reading.add(&command, environment, Source::Environment, &|error| match variable(error) {
        Some(variable) => format!("environment variable {variable}: {}", reason(error)),
        None => format!("environment: {}", reason(error)),
    })?;
    let path = reading.serve().get_one::<PathBuf>("config").cloned();
    if let Some(path) = &path {
        let blame = |error: &clap::Error| format!("{}: {}", path.display(), reason(error));
        let (values, more) = file::read(serve, path)?;
        notes.extend(more);
        reading.add(&command, values, Source::File, &blame)?;
    }
    let entries = settings(serve).map(|arg| reading.entry(arg)).collect();
    Ok((reading.matches, Settings { entries, file: path, notes }))
}

/// A switch takes a value, so that a stronger place can turn off what a weaker one turned on.
fn with_value(arg: Arg) -> Arg {
    if !matches!(arg.get_action(), ArgAction::SetTrue) || is_named(&arg, &["print-config"]) {
        return arg;
    }
    arg.action(ArgAction::Set)
        .num_args(0..=1)
        .require_equals(true)
        .value_name("BOOL")
        .value_parser(BoolishValueParser::new())
        .default_value("false")
        .default_missing_value("true")
        .hide_default_value(true)
        .hide_possible_values(true)
}

fn matches(command: &Command, args: &[OsString]) -> Result<ArgMatches, CliError> {
    command.clone().try_get_matches_from(args).map_err(|error| CliError::Arguments(Box::new(error)))
}

/// Values by the name of their flag.
pub type Values = Vec<(String, Vec<OsString>)>;

/// The arguments so far, and where each came from.
struct Reading {
    args: Vec<OsString>,
    matches: ArgMatches,
    given: HashMap<String, Source>,
}

impl Reading {
    fn serve(&self) -> &ArgMatches {
        self.matches.subcommand_matches(COMMAND).expect("the second argument names it")
    }

    /// Notes what the command line gave; `MODEL` becomes `--model`.
    fn note_flags(&mut self, serve: &Command) -> Result<(), CliError> {
        for arg in settings(serve).chain(named(serve, "config")) {
            let source = self.serve().value_source(arg.get_id().as_str());
            if source == Some(ValueSource::CommandLine) {
                self.given.insert(name(arg).to_owned(), Source::Flag);
            }
        }
        if let Some(folder) = self.serve().get_one::<PathBuf>("folder").cloned() {
            if self.given.insert("model".to_owned(), Source::Flag).is_some() {
                let message = "the model is named twice: give MODEL or --model";
                return Err(CliError::Usage(message.to_owned()));
            }
            self.args.insert(2, argument("model", folder.as_os_str()));
        }
        Ok(())
    }

    /// Adds what a weaker place says and no stronger one did.
    fn add(
        &mut self,
        command: &Command,
        values: Values,
        source: Source,
        blame: &dyn Fn(&clap::Error) -> String,
    ) -> Result<(), CliError> {
        for (name, values) in values {
            if self.given.contains_key(&name) {
                continue;
            }
            let added = values.iter().map(|value| argument(&name, value));
            self.args.splice(2..2, added);
            self.given.insert(name, source);
        }
        let parsed = command.clone().try_get_matches_from(&self.args);
        self.matches = parsed.map_err(|error| CliError::Usage(blame(&error)))?;
        Ok(())
    }

    fn entry(&self, arg: &Arg) -> Entry {
        let id = arg.get_id().as_str();
        let values = match self.serve().try_get_one::<bool>(id) {
            // However it was written.
            Ok(Some(switch)) => vec![switch.to_string()],
            _ => {
                let raw = self.serve().get_raw(id).into_iter().flatten();
                raw.map(|value| value.to_string_lossy().into_owned()).collect()
            }
        };
        Entry {
            name: name(arg).to_owned(),
            values,
            takes_many: takes_many(arg),
            source: self.given.get(name(arg)).copied().unwrap_or(Source::Default),
        }
    }
}

/// The flags that are settings.
pub fn settings(serve: &Command) -> impl Iterator<Item = &Arg> {
    serve.get_arguments().filter(|arg| arg.get_long().is_some() && !is_named(arg, &NO_SETTINGS))
}

fn named<'a>(serve: &'a Command, long: &'a str) -> impl Iterator<Item = &'a Arg> {
    serve.get_arguments().filter(move |arg| is_named(arg, &[long]))
}

fn is_named(arg: &Arg, names: &[&str]) -> bool {
    arg.get_long().is_some_and(|long| names.contains(&long))
}

/// The name of a setting, without dashes in front.
pub fn name(arg: &Arg) -> &str {
    arg.get_long().expect("settings have a long name")
}

/// Whether a setting may be given several times.
pub fn takes_many(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// `--name=value`.
fn argument(name: &str, value: impl AsRef<std::ffi::OsStr>) -> OsString {
    let mut argument = OsString::from(format!("--{name}="));
    argument.push(value);
    argument
}

fn variable_of(name: &str) -> String {
    format!("DELTAPOOL_{}", name.replace('-', "_").to_uppercase())
}

/// What the environment says.
fn environment(serve: &Command) -> Values {
    let read = |arg| {
        let value = env::var_os(variable_of(name(arg)))?;
        Some((name(arg).to_owned(), vec![value]))
    };
    settings(serve).chain(named(serve, "config")).filter_map(read).collect()
}

/// The variable that an error is about.
fn variable(error: &clap::Error) -> Option<String> {
    use clap::error::{ContextKind, ContextValue};
    match error.get(ContextKind::InvalidArg)? {
        ContextValue::String(flag) => {
            let name: String =
                flag.chars().skip_while(|c| *c == '-').take_while(is_part_of_name).collect();
            Some(variable_of(&name))
        }
        _ => None,
    }
}

fn is_part_of_name(c: &char) -> bool {
    c.is_ascii_alphanumeric() || *c == '-'
}

/// An error's first paragraph: the rest speaks of the command line.
fn reason(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

impl fmt::Display for Settings {
    /// TOML that `--config` reads, but for keys, which are not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.entries {
            let Entry { name, values, source, .. } = entry;
            let from = match (source, &self.file) {
                (Source::Flag, _) => "flag".to_owned(),
                (Source::Environment, _) => format!("environment, {}", variable_of(name)),
                (Source::File, Some(file)) => format!("file, {}", file.display()),
                (Source::File, None) => "file".to_owned(),
                (Source::Default, _) => "default".to_owned(),
            };
            let left = match values.as_slice() {
                [] => format!("# {name}"),
                _ if matches!(name.as_str(), "api-key" | "admin-api-key") => {
                    format!("# {name}, {} not shown", values.len())
                }
                values if entry.takes_many => {
                    let values: Vec<String> = values.iter().map(|value| quoted(value)).collect();
                    format!("{name} = [{}]", values.join(", "))
                }
                values => format!("{name} = {}", quoted(&values[0])),
            };
            match self.is_overruled(name) && !values.is_empty() {
                // It would stand against what overrules it where this is read again.
                true => writeln!(f, "{:<40} # {from}, overruled", format!("# {left}"))?,
                false => writeln!(f, "{left:<40} # {from}")?,
            }
        }
        Ok(())
    }
}

/// A value in TOML.
fn quoted(value: &str) -> String {
    let is_number = value.parse::<i64>().is_ok_and(|number| number.to_string() == value);
    if is_number || matches!(value, "true" | "false") {
        return value.to_owned();
    }
    // A basic string of TOML takes the escapes of JSON; JSON leaves DEL as it is.
    serde_json::Value::from(value).to_string().replace('\u{7f}', "\\u007f")
}

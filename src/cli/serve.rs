//! `deltapool serve`: an HTTP server for the clients of OpenAI's and Anthropic's APIs.

mod args;
mod model;
mod settings;
mod spelling;

use std::fs;
use std::io;
use std::path::Path;
use std::time::Instant;

use kernels::Isa;

use super::CliError;
use super::limits::Shown;
use super::loading::{Files, Progress};
use super::output::{grouped, print};
use crate::server::{self, Bind, Outcome, Place};
use crate::text::TextError;

pub use args::ServeArgs;
pub use settings::{COMMAND, parse};

/// Runs the command.
pub fn run(args: &ServeArgs, isa: Isa) -> Result<(), CliError> {
    if args.print_config {
        return print(&args.settings.to_string());
    }
    let start = Instant::now();
    let quiet = args.common.quiet;
    if !quiet {
        args.settings.notes.iter().for_each(|note| eprintln!("{note}"));
    }
    let config = args.server()?;
    let bind = config.bind.clone();
    let listen = |source| CliError::Listen { place: shown(&bind), source };
    // Before the weights are loaded: that may take minutes.
    server::probe(&bind).map_err(listen)?;
    let mut files = Files::open(&args.common, isa)?;
    let tokenizer = files.tokenizer()?.ok_or(TextError::NoTokenizer)?;
    let model = model::served(args, &mut files, tokenizer.clone())?;
    let limits = args.engine.config(args.common.threads());
    let progress = Progress::bar_or_lines(quiet);
    let (engine, ()) = files.engine(Some(tokenizer), isa, limits, progress, |limits| {
        if !quiet {
            eprintln!("{}", Shown(limits));
        }
        Ok(())
    })?;
    let limits = engine.limits();
    let ready = format!(
        "model {}  context {}  {} pages",
        model.names[0],
        grouped(limits.max_model_len),
        grouped(limits.device.pages)
    );
    let outcome = server::run(engine, model, config, |place| {
        let seconds = start.elapsed().as_secs_f64();
        // In one piece: scripts read the address while it is written.
        let line = format!("ready in {seconds:.1} s: {place}  {ready}\n");
        eprint!("{line}");
        tell_port(args.listen.port_file.as_deref(), place)
    });
    match outcome.map_err(listen)? {
        Outcome::Drained => Ok(()),
        Outcome::Cut(answers) => Err(CliError::Cut(answers)),
    }
}

/// Writes the port to a file at once and whole: who waits for the file finds all of it.
fn tell_port(file: Option<&Path>, place: &Place) -> io::Result<()> {
    let (Some(path), Place::Tcp(address)) = (file, place) else { return Ok(()) };
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let written = fs::write(&beside, format!("{}\n", address.port()));
    let told = written.and_then(|()| fs::rename(&beside, path));
    told.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

fn shown(bind: &Bind) -> String {
    match bind {
        Bind::Tcp { host, port } => format!("{host}:{port}"),
        Bind::Unix(path) => path.display().to_string(),
    }
}

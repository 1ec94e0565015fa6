//! `deltapool serve`: an HTTP server for the clients of OpenAI's and Anthropic's APIs.

mod args;
mod file;
mod model;
mod port_file;
mod settings;
mod spelling;
mod values;

use std::io;
use std::time::Instant;

use kernels::Isa;

use super::CliError;
use super::limits::Shown;
use super::loading::{Files, Progress};
use super::output::{grouped, print};
use crate::server::{self, Address, Bind, Outcome};
use crate::text::TextError;

use port_file::PortFile;

pub use args::ServeArgs;
pub use settings::{COMMAND, parse};

/// Runs the command.
pub fn run(args: &ServeArgs, isa: Isa) -> Result<(), CliError> {
    let start = Instant::now();
    let (settings, quiet) = (&args.settings, args.common.quiet);
    if !quiet {
        settings.notes.iter().for_each(|note| eprintln!("{note}"));
    }
    let config = args.server()?;
    args.limits(args.common.device)?;
    if args.print_config {
        return print(&settings.to_string());
    }
    let bind = config.bind.clone();
    let listen = |source| CliError::Listen { place: shown(&bind), source };
    // Before the weights are loaded: that may take minutes.
    server::probe(&bind).map_err(listen)?;
    let mut port_file = args.port_file()?;
    let mut files = Files::open(&args.common, isa)?;
    let limits = args.limits(files.device.kind())?;
    let tokenizer = files.tokenizer()?.ok_or(TextError::NoTokenizer)?;
    let model = model::served(args, &mut files, tokenizer.clone())?;
    let progress = Progress::bar_or_lines(quiet);
    let built = files.engine(Some(tokenizer), isa, limits, progress, |limits| {
        if !quiet {
            eprintln!("{}", Shown(limits));
        }
        Ok(())
    });
    let (engine, ()) = built.map_err(|error| settings.located(error))?;
    let limits = engine.limits();
    let ready = format!(
        "model {}  context {}  {} pages",
        model.names[0],
        grouped(limits.max_model_len),
        grouped(limits.device.pages)
    );
    let has_keys = !config.api_keys.is_empty();
    let mut fault = None;
    let outcome = server::run(engine, model, config, |address| {
        if let Err(error) = tell_port(&mut port_file, address) {
            fault = Some(error);
            return Err(io::Error::other("the port could not be told"));
        }
        if !quiet && !has_keys && is_open(address) {
            eprintln!("warning: other machines may use it without a key; --api-key asks for one");
        }
        let seconds = start.elapsed().as_secs_f64();
        // In one piece: scripts read the address while it is written.
        let line = format!("ready in {seconds:.1} s: {address}  {ready}\n");
        eprint!("{line}");
        Ok(())
    });
    if let Some((error, path)) = fault.zip(args.listen.port_file.as_deref()) {
        return Err(settings.file_error(PORT_FILE, path, error));
    }
    match outcome.map_err(listen)? {
        Outcome::Drained => Ok(()),
        Outcome::Cut(answers) => Err(CliError::Cut { answers }),
    }
}

const PORT_FILE: &str = "port-file";

impl ServeArgs {
    /// The file of `--port-file`, without a port.
    fn port_file(&self) -> Result<Option<PortFile>, CliError> {
        let Some(path) = self.listen.port_file.as_deref() else { return Ok(None) };
        let file = PortFile::new(path);
        file.map(Some).map_err(|error| self.settings.file_error(PORT_FILE, path, error))
    }
}

fn tell_port(file: &mut Option<PortFile>, address: &Address) -> io::Result<()> {
    match (file, address) {
        (Some(file), Address::Tcp(address)) => file.tell(address.port()),
        _ => Ok(()),
    }
}

/// Whether other machines may reach a server there.
fn is_open(address: &Address) -> bool {
    matches!(address, Address::Tcp(address) if !address.ip().is_loopback())
}

fn shown(bind: &Bind) -> String {
    match bind {
        Bind::Tcp { host, port } => format!("{host}:{port}"),
        Bind::Unix(path) => path.display().to_string(),
    }
}

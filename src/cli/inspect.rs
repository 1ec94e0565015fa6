//! `deltapool inspect`: what a model is made of and what it costs, from its `config.json` alone.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use kernels::Isa;

use super::common::{PrecisionArgs, WeightArgs};
use super::output::grouped;
use crate::config::parse_bytes;
use crate::inspect::{LayerRun, Report};
use crate::models::{ModelError, ModelFiles};

/// Shows a model's layers, its bytes of state, and how many sequences fit in memory.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Folder with config.json; weights need not be there. Without it: the model in the binary.
    #[arg(value_name = "DIR", conflicts_with = "folder")]
    pub model: Option<PathBuf>,
    /// The same, as other commands take it.
    #[arg(id = "folder", short = 'm', long = "model", value_name = "DIR")]
    pub folder: Option<PathBuf>,
    /// Print JSON, or write it to FILE beside the table.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-"
    )]
    pub json: Option<PathBuf>,
    /// How exact it would be computed.
    #[command(flatten)]
    pub precision: PrecisionArgs,
    /// How weights are held.
    #[command(flatten)]
    pub weights: WeightArgs,
    /// Memory for state, after the weights: bytes, or a number with KB, MB, GB, TB (powers of 1000)
    /// or KiB, MiB, GiB, TiB (powers of 1024).
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, allow_negative_numbers = true)]
    pub device_memory: Option<usize>,
}

impl InspectArgs {
    /// The folder that was named.
    pub fn dir(&self) -> Option<&Path> {
        self.model.as_deref().or(self.folder.as_deref())
    }
}

/// Why `inspect` failed.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// `--device-memory` does not suit the model.
    #[error("--device-memory: {0}")]
    Memory(String),
    /// No folder given and no model in the binary.
    #[error("this binary carries no model; name a folder")]
    NoModel,
    /// The report could not be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Where to.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Inspects a model and prints the result.
///
/// # Errors
/// The model's files, a memory that does not suit it, or a result that cannot be written.
pub fn run(args: &InspectArgs) -> Result<(), InspectError> {
    let report = report(args)?;
    let json = || format!("{:#}\n", serde_json::json!(report));
    let to_stdout = |text: String| {
        let written = io::stdout().write_all(text.as_bytes());
        written.map_err(|source| InspectError::Write { path: "the output".to_owned(), source })
    };
    match &args.json {
        None => to_stdout(Table(&report).to_string()),
        Some(path) if path == Path::new("-") => to_stdout(json()),
        Some(path) => {
            fs::write(path, json()).map_err(|source| InspectError::Write {
                path: path.display().to_string(),
                source,
            })?;
            to_stdout(Table(&report).to_string())
        }
    }
}

/// The figures that [`run`] prints.
///
/// # Errors
/// As [`run`].
pub fn report(args: &InspectArgs) -> Result<Report, InspectError> {
    let mut model = match args.dir() {
        Some(dir) => ModelFiles::open(dir)?,
        None => embedded()?,
    };
    model.spec.quantize = args.weights.quantization();
    args.precision.apply(&mut model.spec, Isa::best().has_bf16());
    Report::new(&model.spec, model.weight_bytes()?, args.device_memory)
        .map_err(|error| InspectError::Memory(error.to_string()))
}

#[cfg(feature = "embedded-model")]
fn embedded() -> Result<ModelFiles, InspectError> {
    Ok(ModelFiles::embedded()?)
}

#[cfg(not(feature = "embedded-model"))]
fn embedded() -> Result<ModelFiles, InspectError> {
    Err(InspectError::NoModel)
}

/// The report for people.
#[derive(Debug)]
pub struct Table<'a>(pub &'a Report);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        writeln!(
            f,
            "{}: {} parameters, {} layers of width {}, vocabulary {}, context {} tokens\n",
            report.family,
            grouped(report.parameters),
            report.layers.last().map_or(0, |run| run.last + 1),
            grouped(report.hidden_size),
            grouped(report.vocab_size),
            grouped(report.context_tokens),
        )?;
        write_layers(f, &report.layers)?;
        writeln!(f)?;
        write_costs(f, report)?;
        write_fits(f, report)
    }
}

fn write_layers(f: &mut fmt::Formatter<'_>, runs: &[LayerRun]) -> fmt::Result {
    let titles = ["layers", "mixer", "feed-forward", "parameters", "state/sequence", "KV/token"];
    let mut rows = vec![titles.map(str::to_owned)];
    rows.extend(runs.iter().map(|run| {
        let range = if run.first == run.last {
            run.first.to_string()
        } else {
            format!("{}-{}", run.first, run.last)
        };
        [
            range,
            run.mixer.clone(),
            run.ffn.clone(),
            grouped(run.parameters),
            grouped(run.state_bytes_per_sequence),
            grouped(run.kv_bytes_per_token),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    for [range, mixer, ffn, parameters, state, kv] in &rows {
        let [w0, w1, w2, w3, w4, w5] = widths;
        write!(f, "{range:<w0$}  {mixer:<w1$}  {ffn:<w2$}")?;
        writeln!(f, "  {parameters:>w3$}  {state:>w4$}  {kv:>w5$}")?;
    }
    writeln!(f, "(of one layer: parameters, bytes of state a sequence, bytes of KV a token)")
}

fn write_costs(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let (sequence, token, page) = (&report.per_sequence, &report.per_token, &report.page);
    let source = match report.weights_bytes_from_files {
        true => "as stored in the files",
        false => "at 2 bytes a parameter; no weight files here",
    };
    let held = match report.quantize {
        Some(quantize) => format!("large matrices in {quantize}, panels padded"),
        None => "panels padded".to_owned(),
    };
    let filled = |units: usize, what: &str, loss: f64| {
        let plural = if units == 1 { "" } else { "s" };
        format!("{units} {what}{plural} ({:.1} % lost)", 100.0 * loss)
    };
    let blocks = filled(page.blocks, "block", page.block_loss);
    let page_holds = match page.slots {
        0 => blocks,
        slots => format!("{} or {blocks}", filled(slots, "slot", page.slot_loss)),
    };
    let window = sequence.window_dtype;
    let rows = [
        ("weights", report.weights_bytes, source.to_owned()),
        ("            in memory", report.weights_held_bytes, held),
        ("a sequence: recurrent state", sequence.recurrent_bytes, "f32".to_owned()),
        ("            conv windows", sequence.conv_bytes, window.to_owned()),
        ("            hidden row", sequence.hidden_row_bytes, window.to_owned()),
        ("            slot", sequence.slot_bytes, "all three, padded".to_owned()),
        ("a token:    KV", token.kv_bytes, token.kv_dtype.to_owned()),
        ("a block:    KV", token.block_bytes, format!("{} tokens", token.block_tokens)),
        ("a page", page.page_bytes, page_holds),
    ];
    let width = rows.iter().map(|(_, bytes, _)| grouped(*bytes).len()).max().unwrap_or(0);
    for (what, bytes, note) in rows {
        writeln!(f, "{what:<28} {:>width$} bytes  {note}", grouped(bytes))?;
    }
    Ok(())
}

fn write_fits(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let Some(memory) = report.device_memory_bytes else {
        return writeln!(f, "\n(--device-memory says how many sequences fit)");
    };
    writeln!(f, "\nsequences that fit in {} bytes, after the weights:", grouped(memory))?;
    for fit in &report.fits {
        let beyond = if fit.within_context { "" } else { "  (beyond the model's context)" };
        let (tokens, sequences) = (grouped(fit.tokens), grouped(fit.sequences));
        writeln!(f, "  of {tokens:>7} tokens {sequences:>11}{beyond}")?;
    }
    Ok(())
}

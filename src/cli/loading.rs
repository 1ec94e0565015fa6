//! From a folder, or the model in the binary, to an engine; with a bar for the eyes of a terminal.

use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kernels::Isa;

use super::CliError;
use super::common::{CommonArgs, check_folder};
use super::profiles::calibrated;
use crate::config::{Device, EngineConfig};
use crate::engine::{Engine, EngineError, EngineLimits, OpenDevice};
use crate::models::ModelFiles;
use crate::text::{TextError, TextFiles, Tokenizer};

/// The files of a model: what it is, and how text becomes ids; and what it is computed on.
pub struct Files {
    pub model: ModelFiles,
    pub text: TextFiles,
    /// What the model is to be computed on.
    pub device: OpenDevice,
}

impl Files {
    /// Reads the small files of the model that is asked for, or of the model in the binary, to be
    /// computed on the device that is asked for, or with `isa`.
    pub fn open(args: &CommonArgs, isa: Isa) -> Result<Files, CliError> {
        Files::open_on(args, isa, args.device)
    }

    /// As [`Files::open`], for a command that measures the processor and nothing else.
    pub fn open_on_cpu(args: &CommonArgs, isa: Isa) -> Result<Files, CliError> {
        if args.device == Device::Cuda {
            let message = "--device cuda: this command measures the processor; use --device cpu";
            return Err(CliError::Usage(message.to_owned()));
        }
        Files::open_on(args, isa, Device::Cpu)
    }

    /// As [`Files::open`], with random weights in the place of the files' if that is asked for.
    pub fn open_for_bench(
        args: &CommonArgs,
        has_random_weights: bool,
        isa: Isa,
    ) -> Result<Files, CliError> {
        let mut files = Files::open(args, isa)?;
        if has_random_weights {
            files.model = files.model.with_random_weights();
            let has_bf16 = isa.has_bf16() || files.device.kind() == Device::Cuda;
            args.precision.apply(&mut files.model.spec, has_bf16);
        }
        Ok(files)
    }

    fn open_on(args: &CommonArgs, isa: Isa, device: Device) -> Result<Files, CliError> {
        let (mut model, text) = match &args.model {
            Some(dir) => {
                check_folder(dir)?;
                (ModelFiles::open(dir)?, TextFiles::read(dir)?)
            }
            None => embedded()?,
        };
        let device = OpenDevice::open(device).map_err(EngineError::from)?;
        let has_bf16 = isa.has_bf16() || device.kind() == Device::Cuda;
        model.spec.quantize = args.weights.quantization();
        args.precision.apply(&mut model.spec, has_bf16);
        Ok(Files { model, text, device })
    }

    /// The tokenizer, if the model has one.
    pub fn tokenizer(&self) -> Result<Option<Arc<Tokenizer>>, CliError> {
        match Tokenizer::from_files(&self.text) {
            Ok(tokenizer) => Ok(Some(Arc::new(tokenizer))),
            Err(TextError::NoTokenizer) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Derives the limits, loads the weights and starts an engine, with the rates that
    /// `calibrate` found for this model on this machine, if it did. `prepare` hears the limits
    /// before anything is loaded: what can go wrong with little work goes wrong there.
    pub fn engine<T>(
        self,
        tokenizer: Option<Arc<Tokenizer>>,
        isa: Isa,
        config: EngineConfig,
        mut progress: Progress,
        prepare: impl FnOnce(&EngineLimits) -> Result<T, CliError>,
    ) -> Result<(Engine, T), CliError> {
        let config = match self.device.kind() {
            Device::Cpu => calibrated(config, &self.model, isa),
            _ => config,
        };
        let builder = Engine::builder(self.model).tokenizer(tokenizer).isa(isa).config(config);
        let builder = builder.on(self.device).on_warning(|warning| eprintln!("note: {warning}"));
        let bar = progress.bar.clone();
        let mut builder = builder.on_load(move |done, total| progress.show(done, total));
        let prepared = prepare(&builder.limits()?)?;
        let engine = builder.build();
        bar.finish_and_clear();
        Ok((engine?, prepared))
    }
}

/// Does `action` when Ctrl-C is pressed. A second Ctrl-C ends the program at once: it does not
/// wait for the step that is running.
pub fn on_interrupt(action: impl Fn() + Send + 'static) -> Result<(), CliError> {
    let pressed = AtomicBool::new(false);
    let handler = move || {
        if pressed.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        action();
    };
    ctrlc::set_handler(handler)
        .map_err(|error| CliError::Usage(format!("no handler for Ctrl-C: {error}")))
}

/// How the loading of weights is shown.
pub struct Progress {
    bar: ProgressBar,
    /// Lines are printed, where a bar is not: for a log.
    has_lines: bool,
    /// Tenths of the bytes that were told.
    tenths: usize,
}

impl Progress {
    /// A bar on a terminal.
    pub fn bar(quiet: bool) -> Progress {
        let bar = bar(quiet, LOADING);
        Progress { bar, has_lines: false, tenths: 0 }
    }

    /// A bar on a terminal, and elsewhere a line for each tenth.
    pub fn bar_or_lines(quiet: bool) -> Progress {
        Progress { has_lines: !quiet && !is_shown(quiet), ..Progress::bar(quiet) }
    }

    fn show(&mut self, done: usize, total: usize) {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        if self.has_lines
            && let Some(tenths) = self.passed(done, total)
        {
            eprintln!("loading {} %", tenths * 10);
        }
    }

    /// The tenths of the way, when they are more than were told.
    fn passed(&mut self, done: usize, total: usize) -> Option<usize> {
        let tenths = (done as u128 * 10).checked_div(total as u128)? as usize;
        let is_news = tenths > self.tenths;
        self.tenths = self.tenths.max(tenths);
        is_news.then_some(tenths)
    }
}

const LOADING: &str = "loading {bar:40} {bytes}/{total_bytes}";

/// A bar for the loading of weights, and who moves it.
pub fn loading_bar(quiet: bool) -> (ProgressBar, impl FnMut(usize, usize)) {
    let bar = bar(quiet, LOADING);
    let moved = bar.clone();
    let show = move |done, total| {
        moved.set_length(total as u64);
        moved.set_position(done as u64);
    };
    (bar, show)
}

#[cfg(feature = "embedded-model")]
fn embedded() -> Result<(ModelFiles, TextFiles), CliError> {
    Ok((ModelFiles::embedded()?, TextFiles::embedded()))
}

#[cfg(not(feature = "embedded-model"))]
fn embedded() -> Result<(ModelFiles, TextFiles), CliError> {
    Err(CliError::NoModel)
}

/// Whether figures and bars are shown: to a terminal, and unless told otherwise.
pub fn is_shown(quiet: bool) -> bool {
    !quiet && stderr().is_terminal()
}

/// A progress bar on standard error.
pub fn bar(quiet: bool, template: &str) -> ProgressBar {
    let target =
        if is_shown(quiet) { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).expect("the template is ours");
    ProgressBar::with_draw_target(None, target).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenth_is_told_once_and_those_that_are_jumped_over_are_not() {
        let mut progress = Progress::bar(true);
        let told: Vec<usize> = [0, 9, 10, 19, 45, 46, 99, 100, 100]
            .into_iter()
            .filter_map(|done| progress.passed(done, 100))
            .collect();
        assert_eq!(told, [1, 4, 9, 10]);
        assert_eq!(progress.passed(0, 0), None);
    }
}

//! Arguments that commands share.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use kernels::Quantization;

use super::CliError;
use super::output::JsonTarget;
use crate::config::{Device, default_threads};
use crate::models::spec::ModelSpec;

/// Which model, how it is computed, and whether that is told.
#[derive(Debug, Args)]
pub struct CommonArgs {
    /// Folder of a model (config.json, safetensors, tokenizer); default: the model in the binary.
    #[arg(short, long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// How its weights are held.
    #[command(flatten)]
    pub weights: WeightArgs,
    /// Threads to compute with; default: one per core.
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// How exact it is computed.
    #[command(flatten)]
    pub precision: PrecisionArgs,
    /// What it is computed on.
    #[arg(long, value_enum, value_name = "DEVICE", default_value_t = Device::Cpu)]
    pub device: Device,
    /// Say nothing on standard error but errors; a server says that it is ready, too.
    #[arg(short, long)]
    pub quiet: bool,
}

impl CommonArgs {
    /// Threads to compute with.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(default_threads)
    }
}

impl ValueEnum for Device {
    fn value_variants<'a>() -> &'a [Device] {
        &[Device::Cpu, Device::Cuda, Device::Auto]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Device::Cpu => "the processor",
            Device::Cuda => "a CUDA device; where none serves, the exit code is 4",
            Device::Auto => "a CUDA device where one serves, or else the processor",
        };
        Some(PossibleValue::new(self.as_str()).help(help))
    }
}

/// Refuses what is no folder: a name that others would download is one of these.
///
/// # Errors
/// No folder at `dir`.
pub fn check_folder(dir: &Path) -> Result<(), CliError> {
    let no_folder = || CliError::NoFolder { path: dir.display().to_string() };
    dir.is_dir().then_some(()).ok_or_else(no_folder)
}

/// Where a command with a result reports it.
#[derive(Debug, Args)]
pub struct JsonArgs {
    /// Print one JSON object on one line instead of text, or write it to FILE beside the text.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-"
    )]
    pub json: Option<PathBuf>,
}

impl JsonArgs {
    /// Where a JSON result goes.
    pub fn target(&self) -> JsonTarget {
        JsonTarget::new(self.json.as_deref())
    }
}

/// How the weights of a model are held in memory.
#[derive(Debug, Clone, Copy, Args)]
pub struct WeightArgs {
    /// Hold large matrices in 8 or 4 bits a weight, with a scale for 32 of them: less memory and
    /// faster, for other answers than the weights as stored give.
    ///
    /// Quantised at load: projections of mixers, MLA's kv_b_proj among them, feed-forward parts,
    /// experts and the head; the rows they multiply are rounded to 8 bits. Kept as stored: the
    /// embedding, norms, convolutions, routers, and the decay, output-gate and beta projections of
    /// KDA. A head that is tied to the embedding is quantised in a copy.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Quantize::None)]
    pub quantize: Quantize,
}

/// How large matrices are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Quantize {
    /// As their files store them.
    None,
    /// 8.5 bits a weight.
    Q8,
    /// 4.5 bits a weight.
    Q4,
}

impl WeightArgs {
    /// How the engine is to hold them.
    pub fn quantization(self) -> Option<Quantization> {
        match self.quantize {
            Quantize::None => None,
            Quantize::Q8 => Some(Quantization::Q8),
            Quantize::Q4 => Some(Quantization::Q4),
        }
    }
}

/// How exact products are, and what is kept of each token.
#[derive(Debug, Clone, Copy, Args)]
pub struct PrecisionArgs {
    /// How bf16 weights are multiplied; states, sums and the products of attention are f32 in any
    /// case.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Compute::Auto)]
    pub compute: Compute,
    /// How keys, values and latents of tokens are kept: half the bytes of f32 in bf16.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = KvDtype::Auto)]
    pub kv_dtype: KvDtype,
    /// How recurrent states are kept.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = StateDtype::F32)]
    pub state_dtype: StateDtype,
}

/// How recurrent states are kept while a sequence runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StateDtype {
    /// As they are computed; nothing less is there.
    F32,
}

impl PrecisionArgs {
    /// How `spec` is to be computed, where bf16 is multiplied as such or not.
    pub fn apply(self, spec: &mut ModelSpec, has_bf16: bool) {
        spec.compute = self.compute.resolve(has_bf16);
        spec.kv_dtype = match (self.kv_dtype, self.compute) {
            (KvDtype::Auto, Compute::F32) | (KvDtype::F32, _) => kernels::KvDtype::F32,
            (KvDtype::Auto, Compute::Auto | Compute::Bf16) => spec.kv_dtype,
            (KvDtype::Bf16, _) => kernels::KvDtype::Bf16,
        };
    }
}

/// How keys, values and latents are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvDtype {
    /// bf16 where the weights are stored in 16 bits, or else f32; f32 with `--compute f32`.
    Auto,
    /// As they are computed.
    F32,
    /// Rounded to bf16.
    Bf16,
}

/// How bf16 weights are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Compute {
    /// bf16 where the processor multiplies that itself (AVX-512 BF16) and on a CUDA device, or
    /// else f32.
    Auto,
    /// Activations stay f32: exact.
    F32,
    /// Activations are rounded to bf16, once for each operator.
    Bf16,
}

impl Compute {
    /// What that is where bf16 is multiplied as such, or not.
    pub fn resolve(self, has_bf16: bool) -> kernels::Compute {
        match self {
            Compute::Auto if has_bf16 => kernels::Compute::Bf16,
            Compute::Auto | Compute::F32 => kernels::Compute::F32,
            Compute::Bf16 => kernels::Compute::Bf16,
        }
    }
}

//! A model as files: from a folder, or from the binary, to a [`ModelSpec`] and loaded weights.

use std::collections::HashMap;
#[cfg(feature = "cuda")]
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kernels::{Dtype, KvDtype, Matrix, Panels};
use serde_json::{Map, Value};

use super::config::{Config, ConfigFault};
use super::family::Family;
use super::generation::{GenerationDefaults, SamplingDefaults};
use super::spec::{ModelSpec, Part, Required};
#[cfg(feature = "cuda")]
use crate::weights::Order;
use crate::weights::{Named, Tensor, WeightBytes, WeightFiles, Weights, WeightsError};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";

/// Why a model could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not a JSON object.
    #[error("{path}: not a JSON object: {reason}")]
    NotJson {
        /// The file.
        path: String,
        /// What the parser said.
        reason: String,
    },
    /// No family of that name.
    #[error("{path}: {found} is not supported; supported: {}", Family::supported())]
    UnknownFamily {
        /// The file.
        path: String,
        /// What it says.
        found: String,
    },
    /// All that is wrong with `config.json` and `generation_config.json`.
    #[error("{path} cannot be used:{}", lines(.faults))]
    Config {
        /// The file.
        path: String,
        /// What is wrong.
        faults: Vec<ConfigFault>,
    },
    /// The weights cannot be used.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// A model whose `config.json` has been read, and whose weights may follow.
#[derive(Debug)]
pub struct ModelFiles {
    /// The model.
    pub spec: ModelSpec,
    /// Where to stop, how to begin.
    pub defaults: GenerationDefaults,
    /// What is in `generation_config.json`, if there is one.
    generation: Option<Map<String, Value>>,
    /// Its name in errors.
    generation_path: String,
    family: &'static Family,
    /// How `config.json` says that the weights are encoded.
    declared: Option<Dtype>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Folder(PathBuf),
    Binary(&'static [u8]),
    /// Nowhere: values are random, encoded so.
    Random(Dtype),
}

impl Place {
    /// How most bytes of the weights are encoded, where files can be read.
    fn dtype(&self) -> Option<Dtype> {
        match self {
            Place::Folder(dir) => Weights::dtype_in(dir),
            Place::Binary(file) => Weights::dtype_embedded(file),
            Place::Random(dtype) => Some(*dtype),
        }
    }
}

impl SamplingDefaults {
    /// What the `generation_config.json` of a folder says, which must have one.
    ///
    /// # Errors
    /// A file that cannot be read, and all that is wrong with it.
    pub fn open(dir: &Path) -> Result<SamplingDefaults, ModelError> {
        let path = dir.join(GENERATION).display().to_string();
        let text = fs::read_to_string(dir.join(GENERATION))
            .map_err(|source| ModelError::Io { path: path.clone(), source })?;
        let map = object(&text, || path.clone())?;
        SamplingDefaults::read(&map).map_err(|faults| ModelError::Config { path, faults })
    }
}

impl ModelFiles {
    /// Reads `config.json` in `dir`, `generation_config.json` if it is there, and how the weights
    /// are encoded: by the headers of their files, or by `config.json` where there are none.
    ///
    /// # Errors
    /// An unreadable file, an unsupported family, or all that is wrong with the files.
    pub fn open(dir: &Path) -> Result<ModelFiles, ModelError> {
        let path = |file: &str| dir.join(file).display().to_string();
        let config = fs::read_to_string(dir.join(CONFIG))
            .map_err(|source| ModelError::Io { path: path(CONFIG), source })?;
        let generation = match fs::read_to_string(dir.join(GENERATION)) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(ModelError::Io { path: path(GENERATION), source }),
        };
        let place = Place::Folder(dir.to_owned());
        ModelFiles::read(&config, generation.as_deref(), place, &path)
    }

    /// A model whose files are part of the binary: the texts of `config.json` and
    /// `generation_config.json`, and the bytes of `model.safetensors`.
    ///
    /// # Errors
    /// As [`ModelFiles::open`].
    pub fn of_texts(
        config: &str,
        generation: Option<&str>,
        weights: &'static [u8],
    ) -> Result<ModelFiles, ModelError> {
        let path = |file: &str| format!("the binary's {file}");
        ModelFiles::read(config, generation, Place::Binary(weights), &path)
    }

    fn read(
        config: &str,
        generation: Option<&str>,
        place: Place,
        path: &dyn Fn(&str) -> String,
    ) -> Result<ModelFiles, ModelError> {
        let config = object(config, || path(CONFIG))?;
        let generation = generation.map(|text| object(text, || path(GENERATION))).transpose()?;
        let family = Family::of(&config)
            .map_err(|found| ModelError::UnknownFamily { path: path(CONFIG), found })?;
        let refused = |faults| ModelError::Config { path: path(CONFIG), faults };
        let mut spec = family.spec(&mut Config::new(&config)).map_err(refused)?;
        let nested = config.get("text_config").and_then(Value::as_object);
        let sources: Vec<_> = generation
            .as_ref()
            .map(|map| (GENERATION, map))
            .into_iter()
            .chain(nested.map(|map| (CONFIG, map)))
            .chain([(CONFIG, &config)])
            .collect();
        let declared = declared_dtype(&config);
        spec.kv_dtype = kv_dtype(place.dtype().or(declared));
        let defaults = GenerationDefaults::read(&sources, spec.vocab_size).map_err(refused)?;
        let generation_path = path(GENERATION);
        Ok(ModelFiles { spec, defaults, generation, generation_path, family, declared, place })
    }

    /// How tokens are chosen where a request does not say, by the model's `generation_config.json`.
    ///
    /// # Errors
    /// All that is wrong with the file.
    pub fn sampling_defaults(&self) -> Result<SamplingDefaults, ModelError> {
        let Some(map) = &self.generation else { return Ok(SamplingDefaults::default()) };
        let path = self.generation_path.clone();
        SamplingDefaults::read(map).map_err(|faults| ModelError::Config { path, faults })
    }

    /// The name that the model's files give to a tensor of the model.
    pub fn tensor_name(&self, layer: Option<usize>, part: Part) -> String {
        (self.family.tensor_name)(layer, part)
    }

    /// Loads the weights; see [`WeightFiles`].
    ///
    /// # Errors
    /// All that is wrong with the weight files.
    pub fn load(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<ModelWeights, ModelError> {
        let weights = self.found(self.named())?.read(progress)?;
        let places = self.spec.required().into_iter().map(|r| (r.layer, r.part));
        Ok(ModelWeights::new(weights, places))
    }

    /// The weights row after row, as a device takes them, to be loaded a layer at a time: so the
    /// host never holds more than one.
    ///
    /// # Errors
    /// As [`ModelFiles::load`], but for what only reading shows.
    #[cfg(feature = "cuda")]
    pub fn rows(&self) -> Result<LayerFiles<'static>, ModelError> {
        let rows = |named| Named { order: Order::Rows, ..named };
        let files = self.found(self.named().into_iter().map(rows).collect())?;
        let required = self.spec.required().into_iter();
        let places = required.map(|r| (r.layer, r.part)).collect();
        Ok(LayerFiles { total: files.bytes().held, files, places, done: 0, progress: None })
    }

    /// The tensors where they are stored.
    fn found(&self, named: Vec<Named>) -> Result<WeightFiles, ModelError> {
        let ignore = |tensor: &str| self.ignores(tensor);
        Ok(match &self.place {
            Place::Folder(dir) => WeightFiles::of_dir(dir, named, &ignore)?,
            Place::Binary(file) => WeightFiles::of_bytes(file, named, &ignore)?,
            Place::Random(dtype) => {
                let noise: Vec<_> = self.spec.required().iter().map(Required::noise).collect();
                WeightFiles::random(named, &noise, *dtype)
            }
        })
    }

    /// Bytes of the weights by the headers of their files; none when there are no weight files.
    ///
    /// # Errors
    /// All that is wrong with the weight files.
    pub fn weight_bytes(&self) -> Result<Option<WeightBytes>, ModelError> {
        match &self.place {
            Place::Folder(dir) if !WeightFiles::is_in(dir) => Ok(None),
            _ => Ok(Some(self.found(self.named())?.bytes())),
        }
    }

    /// The same model with random weights, whatever files there are: for measurements of models
    /// whose weights are not here. They are stored as `config.json` says, or as bf16.
    pub fn with_random_weights(self) -> ModelFiles {
        let dtype = self.declared.unwrap_or(Dtype::Bf16);
        let spec = ModelSpec { kv_dtype: kv_dtype(Some(dtype)), ..self.spec };
        ModelFiles { spec, place: Place::Random(dtype), ..self }
    }

    fn named(&self) -> Vec<Named> {
        let name = |layer, part| match part {
            // A copy of its own, where it is quantised.
            Part::Head if self.spec.tied_head => self.tensor_name(None, Part::Embedding),
            part => self.tensor_name(layer, part),
        };
        let required = self.spec.required().into_iter();
        let named =
            |r: Required| Named { name: name(r.layer, r.part), shape: r.shape, order: r.order };
        required.map(named).collect()
    }

    /// Some files carry a head although it is the embedding; it is then never read.
    fn ignores(&self, tensor: &str) -> bool {
        let tied = self.spec.tied_head && tensor == self.tensor_name(None, Part::Head);
        tied || (self.family.ignores)(tensor)
    }
}

/// Who hears how many bytes are loaded, of how many.
#[cfg(feature = "cuda")]
type Progress<'p> = &'p mut dyn FnMut(usize, usize);

/// The weights of a model that a device takes, found and not loaded yet.
#[cfg(feature = "cuda")]
pub struct LayerFiles<'p> {
    files: WeightFiles,
    /// Of each tensor.
    places: Vec<(Option<usize>, Part)>,
    total: usize,
    done: usize,
    progress: Option<Progress<'p>>,
}

#[cfg(feature = "cuda")]
impl LayerFiles<'_> {
    /// Has `progress` hear of what is loaded.
    pub fn on_load(self, progress: Progress<'_>) -> LayerFiles<'_> {
        let LayerFiles { files, places, total, done, .. } = self;
        LayerFiles { files, places, total, done, progress: Some(progress) }
    }

    /// Loads the tensors of a layer, or those that are of none.
    ///
    /// # Errors
    /// A file that cannot be read, or no memory.
    pub fn load(&mut self, layer: Option<usize>) -> Result<ModelWeights, ModelError> {
        let LayerFiles { files, places, total, done, progress } = self;
        let which = of_layer(places, layer);
        let before = *done;
        let mut told = |read: usize, _: usize| {
            *done = before + read;
            if let Some(progress) = progress.as_mut() {
                progress(*done, *total);
            }
        };
        let weights = files.read_some(&which, &mut told)?;
        Ok(ModelWeights::new(weights, which.into_iter().map(|i| places[i])))
    }

    /// Bytes of the tensors that are loaded together, the most of them.
    pub fn most_bytes(&self) -> usize {
        let mut bytes: HashMap<Option<usize>, usize> = HashMap::new();
        for (i, (layer, _)) in self.places.iter().enumerate() {
            *bytes.entry(*layer).or_default() += self.files.held_bytes(i);
        }
        bytes.into_values().max().unwrap_or(0)
    }
}

#[cfg(feature = "cuda")]
fn of_layer(places: &[(Option<usize>, Part)], layer: Option<usize>) -> Vec<usize> {
    (0..places.len()).filter(|i| places[*i].0 == layer).collect()
}

#[cfg(feature = "cuda")]
impl fmt::Debug for LayerFiles<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerFiles").field("total", &self.total).finish_non_exhaustive()
    }
}

/// The weights of a model, or of a layer of it, by their place in it.
#[derive(Debug)]
pub struct ModelWeights {
    weights: Weights,
    tensors: HashMap<(Option<usize>, Part), Tensor>,
}

impl ModelWeights {
    fn new(weights: Weights, places: impl Iterator<Item = (Option<usize>, Part)>) -> ModelWeights {
        let tensors = places.zip(weights.tensors().iter().copied()).collect();
        ModelWeights { weights, tensors }
    }

    /// The tensor at a place: a handle to keep, where the hash lookup would cost too much.
    ///
    /// # Panics
    /// When the model has no such part.
    pub fn tensor(&self, layer: Option<usize>, part: Part) -> Tensor {
        let found = self.tensors.get(&(layer, part)).copied();
        found.unwrap_or_else(|| panic!("the model has no {part:?} in layer {layer:?}"))
    }

    /// The values of `tensor`, row after row.
    ///
    /// # Panics
    /// When they are in panels: see [`Required::order`].
    pub fn matrix(&self, tensor: &Tensor) -> Matrix<'_> {
        self.weights.matrix(tensor)
    }

    /// The values of `tensor`, in panels.
    ///
    /// # Panics
    /// When they lie row after row: see [`Required::order`].
    pub fn panels(&self, tensor: &Tensor) -> Panels<'_> {
        self.weights.panels(tensor)
    }

    /// A copy of the values at a place in single precision: for norms, biases and convolutions.
    ///
    /// # Panics
    /// When the model has no such part.
    pub fn vector(&self, layer: Option<usize>, part: Part) -> Vec<f32> {
        self.weights.vector(&self.tensor(layer, part))
    }

    /// The weights by the names of their files.
    pub fn by_name(&self) -> &Weights {
        &self.weights
    }
}

fn lines(faults: &[ConfigFault]) -> String {
    faults.iter().map(|fault| format!("\n  {fault}")).collect()
}

/// How per-token rows are kept beside weights of this encoding.
fn kv_dtype(of: Option<Dtype>) -> KvDtype {
    match of {
        Some(Dtype::F32) => KvDtype::F32,
        // Without files and a word there is nothing to run; what is shown is of 16 bits.
        Some(Dtype::Bf16 | Dtype::F16) | None => KvDtype::Bf16,
    }
}

/// How `config.json` says that the weights are encoded.
fn declared_dtype(config: &Map<String, Value>) -> Option<Dtype> {
    let nested = config.get("text_config").and_then(Value::as_object);
    let mut found = nested.into_iter().chain([config]).flat_map(|level| {
        ["dtype", "torch_dtype"].into_iter().filter_map(|key| level.get(key)?.as_str())
    });
    match found.next()? {
        "float32" => Some(Dtype::F32),
        "bfloat16" => Some(Dtype::Bf16),
        "float16" => Some(Dtype::F16),
        _ => None,
    }
}

fn object(text: &str, path: impl Fn() -> String) -> Result<Map<String, Value>, ModelError> {
    serde_json::from_str(text)
        .map_err(|error| ModelError::NotJson { path: path(), reason: error.to_string() })
}

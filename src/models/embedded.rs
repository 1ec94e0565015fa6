//! The model that the binary carries.

use super::files::{ModelError, ModelFiles};

/// The `config.json` of the model that the binary carries.
pub const EMBEDDED_CONFIG: &str = include_str!("../../assets/tiny-model/config.json");
const GENERATION: &str = include_str!("../../assets/tiny-model/generation_config.json");

/// Bytes at an address that suits every dtype, so that weights are read where they lie.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static WEIGHTS: &Aligned<[u8]> =
    &Aligned(*include_bytes!("../../assets/tiny-model/model.safetensors"));

impl ModelFiles {
    /// The model that the binary carries.
    ///
    /// # Errors
    /// None for the files this was built with; they are read like any others.
    pub fn embedded() -> Result<ModelFiles, ModelError> {
        ModelFiles::of_texts(EMBEDDED_CONFIG, Some(GENERATION), &WEIGHTS.0)
    }
}

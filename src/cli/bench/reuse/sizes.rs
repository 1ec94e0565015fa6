//! Bytes of the units of a model, from its `config.json` alone.

use std::fs;
use std::path::Path;

use kernels::Dtype;

use crate::cli::CliError;
use crate::models::layout::StateLayout;
use crate::models::{ModelError, ModelFiles};

/// Bytes of a model's slots and blocks. The recurrent state is f32, per-token rows are as its
/// weights are stored. Windows and hidden row are bf16 as in the servers it is compared with; the
/// engine keeps them in f32, 3 % more of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// The model.
    pub model: String,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Positions at which prompt spans may end.
    pub span_grid: usize,
}

impl Sizes {
    /// The sizes of the model with this `config.json`, or of Kimi-Linear-48B.
    ///
    /// # Errors
    /// A file that cannot be read, or is no config of a family that is served.
    pub fn read(config: Option<&Path>) -> Result<Sizes, CliError> {
        let Some(path) = config else { return Ok(Sizes::kimi_linear_48b()) };
        let name = path.display().to_string();
        let text = fs::read_to_string(path)
            .map_err(|source| CliError::File { path: name.clone(), source })?;
        let files = ModelFiles::of_texts(&text, None, &[]).map_err(|error| named(error, &name))?;
        let layout = StateLayout::new(&files.spec, Dtype::Bf16);
        Ok(Sizes {
            model: name,
            slot_bytes: layout.slot_bytes,
            block_bytes: layout.block_bytes,
            span_grid: files.spec.grid(),
        })
    }

    /// 20 KDA layers (32 heads of 128, windows of 3 rows) and 7 MLA layers (rows of 576), hidden
    /// row of 2,304.
    fn kimi_linear_48b() -> Sizes {
        let state = 32 * 128 * 128 * 4;
        let window = 3 * (3 * 32 * 128) * 2;
        Sizes {
            model: "Kimi-Linear-48B".to_owned(),
            slot_bytes: 20 * (state + window) + 2304 * 2,
            block_bytes: 64 * 7 * 576 * 2,
            span_grid: 64,
        }
    }
}

/// An error of a config's text, with its path.
fn named(mut error: ModelError, name: &str) -> ModelError {
    match &mut error {
        ModelError::NotJson { path, .. }
        | ModelError::UnknownFamily { path, .. }
        | ModelError::Config { path, .. } => name.clone_into(path),
        ModelError::Io { .. } | ModelError::Weights(_) => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_what_the_published_config_gives() {
        let config =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs/kimi-linear-48b.json");
        let read = Sizes::read(Some(&config)).expect("a config");
        let default = Sizes::read(None).expect("the default");
        assert_eq!((default.slot_bytes, default.block_bytes), (43_422_208, 516_096));
        assert_eq!(Sizes { model: default.model.clone(), ..read }, default);
    }
}

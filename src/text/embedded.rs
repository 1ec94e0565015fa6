//! The text files of the model that the binary carries.

use std::borrow::Cow;

use super::TextFiles;

const TOKENIZER: &[u8] = include_bytes!("../../assets/tiny-model/tokenizer.json");
const CONFIG: &[u8] = include_bytes!("../../assets/tiny-model/tokenizer_config.json");

impl TextFiles {
    /// The text files of the model that the binary carries.
    pub fn embedded() -> TextFiles {
        TextFiles {
            tokenizer_json: Some(Cow::Borrowed(TOKENIZER)),
            tokenizer_config: Some(Cow::Borrowed(CONFIG)),
            ..TextFiles::default()
        }
    }
}

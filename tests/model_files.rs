//! Model folders: sound ones load, broken ones are refused with everything that is wrong.

use std::fs;
use std::path::{Path, PathBuf};

use deltapool::models::ModelFiles;

const FAMILIES: [&str; 3] = ["kimi_linear_tiny", "llama_tiny", "qwen3_tiny"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(name)
}

fn load(dir: &Path) -> deltapool::models::ModelWeights {
    let files = ModelFiles::open(dir).unwrap_or_else(|error| panic!("{error}"));
    files.load(&mut |_, _| {}).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn goldens_load() {
    for name in FAMILIES {
        let weights = load(&golden(name));
        assert!(weights.by_name().bytes() > 400_000, "{name}");
    }
}

#[test]
fn embedded_model_loads_and_equals_its_file() {
    let embedded = ModelFiles::embedded().expect("the files we ship are sound");
    let weights = embedded.load(&mut |_, _| {}).expect("the files we ship are sound");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-model");
    assert_eq!(weights.by_name().widened(), load(&folder).by_name().widened());
}

#[test]
fn twins_hold_equal_values() {
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/goldens/models");
    for name in FAMILIES {
        let twin = shared.join(format!("{name}_f32"));
        if twin.exists() {
            let (narrow, wide) = (load(&golden(name)), load(&twin));
            assert!(wide.by_name().bytes() > narrow.by_name().bytes() * 3 / 2, "{name}");
            assert_eq!(narrow.by_name().widened(), wide.by_name().widened(), "{name}");
        }
    }
}

fn config(name: &str) -> ModelFiles {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(name);
    let text = fs::read_to_string(path).expect("the config is part of the repository");
    ModelFiles::of_texts(&text, None, &[]).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn published_parameter_counts() {
    assert_eq!(config("kimi-linear-48b.json").spec.parameters(), 49_122_681_728);
    assert_eq!(config("kimi-linear-48b.json").spec.required().len(), 20_493);
    assert_eq!(config("llama-3.1-8b.json").spec.parameters(), 8_030_261_248);
}

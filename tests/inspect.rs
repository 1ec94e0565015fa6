//! `inspect`: the published sizes, from config files alone.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use deltapool::cli::inspect::{InspectArgs, Table, report};
use deltapool::config::parse_bytes;
use deltapool::inspect::Report;
use tempfile::TempDir;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: InspectArgs,
}

fn inspect(words: &[&str]) -> Report {
    let command = Command::try_parse_from([&["inspect"], words].concat()).unwrap();
    report(&command.args).unwrap_or_else(|error| panic!("{error}"))
}

fn folder(config: &str) -> (TempDir, PathBuf) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(config);
    let dir = tempfile::tempdir().unwrap();
    fs::copy(source, dir.path().join("config.json")).unwrap();
    let path = dir.path().to_owned();
    (dir, path)
}

#[test]
fn kimi_linear_48b() {
    let (_dir, path) = folder("kimi-linear-48b.json");
    let dir = path.to_str().unwrap();
    let report = inspect(&[dir, "--device-memory", "40GB"]);
    assert_eq!(report.parameters, 49_122_681_728);
    assert_eq!((report.weights_bytes, report.weights_bytes_from_files), (98_245_363_456, false));
    let sequence = report.per_sequence;
    assert_eq!((sequence.recurrent_bytes, sequence.conv_bytes), (41_943_040, 2_949_120));
    assert_eq!((sequence.hidden_row_bytes, sequence.window_dtype), (2304 * 4, "f32"));
    assert_eq!(sequence.slot_bytes, 41_943_040 + 2_949_120 + 9216);
    assert_eq!((report.per_token.kv_bytes, report.per_token.block_bytes), (8064, 64 * 8064));
    assert_eq!(report.layers.iter().map(|run| run.last + 1 - run.first).sum::<usize>(), 27);
    assert!(report.page.block_loss < 0.05 && report.page.slot_loss < 0.05);
    // Within the pages' losses of the plain division, and never above it.
    for (fit, tokens) in report.fits.iter().zip([1024, 8192, 32_768, 131_072]) {
        assert_eq!((fit.tokens, fit.within_context), (tokens, true));
        let plain = 40_000_000_000 / (sequence.slot_bytes + 8064 * tokens);
        assert!(fit.sequences <= plain && fit.sequences * 100 >= plain * 94, "{fit:?} of {plain}");
    }
    let text = Table(&report).to_string();
    for figure in
        ["49,122,681,728 parameters", " 41,943,040 bytes", " 2,949,120 bytes", " 8,064 bytes  bf16"]
    {
        assert!(text.contains(figure), "{figure} in\n{text}");
    }
    for (flags, kv_bytes) in [
        (&["--compute=f32"][..], 16_128),
        (&["--compute=bf16"], 8064),
        (&["--kv-dtype=f32"], 16_128),
        (&["--compute=f32", "--kv-dtype=bf16"], 8064),
    ] {
        let report = inspect(&[&[dir], flags].concat());
        assert_eq!(report.per_token.kv_bytes, kv_bytes, "{flags:?}");
        assert_eq!(report.per_token.kv_dtype, if kv_bytes == 8064 { "bf16" } else { "f32" });
        assert_eq!(report.per_sequence.slot_bytes, sequence.slot_bytes, "{flags:?}");
    }
}

#[test]
fn llama_8b() {
    let (_dir, path) = folder("llama-3.1-8b.json");
    let report = inspect(&[path.to_str().unwrap(), "--device-memory", "16GiB"]);
    assert_eq!((report.per_sequence.recurrent_bytes, report.per_sequence.slot_bytes), (0, 0));
    assert_eq!(report.per_token.kv_bytes, 131_072);
    // Without slots a page is a block and nothing is lost: 2^34 / (2^17 * tokens).
    let fits: Vec<usize> = report.fits.iter().map(|fit| fit.sequences).collect();
    assert_eq!(fits, [128, 16, 4, 1]);
    assert_eq!(report.layers.len(), 1);
}

#[test]
fn weights_are_measured_where_they_are() {
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models/kimi_linear_tiny");
    let report = inspect(&[golden.to_str().unwrap(), "--device-memory", "1MB"]);
    // A_log, dt_bias and the routers' biases are F32 in this file: 4 KDA and 5 MoE layers.
    let wide = 4 * (3 + 96) + 5 * 8;
    assert_eq!(report.weights_bytes, 2 * report.parameters + 2 * wide);
    assert!(report.weights_bytes_from_files);
    assert!(!report.fits[3].within_context);
}

#[cfg(feature = "embedded-model")]
#[test]
fn without_a_folder_it_is_the_model_in_the_binary() {
    let report = inspect(&[]);
    assert_eq!((report.vocab_size, report.weights_bytes_from_files), (3072, true));
}

#[test]
fn memory_that_is_too_small_is_an_error() {
    let (_dir, path) = folder("kimi-linear-48b.json");
    let words = ["inspect", path.to_str().unwrap(), "--device-memory=1MiB"];
    let command = Command::try_parse_from(words).unwrap();
    let error = report(&command.args).unwrap_err().to_string();
    let start = "--device-memory: a memory budget of 1048576 bytes holds no sequence";
    assert!(error.starts_with(start), "{error}");
}

#[test]
fn json_keys() {
    let (_dir, path) = folder("llama-3.1-8b.json");
    let json = serde_json::json!(inspect(&[path.to_str().unwrap(), "--json"]));
    assert_eq!(json["per_token"]["kv_bytes"], 131_072);
    assert_eq!(json["per_sequence"]["recurrent_bytes"], 0);
    assert_eq!(json["per_sequence"]["conv_bytes"], 0);
    assert_eq!(json["layers"][0]["last"], 31);
    assert_eq!(json["device_memory_bytes"], serde_json::Value::Null);
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    let expected = [
        "family",
        "vocab_size",
        "hidden_size",
        "context_tokens",
        "parameters",
        "weights_bytes",
        "weights_bytes_from_files",
        "quantize",
        "weights_held_bytes",
        "layers",
        "per_sequence",
        "per_token",
        "page",
        "device_memory_bytes",
        "fits",
    ];
    assert_eq!(keys, expected);
}

#[test]
fn bytes_as_people_write_them() {
    for (text, bytes) in [
        ("123", 123),
        ("80GB", 80_000_000_000),
        ("80g", 80_000_000_000),
        ("24GiB", 24 << 30),
        ("1.5 GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("0", 0),
    ] {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
    for text in ["", "GB", "-1", "1..2", "12 parsecs", "1e9", "99999999TB", "1.5.5GB"] {
        assert!(parse_bytes(text).is_err(), "{text}");
    }
}

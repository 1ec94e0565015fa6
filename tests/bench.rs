//! `deltapool bench prefill`, `decode` and `machine` as a user's shell sees them: the shape of what
//! they print, and what they refuse. How fast anything is, no test asks.
#![cfg(feature = "embedded-model")]

mod support;

use std::fs;
use std::path::Path;

use serde_json::Value;
use support::program::{arg, json, model, run, stderr, stdout};

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Asserts that `value` is a rate's least, middle and greatest.
fn assert_spread(value: &Value) {
    let [min, median, max] = ["min", "median", "max"].map(|key| number(&value[key]));
    assert!(0.0 < min && min <= median && median <= max && max.is_finite(), "{value}");
}

fn cases(report: &Value) -> &Vec<Value> {
    let cases = report["cases"].as_array().expect("a list");
    for case in cases {
        assert_spread(&case["tokens_per_cpu_second"]);
        assert_spread(&case["tokens_per_wall_second"]);
        assert_spread(&case["busy_share"]);
    }
    cases
}

#[test]
fn prefill_measures_each_length() {
    let args = ["bench", "prefill", "--tokens", "70,1", "--rounds", "3", "-t", "2", "--json"];
    let report = json(&run(&args));
    assert_eq!((&report["bench"], &report["threads"]), (&"prefill".into(), &2.into()));
    assert_eq!((&report["model"], &report["rounds"]), (&"embedded".into(), &3.into()));
    assert!(report["machine"]["isa"].is_string() && number(&report["machine"]["cores"]) > 0.0);
    for key in ["weights_bytes", "weights_held_bytes", "pool_bytes"] {
        assert!(number(&report[key]) > 0.0, "{key}");
    }
    if cfg!(target_os = "linux") {
        assert!(number(&report["peak_rss_bytes"]) > number(&report["weights_bytes"]));
    }
    let of: Vec<_> = cases(&report).iter().map(|c| (&c["tokens"], &c["round_tokens"])).collect();
    assert_eq!(of, [(&70.into(), &70.into()), (&1.into(), &1.into())]);
}

#[test]
fn decode_starts_at_the_context_it_is_asked_for() {
    let args = ["bench", "decode", "--sequences", "1,9", "--context", "0,1000", "--steps", "3"];
    let report = json(&run(&[&args[..], &["--rounds", "2", "-t", "1", "--json"]].concat()));
    let mut seen = Vec::new();
    for case in cases(&report) {
        let (sequences, context) = (number(&case["sequences"]), number(&case["context"]));
        assert_eq!(number(&case["round_tokens"]), 3.0 * sequences);
        // A token of the prompt where there is none, the one it draws, and two untimed steps.
        let beyond = number(&case["mean_context"]) - context;
        assert!((2.0..=8.0).contains(&beyond), "{case}");
        seen.push((sequences as usize, context as usize));
    }
    assert_eq!(seen, [(1, 0), (9, 0), (1, 1000), (9, 1000)]);
}

#[test]
fn a_table_is_printed_and_json_goes_to_a_file_beside_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("speed.json");
    let file = format!("--json={}", arg(&path));
    let dense = model("qwen3_tiny");
    let args = ["bench", "decode", "--model", arg(&dense), "--sequences", "2", "--context", "5"];
    let output = run(&[&args[..], &["--steps", "2", "--rounds", "1", &file]].concat());
    let said = (stderr(&output), output.status.code());
    assert_eq!(said, ("decode x2 @5, case 1 of 1\n".to_owned(), Some(0)));
    let text = stdout(&output);
    let row = text.lines().find(|line| line.starts_with("decode x2 @5 ")).expect("a row");
    let numbers = row.split_whitespace().filter(|word| word.parse::<f64>().is_ok());
    assert_eq!(numbers.count(), 7, "{row}");
    let written = fs::read_to_string(path).expect("a file");
    let report: Value = serde_json::from_str(&written).expect("JSON");
    assert_eq!(cases(&report).len(), 1);
    assert_eq!(report["model"], arg(&dense));
}

#[test]
fn a_roofline_tells_of_every_operator_of_a_case() {
    let args = ["bench", "prefill", "--tokens", "130", "--rounds", "1", "-t", "1", "--roofline"];
    let report = json(&run(&[&args[..], &["--json"]].concat()));
    let limits = report["limits"].as_array().expect("limits");
    assert_eq!((&limits[0]["what"], &limits[0]["threads"]), (&"read".into(), &1.into()));
    let rows = cases(&report)[0]["roofline"].as_array().expect("operators");
    let find = |name: &str| rows.iter().find(|row| row["operator"] == name);
    // Six layers of KDA; of two of MLA the last cell, two rows, is absorbed.
    for (name, calls) in [("conv", 6), ("kda chunk", 6), ("mla expanded", 2), ("mla absorbed", 2)] {
        let row = find(name).unwrap_or_else(|| panic!("no {name} in {rows:?}"));
        assert_eq!(row["calls"], calls, "{row}");
        assert!(number(&row["operations_per_second"]) > 0.0, "{row}");
        assert!(number(&row["bytes_per_second"]) > 0.0, "{row}");
        if !limits.iter().any(|limit| limit["rate"].is_null()) {
            assert!(number(&row["limit_share"]) > 0.0, "{row}");
            assert!(["memory", "compute"].contains(&row["limit"].as_str().expect("a limit")));
        }
    }
    assert_eq!(rows.last().expect("some rows")["operator"], "other");
    let sum: f64 = rows.iter().map(|row| number(&row["share"])).sum();
    assert!((sum - 1.0).abs() < 1e-6, "shares add up to {sum}");
    let table = stdout(&run(&args));
    let row = |line: &&str| line.starts_with("kda chunk ");
    assert!(table.contains("limits of the machine with 1 threads: read"), "{table}");
    assert_eq!(table.lines().filter(row).count(), 1, "{table}");
}

#[test]
fn a_roofline_of_a_decode_has_its_steps_alone() {
    let args = ["bench", "decode", "--sequences", "3", "--context", "70", "--steps", "5"];
    let more = ["--rounds", "1", "-t", "1", "--roofline", "--json"];
    let decoded = json(&run(&[&args[..], &more].concat()));
    let generated = cases(&decoded)[0]["roofline"].as_array().expect("operators");
    let step = generated.iter().find(|row| row["operator"] == "kda step").expect("steps");
    assert_eq!(step["calls"], 6 * 5, "{step}");
    assert!(generated.iter().all(|row| row["operator"] != "kda chunk"), "{generated:?}");
}

/// The shapes of a config.json are enough to measure with.
#[test]
fn random_weights_stand_in_for_files_that_are_not_there() {
    let model = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-random");
    fs::create_dir_all(&model).expect("it can be made");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-model/config.json");
    fs::copy(own, model.join("config.json")).expect("it can be copied");
    let model = model.to_str().expect("a plain path");
    let args = ["bench", "prefill", "--model", model, "--tokens", "80", "--rounds", "1", "-t", "1"];
    let without = run(&args);
    assert_eq!(without.status.code(), Some(3), "{}", stderr(&without));
    for quantize in ["none", "q8"] {
        let more = ["--random-weights", "--quantize", quantize, "--json"];
        let report = json(&run(&[&args[..], &more].concat()));
        assert_eq!(report["has_random_weights"], true);
        let own = json(&run(&["bench", "prefill", "--tokens", "80", "--rounds", "1", "--json"]));
        assert_eq!(own["has_random_weights"], false);
        // Files have some vectors in f32 beside matrices in bf16; random ones are all of one kind.
        let share = number(&report["weights_bytes"]) / number(&own["weights_bytes"]);
        assert!((share - 1.0).abs() < 1e-3, "{share} of the bytes of the files");
    }
    let told = stdout(&run(&[&args[..], &["--random-weights"]].concat()));
    assert!(told.contains(" in memory, random ones\n"), "{told}");
}

#[test]
fn machine_measures_memory_and_arithmetic_with_one_thread_and_with_many() {
    let args = ["bench", "machine", "--array", "2MiB", "--bursts", "2", "--threads", "2"];
    let report = json(&run(&[&args[..], &["--json"]].concat()));
    assert_eq!(report["array_bytes"], 2 << 20);
    let limits = report["limits"].as_array().expect("a list");
    for threads in [1, 2] {
        let of = limits.iter().filter(|limit| limit["threads"] == threads);
        let names: Vec<&str> = of.map(|limit| limit["what"].as_str().expect("a name")).collect();
        assert_eq!(names[..3], ["read", "copy", "f32"]);
        assert!(names[3..] == ["int8", "int4"] || names[3..] == ["bf16", "int8", "int4"]);
    }
    for limit in limits {
        let (kept, tried) = (number(&limit["kept"]), number(&limit["tried"]));
        assert!(kept <= tried && (2.0..=20.0).contains(&tried), "{limit}");
        match limit["rate"].is_null() {
            true => assert_eq!(kept, 0.0),
            false => assert_spread(&limit["rate"]),
        }
    }
    let table = stdout(&run(&[&args[..], &["--quiet"]].concat()));
    assert_eq!(table.lines().filter(|line| line.starts_with("read ")).count(), 2, "{table}");
}

#[test]
fn numbers_that_make_no_sense_are_refused_by_flag() {
    let refused = [
        (&["prefill", "--tokens", "4,0"][..], "--tokens 0: 1 or more"),
        (&["prefill", "--tokens", "8192"], "--tokens 8192: a sequence reaches 8193 tokens"),
        (&["prefill", "--rounds", "0"], "--rounds 0: 1 to 10000"),
        (&["prefill", "--threads", "0"], "--threads 0: 1 to 1024"),
        (&["decode", "--sequences", "1,0"], "--sequences 0: 1 to 1024"),
        (&["decode", "--sequences", "1025"], "--sequences 1025: 1 to 1024"),
        (&["decode", "--steps", "0"], "--steps 0: 1 or more"),
        (&["decode", "--context", "8192"], "--context 8192 --steps 32: a sequence reaches"),
        (
            &["decode", "--steps", "18446744073709551615"],
            "--context 0 --steps 18446744073709551615",
        ),
        (&["machine", "--bursts", "0"], "--bursts 0: 1 or more"),
        (&["machine", "--array", "4KiB", "-t", "3"], "--array 4096: 49152 bytes or more"),
    ];
    for (args, message) in refused {
        let output = run(&[&["bench"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).starts_with(&format!("error: {message}")), "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
    let told = stderr(&run(&["bench", "decode", "--context", "8192"]));
    assert!(told.ends_with("the model's context is 8192 tokens\n"), "{told}");
}

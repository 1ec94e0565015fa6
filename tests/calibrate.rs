//! `deltapool calibrate`: what it writes is a profile, that profile is found again under its name,
//! and engines take their rates from it for the machine and the model it was made with alone.
#![cfg(feature = "embedded-model")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use support::program::{arg, json as object, program, run, stderr, stdout};

/// Runs with a configuration folder of its own.
fn run_in(config: &Path, args: &[&str]) -> Output {
    program().env("XDG_CONFIG_HOME", config).args(args).output().expect("the program starts")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
}

/// What a batch of one request on this configuration weighs against each other.
fn weighed(config: &Path, threads: &str, more: &[&str]) -> String {
    let input = config.join("input.jsonl");
    fs::write(&input, "{\"id\": \"a\", \"prompt_ids\": [5, 6, 7], \"max_tokens\": 2}\n")
        .expect("a file");
    let memory = ["--device-memory", "64MiB", "--host-memory", "64MiB"];
    let args = ["batch", "--input", arg(&input), "--output", "-", "-t", threads];
    let output = run_in(config, &[&args[..], &memory, more].concat());
    let told = stderr(&output);
    let line = told.lines().find(|line| line.starts_with("preempt "));
    line.unwrap_or_else(|| panic!("{told}")).to_owned()
}

/// Minutes of work would be for nothing.
#[test]
fn what_cannot_be_written_is_told_before_anything_is_measured_and_no_file_is_left() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (out, nowhere) = (folder.path().join("h.json"), folder.path().join("no/h.json"));
    let json = format!("--json={}", arg(&nowhere));
    // A model that is not there is what would be told otherwise.
    let model = ["--model", "/no/model"];
    for (args, named) in [
        (["--out", arg(folder.path())].as_slice(), folder.path()),
        (&["--out", arg(&nowhere)], &nowhere),
        (&["--out", arg(&out), &json], &nowhere),
        (&["--out", arg(&out), "--svg", arg(&nowhere)], &nowhere),
        (&["--out", arg(&out)], Path::new(model[1])),
    ] {
        let output = run(&[&["calibrate"], args, &model].concat());
        let told = stderr(&output);
        assert!(told.lines().count() == 1 && told.contains(arg(named)), "{args:?}: {told}");
        assert!(!output.status.success(), "{args:?}");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "{args:?}");
    }
}

#[test]
fn a_profile_is_written_found_by_its_name_and_used_where_it_was_made_for() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing =
        ["bench", "crossover", "--modelled", "--model", "k3", "--hardware", "this-machine"];
    let output = run_in(folder.path(), &missing);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("run `deltapool calibrate`"), "{}", stderr(&output));
    let output = run_in(folder.path(), &["calibrate", "-t", "1"]);
    assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
    let path = folder.path().join("deltapool/hardware.json");
    let text = stdout(&output);
    assert!(text.ends_with(&format!("written to {}\n", path.display())), "{text}");
    for row in [
        "memory ",
        "products ",
        "copies ",
        "overhead ",
        "prefill ",
        "chats ",
        "documents ",
        "both ",
    ] {
        assert!(text.lines().any(|line| line.starts_with(row)), "{row}: {text}");
    }
    let mut profile = read(&path);
    assert_eq!(
        (&profile["name"], &profile["calibration"]["threads"]),
        (&"this-machine".into(), &1.into())
    );
    let rows: Vec<&Value> =
        profile["gemm_efficiency"].as_array().expect("points").iter().map(|p| &p[0]).collect();
    assert_eq!(rows.first(), Some(&&json!(1)));
    assert_eq!(rows.last(), Some(&&json!(512)));
    let report = object(&run_in(folder.path(), &[&missing[..], &["--json"]].concat()));
    assert_eq!(report["hardware"], "this-machine");
    let link = number(&report["constants"]["link_out_bytes_per_second"]);
    assert_eq!(link, number(&profile["link_out"]));
    // Figures that no measurement gives.
    profile["calibration"]["prefill_tokens_per_second"] = 123_456.0.into();
    (profile["link_out"], profile["link_in"]) = (77e9.into(), 77e9.into());
    fs::write(&path, profile.to_string()).expect("a file");
    let told = "preempt    auto: 77.0 GB/s to the host, 123,456 prompt tokens a second";
    assert_eq!(weighed(folder.path(), "1", &[]), told);
    let given = weighed(folder.path(), "1", &["--link-gbps", "3"]);
    assert_eq!(given, told.replace("77.0", "3.0"));
    // Other threads, another precision: it says nothing of these.
    for (threads, more) in [("2", &[][..]), ("1", &["--kv-dtype", "f32"])] {
        let line = weighed(folder.path(), threads, more);
        assert!(!line.contains("123,456") && !line.contains("77.0"), "{line}");
    }
    fs::write(&path, "{}").expect("a file");
    let line = weighed(folder.path(), "1", &[]);
    assert!(!line.contains("123,456"), "{line}");
}

#[test]
fn a_file_that_cannot_be_written_is_told_before_anything_is_measured() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a file");
    let below = file.join("hardware.json");
    let output = run(&["calibrate", "--out", arg(&below)]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()));
    assert!(
        stderr(&output).starts_with(&format!("error: {}", file.display())),
        "{}",
        stderr(&output)
    );
    let output = run(&["calibrate", "-t", "0", "--out", arg(&folder.path().join("x"))]);
    assert!(stderr(&output).starts_with("error: --threads 0: 1 to 1024"), "{}", stderr(&output));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left");
}

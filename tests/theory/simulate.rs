//! The commands `simulate run`, `replay`, `sweep` and `compare`, as a user runs them.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn deltapool(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("deltapool").expect("the program is built");
    command.arg("simulate").args(args);
    command
}

fn output(args: &[&str]) -> String {
    let done = deltapool(args).assert().success();
    String::from_utf8(done.get_output().stdout.clone()).expect("text")
}

/// Exit code and standard error.
fn fault(args: &[&str]) -> (i32, String) {
    let done = deltapool(args).assert().failure();
    let output = done.get_output();
    let text = String::from_utf8(output.stderr.clone()).expect("text");
    (output.status.code().expect("it ends by itself"), text)
}

const SMALL: [&str; 5] =
    ["run", "--requests=40", "--arrivals=poisson:20", "--prompts=exp:300", "-q"];

#[test]
fn one_seed_gives_one_json_to_the_last_byte_and_another_seed_another() {
    let json = |seed: &str| output(&[&SMALL[..], &["--json", seed]].concat());
    let (one, again, other) = (json("--seed=5"), json("--seed=5"), json("--seed=6"));
    assert_eq!(one, again);
    assert_ne!(one, other);
    let report: Value = serde_json::from_str(&one).expect("JSON");
    assert_eq!(report["header"]["requests"], 40);
    assert_eq!(report["latency"]["ttft"]["count"], 40);
}

#[test]
fn files_of_steps_and_charts_are_written_beside_the_table() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (trace, svg) = (path("trace.jsonl"), path("run.svg"));
    let text = output(&[&SMALL[..], &["--trace", &trace, "--svg", &svg]].concat());
    assert!(text.contains("TTFT s") && text.contains("pools "), "{text}");
    let lines = fs::read_to_string(trace).expect("it is there");
    let mut end = 0.0;
    for line in lines.lines() {
        let step: Value = serde_json::from_str(line).expect("JSON");
        let (t, seconds) = (step["t"].as_f64(), step["seconds"].as_f64());
        let (t, seconds) = t.zip(seconds).expect("numbers");
        assert!(t >= end - 1e-9, "steps do not overlap: {t} before {end}");
        end = t + seconds;
    }
    let svg = fs::read_to_string(svg).expect("it is there");
    assert!(svg.contains("<svg") && svg.trim_end().ends_with("</svg>"));
}

#[test]
fn a_sweep_runs_all_values_and_draws_them() {
    let dir = tempfile::tempdir().expect("a folder");
    let svg = dir.path().join("sweep.svg").display().to_string();
    let over = "max-num-batched-tokens=4096,1024,256";
    let flags = ["--requests=30", "--arrivals=poisson:9", "--prompts=4000", "--model=7b-mha", "-q"];
    let text = output(&[&["sweep", "--over", over], &flags[..], &["--svg", &svg]].concat());
    assert!(["4096", "1024", "256", "ITL P99"].iter().all(|word| text.contains(word)), "{text}");
    assert!(fs::read_to_string(svg).expect("it is there").contains("ITL P99"));
    let json = output(&[&["sweep", "--over", over], &flags[..], &["--json"]].concat());
    let rows: Value = serde_json::from_str(&json).expect("JSON");
    let stall = |i: usize| rows[i]["report"]["latency"]["itl"]["max"].as_f64().expect("a number");
    assert!(stall(0) > stall(1) && stall(1) > stall(2), "{json}");
    let (code, error) =
        fault(&[&["sweep", "--over", "seed=1"], &flags[..], &["--svg", "x"]].concat());
    assert_eq!(code, 2);
    assert!(error.contains("a sweep of one flag over three numbers or more is drawn"), "{error}");
    assert!(!Path::new("x").exists());
}

#[test]
fn two_results_are_compared_figure_by_figure() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (a, b) = (path("a.json"), path("b.json"));
    output(&[&SMALL[..], &[&format!("--json={a}")]].concat());
    output(
        &[&SMALL[..], &["--hardware=h100-seed-a", "--device-memory=9GB", &format!("--json={b}")]]
            .concat(),
    );
    let text = output(&["compare", &a, &b]);
    assert!(text.contains("header.hardware") && text.contains("latency.ttft.p50"), "{text}");
    assert!(output(&["compare", &a, &a]).starts_with("no figure differs"));
}

#[test]
fn a_trace_is_replayed_at_its_times_and_a_line_without_one_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("trace.jsonl");
    let line = |at: u32, len: u32| {
        format!(
            r#"{{"timestamp": {at}, "input_length": {len}, "output_length": 5, "hash_ids": [1]}}"#
        )
    };
    fs::write(&path, format!("{}\n{}\n", line(1_000, 400), line(61_000, 400))).expect("written");
    let name = path.display().to_string();
    let seconds = |flags: &[&str]| {
        let json = output(&[&["replay", &name, "--json", "-q"], flags].concat());
        let report: Value = serde_json::from_str(&json).expect("JSON");
        report["seconds"].as_f64().expect("a number")
    };
    let (plain, fast) = (seconds(&[]), seconds(&["--speed=10"]));
    assert!((60.0..61.0).contains(&plain) && (6.0..7.0).contains(&fast), "{plain}, {fast}");
    fs::write(&path, format!("{}\n{}\n", line(1_000, 400), line(5, 400))).expect("written");
    let (code, error) = fault(&["replay", &name]);
    assert_eq!(code, 2);
    assert!(error.contains("trace.jsonl:2: timestamp is to be"), "{error}");
}

#[test]
fn what_cannot_be_simulated_is_told_by_flag_and_limit() {
    for (flags, message) in [
        (&["--model=k3"][..], "give another --hardware, or --device-memory"),
        (&["--model=nope"], "presets: 70b-gqa"),
        (&["--hardware=nope"], "presets: h100-seed-a"),
        (&["--device-memory=1KB"], "the smallest budget that does"),
        (&["--prompts=9000", "--device-memory=100MB"], "holds one sequence of 5377 tokens"),
        (&["--prompts=exp:0"], "exp:MEAN"),
        (&["--arrivals=often"], "poisson:PER_SECOND"),
        (&["--grid=3"], "1 or 64"),
        (&["--reserve-long=256"], "one place at least is for all"),
        (&["--slo-itl-ms=0"], "above 0"),
        (&["--buckets=8,4"], "--buckets: ascending numbers above 0"),
        (&["--workload=burst32", "--seed=1"], "cannot be used with"),
    ] {
        let (code, error) = fault(&[&["run", "-q"], flags].concat());
        assert_eq!(code, 2, "{flags:?}: {error}");
        assert!(error.contains(message), "{flags:?}: {error}");
    }
}

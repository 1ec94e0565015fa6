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
    assert!(
        error.contains("a sweep of one flag over three different numbers or more is drawn"),
        "{error}"
    );
    assert!(!Path::new("x").exists());
}

fn seconds(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// The events of a run's steps, `(what, id, t)`.
fn happenings(flags: &[&str]) -> Vec<(String, u64, f64)> {
    let dir = tempfile::tempdir().expect("a folder");
    let trace = dir.path().join("trace.jsonl").display().to_string();
    output(&[flags, &["--trace", &trace, "-q"]].concat());
    let lines = fs::read_to_string(trace).expect("it is there");
    let steps = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let events = steps.flat_map(|step| step["events"].as_array().expect("a list").clone());
    let event = |event: Value| {
        let what = event["what"].as_str().expect("a word").to_owned();
        (what, event["id"].as_u64().expect("a number"), seconds(&event["t"]))
    };
    events.map(event).collect()
}

#[test]
fn the_steps_of_a_run_tell_what_became_of_every_request() {
    let tight = ["run", "--requests=24", "--prompts=2000", "--answers=900", "--max-num-seqs=12"];
    let counts = |flags: &[&str]| {
        let events = happenings(&[&tight[..], flags].concat());
        move |what: &str| events.iter().filter(|event| event.0 == what).count()
    };
    let swapped = counts(&["--device-tokens=20000", "--preempt=swap"]);
    for what in ["arrive", "first", "finish"] {
        assert_eq!(swapped(what), 24, "{what}");
    }
    assert!(swapped("swap_out") > 0 && swapped("swap_out") == swapped("swap_in"));
    assert_eq!((swapped("resume"), swapped("preempt")), (swapped("swap_in"), 0));
    let dropped = counts(&["--device-tokens=20000", "--preempt=recompute"]);
    assert!(dropped("preempt") > 0 && dropped("swap_out") == 0);
    assert_eq!(dropped("admit"), 24 + dropped("preempt"));
}

#[test]
fn a_turn_comes_a_thought_after_the_answer_before_it_and_finds_its_state() {
    let flags = ["--requests=2", "--turns=3", "--think-ms=5000", "--prompts=200", "--answers=50"];
    let events = happenings(&[&["run", "--arrivals=closed:1"], &flags[..]].concat());
    let at = |what: &str, id: u64| {
        let event = events.iter().find(|event| event.0 == what && event.1 == id);
        event.expect("it happened").2
    };
    for turn in [1, 2, 4, 5] {
        let thought = at("arrive", turn) - at("finish", turn - 1);
        assert!((thought - 5.0).abs() < 1e-6, "{thought}");
        assert_eq!(at("restore", turn), at("admit", turn));
    }
    assert!(at("arrive", 3) >= at("finish", 2), "one is open at a time, with all its turns");
}

#[test]
fn each_chart_of_a_run_is_drawn_and_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    for (plot, series) in [
        ("where", "parked"),
        ("pools", "pages of slots"),
        ("batch", "generating"),
        ("programs", "program 1"),
        ("gaps", "gaps between tokens"),
    ] {
        let (svg, csv) = (path(&format!("{plot}.svg")), path(&format!("{plot}.csv")));
        let files = ["--programs=2", "--plot", plot, "--svg", &svg, "--csv", &csv];
        let text = output(&[&SMALL[..], &files].concat());
        assert!(text.contains("x: ") && text.contains(series), "{plot}: {text}");
        assert!(fs::read_to_string(svg).expect("written").contains(series), "{plot}");
        let csv = fs::read_to_string(csv).expect("written");
        assert!(csv.lines().count() > 3 && csv.contains(series), "{plot}: {csv}");
    }
    let (code, error) = fault(&[&SMALL[..], &["--svg=/nonexistent/a.svg"]].concat());
    assert!(code == 1 && error.contains("/nonexistent/a.svg: No such file"), "{error}");
    let (code, error) = fault(&[&SMALL[..], &["--plot=programs"]].concat());
    assert!(code == 2 && error.contains("give --programs"), "{error}");
    let (code, error) = fault(&[&SMALL[..], &["--plot=frontier"]].concat());
    assert!(code == 2 && error.contains("is of a sweep; here there are where, pools"), "{error}");
}

/// A broken one would look complete, and an old one would be gone.
#[test]
fn a_trace_has_its_name_when_it_is_complete() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("steps.jsonl");
    fs::write(&path, "old").expect("written");
    let trace = path.display().to_string();
    fault(&["run", "-q", "--prompts=16000000", "--trace", &trace]);
    assert_eq!(fs::read_to_string(&path).expect("it is there"), "old");
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 1);
    output(&[&SMALL[..], &["--trace", &trace]].concat());
    assert!(fs::read_to_string(&path).expect("it is there").lines().count() > 40);
    let (code, error) = fault(&["sweep", "--over", "seed=1,2", "--trace", &trace]);
    assert!(code == 2 && error.contains("of one run"), "{error}");
}

#[test]
fn what_is_swept_may_stand_behind_other_flags() {
    let rest = ["--prompts=200", "--answers=20", "-q", "--json"];
    let flags =
        [&["sweep", "--requests=8", "--over=seed=1,2"], &rest[..], &["--over", "turns=1,2"]];
    let rows: Value = serde_json::from_str(&output(&flags.concat())).expect("JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(4));
    for (over, why) in [
        ("seed=3", "--over seed: it is swept twice"),
        ("json=a,b", "--over json: --json is of the sweep, not of a run"),
        ("svg=a,b", "--over svg: --svg is of the sweep, not of a run"),
    ] {
        let (code, error) = fault(&["sweep", "--over=seed=1,2", "--over", over]);
        assert!(code == 2 && error.contains(why), "{error}");
    }
    let (code, error) = fault(&["sweep", "--requests=8"]);
    assert!(code == 2 && error.contains("--over FLAG=VALUE"), "{error}");
}

/// It was the same under every policy: all requests end at last.
#[test]
fn jains_index_is_of_the_time_in_which_every_program_has_requests() {
    let flags =
        ["--requests=40", "--programs=2", "--answers=50", "--max-num-seqs=2", "--json", "-q"];
    let served = |more: &[&str]| {
        let json = output(&[&["run"], &flags[..], more].concat());
        let report: Value = serde_json::from_str(&json).expect("JSON");
        let tokens = &report["fairness"]["tokens"];
        [seconds(&tokens["0"]), seconds(&tokens["1"])]
    };
    let all: f64 = served(&["--prompts=choice:100=0.5,4000=0.5"]).iter().sum();
    // 40 requests of 2,100 tokens in the mean have more between them.
    assert!(all < 40.0 * 2_100.0, "{all}");
}

/// Two runs that differ would not be told apart otherwise.
#[test]
fn the_header_says_all_that_was_asked_for() {
    let header = |flags: &[&str]| {
        let json = output(&[&SMALL[..], &["--json"], flags].concat());
        serde_json::from_str::<Value>(&json).expect("JSON")["header"].clone()
    };
    let plain = header(&[]);
    for flags in [
        &["--seed=7"][..],
        &["--link-gbps=1"],
        &["--step-overhead-ms=5"],
        &["--no-overlap"],
        &["--programs=3"],
        &["--max-tokens=50"],
        &["--buckets=8,16"],
        &["--slo-itl-ms=40"],
        &["--shared-prefix=2:100"],
        &["--no-prefix-cache"],
        &["--checkpoint-every=512"],
    ] {
        assert_ne!(header(flags), plain, "{flags:?}");
    }
}

/// P6: places that long prompts have anyway do nothing for them.
#[test]
fn fewer_places_for_long_prompts_than_they_take_are_warned_of() {
    let mix = ["--prompts=choice:100=20,4000=1", "--answers=200", "--long-prompt=4000"];
    let warned = |kept: &str| {
        let flags = ["--model=7b-mha", "--device-tokens=100000", "--max-num-seqs=8", kept];
        output(&[&SMALL[..], &mix, &flags].concat()).contains("warning    --reserve-long")
    };
    assert!(!warned("--reserve-long=0") && !warned("--reserve-long=4"));
    let slow = ["--prompts=choice:100=1,4000=3", "--answers=200", "--long-prompt=4000"];
    let flags = ["--model=7b-mha", "--device-tokens=100000", "--max-num-seqs=8"];
    let text = output(&[&SMALL[..], &slow, &flags, &["--reserve-long=1"]].concat());
    assert!(text.contains("warning    --reserve-long 1 is less than the "), "{text}");
    assert!(text.contains(" of 8 places that long prompts take anyway"), "{text}");
}

#[test]
fn each_chart_of_a_sweep_is_drawn() {
    let over = ["sweep", "--over", "arrivals=poisson:2;poisson:4;poisson:8"];
    let rest = ["--requests=20", "--prompts=500", "--answers=20", "-q"];
    let (code, error) = fault(&[&over[..], &rest, &["--plot=waiting"]].concat());
    assert!(code == 2 && error.contains("three different numbers"), "{error}");
    let over = ["sweep", "--over", "checkpoint-every=512,1024,2048"];
    for (plot, series, flags) in [
        ("waiting", "TTFT P99", &[][..]),
        ("frontier", "TPOT P50, ms", &[]),
        ("goodput", "kept to the targets", &["--slo-ttft-ms=50"]),
        ("reuse", "states kept for a request", &["--shared-prefix=2:4000"]),
    ] {
        let text = output(&[&over[..], &rest, &["--plot", plot], flags].concat());
        assert!(text.contains(series), "{plot}: {text}");
    }
    let both = ["sweep", "--over", "batching=static,continuous", "--plot=batch"];
    let text = output(&[&both[..], &rest].concat());
    assert!(text.contains("static generating") && text.contains("continuous prompt"), "{text}");
}

#[test]
fn a_run_is_a_chrome_trace_of_steps_requests_and_pools() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("run.json").display().to_string();
    output(&[&SMALL[..], &["--perfetto", &path]].concat());
    let text = fs::read_to_string(path).expect("written");
    let trace: Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("a list");
    let of = |pid: u64, ph: &'static str| {
        events.iter().filter(move |event| event["pid"] == pid && event["ph"] == ph)
    };
    assert!(of(1, "X").count() > 40 && of(1, "C").count() == of(1, "X").count());
    let tracks: std::collections::BTreeSet<u64> =
        of(2, "X").map(|event| event["tid"].as_u64().expect("a number")).collect();
    assert_eq!(tracks, (0..40).collect());
}

#[test]
fn formulas_are_drawn_without_a_run() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let csv = path("curve.csv");
    let log = path("log.txt");
    fs::write(&log, "10 30\n20\n").expect("written");
    for (flags, series) in [
        (&["step-time", "--hardware=h100-seed-a", "--model=70b-gqa"][..], "takes over at 167"),
        (&["efficiency", &format!("--answers=file:{log}")], "mean 20.0"),
        (&["places", "--hardware=h200", "--model=kimi-linear"], "slots to blocks 0.9"),
    ] {
        let text = output(&[&["plot"], flags, &["--csv", &csv]].concat());
        assert!(text.contains(series), "{text}");
        assert!(fs::read_to_string(&csv).expect("written").lines().count() > 10);
    }
    let (code, error) = fault(&["plot", "places", "--model=7b-mha"]);
    assert!(code == 2 && error.contains("7b-mha keeps no state"), "{error}");
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
        (&["--prompts=file:/nonexistent/lengths"], "/nonexistent/lengths: No such file"),
        (&["--turns=0"], "1 or more"),
        (&["--turns=1001"], "1000 turns at most"),
        (&["--requests=18446744073709551615"], "10000000 of all turns together"),
        (&["--shared-prefix=1:5000000000"], "5000000000 tokens"),
        (&["--arrivals=gamma:1:1e200"], "from 0.001 to 1000000"),
        (&["--arrivals=burst:1:1e300"], "from 0.001 to 1000000"),
        (&["--step-overhead-ms=1e300"], "a number from 0 to 1000000"),
        (&["--dead-slots-pay"], "--batching static"),
        (&["--model=llama-2-7b", "--prompts=20000"], "the context of llama-2-7b: 4096"),
        (&["--svg=x", "--csv=x"], "x: two results are to go there"),
        (&["--think-ms=5"], "--turns <N>"),
        (&["--programs=0"], "0: numbers from 1 to 100000"),
        (&["--programs=7,x"], "x: numbers from 1"),
        (&["--csv=-"], "standard output has the text: name a file"),
        (&["--model=."], "./config.json is no preset and no such file"),
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

#[test]
fn a_run_that_fails_leaves_no_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (trace, svg, json) = (path("t.jsonl"), path("r.svg"), path("r.json"));
    fs::write(&svg, "kept").expect("a file");
    let files = ["--trace", &trace, "--svg", &svg, &format!("--json={json}")];
    let (code, error) =
        fault(&[&["run", "-q", "--model=llama-2-7b", "--prompts=20000"], &files[..]].concat());
    assert_eq!(code, 2, "{error}");
    let left: Vec<_> = fs::read_dir(dir.path()).expect("a folder").flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(fs::read_to_string(&svg).expect("it was there"), "kept");
    let (code, error) = fault(&["replay", "-q", &path("missing.jsonl")]);
    assert!(code == 1 && error.contains("missing.jsonl: "), "{code} {error}");
}

#[test]
fn a_program_with_more_requests_is_held_back_by_fair_alone() {
    let jain = |policy: &str| {
        let flags = ["run", "-q", "--programs=7,1", "--requests=160", "--max-num-seqs=8"];
        let flags = [&flags[..], &["--scheduling-policy", policy, "--json"]].concat();
        let report: Value = serde_json::from_str(&output(&flags)).expect("JSON");
        report["fairness"]["jain"].as_f64().unwrap_or_else(|| panic!("{report}"))
    };
    let (fcfs, fair) = (jain("fcfs"), jain("fair"));
    assert!(fcfs < 0.75 && fair > 0.9, "fcfs {fcfs}, fair {fair}");
}

#[test]
fn what_a_result_leaves_out_is_told_beside_it() {
    let mut command = deltapool(&["run", "--model=embedded", "--requests=4"]);
    let told = command.output().expect("it runs");
    assert!(!String::from_utf8_lossy(&told.stderr).contains("note:"));
    let mut command = deltapool(&["run", "--model=k3", "--device-memory=64GB", "--requests=4"]);
    let told = String::from_utf8(command.output().expect("it runs").stderr).expect("text");
    assert!(told.contains("note: the weights of k3 take "), "{told}");
}

#[cfg(unix)]
#[test]
fn a_trace_is_written_through_a_link_and_results_go_to_files_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (file, link) = (path("steps.jsonl"), path("link"));
    std::fs::write(&file, "old").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    output(&["run", "--requests=4", "-q", "--trace", &link]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(std::fs::read_to_string(&file).unwrap().starts_with("{"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    let (code, error) = fault(&["run", "--requests=4", "--trace", "-"]);
    assert!(code == 2 && error.contains("-: a file is wanted here"), "{error}");
    let (code, error) = fault(&["run", "--requests=4", "--trace", &file, "--svg", &file]);
    assert!(code == 2 && error.contains("two results are to go there"), "{error}");
}

#[test]
fn a_sweep_is_no_result_to_compare() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (sweep, other) = (path("sweep.json"), path("other.json"));
    let to = format!("--json={sweep}");
    output(&["sweep", "--over", "seed=1,2", "--requests=4", "-q", &to]);
    fs::write(&other, "{\"header\": 1}").expect("a file");
    for (file, message) in
        [(&sweep, "of a sweep; one simulation is compared"), (&other, "not the result of")]
    {
        let (code, error) = fault(&["compare", file, file]);
        assert!(code == 2 && error.contains(message), "{error}");
    }
}

//! `deltapool bench crossover` as a user's shell sees it: what it measures is what it says, the
//! model lines cross where SEEDS.md section 4.6 says, and what cannot be measured is refused. How
//! fast anything is, no test asks.
#![cfg(feature = "embedded-model")]

mod support;

use std::fs;

use serde_json::Value;
use support::program::{arg, json, model, run, stderr, stdout};

const COLUMNS: [&str; 8] = ["arch", "L", "arm", "bytes", "ms_p50", "ms_min", "ms_max", "model_ms"];

fn crossover(args: &[&str]) -> Value {
    json(&run(&[&["bench", "crossover", "--json"], args].concat()))
}

fn modelled(hardware: &str, model: &str, args: &[&str]) -> Value {
    let fixed = ["--modelled", "--hardware", hardware, "--model", model];
    crossover(&[&fixed, args].concat())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The row of an arm at a length.
fn row<'a>(report: &'a Value, tokens: u64, arm: &str) -> Option<&'a Value> {
    let rows = report["rows"].as_array().expect("rows");
    rows.iter().find(|row| row["L"] == tokens && row["arm"] == arm)
}

fn assert_near(told: &Value, wanted: f64, what: &str) {
    let told = number(told);
    assert!((told / wanted - 1.0).abs() < 0.005, "{what}: {told}, SEEDS {wanted}");
}

/// The embedded model: a slot of 6 KDA layers and 160 values in bf16 a token. The program itself
/// fails when the copied bytes or a token after an arm are others than they should be.
#[test]
fn each_arm_is_measured_and_copies_what_a_sequence_holds() {
    let lengths = "--lengths=192,64,128,64";
    let more = ["--max-num-batched-tokens", "64", "--checkpoint-every", "128", "-t", "1"];
    let report = crossover(&[&[lengths], &more[..]].concat());
    let (slot, token) =
        (&report["constants"]["slot_bytes"], &report["constants"]["kv_bytes_per_token"]);
    let (slot, token) = (number(slot), number(token));
    assert_eq!(token, 320.0);
    for tokens in [64, 128, 192] {
        let held = slot + token * tokens as f64;
        for (arm, bytes) in [
            ("swap_out", held),
            ("swap_in", held),
            ("swap", 2.0 * held),
            ("recompute", 0.0),
            ("recompute_marginal", 0.0),
        ] {
            let row = row(&report, tokens, arm).unwrap_or_else(|| panic!("no {arm} at {tokens}"));
            let keys: Vec<&str> =
                row.as_object().expect("an object").keys().map(String::as_str).collect();
            assert_eq!(keys, COLUMNS);
            assert_eq!(number(&row["bytes"]), bytes, "{row}");
            let [min, p50, max] = ["ms_min", "ms_p50", "ms_max"].map(|key| number(&row[key]));
            assert!(min <= p50 && p50 <= max, "{row}");
            assert!(min > 0.0 || arm == "recompute_marginal", "{row}");
            assert!(number(&row["model_ms"]) > 0.0, "{row}");
        }
    }
    // The only length with a checkpoint below its end.
    let checkpoint = row(&report, 192, "checkpoint").expect("a checkpoint");
    assert_eq!(number(&checkpoint["bytes"]), slot + 128.0 * token);
    assert!(row(&report, 128, "checkpoint").is_none());
    assert_eq!(report["repeats"], 5);
    assert_eq!(report["modelled"], false);
    assert!(report["swap_line"]["r_squared"].is_number());
    assert!(report["machine"]["isa"].is_string() && report["crossover"].is_object());
}

/// A model whose slots have no bytes, and a link that makes each copy take 20 ms or more.
#[test]
fn a_slow_link_makes_swap_take_as_long_as_its_bytes_do() {
    let dense = model("qwen3_tiny");
    let args = ["--model", arg(&dense), "--lengths", "64,128", "-t", "1", "--link-gbps"];
    let whole = crossover(&[&args[..], &["1"]].concat());
    let bytes = number(&row(&whole, 64, "swap_out").expect("a row")["bytes"]);
    let rate = format!("{}", bytes / 0.02 / 1e9);
    let report = crossover(&[&args[..], &[&rate]].concat());
    for (tokens, least) in [(64, 20.0), (128, 40.0)] {
        for arm in ["swap_out", "swap_in"] {
            let row = row(&report, tokens, arm).expect("a row");
            assert!(number(&row["ms_min"]) >= least, "{row}");
            assert_near(&row["model_ms"], least, arm);
        }
    }
    assert!(report["title"].as_str().expect("a title").ends_with("GB/s"), "{report}");
    // A hybrid's, over a link that carries a slot in 40 ms: out and in are 80 before any token.
    let args = ["--lengths", "64,128,640", "-t", "1", "--link-gbps"];
    let slot = number(&crossover(&[&args[..], &["1"]].concat())["constants"]["slot_bytes"]);
    let report = crossover(&[&args[..], &[&format!("{}", slot / 0.04 / 1e9)]].concat());
    let line = &report["swap_line"];
    assert!(number(&line["r_squared"]) > 0.98, "{line}");
    let (intercept, slope) = (number(&line["intercept_ms"]), number(&line["slope_ms"]));
    assert!(intercept > 76.0 && (0.5..2.0).contains(&(slope / 0.1138)), "{line}");
}

/// SEEDS.md section 4.7: `V / kv` tokens' worth of state come before the first token's rows.
#[test]
fn a_hybrids_swap_is_a_line_that_begins_with_its_state() {
    for (name, tokens) in [("k3", 7_851.0), ("kimi-linear", 5_384.0)] {
        let lengths = ["--lengths", "4096,8192,65536", "--link-gbps", "16"];
        let report = modelled("h100-seed-a", name, &lengths);
        let swap = |len| number(&row(&report, len, "swap").expect("a row")["model_ms"]);
        let slope = (swap(8_192) - swap(4_096)) / 4_096.0;
        let intercept = swap(4_096) - 4_096.0 * slope;
        assert_near(&(intercept / slope).into(), tokens, name);
        assert_near(&swap(65_536).into(), intercept + 65_536.0 * slope, name);
    }
}

#[test]
fn a_table_a_chart_and_an_svg_are_drawn() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (svg, file) = (folder.path().join("c.svg"), folder.path().join("c.json"));
    let to_file = format!("--json={}", arg(&file));
    let args = ["bench", "crossover", "--lengths", "64,128", "-t", "1", "--svg", arg(&svg)];
    let output = run(&[&args[..], &["--link-gbps", "0.01", &to_file]].concat());
    assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
    let text = stdout(&output);
    assert!(text.starts_with("swap or recompute: embedded, link held to 0.01 GB/s\n"), "{text}");
    let rows = |arm: &str| {
        let is_row = |line: &&str| line.split_whitespace().nth(1) == Some(arm);
        text.lines().filter(is_row).count()
    };
    assert_eq!((rows("swap_out"), rows("recompute_marginal")), (2, 2), "{text}");
    assert!(text.contains("\nL* measured ") && text.contains("x: tokens"), "{text}");
    let drawn = fs::read_to_string(svg).expect("an SVG");
    assert!(drawn.starts_with("<svg ") && drawn.trim_end().ends_with("</svg>"));
    for name in ["swap, model", "recompute, model", "recompute_marginal", "0.01 GB/s"] {
        assert!(drawn.contains(name), "{name}");
    }
    let opened = drawn.matches("<text").count();
    assert!(opened > 8 && opened == drawn.matches("</text>").count());
    let report: Value =
        serde_json::from_str(&fs::read_to_string(file).expect("a file")).expect("JSON");
    assert_eq!(report["bench"], "crossover");
}

#[test]
fn the_model_lines_cross_where_m8_and_m9_say() {
    let cross = |model: &str, link: &str, key: &str| {
        modelled("h100-seed-a", model, &["--link-gbps", link])["crossover"][key].clone()
    };
    for (model, link, wanted) in
        [("7b-mha", "32", 10_468.0), ("7b-gqa8", "6", 31_093.0), ("70b-gqa", "2", 14_038.0)]
    {
        assert_near(&cross(model, link, "predicted_tokens"), wanted, model);
    }
    assert_eq!(cross("7b-mha", "64", "predicted_tokens"), 0.0);
    for (model, link, wanted) in
        [("k3", "64", 31.0), ("k3-real", "8", 528.0), ("kimi-linear", "16", 488.0)]
    {
        assert_near(&cross(model, link, "predicted_linear_tokens"), wanted, model);
    }
    assert!(cross("kimi-linear", "1", "predicted_linear_tokens").is_null());
}

#[test]
fn the_ladder_of_k3_is_that_of_m10() {
    let lengths = ["--lengths", "2048,8192,32768,131072", "--checkpoint-every", "6144"];
    let report = modelled("h100-seed-a", "k3", &lengths);
    let ms = |tokens: u64, arm: &str| &row(&report, tokens, arm).expect("a row")["model_ms"];
    for (tokens, replay, swap) in [
        (2048, 450.1, 8.553),
        (8192, 1800.4, 13.861),
        (32_768, 7201.8, 35.094),
        (131_072, 28_807.0, 120.03),
    ] {
        assert_near(ms(tokens, "recompute"), replay, "replay");
        assert_near(ms(tokens, "swap"), swap, "swap");
    }
    for tokens in [8192, 32_768, 131_072] {
        let restored = number(ms(tokens, "checkpoint"));
        assert!((450.0..515.0).contains(&restored), "{restored}");
    }
    // The link at which both take the same at 128K.
    let slow = modelled("h100-seed-a", "k3", &["--link-gbps", "0.267", "--lengths", "131072"]);
    let swap = &row(&slow, 131_072, "swap").expect("a row")["model_ms"];
    let replay = number(&row(&slow, 131_072, "recompute").expect("a row")["model_ms"]);
    assert_near(swap, replay, "break-even");
    // A rate of many devices says nothing of what a step of one costs.
    assert!(row(&report, 2048, "recompute_marginal").is_none());
}

#[test]
fn a_config_is_modelled_as_it_is_and_its_steps_are_priced() {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/configs/llama-2-7b.json");
    let report = modelled("h100", config, &["--lengths", "64,4096"]);
    assert_eq!((&report["modelled"], &report["hardware"]), (&true.into(), &"h100".into()));
    let swap = &row(&report, 4096, "swap").expect("a row")["model_ms"];
    assert_near(swap, 67.11, "C64");
    let alone = number(&row(&report, 4096, "recompute").expect("a row")["model_ms"]);
    let beside = number(&row(&report, 4096, "recompute_marginal").expect("a row")["model_ms"]);
    // A step of 480 rows is bound by arithmetic: little of it is free.
    assert!(beside > 0.6 * alone && beside < alone, "{beside} of {alone}");
    let table = stdout(&run(&["bench", "crossover", "--modelled", "--model", "k3"]));
    assert!(table.contains("L* 31 tokens: below it recomputing takes less"), "{table}");
    assert!(table.contains("131,072 recompute "), "{table}");
}

#[test]
fn what_cannot_be_measured_is_refused_by_its_name() {
    for (args, message) in [
        (&["--lengths", "64,100"][..], "--lengths 100: a multiple of 64, 64 or more"),
        (&["--lengths", "0"], "--lengths 0: a multiple of 64"),
        (&["--lengths", "8192"], "--lengths 8192: a sequence reaches 8201 tokens"),
        (&["--repeats", "4"], "--repeats 4: 5 to 1000"),
        (&["--link-gbps", "0"], "--link-gbps 0: above 0, from 0.0001 to 1000000"),
        (&["--link-gbps", "-1"], "--link-gbps -1: above 0, from 0.0001 to 1000000"),
        (&["--max-num-batched-tokens", "63"], "--max-num-batched-tokens 63: 64 or more"),
        (&["--checkpoint-every", "100"], "--checkpoint-every 100: a multiple of 512"),
        (&["--threads", "0"], "--threads 0: 1 to 1024"),
        (&["--modelled"], "--modelled needs --model"),
        (&["--modelled", "--model", "k4"], "--model: k4 is no preset and no such file"),
        (&["--modelled", "--model", "k3", "--hardware", "h300"], "--hardware: h300 is no preset"),
        (
            &["--modelled", "--model", "llama-2-7b", "--lengths", "8192"],
            "--lengths 8192: the model's",
        ),
    ] {
        let output = run(&[&["bench", "crossover"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let told = stderr(&output);
        assert!(told.starts_with(&format!("error: {message}")), "{told}");
        assert_eq!(stdout(&output), "");
    }
    let nowhere = "/nonexistent/c.svg";
    let svg = ["bench", "crossover", "--modelled", "--model", "k3", "--svg", nowhere];
    let output = run(&svg);
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()));
    assert!(stderr(&output).starts_with("error: /nonexistent/c.svg: "), "{}", stderr(&output));
    let hardware = run(&["bench", "crossover", "--hardware", "h100"]);
    assert!(stderr(&hardware).contains("--modelled"), "{}", stderr(&hardware));
}

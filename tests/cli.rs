//! The program as a user's shell sees it: what it prints where, and its exit codes.
#![cfg(feature = "embedded-model")]

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::program::{arg, json, model, program, run, run_with, stderr, stdout};
use support::{Tensors, golden_folders, tell};

#[test]
fn a_prompt_is_continued_from_anywhere_and_nothing_else_is_printed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = program()
        .current_dir(folder.path())
        .args(["generate", "Once upon a time", "--max-tokens", "6"])
        .output()
        .expect("the program starts");
    assert_eq!(stdout(&output), " there was a young girl named");
    assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
}

#[test]
fn prompts_come_from_an_argument_a_file_standard_input_or_ids() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("prompt.txt");
    fs::write(&file, "Once upon a time").expect("a file");
    let ids = folder.path().join("ids.json");
    fs::write(&ids, "[0, 784, 599, 261, 505]").expect("a file");
    let by_file = run(&["generate", "-n", "4", "--file", arg(&file)]);
    let by_ids = run(&["generate", "-n", "4", "--ids-file", arg(&ids)]);
    let by_input = run_with(b"Once upon a time", &["generate", "-n", "4"]);
    for output in [by_file, by_ids, by_input] {
        assert_eq!(stdout(&output), " there was a young");
    }
}

#[test]
fn json_holds_the_whole_answer_on_one_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = run(&["generate", "Once upon a time", "-n", "5", "--json"]);
    let answer = json(&output);
    assert_eq!(answer["prompt_ids"], serde_json::json!([0, 784, 599, 261, 505]));
    assert_eq!(answer["output_ids"], serde_json::json!([393, 303, 261, 701, 577]));
    assert_eq!(answer["text"], " there was a young girl");
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["logprobs"].as_array().map(Vec::len), Some(5));
    assert!((answer["logprobs"][0].as_f64().expect("a number") + 0.47957).abs() < 1e-3);
    let timings = &answer["timings"];
    // Six states of 32 KiB and windows, a hidden row, and one block of two layers of 80 values,
    // these in bf16.
    let slot = 6 * (32_768 + 3 * 384 * 4) + 192 * 4;
    assert_eq!(timings["state_bytes"], slot + 64 * 2 * 80 * 2);
    assert_eq!(timings["prompt_tokens"], 5);
    assert!(timings["decode_tokens_per_second"].as_f64().expect("a rate") > 0.0);
    // With a file the text is printed as well.
    let path = folder.path().join("answer.json");
    let file = format!("--json={}", arg(&path));
    let output = run(&["generate", "Once upon a time", "-n", "5", &file]);
    assert_eq!(stdout(&output), " there was a young girl");
    let written: Value =
        serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON");
    assert_eq!(written["output_ids"], answer["output_ids"]);
}

/// Without --max-tokens an answer ends where the context does, instead of being refused.
#[test]
fn a_long_prompt_leaves_what_the_context_leaves() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let ids = folder.path().join("ids.json");
    fs::write(&ids, serde_json::json!(vec![300; 8_180]).to_string()).expect("a file");
    let answer = json(&run(&["generate", "--ids-file", arg(&ids), "--ignore-eos", "--json"]));
    assert_eq!(answer["output_ids"].as_array().map(Vec::len), Some(12));
    assert_eq!(answer["finish_reason"], "length");
}

#[test]
fn sampled_answers_repeat_with_their_seed() {
    let sampled = |seed: &str| {
        let args = ["generate", "The", "-n", "12", "--temperature", "1.2", "--seed", seed];
        stdout(&run(&args))
    };
    assert_eq!(sampled("7"), sampled("7"));
    assert_ne!(sampled("7"), sampled("8"));
}

#[test]
fn threads_batches_and_instruction_sets_change_no_token() {
    let prompt = "The old fox said to the crow, and the crow said to the fox. ".repeat(9);
    // One set multiplies bf16 by default, the others f32.
    let f32 = ["--compute", "f32", "-n", "30"];
    let reference = [&["generate", &prompt, "--threads", "1"][..], &f32].concat();
    let reference = stdout(&run(&reference));
    for extra in [["--threads", "3"], ["--max-num-batched-tokens", "64"]] {
        let args = [&["generate", &prompt][..], &f32, &extra].concat();
        assert_eq!(stdout(&run(&args)), reference, "{extra:?}");
    }
    for isa in kernels::Isa::available() {
        let output = program()
            .args(["generate", &prompt])
            .args(f32)
            .env("DELTAPOOL_ISA", isa.name())
            .output()
            .expect("the program starts");
        assert_eq!(stdout(&output), reference, "{}", isa.name());
    }
}

/// Half the bytes for near the same text; a model of bf16 weights has it unless told otherwise.
#[test]
fn rows_of_tokens_are_kept_as_asked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("text");
    fs::write(&file, "Once upon a time there was a young girl by the river.").expect("a file");
    let score = |flags: &[&str]| {
        let args = [&["score", "--file", arg(&file), "--json"], flags].concat();
        json(&run(&args))["logprob_sum"].as_f64().expect("a number")
    };
    let [auto, wide, narrow] = ["auto", "f32", "bf16"].map(|kv| score(&["--kv-dtype", kv]));
    assert!(auto == narrow && auto == score(&[]), "{auto}, {narrow}");
    assert!(wide != narrow && (wide - narrow).abs() < 0.1, "{wide} and {narrow}");
    let exact = score(&["--compute", "f32"]);
    assert_eq!(exact, score(&["--compute", "f32", "--kv-dtype", "f32"]));
    assert_ne!(exact, score(&["--compute", "f32", "--kv-dtype", "bf16"]));
    let words = ["bench", "prefill", "--tokens", "8", "--rounds", "1", "-q", "--kv-dtype", "f32"];
    let report = stdout(&run(&words));
    assert!(report.contains("\nproducts   of bf16 weights in "), "{report}");
    assert!(report.contains("; rows of tokens kept in f32\n"), "{report}");
}

#[test]
fn weights_are_quantised_when_asked_and_in_no_other_way() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("text");
    let text = "Once upon a time there was a young girl who lived in a small house by the river.";
    fs::write(&file, text).expect("a file");
    let score = |quantize: &str| {
        let args = ["score", "--file", arg(&file), "--json", "--quantize", quantize];
        json(&run(&args))["logprob_sum"].as_f64().expect("a number")
    };
    let [stored, q8, q4] = ["none", "q8", "q4"].map(score);
    assert!(stored != q8 && (stored - q8).abs() < 0.3, "{stored} and {q8}");
    assert!(q8 != q4 && (stored - q4).abs() < 3.0, "{stored} and {q4}");
    for command in [&["generate", "x"][..], &["batch"], &["inspect"], &["bench", "decode"]] {
        let output = run(&[command, &["--quantize", "q5"]].concat());
        assert_eq!(output.status.code(), Some(2), "{command:?}");
        let told = stderr(&output);
        assert!(told.contains("invalid value 'q5' for '--quantize <HOW>'"), "{told}");
        assert!(told.contains("[possible values: none, q8, q4]"), "{told}");
    }
    let report = stdout(&run(&["inspect", "--quantize", "q4", "--json"]));
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let bytes = |key: &str| report[key].as_u64().expect("a number");
    assert_eq!(report["quantize"], "q4");
    assert!(bytes("weights_held_bytes") < bytes("weights_bytes") / 2, "{report}");
    let table = stdout(&run(&["inspect", "--quantize", "q4"]));
    assert!(table.contains("large matrices in q4, panels padded"), "{table}");
}

#[test]
fn stop_strings_end_an_answer_before_themselves() {
    let output =
        run(&["generate", "Once upon a time", "--stop", "girl", "--stop", "xyz", "--json"]);
    let answer = json(&output);
    assert_eq!(
        (&answer["text"], &answer["finish_reason"]),
        (&Value::from(" there was a young "), &Value::from("stop"))
    );
}

#[test]
fn chat_applies_the_models_template() {
    let output = run(&["generate", "--chat", "Once upon a time", "-n", "3", "--json"]);
    assert_eq!(json(&output)["prompt_ids"], serde_json::json!([0, 784, 599, 261, 505]));
    let kimi = model("kimi_linear_tiny");
    let output =
        run(&["generate", "--chat", "Hi there!", "-n", "1", "--model", arg(&kimi), "--json"]);
    let ids = json(&output)["prompt_ids"].clone();
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tokenizers/chat.json");
    let goldens: Value =
        serde_json::from_str(&fs::read_to_string(goldens).expect("goldens")).expect("JSON");
    let cases = goldens["cases"]["kimi"].as_array().expect("cases");
    let case = cases
        .iter()
        .find(|case| case["name"] == "single user" && case["add_generation_prompt"] == true);
    assert_eq!(ids, case.expect("the case is there")["ids"]);
}

/// `generate --ids-file` gives the oracle's greedy tokens, for every folder of the families served.
#[test]
fn generate_gives_the_greedy_ids_of_every_golden_model() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut run_of = Vec::new();
    for goldens in golden_folders() {
        for name in ["kimi_linear_tiny", "llama_tiny", "qwen3_tiny"] {
            for twin in [name.to_owned(), format!("{name}_f32")] {
                let dir = goldens.join("models").join(&twin);
                if !dir.is_dir() {
                    continue; // a plain clone carries no twins
                }
                let golden = goldens.join("models").join(name).join("golden.safetensors");
                let golden = Tensors::read(&golden);
                let ids = folder.path().join("ids.json");
                let prompt = serde_json::json!(golden.ids("prompt_ids"));
                fs::write(&ids, prompt.to_string()).expect("a file");
                let args = ["generate", "--model", arg(&dir), "--ids-file", arg(&ids)];
                let more = ["-n", "32", "--ignore-eos", "--json", "--kv-dtype", "f32"];
                let args = [&args[..], &more].concat();
                let answer = json(&run(&args));
                assert_eq!(answer["output_ids"], serde_json::json!(golden.ids("greedy_ids")));
                run_of.push(twin);
            }
        }
    }
    tell(&format!("greedy ids of {}", run_of.join(", ")));
    assert!(run_of.len() >= 3);
}

#[test]
fn score_tells_how_likely_a_text_is() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("text.txt");
    fs::write(&file, "Once upon a time there was a young girl").expect("a file");
    let score = json(&run(&["score", "--file", arg(&file), "--json"]));
    let logprobs: Vec<f64> = serde_json::from_value(score["logprobs"].clone()).expect("numbers");
    let ids = score["ids"].as_array().expect("ids");
    assert_eq!(ids.len(), logprobs.len() + 1);
    let sum: f64 = logprobs.iter().sum();
    assert!((score["logprob_sum"].as_f64().expect("a sum") - sum).abs() < 1e-9);
    let perplexity = (-sum / logprobs.len() as f64).exp();
    assert!((score["perplexity"].as_f64().expect("a number") - perplexity).abs() < 1e-9);
    let bits = -sum / std::f64::consts::LN_2 / 39.0;
    assert!((score["bits_per_byte"].as_f64().expect("a number") - bits).abs() < 1e-9);
    // " there" follows with the probability that generate reports.
    assert!((logprobs[4] + 0.47957).abs() < 1e-3);
    let table = stdout(&run(&["score", "--file", arg(&file)]));
    assert!(table.starts_with("tokens scored   9\nlogprob sum     -"), "{table}");
    // The nll of a golden model's prompt.
    let dir = model("kimi_linear_tiny");
    let golden = Tensors::read(&dir.join("golden.safetensors"));
    let ids = folder.path().join("ids.json");
    fs::write(&ids, serde_json::json!(golden.ids("prompt_ids")).to_string()).expect("a file");
    let args = ["score", "--model", arg(&dir), "--ids-file", arg(&ids), "--kv-dtype=f32", "--json"];
    let score = json(&run(&args));
    let logprobs: Vec<f64> = serde_json::from_value(score["logprobs"].clone()).expect("numbers");
    for (got, nll) in logprobs.iter().zip(golden.values("nll")) {
        assert!((got + f64::from(*nll)).abs() < 1e-3);
    }
}

#[test]
fn inspect_shows_the_model_in_the_binary() {
    let report = stdout(&run(&["inspect"]));
    assert!(report.contains("5,103,876 parameters"), "{report}");
    // Two MLA layers of 64 + 16 values.
    assert!(report.contains("320 bytes  bf16\n"), "{report}");
    let wide = stdout(&run(&["inspect", "--kv-dtype", "f32"]));
    assert!(wide.contains("640 bytes  f32\n"), "{wide}");
    let output = run(&["inspect", "--json", "--compute", "f32"]);
    let report: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(report["parameters"], 5_103_876);
}

/// Arguments, exit code and the whole text on standard error.
#[test]
fn broken_command_lines_say_what_is_wrong() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bad_ids = folder.path().join("bad.json");
    fs::write(&bad_ids, "[1, -2]").expect("a file");
    let far_ids = folder.path().join("far.json");
    fs::write(&far_ids, "[1, 3072]").expect("a file");
    let missing = folder.path().join("missing");
    let empty = folder.path().join("empty");
    fs::write(&empty, "").expect("a file");
    let (bad, far, missing, empty) = (arg(&bad_ids), arg(&far_ids), arg(&missing), arg(&empty));
    let file_error = format!("error: {missing}: No such file or directory (os error 2)\n");
    let model_error = format!(
        "error: there is no folder {missing}: nothing is downloaded, a model is a folder here\n"
    );
    let bad_error = format!(
        "error: {bad}: not a JSON array of token ids: invalid value: integer `-2`, expected u32 at \
         line 1 column 6\n"
    );
    let table: &[(&[&str], i32, &str)] = &[
        (
            &["generate", "x", "--top-p", "1.5"],
            2,
            "error: --top-p is 1.5, allowed: above 0, at most 1\n",
        ),
        (
            &["generate", "x", "--top-p", "nan"],
            2,
            "error: --top-p is NaN, allowed: above 0, at most 1\n",
        ),
        (
            &["generate", "x", "--temperature=-1"],
            2,
            "error: --temperature is -1, allowed: 0 or more, finite\n",
        ),
        (&["generate", "x", "--min-p", "2"], 2, "error: --min-p is 2, allowed: 0 to 1\n"),
        (&["generate", "x", "-n", "0"], 2, "error: --max-tokens is 0, allowed: 1 or more\n"),
        (
            &["generate", "x", "--stop", ""],
            2,
            "error: --stop is a string of 0 bytes, allowed: strings of 1 to 256 bytes\n",
        ),
        (
            &["generate", "x", "-n", "9000"],
            2,
            "error: 9002 tokens do not fit: the limit is 8192 tokens, prompt and answer together\n",
        ),
        (&["generate", "x", "--threads", "0"], 2, "error: --threads 0: 1 to 1024\n"),
        (
            &["generate", "x", "--max-num-batched-tokens", "63"],
            2,
            "error: --max-num-batched-tokens 63: a step must hold one cell of a prompt, 64 tokens or more\n",
        ),
        (&["generate", "--ids-file", bad], 2, &bad_error),
        (
            &["generate", "--ids-file", far],
            2,
            "error: the prompt is token 3072, allowed: tokens 0 to 3071\n",
        ),
        (&["generate", "--file", missing], 1, &file_error),
        (&["generate", "x", "--model", missing], 3, &model_error),
        (&["score", "--model", missing, "--ids-file", far], 3, &model_error),
        (
            &["score", "--ids-file", far],
            2,
            "error: tokens is token 3072, allowed: tokens 0 to 3071\n",
        ),
        (&["inspect", missing], 3, &model_error),
        (&["inspect", "--model", missing], 3, &model_error),
        (
            &["score", "--file", empty],
            2,
            "error: tokens to score: 1; 2 or more, each after another\n",
        ),
    ];
    for (args, code, text) in table {
        let output = run(args);
        assert_eq!(stderr(&output), *text, "{args:?}");
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(*code), ""), "{args:?}");
    }
    // What the argument parser itself refuses: exit code 2 and the argument's name.
    for (args, named) in [
        (&["generate", "x", "--file", "y"][..], "'[PROMPT]' cannot be used with '--file <FILE>'"),
        (&["generate", "x", "--threads", "-1"], "invalid value '-1' for '--threads <N>'"),
        (&["chat", "--max-tokens", "-1"], "invalid value '-1' for '--max-tokens <N>'"),
        (&["generate", "x", "--compute", "fp8"], "invalid value 'fp8' for '--compute <HOW>'"),
        (&["generate", "x", "--kv-dtype", "fp8"], "invalid value 'fp8' for '--kv-dtype <HOW>'"),
        (&["inspect", "--kv-dtype", "f16"], "[possible values: auto, f32, bf16]"),
        (&["generate", "x", "--max-tokens", "many"], "invalid value 'many' for '--max-tokens <N>'"),
        (&["generates"], "unrecognized subcommand 'generates'"),
        (&["generate", "x", "--tempreature", "1"], "unexpected argument '--tempreature'"),
        (&[], "Usage: deltapool"),
    ] {
        let output = run(args);
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{args:?}");
    }
}

/// A tokenizer that is another model's, and stop strings without a tokenizer.
#[test]
fn a_model_without_its_tokenizer_says_so() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(model("llama_tiny").join(file), folder.path().join(file)).expect("a copy");
    }
    let ids = folder.path().join("ids.json");
    fs::write(&ids, "[1, 2, 3]").expect("a file");
    let with_ids = ["generate", "--model", arg(folder.path()), "--ids-file", arg(&ids)];
    let answer = json(&run(&[&with_ids[..], &["-n", "2", "--json"]].concat()));
    assert_eq!(answer["output_ids"].as_array().map(Vec::len), Some(2));
    let output = run(&[&with_ids[..], &["--stop", "x"]].concat());
    let text = "error: --stop needs a tokenizer, and the model has none\n";
    assert_eq!((stderr(&output).as_str(), output.status.code()), (text, Some(2)));
    let output = run(&["generate", "x", "--model", arg(folder.path())]);
    let text = "error: no tokenizer: the model has neither tokenizer.json nor tiktoken.model\n";
    assert_eq!((stderr(&output).as_str(), output.status.code()), (text, Some(3)));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-model");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(root.join(file), folder.path().join(file)).expect("a copy");
    }
    let output = run(&["generate", "Once upon a time", "--model", arg(folder.path())]);
    let text = "error: the tokenizer gives token 784 (it knows 3072), but the model knows 544\n";
    assert_eq!((stderr(&output).as_str(), output.status.code()), (text, Some(3)));
}

/// Logits that are not numbers are an error for both commands, never a token or a figure.
#[test]
fn a_model_of_broken_numbers_fails_instead_of_answering() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for file in fs::read_dir(model("llama_tiny")).expect("a folder") {
        let file = file.expect("an entry");
        fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
    }
    // The last value of the last tensor's data, in bf16.
    let weights = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&weights).expect("a file");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let data = &mut bytes[8 + header..];
    data.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&[0xc0, 0x7f]));
    fs::write(&weights, bytes).expect("a file");
    let ids = folder.path().join("ids.json");
    fs::write(&ids, "[1, 2, 3]").expect("a file");
    for command in ["generate", "score"] {
        let output =
            run(&[command, "--model", arg(folder.path()), "--ids-file", arg(&ids), "--json"]);
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""), "{command}");
        assert!(stderr(&output).contains("is not a number"), "{command}: {}", stderr(&output));
    }
}

#[test]
fn an_unknown_instruction_set_is_refused_by_name() {
    let output = program()
        .args(["generate", "x"])
        .env("DELTAPOOL_ISA", "neon9000")
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(2));
    let error = stderr(&output);
    assert!(error.starts_with("error: DELTAPOOL_ISA: instruction set 'neon9000'"), "{error}");
}

/// A program without the feature knows the flag, and says what it lacks.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_device_that_the_program_was_not_built_for_is_told() {
    let output = run(&["generate", "Once", "-n", "2", "--device", "cuda"]);
    let told = "error: --device cuda: this program was built without the feature cuda\n";
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(4), told));
    assert_eq!(stdout(&output), "");
    let auto = run(&["generate", "Once", "-n", "2", "--device", "auto"]);
    assert_eq!((auto.status.code(), stderr(&auto).as_str()), (Some(0), ""));
    assert_eq!(json(&run(&["doctor", "--json"]))["cuda"], serde_json::Value::Null);
    assert!(stdout(&run(&["doctor"])).contains("built without the feature cuda"));
}

#[test]
fn the_doctor_tells_of_this_machine_with_and_without_a_gpu() {
    let output = run(&["doctor", "--json"]);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    let report = json(&output);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["processor"]["isa"], kernels::Isa::best().name());
    let features: Vec<&str> =
        report["features"].as_array().expect("a list").iter().filter_map(|f| f.as_str()).collect();
    assert_eq!(features.contains(&"cuda"), cfg!(feature = "cuda"));
    assert_eq!(features.contains(&"embedded-model"), cfg!(feature = "embedded-model"));
    assert!(report["threads"].as_u64() > Some(0));
    assert_eq!(report["cuda"].is_object(), cfg!(feature = "cuda"));
    let text = stdout(&run(&["doctor"]));
    assert!(text.contains("RLIMIT_MEMLOCK") && text.contains(" threads\n"), "{text}");
}

#[test]
fn help_and_version_go_to_standard_output() {
    for (args, text) in [
        (&["--help"][..], "Exit codes: 0 done, 1 failed"),
        (&["generate", "--help"], "--max-num-batched-tokens"),
        (&["--version"], "deltapool 0.1.0"),
    ] {
        let output = run(args);
        assert!(stdout(&output).contains(text), "{args:?}");
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    }
}

#[test]
fn a_reader_that_leaves_ends_the_program_quietly() {
    let mut child = program()
        .args(["generate", "Once upon a time", "-n", "2000", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_answer_with_code_130() {
    use std::io::Read;
    let mut child = program()
        .args(["generate", "Once upon a time", "-n", "8000", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut first = [0; 6];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("it speaks");
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.expect("kill is there").success());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(stderr(&output), "error: interrupted\n");
    assert_eq!(output.status.code(), Some(130));
}

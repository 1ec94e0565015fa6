//! The program with `--device cuda`, as a user's shell sees it: on the emulated device, which it
//! finds as it would find a driver, or, with `DELTAPOOL_TEST_GPU=1`, on a real one.

#[allow(unsafe_code)] // it loads libraries; the file is of `kernels`
#[path = "../kernels/tests/cuda_support/mod.rs"]
mod cuda_support;
#[allow(dead_code)] // it serves the tests of the server too
#[path = "server/support.rs"]
mod served;

use std::fs;
use std::path::Path;
use std::process::Output;

use cuda_support::{folder, on_gpu, skip};
use serde_json::{Value, json};
use served::Server;

/// The program, with the emulated device where a driver would be.
mod program {
    use std::cell::RefCell;
    use std::path::Path;
    use std::process::{Command, Stdio};

    thread_local! {
        /// What the device is told besides, by the test of this thread.
        pub static TOLD: RefCell<Vec<(&'static str, &'static str)>> = const { RefCell::new(vec![]) };
    }

    pub fn program() -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("deltapool"));
        command.env_remove("DELTAPOOL_ISA").stdin(Stdio::null());
        // Kept kernels of the emulated device are none for a real one.
        let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
        if super::on_gpu() {
            command.env("XDG_CACHE_HOME", tmp.join("gpu-cache"));
        } else {
            let folder = super::folder().expect("tests without it are skipped");
            command.env("LD_LIBRARY_PATH", folder);
            command.env("XDG_CACHE_HOME", tmp.join("program-cache"));
        }
        TOLD.with_borrow(|told| command.envs(told.iter().copied()));
        command
    }
}

use program::{TOLD, program};

/// Whether there is a device that the program can use; if not, that is told.
fn has_device() -> bool {
    on_gpu() || is_emulated()
}

/// Whether there is an emulated device that the program can use and that fails, or is another one,
/// when it is told to; if not, that is told.
fn is_emulated() -> bool {
    if on_gpu() {
        skip("a real device is what it is");
        return false;
    }
    if kernels::cuda::SOURCES.iter().any(kernels::cuda::Source::is_carried) {
        skip("the emulated device runs no compiled kernels");
        return false;
    }
    if folder().is_none() {
        skip("there is no g++ to build the emulated device with");
    }
    folder().is_some()
}

/// What the device is told while `body` runs.
fn told<T>(what: &[(&'static str, &'static str)], body: impl FnOnce() -> T) -> T {
    TOLD.set(what.to_vec());
    let done = body();
    TOLD.set(Vec::new());
    done
}

fn run(args: &[&str]) -> Output {
    program().args(args).output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("output is text")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("errors are text")
}

fn json_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_str(&stdout(output)).expect("it is JSON")
}

/// A model with layers of both kinds, in single precision.
const SMALL: [&str; 6] = [
    "--model",
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/models/kimi_linear_tiny"),
    "--compute",
    "f32",
    "--kv-dtype",
    "f32",
];

fn ids_file(name: &str, ids: &[u32]) -> String {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, json!(ids).to_string()).expect("it can be written");
    path.into_os_string().into_string().expect("a plain path")
}

#[test]
fn answers_and_scores_are_those_of_the_processor() {
    if !has_device() {
        return;
    }
    let ids: Vec<u32> = (0..100).map(|i| (i * i * 7 + 3) % 768).collect();
    let file = ids_file("cuda-ids.json", &ids);
    let on = |command: &str, device: &str, more: &[&str]| {
        let args = [command, "--ids-file", file.as_str(), "--json", "--device", device];
        json_of(&run(&[&args[..], &SMALL, more].concat()))
    };
    let more = ["-n", "8", "--ignore-eos"];
    let cpu = on("generate", "cpu", &more);
    assert_eq!(cpu["output_ids"].as_array().map(Vec::len), Some(8));
    for device in ["cuda", "auto"] {
        assert_eq!(on("generate", device, &more)["output_ids"], cpu["output_ids"], "{device}");
    }
    let scores = |device: &str| -> Vec<f64> {
        let score = on("score", device, &[]);
        let logprobs = score["logprobs"].as_array().expect("a list");
        logprobs.iter().map(|logprob| logprob.as_f64().expect("a number")).collect()
    };
    let (cpu, cuda) = (scores("cpu"), scores("cuda"));
    assert_eq!(cpu.len(), 99);
    let apart = cpu.iter().zip(&cuda).map(|(cpu, cuda)| (cpu - cuda).abs()).fold(0.0, f64::max);
    assert!(apart < 1e-3, "{apart} apart");
    // Sums are made in another order there: else it was not on the device.
    assert!(apart > 0.0, "the very bits of the processor");
}

#[test]
fn a_batch_is_swapped_and_answers_as_on_the_processor() {
    if !has_device() {
        return;
    }
    let input = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-batch.jsonl");
    let line = |i: u32| {
        let ids: Vec<u32> = (0..30 + 10 * i).map(|at| (at * 11 + i * 101) % 768).collect();
        format!("{}\n", json!({"prompt_ids": ids, "max_tokens": 40, "ignore_eos": true}))
    };
    fs::write(&input, (0..3).map(line).collect::<String>()).expect("it can be written");
    let rows = |device: &str, code: i32| -> Vec<Value> {
        let input = input.to_str().expect("a plain path");
        let memory = ["--device-memory", "8MiB", "--host-memory", "8MiB", "--preempt", "swap"];
        let stress = ["--park-every", "3", "--max-num-seqs", "2"];
        let args = ["batch", "--input", input, "--device", device];
        let output = run(&[&args[..], &SMALL, &memory, &stress].concat());
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let text = stdout(&output);
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let (cpu, cuda) = (rows("cpu", 0), rows("cuda", 0));
    assert_eq!(cuda.len(), 3);
    for (cpu, cuda) in cpu.iter().zip(&cuda) {
        assert_eq!(cpu["output_ids"], cuda["output_ids"]);
    }
    assert!(cuda.iter().any(|row| row["swapped_bytes"].as_u64() > Some(0)), "{cuda:?}");
    // A device that fails fails each of them, also the one that waits.
    if !is_emulated() {
        return;
    }
    let failed = told(&[("DELTAPOOL_STANDIN_FAILING_LAUNCH", "2500")], || rows("cuda", 1));
    let told = |row: &Value| row["error"].as_str().is_some_and(|e| e.contains("CUDA error 719"));
    assert!(failed.len() == 3 && failed.iter().all(told), "{failed:?}");
}

/// One line that says what is missing, and 4, before any weight is looked for.
#[test]
fn a_device_that_is_not_there_is_told_before_weights_are_loaded() {
    if !is_emulated() {
        return;
    }
    let model = without_weights("cuda-no-weights");
    let file = ids_file("cuda-no-weights.json", &[1, 2, 3]);
    let args = ["generate", "--ids-file", &file, "--model", &model, "--device"];
    let refused = |what: &[(&'static str, &'static str)], device: &str| {
        let output = told(what, || run(&[&args[..], &[device]].concat()));
        (output.status.code(), stderr(&output))
    };
    let line = |text: &str| (Some(4), format!("error: --device cuda: {text}\n"));
    let none = [("DELTAPOOL_STANDIN_DEVICES", "0")];
    assert_eq!(refused(&none, "cuda"), line("no CUDA device 0: the driver has 0"));
    let old = [("DELTAPOOL_STANDIN_DRIVER", "12020")];
    let least = "the CUDA driver is for CUDA 12.2, at least 12.8 is needed";
    assert_eq!(refused(&old, "cuda"), line(least));
    if kernels::cuda::survey(None).driver.is_err() {
        let nowhere = [("LD_LIBRARY_PATH", "")];
        let (code, said) = refused(&nowhere, "cuda");
        assert_eq!((code, said), line("no CUDA driver: libcuda cannot be loaded"));
    }
    // Where there is one, or the processor will do, the weights are missed.
    assert_eq!(refused(&[], "cuda").0, Some(3));
    assert_eq!(refused(&none, "auto").0, Some(3));
}

#[test]
fn flags_that_a_device_does_not_serve_are_refused_by_name() {
    if !is_emulated() {
        return;
    }
    let file = ids_file("cuda-flags.json", &[1, 2, 3]);
    let generate = ["generate", "--ids-file", &file, "--device", "cuda"];
    let batch = ["batch", "--input", "/dev/null", "--device", "cuda"];
    for (args, code, said) in [
        (&generate[..], 2, &["--quantize", "q8"][..]),
        (&batch, 2, &["--audit", "5%"]),
        (&batch, 2, &["--checkpoint-dtype", "int8"]),
        (&generate, 2, &["--kv-dtype", "fp8"]),
        (&generate, 2, &["--state-dtype", "bf16"]),
        (&batch, 4, &["--device-memory", "100GB"]),
        (&["calibrate", "--device", "cuda"], 2, &["--device", "cuda"]),
        (&["bench", "decode", "--device", "cuda"], 2, &["--roofline"]),
    ] {
        let more = if said[0] == "--device" { &[] } else { said };
        let output = run(&[args, more].concat());
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{said:?}: {told}");
        assert!(told.contains(said[0]), "{said:?}: {told}");
    }
}

#[test]
fn a_bench_runs_on_the_device() {
    if !has_device() {
        return;
    }
    let args = ["bench", "decode", "--sequences", "2", "--context", "0", "--steps", "1"];
    let more = ["--rounds", "1", "--device", "cuda", "--quiet", "--json"];
    let report = json_of(&run(&[&args[..], &more, &SMALL].concat()));
    assert_eq!(report["device"], "cuda");
    assert_eq!(report["cases"].as_array().map(Vec::len), Some(1));
}

/// A folder with a model's `config.json` and nothing else.
fn without_weights(name: &str) -> String {
    let model = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&model).expect("it can be made");
    let config = Path::new(SMALL[1]).join("config.json");
    fs::copy(config, model.join("config.json")).expect("it can be copied");
    model.into_os_string().into_string().expect("a plain path")
}

/// The same with the config changed.
fn with_config(name: &str, change: impl FnOnce(&mut Value)) -> String {
    let model = without_weights(name);
    let path = Path::new(&model).join("config.json");
    let text = fs::read_to_string(&path).expect("it is there");
    let mut config: Value = serde_json::from_str(&text).expect("it is JSON");
    change(&mut config);
    fs::write(&path, config.to_string()).expect("it can be written");
    model
}

#[test]
fn a_bench_runs_on_the_device_without_weights_too() {
    if !has_device() {
        return;
    }
    let model = without_weights("cuda-random");
    let args = ["bench", "prefill", "--tokens", "70", "--rounds", "1", "--device", "cuda"];
    let args = [&args[..], &["--model", &model, "--quiet"]].concat();
    assert_eq!(run(&args).status.code(), Some(3), "there are no weights");
    let report = json_of(&run(&[&args[..], &["--random-weights", "--json"]].concat()));
    assert_eq!((&report["device"], &report["has_random_weights"]), (&json!("cuda"), &json!(true)));
    assert!(report["weights_bytes"].as_u64() > Some(1000), "{report}");
}

/// The memory of the emulated device is the host's, so the process holds the weights there, and two
/// copies of a layer on its way, ours and the driver's; all of them on their way would be three
/// times the weights.
#[test]
fn weights_go_to_the_device_a_layer_at_a_time() {
    if !is_emulated() {
        return;
    }
    // Many experts have many bytes and few products: five layers of 63 MB.
    let model = with_config("cuda-layers", |config| {
        config["num_experts"] = json!(640);
        config["moe_intermediate_size"] = json!(256);
    });
    let args = ["bench", "prefill", "--tokens", "1", "--rounds", "1", "--device", "cuda"];
    let more = ["--model", &model, "--random-weights", "--quiet", "--json"];
    let report = json_of(&run(&[&args[..], &more].concat()));
    let [weights, peak] =
        ["weights_bytes", "peak_rss_bytes"].map(|key| report[key].as_u64().expect("a number"));
    assert!(weights > 300_000_000, "{weights}");
    assert!(peak > weights && peak < 2 * weights, "{peak} bytes for {weights}");
}

/// All arms are measured, and the program itself fails when an answer goes on otherwise after one
/// or other bytes are copied than a sequence holds.
#[test]
fn swap_and_recomputation_are_measured_on_the_device() {
    if !has_device() {
        return;
    }
    // A layer of each kind: some hundred steps are emulated.
    let model = with_config("cuda-crossover", |config| {
        config["num_hidden_layers"] = json!(2);
        config["linear_attn_config"]["kda_layers"] = json!([1]);
        config["linear_attn_config"]["full_attn_layers"] = json!([2]);
        config["first_k_dense_replace"] = json!(2);
    });
    let args = ["bench", "crossover", "--lengths", "128", "--max-num-batched-tokens", "64"];
    let more = ["--checkpoint-every", "64", "--device", "cuda", "--quiet", "--json"];
    let model = ["--model", &model, "--random-weights"];
    let report = json_of(&run(&[&args[..], &more, &model].concat()));
    assert_eq!(report["device"], "cuda");
    let arms: Vec<&str> = report["rows"]
        .as_array()
        .expect("rows")
        .iter()
        .filter(|row| row["L"] == 128 && row["ms_p50"].is_number())
        .map(|row| row["arm"].as_str().expect("a name"))
        .collect();
    let all = ["swap_out", "swap_in", "swap", "recompute", "recompute_marginal", "checkpoint"];
    assert_eq!(arms, all);
}

#[test]
fn every_operator_of_the_device_is_timed() {
    if !has_device() {
        return;
    }
    let args = ["bench", "device", "--tiny", "--repeats", "2", "--quiet"];
    let report = json_of(&run(&[&args[..], &["--json"]].concat()));
    let median = |spread: &Value| {
        let [min, median, max] = ["min", "median", "max"].map(|key| spread[key].as_f64());
        assert!(Some(0.0) < min && min <= median && median <= max, "{spread}");
        median
    };
    median(&report["copy_gb_per_second"]);
    median(&report["product_tflop_per_second"]);
    let link = report["link"]["rows"].as_array().expect("a list");
    let whats: Vec<&str> = link.iter().map(|row| row["what"].as_str().expect("a name")).collect();
    let sequence = ["sequence to host", "sequence to device"];
    assert_eq!(whats[..3], ["to host", "to device", "both ways"]);
    assert_eq!(whats[3..], sequence);
    assert!(link.iter().all(|row| median(&row["gb_per_second"]).is_some()));
    let rows = report["rows"].as_array().expect("a list");
    let count = |operator: &str| rows.iter().filter(|row| row["operator"] == operator).count();
    for (operator, cases) in [
        ("kda step", 2),
        ("conv step", 2),
        ("mla step", 2),
        ("kda prompt", 2),
        ("mla prompt", 1),
        ("product", 8),
        ("experts", 3),
        ("norm", 1),
        ("add", 1),
        ("likeliest", 1),
    ] {
        assert_eq!(count(operator), cases, "{operator}");
    }
    for row in rows {
        let (us, floor) = (median(&row["us"]), row["floor_us"].as_f64());
        assert!(us.is_some() && floor > Some(0.0), "{row}");
        assert!(row["bytes"].as_u64() > Some(0) && row["operations"].as_u64() > Some(0), "{row}");
    }
    let targets: Vec<&Value> = [link, rows]
        .into_iter()
        .flatten()
        .flat_map(|row| row["targets"].as_array().expect("a list"))
        .collect();
    // Of steps of 32 sequences, of the published prompt, of swapping each way. Made-up shapes are
    // held to nothing, whatever they run on.
    assert_eq!(targets.len(), 6, "{targets:?}");
    assert!(targets.iter().all(|target| target["verdict"] == "not judged"), "{targets:?}");
    let text = stdout(&run(&args));
    assert!(text.contains("nothing is judged here") && text.contains("\nkda prompt  "), "{text}");
}

#[test]
fn a_device_that_is_not_there_is_not_timed() {
    if !is_emulated() {
        return;
    }
    let none = [("DELTAPOOL_STANDIN_DEVICES", "0")];
    let output = told(&none, || run(&["bench", "device", "--tiny"]));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert_eq!(said, "error: --device cuda: no CUDA device 0: the driver has 0\n");
    let refused = run(&["bench", "device", "--repeats", "0"]);
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(stderr(&refused), "error: --repeats 0: 1 to 1000\n");
}

/// A device that fails while it serves: who asked and who asks afterwards hear why, and whoever
/// watches the server hears it too.
#[test]
fn a_server_whose_device_fails_says_so() {
    if !is_emulated() {
        return;
    }
    let failing = [("DELTAPOOL_STANDIN_FAILING_LAUNCH", "6000")];
    let server = told(&failing, || Server::start(&["--device", "cuda"]));
    assert_eq!(server.get("/health").status, 200);
    let body = json!({"model": "tiny", "prompt": "Once", "max_tokens": 200, "ignore_eos": true});
    for _ in 0..2 {
        let reply = server.post("/v1/completions", &body);
        let (status, text) = (reply.status, reply.text());
        assert!(status == 500 && text.contains("CUDA error 719"), "{status} {text}");
    }
    for path in ["/health", "/ready"] {
        let reply = server.get(path);
        let (status, text) = (reply.status, reply.text());
        assert!(status == 503 && text.contains("CUDA error 719"), "{path}: {status} {text}");
    }
}

#[test]
fn a_command_whose_device_fails_says_why() {
    if !is_emulated() {
        return;
    }
    let file = ids_file("cuda-fails.json", &[1, 2, 3]);
    let long = ["--max-tokens", "400", "--ignore-eos", "--device", "cuda"];
    let args = [&["generate", "--ids-file", &file], &long[..]].concat();
    // Behind those of the graphs' test at the start.
    let failing = [("DELTAPOOL_STANDIN_FAILING_LAUNCH", "2500")];
    let output = told(&failing, || run(&[&args[..], &SMALL].concat()));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("error: the device failed at or before kernel "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn the_doctor_sees_the_device() {
    if !is_emulated() {
        return;
    }
    let cuda = &json_of(&run(&["doctor", "--json"]))["cuda"];
    assert_eq!((&cuda["driver"], &cuda["nvrtc"]), (&json!("13.0"), &json!("13.0")));
    let device = &cuda["devices"][0];
    assert_eq!(device["name"], "emulated device");
    assert_eq!(device["compute_capability"], "9.0");
    assert_eq!(device["memory_bytes"], 8_u64 << 30);
    assert!(device["kernels"] == "NVRTC" || device["kernels"] == "cached", "{device}");
    let text = stdout(&run(&["doctor"]));
    assert!(text.contains("device 0   emulated device, compute capability 9.0, 132 "), "{text}");
    let old = [("DELTAPOOL_STANDIN_DRIVER", "12020")];
    let text = told(&old, || stdout(&run(&["doctor"])));
    assert!(text.contains("cannot be used: the CUDA driver is for CUDA 12.2"), "{text}");
    let none = [("DELTAPOOL_STANDIN_DEVICES", "0")];
    let output = told(&none, || run(&["doctor"]));
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("devices    none: models are computed on the processor"));
}

//! `deltapool batch` as a user's shell sees it: lines in, lines out, and what memory does between.
#![cfg(feature = "embedded-model")]

mod support;

use std::fs;
use std::process::Output;

use serde_json::{Value, json};
use support::Random;
use support::program::{arg, json as json_of, program, run, run_with, stderr, stdout};

/// Memory in which nothing here is pushed out.
const ROOMY: [&str; 4] = ["--device-memory", "32MiB", "--host-memory", "32MiB"];

/// Three pages of the embedded model: 4 slots and 11 blocks, or 2 slots and 22 blocks.
const SMALL: [&str; 4] = ["--device-memory", "1351680", "--kv-dtype", "f32"];

/// Fields that may differ between two runs of the same requests.
const COSTS: [&str; 10] = [
    "matched_tokens",
    "cached_tokens",
    "replayed_tokens",
    "miss_reason",
    "preemptions",
    "swapped_bytes",
    "recomputed_tokens",
    "queue_ms",
    "ttft_ms",
    "mean_itl_ms",
];

/// Runs `lines` from standard input to standard output.
fn batch(lines: &[Value], args: &[&str]) -> Output {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    run_with(text.as_bytes(), &[&["batch", "--input", "-"], args].concat())
}

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect()
}

/// The rows of a batch in which nothing fails.
fn good(lines: &[Value], args: &[&str]) -> Vec<Value> {
    let output = batch(lines, args);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    rows(&stdout(&output))
}

fn count(row: &Value, field: &str) -> u64 {
    row[field].as_u64().unwrap_or_else(|| panic!("{field} of {row}"))
}

fn without_costs(rows: &[Value]) -> Vec<String> {
    let strip = |row: &Value| {
        let mut row = row.clone();
        let fields = row.as_object_mut().expect("an object");
        COSTS.iter().for_each(|cost| assert!(fields.shift_remove(*cost).is_some(), "{cost}"));
        row.to_string()
    };
    rows.iter().map(strip).collect()
}

#[test]
fn answers_stand_in_the_order_of_the_requests_with_all_their_fields() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let lines = "{\"id\": \"long\", \"prompt\": \"Once upon a time\", \"max_tokens\": 30}\n\
                 \n  \r\n\
                 {\"prompt_ids\": [0, 784, 599, 261, 505], \"max_tokens\": 4, \"seed\": null}\r\n\
                 {\"id\": 2.5, \"prompt\": \"Once upon a time\", \"stop\": [\"girl\", \"xyz\"]}\n\
                 {\"id\": \"long\", \"messages\": [{\"role\": \"user\", \"content\": \
                 \"Once upon a time\"}], \"max_tokens\": 5}";
    fs::write(&input, lines).expect("a file");
    let files = ["batch", "--input", arg(&input), "--output", arg(&output)];
    let ran = run(&[&files[..], &ROOMY, &["--quiet"]].concat());
    assert_eq!((stdout(&ran).as_str(), stderr(&ran).as_str()), ("", ""));
    let rows = rows(&fs::read_to_string(&output).expect("a file"));
    let ids: Vec<&Value> = rows.iter().map(|row| &row["id"]).collect();
    assert_eq!(ids, [&json!("long"), &json!(1), &json!(2.5), &json!("long")]);
    let fields: Vec<&String> = rows[0].as_object().expect("an object").keys().collect();
    assert_eq!(fields[..4], ["id", "output_ids", "text", "finish_reason"]);
    assert_eq!(fields[4..], COSTS);
    assert_eq!(rows[1]["text"], " there was a young");
    assert_eq!(rows[1]["output_ids"], json!([393, 303, 261, 701]));
    assert_eq!(rows[1]["finish_reason"], "length");
    assert_eq!(
        (&rows[2]["text"], &rows[2]["finish_reason"]),
        (&json!(" there was a young "), &json!("stop"))
    );
    let chat = json_of(&run(&["generate", "--chat", "Once upon a time", "-n", "5", "--json"]));
    assert_eq!(rows[3]["output_ids"], chat["output_ids"]);
    for row in &rows {
        assert_eq!((count(row, "cached_tokens"), count(row, "preemptions")), (0, 0));
        let time = |field: &str| row[field].as_f64().expect("a time");
        assert!(0.0 < time("queue_ms") && time("queue_ms") < time("ttft_ms"), "{row}");
        assert!(time("mean_itl_ms") > 0.0, "{row}");
    }
    // Nothing is read and written at once, and what cannot be run leaves the last answers alone.
    for flags in [["--output", arg(&input)], ["--json", arg(&output)]] {
        let flags = match flags {
            ["--json", path] => {
                vec!["--output".to_owned(), path.to_owned(), format!("--json={path}")]
            }
            other => other.map(str::to_owned).to_vec(),
        };
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let ran = run(&[&["batch", "--input", arg(&input)], &flags[..], &ROOMY].concat());
        assert_eq!(ran.status.code(), Some(2));
        assert!(stderr(&ran).contains("are the same file"), "{}", stderr(&ran));
    }
    fs::write(folder.path().join("config.json"), "{}").expect("a file");
    let broken = ["--model", arg(folder.path())];
    assert_eq!(run(&[&files[..], &ROOMY, &broken].concat()).status.code(), Some(3));
    assert_eq!(self::rows(&fs::read_to_string(&output).expect("a file")).len(), rows.len());
}

#[test]
fn answer_i_of_n_is_that_of_the_seed_i_beyond() {
    let request = |seed: u64, n: usize| json!({"prompt": "The old", "max_tokens": 9, "temperature": 1.1, "seed": seed, "n": n});
    let rows = good(&[request(5, 3), request(5, 1), request(6, 1), request(7, 1)], &ROOMY);
    let choices = rows[0]["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        let fields: Vec<&String> = choice.as_object().expect("an object").keys().collect();
        assert_eq!(fields, ["index", "output_ids", "text", "finish_reason"]);
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"], rows[index + 1]["text"]);
    }
    assert_ne!(choices[0]["text"], choices[1]["text"]);
    let fields: Vec<&String> = rows[0].as_object().expect("an object").keys().collect();
    assert_eq!(fields[..2], ["id", "choices"]);
    assert_eq!(fields[2..], COSTS);
}

#[test]
fn logprobs_come_when_asked_for_and_lose_no_bit() {
    let request = |logprobs: Value| json!({"prompt": "Once upon a time", "max_tokens": 3, "logprobs": logprobs});
    let asked = [json!(2), json!(true), json!(0), json!(false), Value::Null];
    let rows = good(&asked.map(request), &ROOMY);
    let generated = run(&["generate", "Once upon a time", "-n", "3", "--json"]);
    let generated = json_of(&generated)["logprobs"].clone();
    for row in &rows[..3] {
        let tokens = row["logprobs"].as_array().expect("a list");
        assert_eq!(tokens.len(), 3);
        for (token, expected) in tokens.iter().zip(generated.as_array().expect("a list")) {
            let bits = |value: &Value| (value.as_f64().expect("a number") as f32).to_bits();
            assert_eq!(bits(&token["logprob"]), bits(expected));
        }
    }
    let first = &rows[0]["logprobs"][0];
    assert_eq!(first["top"].as_array().map(Vec::len), Some(2));
    assert_eq!(first["top"][0], json!([393, first["logprob"]]));
    assert_eq!(rows[1]["logprobs"][0]["top"], json!([]));
    for row in &rows[3..] {
        assert!(row.get("logprobs").is_none(), "{row}");
    }
}

/// Each line, its id in the answer, and what is said of it.
#[test]
fn bad_lines_are_told_by_number_and_do_not_stop_the_rest() {
    let table: &[(&str, Value, &str)] = &[
        ("nonsense", json!(null), "not a JSON object: expected ident at column 2"),
        (
            "[1]",
            json!(null),
            "not a JSON object: invalid type: sequence, expected a map at column 0",
        ),
        (
            r#"{"prompt": "x""#,
            json!(null),
            "not a JSON object: EOF while parsing an object at column 14",
        ),
        (r#"{"id": [1], "prompt": "x"}"#, json!(null), "id: expected a string or a number"),
        (
            r#"{"id": "a"}"#,
            json!("a"),
            "one of prompt, prompt_ids and messages is needed, 0 are given",
        ),
        (
            r#"{"prompt": "x", "prompt_ids": [1]}"#,
            json!(5),
            "one of prompt, prompt_ids and messages is needed, 2 are given",
        ),
        (r#"{"prompt": "x", "top": 1, "maxtokens": 1}"#, json!(6), "unknown field: top, maxtokens"),
        (
            r#"{"id": 70, "prompt": "x", "temperature": "hot"}"#,
            json!(70),
            "temperature: invalid type: string \"hot\", expected f32",
        ),
        (r#"{"prompt": "x", "top_p": 2}"#, json!(8), "top_p is 2, allowed: above 0, at most 1"),
        (
            r#"{"prompt_ids": [1, 3072]}"#,
            json!(9),
            "prompt_ids is token 3072, allowed: tokens 0 to 3071",
        ),
        (r#"{"prompt_ids": []}"#, json!(10), "prompt_ids is empty, allowed: at least one token"),
        (
            r#"{"prompt": "x", "max_tokens": 1.5}"#,
            json!(11),
            "max_tokens: invalid type: floating point `1.5`, expected usize",
        ),
        (r#"{"prompt": "x", "max_tokens": 0}"#, json!(12), "max_tokens is 0, allowed: 1 or more"),
        (r#"{"prompt": "x", "n": 129}"#, json!(13), "n is 129, allowed: 1 to 128"),
        (
            r#"{"prompt": "x", "stop": 3}"#,
            json!(14),
            "stop: invalid type: integer `3`, expected a sequence",
        ),
        (
            r#"{"prompt": "x", "logit_bias": {"1": 200}}"#,
            json!(15),
            "logit_bias is 200 for token 1, allowed: -100 to 100",
        ),
        (r#"{"prompt": "x", "logprobs": 21}"#, json!(16), "logprobs is 21, allowed: 0 to 20"),
        (
            r#"{"prompt": "x", "arrival_ms": -1}"#,
            json!(17),
            "arrival_ms is -1, allowed: 0 to 86400000",
        ),
        (
            r#"{"messages": [{"content": "x"}]}"#,
            json!(18),
            "messages: expected objects with a role, one or more",
        ),
        (
            r#"{"prompt": "x", "seed": -1}"#,
            json!(19),
            "seed: invalid value: integer `-1`, expected u64",
        ),
        (
            r#"{"prompt": "x", "cache_salt": "a/b"}"#,
            json!(20),
            "cache_salt is \"a/b\", allowed: 1 to 128 characters, none of them @, /, \\ or NUL",
        ),
        (
            r#"{"prompt": "x", "cache_salt": 7}"#,
            json!(21),
            "cache_salt: invalid type: integer `7`, expected a string",
        ),
        (
            r#"{"prompt_ids": [1, 2], "checkpoint_at": [1, 3]}"#,
            json!(22),
            "checkpoint_at is 3, allowed: 1 to 2, the tokens of the prompt",
        ),
        (
            r#"{"prompt_ids": [1, 2], "checkpoint_at": [0]}"#,
            json!(23),
            "checkpoint_at is 0, allowed: 1 to 2, the tokens of the prompt",
        ),
        (
            r#"{"prompt": "x", "checkpoint_at": 64}"#,
            json!(24),
            "checkpoint_at: invalid type: integer `64`, expected a sequence",
        ),
        (
            r#"{"prompt": "x", "priority": 1}"#,
            json!(25),
            "priority is 1, but --scheduling-policy is fcfs, which knows none",
        ),
        (
            r#"{"prompt_ids": [1], "max_tokens": 500}"#,
            json!(26),
            "501 tokens, prompt and answer together, do not fit: --max-model-len is 500, and the \
             device memory holds one sequence of 1409 tokens",
        ),
    ];
    let good_line = json!({"id": "good", "prompt": "Once upon a time", "max_tokens": 4});
    let mut lines: Vec<String> = table.iter().map(|(line, _, _)| line.to_string()).collect();
    lines.push(good_line.to_string());
    let args = ["batch", "--input", "-", "--max-model-len", "500", "--quiet"];
    let output = run_with(lines.join("\n").as_bytes(), &[&args[..], &SMALL].concat());
    let rows = rows(&stdout(&output));
    assert_eq!(rows.len(), table.len() + 1);
    let mut said = String::new();
    for (index, (row, (line, id, error))) in rows.iter().zip(table).enumerate() {
        assert_eq!(*row, json!({"id": id, "error": error, "line": index + 1}), "{line}");
        said += &format!("line {}: {error}\n", index + 1);
    }
    said += "error: 27 of 28 requests failed\n";
    assert_eq!((stderr(&output), output.status.code()), (said, Some(1)));
    assert_eq!(rows.last().expect("a row")["text"], " there was a young");
}

/// A model without text: ids work, texts and chats say what is missing.
#[test]
fn a_model_without_a_tokenizer_takes_ids() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        let from = support::program::model("llama_tiny").join(file);
        fs::copy(from, folder.path().join(file)).expect("a copy");
    }
    let lines = [
        json!({"prompt_ids": [1, 2, 3], "max_tokens": 2}),
        json!({"prompt": "x"}),
        json!({"messages": [{"role": "user", "content": "x"}]}),
        json!({"prompt_ids": [1], "stop": "x"}),
    ];
    let output = batch(&lines, &[&ROOMY[..], &["--model", arg(folder.path())]].concat());
    let rows = rows(&stdout(&output));
    assert_eq!(rows[0]["output_ids"].as_array().map(Vec::len), Some(2));
    let errors: Vec<&Value> = rows[1..].iter().map(|row| &row["error"]).collect();
    assert_eq!(errors[0], "no tokenizer: the model has neither tokenizer.json nor tiktoken.model");
    assert_eq!(
        errors[1],
        "the model has no chat template: neither chat_template.jinja nor chat_template in \
         tokenizer_config.json"
    );
    assert_eq!(errors[2], "stop needs a tokenizer, and the model has none");
    assert_eq!(output.status.code(), Some(1));
}

/// With places for one sequence the order of service shows in the waiting times: a request that
/// comes later is served later, wherever its line is.
#[test]
fn a_request_is_submitted_when_its_time_has_come() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("summary.json");
    let late = json!({"id": "late", "prompt": "The", "max_tokens": 4, "arrival_ms": 700});
    let early = json!({"id": "early", "prompt": "The", "max_tokens": 4, "arrival_ms": 0.5});
    let now = json!({"id": "now", "prompt": "The", "max_tokens": 4});
    let summary = format!("--json={}", arg(&path));
    let args = [&ROOMY[..], &["--max-num-seqs", "1", &summary]].concat();
    let rows = good(&[late, early, now], &args);
    let ids: Vec<&Value> = rows.iter().map(|row| &row["id"]).collect();
    assert_eq!(ids, ["late", "early", "now"]);
    assert!(rows[0]["ttft_ms"].as_f64().expect("a time") < 600.0, "it waited for nobody");
    let summary = fs::read_to_string(&path).expect("a file");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    assert!(summary["seconds"].as_f64().expect("a time") > 0.7);
    assert_eq!(summary["most_running"], 1);
}

/// While the first runs the others come: the lower number is served before the older one.
#[test]
fn a_lower_priority_number_is_served_first_under_priority() {
    let request = |priority: i32, tokens: usize| json!({"prompt": "The", "max_tokens": tokens, "ignore_eos": true, "priority": priority});
    let lines = [request(-1, 200), request(9, 4), request(3, 4)];
    let policy = ["--max-num-seqs", "1", "--scheduling-policy", "priority"];
    let rows = good(&lines, &[&ROOMY[..], &policy].concat());
    let waited = |row: &Value| row["queue_ms"].as_f64().expect("a time");
    assert!(waited(&rows[2]) < waited(&rows[1]), "{rows:?}");
    let output = batch(&lines, &ROOMY);
    assert_eq!(output.status.code(), Some(1));
    for row in self::rows(&stdout(&output)) {
        let error = row["error"].as_str().expect("an error");
        assert!(error.ends_with("but --scheduling-policy is fcfs, which knows none"), "{error}");
    }
}

/// Five stories that outgrow [`SMALL`] together.
fn stories() -> Vec<Value> {
    let story = |i: usize| {
        let prompt = format!("Once upon a time there were {i} foxes");
        let (temperature, n) = (0.5 * (i % 3) as f32, 1 + usize::from(i == 4));
        json!({
            "prompt": prompt, "max_tokens": 280, "ignore_eos": true, "logprobs": 1,
            "temperature": temperature, "seed": i, "n": n,
        })
    };
    (0..5).map(story).collect()
}

#[test]
fn small_memory_gives_the_same_bytes_as_a_roomy_one() {
    let stories = stories();
    let roomy = good(&stories, &[&ROOMY[..], &SMALL[2..]].concat());
    assert!(roomy.iter().all(|row| count(row, "preemptions") == 0));
    for (args, costs) in [
        (&["--host-memory", "8MiB", "--preempt", "swap"], ["swapped_bytes", "recomputed_tokens"]),
        (
            &["--host-memory", "8MiB", "--preempt", "recompute"],
            ["recomputed_tokens", "swapped_bytes"],
        ),
        (&["--host-memory", "0", "--preempt", "swap"], ["recomputed_tokens", "swapped_bytes"]),
    ] {
        let small = good(&stories, &[&SMALL[..], args].concat());
        assert_eq!(without_costs(&small), without_costs(&roomy), "{args:?}");
        let sum = |field: &str| small.iter().map(|row| count(row, field)).sum::<u64>();
        assert!(sum("preemptions") > 0, "{args:?}");
        assert!(sum(costs[0]) > 0 && sum(costs[1]) == 0, "{args:?}: {small:?}");
    }
}

/// At 4.1 MB/s each way and 1,000 tokens a second a sequence of three blocks (695,808 bytes there
/// and back) costs the same either way at 170 tokens: shorter ones are computed again, longer ones
/// are copied.
#[test]
fn auto_takes_the_cheaper_way_for_each_sequence() {
    let stories: Vec<Value> = stories()
        .into_iter()
        .map(|mut story| {
            story["n"] = json!(1);
            story
        })
        .collect();
    let constants = ["--link-gbps", "0.0041", "--prefill-tokens-per-second", "1000"];
    let auto = ["--host-memory", "8MiB", "--preempt", "auto"];
    let rows = good(&stories, &[&SMALL[..], &auto, &constants].concat());
    let swapped = rows.iter().filter(|row| count(row, "swapped_bytes") > 0);
    let recomputed = rows.iter().filter(|row| count(row, "recomputed_tokens") > 0);
    let (swapped, recomputed): (Vec<_>, Vec<_>) = (swapped.collect(), recomputed.collect());
    assert!(!swapped.is_empty() && !recomputed.is_empty(), "{rows:?}");
    for row in recomputed {
        let each = count(row, "recomputed_tokens") / count(row, "preemptions");
        assert!(each < 170, "{each} tokens at a time are dearer than a copy: {row}");
    }
}

#[test]
fn limits_that_cannot_work_are_refused_at_the_start_with_one_that_would() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = folder.path().join("out.jsonl");
    for (args, error) in [
        (
            &["--max-num-batched-tokens", "63"][..],
            "--max-num-batched-tokens 63: a step must hold one cell of a prompt, 64 tokens or more",
        ),
        (
            &["--prefill-floor", "65"],
            "--prefill-floor 65: a multiple of 64 from 64 to 512, the tokens of a step",
        ),
        (
            &["--max-num-seqs", "600"],
            "--max-num-seqs 600: 1 to 512, the tokens of a step (--max-num-batched-tokens): each \
             sequence that runs takes one of them",
        ),
        (&["--max-model-len", "9000"], "--max-model-len 9000: the model's context is 8192 tokens"),
        (
            &["--device-memory", "1351680", "--max-model-len", "3522"],
            "--max-model-len 3522: --device-memory holds one sequence of 3521 tokens; this length \
             takes 1576960 bytes",
        ),
        (
            &["--device-memory", "1000"],
            "--device-memory: a memory budget of 1000 bytes holds no sequence; the smallest \
             budget that does is 450560 bytes",
        ),
        (&["--watermark=-1"], "--watermark -1: 0 to 50 percent of the pages"),
        (
            &["--checkpoint-every", "100"],
            "--checkpoint-every 100: a multiple of 64, the grid on which states are kept",
        ),
        (
            &["--no-prefix-cache", "--checkpoint-every", "64"],
            "--checkpoint-every 64: nothing to act on with --no-prefix-cache",
        ),
        (&["--audit", "101%"], "--audit 101: 0 to 100 percent of the states that are used again"),
        (&["--link-gbps", "0"], "--link-gbps 0: above 0, finite"),
        (
            &["--prefill-tokens-per-second", "nan"],
            "--prefill-tokens-per-second NaN: above 0, finite",
        ),
    ] {
        let ran = run(&[&["batch", "-i", "-", "-o", arg(&output)], args].concat());
        let said = stderr(&ran);
        assert_eq!((said, ran.status.code()), (format!("error: {error}\n"), Some(2)), "{args:?}");
        assert!(!output.exists(), "{args:?}");
    }
    for (args, named) in [
        (&["--device-memory", "lots"][..], "invalid value 'lots' for '--device-memory <SIZE>'"),
        (&["--host-memory", "101%"], "101% of the free memory; 0% to 100% can be had"),
        (&["--audit", "often"], "\"often\" is no percentage"),
        (&["--preempt", "never"], "[possible values: auto, swap, recompute]"),
        (&["--scheduling-policy", "lifo"], "[possible values: fcfs, priority, sjf, fair]"),
        (&["--json"], "--json prints to standard output, where the answers go"),
    ] {
        let ran = run(&[&["batch", "-i", "-"], args].concat());
        assert!(stderr(&ran).contains(named), "{args:?}: {}", stderr(&ran));
        assert_eq!((stdout(&ran).as_str(), ran.status.code()), ("", Some(2)), "{args:?}");
    }
    let would = ["--device-memory", "1576960", "--max-model-len", "3522"];
    let least = ["--device-memory", "450560", "--host-memory", "0"];
    assert_eq!(run(&[&["batch", "-i", "-"], &would[..]].concat()).status.code(), Some(0));
    assert_eq!(run(&[&["batch", "-i", "-"], &least[..]].concat()).status.code(), Some(0));
    let ran = run(&["batch", "-i", arg(&output)]);
    let error = format!("error: {}: No such file or directory (os error 2)\n", arg(&output));
    assert_eq!((stderr(&ran), ran.status.code()), (error, Some(1)));
}

/// What an answer may be is kept at any temperature, and what cannot be kept is an error of its line.
#[test]
fn answers_keep_to_what_their_lines_ask_for() {
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false});
    let mut lines: Vec<Value> = [
        json!({"structured_outputs": {"choice": ["yes", "no"]}}),
        json!({"structured_outputs": {"regex": "[a-z]{3}[0-9]"}, "n": 2}),
        json!({"structured_outputs": {"grammar": "start: \"a\"{4}"}}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
        json!({"response_format": {"type": "text"}, "max_tokens": 2, "min_tokens": 2}),
        json!({"structured_outputs": {"json": {"type": "nil"}}}),
        json!({"structured_outputs": {"json": {}, "regex": "a"}}),
        json!({"structured_outputs": {"xml": "a"}}),
        json!({"response_format": {"type": "yaml"}}),
        json!({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}),
        json!({"max_tokens": 1, "min_tokens": 2}),
    ]
    .into();
    for line in &mut lines {
        line["prompt"] = "Once".into();
        line["temperature"] = 1.0.into();
        line["seed"] = 5.into();
    }
    let answers = rows(&stdout(&batch(&lines, &ROOMY)));
    let text = |i: usize| answers[i]["text"].as_str().unwrap_or_default();
    assert!(["yes", "no"].contains(&text(0)), "{}", answers[0]);
    for answer in answers[1]["choices"].as_array().expect("two answers") {
        assert_eq!(answer["text"].as_str().map(str::len), Some(4), "{answer}");
    }
    assert_eq!((text(2), answers[2]["finish_reason"].as_str()), ("aaaa", Some("stop")));
    for i in [3, 4] {
        let value: Value = serde_json::from_str(text(i)).expect("JSON");
        assert!([1, 2].map(Value::from).contains(&value["n"]), "{value}");
    }
    assert_eq!(answers[5]["output_ids"].as_array().map(Vec::len), Some(2));
    for (i, error) in [
        (6, "json_schema: "),
        (7, "structured_outputs: expected one of json, regex, choice and grammar"),
        (8, "unknown field: structured_outputs.xml"),
        (9, "response_format.type: expected text, json_object or json_schema"),
        (10, "structured_outputs and response_format: only one of them may be given"),
        (11, "min_tokens is 2, allowed: 0 to 1, the most tokens to generate"),
    ] {
        let told = answers[i]["error"].as_str().unwrap_or_default();
        assert!(told.starts_with(error), "line {i}: {}", answers[i]);
    }
}

#[test]
fn limits_and_summary_go_to_standard_error_unless_quiet() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("summary.json");
    let lines = [
        json!({"prompt": "Once upon a time", "max_tokens": 6, "n": 2}),
        json!({"prompt": "The", "max_tokens": 3, "ignore_eos": true}),
    ];
    let output = batch(&lines, &[&SMALL[..2], &["--host-memory", "0"]].concat());
    // Rows in bf16, half as large: a page of half the bytes holds as many blocks.
    let device = "6 pages of 225,280 bytes, each 1 slot or 11 blocks of 64 tokens";
    assert!(stderr(&output).contains(device), "{}", stderr(&output));
    let output = batch(&lines, &[&SMALL[..], &["--host-memory", "0"]].concat());
    let said = stderr(&output);
    let said: Vec<&str> = said.lines().collect();
    assert_eq!(
        said[..5],
        [
            "sequences  up to 1,409 tokens each (what --device-memory holds for one), 256 at once, 512 \
             tokens a step",
            "device     1,351,680 bytes (1,351,680): 3 pages of 450,560 bytes, each 2 slots or 11 \
             blocks of 64 tokens",
            "host       no memory: what is pushed out is computed again",
            "together   1 of 1,409 tokens (bound by --device-memory), 2 of 353 tokens (bound by \
             --device-memory)",
            "preempt    no host memory: what is pushed out is computed again",
        ]
    );
    assert_eq!(said[5], "requests   2 (0 failed, 0 left out), 3 answers");
    assert!(said[6].starts_with("tokens     7 of prompts, 15 generated in "), "{}", said[6]);
    let starts = [
        "occupancy",
        "pages",
        "preempted  0 times",
        "transfers  0 bytes",
        "reuse      0 prompt tokens known, 0 of them not computed; ",
    ];
    for (line, start) in said[7..].iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }
    assert_eq!(said.len(), 12, "no bar without a terminal, no audits that nobody asked for");
    let json_file = format!("--json={}", arg(&path));
    let quiet = batch(&lines, &[&ROOMY[..], &["--quiet", &json_file]].concat());
    assert_eq!((stderr(&quiet).as_str(), quiet.status.code()), ("", Some(0)));
    let summary = fs::read_to_string(&path).expect("a file");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    for (field, value) in [
        ("requests", 2),
        ("failed", 0),
        ("left_out", 0),
        ("answers", 3),
        ("prompt_tokens", 7),
        ("generated_tokens", 15),
        ("most_running", 3),
        ("preemptions", 0),
        ("swapped_bytes", 0),
        ("matched_tokens", 0),
        ("cached_tokens", 0),
        ("checkpoints_evicted", 0),
        ("audits_that_differ", 0),
    ] {
        assert_eq!(summary[field], value, "{field}");
    }
    assert!(summary["mean_running"].as_f64().expect("a mean") > 1.0);
    // With the answers in a file, the summary may be all of standard output.
    let answers = folder.path().join("out.jsonl");
    let to_files = ["--output", arg(&answers), "--json", "--quiet"];
    let summary = json_of(&batch(&lines, &[&ROOMY[..], &to_files].concat()));
    assert_eq!(summary["answers"], 3);
}

/// The second answer would take minutes; the third has ended before the first, which is longer.
#[cfg(unix)]
#[test]
fn an_interrupt_writes_what_is_finished_and_ends_with_code_130() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::{Command, Stdio};
    let request = |id: &str, tokens: usize| json!({"id": id, "prompt": "The", "max_tokens": tokens, "ignore_eos": true});
    let mut later = request("later", 4);
    later["arrival_ms"] = json!(600_000);
    let lines = [request("first", 20), request("endless", 8_000), request("third", 4), later];
    let mut child = program()
        .args(["batch", "--input", "-"])
        .args(ROOMY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("a pipe");
    lines.iter().for_each(|line| writeln!(input, "{line}").expect("it reads"));
    drop(input);
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut text = String::new();
    out.read_line(&mut text).expect("an answer is written when it has ended");
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.expect("kill is there").success());
    out.read_to_string(&mut text).expect("it ends");
    let output = child.wait_with_output().expect("it ends");
    let rows = rows(&text);
    let ids: Vec<&Value> = rows.iter().map(|row| &row["id"]).collect();
    assert_eq!(ids, ["first", "third"]);
    let said = stderr(&output);
    assert!(said.contains("requests   4 (0 failed, 2 left out), 2 answers\n"), "{said}");
    assert!(said.ends_with("\nerror: interrupted\n"), "{said}");
    assert_eq!(output.status.code(), Some(130));
}

/// Five hundred requests in a memory that holds eight of the longest, with two thousand parkings
/// and more, answer as they do with all the memory they want.
#[test]
fn five_hundred_requests_in_the_memory_of_eight_have_the_answers_of_a_roomy_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, summary) = (folder.path().join("in.jsonl"), folder.path().join("summary.json"));
    let mut random = Random::new(9);
    let lines: String = (0..500).map(|i| format!("{}\n", mixed(i, &mut random))).collect();
    fs::write(&input, lines).expect("a file");
    let json_flag = format!("--json={}", arg(&summary));
    let ran = |limits: &[&str]| {
        let output = folder.path().join("out.jsonl");
        let files = ["batch", "-i", arg(&input), "-o", arg(&output), "--max-model-len", "240"];
        let ran = run(&[&files[..], limits, &["--preempt", "swap", &json_flag]].concat());
        assert_eq!(ran.status.code(), Some(0), "{}", stderr(&ran));
        let summary = fs::read_to_string(&summary).expect("a file");
        let summary: Value = serde_json::from_str(&summary).expect("it is JSON");
        (rows(&fs::read_to_string(&output).expect("a file")), summary, stderr(&ran))
    };
    let (roomy, calm, _) = ran(&["--device-memory", "256MiB", "--host-memory", "0"]);
    assert_eq!(count(&calm, "preemptions"), 0);
    // Eleven pages: eight for slots, three for blocks.
    let memory = (11 * 225_280).to_string();
    let (small, storm, told) =
        ran(&["--device-memory", &memory, "--host-memory", "16MiB", "--park-every", "1"]);
    assert!(told.contains("together   8 of 240 tokens (bound by --device-memory)"), "{told}");
    assert!(count(&storm, "parked") >= 2_000, "{storm}");
    assert_eq!(without_costs(&small), without_costs(&roomy));
    for (summary, rows) in [(calm, &roomy), (storm, &small)] {
        assert_eq!(count(&summary, "pages_still_held"), 0);
        // A fork holds a second slot in its first step, one that goes on from a kept state in its.
        let goes_on = |row: &&Value| count(row, "cached_tokens") > 0;
        let most = 40 + rows.iter().filter(goes_on).count() as u64;
        assert!(count(&summary, "second_slots") <= most, "{summary}");
    }
}

/// A request like others: short and long, greedy and sampled, one answer or two.
fn mixed(i: usize, random: &mut Random) -> Value {
    let len = [1, 5, 20, 63, 64, 65, 128, 150][random.below(8)];
    let prompt: Vec<usize> = (0..len).map(|_| random.below(3_072)).collect();
    json!({
        "id": i,
        "prompt_ids": prompt,
        "max_tokens": 10 + random.below(60),
        "n": if i.is_multiple_of(25) { 2 } else { 1 },
        "temperature": if i.is_multiple_of(3) { 0.8 } else { 0.0 },
        "seed": i,
        "logprobs": i % 2,
        "ignore_eos": true,
    })
}

/// A prompt of 150 tokens, its answer, and what follows it as a next turn.
#[test]
fn what_was_kept_is_told_and_flags_say_what_may_be_used() {
    let prompt: Vec<usize> = (0..150).map(|i| (i * 37) % 3_000).collect();
    let request = |ids: &[usize], more: Value| {
        let mut line =
            json!({"prompt_ids": ids, "max_tokens": 5, "ignore_eos": true, "logprobs": 0});
        let fields = line.as_object_mut().expect("an object");
        fields.extend(more.as_object().expect("an object").clone());
        line
    };
    let first = good(&[request(&prompt, json!({}))], &ROOMY);
    let mut turn = prompt.clone();
    let said = first[0]["output_ids"].as_array().expect("ids");
    turn.extend(said.iter().map(|id| id.as_u64().expect("an id") as usize));
    turn.push(7);
    let mut other = prompt[..100].to_vec();
    other.extend([1, 2, 3]);
    let lines = [
        request(&prompt, json!({"checkpoint_at": [70, 130]})),
        request(&prompt, json!({})),
        request(&turn, json!({})),
        request(&other, json!({})),
        request(&prompt, json!({"cache_salt": "a"})),
        request(&prompt, json!({"cache_salt": "a"})),
    ];
    // One after the other: each finds what those before it have left.
    let serial = ["--max-num-seqs", "1"];
    let ran = |flags: &[&str]| good(&lines, &[&ROOMY[..], &serial, flags].concat());
    let reuse = |rows: &[Value]| -> Vec<Value> {
        let fields = ["matched_tokens", "cached_tokens", "replayed_tokens", "miss_reason"];
        rows.iter().map(|row| fields.iter().map(|field| row[*field].clone()).collect()).collect()
    };
    let cold = json!([0, 0, 0, null]);
    let kept = json!([150, 128, 22, null]);
    let turned = |cached: u64, reason: Value| json!([154, cached, 154 - cached, reason]);
    // The mark at 70 was kept at 64.
    let marked = json!([100, 64, 36, null]);
    let expected = [&cold, &kept, &turned(154, json!(null)), &marked, &cold, &kept];
    let rows = ran(&["--audit", "100%"]);
    assert_eq!(reuse(&rows).iter().collect::<Vec<_>>(), expected);
    let exact = ran(&["--exact-prefix", "--audit=100"]);
    let not_exact = turned(128, json!("not_exact"));
    assert_eq!(
        reuse(&exact).iter().collect::<Vec<_>>(),
        [&cold, &kept, &not_exact, &marked, &cold, &kept]
    );
    let none = ran(&["--no-prefix-cache"]);
    assert!(reuse(&none).iter().all(|row| *row == cold), "{none:?}");
    assert_eq!(without_costs(&exact), without_costs(&none));
    assert_eq!(without_costs(&rows[..2]), without_costs(&none[..2]));
    // Without the mark a state is kept at 64 where all are.
    let plain = [request(&prompt, json!({})), request(&other, json!({}))];
    let every = good(&plain, &[&ROOMY[..], &serial, &["--checkpoint-every", "64"]].concat());
    assert_eq!(reuse(&every)[1], marked);
}

/// The second prompt draws its one token in a step that leaves no budget for an audit.
#[test]
fn an_audit_comes_to_its_verdict_after_the_last_answer() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("summary.json");
    let prompt: Vec<usize> = (0..192).map(|i| (i * 37) % 3_000).collect();
    let line = json!({"prompt_ids": prompt, "max_tokens": 1});
    let flags = ["--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--audit", "100%"];
    let json_file = format!("--json={}", arg(&path));
    let ran = batch(&[line.clone(), line], &[&ROOMY[..], &flags, &[&json_file]].concat());
    assert_eq!(ran.status.code(), Some(0), "{}", stderr(&ran));
    let summary = fs::read_to_string(&path).expect("a file");
    let summary: Value = serde_json::from_str(&summary).expect("JSON");
    assert_eq!((&summary["audits"], &summary["audits_that_differ"]), (&json!(1), &json!(0)));
}

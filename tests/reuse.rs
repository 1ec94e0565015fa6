//! `deltapool bench reuse`: the tokens of its workloads, and the program as a user's shell sees it.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use deltapool::simulate::{NAMED, Outline, Workload};
use serde_json::Value;
use support::program::{arg, json, run, stderr, stdout};

/// A trace in which prompts share blocks, one answers no token, a chat goes on twice, a block that
/// was seen elsewhere comes late in one prompt and first in another, and time goes back.
const TRACE: &str = r#"{"timestamp": 0, "input_length": 1300, "output_length": 90, "hash_ids": [0, 1, 2]}
{"timestamp": 27, "input_length": 700, "output_length": 0, "hash_ids": [0, 3]}

{"timestamp": 5, "input_length": 2100, "output_length": 50, "hash_ids": [0, 1, 4, 5, 6]}
{"timestamp": 30, "input_length": 2100, "output_length": 50, "hash_ids": [0, 1, 7, 5, 8]}
{"timestamp": 31, "input_length": 2060, "output_length": 7, "hash_ids": [0, 1, 4, 5, 9]}
{"timestamp": 31, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}
{"timestamp": 31, "input_length": 1500, "output_length": 7, "hash_ids": [10, 11, 12]}
{"timestamp": 31, "input_length": 3072, "output_length": 7, "hash_ids": [0, 1, 11, 13, 14, 15]}
{"timestamp": 31, "input_length": 3072, "output_length": 7, "hash_ids": [0, 1, 4, 5, 16, 17]}
"#;

fn write(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("trace.jsonl");
    fs::write(&path, text).expect("a file");
    path
}

/// A line of a trace.
fn line(input: usize, output: usize, ids: &[u64]) -> String {
    format!("{{\"input_length\": {input}, \"output_length\": {output}, \"hash_ids\": {ids:?}}}\n")
}

/// FNV-1a over token ids.
fn hash(tokens: &[u32]) -> u64 {
    let step = |hash: u64, token: &u32| (hash ^ u64::from(*token)).wrapping_mul(0x100_0000_01b3);
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Tokens of the prompt, their hash, tokens of the answer, their hash, ideal tokens.
fn figures(request: &Outline) -> (usize, u64, usize, u64, usize) {
    let (prompt, answer) = (request.prompt.to_tokens(), request.answer.to_tokens());
    assert_eq!((prompt.len(), answer.len()), (request.prompt.len(), request.answer.len()));
    (prompt.len(), hash(&prompt), answer.len(), hash(&answer), request.ideal_tokens)
}

/// Values of an independent implementation (the harness that measured the peers).
#[test]
fn a_trace_has_the_tokens_that_the_peers_were_measured_with() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = write(folder.path(), TRACE);
    let plain = [
        (1300, 12967522793640835245, 90, 4662011226661193498, 0),
        (700, 13099845279852820367, 1, 12635396640043242478, 512),
        (2100, 6923529511655446097, 50, 17783640245481312073, 1024),
        (2100, 8374316385119763635, 50, 4880484599238004404, 1024),
        (2060, 1059220481626604956, 7, 2177535441373954590, 2048),
        (1024, 2704258265678834562, 7, 4711291185082094056, 1023),
        (1500, 5657898020045306228, 7, 6229619924273954827, 0),
        (3072, 2844611227608938677, 7, 12776504125840762202, 1024),
        (3072, 1157863627555816907, 7, 13130020704415687243, 2048),
    ];
    let chat = [
        (1300, 141310688465367880, 90, 4662011226661193498, 0),
        (700, 17947198741185274771, 1, 12635396640043242478, 512),
        (2100, 916109430867140089, 50, 17783640245481312073, 1389),
        (2100, 12170134135210707979, 50, 4880484599238004404, 1024),
        (2060, 3875792312158250351, 7, 2177535441373954590, 2059),
        (1024, 1550978762269450837, 7, 4711291185082094056, 1023),
        (1500, 9053497095922307996, 7, 6229619924273954827, 0),
        (3072, 15357952869539170088, 7, 12776504125840762202, 1024),
        (3072, 7764677245850780108, 7, 13130020704415687243, 2066),
    ];
    for (is_chat, expected) in [(false, plain), (true, chat)] {
        let workload = Workload::of_trace(&path, is_chat, None).expect("a sound trace");
        let got: Vec<_> = workload.requests.iter().map(figures).collect();
        assert_eq!(got, expected, "chat: {is_chat}");
        let first = Workload::of_trace(&path, is_chat, Some(3)).expect("a sound trace");
        assert_eq!(first.requests.len(), 3);
        let places: Vec<&str> = first.requests.iter().map(|r| r.place.as_str()).collect();
        assert!(places[2].ends_with("trace.jsonl:4"), "{places:?}");
    }
}

/// Of each workload its requests, its tokens, those an earlier request had, and its second prompt.
#[test]
fn the_named_workloads_are_those_that_the_peers_were_measured_with() {
    let table = [
        ("share1500+700x64", 64, 140_800, 94_500, 17567606787177881367),
        ("share1600+600x64", 64, 140_800, 100_800, 13567450542518772958),
        ("share2000+200x64", 64, 140_800, 126_000, 4826572969355932312),
        ("chat32x10", 320, 907_200, 867_912, 6252047801470936127),
        ("chat32x10_seq", 320, 907_200, 867_912, 13775763849795383593),
        ("agents16x8", 128, 1_347_200, 1_232_288, 17879511305853266218),
    ];
    for (name, requests, prompt_tokens, ideal_tokens, second) in table {
        let workload = Workload::named(name, None).expect("a workload");
        let tokens = (workload.prompt_tokens(), workload.ideal_tokens());
        assert_eq!((workload.requests.len(), tokens), (requests, (prompt_tokens, ideal_tokens)));
        assert_eq!(figures(&workload.requests[1]).1, second, "{name}");
        assert!(!workload.is_burst);
    }
    let burst = Workload::named("burst32", None).expect("a workload");
    assert_eq!((burst.requests.len(), burst.is_burst), (32, true));
    assert_eq!((burst.prompt_tokens(), burst.ideal_tokens()), (64_000, 31 * 1_999));
    assert_eq!(NAMED.len(), table.len() + 1);
    assert!(NAMED.iter().all(|(name, _)| Workload::named(name, Some(1)).is_some()));
    assert!(Workload::named("chat", None).is_none());
}

fn bench(args: &[&str]) -> Value {
    json(&run(&[&["bench", "reuse", "--json"], args].concat()))
}

fn count(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} of {value}"))
}

#[test]
fn every_request_of_a_trace_is_run_and_counted_in_its_half() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = write(folder.path(), TRACE);
    for (chat, ideal) in [(false, 8703), (true, 9097)] {
        let flags = if chat { &["--chat"][..] } else { &[] };
        let report = bench(&[&["--trace", arg(&path), "--device-memory", "2GB"], flags].concat());
        assert_eq!((count(&report, "requests"), count(&report, "prompt_tokens")), (9, 16_928));
        assert_eq!(count(&report, "ideal_tokens"), ideal);
        let (first, second) = (&report["first_half"], &report["second_half"]);
        assert_eq!((count(first, "requests"), count(second, "requests")), (4, 5));
        assert_eq!(count(first, "prompt_tokens"), 1300 + 700 + 2100 + 2100);
        for field in ["prompt_tokens", "cached_tokens", "ideal_tokens", "hits"] {
            assert_eq!(
                count(first, field) + count(second, field),
                count(&report, field),
                "{field}"
            );
        }
        assert!(count(&report, "cached_tokens") <= ideal, "{report}");
        // A step for each token of an answer, at least.
        assert!(count(&report, "steps") >= 90 + 1 + 50 + 50 + 5 * 7, "{report}");
        assert_eq!(report["workload"].as_str().map(|name| name.ends_with("+chat")), Some(chat));
    }
}

/// Twelve requests at a time where the device holds the prompts of twelve, and not their answers.
#[test]
fn requests_that_are_open_together_push_each_other_out_and_all_end() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let line = |i: u64| line(720, 350, &[2 * i, 2 * i + 1]);
    let trace = write(folder.path(), &(0..24).map(line).collect::<String>());
    // 12 slots take 12 pages, 12 blocks of each prompt 2; 5 blocks of each answer find none.
    let small = ["--trace", arg(&trace), "--device-memory", "607961088"];
    let (host, open) = (["--host-memory", "2GB"], ["--concurrency", "12"]);
    let alone = bench(&small);
    let together = bench(&[&small[..], &host, &open].concat());
    for report in [&alone, &together] {
        assert_eq!((count(report, "requests"), count(report, "prompt_tokens")), (24, 24 * 720));
    }
    assert_eq!(count(&alone, "preemptions"), 0);
    assert_eq!((&alone["concurrency"], &together["concurrency"]), (&1.into(), &12.into()));
    assert!(count(&together, "preemptions") > 0, "{together}");
    assert!(count(&together, "transfers_out") > 0, "{together}");
    assert!(count(&together, "swapped_bytes") > 0, "{together}");
    assert!(count(&together, "steps") < count(&alone, "steps"), "{together}");
    let burst = bench(&["--workload", "burst32"]);
    assert_eq!((count(&burst, "requests"), &burst["concurrency"]), (32, &Value::Null));
    let in_turn = bench(&["--workload", "burst32", "--concurrency", "2"]);
    assert_eq!(in_turn["concurrency"], 2);
    assert!(count(&in_turn, "steps") > count(&burst, "steps"), "{in_turn}");
}

#[test]
fn the_table_names_the_sizes_and_the_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("report.json");
    let target = format!("--json={}", arg(&file));
    let output =
        run(&["bench", "reuse", "--workload", "share1500+700x64", "--limit", "5", &target]);
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    let table = stdout(&output);
    for part in [
        "workload   share1500+700x64\n",
        "sizes      Kimi-Linear-48B: slot 43,422,208 bytes, block 516,096 bytes (state f32, all",
        "device     35,000,000,000 bytes, 805 pages of 43,425,792 (1 slot or 84 blocks), ",
        "host       no memory\n",
        "policy     default, grid 64, 1 open at a time\n",
        "             requests  prompt tokens  cached %  ideal %  of ideal %  hits\n",
        "\nfirst half          2          4,400 ",
        "\nsecond half         3          6,600 ",
    ] {
        assert!(table.contains(part), "{part}\n{table}");
    }
    assert!(table.lines().count() <= 24, "one screen:\n{table}");
    let report = fs::read_to_string(&file).expect("a file");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(count(&report, "requests"), 5);
    // A model whose slots have no bytes, and as much memory as it takes.
    let llama = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs/llama-3.1-8b.json");
    let unlimited = ["--device-memory", "unlimited", "--policy", "every=640+end+branch"];
    let grid = ["--grid", "128", "--workload", "chat32x10", "--limit", "40"];
    let report = bench(&[&["--config", arg(&llama)], &unlimited[..], &grid].concat());
    assert_eq!(count(&report["model"], "slot_bytes"), 0);
    assert_eq!(count(&report["model"], "block_bytes"), 64 * 131_072);
    assert_eq!((&report["device"]["memory_bytes"], count(&report, "requests")), (&Value::Null, 40));
    assert_eq!(report["policy"], "every=640+end+branch");
    assert_eq!(count(&report, "grid_tokens"), 128);
}

/// Lines that make no sense as the second of a trace, and what is said of them.
#[test]
fn a_broken_line_of_a_trace_is_named_with_its_key() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let good = r#"{"input_length": 5, "output_length": 5, "hash_ids": [0]}"#;
    let table = [
        ("nonsense", "not a JSON object: expected ident at line 1 column 2"),
        ("[1]", "not a JSON object: invalid type: sequence, expected a map at line 1 column 0"),
        (r#"{"output_length": 5, "hash_ids": [0]}"#, "input_length is missing"),
        (r#"{"input_length": 5, "hash_ids": [0]}"#, "output_length is missing"),
        (r#"{"input_length": 5, "output_length": 5}"#, "hash_ids is missing"),
        (
            r#"{"input_length": "5", "output_length": 5, "hash_ids": [0]}"#,
            "input_length is \"5\", allowed: 1 to 16777216",
        ),
        (
            r#"{"input_length": 0, "output_length": 5, "hash_ids": []}"#,
            "input_length is 0, allowed: 1 to 16777216",
        ),
        (
            r#"{"input_length": 5, "output_length": -5, "hash_ids": [0]}"#,
            "output_length is -5, allowed: 0 to 16777216",
        ),
        (
            r#"{"input_length": 5, "output_length": 5.5, "hash_ids": [0]}"#,
            "output_length is 5.5, allowed: 0 to 16777216",
        ),
        (r#"{"input_length": 5, "output_length": 5, "hash_ids": 0}"#, "hash_ids is not a list"),
        (
            r#"{"input_length": 5, "output_length": 5, "hash_ids": [-1]}"#,
            "hash_ids has -1, which is no block's id: 0 to 999999999",
        ),
        (
            r#"{"input_length": 1025, "output_length": 5, "hash_ids": [0, 1]}"#,
            "hash_ids has 2 blocks, but input_length 1025 takes 3 of 512 tokens",
        ),
    ];
    for (line, said) in table {
        let path = write(folder.path(), &format!("{good}\n{line}\n{good}\n"));
        let output = run(&["bench", "reuse", "--trace", arg(&path)]);
        let expected = format!("error: {}:2: {said}\n", arg(&path));
        assert_eq!((stderr(&output), output.status.code()), (expected, Some(2)));
        // Nobody asks for that line.
        let output = run(&["bench", "reuse", "--trace", arg(&path), "--limit", "1"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    let path = write(folder.path(), "\n\n");
    let output = run(&["bench", "reuse", "--trace", arg(&path)]);
    assert_eq!(stderr(&output), format!("error: {}: the trace has no request\n", arg(&path)));
}

/// Arguments, exit code and the whole text on standard error.
#[test]
fn what_cannot_be_replayed_says_why() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let trace = write(folder.path(), TRACE);
    let config = folder.path().join("config.json");
    fs::write(&config, "{\"model_type\": \"gpt2\"}").expect("a file");
    let long = folder.path().join("long.jsonl");
    let ids: Vec<u64> = (0..12).collect();
    fs::write(&long, line(5, 50, &[0]) + &line(6000, 50, &ids)).expect("a file");
    let missing = folder.path().join("missing");
    let (trace, config, missing) = (arg(&trace), arg(&config), arg(&missing));
    let long = arg(&long);
    let not_there = format!("error: {missing}: No such file or directory (os error 2)\n");
    let too_long = format!(
        "error: {long}:2: 6050 tokens, prompt and answer together, do not fit: --device-memory \
         86851584 holds one sequence of 5377 tokens\n"
    );
    let family = format!("error: {config}: gpt2 is not supported; supported: ");
    let table: &[(&[&str], i32, &str)] = &[
        (&["--trace", missing], 1, &not_there),
        (&["--workload", "burst32", "--config", missing], 1, &not_there),
        (&["--workload", "burst32", "--config", config], 3, &family),
        (
            &["--workload", "burst32", "--grid", "0"],
            2,
            "error: --grid 0: a multiple of 64, 64 or more\n",
        ),
        (
            &["--workload", "burst32", "--grid", "65"],
            2,
            "error: --grid 65: a multiple of 64, 64 or more\n",
        ),
        (&["--workload", "burst32", "--limit", "0"], 2, "error: --limit 0: 1 or more\n"),
        (
            &["--workload", "burst32", "--concurrency", "0"],
            2,
            "error: --concurrency 0: 1 or more\n",
        ),
        (
            &["--workload", "burst32", "--policy", "every=100"],
            2,
            "error: --policy every=100: states are kept at multiples of the grid, 64 tokens\n",
        ),
        (
            &["--workload", "burst32", "--device-memory", "1MB"],
            2,
            "error: --device-memory: a memory budget of 1000000 bytes holds no sequence; the smallest budget that does is 86851584 bytes\n",
        ),
        (
            &["--workload", "burst32", "--host-memory", "1MB"],
            2,
            "error: --host-memory: a memory budget of 1000000 bytes holds no sequence; the smallest budget that does is 86851584 bytes\n",
        ),
        (&["--trace", long, "--device-memory", "86851584"], 2, &too_long),
    ];
    for (args, code, text) in table {
        let output = run(&[&["bench", "reuse"], *args].concat());
        assert!(stderr(&output).starts_with(text), "{args:?}: {}", stderr(&output));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(*code), ""), "{args:?}");
    }
    // What the argument parser itself refuses.
    for (args, named) in [
        (&["--workload", "chat"][..], "invalid value 'chat' for '--workload <NAME>'"),
        (&[], "<--trace <FILE>|--workload <NAME>>"),
        (&["--trace", trace, "--workload", "burst32"], "cannot be used with"),
        (&["--workload", "burst32", "--chat"], "'--workload <NAME>' cannot be used with '--chat'"),
        (&["--workload", "burst32", "--host-memory", "unlimited"], "only --device-memory can be"),
        (&["--workload", "burst32", "--device-memory", "some"], "\"some\" is no unit of bytes"),
        (&["--workload", "burst32", "--policy", "best"], "no such policy; there are default, end"),
        (&["--workload", "burst32", "--policy", "every=0"], "is no number of tokens above 0"),
    ] {
        let output = run(&[&["bench", "reuse"], args].concat());
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{args:?}");
    }
}

#[test]
fn the_help_lists_the_workloads() {
    let help = stdout(&run(&["bench", "reuse", "--help"]));
    for (name, what) in NAMED {
        assert!(help.contains(name) && help.contains(what), "{name}");
    }
    assert!(help.contains("every=N+end+branch"), "{help}");
}

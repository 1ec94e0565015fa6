//! The server's command line: where settings come from, and other engines' flags.

use std::fs;

use crate::program::{arg, run, stderr, stdout};
use crate::start::serve;

/// The line of a setting in what `--print-config` prints.
fn setting<'a>(printed: &'a str, name: &str) -> &'a str {
    let is_it = |line: &&str| line.trim_start_matches("# ").split([' ', ',']).next() == Some(name);
    printed.lines().find(is_it).unwrap_or_else(|| panic!("no {name} in\n{printed}"))
}

#[test]
fn a_flag_wins_over_the_environment_which_wins_over_the_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("serve.toml");
    let text = "port = 1\nmax-num-seqs = 2\nmax_model_len = \"1K\"\nserved-model-name = [\"a\", \"b\"]\n\
                no-ui = true\nstrict-params = true\n[serve]\nwatermark = 2.5\nhost = \"::1\"\n";
    fs::write(&file, text).expect("a file");
    let args = ["--config", arg(&file), "-p", "3", "--print-config", "--strict-params=false"];
    let variables = [
        ("DELTAPOOL_PORT", "4"),
        ("DELTAPOOL_MAX_NUM_SEQS", "5"),
        ("DELTAPOOL_NO_UI", "0"),
        ("DELTAPOOL_API_KEY", "secret"),
    ];
    let output = serve(&args, &variables);
    assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
    let printed = stdout(&output);
    for (name, value, source) in [
        ("port", "3", "flag"),
        ("strict-params", "false", "flag"),
        ("max-num-seqs", "5", "environment, DELTAPOOL_MAX_NUM_SEQS"),
        ("no-ui", "false", "environment, DELTAPOOL_NO_UI"),
        ("max-model-len", "\"1K\"", "file"),
        ("served-model-name", "[\"a\", \"b\"]", "file"),
        ("watermark", "\"2.5\"", "file"),
        ("host", "\"::1\"", "file"),
        ("max-body", "\"32MiB\"", "default"),
    ] {
        let line = setting(&printed, name);
        let (left, from) = line.split_once(" # ").expect("a source");
        assert_eq!((left.trim_end(), from), (format!("{name} = {value}").as_str(), source));
    }
    assert!(!printed.contains("secret"), "{printed}");
    assert!(setting(&printed, "api-key").contains("environment"), "{printed}");
    assert!(setting(&printed, "model").ends_with("default"), "{printed}");

    // What is printed can be read again, and says the same.
    let again = folder.path().join("again.toml");
    fs::write(&again, &printed).expect("a file");
    let second = stdout(&serve(&["--config", arg(&again), "--print-config"], &[]));
    for (before, after) in printed.lines().zip(second.lines()) {
        let value = |line: &str| line.split(" # ").next().map(|left| left.trim_end().to_owned());
        if !before.starts_with("# api-key") {
            assert_eq!(value(before), value(after));
        }
    }
}

#[test]
fn what_is_wrong_is_told_with_its_place_and_the_code_of_wrong_usage() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("serve.toml");
    let path = arg(&file);
    let with_file = ["--config", path];
    let in_file = |text: &str| format!("error: {path}: {text}");
    type Case<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)], String);
    let cases: &[Case] = &[
        (
            "prot = 1\ncontext-length = 2",
            &with_file,
            &[],
            in_file("unknown key context-length: use --max-model-len; unknown key prot; the nearest is port"),
        ),
        ("port = 1\n[serve]\nport = 2", &with_file, &[], in_file("port is there twice")),
        ("port = [1]", &with_file, &[], in_file("port: takes one value")),
        ("config = \"x\"", &with_file, &[], in_file("unknown key config; the nearest is")),
        ("port = ", &with_file, &[], in_file("TOML parse error at line 1")),
        ("port = 70000", &with_file, &[], in_file("invalid value '70000' for '--port <PORT>'")),
        (
            "",
            &[],
            &[("DELTAPOOL_PORT", "tcp://10.0.0.1:8000")],
            "error: environment variable DELTAPOOL_PORT: invalid value 'tcp://10.0.0.1:8000'".into(),
        ),
        ("", &[], &[("DELTAPOOL_API_KEY", "")], "error: environment variable DELTAPOOL_API_KEY: a value is required".into()),
        ("", &["--port", "x"], &[], "error: invalid value 'x' for '--port <PORT>'".into()),
        ("", &["--json"], &[], "error: unexpected argument '--json'".into()),
        ("", &["a", "--model", "b"], &[], "error: the model is named twice".into()),
        ("", &["--uds", "s", "--port", "1"], &[], "error: --uds is instead of --host and --port".into()),
        ("", &["--uds", "s", "--port-file", "p"], &[], "error: --port-file: a socket of --uds has no port".into()),
        ("", &["--api-key-file", path], &[], format!("error: --api-key-file {path}: no key in it")),
        ("", &["--cors-origin", "example.org"], &[], "error: invalid value 'example.org' for '--cors-origin".into()),
        ("", &["--shutdown-timeout", "-1"], &[], "error: ".into()),
        ("", &["--max-logprobs", "21"], &[], "error: invalid value '21' for '--max-logprobs <N>': 0 to 20".into()),
        ("", &["--tensor-parallel-size", "2"], &[], "error: --tensor-parallel-size 2 is not supported: a model is computed by one process; use --threads".into()),
        ("", &["--enable-lora"], &[], "error: --enable-lora is no flag here: no adapters are served".into()),
        ("", &["--gpu-memory-utilization=0.9"], &[], "error: --gpu-memory-utilization is no flag here: use --device-memory".into()),
        ("", &["--context-length", "4096"], &[], "error: --context-length is no flag here: use --max-model-len".into()),
        ("", &["-np", "4"], &[], "error: -np is no flag here: use --max-num-seqs".into()),
        ("", &["-c", "4096"], &[], "error: -c is no flag here: use --max-model-len".into()),
    ];
    for (text, args, variables, message) in cases {
        fs::write(&file, text).expect("a file");
        let output = serve(args, variables);
        let said = stderr(&output);
        assert!(said.starts_with(message.as_str()), "{args:?}: {said}");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
    }
}

#[test]
fn flags_of_vllm_that_mean_the_same_or_nothing_are_taken() {
    let args = [
        "--tensor-parallel-size",
        "1",
        "--trust-remote-code",
        "--enforce-eager",
        "--disable-log-requests",
        "--enable-auto-tool-choice",
        "--max_num_seqs=7",
        "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes",
        "64MiB",
        "-a",
        "name",
        "--print-config",
    ];
    let printed = stdout(&serve(&args, &[]));
    for line in [
        "max-num-seqs = 7",
        "no-prefix-cache = true",
        "device-memory = \"64MiB\"",
        "served-model-name = [\"name\"]",
    ] {
        let name = line.split(' ').next().expect("a name");
        assert!(setting(&printed, name).starts_with(line), "{printed}");
    }
}

/// The program's help lists no flag of another engine, and each of ours with a text.
#[test]
fn help_names_every_flag_and_the_exit_codes() {
    let help = stdout(&run(&["serve", "--help"]));
    for text in
        ["--uds <PATH>", "--max-num-queued-reqs <N>", "[default: 1024]", "75 answers cut short"]
    {
        assert!(help.contains(text), "{text} is not in\n{help}");
    }
    for text in ["--json", "--enable-lora", "--gpu-memory-utilization"] {
        assert!(!help.contains(text), "{text} is in\n{help}");
    }
}

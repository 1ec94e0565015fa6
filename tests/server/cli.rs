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
    let in_file = format!("file, {}", file.display());
    for (name, value, source) in [
        ("port", "3", "flag"),
        ("strict-params", "false", "flag"),
        ("max-num-seqs", "5", "environment, DELTAPOOL_MAX_NUM_SEQS"),
        ("no-ui", "false", "environment, DELTAPOOL_NO_UI"),
        ("max-model-len", "\"1K\"", in_file.as_str()),
        ("served-model-name", "[\"a\", \"b\"]", &in_file),
        ("watermark", "\"2.5\"", &in_file),
        ("host", "\"::1\"", &in_file),
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
        ("config = \"x\"", &with_file, &[], in_file("config is for the command line, not for a file")),
        ("foo = 1", &with_file, &[], in_file("unknown key foo; the keys are the flags of serve --help")),
        ("tensor-parallel-size = 2", &with_file, &[], in_file("tensor-parallel-size = 2 is not supported: a model")),
        ("max-num-seqs = 0", &with_file, &[], in_file("--max-num-seqs 0: 1 to 512")),
        ("", &[], &[("DELTAPOOL_THREADS", "0")], "error: environment variable DELTAPOOL_THREADS: --threads 0: 1 to".into()),
        ("", &["--max-num-seqs", "0", "--print-config"], &[], "error: --max-num-seqs 0: 1 to 512".into()),
        ("", &["--uds", "s", "--port", "1", "--print-config"], &[], "error: --uds is instead of --host and --port".into()),
        ("", &["--exact-prefix", "--no-prefix-cache"], &[], "error: --exact-prefix: nothing to act on".into()),
        ("", &["--device-memory", "0.9"], &[], "error: invalid value '0.9' for '--device-memory <SIZE>': a part of what is free is a percentage: 90%".into()),
        ("", &["--allowed-host", "foo.example:80"], &[], "error: invalid value 'foo.example:80' for '--allowed-host <HOST>': a name or an address alone".into()),
        ("", &["--port", "-1"], &[], "error: invalid value '-1' for '--port <PORT>'".into()),
        ("", &["--header-timeout", "-1"], &[], "error: invalid value '-1' for '--header-timeout <SECONDS>'".into()),
        ("", &["--stall-timeout", "0"], &[], "error: invalid value '0' for '--stall-timeout <SECONDS>': above 0".into()),
        ("", &["--header-timeout", "0"], &[], "error: invalid value '0' for '--header-timeout <SECONDS>': above 0".into()),
        ("", &["--body-timeout", "0"], &[], "error: invalid value '0' for '--body-timeout <SECONDS>': above 0".into()),
        ("", &["--write-timeout", "0"], &[], "error: invalid value '0' for '--write-timeout <SECONDS>': above 0".into()),
        ("", &["--max-connections", "0"], &[], "error: invalid value '0' for '--max-connections <N>': a whole number, 1 or more".into()),
        ("", &["--tensor-parallel-size", "--print-config"], &[], "error: --tensor-parallel-size lacks its value".into()),
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
    // A file that is not there is no wrong usage, but it is named by its setting all the same.
    fs::write(&file, "api-key-file = \"/nowhere/k\"").expect("a file");
    let output = serve(&with_file, &[]);
    let said = stderr(&output);
    assert!(said.starts_with(&in_file("--api-key-file /nowhere/k: No such file")), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

/// Where a stronger place named a socket, the address of a weaker one, or of nobody, once stood
/// beside it as if both were wanted.
#[test]
fn what_is_printed_of_a_socket_can_be_read_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let again = folder.path().join("again.toml");
    for (args, variables, kept, overruled) in [
        (&["--uds", "x"][..], &[][..], "uds = \"x\"", "# port = 8000"),
        (&["--uds", "x"], &[("DELTAPOOL_PORT", "1")], "uds = \"x\"", "# port = 1"),
        (&["--port", "1"], &[("DELTAPOOL_UDS", "x")], "port = 1", "# uds = \"x\""),
    ] {
        let printed = stdout(&serve(&[args, &["--print-config"]].concat(), variables));
        fs::write(&again, &printed).expect("a file");
        let output = serve(&["--config", arg(&again), "--print-config"], &[]);
        assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)), "{printed}");
        for text in [&printed, &stdout(&output)] {
            assert!(text.lines().any(|line| line.starts_with(kept)), "{text}");
        }
        assert!(printed.lines().any(|line| line.starts_with(overruled)), "{printed}");
    }
}

#[test]
fn keys_of_other_engines_are_what_their_flags_are() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("serve.toml");
    let text = "model-path = \"/models/x\"\ntensor-parallel-size = 1\ntrust_remote_code = true\n";
    fs::write(&file, text).expect("a file");
    let output = serve(&["--config", arg(&file), "--print-config"], &[]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(setting(&stdout(&output), "model").starts_with("model = \"/models/x\""));
    for note in ["tensor-parallel-size = 1 is ignored: ", "trust_remote_code is ignored: "] {
        assert!(said.contains(note), "{said}");
    }
}

#[test]
fn a_switch_that_is_given_its_value_apart_is_told_how() {
    for (folder, advice) in [("meta-llama/X", ""), ("false", "; a switch takes its value behind =")]
    {
        let output = serve(&["--port", "0", "--no-ui", folder], &[]);
        let said = stderr(&output);
        let start = format!("error: there is no folder {folder}: nothing is downloaded");
        assert!(said.starts_with(&start) && said.contains(advice), "{said}");
        assert_eq!(output.status.code(), Some(3));
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

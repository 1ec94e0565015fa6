//! The program as a user's shell sees it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub fn program() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("deltapool"));
    command.env_remove("DELTAPOOL_ISA").stdin(Stdio::null());
    command
}

pub fn run(args: &[&str]) -> Output {
    program().args(args).output().expect("the program starts")
}

/// Runs with `input` on standard input.
pub fn run_with(input: &[u8], args: &[&str]) -> Output {
    let mut command = program();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    child.stdin.take().expect("a pipe").write_all(input).expect("it reads");
    child.wait_with_output().expect("it ends")
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("output is text")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("errors are text")
}

pub fn json(output: &Output) -> Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "one object on one line");
    serde_json::from_str(&text).expect("it is JSON")
}

/// The project's own model folders.
pub fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(name)
}

pub fn arg(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

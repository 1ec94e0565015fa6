//! `deltapool chat`, from a pipe and at a terminal.
#![cfg(feature = "embedded-model")]

#[path = "support/program.rs"]
#[allow(dead_code)] // it serves the tests of other commands too
mod program;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use program::{arg, program, run, run_with, stderr, stdout};

/// A template whose text only grows from turn to turn.
const TURNS: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
                     {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

fn template() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("template.jinja");
    fs::write(&path, TURNS).expect("a file");
    (folder, path)
}

/// The numbers behind `name` in what `/stats` and the like said, in order.
fn numbers(said: &str, name: &str) -> Vec<usize> {
    let words: Vec<&str> = said.split_whitespace().collect();
    let pairs = words.windows(2).filter(|pair| pair[0] == name);
    pairs.map(|pair| pair[1].parse().expect("a number")).collect()
}

#[test]
fn each_turn_goes_on_from_the_end_of_the_last_answer() {
    let (_folder, template) = template();
    let args = ["chat", "-n", "30", "--chat-template", arg(&template), "--system", "Be kind."];
    let turns = b"Who lives there?\n/stats\nAnd who else?\n/stats\nWhat then?\n/stats\n";
    let output = run_with(turns, &args);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output).matches('\n').count().min(3), 3, "a line for each answer");
    let said = stderr(&output);
    let (prompts, cached) = (numbers(&said, "prompt_tokens"), numbers(&said, "cached_tokens"));
    let generated = numbers(&said, "generated_tokens");
    assert_eq!((prompts.len(), generated.len(), cached[0]), (3, 3, 0), "{said}");
    for turn in 1..3 {
        // All that the turn before it had computed: its last token was drawn and not yet read.
        assert_eq!(cached[turn], prompts[turn - 1] + generated[turn - 1] - 1, "{said}");
    }
}

/// The built-in template puts an empty line between question and answer, which is not there when
/// the answer is drawn; conversations in it once began anew with every turn.
#[test]
fn each_turn_goes_on_in_the_built_in_template_too() {
    let turns = b"Once upon a time\n/stats\nAnd then?\n/stats\nWhat then?\n/stats\n";
    let output = run_with(turns, &["chat", "-n", "40"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stderr(&output);
    let (prompts, cached) = (numbers(&said, "prompt_tokens"), numbers(&said, "cached_tokens"));
    let generated = numbers(&said, "generated_tokens");
    assert_eq!((prompts.len(), cached[0]), (3, 0), "{said}");
    for turn in 1..3 {
        // One that ended by itself drew a last token that is no part of it.
        let known = prompts[turn - 1] + generated[turn - 1];
        assert!((known - 2..known).contains(&cached[turn]), "{said}");
    }
}

#[test]
fn the_first_answer_is_that_of_generate_and_history_begins_again() {
    let text = "Once upon a time";
    let alone = stdout(&run(&["generate", "--chat", text, "-n", "12"]));
    let lines = format!(
        "{text}\n/reset\n{text}\n/system x\n/system\n{text}\n//{text}\n\n/quit\nnot read\n"
    );
    let output = run_with(lines.as_bytes(), &["chat", "-n", "12"]);
    let said = stdout(&output);
    let answers: Vec<&str> = said.strip_suffix('\n').expect("a line").split('\n').collect();
    assert!(answers.len() >= 4, "{answers:?}");
    assert_eq!(answers[..3], [alone.as_str(); 3]);
    assert_eq!((stderr(&output).as_str(), output.status.code()), ("", Some(0)));
}

#[test]
fn commands_speak_on_standard_error_and_bad_arguments_are_told_at_once() {
    let output = run_with(b"/help\n/stats\n/nonsense\n", &["chat"]);
    assert_eq!((stdout(&output).as_str(), output.status.code()), ("", Some(1)));
    let said = stderr(&output);
    for text in [
        "/system TEXT",
        "last turn     none",
        "0 turns",
        "there is no command /nonsense",
        "error: 1 line could not be done",
    ] {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    for (args, message) in [
        (["--top-p", "2"], "error: --top-p is 2, allowed: above 0, at most 1\n"),
        (["--max-tokens", "0"], "error: --max-tokens is 0, allowed: 1 or more\n"),
    ] {
        let output = run_with(b"", &["chat", args[0], args[1]]);
        assert_eq!((stderr(&output).as_str(), output.status.code()), (message, Some(2)));
    }
}

#[test]
fn a_conversation_that_is_full_says_so_and_can_begin_again() {
    let long = "word ".repeat(80);
    // A script learns of it by the exit code, and has its other answers all the same.
    let lines = format!("{long}\n/reset\nhello\n");
    let output = run_with(lines.as_bytes(), &["chat", "-n", "4", "--max-model-len", "64"]);
    let said = stderr(&output);
    assert!(said.contains(" tokens, 64 at most: /reset"), "{said}");
    assert_eq!((stdout(&output).matches('\n').count(), output.status.code()), (1, Some(1)));
}

fn interrupt(child: &Child) {
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
}

#[test]
fn ctrl_c_ends_a_conversation_from_a_pipe() {
    let mut command = program();
    command.arg("chat").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(b"Once upon a time\nAnd then?\n").expect("it reads");
    let mut first = [0; 1];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("an answer");
    interrupt(&child);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    drop(input);
}

/// A person at a terminal: Ctrl-C stops the answer, and the next turn is asked all the same.
#[test]
fn ctrl_c_at_a_terminal_stops_the_answer_and_not_the_program() {
    let size = nix::pty::Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = nix::pty::openpty(Some(&size), None).expect("a terminal");
    let (mut person, program_side) = (File::from(terminal.master), File::from(terminal.slave));
    let end = || Stdio::from(program_side.try_clone().expect("another handle"));
    let mut command = program();
    command.args(["chat", "--max-model-len", "8K"]).stdin(end()).stdout(end()).stderr(end());
    let mut child = command.env("TERM", "xterm").spawn().expect("the program starts");
    drop((command, program_side));
    let mut heard = String::new();
    hear(&mut person, &mut heard, "> ");
    person.write_all(b"Once upon a time\r").expect("it reads");
    hear(&mut person, &mut heard, " there was a young girl named");
    interrupt(&child);
    hear(&mut person, &mut heard, "generated_tokens ");
    hear(&mut person, &mut heard, "> ");
    person.write_all(b"/stats\r").expect("it reads");
    hear(&mut person, &mut heard, "conversation  1 turn,");
    hear(&mut person, &mut heard, "> ");
    // Ctrl-D.
    person.write_all(b"\x04").expect("it reads");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

/// Reads until `text` has come; what comes after it stays.
fn hear(person: &mut File, heard: &mut String, text: &str) {
    let mut bytes = [0; 1024];
    loop {
        if let Some(at) = heard.find(text) {
            heard.drain(..at + text.len());
            return;
        }
        let read = person.read(&mut bytes).unwrap_or(0);
        assert!(read > 0, "no {text:?} in {heard:?}");
        heard.push_str(&String::from_utf8_lossy(&bytes[..read]));
    }
}

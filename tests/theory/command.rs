//! `deltapool simulate explain` as a user's shell sees it.

use std::process::{Command, Output};

use deltapool::simulate::claims;

fn explain(args: &[&str]) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("deltapool"));
    command.args(["simulate", "explain"]).args(args).output().expect("the program starts")
}

fn printed(args: &[&str]) -> String {
    let output = explain(args);
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn without_a_name_all_claims_are_listed_a_line_each() {
    let list = printed(&[]);
    assert_eq!(list.lines().count(), claims::claims().len());
    assert!(list.contains("\nC29      29 sequences become 199"), "{list}");
}

#[test]
fn named_claims_are_worked_out_in_the_order_they_are_asked_for() {
    let both = [claims::explain("M9").unwrap(), claims::explain("C60").unwrap()];
    assert_eq!(printed(&["m9", "C60"]), both.join("\n"));
    assert_eq!(printed(&["--markdown"]), claims::markdown());
}

#[test]
fn an_unknown_claim_is_an_error_with_the_nearest_ones() {
    for (id, told) in [
        ("C600", "error: there is no claim C600; near it: C60, "),
        ("zzz", "error: there is no claim zzz; `deltapool simulate explain` lists all"),
    ] {
        let output = explain(&["C01", id]);
        let error = String::from_utf8(output.stderr).expect("text");
        assert!(error.starts_with(told), "{error}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    }
}

//! The arrows between the rooms of the house, and the habits every file keeps, read from the
//! sources: a forbidden one fails with file, line and the rule.
//!
//! A room is a crate or a module of the root crate. Rooms that do not exist need no file; a
//! module of the root crate that is no room fails, so a new one is entered here on purpose.

#[path = "architecture/source.rs"]
mod source;

use std::fs;
use std::path::Path;

use source::{Named, Source, words};

/// What a room may import from the house, besides itself.
struct Room {
    /// Path prefix of its files; the longest that matches counts.
    files: &'static str,
    may: &'static [Arrow],
}

/// A permitted import.
enum Arrow {
    /// This module or crate and all below it.
    All(&'static str),
    /// What this module offers itself, none of its submodules.
    Surface(&'static str),
}

use Arrow::{All, Surface};

const ROOMS: &[Room] = &[
    Room { files: "state_pool/src/", may: &[] },
    Room { files: "checkpoints/src/", may: &[All("state_pool")] },
    Room { files: "kernels/src/", may: &[] },
    Room { files: "src/request", may: &[] },
    Room { files: "src/config", may: &[] },
    Room { files: "src/text", may: &[] },
    Room { files: "src/weights", may: &[All("kernels")] },
    Room {
        files: "src/scheduler",
        may: &[All("state_pool"), All("checkpoints"), All("request"), All("config")],
    },
    Room { files: "src/models", may: &[All("kernels"), All("weights")] },
    Room { files: "src/engine", may: ENGINE },
    // A workload is made of requests, and runs on pools of its own, under limits as any other.
    Room {
        files: "src/simulate",
        may: &[
            All("scheduler"),
            All("engine"),
            All("models::batch"),
            All("models::spec"),
            All("request"),
            All("config"),
            All("state_pool"),
            All("checkpoints"),
        ],
    },
    Room { files: "src/server", may: &[All("engine"), All("request"), All("text")] },
    // What a model costs: the figures of its spec and of the pool's layout, for `cli` to print.
    Room { files: "src/inspect", may: &[All("models"), All("state_pool"), All("kernels")] },
    Room { files: "src/cli", may: CLI },
    Room { files: "src/main.rs", may: &[All("cli")] },
    Room { files: "src/lib.rs", may: &[All("engine"), All("request"), All("config")] },
];

const ENGINE: &[Arrow] = &[
    All("state_pool"),
    All("checkpoints"),
    All("kernels"),
    All("request"),
    All("config"),
    All("text"),
    All("weights"),
    All("scheduler"),
    All("models"),
];

const CLI: &[Arrow] = &[
    All("kernels"),
    All("request"),
    All("config"),
    All("text"),
    All("weights"),
    All("models"),
    All("inspect"),
    All("engine"),
    All("simulate"),
    All("server"),
    Surface("scheduler"),
];

/// Crates of the house besides the root one, by library name.
const CRATES: &[&str] = &["kernels", "state_pool", "checkpoints"];

/// Libraries and the only place in the sources that may name them.
const LIBRARIES: &[(&str, &[&str])] = &[
    ("axum", &["src/server"]),
    ("clap", &["src/cli", "src/main.rs"]),
    ("cpu_time", &["kernels/src/clock"]),
    ("cudarc", &["kernels/src/cuda"]),
    ("cust", &["kernels/src/cuda/interop_cust.rs"]),
    ("llguidance", &["src/engine/constraint.rs"]),
    ("memmap2", &["kernels/src/"]),
    ("minijinja", &["src/text"]),
    ("minijinja_contrib", &["src/text"]),
    ("plotters", &["src/cli/chart"]),
    ("prometheus_client", &["src/server/metrics"]),
    ("rustyline", &["src/cli"]),
    ("safetensors", &["src/weights"]),
    ("strsim", &["src/cli"]),
    ("tokenizers", &["src/text"]),
    ("toml", &["src/cli", "src/simulate/hardware.rs"]),
];

/// Parts of the standard library that a room must not reach for: the control plane has no bytes,
/// no clock and no threads. A duration that is handed to it is plain data.
const NEVER: &[(&str, &[&str])] = &[
    ("state_pool/src/", CONTROL_PLANE),
    ("checkpoints/src/tree", CONTROL_PLANE),
    ("checkpoints/src/policy", CONTROL_PLANE),
    ("src/scheduler", CONTROL_PLANE),
];

const CONTROL_PLANE: &[&str] = &[
    "std::fs",
    "std::io",
    "std::net",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::thread::spawn",
    "std::thread::scope",
    "std::thread::sleep",
    "std::thread::Builder",
];

const MAX_COLUMNS: usize = 100;

#[test]
fn the_sources_keep_the_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    collect(root, root, &mut sources);
    let crates =
        ["src/lib.rs", "checkpoints/src/lib.rs", "kernels/src/lib.rs", "state_pool/src/lib.rs"];
    for folder in crates {
        assert!(sources.iter().any(|source| source.path == folder), "{folder} was not read");
    }
    let faults: Vec<String> = sources.iter().flat_map(faults).collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn collect(root: &Path, folder: &Path, sources: &mut Vec<Source>) {
    let entries = fs::read_dir(folder).expect("the workspace can be listed");
    for entry in entries {
        let entry = entry.expect("the workspace can be listed");
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let kind = entry.file_type().expect("the workspace can be listed");
        if kind.is_dir() && !name.starts_with('.') && name != "target" && name != "shared" {
            collect(root, &path, sources);
        } else if kind.is_file() && name.ends_with(".rs") {
            let relative = path.strip_prefix(root).expect("it lies below the root");
            let text = fs::read_to_string(&path).expect("a source is UTF-8");
            let relative = relative.to_string_lossy().replace('\\', "/");
            sources.push(Source::new(&relative, &text));
        }
    }
}

/// Everything wrong with one file, each as `path:line: what`.
fn faults(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    let mut fault = |line: usize, what: String| {
        faults.push(format!("{}:{line}: {what}", source.path));
    };
    imports(source, &mut fault);
    libraries(source, &mut fault);
    words_and_lines(source, &mut fault);
    faults.dedup();
    faults
}

fn imports(source: &Source, fault: &mut impl FnMut(usize, String)) {
    let matching = ROOMS.iter().filter(|room| source.path.starts_with(room.files));
    let Some(room) = matching.max_by_key(|room| room.files.len()) else {
        if source.path.starts_with("src/") {
            fault(1, "is in no room: enter it in tests/architecture.rs".into());
        }
        return;
    };
    let own = room.files.split_once("src/").map_or("", |(_, name)| name.trim_end_matches(".rs"));
    for named in source.paths(&source.code) {
        let Some(target) = in_house(&named, !room.files.starts_with("src/")) else { continue };
        let itself = target.first().is_some_and(|first| first == own);
        if !itself && !room.may.iter().any(|arrow| arrow.permits(&target)) {
            fault(named.line, format!("{} may not import {}", room.files, target.join("::")));
        }
    }
    for (files, never) in NEVER.iter().filter(|(files, _)| source.path.starts_with(files)) {
        for named in source.paths(&source.library_code()) {
            if let Some(std) = never.iter().find(|std| below(&named.segments, std)) {
                fault(named.line, format!("{files} may not use {std}"));
            }
        }
    }
}

/// The path from its room on, if it leads into the house; a crate's paths to itself do not.
fn in_house(named: &Named, within_crate: bool) -> Option<Vec<String>> {
    let first = named.segments[0].as_str();
    match first {
        "crate" | "deltapool" if within_crate && first == "crate" => None,
        "crate" | "deltapool" => Some(named.segments[1..].to_vec()),
        _ if CRATES.contains(&first) => Some(named.segments.clone()),
        _ => None,
    }
}

impl Arrow {
    fn permits(&self, target: &[String]) -> bool {
        match self {
            All(path) => below(target, path),
            Surface(path) => {
                let depth = path.split("::").count();
                let is_item = |name: &String| name.starts_with(char::is_uppercase);
                below(target, path) && target.get(depth).is_none_or(is_item)
            }
        }
    }
}

fn below(target: &[String], path: &str) -> bool {
    let path: Vec<&str> = path.split("::").collect();
    target.len() >= path.len() && path.iter().zip(target).all(|(want, have)| want == have)
}

fn libraries(source: &Source, fault: &mut impl FnMut(usize, String)) {
    for named in source.paths(&source.library_code()) {
        for (library, places) in LIBRARIES {
            let allowed = places.iter().any(|place| source.path.starts_with(place));
            if named.segments[0] == *library && !allowed {
                fault(named.line, format!("{library} belongs in {}", places.join(", ")));
            }
        }
    }
}

fn words_and_lines(source: &Source, fault: &mut impl FnMut(usize, String)) {
    if !source.text.starts_with("//!") {
        fault(1, "has no //! header".into());
    }
    for (index, line) in source.text.lines().enumerate() {
        let columns = line.chars().count();
        // Expected texts in tests stand on one line.
        if columns > MAX_COLUMNS && !source.path.starts_with("tests/") {
            fault(index + 1, format!("{columns} columns, {MAX_COLUMNS} at most"));
        }
        for mark in [concat!("TO", "DO"), concat!("FIX", "ME")] {
            if line.contains(mark) {
                fault(index + 1, format!("{mark}: what is unfinished is absent"));
            }
        }
    }
    let code = words(&source.code);
    let at = |index: usize| code.get(index).map_or("", |(_, word): &(usize, String)| word);
    for (index, (line, word)) in code.iter().enumerate() {
        if matches!(word.as_str(), "todo" | "unimplemented") && at(index + 1) == "!" {
            fault(*line, format!("{word}!: what is unfinished is absent"));
        }
        if word == "unsafe" && !source.path.starts_with("kernels/") {
            fault(*line, "unsafe outside kernels".into());
        }
    }
    let library = words(&source.library_code());
    for pair in library.windows(3) {
        if pair[0].1 == "." && pair[1].1 == "unwrap" && pair[2].1 == "(" {
            fault(pair[1].0, "unwrap() in library code: say why it cannot fail".into());
        }
    }
}

/// The faults of a made-up file whose header is in order, without its path.
fn told(path: &str, body: &str) -> Vec<String> {
    let source = Source::new(path, &format!("//! Made up.\n{body}"));
    let strip = |fault: String| fault.strip_prefix(&format!("{path}:")).map(String::from);
    faults(&source).into_iter().filter_map(strip).collect()
}

#[test]
fn a_forbidden_import_is_told_however_it_is_written() {
    for body in [
        "use crate::models::spec::ModelSpec;",
        "use crate::{request::Request, models::spec};",
        "use crate::{models};",
        "use deltapool::models::*;",
        "use super::super::models::spec;",
        "use super::models;",
        "fn f() { crate::models::spec::f() }",
        "fn f(m: &crate::models::M) {}",
        "mod inner { use super::super::super::models::spec; }",
        "pub(crate) use crate::models as other;",
        "#[cfg(test)] mod tests { use crate::models::spec; }",
    ] {
        let path = if body.contains("use super::models") { "src/scheduler.rs" } else { PLAN };
        let told = told(path, body);
        assert_eq!(told.len(), 1, "{body}: {told:?}");
        assert!(told[0].starts_with("2: src/scheduler may not import models"), "{told:?}");
    }
    for (path, body) in [
        (PLAN, "use kernels::Matrix;"),
        ("src/models/decoder.rs", "use state_pool::Slot;"),
        ("src/models/decoder.rs", "use crate::engine::Engine;"),
        ("src/engine/mod.rs", "use crate::cli::Args;"),
        ("src/engine/mod.rs", "use crate::Engine;"),
        ("src/server/mod.rs", "use crate::scheduler::Policy;"),
        ("src/simulate/mod.rs", "use crate::models::decoder::Decoder;"),
        ("src/text/mod.rs", "use crate::request::Request;"),
        ("src/request.rs", "use crate::config::Config;"),
        ("src/cli/serve.rs", "use crate::scheduler::plan::StepPlan;"),
        ("src/cli/serve.rs", "use state_pool::PoolLayout;"),
        ("src/main.rs", "use deltapool::engine::Engine;"),
        ("kernels/src/kda/mod.rs", "use state_pool::Slot;"),
        ("state_pool/src/pool.rs", "fn f() -> kernels::Matrix {}"),
        ("checkpoints/src/tree.rs", "use deltapool::request::Request;"),
        ("src/unheard_of.rs", ""),
    ] {
        assert_eq!(told(path, body).len(), 1, "{path}: {body}");
    }
}

const PLAN: &str = "src/scheduler/plan.rs";

#[test]
fn permitted_imports_and_lookalikes_are_silent() {
    for (path, body) in [
        (PLAN, "use crate::{config::Limits, request::{Request, Event}};\nuse super::sequence::S;"),
        (PLAN, "use state_pool::StatePool;\nuse checkpoints::PrefixTree;"),
        (PLAN, "// use crate::models::spec;\n/* kernels::Matrix /* nested */ crate::models::x */"),
        (PLAN, "const A: &str = \"crate::models::spec \\\" kernels::x\";"),
        (PLAN, "const A: &str = r#\"crate::models \" kernels::x\"#;"),
        (PLAN, "fn f<'a>(c: &'a [char]) -> bool { c == ['\"', '\\'', 'x'] } // kernels::x"),
        (PLAN, "let plan = other::kernels::x; let models = self.models;"),
        ("src/cli/serve.rs", "use crate::scheduler::Policy;\nuse clap::Parser;"),
        ("src/cli/inspect.rs", "use crate::inspect::Report;\nuse super::Args;"),
        ("src/inspect.rs", "use state_pool::PoolLayout;"),
        ("src/scheduler/plan.rs", "use std::time::Duration;"),
        ("kernels/src/kda/mod.rs", "use crate::{matrix::Matrix, models::anything};"),
        ("src/weights/mod.rs", "use safetensors::SafeTensors;\nuse kernels::Arena;"),
        ("src/main.rs", "fn main() -> std::process::ExitCode { deltapool::cli::run() }"),
        ("tests/golden.rs", "use deltapool::models::spec;\nuse safetensors::SafeTensors;"),
    ] {
        assert_eq!(told(path, body), [""; 0], "{path}: {body}");
    }
}

#[test]
fn libraries_stay_in_their_rooms() {
    for (path, body) in [
        ("kernels/src/device.rs", "use cudarc::driver::CudaContext;"),
        ("src/engine/mod.rs", "use clap::{Parser, Args};"),
        ("src/models/decoder.rs", "fn f(t: safetensors::SafeTensors) {}"),
        ("src/cli/chat.rs", "use tokenizers::Tokenizer;"),
        ("src/cli/chat.rs", "use minijinja::Environment;"),
        ("src/weights.rs", "use memmap2::Mmap;"),
        ("src/scheduler/mod.rs", "use std::{time::Instant, fmt};"),
        ("state_pool/src/pool.rs", "fn f() { std::thread::spawn(g) }"),
    ] {
        assert_eq!(told(path, body).len(), 1, "{path}: {body}");
    }
    assert_eq!(told("kernels/src/cuda/mod.rs", "use cudarc::driver;"), [""; 0]);
}

#[test]
fn habits_are_told() {
    let macro_name = concat!("to", "do");
    let mark = concat!("FIX", "ME");
    for (path, body, what) in [
        ("src/text/mod.rs", "unsafe { f() }".to_string(), "2: unsafe outside kernels"),
        ("tests/golden.rs", "unsafe fn f() {}".to_string(), "2: unsafe outside kernels"),
        ("kernels/src/gemm.rs", format!("{macro_name}!()"), "2: todo!: what is unfinished"),
        ("benches/kernels.rs", format!("\n// {mark} later"), "3: MARK: what is unfinished"),
        ("src/text/mod.rs", format!("// {}", "é".repeat(98)), "2: 101 columns, 100 at most"),
        ("src/text/mod.rs", "f()\n    .unwrap();".to_string(), "3: unwrap() in library code"),
    ] {
        let told = told(path, &body);
        assert_eq!(told.len(), 1, "{path}: {told:?}");
        let what = what.replace("MARK", mark);
        assert!(told[0].starts_with(&what), "{told:?}");
    }
    let bare = faults(&Source::new("src/text/mod.rs", "pub mod chat;\n"));
    assert_eq!(bare, ["src/text/mod.rs:1: has no //! header"]);
    for (path, body) in [
        ("src/text/mod.rs", "#[cfg(test)]\nmod tests {\n fn f() { if true { g().unwrap() } }\n}"),
        ("src/text/tests.rs", "fn f() { g().unwrap() }"),
        ("tests/golden.rs", "fn f() { g().unwrap() }"),
        ("src/text/mod.rs", "/// `x.unwrap()` and unsafe\nfn f() { g().unwrap_or(1) }"),
        ("src/text/mod.rs", "#![forbid(unsafe_code)]"),
        ("kernels/src/simd.rs", "unsafe fn f() {}"),
    ] {
        assert_eq!(told(path, body), [""; 0], "{path}: {body}");
    }
    let after = "#[cfg(test)]\nmod tests { fn f() {} }\nfn g() { h().unwrap() }";
    assert_eq!(told("src/text/mod.rs", after).len(), 1, "code after the tests is read");
}

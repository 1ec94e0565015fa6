//! docs/theory.md's table of sampled values against what the tests compute, and its list of what
//! SEEDS.md asserts against the tests that are named there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The rows of the table, by what they are of; one test computes all rows of one.
const ALL: [&str; 19] = [
    "S1",
    "S2",
    "S3",
    "S4",
    "S5",
    "S6",
    "4.3",
    "4.3 floor",
    "4.3 fused",
    "4.4",
    "B2",
    "C50-C52",
    "P3",
    "P5",
    "P6",
    "M2",
    "M2 links",
    "M3",
    "M6",
];

/// The rows that a test tells.
pub struct Rows {
    of: &'static str,
    rows: Vec<String>,
}

impl Rows {
    /// None yet, of one of [`ALL`].
    pub fn of(of: &'static str) -> Rows {
        assert!(ALL.contains(&of), "{of} is not among the rows of the page");
        Rows { of, rows: Vec::new() }
    }

    /// A value of SEEDS.md and ours.
    pub fn tell(&mut self, what: &str, seeds: f64, ours: f64) {
        let difference = match seeds == 0.0 {
            true => format!("{}", ours - seeds),
            false => format!("{:+.1} %", 100.0 * (ours / seeds - 1.0)),
        };
        let (seeds, ours) = (digits(seeds), digits(ours));
        let row = format!("| {} | {what} | {seeds} | {ours} | {difference} |", self.of);
        println!("{row}");
        self.rows.push(row);
    }

    /// A value of ours that SEEDS.md has not.
    pub fn tell_ours(&mut self, what: &str, ours: f64) {
        let row = format!("| {} | {what} | - | {} | - |", self.of, digits(ours));
        println!("{row}");
        self.rows.push(row);
    }

    /// Fails unless the page has these rows and no others of the same.
    pub fn check(self) {
        let page = page();
        let start = format!("| {} |", self.of);
        let shown: Vec<&str> = sampled(&page).filter(|line| line.starts_with(&start)).collect();
        let stale = shown != self.rows;
        assert!(!stale, "docs/theory.md, {}: not the rows\n{}", self.of, self.rows.join("\n"));
    }
}

/// Four digits, or all of a whole number.
fn digits(value: f64) -> String {
    let whole = value.abs().max(1.0).log10().floor() as usize + 1;
    match value.fract() == 0.0 || value.abs() >= 1_000.0 {
        true => format!("{value:.0}"),
        false if value.abs() < 1.0 => format!("{value:.4}"),
        false => format!("{value:.0$}", 4 - whole),
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page() -> String {
    fs::read_to_string(root().join("docs/theory.md")).expect("the page").replace("\r\n", "\n")
}

/// The rows of the table of sampled values.
fn sampled(page: &str) -> impl Iterator<Item = &str> {
    let (_, section) = page.split_once("\n## Sampled runs\n").expect("the section");
    let section = section.split("\n## ").next().expect("one part at least");
    section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| |"))
}

#[test]
fn the_page_has_the_rows_that_tests_compute_and_no_others() {
    let page = page();
    let mut of: Vec<&str> =
        sampled(&page).map(|row| row[2..].split(" |").next().expect("a cell")).collect();
    of.dedup();
    assert_eq!(of, ALL);
    let tests = sources(&root().join("tests/theory")).concat();
    for of in ALL {
        assert!(tests.contains(&format!("Rows::of(\"{of}\")")), "no test computes {of}");
    }
}

/// Each assertion of SEEDS.md section 4 has a test, or a reason why it has none.
#[test]
fn the_tests_that_the_page_names_are_there() {
    let page = page();
    let (_, section) = page.split_once("\n## What is asserted\n").expect("the section");
    let folders = ["tests", "src", "state_pool/src", "state_pool/tests"];
    let tests = folders.iter().flat_map(|folder| sources(&root().join(folder)));
    let tests = tests.collect::<Vec<String>>().concat();
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    let mut named = BTreeSet::new();
    for row in &rows {
        let last = row.trim_end_matches(" |").rsplit(" | ").next().expect("a cell");
        let names: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty() || last.starts_with("none: "), "{row}");
        named.extend(names);
    }
    assert!(rows.len() > 40 && named.len() > 40, "{} rows", rows.len());
    for name in named {
        assert!(tests.contains(&format!("fn {name}(")), "there is no test {name}");
    }
}

/// The text of all Rust files of a folder and those in it.
fn sources(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    let text = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false if path.extension().is_some_and(|ending| ending == "rs") => {
            vec![fs::read_to_string(path).expect("a text")]
        }
        false => Vec::new(),
    };
    paths.into_iter().flat_map(text).collect()
}

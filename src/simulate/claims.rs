//! The claims of the scheduling theory, each with a formula that a user can check by hand.
//!
//! A claim is a row of SEEDS.md section 3, a closed form of its section 4, or one of the nine
//! errors of its section 5: what a lecture prints, what we get, and the work in between. The tests
//! hold every row to its tolerance; `deltapool simulate explain` prints the work.

mod batching;
mod buckets;
mod errors;
mod inputs;
mod memory;
mod mixed;
mod queue;
mod steps;
mod swap;
mod worked;

use std::fmt::{self, Write};
use std::sync::LazyLock;

pub use worked::{Worked, figure};

/// One claim.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    /// Its name, as SEEDS.md has it.
    pub id: &'static str,
    /// What is claimed, and of what.
    pub claim: &'static str,
    /// The figure as a lecture prints it; none where we add one.
    pub lecture: Option<&'static str>,
    /// Our figures as SEEDS.md prints them, in the order of [`Worked::values`].
    pub expected: &'static [f64],
    /// How close the work must come to `expected`.
    pub tolerance: Tolerance,
    /// Whether the lecture is right.
    pub verdict: Verdict,
    /// Formula number, and the formula.
    pub formula: &'static str,
    /// Puts the numbers in.
    pub work: fn() -> Worked,
}

/// How close is close enough.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tolerance {
    /// To this share of the expected figure.
    Relative(f64),
    /// To the last bit.
    Exact,
}

impl Tolerance {
    /// Whether `value` is close enough to `expected`; infinite is close to infinite only.
    pub fn holds(self, value: f64, expected: f64) -> bool {
        match self {
            Tolerance::Exact => value == expected,
            Tolerance::Relative(share) => {
                value == expected || (value - expected).abs() <= share * expected.abs()
            }
        }
    }
}

/// Whether a lecture's figure is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Within the tolerance, the conventions once known.
    Agrees,
    /// It is not, or two of its figures do not go together.
    Differs {
        /// What is wrong.
        why: &'static str,
    },
    /// It cannot be worked out from what the lecture gives.
    Untestable {
        /// What is missing.
        why: &'static str,
    },
    /// No lecture has it: it is ours.
    Added,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Agrees => f.write_str("agrees"),
            Verdict::Differs { why } => write!(f, "differs: {why}"),
            Verdict::Untestable { why } => write!(f, "untestable: {why}"),
            Verdict::Added => f.write_str("ours"),
        }
    }
}

/// Claims that belong together.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Its heading.
    pub title: &'static str,
    /// Its claims.
    pub claims: &'static [Claim],
}

/// All claims by section.
pub fn sections() -> &'static [Section] {
    const SECTIONS: &[Section] = &[
        Section { title: "Static and continuous batching", claims: batching::CLAIMS },
        Section { title: "Throughput and the bytes of a step", claims: steps::CLAIMS },
        Section { title: "Mixed steps", claims: mixed::CLAIMS },
        Section { title: "Order of prefills", claims: queue::CLAIMS },
        Section { title: "Swap or recompute", claims: swap::CLAIMS },
        Section { title: "Graph buckets", claims: buckets::CLAIMS },
        Section { title: "Two pools and crossovers", claims: memory::CLAIMS },
        Section { title: "Errors of the lectures", claims: errors::CLAIMS },
    ];
    SECTIONS
}

/// All claims, in the order of the sections.
pub fn claims() -> &'static [Claim] {
    static CLAIMS: LazyLock<Vec<Claim>> =
        LazyLock::new(|| sections().iter().flat_map(|section| section.claims).copied().collect());
    &CLAIMS
}

/// The claim of that name, whatever its case.
pub fn find(id: &str) -> Option<&'static Claim> {
    claims().iter().find(|claim| claim.id.eq_ignore_ascii_case(id))
}

/// The claim of that name with its numbers put in, a line each; none if there is no such claim.
pub fn explain(id: &str) -> Option<String> {
    let claim = find(id)?;
    let worked = (claim.work)();
    let mut text = format!("{}  {}\n", claim.id, claim.claim);
    let mut line = |label: &str, value: &str| {
        writeln!(text, "  {label:<9}{value}").expect("writing to a string cannot fail");
    };
    line("formula", claim.formula);
    for step in &worked.lines {
        line("", step);
    }
    line("lecture", claim.lecture.unwrap_or("-"));
    line("ours", &worked.figures());
    line("grid 64", &worked.grid_figures());
    line("verdict", &claim.verdict.to_string());
    Some(text)
}

/// All claims as tables of a page, a section each.
pub fn markdown() -> String {
    let mut page = String::new();
    for Section { title, claims } in sections() {
        let head = "| | claim | lecture | ours | grid 64 | verdict | rerun |\n\
                    |---|---|---|---|---|---|---|\n";
        page += &format!("## {title}\n\n{head}");
        for claim in *claims {
            let worked = (claim.work)();
            let (ours, grid) = (worked.figures(), worked.grid_figures());
            let lecture = claim.lecture.unwrap_or("-");
            let Claim { id, claim, verdict, .. } = claim;
            page += &format!(
                "| {id} | {claim} | {lecture} | {ours} | {grid} | {verdict} | \
                 `deltapool simulate explain {id}` |\n"
            );
        }
        page += "\n";
    }
    page
}

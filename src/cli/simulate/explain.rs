//! `deltapool simulate explain`: claims of the scheduling theory, worked out.

use std::fmt::Write;

use clap::Args;

use super::super::CliError;
use super::super::output::print;
use crate::simulate::claims::{self, claims};

/// Names this near to one that does not exist are shown.
const NEAR: f64 = 0.75;

/// Arguments of `simulate explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Claims, such as C60; all of them, a line each, when none is named.
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Print all claims as the tables of docs/theory.md.
    #[arg(long, conflicts_with = "ids")]
    pub markdown: bool,
}

/// Runs the command.
pub fn run(args: &ExplainArgs) -> Result<(), CliError> {
    if args.markdown {
        return print(&claims::markdown());
    }
    if args.ids.is_empty() {
        return print(&list());
    }
    let mut texts = Vec::new();
    for id in &args.ids {
        texts.push(claims::explain(id).ok_or_else(|| CliError::Usage(unknown(id)))?);
    }
    print(&texts.join("\n"))
}

fn list() -> String {
    let mut text = String::new();
    for claim in claims() {
        writeln!(text, "{:<9}{}", claim.id, claim.claim).expect("writing to a string cannot fail");
    }
    text
}

/// Says that there is no claim `id`, with the names nearest to it.
fn unknown(id: &str) -> String {
    let wanted = id.to_ascii_uppercase();
    let mut near: Vec<(f64, &str)> = claims()
        .iter()
        .map(|claim| (strsim::jaro_winkler(&claim.id.to_ascii_uppercase(), &wanted), claim.id))
        .filter(|(likeness, _)| *likeness >= NEAR)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    let names: Vec<&str> = near.iter().take(3).map(|(_, id)| *id).collect();
    let all = "`deltapool simulate explain` lists all";
    match names.is_empty() {
        true => format!("there is no claim {id}; {all}"),
        false => format!("there is no claim {id}; near it: {}; {all}", names.join(", ")),
    }
}

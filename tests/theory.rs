//! The scheduling theory in numbers: the closed forms of SEEDS.md section 3, what models and steps
//! cost, and the page that shows it all.
//!
//! `cargo test --release --test theory -- --nocapture` prints the table.

#[path = "theory/agreement.rs"]
mod agreement;
#[path = "theory/closed_forms.rs"]
mod closed_forms;
#[path = "theory/command.rs"]
mod command;
#[path = "theory/models.rs"]
mod models;
#[path = "theory/page.rs"]
mod page;
#[path = "theory/sampled.rs"]
mod sampled;
#[path = "theory/simulate.rs"]
mod simulate;
#[path = "theory/steps.rs"]
mod steps;

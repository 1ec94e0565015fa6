//! The scheduling theory in numbers: what models and steps cost.

#[path = "theory/models.rs"]
mod models;
#[path = "theory/steps.rs"]
mod steps;

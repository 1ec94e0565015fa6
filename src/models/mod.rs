//! Models as data, and the one decoder that runs them.

pub mod layout;
pub mod spec;

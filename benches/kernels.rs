//! Operators, measured.

fn main() {}

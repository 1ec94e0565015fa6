//! The deltapool command.

fn main() {}

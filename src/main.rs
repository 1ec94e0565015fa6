//! The `deltapool` program: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    let isa = std::env::var("DELTAPOOL_ISA").ok();
    deltapool::cli::main(isa.as_deref())
}

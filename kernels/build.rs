//! Gathers the CUDA kernels: their sources, and what nvcc makes of them where there is one.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Code for the devices most met, and PTX that later ones compile for themselves.
const TARGETS: [&str; 3] = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_80,code=compute_80",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo:rerun-if-changed=cuda");
    for name in ["NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let folder = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let folder = folder.join("cuda");
    let nvcc = nvcc();
    let mut table = String::from("[\n");
    for file in kernel_files(&folder) {
        let name = file.file_name().and_then(|name| name.to_str()).expect("kernel files are ASCII");
        let fatbin = out.join(name).with_extension("fatbin");
        let made = nvcc.as_ref().is_some_and(|nvcc| compile(nvcc, &file, &fatbin));
        if !made {
            fs::write(&fatbin, b"").expect("the build folder can be written");
        }
        let (text, code) =
            (format!("include_str!({file:?})"), format!("include_bytes!({fatbin:?})"));
        writeln!(table, "Source {{ name: {name:?}, text: {text}, fatbin: {code} }},")
            .expect("a string takes it");
    }
    table.push(']');
    fs::write(out.join("cuda_sources.rs"), table).expect("the build folder can be written");
}

fn kernel_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the kernels can be listed");
    let paths = entries.map(|entry| entry.expect("the kernels can be listed").path());
    let mut files: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|e| e == "cu")).collect();
    files.sort();
    files
}

/// The compiler, if there is one that answers.
fn nvcc() -> Option<PathBuf> {
    let of_home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    let nvcc = env::var_os("NVCC").map(PathBuf::from).or(of_home).unwrap_or("nvcc".into());
    let answers = Command::new(&nvcc).arg("--version").output();
    answers.is_ok_and(|output| output.status.success()).then_some(nvcc)
}

fn compile(nvcc: &Path, file: &Path, fatbin: &Path) -> bool {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-fatbin"]).args(TARGETS).arg("-o").arg(fatbin).arg(file);
    let output = command.output().expect("it answered before");
    if !output.status.success() {
        for line in String::from_utf8_lossy(&output.stderr).lines() {
            println!("cargo:warning={line}");
        }
    }
    output.status.success()
}

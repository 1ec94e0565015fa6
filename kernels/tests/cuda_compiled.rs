//! Kernel files as the device's compiler takes them, with no device: they compile, keep everything
//! in registers, and are made of the instructions they were written for.
//!
//! NVRTC is found as the program finds it (`LD_LIBRARY_PATH`), or in the folder that
//! `DELTAPOOL_NVRTC` names; PyPI's nvidia-cuda-nvrtc is enough. Instructions are counted where
//! cuobjdump and nvdisasm are in `PATH`. What cannot be had is skipped, and said so.
//! `DELTAPOOL_ARCHITECTURES="sm_100a sm_120"` compiles for others, as `.ci/soak` does.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use kernels::cuda::{Cuda, CudaError, Options, SOURCES, compile};
use libloading::Library;

/// Most registers a kernel may use for as many blocks on a multiprocessor as it is written for, and
/// instructions that must be there for sm_80.
struct Expected {
    kernel: &'static str,
    registers: u32,
    instructions: &'static [(&'static str, usize)],
}

const fn expected(
    kernel: &'static str,
    registers: u32,
    instructions: &'static [(&'static str, usize)],
) -> Expected {
    Expected { kernel, registers, instructions }
}

/// Two blocks of 256 threads have room for 128 registers each; kernels of chunks are alone, since
/// their tiles fill the shared memory. A state row is read and written 16 bytes at a time; the
/// scan's copies pass the registers by.
const EXPECTED: &[Expected] = &[
    expected("add", 32, &[("LDG.E.128", 2), ("STG.E.128", 1)]),
    expected("silu_mul", 40, &[("LDG.E.128", 2), ("STG.E.128", 1)]),
    expected("sigmoid_rows", 40, &[("LDG.E.128", 1), ("STG.E.128", 1)]),
    expected("norm_wide", 64, &[]),
    expected("norm_narrow", 64, &[]),
    expected("angles", 64, &[]),
    expected("rotate", 32, &[]),
    expected("embed", 32, &[]),
    expected("conv", 64, &[]),
    expected("kda_step_32", 128, &[("LDG.E.128", 2), ("STG.E.128", 1)]),
    expected("kda_step_64", 128, &[("LDG.E.128", 4), ("STG.E.128", 2)]),
    expected("kda_step_128", 128, &[("LDG.E.128", 8), ("STG.E.128", 4), ("LDS.128", 12)]),
    expected("kda_prepare", 255, &[("LDS.128", 6)]),
    expected("kda_scan", 255, &[("LDGSTS.E.BYPASS.128", 10), ("LDS.128", 20)]),
    expected("kda_scan_tf32", 255, &[("LDGSTS.E.BYPASS.128", 10), ("HMMA.1688.F32.TF32", 12)]),
    expected("kda_norm", 64, &[]),
    // Inputs pass through registers to shared memory, and sums stay in registers.
    expected("gemm_few", 168, &[("LDS.128", 10)]),
    expected("gemm_many", 168, &[("LDS.128", 8)]),
    // One block of threads fills a multiprocessor's shared memory.
    expected("gemm_mma_few", 128, &[("HMMA.16816", 8), ("LDSM.16.M88.4", 8), ("LDGSTS", 6)]),
    expected("gemm_mma_some", 128, &[("HMMA.16816", 16), ("LDSM.16.M88.4", 12), ("LDGSTS", 9)]),
    expected("gemm_mma_many", 255, &[("HMMA.16816", 64), ("LDSM.16.M88.4", 24), ("LDGSTS", 8)]),
    expected("round_rows", 32, &[]),
    expected("attend", 255, &[("LDS.128", 10)]),
    expected("attend_latents", 255, &[("HMMA.16816", 34), ("LDSM", 15), ("LDGSTS", 3)]),
    expected("attend_few_heads", 168, &[("HMMA.16816", 80), ("LDSM", 40), ("LDGSTS", 4)]),
    expected("attend_many_heads", 255, &[("HMMA.16816", 128), ("LDSM", 64), ("LDGSTS", 4)]),
    expected("attend_expanded", 255, &[("HMMA.16816", 160), ("LDSM", 80), ("LDGSTS", 6)]),
    expected("attend_merge", 64, &[]),
    expected("write_kv", 64, &[]),
    expected("gather_latents", 32, &[]),
    expected("route", 64, &[]),
    expected("sort_choices", 64, &[]),
    expected("combine", 64, &[]),
    expected("keep_last_rows", 32, &[]),
    expected("gather_rows", 32, &[]),
    expected("judge", 64, &[]),
    expected("first", 64, &[]),
];

/// Those that registers and instructions are counted for.
const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

/// Those of devices that are refused for their 99 KiB of shared memory: it is asked that files
/// compile, and told what spills.
const REFUSED: [&str; 3] = ["sm_86", "sm_89", "sm_120"];

/// Bytes at most that a kernel may spill for an architecture which it was not written for: until
/// it has run there, nobody knows what that costs.
const SPILLED: [(&str, &str, u32); 3] =
    [("sm_100a", "attend", 64), ("sm_100a", "conv", 32), ("sm_100a", "gemm_few", 288)];

/// Those that are compiled for: others with `DELTAPOOL_ARCHITECTURES`, separated by spaces. Of
/// these it is asked that they compile and keep everything in registers.
fn architectures() -> Vec<String> {
    let told = std::env::var("DELTAPOOL_ARCHITECTURES").unwrap_or(ARCHITECTURES.join(" "));
    told.split_whitespace().map(str::to_owned).collect()
}

/// Loads NVRTC from the folder that is named, so that it is found by its name afterwards.
fn load_compiler() {
    let Some(folder) = std::env::var_os("DELTAPOOL_NVRTC") else { return };
    for name in ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"] {
        // SAFETY: NVIDIA's compiler, whose set-up touches nothing of ours.
        let library = unsafe { Library::new(Path::new(&folder).join(name)) };
        std::mem::forget(library.expect("DELTAPOOL_NVRTC names a folder with NVRTC 13.0"));
    }
}

/// What the compiler reports of a kernel.
#[derive(Default, Clone, Copy)]
struct Usage {
    registers: u32,
    /// Bytes of memory of each thread's own.
    stack: u32,
    /// Bytes written and read there because registers ran out.
    spilled: u32,
}

fn usage(report: &str) -> HashMap<String, Usage> {
    let mut kernels = HashMap::new();
    let (mut kernel, mut usage) = (String::new(), Usage::default());
    let number_before = |line: &str, what: &str| -> u32 {
        let before = line.split(what).next().expect("there is a part");
        before.split_whitespace().last().and_then(|word| word.parse().ok()).expect("a number")
    };
    for line in report.lines() {
        if let Some(name) = line.split('\'').nth(1) {
            kernel = name.to_string();
        }
        if line.contains("bytes stack frame") {
            usage.stack = number_before(line, "bytes stack frame");
            usage.spilled = number_before(line, "bytes spill stores")
                + number_before(line, "bytes spill loads");
        }
        if line.contains("registers") {
            usage.registers = number_before(line, "registers");
            kernels.insert(kernel.clone(), usage);
        }
    }
    kernels
}

/// How often each instruction stands in each kernel, or none without the tools.
fn instructions(image: &[u8]) -> Option<HashMap<String, HashMap<String, usize>>> {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compiled.cubin");
    std::fs::write(&path, image).expect("the build folder can be written");
    let output = Command::new("cuobjdump").arg("--dump-sass").arg(&path).output().ok()?;
    let text = output.status.success().then(|| String::from_utf8_lossy(&output.stdout))?;
    let mut kernels: HashMap<String, HashMap<String, usize>> = HashMap::new();
    let mut kernel = String::new();
    for line in text.lines() {
        if let Some((_, name)) = line.split_once("Function : ") {
            kernel = name.trim().to_string();
        }
        let Some((_, code)) = line.split_once("*/") else { continue };
        let words = code.split_whitespace().filter(|word| !word.starts_with('@'));
        if let Some(instruction) = words.map(|word| word.trim_end_matches(';')).next() {
            *kernels.entry(kernel.clone()).or_default().entry(instruction.into()).or_default() += 1;
        }
    }
    Some(kernels)
}

#[test]
fn kernels_compile_and_keep_to_registers() {
    load_compiler();
    for arch in &architectures() {
        let is_counted = ARCHITECTURES.contains(&arch.as_str());
        let (mut seen, mut spills) = (Vec::new(), Vec::new());
        for source in SOURCES {
            let compiled = match compile(source.name, source.text, arch) {
                Err(CudaError::NoCompiler { .. }) => {
                    eprintln!("skipped: {} files, there is no NVRTC", SOURCES.len());
                    return;
                }
                other => other.unwrap_or_else(|error| panic!("{error}")),
            };
            let usage = usage(&compiled.report);
            let counted = if is_counted { instructions(&compiled.image) } else { None };
            if is_counted && counted.is_none() {
                eprintln!("skipped: instructions of {}, there is no cuobjdump", source.name);
            }
            for (kernel, Usage { registers, stack, spilled }) in usage {
                let expected = EXPECTED.iter().find(|expected| expected.kernel == kernel);
                let expected = expected.unwrap_or_else(|| panic!("{kernel} is not in the list"));
                println!("{arch} {kernel}: {registers} registers, {spilled} bytes spilled");
                // The sine of a large double is reduced with a table.
                let may_have = if kernel == "angles" { 40 } else { 0 };
                let may_spill = SPILLED.iter().find(|known| (known.0, known.1) == (arch, &kernel));
                let may_spill = may_spill.map_or(0, |known| known.2);
                if spilled > may_spill || stack > may_have + may_spill {
                    spills.push(format!("{kernel} for {arch}: {spilled} bytes"));
                }
                let most = if is_counted { expected.registers } else { 255 };
                assert!(registers <= most, "{kernel} for {arch}: {registers} of {most} registers");
                if let Some(counted) = &counted {
                    check_instructions(expected, &counted[&kernel]);
                }
                seen.push(kernel);
            }
        }
        assert!(spills.is_empty() || REFUSED.contains(&arch.as_str()), "spilled: {spills:?}");
        let missing: Vec<_> =
            EXPECTED.iter().filter(|e| !seen.iter().any(|s| s == e.kernel)).collect();
        assert!(missing.is_empty(), "{:?}", missing.iter().map(|e| e.kernel).collect::<Vec<_>>());
    }
}

fn check_instructions(expected: &Expected, counted: &HashMap<String, usize>) {
    for (instruction, least) in expected.instructions {
        let with_suffixes = counted.iter().filter(|(name, _)| name.starts_with(instruction));
        let count: usize = with_suffixes.map(|(_, count)| count).sum();
        let kernel = expected.kernel;
        assert!(count >= *least, "{kernel}: {count} of {least} {instruction}");
    }
}

/// A file that the compiler refuses is told with what it says.
#[test]
fn a_file_that_does_not_compile_is_told() {
    load_compiler();
    match compile("wrong.cu", "#include \"common.cuh\"\nfloat f() { return missing; }", "sm_80") {
        Err(CudaError::NoCompiler { .. }) => eprintln!("skipped: 1 file, there is no NVRTC"),
        Err(error @ CudaError::Compile { .. }) => {
            let text = error.to_string();
            assert!(text.contains("wrong.cu does not compile for sm_80"), "{text}");
            assert!(text.contains("\"missing\" is undefined"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

/// This file loads no stand-in, so on a machine without a driver it meets none.
#[test]
fn without_a_driver_opening_a_device_says_so() {
    match Cuda::open(Options::default()) {
        Err(error @ CudaError::NoDriver) => {
            assert_eq!(error.to_string(), "no CUDA driver: libcuda cannot be loaded");
        }
        Err(error) => eprintln!("skipped: 1 case, there is a driver ({error})"),
        Ok(cuda) => eprintln!("skipped: 1 case, there is a device ({:?})", cuda.properties()),
    }
}

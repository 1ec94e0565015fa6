//! What the golden tests share: tensors of the oracle, and how far from them a result may be.
#![allow(dead_code)] // each test file uses its own part

pub mod program;
pub mod rig;
pub mod seeds;
pub mod stepped;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use kernels::{Cpu, Isa};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// What memory holds before it is written: not a number, as an `f32` and as two bf16 values.
pub const POISON: f32 = f32::from_bits(0x7fc0_7fc0);

/// A tensor of the oracle; integers are widened.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Tensor {
    pub fn ids(&self) -> Vec<u32> {
        self.values.iter().map(|x| *x as u32).collect()
    }
}

/// The tensors of one safetensors file, by name.
pub struct Tensors(HashMap<String, Tensor>);

impl Tensors {
    pub fn read(path: &Path) -> Tensors {
        let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).expect("a golden file parses");
        let widen = |view: &safetensors::tensor::TensorView<'_>| -> Vec<f32> {
            let data = view.data();
            match view.dtype() {
                Dtype::F32 => quads(data).map(f32::from_le_bytes).collect(),
                Dtype::I32 => quads(data).map(|b| i32::from_le_bytes(b) as f32).collect(),
                Dtype::F64 => data
                    .chunks_exact(8)
                    .map(|b| f64::from_le_bytes(b.try_into().expect("eight bytes")) as f32)
                    .collect(),
                other => panic!("{}: dtype {other:?}", path.display()),
            }
        };
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            (name, Tensor { shape: view.shape().to_vec(), values: widen(&view) })
        });
        Tensors(tensors.collect())
    }

    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    pub fn values(&self, name: &str) -> &[f32] {
        &self.0.get(name).unwrap_or_else(|| panic!("the golden has no tensor {name}")).values
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.values(name).iter().map(|x| *x as u32).collect()
    }
}

fn quads(data: &[u8]) -> impl Iterator<Item = [u8; 4]> + '_ {
    data.chunks_exact(4).map(|b| b.try_into().expect("four bytes"))
}

/// Folders that hold goldens: the project's own, and the whole set where it is at hand.
pub fn golden_folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let whole = root.join("../shared/goldens");
    [root.join("tests/goldens"), whole].into_iter().filter(|f| f.is_dir()).collect()
}

/// Says something that is seen although the test passes: the test runner keeps what `println!`
/// writes to itself.
pub fn tell(what: &str) {
    use std::io::Write;
    writeln!(std::io::stderr(), "{what}").expect("standard error is there");
}

/// One case of an operator's goldens.
pub struct Case {
    pub name: String,
    pub about: Value,
    file: std::rc::Rc<Tensors>,
}

impl Case {
    pub fn size(&self, key: &str) -> usize {
        self.about[key].as_u64().unwrap_or_else(|| panic!("{}: no {key}", self.name)) as usize
    }

    pub fn number(&self, key: &str) -> f64 {
        self.about[key].as_f64().unwrap_or_else(|| panic!("{}: no {key}", self.name))
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.file.get(&format!("{}/{tensor}", self.name)).is_some()
    }

    pub fn tensor(&self, tensor: &str) -> &Tensor {
        let name = format!("{}/{tensor}", self.name);
        self.file.get(&name).unwrap_or_else(|| panic!("the golden has no tensor {name}"))
    }

    pub fn values(&self, tensor: &str) -> &[f32] {
        &self.tensor(tensor).values
    }
}

/// Every case of operator `op` in every folder of goldens; says how many there are.
pub fn cases(op: &str) -> Vec<Case> {
    let mut cases = Vec::new();
    for folder in golden_folders() {
        let path = folder.join("ops").join(op);
        let about = fs::read_to_string(path.with_extension("json")).expect("a golden has its JSON");
        let about: Value = serde_json::from_str(&about).expect("a golden's JSON parses");
        let file = std::rc::Rc::new(Tensors::read(&path.with_extension("safetensors")));
        let listed = about["cases"].as_array().expect("a golden lists its cases");
        tell(&format!("{op}: {} cases in {}", listed.len(), folder.display()));
        cases.extend(listed.iter().map(|about| Case {
            name: about["name"].as_str().expect("a case has a name").to_string(),
            about: about.clone(),
            file: file.clone(),
        }));
    }
    assert!(!cases.is_empty());
    cases
}

/// Every instruction set of this processor, with one thread and with three.
pub fn cpus() -> Vec<Cpu> {
    let sets = Isa::available();
    sets.iter()
        .flat_map(|isa| [1, 3].map(|threads| Cpu::new(*isa, threads).expect("threads start")))
        .collect()
}

/// `max|a - b| / max|b|`: the goldens' error metric. Not-a-number is infinitely wrong.
pub fn error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "the lengths differ");
    let scale = b.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
    let worst = a.iter().zip(b).fold(0.0f64, |m, (a, b)| {
        let d = (f64::from(*a) - f64::from(*b)).abs();
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    });
    if worst == 0.0 { 0.0 } else { worst / scale }
}

/// Fails when `a` is further from the oracle's `b` than `tolerance`.
pub fn assert_close(what: &str, a: &[f32], b: &[f32], tolerance: f64) {
    let error = error(a, b);
    assert!(error <= tolerance, "{what}: error {error:.2e} is above {tolerance:.0e}");
}

/// A seeded generator of test data.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }

    /// About normal: a sum of uniform values.
    pub fn normal(&mut self) -> f32 {
        (0..6).map(|_| (self.next() >> 40) as f32 / (1u32 << 24) as f32 - 0.5).sum::<f32>() * 1.4
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

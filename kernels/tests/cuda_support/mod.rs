//! What tests of the CUDA backend share: the emulated device, seeded values, comparison.
//!
//! Without `DELTAPOOL_TEST_GPU=1` the tests run on stand-ins for libcuda and libnvrtc that run
//! the same kernel files on the processor (`kernels/emu`). They are built here, once for
//! each state of the sources, with g++ ($CXX if set); where there is none the tests are skipped and
//! say so.
#![allow(dead_code)]

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use kernels::cuda::{Capacity, Cuda, DeviceArena, DeviceSpans, Options, Step, StepTable};
use kernels::{CELL_LEN, Form, NO_SLOT, Snapshot, Span, Spans};
use libloading::{Library, Symbol};

/// Whether tests run on a real device.
pub fn on_gpu() -> bool {
    std::env::var_os("DELTAPOOL_TEST_GPU").is_some_and(|value| value == "1")
}

/// The stand-ins, kept loaded for the life of the process.
pub struct StandIn {
    driver: Library,
    compiler: Library,
}

impl StandIn {
    fn call<F: Copy>(library: &Library, name: &str) -> F {
        // SAFETY: callers name a function of emu/ with its type.
        let symbol: Symbol<'_, F> =
            unsafe { library.get(name.as_bytes()) }.expect("the stand-in has it");
        *symbol
    }

    /// Sets the order in which streams, blocks and threads run.
    pub fn seed(&self, seed: u64) {
        let set: unsafe extern "C" fn(u64) = Self::call(&self.driver, "standin_seed");
        // SAFETY: takes a number.
        unsafe { set(seed) }
    }

    /// Kernels run so far.
    pub fn launches(&self) -> u64 {
        let count: unsafe extern "C" fn() -> u64 = Self::call(&self.driver, "standin_launches");
        // SAFETY: gives a number.
        unsafe { count() }
    }

    /// Loads of matrices so far, on this thread, whose rows shared a bank of shared memory.
    pub fn matrix_load_conflicts(&self) -> u64 {
        let count: unsafe extern "C" fn() -> u64 =
            Self::call(&self.driver, "standin_matrix_load_conflicts");
        // SAFETY: gives a number.
        unsafe { count() }
    }

    /// Files compiled so far.
    pub fn compiled(&self) -> u64 {
        let count: unsafe extern "C" fn() -> u64 = Self::call(&self.compiler, "standin_compiled");
        // SAFETY: gives a number.
        unsafe { count() }
    }

    /// What machine it is: devices, the driver's version, bytes on the device, bytes to pin.
    pub fn machine(&self, devices: i32, driver: i32, memory: usize, pinnable: usize) {
        let set: unsafe extern "C" fn(i32, i32, usize, usize) =
            Self::call(&self.driver, "standin_machine");
        // SAFETY: takes numbers.
        unsafe { set(devices, driver, memory, pinnable) }
    }

    /// Bytes of shared memory that the device says it gives a block of threads.
    pub fn shared(&self, bytes: i32) {
        let set: unsafe extern "C" fn(i32) = Self::call(&self.driver, "standin_shared");
        // SAFETY: takes a number.
        unsafe { set(bytes) }
    }

    /// The kernels whose blocks take more shared memory than so many bytes, by name.
    pub fn kernels_over(&self, bytes: usize) -> Vec<&'static str> {
        let list: unsafe extern "C" fn(usize) -> *const i8 =
            Self::call(&self.driver, "standin_kernels_over");
        // SAFETY: a string that ends with a zero and stays until the next call, which only the
        // holder of the one device makes.
        let names = unsafe { std::ffi::CStr::from_ptr(list(bytes).cast()) };
        let names = names.to_str().expect("kernels have ASCII names").to_owned().leak();
        let mut names: Vec<&str> = names.split_whitespace().collect();
        names.sort_unstable();
        names
    }

    /// Has the nth launch from now on fail, and every call after it; none mends the device.
    pub fn fail(&self, nth: Option<u64>) {
        let set: unsafe extern "C" fn(u64) = Self::call(&self.driver, "standin_fail");
        // SAFETY: takes a number.
        unsafe { set(nth.unwrap_or(0)) }
    }

    /// The machine as it is at first.
    pub fn usual_machine(&self) {
        self.machine(1, 13000, 8 << 30, 8 << 30);
        self.shared(163 << 10);
    }

    /// Writes down every launch from now on; none ends it.
    pub fn record(&self, path: Option<&Path>) {
        let set: unsafe extern "C" fn(*const i8) = Self::call(&self.driver, "standin_record");
        let path = path.map(|path| {
            std::ffi::CString::new(path.to_str().expect("test paths are UTF-8")).expect("no zero")
        });
        // SAFETY: a string that ends with a zero, or null.
        unsafe { set(path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr().cast())) }
    }
}

/// A device for one test at a time: the order of the emulated one is one for the process.
pub struct Device {
    pub cuda: Cuda,
    /// None on a real device.
    pub stand_in: Option<&'static StandIn>,
    _alone: MutexGuard<'static, ()>,
}

/// The device to test on, or none, which is told and counted.
pub fn device() -> Option<Device> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(|broken| broken.into_inner());
    let stand_in = if on_gpu() { None } else { Some(stand_in()?) };
    if let Some(stand_in) = stand_in {
        stand_in.usual_machine();
        stand_in.fail(None);
        stand_in.seed(1);
    }
    let cuda = Cuda::open(options()).expect("the device opens");
    Some(Device { cuda, stand_in, _alone: alone })
}

/// How the device that tests run on is opened: the emulated one takes no code of nvcc's, and a real
/// one keeps what it has to compile.
pub fn options() -> Options {
    let cache = on_gpu().then(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-kernels"));
    Options { cache, compile: !on_gpu(), ..Options::default() }
}

/// The emulated device, for what only that does: fail, count, be another machine. None where it
/// cannot be built and on a real device, which is told and counted.
pub fn emulated() -> Option<(Device, &'static StandIn)> {
    if on_gpu() {
        skip("a real device neither fails nor counts when it is told to");
        return None;
    }
    let device = device()?;
    let stand_in = device.stand_in?;
    Some((device, stand_in))
}

/// Runs `body` with several orders of streams, blocks and threads; once on a real device.
pub fn with_seeds(device: &Device, seeds: u64, mut body: impl FnMut(u64)) {
    let Some(stand_in) = device.stand_in else { return body(1) };
    for seed in 1..=seeds {
        stand_in.seed(seed);
        body(seed);
    }
}

/// Tells that a test had nothing to run on.
pub fn skip(what: &str) {
    static SKIPPED: AtomicUsize = AtomicUsize::new(0);
    let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
    eprintln!("skipped: {what} ({count} so far in this file)");
}

/// The loaded stand-ins, or none where no compiler can build them.
pub fn stand_in() -> Option<&'static StandIn> {
    static LOADED: OnceLock<Option<StandIn>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let folder = folder()?;
        // SAFETY: libraries of the project, whose set-up registers kernels and nothing else.
        let load = |name| unsafe { Library::new(folder.join(name)) }.expect("it was just built");
        let driver = load("libcuda.so");
        Some(StandIn { driver, compiler: load("libnvrtc.so") })
    });
    if loaded.is_none() {
        skip("there is no g++ to build the emulated device with");
    }
    loaded.as_ref()
}

/// A change to a file of `cuda/` or `emu/` that a test has to notice: `(file, from, to)`.
pub type Change<'a> = (&'a str, &'a str, &'a str);

/// Names a change to make before the stand-ins are built, its parts on lines of their own.
const CHANGE: &str = "DELTAPOOL_TEST_CUDA_CHANGE";

/// Asserts that the test `name` of this file fails when the kernels are built with a change, and
/// tells `why`.
pub fn assert_caught(name: &str, change: Change<'_>, why: &str) {
    if on_gpu() {
        return skip("changes are made to the emulated device only");
    }
    let Some(_) = stand_in() else { return };
    let (file, from, to) = change;
    let own = std::env::current_exe().expect("a test runs from a file");
    let ran = Command::new(own)
        .args(["--exact", name, "--test-threads=1"])
        .env(CHANGE, [file, from, to].join("\u{1}"))
        .output()
        .expect("a test can run itself");
    let told =
        String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(told.contains("running 1 test"), "there is no test {name}: {told}");
    assert!(!told.contains(NOT_BUILT), "{change:?} does not build: {told}");
    // Either the test fails, or the emulator ends the process where it finds the fault.
    assert!(!ran.status.success(), "{name} passes with {from:?} changed to {to:?}");
    assert!(
        told.contains(why),
        "{name} fails with {from:?} changed to {to:?}, but not by {why}: {told}"
    );
}

/// Runs `body` and then each of its launches again under the sanitizers.
pub fn sanitized(device: &Device, body: impl FnOnce()) {
    let Some(stand_in) = device.stand_in else {
        return skip("sanitizers watch the emulated device only");
    };
    let folder = folder().expect("the stand-in was built there");
    let record = folder.join(format!("launches-{}", std::process::id()));
    stand_in.record(Some(&record));
    body();
    device.cuda.synchronize().expect("it ran");
    stand_in.record(None);
    let _alone = lock(&folder);
    let mut command = Command::new("bash");
    command.arg(folder.join("emu/sanitize.sh")).args([&folder, &record]).env("CXX", compiler());
    let ran = command.output().expect("bash is there");
    fs::remove_file(&record).expect("the record is there");
    let told = String::from_utf8_lossy(&ran.stderr);
    if told.contains("cannot find -ltsan") || told.contains("setarch: ") {
        return skip("the sanitizers cannot run here");
    }
    assert!(ran.status.success(), "{told}");
}

/// What is told when the stand-ins cannot be built.
const NOT_BUILT: &str = "the emulated device does not compile";

fn compiler() -> OsString {
    std::env::var_os("CXX").unwrap_or_else(|| "g++".into())
}

/// Builds the stand-ins, with the change this process was given: the folder they are in, or none
/// without a compiler.
pub fn folder() -> Option<PathBuf> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let version = Command::new(compiler()).arg("--version").output().ok()?.stdout;
        let plain = build(&version, &files(), None);
        let Ok(change) = std::env::var(CHANGE) else { return Some(plain) };
        let parts: Vec<_> = change.split('\u{1}').collect();
        let [file, from, to] = parts[..] else { panic!("a change has three parts") };
        let mut changed = files();
        let (_, text) =
            changed.iter_mut().find(|(path, _)| path == file).expect("a change is of a file");
        assert_eq!(text.matches(from).count(), 1, "{NOT_BUILT}: {from:?} in {file}");
        *text = text.replacen(from, to, 1);
        let object = Path::new(file).with_extension("o");
        // A header is in every object.
        let one = file.ends_with(".cu") || file.ends_with(".cpp");
        Some(build(&version, &changed, one.then_some((&plain, &object))))
    });
    built.clone()
}

/// Test binaries run side by side: one builds in a folder, the others wait.
fn lock(folder: &Path) -> File {
    let lock =
        File::create(folder.with_extension("lock")).expect("the build folder can be written");
    lock.lock().expect("files can be locked");
    lock
}

/// Builds `files` in a folder of their own. Where only one object differs from another build, the
/// rest is taken from there.
fn build(version: &[u8], files: &[(String, String)], like: Option<(&Path, &Path)>) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (files, version).hash(&mut hasher);
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    fs::create_dir_all(&root).expect("the build folder can be written");
    let folder = root.join(format!("{:016x}", hasher.finish()));
    let _alone = lock(&folder);
    if folder.join("built").exists() {
        return folder;
    }
    for (path, text) in files {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().expect("it is in a folder")).expect("it can be written");
        fs::write(path, text).expect("the build folder can be written");
    }
    if let Some((plain, object)) = like {
        for (path, _) in files {
            let other = Path::new(path).with_extension("o");
            if other != object && plain.join(&other).exists() {
                fs::copy(plain.join(&other), folder.join(other)).expect("it can be copied");
            }
        }
    }
    let mut command = Command::new("bash");
    command.arg(folder.join("emu/build.sh")).arg(&folder).env("CXX", compiler());
    let built = command.output().expect("bash is there");
    assert!(built.status.success(), "{NOT_BUILT}: {}", String::from_utf8_lossy(&built.stderr));
    File::create(folder.join("built")).expect("the build folder can be written");
    folder
}

/// All files of `cuda/` and `emu/`, as `(path, text)`.
fn files() -> Vec<(String, String)> {
    let mut files = Vec::new();
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The tests of whole models are in the folder above.
    let kernels = if own.join("emu").is_dir() { own.to_owned() } else { own.join("kernels") };
    for folder in ["cuda", "emu"] {
        for entry in fs::read_dir(kernels.join(folder)).expect("the sources are there") {
            let path = entry.expect("the sources can be listed").path();
            let name = path.file_name().and_then(|name| name.to_str()).expect("ASCII names");
            let text = fs::read_to_string(&path).expect("the sources can be read");
            files.push((format!("{folder}/{name}"), text));
        }
    }
    files.sort();
    files
}

/// Values in -1..1 that look random.
pub struct Values(u64);

impl Values {
    pub fn new(seed: u64) -> Values {
        Values(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn take(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * end as f32) as usize % end
    }
}

/// The largest difference over the largest value of `want`; infinite where one is not a number.
pub fn difference(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-30f32, |largest, x| largest.max(x.abs()));
    let apart = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    apart.fold(0.0f32, |most, apart| if apart.is_nan() { f32::INFINITY } else { most.max(apart) })
        / largest
}

/// Asserts that `got` is `want` to `tolerance` of its largest value.
pub fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    let apart = difference(got, want);
    assert!(apart <= tolerance, "{what}: {apart:e} apart, {tolerance:e} allowed");
}

/// A step of several sequences on a grid of 64: spans of both forms and of many lengths, some in
/// place, some from a shared slot, some from nothing, with snapshots wherever the grid is passed.
pub struct Sequences {
    pub spans: Vec<Span>,
    pub snapshots: Vec<Snapshot>,
    pub rows: usize,
    pub slot_bytes: usize,
    /// Bytes of an arena that holds all slots.
    pub bytes: usize,
}

impl Sequences {
    /// Spans `(start, rows, form)`; the second of each three reads nothing, the third in place.
    pub fn new(list: &[(usize, usize, Form)], slot_bytes: usize) -> Sequences {
        let (mut spans, mut snapshots, mut row, mut slot) = (Vec::new(), Vec::new(), 0, 0);
        let mut fresh = || {
            slot += slot_bytes + 64;
            slot - slot_bytes
        };
        for (i, &(start, rows, form)) in list.iter().enumerate() {
            let write = fresh();
            let read = match i % 3 {
                0 => fresh(),
                1 => NO_SLOT,
                _ => write,
            };
            let first = snapshots.len();
            let passed = (1..=rows).filter(|after| (start + after) % CELL_LEN == 0);
            snapshots.extend(passed.map(|after_rows| Snapshot { after_rows, slot: fresh() }));
            let kept = first..snapshots.len();
            let absorbed_from = 0;
            let table = 0..0;
            let first_row = row;
            let snapshots = kept;
            spans.push(Span {
                first_row,
                rows,
                start,
                form,
                absorbed_from,
                read,
                write,
                table,
                snapshots,
            });
            row += rows;
        }
        let bytes = slot + 64;
        Sequences { spans, snapshots, rows: row, slot_bytes, bytes }
    }

    pub fn spans(&self) -> Spans<'_> {
        Spans::new(&self.spans, &self.snapshots, self.rows, self.slot_bytes)
    }

    /// The spans on the device, filled up with `padding` rows.
    pub fn upload<'a>(
        &self,
        cuda: &Cuda,
        table: &'a mut StepTable,
        arena: &DeviceArena,
        padding: usize,
    ) -> DeviceSpans<'a> {
        let step = Step {
            spans: self.spans(),
            tables: &[],
            block_bytes: 0,
            tokens: &vec![0; self.rows],
            padded_rows: self.rows + padding,
            arena,
        };
        table.upload(cuda, step).expect("it fits")
    }

    /// A table they fit into.
    pub fn table(&self, cuda: &Cuda, padding: usize) -> StepTable {
        let spans = self.spans.len() + padding;
        let (rows, snapshots) = (self.rows + padding, self.snapshots.len());
        StepTable::new(cuda, Capacity { spans, rows, snapshots, blocks: 0 }).expect("room")
    }
}

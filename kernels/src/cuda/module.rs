//! Kernel files, compiled and loaded.
//!
//! The program carries the text of every file, and what nvcc made of it if nvcc was there at the
//! build. Without that a file is compiled for the device when one of its kernels is first used
//! (about half a second), and kept in a folder from run to run. A kept file holds everything it was
//! made from, so a wrong one is never taken for the right one: it is compiled again.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUfunction_attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, sys as driver};
use cudarc::nvrtc::result::{compile_program, destroy_program, get_program_log};
use cudarc::nvrtc::{Ptx, sys};

use super::CudaError;
use super::error::Named;
use super::launch::Kernel;

/// A kernel file.
#[derive(Debug)]
pub struct Source {
    /// Its name, as `kda.cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// What nvcc made of it; empty if it was not there.
    fatbin: &'static [u8],
}

impl Source {
    /// Whether the program carries its compiled kernels.
    pub fn is_carried(&self) -> bool {
        !self.fatbin.is_empty()
    }
}

/// Every kernel file.
pub static SOURCES: &[Source] = &include!(concat!(env!("OUT_DIR"), "/cuda_sources.rs"));

/// What kernel files include, by name.
const HEADERS: [(&CStr, &str); 2] = [
    (c"common.cuh", include_str!("../../cuda/common.cuh")),
    (c"attention.cuh", include_str!("../../cuda/attention.cuh")),
];

/// Bytes of shared memory that a kernel may have without asking.
const COMMON_SHARED_BYTES: usize = 48 << 10;

/// The compiler's name for a compute capability. From 9.0 on each generation has instructions that
/// no later one has.
pub fn arch_of(capability: (i32, i32)) -> String {
    let own = if capability >= (9, 0) { "a" } else { "" };
    format!("sm_{}{}{own}", capability.0, capability.1)
}

/// Where compiled kernels are kept unless told otherwise: the user's cache folder, if there is one.
pub fn default_cache() -> Option<PathBuf> {
    let of_home = || std::env::home_dir().map(|home| home.join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(of_home)?;
    Some(cache.join("deltapool").join("cuda"))
}

/// The loaded files and kernels of a device.
#[derive(Debug)]
pub(super) struct Modules {
    arch: String,
    cache: Option<PathBuf>,
    compile: bool,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    files: HashMap<&'static str, Arc<CudaModule>>,
    kernels: HashMap<&'static str, CudaFunction>,
}

impl Modules {
    pub fn new(arch: String, cache: Option<PathBuf>, compile: bool) -> Modules {
        Modules { arch, cache, compile, loaded: Mutex::default() }
    }

    /// A kernel ready to be launched, its file compiled and loaded at first use.
    pub fn function<A>(
        &self,
        context: &Arc<CudaContext>,
        kernel: &Kernel<A>,
    ) -> Result<driver::CUfunction, CudaError> {
        let mut loaded = self.loaded.lock().expect("nobody panics while loading a kernel");
        if let Some(function) = loaded.kernels.get(kernel.name) {
            return Ok(function.cu_function());
        }
        let module = match loaded.files.get(kernel.file) {
            Some(module) => Arc::clone(module),
            None => {
                let image = self.image(source(kernel.file))?;
                let module = context.load_module(Ptx::from_binary(image));
                let module = module.named("loading compiled kernels")?;
                loaded.files.insert(kernel.file, Arc::clone(&module));
                module
            }
        };
        let function = module.load_function(kernel.name).named("finding a kernel in its file")?;
        check_argument(&function, kernel)?;
        if kernel.shared_bytes > COMMON_SHARED_BYTES {
            let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = function.set_attribute(most, kernel.shared_bytes as i32);
            set.named("asking for shared memory")?;
        }
        let handle = function.cu_function();
        loaded.kernels.insert(kernel.name, function);
        Ok(handle)
    }

    /// The code of a file for this device.
    fn image(&self, source: &Source) -> Result<Vec<u8>, CudaError> {
        if source.is_carried() && !self.compile {
            return Ok(source.fatbin.to_vec());
        }
        // SAFETY: loads the compiler's library, which runs no code of ours.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoCompiler { file: source.name.into() });
        }
        let key = Key::new(source, &self.arch);
        let kept = self.cache.as_ref().map(|folder| folder.join(key.file_name()));
        if let Some(image) = kept.as_ref().and_then(|path| key.read(path)) {
            return Ok(image);
        }
        let image = compile(source.name, source.text, &self.arch)?.image;
        if let Some(path) = kept {
            // Without a kept file the next run compiles again, and nothing else.
            let _ = key.write(&path, &image);
        }
        Ok(image)
    }
}

fn source(file: &str) -> &'static Source {
    SOURCES.iter().find(|source| source.name == file).expect("a kernel names a file that is there")
}

/// The struct that the launch code passes is as long as the one the kernel takes.
fn check_argument<A>(function: &CudaFunction, kernel: &Kernel<A>) -> Result<(), CudaError> {
    let (mut offset, mut device) = (0, 0);
    let handle = function.cu_function();
    // SAFETY: the function is loaded; two numbers are written to where it is told.
    let asked = unsafe { driver::cuFuncGetParamInfo(handle, 0, &mut offset, &mut device) };
    asked.result().named("asking for a kernel's argument")?;
    let host = size_of::<A>();
    if device != host {
        return Err(CudaError::Argument { kernel: kernel.name, device, host });
    }
    Ok(())
}

/// A kernel file as its compiler leaves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Code for the device.
    pub image: Vec<u8>,
    /// What each kernel uses: registers, memory of its own, barriers.
    pub report: String,
}

/// Compiles a kernel file for `arch` (as `sm_90a`) with NVRTC.
///
/// # Errors
/// When there is no compiler, or it refuses: then with what it says.
pub fn compile(file: &str, text: &str, arch: &str) -> Result<Compiled, CudaError> {
    // SAFETY: as in `image`.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoCompiler { file: file.into() });
    }
    let failed = |log: String| CudaError::Compile { file: file.into(), arch: arch.into(), log };
    let c_string = |text: &str| CString::new(text).map_err(|_| failed("a zero byte".into()));
    let (text, name) = (c_string(text)?, c_string(file)?);
    let texts = HEADERS.iter().map(|(_, text)| c_string(text)).collect::<Result<Vec<_>, _>>()?;
    let headers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
    let names = HEADERS.map(|(name, _)| name.as_ptr());
    let mut program = ptr::null_mut();
    // SAFETY: every string and list outlives the program, which ends in this function.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &mut program,
            text.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as i32,
            headers.as_ptr(),
            names.as_ptr(),
        )
    };
    created.result().map_err(|error| failed(format!("{error:?}")))?;
    let options =
        [format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--ptxas-options=-v".into()];
    // SAFETY: the program was created above and is destroyed below; a log ends with a zero.
    let (image, log) = unsafe {
        let image = compile_program(program, &options).and_then(|()| cubin(program));
        let log = get_program_log(program)
            .map(|log| CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned());
        let _ = destroy_program(program);
        (image, log.unwrap_or_default())
    };
    match image {
        Ok(image) => Ok(Compiled { image, report: log }),
        Err(error) if log.is_empty() => Err(failed(format!("{error:?}"))),
        Err(_) => Err(failed(log)),
    }
}

/// # Safety
/// The program is compiled and not destroyed.
unsafe fn cubin(program: sys::nvrtcProgram) -> Result<Vec<u8>, cudarc::nvrtc::result::NvrtcError> {
    let mut bytes = 0;
    // SAFETY: the caller's promise; the image has as many bytes as were asked for.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &mut bytes).result()?;
        let mut image = vec![0u8; bytes];
        sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()).result()?;
        Ok(image)
    }
}

/// All that an image depends on.
pub(super) struct Key {
    name: &'static str,
    arch: String,
    text: Vec<u8>,
}

impl Key {
    pub fn new(source: &Source, arch: &str) -> Key {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is there; two numbers are written to where it is told.
        let asked = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        if asked.result().is_err() {
            (major, minor) = (0, 0);
        }
        let [common, attention] = HEADERS.map(|(_, text)| text);
        let text = format!("{arch} {major}.{minor}\n{common}\n{attention}\n{}", source.text);
        Key { name: source.name, arch: arch.into(), text: text.into_bytes() }
    }

    pub fn file_name(&self) -> String {
        format!("{}-{}-{:016x}.cubin", self.name, self.arch, hash(&self.text))
    }

    /// The image kept at `path`, if it is whole and was made from the same.
    pub fn read(&self, path: &Path) -> Option<Vec<u8>> {
        let bytes = fs::read(path).ok()?;
        let image = bytes.strip_prefix(self.head().as_slice())?;
        let (image, sum) = image.split_last_chunk::<8>()?;
        (hash(image).to_le_bytes() == *sum).then(|| image.to_vec())
    }

    /// Keeps an image. A file appears whole or not at all, also with several programs at it.
    fn write(&self, path: &Path, image: &[u8]) -> std::io::Result<()> {
        let folder = path.parent().expect("the path has a folder before its name");
        fs::create_dir_all(folder)?;
        let unfinished = path.with_extension(format!("{}.unfinished", std::process::id()));
        let mut file = fs::File::create(&unfinished)?;
        file.write_all(&self.head())?;
        file.write_all(image)?;
        file.write_all(&hash(image).to_le_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, path)
    }

    fn head(&self) -> Vec<u8> {
        let mut head = (self.text.len() as u64).to_le_bytes().to_vec();
        head.extend_from_slice(&self.text);
        head
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

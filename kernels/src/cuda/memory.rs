//! Memory of a device and of the tier behind it, and the copies between them.
//!
//! ```text
//!               compute stream:  kernel  kernel | event              wait  kernel
//!                                               v                     ^
//!   copy stream (one a direction):         wait  copy copy copy  event
//! ```
//!
//! A transfer begins after every kernel given before it and runs beside those given after it; what
//! it writes may be read by kernels after [`Cuda::follow`].

use std::marker::PhantomData;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaEvent, result, sys};

use super::device::Owner;
use super::error::{Named, is_out_of_memory};
use super::{Cuda, CudaError};
use crate::arena::Arena;

/// An allocation, freed when it is dropped.
#[derive(Debug)]
struct Memory {
    at: sys::CUdeviceptr,
    bytes: usize,
    owner: Arc<Owner>,
}

impl Memory {
    /// `bytes` zero bytes.
    fn zeros(cuda: &Cuda, bytes: usize) -> Result<Memory, CudaError> {
        let owner = Arc::clone(&cuda.owner);
        if bytes == 0 {
            return Ok(Memory { at: 0, bytes, owner });
        }
        owner.context.bind_to_thread().named("entering the device's context")?;
        // SAFETY: nothing is read before it is filled below.
        let at = match unsafe { result::malloc_sync(bytes) } {
            Err(error) if is_out_of_memory(error) => {
                return Err(CudaError::OutOfMemory { bytes, free: cuda.free_bytes()? });
            }
            other => other.named("allocating device memory")?,
        };
        let memory = Memory { at, bytes, owner };
        // SAFETY: the allocation has as many bytes.
        let filled = unsafe { result::memset_d8_async(at, 0, bytes, cuda.stream.cu_stream()) };
        filled.named("clearing device memory")?;
        Ok(memory)
    }

    fn write(&mut self, cuda: &Cuda, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        check(self.bytes, offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        self.owner.context.bind_to_thread().named("entering the device's context")?;
        let (at, stream) = (self.at + offset as u64, cuda.stream.cu_stream());
        // SAFETY: in bounds by `check`. The source is pageable, so the driver has copied it when
        // the call returns.
        unsafe { result::memcpy_htod_async(at, bytes, stream) }.named("copying to the device")
    }

    /// Copies after the kernels given before. The target stays where it is until
    /// [`Cuda::finish`].
    fn start_read(&self, cuda: &Cuda, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        check(self.bytes, offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        self.owner.context.bind_to_thread().named("entering the device's context")?;
        let (at, stream) = (self.at + offset as u64, cuda.stream.cu_stream());
        // SAFETY: in bounds by `check`, and the callers do not give the target back before
        // `finish`.
        let copied = unsafe { result::memcpy_dtoh_async(bytes, at, stream) };
        copied.named("copying from the device")
    }

    fn read(&self, cuda: &Cuda, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        let copied = self.start_read(cuda, offset, bytes);
        cuda.finish().and(copied)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.owner.free(self.at);
        }
    }
}

fn check(all: usize, offset: usize, bytes: usize) {
    let end = offset.checked_add(bytes);
    assert!(end.is_some_and(|end| end <= all), "{bytes} bytes at {offset} leave {all} bytes");
}

/// The bytes of the device tier, or of a model's weights there: one allocation, zero at first.
/// Offsets are in bytes, as in [`Arena`].
#[derive(Debug)]
pub struct DeviceArena {
    memory: Memory,
}

impl DeviceArena {
    /// An arena of `bytes` zero bytes.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(cuda: &Cuda, bytes: usize) -> Result<DeviceArena, CudaError> {
        Ok(DeviceArena { memory: Memory::zeros(cuda, bytes)? })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// Where it lies on the device: a graph that names it is of this place.
    pub fn place(&self) -> u64 {
        self.address()
    }

    /// Copies `bytes` to `offset`, after the kernels given before.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When they leave the arena.
    pub fn write(&mut self, cuda: &Cuda, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        self.memory.write(cuda, offset, bytes)
    }

    /// Waits for the kernels given before and copies what is at `offset` into `bytes`.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When they leave the arena.
    pub fn read(&self, cuda: &Cuda, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.memory.read(cuda, offset, bytes)
    }

    /// Copies `len` bytes from `source` to `target`, after the kernels given before.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When either leaves the arena or they overlap.
    pub fn copy_within(
        &mut self,
        cuda: &Cuda,
        source: usize,
        target: usize,
        len: usize,
    ) -> Result<(), CudaError> {
        check(self.bytes(), source, len);
        check(self.bytes(), target, len);
        assert!(source.abs_diff(target) >= len, "{len} bytes at {source} and {target} overlap");
        self.memory.owner.context.bind_to_thread().named("entering the device's context")?;
        let (from, to) = (self.memory.at + source as u64, self.memory.at + target as u64);
        // SAFETY: both ends are in bounds by `check` and apart by the assertion.
        unsafe { result::memcpy_dtod_async(to, from, len, cuda.stream.cu_stream()) }
            .named("copying on the device")
    }

    /// Makes every byte `byte`, after the kernels given before.
    ///
    /// # Errors
    /// When the device fails.
    pub fn fill(&mut self, cuda: &Cuda, byte: u8) -> Result<(), CudaError> {
        if self.bytes() == 0 {
            return Ok(());
        }
        self.memory.owner.context.bind_to_thread().named("entering the device's context")?;
        let stream = cuda.stream.cu_stream();
        // SAFETY: the allocation has as many bytes.
        unsafe { result::memset_d8_async(self.memory.at, byte, self.bytes(), stream) }
            .named("filling device memory")
    }

    /// `len` values at byte `offset`.
    ///
    /// # Panics
    /// When they leave the arena or are not aligned to 16 bytes, as kernels read them.
    pub fn slice<T: Pod>(&self, offset: usize, len: usize) -> DeviceSlice<'_, T> {
        check(self.bytes(), offset, len * size_of::<T>());
        assert!(offset.is_multiple_of(16), "offset {offset} is not a multiple of 16");
        DeviceSlice { at: self.address() + offset as u64, len, values: PhantomData }
    }

    /// Where it begins.
    pub(super) fn address(&self) -> u64 {
        self.memory.at
    }
}

/// Values on the device: activations, tables.
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    memory: Memory,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// `len` values of zero bytes.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn zeros(cuda: &Cuda, len: usize) -> Result<DeviceBuffer<T>, CudaError> {
        let memory = Memory::zeros(cuda, len * size_of::<T>())?;
        Ok(DeviceBuffer { memory, len, values: PhantomData })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn of(cuda: &Cuda, values: &[T]) -> Result<DeviceBuffer<T>, CudaError> {
        let mut buffer = DeviceBuffer::zeros(cuda, values.len())?;
        buffer.write(cuda, 0, values)?;
        Ok(buffer)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `values` to the place of value `first`, after the kernels given before.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When they leave the buffer.
    pub fn write(&mut self, cuda: &Cuda, first: usize, values: &[T]) -> Result<(), CudaError> {
        self.memory.write(cuda, first * size_of::<T>(), bytemuck::cast_slice(values))
    }

    /// Waits for the kernels given before and copies all values.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&self, cuda: &Cuda) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::zeroed(); self.len];
        self.read_into(cuda, &mut values)?;
        Ok(values)
    }

    /// Waits for the kernels given before and copies the first values.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn read_into(&self, cuda: &Cuda, values: &mut [T]) -> Result<(), CudaError> {
        self.memory.read(cuda, 0, bytemuck::cast_slice_mut(values))
    }

    /// Starts a copy of values from `first` on, for a caller that keeps `bytes` where they are
    /// until [`Cuda::finish`].
    pub(super) fn start_read(
        &self,
        cuda: &Cuda,
        first: usize,
        bytes: &mut [u8],
    ) -> Result<(), CudaError> {
        self.memory.start_read(cuda, first * size_of::<T>(), bytes)
    }

    /// All values.
    pub fn slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice { at: self.memory.at, len: self.len, values: PhantomData }
    }

    /// Where it begins.
    pub(super) fn address(&self) -> u64 {
        self.memory.at
    }
}

impl DeviceBuffer<f32> {
    /// The first `count` rows of `width` values.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn rows(&self, count: usize, width: usize) -> DeviceRows<'_> {
        assert!(count * width <= self.len, "{count} rows of {width} of {} values", self.len);
        let extent = Extent { at: self.memory.at, count, stride: width, width };
        DeviceRows { extent, values: PhantomData }
    }

    /// The first `count` rows of `width` values, to write.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn rows_mut(&mut self, count: usize, width: usize) -> DeviceRowsMut<'_> {
        let extent = self.rows(count, width).extent;
        DeviceRowsMut { extent, values: PhantomData }
    }
}

/// Values on the device, to read.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSlice<'a, T> {
    pub(super) at: u64,
    pub(super) len: usize,
    values: PhantomData<&'a T>,
}

impl<'a, T: Pod> DeviceSlice<'a, T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Those at `range`.
    ///
    /// # Panics
    /// When the range leaves them.
    pub fn part(self, range: Range<usize>) -> DeviceSlice<'a, T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        let at = self.at + (range.start * size_of::<T>()) as u64;
        DeviceSlice { at, len: range.len(), values: PhantomData }
    }

    /// The first `len` values of another type in the same bytes.
    pub(super) fn cast<U: Pod>(self, len: usize) -> DeviceSlice<'a, U> {
        assert!(len * size_of::<U>() <= self.len * size_of::<T>(), "{len} values are not there");
        DeviceSlice { at: self.at, len, values: PhantomData }
    }
}

/// Where rows lie: `count` rows of `width` values, one every `stride` values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub at: u64,
    pub count: usize,
    pub stride: usize,
    pub width: usize,
}

impl Extent {
    fn columns(self, from: usize, width: usize) -> Extent {
        assert!(from + width <= self.width, "columns {from}+{width} leave rows {}", self.width);
        Extent { at: self.at + (from * size_of::<f32>()) as u64, width, ..self }
    }

    fn first(self, count: usize) -> Extent {
        assert!(count <= self.count, "{count} rows of {}", self.count);
        Extent { count, ..self }
    }

    /// Whether rows can be read as runs of four values.
    pub fn by_four(&self) -> bool {
        self.at.is_multiple_of(16) && self.stride.is_multiple_of(4) && self.width.is_multiple_of(4)
    }
}

/// Activations on the device: rows of `f32` that may be part of wider rows ([`Rows`](crate::Rows)).
#[derive(Debug, Clone, Copy)]
pub struct DeviceRows<'a> {
    pub(super) extent: Extent,
    values: PhantomData<&'a f32>,
}

/// Activations on the device, to write.
#[derive(Debug)]
pub struct DeviceRowsMut<'a> {
    pub(super) extent: Extent,
    values: PhantomData<&'a mut f32>,
}

impl DeviceRows<'_> {
    /// Columns `from..from + width` of every row.
    ///
    /// # Panics
    /// When the columns leave the rows.
    pub fn columns(self, from: usize, width: usize) -> Self {
        DeviceRows { extent: self.extent.columns(from, width), ..self }
    }

    /// The first `count` rows.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn first(self, count: usize) -> Self {
        DeviceRows { extent: self.extent.first(count), ..self }
    }
}

impl DeviceRowsMut<'_> {
    /// Columns `from..from + width` of every row.
    ///
    /// # Panics
    /// When the columns leave the rows.
    pub fn columns(self, from: usize, width: usize) -> Self {
        DeviceRowsMut { extent: self.extent.columns(from, width), ..self }
    }

    /// The first `count` rows.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn first(self, count: usize) -> Self {
        DeviceRowsMut { extent: self.extent.first(count), ..self }
    }
}

/// Why a host arena is not pinned: copies to and from it are slower and hold up who asks for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotPinned {
    /// It is larger than what may be pinned.
    Budget {
        /// Bytes of the arena.
        bytes: usize,
        /// Bytes that may be pinned.
        budget: usize,
    },
    /// The system refuses.
    Refused {
        /// Bytes of the arena.
        bytes: usize,
        /// What the driver says.
        reason: String,
    },
}

impl std::fmt::Display for NotPinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotPinned::Budget { bytes, budget } => {
                write!(f, "host memory of {bytes} bytes is not pinned: {budget} may be")
            }
            NotPinned::Refused { bytes, reason } => {
                write!(f, "host memory of {bytes} bytes is not pinned: {reason}")
            }
        }
    }
}

/// The bytes of the host tier: pinned, so that copies run at the link's rate beside kernels.
#[derive(Debug)]
pub struct HostArena {
    bytes: HostBytes,
    /// The last transfer in each direction: the bytes may be touched when both are done.
    last: [Option<Arc<CudaEvent>>; 2],
}

/// Bytes of the host that a device copies to and from.
#[derive(Debug)]
pub(super) enum HostBytes {
    Pinned(Pinned),
    Pageable(Arena),
}

impl HostBytes {
    /// `bytes` zero bytes, pinned if the system agrees.
    pub fn pinned_or_not(cuda: &Cuda, bytes: usize) -> Result<HostBytes, CudaError> {
        match Pinned::new(cuda, bytes) {
            Ok(pinned) => Ok(HostBytes::Pinned(pinned)),
            Err(_) => HostBytes::pageable(bytes),
        }
    }

    fn pageable(bytes: usize) -> Result<HostBytes, CudaError> {
        let arena = Arena::new(bytes);
        Ok(HostBytes::Pageable(arena.map_err(|_| CudaError::OutOfMemory { bytes, free: 0 })?))
    }

    /// How many.
    fn len(&self) -> usize {
        match self {
            HostBytes::Pinned(pinned) => pinned.bytes,
            HostBytes::Pageable(arena) => arena.bytes(),
        }
    }

    /// Some of the bytes. Whoever starts a copy of them waits for it before it asks for them
    /// again or drops them; copies of others may be under way.
    pub fn part(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        match self {
            HostBytes::Pinned(pinned) => pinned.part(at, bytes),
            HostBytes::Pageable(arena) => arena.values_mut(at, bytes),
        }
    }
}

impl Default for HostBytes {
    fn default() -> HostBytes {
        HostBytes::Pageable(Arena::new(0).expect("no bytes are always there"))
    }
}

impl HostArena {
    /// An arena of `bytes` bytes, pinned when `budget` allows it and the system gives it; else
    /// pageable, with the reason for a warning.
    ///
    /// # Errors
    /// When the system gives no memory at all.
    pub fn new(
        cuda: &Cuda,
        bytes: usize,
        budget: usize,
    ) -> Result<(HostArena, Option<NotPinned>), CudaError> {
        let pageable =
            |why| Ok((HostArena { bytes: HostBytes::pageable(bytes)?, last: [None, None] }, why));
        if bytes == 0 {
            return pageable(None);
        }
        if bytes > budget {
            return pageable(Some(NotPinned::Budget { bytes, budget }));
        }
        match Pinned::new(cuda, bytes) {
            Ok(pinned) => {
                Ok((HostArena { bytes: HostBytes::Pinned(pinned), last: [None, None] }, None))
            }
            Err(error) => pageable(Some(NotPinned::Refused { bytes, reason: error.to_string() })),
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether copies run beside kernels.
    pub fn is_pinned(&self) -> bool {
        matches!(self.bytes, HostBytes::Pinned(_))
    }

    /// Waits for the transfers of this arena and gives its bytes.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&mut self) -> Result<&[u8], CudaError> {
        Ok(&*self.write()?)
    }

    /// Waits for the transfers of this arena and gives its bytes, to write.
    ///
    /// # Errors
    /// When the device fails.
    pub fn write(&mut self) -> Result<&mut [u8], CudaError> {
        self.wait()?;
        let bytes = self.bytes.len();
        Ok(self.bytes.part(0, bytes))
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        for last in &mut self.last {
            if let Some(event) = last {
                event.synchronize().named("waiting for a transfer")?;
                *last = None;
            }
        }
        Ok(())
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        // A device that failed has stopped, so it writes nothing any more.
        let _ = self.wait();
    }
}

/// Pinned memory with plain flags: write-combined memory would be slow to read, and tiers are read
/// to be packed and stored.
#[derive(Debug)]
pub(super) struct Pinned {
    start: *mut u8,
    bytes: usize,
    owner: Arc<Owner>,
}

// SAFETY: it owns its allocation as a `Vec<u8>` does.
unsafe impl Send for Pinned {}
// SAFETY: shared references give no access.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` zero bytes, at least one.
    pub fn new(cuda: &Cuda, bytes: usize) -> Result<Pinned, CudaError> {
        let owner = Arc::clone(&cuda.owner);
        owner.context.bind_to_thread().named("entering the device's context")?;
        // SAFETY: filled below, before it is read.
        let start = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let start: *mut u8 = start.named("pinning host memory")?.cast();
        // SAFETY: the allocation has as many bytes.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned { start, bytes, owner })
    }

    /// The bytes. Whoever starts a copy waits for it before it calls this again.
    pub fn all(&mut self) -> &mut [u8] {
        self.part(0, self.bytes)
    }

    /// Some of the bytes. Copies of others may be under way.
    ///
    /// # Panics
    /// When they leave the allocation.
    fn part(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        check(self.bytes, at, bytes);
        // SAFETY: in bounds by `check` and initialized in `new`; `&mut self` keeps others out, and
        // the device by the callers' promise about these bytes.
        unsafe { slice::from_raw_parts_mut(self.start.add(at), bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.owner.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `new` and given up here, after the copies it is part of.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

/// Which way a transfer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device tier to the host tier.
    ToHost,
    /// From the host tier to the device tier.
    ToDevice,
}

/// One run of bytes of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Byte offset in the device's arena.
    pub device: usize,
    /// Byte offset in the host's arena.
    pub host: usize,
    /// How many.
    pub bytes: usize,
}

/// Copies on their way between the tiers.
#[derive(Debug)]
pub struct Transfer {
    done: Arc<CudaEvent>,
}

impl Transfer {
    /// Waits until it is over.
    ///
    /// # Errors
    /// When the device failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.done.synchronize().named("waiting for a transfer")
    }

    /// Whether it is over, without waiting.
    ///
    /// # Errors
    /// When the device failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.done.try_is_complete().named("asking for a transfer")
    }
}

impl Cuda {
    /// Copies pieces between the tiers, after the kernels given before and beside those given
    /// after. Until it is over no kernel may touch what it writes, nor write what it reads.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When a piece leaves an arena.
    pub fn transfer(
        &self,
        direction: Direction,
        pieces: &[Piece],
        device: &mut DeviceArena,
        host: &mut HostArena,
    ) -> Result<Transfer, CudaError> {
        for piece in pieces {
            check(device.bytes(), piece.device, piece.bytes);
            check(host.bytes(), piece.host, piece.bytes);
        }
        let stream = &self.copies[direction as usize];
        let before = self.stream.record_event(None).named("recording an event")?;
        stream.wait(&before).named("waiting for an event")?;
        // What the other direction still reads or writes in these arenas comes first.
        if let Some(other) = &host.last[1 - direction as usize] {
            stream.wait(other).named("waiting for an event")?;
        }
        let handle = stream.cu_stream();
        let copied = pieces.iter().filter(|piece| piece.bytes > 0).try_for_each(|piece| {
            let at = device.address() + piece.device as u64;
            let bytes = host.bytes.part(piece.host, piece.bytes);
            // SAFETY: in bounds by `check`. The arena waits for the event recorded below before it
            // gives its bytes to anybody or frees them.
            unsafe {
                match direction {
                    Direction::ToHost => result::memcpy_dtoh_async(bytes, at, handle),
                    Direction::ToDevice => result::memcpy_htod_async(at, bytes, handle),
                }
            }
        });
        // Also after a refusal: pieces before it are on their way.
        let done = Arc::new(stream.record_event(None).named("recording an event")?);
        host.last[direction as usize] = Some(Arc::clone(&done));
        copied.named("copying between the tiers")?;
        Ok(Transfer { done })
    }

    /// Lets the kernels given from now on wait for a transfer.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn follow(&self, transfer: &Transfer) -> Result<(), CudaError> {
        self.stream.wait(&transfer.done).named("waiting for an event")
    }
}

//! An arena: the bytes behind the units of one tier.
//!
//! One anonymous map, zeroed lazily by the system. Who may write which part is the
//! business of the pools; an arena only checks bounds and alignment. Offsets are in bytes.

use std::marker::PhantomData;
use std::num::NonZero;
use std::ptr::NonNull;

use bytemuck::Pod;
use memmap2::MmapMut;
use thiserror::Error;

const ALIGN: usize = 64;

/// An arena that the system would not give.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[error("the system refuses an arena of {bytes} bytes")]
pub struct ArenaError {
    /// Bytes asked for.
    pub bytes: usize,
}

/// Arenas from this size on ask for huge pages: a product that reads weights, or a step that goes
/// over states, meets a new page of 4 KiB more often than the processor can look up.
const HUGE_BYTES: usize = 4 << 20;

/// The bytes of one tier, or of a model's weights.
#[derive(Debug)]
pub struct Arena {
    /// Keeps the memory; none for an arena of no bytes.
    _map: Option<MmapMut>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an arena owns its map as a `Vec<u8>` owns its allocation.
unsafe impl Send for Arena {}
// SAFETY: shared references only read.
unsafe impl Sync for Arena {}

impl Arena {
    /// An arena of `bytes` zero bytes.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new(bytes: usize) -> Result<Arena, ArenaError> {
        if bytes == 0 {
            let nowhere = const { NonZero::new(ALIGN).expect("an alignment is not zero") };
            return Ok(Arena { _map: None, start: NonNull::without_provenance(nowhere), bytes });
        }
        let mut map = MmapMut::map_anon(bytes).map_err(|_| ArenaError { bytes })?;
        #[cfg(target_os = "linux")]
        if bytes >= HUGE_BYTES {
            // Without them it is slower, and nothing else.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        let start = NonNull::new(map.as_mut_ptr()).expect("a map is somewhere");
        assert!(start.as_ptr().addr().is_multiple_of(ALIGN), "a map begins with a page");
        Ok(Arena { _map: Some(map), start, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `len` values at byte `offset`.
    ///
    /// # Panics
    /// When they leave the arena or `offset` is not a multiple of their alignment.
    pub fn values<T: Pod>(&self, offset: usize, len: usize) -> &[T] {
        check::<T>(self.bytes, offset, len);
        // SAFETY: in bounds and aligned by `check`; every bit pattern is a `T`; `&self` keeps
        // writers out.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(offset).cast(), len) }
    }

    /// `len` values at byte `offset`, to write.
    ///
    /// # Panics
    /// As [`Arena::values`].
    pub fn values_mut<T: Pod>(&mut self, offset: usize, len: usize) -> &mut [T] {
        check::<T>(self.bytes, offset, len);
        // SAFETY: as above; `&mut self` keeps all others out.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(offset).cast(), len) }
    }

    /// [`Arena::values`] of `f32`.
    ///
    /// # Panics
    /// When they leave the arena or `offset` is not a multiple of 4.
    pub fn f32s(&self, offset: usize, len: usize) -> &[f32] {
        self.values(offset, len)
    }

    /// [`Arena::values_mut`] of `f32`.
    ///
    /// # Panics
    /// As [`Arena::f32s`].
    pub fn f32s_mut(&mut self, offset: usize, len: usize) -> &mut [f32] {
        self.values_mut(offset, len)
    }

    /// Copies `len` bytes from `source` to `target`; the two may overlap.
    ///
    /// # Panics
    /// When either leaves the arena.
    pub fn copy_within(&mut self, source: usize, target: usize, len: usize) {
        assert!(source.max(target).checked_add(len).is_some_and(|end| end <= self.bytes));
        // SAFETY: both ends are in bounds by the assertion; `copy` allows overlap.
        unsafe {
            let start = self.start.as_ptr();
            std::ptr::copy(start.add(source), start.add(target), len);
        }
    }

    /// Copies `len` bytes at `source` of another arena to `target`.
    ///
    /// # Panics
    /// When they leave either arena.
    pub fn copy_from(&mut self, target: usize, other: &Arena, source: usize, len: usize) {
        assert!(target.checked_add(len).is_some_and(|end| end <= self.bytes));
        assert!(source.checked_add(len).is_some_and(|end| end <= other.bytes));
        // SAFETY: both ends are in bounds by the assertions, and `&mut self` keeps the two arenas
        // apart.
        unsafe {
            let (from, to) = (other.start.as_ptr().add(source), self.start.as_ptr().add(target));
            std::ptr::copy_nonoverlapping(from, to, len);
        }
    }

    /// Access for the tasks of a job, which write disjoint parts.
    pub fn parts(&mut self) -> ArenaParts<'_> {
        ArenaParts { start: self.start.as_ptr(), bytes: self.bytes, arena: PhantomData }
    }
}

#[inline]
fn check<T: Pod>(bytes: usize, offset: usize, len: usize) {
    const { assert!(align_of::<T>() <= ALIGN, "an arena starts at a multiple of 64") };
    let align = align_of::<T>();
    assert!(offset.is_multiple_of(align), "offset {offset} is not a multiple of {align}");
    let end = len.checked_mul(size_of::<T>()).and_then(|len| len.checked_add(offset));
    assert!(end.is_some_and(|end| end <= bytes), "{len} values at {offset} leave {bytes} bytes");
}

/// An arena of which the tasks of a job write disjoint parts.
#[derive(Clone, Copy)]
pub struct ArenaParts<'a> {
    start: *mut u8,
    bytes: usize,
    arena: PhantomData<&'a mut Arena>,
}

// SAFETY: references are given only by `unsafe` functions whose callers vouch that parts in use at
// one time do not overlap, or are only read.
unsafe impl Sync for ArenaParts<'_> {}
// SAFETY: as above.
unsafe impl Send for ArenaParts<'_> {}

impl<'a> ArenaParts<'a> {
    /// `len` values at byte `offset`, to read.
    ///
    /// # Safety
    /// No reference to write any value of the part is in use while the result is.
    ///
    /// # Panics
    /// As [`Arena::f32s`].
    #[inline]
    pub unsafe fn f32s(&self, offset: usize, len: usize) -> &'a [f32] {
        check::<f32>(self.bytes, offset, len);
        // SAFETY: in bounds and aligned by `check`, not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(offset).cast(), len) }
    }

    /// `len` values at byte `offset`, to write.
    ///
    /// # Safety
    /// No other reference to any value of the part is in use while the result is.
    ///
    /// # Panics
    /// As [`Arena::f32s`].
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn f32s_mut(&self, offset: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { self.values_mut(offset, len) }
    }

    /// `len` values at byte `offset`, to write.
    ///
    /// # Safety
    /// As [`ArenaParts::f32s_mut`].
    ///
    /// # Panics
    /// As [`Arena::values`].
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn values_mut<T: Pod>(&self, offset: usize, len: usize) -> &'a mut [T] {
        check::<T>(self.bytes, offset, len);
        // SAFETY: in bounds and aligned by `check`, unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset).cast(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_any_width_lie_where_their_alignment_lets_them() {
        let mut arena = Arena::new(64).expect("a small arena");
        arena.values_mut::<u16>(2, 2).copy_from_slice(&[0x0201, 0x0403]);
        assert_eq!(arena.values::<u8>(0, 7), [0, 0, 1, 2, 3, 4, 0]);
        assert_eq!(arena.values::<i8>(64, 0), []);
        assert_eq!(Arena::new(0).expect("nothing").values::<u64>(0, 0), []);
    }

    #[test]
    #[should_panic(expected = "offset 2 is not a multiple of 4")]
    fn misaligned_values_are_refused() {
        Arena::new(64).expect("a small arena").f32s(2, 1);
    }

    #[test]
    #[should_panic(expected = "33 values at 0 leave 64 bytes")]
    fn values_beyond_the_end_are_refused() {
        Arena::new(64).expect("a small arena").values::<u16>(0, 33);
    }

    /// With 64-byte alignment asked of the allocator, an engine touched half of the free memory
    /// before it did anything.
    #[cfg(target_os = "linux")]
    #[test]
    fn memory_is_taken_when_it_is_used() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
            status.split(' ').nth(1).expect("a field").parse::<usize>().expect("pages")
        };
        let before = resident();
        let mut arena = Arena::new(1 << 30).expect("one GiB");
        assert!(arena.start.as_ptr().addr().is_multiple_of(ALIGN));
        arena.f32s_mut((1 << 30) - 4, 1)[0] = 1.0;
        let pages = resident().saturating_sub(before);
        assert!(pages < (1 << 28) / 4096, "{pages} pages of 4 KiB for one value");
    }
}

//! Working memory of kernels, one piece per thread, made once and reused.

use bytemuck::{Pod, Zeroable};

use crate::threads::Shards;

/// Values of a line of the cache: pieces begin with one, or loads of whole vectors would cross
/// them.
const LINE_LEN: usize = 16;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; LINE_LEN]);

/// `threads` pieces of `len` values.
#[derive(Debug)]
pub struct Scratch {
    lines: Vec<Line>,
    len: usize,
}

impl Scratch {
    /// A piece of `len` values for each of `threads` threads.
    pub fn new(threads: usize, len: usize) -> Scratch {
        let len = len.next_multiple_of(LINE_LEN);
        Scratch { lines: vec![Line([0.0; LINE_LEN]); threads * len / LINE_LEN], len }
    }

    /// Overwrites everything with `value`: tests poison what kernels must not rely on.
    pub fn fill(&mut self, value: f32) {
        self.lines.fill(Line([value; LINE_LEN]));
    }

    /// The pieces, for the tasks of a job that needs `len` values per thread.
    ///
    /// # Panics
    /// When the pieces are smaller or fewer.
    pub(crate) fn pieces(&mut self, threads: usize, len: usize) -> Pieces<'_> {
        assert!(len <= self.len, "a kernel needs {len} values per thread, not {}", self.len);
        let values: &mut [f32] = bytemuck::cast_slice_mut(&mut self.lines);
        assert!(threads * self.len <= values.len(), "scratch for fewer than {threads} threads");
        Pieces { values: Shards::new(values), stride: self.len, len }
    }
}

/// The pieces of a [`Scratch`], handed out by worker.
pub(crate) struct Pieces<'a> {
    values: Shards<'a, f32>,
    stride: usize,
    len: usize,
}

impl<'a> Pieces<'a> {
    /// The piece of `worker`.
    ///
    /// # Safety
    /// The caller runs as `worker`, and holds no other piece of it.
    pub(crate) unsafe fn of(&self, worker: usize) -> &'a mut [f32] {
        let start = worker * self.stride;
        // SAFETY: pieces of different workers are disjoint, and the caller vouches for its own.
        unsafe { self.values.slice_mut(start..start + self.len) }
    }
}

/// Cuts `len` values off the front of `rest`.
pub(crate) fn take<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(rest).split_at_mut(len);
    *rest = tail;
    head
}

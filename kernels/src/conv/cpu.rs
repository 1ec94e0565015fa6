//! The fast form: spans and runs of channels shared among the threads.

use super::{MAX_WIDTH, Taps, Windows};
use crate::arena::ArenaParts;
use crate::device::Cpu;
use crate::meter::{SPECIAL, Work};
use crate::rows::{Rows, RowsMut};
use crate::simd::{Kernel, Simd, load, math, store};
use crate::span::{NO_SLOT, Span};
use crate::threads::Shards;

/// Channels per task.
const RUN: usize = 256;

/// What a window reads as where there is no slot.
static ZEROS: [f32; RUN] = [0.0; RUN];

/// Convolves the rows of every span; see the module's description.
///
/// # Panics
/// When the shapes do not fit.
pub fn conv(cpu: &Cpu, x: Rows<'_>, taps: Taps<'_>, windows: Windows<'_>, mut out: RowsMut<'_>) {
    assert!((2..=MAX_WIDTH).contains(&taps.width), "a convolution of {} taps", taps.width);
    assert_eq!(taps.values.len(), taps.width * taps.channels);
    assert_eq!((x.count(), x.width()), (out.count(), out.width()));
    assert_eq!((x.width(), x.count()), (taps.channels, windows.spans.rows()));
    let window_bytes = (taps.width - 1) * taps.channels * size_of::<f32>();
    windows.spans.check_part(windows.at, window_bytes);
    let spans = windows.spans.all();
    let _timed = cpu.meter.time("conv", || {
        let values = x.count() * taps.channels;
        let kept = 2 * spans.len() * window_bytes + size_of_val(taps.values);
        Work::f32(values * (2 * taps.width + SPECIAL), 2 * values * size_of::<f32>() + kept)
    });
    let runs = taps.channels.div_ceil(RUN);
    let parts = windows.arena.parts();
    let out_stride = out.stride();
    let out = Shards::new(out.data());
    cpu.gang.run(spans.len() * runs, |_, task| {
        let span = &spans[task / runs];
        let from = task % runs * RUN;
        let run =
            ChannelRun { from, len: RUN.min(taps.channels - from), taps, parts, at: windows.at };
        for r in 0..span.rows {
            let mut rows = [&ZEROS[..]; MAX_WIDTH];
            for (j, row) in rows[..taps.width].iter_mut().enumerate() {
                *row = run.row(x, span, r + j);
            }
            let at = (span.first_row + r) * out_stride + from;
            // SAFETY: a task is alone with its run of channels in the rows of its span.
            let out = unsafe { out.slice_mut(at..at + run.len) };
            cpu.isa.run(ConvRow { rows: &rows[..taps.width], run: &run, out });
        }
        for snapshot in windows.spans.snapshots(span) {
            run.keep(x, span, snapshot.slot, snapshot.after_rows);
        }
        // Last, since the write slot may be the read slot.
        run.keep(x, span, span.write, span.rows);
    });
}

/// A run of channels, the same in every row, tap and window.
struct ChannelRun<'a> {
    from: usize,
    len: usize,
    taps: Taps<'a>,
    parts: ArenaParts<'a>,
    at: usize,
}

impl<'a> ChannelRun<'a> {
    /// Row `i` of the span's window followed by its rows.
    fn row(&self, x: Rows<'a>, span: &Span, i: usize) -> &'a [f32] {
        let kept = self.taps.width - 1;
        if i >= kept {
            return &x.row(span.first_row + i - kept)[self.from..self.from + self.len];
        }
        if span.read == NO_SLOT {
            return &ZEROS[..self.len];
        }
        // SAFETY: no other task touches these channels of the slot's window, and this one writes
        // them only in `keep`, row by row, when no reference to a row is left.
        unsafe { self.parts.f32s(self.window_row(span.read, i), self.len) }
    }

    /// Stores the window after `rows` rows of the span in `slot`. In place this moves rows towards
    /// the front, oldest first, so that a row is read before it is overwritten.
    fn keep(&self, x: Rows<'a>, span: &Span, slot: usize, rows: usize) {
        for i in 0..self.taps.width - 1 {
            let mut row = [0.0; RUN];
            row[..self.len].copy_from_slice(self.row(x, span, rows + i));
            // SAFETY: no other task touches these channels of the slot's window; written slots are
            // pairwise distinct, and no reference to a row is left here.
            let window = unsafe { self.parts.f32s_mut(self.window_row(slot, i), self.len) };
            window.copy_from_slice(&row[..self.len]);
        }
    }

    fn window_row(&self, slot: usize, i: usize) -> usize {
        slot + self.at + (i * self.taps.channels + self.from) * size_of::<f32>()
    }
}

/// One row of a run: the rows its taps meet, oldest first.
struct ConvRow<'a> {
    rows: &'a [&'a [f32]],
    run: &'a ChannelRun<'a>,
    out: &'a mut [f32],
}

impl Kernel for ConvRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.rows.len() {
            2 => self.taps::<S, 2>(s),
            3 => self.taps::<S, 3>(s),
            4 => self.taps::<S, 4>(s),
            5 => self.taps::<S, 5>(s),
            6 => self.taps::<S, 6>(s),
            7 => self.taps::<S, 7>(s),
            _ => self.taps::<S, MAX_WIDTH>(s),
        }
    }
}

impl ConvRow<'_> {
    #[inline(always)]
    fn taps<S: Simd, const W: usize>(self, s: S) {
        let len = self.out.len();
        let mut rows = [&ZEROS[..]; W];
        let mut taps = [&ZEROS[..]; W];
        for j in 0..W {
            rows[j] = &self.rows[j][..len];
            taps[j] = &self.run.taps.values[j * self.run.taps.channels + self.run.from..][..len];
        }
        let mut at = 0;
        while at < len {
            let n = (len - at).min(S::LANES);
            let mut sum = s.splat(0.0);
            for (row, taps) in rows.iter().zip(taps) {
                sum = s.fma(load(s, &taps[at..], n), load(s, &row[at..], n), sum);
            }
            store(s, &mut self.out[at..], n, math::silu(s, sum));
            at += n;
        }
    }
}

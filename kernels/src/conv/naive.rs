//! The definition of the convolution: the window and the rows in one list.

use super::{Taps, Windows};
use crate::rows::{Rows, RowsMut};
use crate::span::NO_SLOT;

/// Convolves the rows of every span; see the module's description.
pub fn conv(x: Rows<'_>, taps: Taps<'_>, windows: Windows<'_>, mut out: RowsMut<'_>) {
    let (channels, width) = (taps.channels, taps.width);
    let kept = width - 1;
    for span in windows.spans.all() {
        let mut history = vec![0.0; kept * channels];
        if span.read != NO_SLOT {
            let window = windows.arena.f32s(span.read + windows.at, kept * channels);
            history.copy_from_slice(window);
        }
        for row in span.batch_rows() {
            history.extend_from_slice(x.row(row));
        }
        for r in 0..span.rows {
            for c in 0..channels {
                let at = |j: usize| history[(r + j) * channels + c];
                let sum: f32 = (0..width).map(|j| taps.values[j * channels + c] * at(j)).sum();
                out.row(span.first_row + r)[c] = sum / (1.0 + (-sum).exp());
            }
        }
        let mut keep = |slot: usize, rows: usize| {
            let window = windows.arena.f32s_mut(slot + windows.at, kept * channels);
            window.copy_from_slice(&history[rows * channels..][..kept * channels]);
        };
        for snapshot in windows.spans.snapshots(span) {
            keep(snapshot.slot, snapshot.after_rows);
        }
        keep(span.write, span.rows);
    }
}

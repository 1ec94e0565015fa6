//! Memory that is asked for before it is read.

/// Weights are asked for so many bytes before they are read: one core waits for memory otherwise.
const AHEAD_BYTES: usize = 2048;

/// How far ahead of what is read memory is asked for, in panels that are read beside each other.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    bytes: usize,
    /// What is added from here on in each panel: the next ones lie behind those beside it.
    turn: usize,
    beyond: usize,
}

impl Ahead {
    /// For the piece that begins with row `row`. The first piece reads the weights from memory, and
    /// at the end of its panels goes on with the next ones; while further pieces find them in a
    /// cache, those, or the same block of those, are fetched.
    pub(crate) fn of(row: usize, panels: usize, panel_bytes: usize) -> Ahead {
        match row {
            0 => Ahead {
                bytes: AHEAD_BYTES,
                turn: panel_bytes.saturating_sub(AHEAD_BYTES),
                beyond: (panels - 1) * panel_bytes,
            },
            _ => Ahead { bytes: panels * panel_bytes, turn: usize::MAX, beyond: 0 },
        }
    }

    /// Bytes ahead of what lies `at` bytes into a panel.
    #[inline(always)]
    pub(crate) fn at(self, at: usize) -> usize {
        self.bytes + if at >= self.turn { self.beyond } else { 0 }
    }
}

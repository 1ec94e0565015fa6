//! Whether graphs give what the same launches give without them, asked once before the first
//! request.
//!
//! A graph holds the launches that the padded step makes, so between shapes only the number of
//! rows and of segments differs, and those that lie between the least and the most are not asked:
//! what a driver does wrong with graphs it does with these two. Each is asked in an arena of no
//! use yet, with a row of padding where there is room for one, over two tokens of each sequence.
//! One sequence is as long as any can be, which makes the launches those of the longest; the others
//! have just begun, or a start would attend to the whole context hundreds of times.

use std::hash::{DefaultHasher, Hasher as _};

use kernels::cuda::{CudaError, DeviceArena};
use kernels::{BLOCK_LEN, NO_SLOT, SEGMENT_LEN, Span};

use super::{CudaModel, graphs};
use crate::models::batch::{Batch, LogitSource};

/// Tokens that each sequence generates.
const TOKENS: usize = 2;

impl CudaModel {
    /// Turns graphs off where one gives other logits than the same step without it; the reason is
    /// [`CudaModel::graphs_off`]. Writes over the arena, which nobody may be using yet.
    ///
    /// # Errors
    /// When the device fails.
    pub fn test_graphs(&mut self, arena: &mut DeviceArena) -> Result<(), CudaError> {
        let room = self.room(arena);
        if room == 0 {
            self.turn_graphs_off("graphs are off: the arena has no room to test them in");
            return Ok(());
        }
        let most = self.most.sequences.min(self.most.logits).min(room);
        // The largest shape with a row of padding, where it has one.
        let most = if most > 2 { most.min(graphs::bucket(most) - 1) } else { most };
        let last = (self.most.positions - 1) / SEGMENT_LEN * SEGMENT_LEN;
        for (sequences, start) in [(1, 0), (most, last)] {
            self.turn_graphs_off("they are about to be tested");
            let want = self.generate(arena, sequences, start)?;
            self.graphs.turn_on();
            // The first step of all records, the others replay.
            for _ in 0..2 {
                let got = self.generate(arena, sequences, start)?;
                if self.graphs.off().is_some() {
                    return Ok(());
                }
                if got != want {
                    let what = format!("a step of {sequences} sequences has other logits as one");
                    self.turn_graphs_off(&format!("graphs are off: {what}"));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Bytes from one sequence of the test to the next: a slot, and a block to write in.
    fn stride(&self) -> usize {
        (self.layout.slot_bytes + self.layout.block_bytes.next_multiple_of(64)).next_multiple_of(64)
    }

    /// Sequences of the test that the arena has room for, behind a block that all read.
    fn room(&self, arena: &DeviceArena) -> usize {
        let shared = self.layout.block_bytes.next_multiple_of(64);
        arena.bytes().saturating_sub(shared) / self.stride().max(1)
    }

    /// What the logits of some tokens of sequences hash to, of which the last begins at `start`
    /// behind one block again and again, and all with no state.
    fn generate(
        &mut self,
        arena: &mut DeviceArena,
        sequences: usize,
        start: usize,
    ) -> Result<u64, CudaError> {
        let mut hasher = DefaultHasher::new();
        for token in 0..TOKENS {
            let batch = self.batch(sequences, start, token);
            hasher.write(bytemuck::cast_slice(self.forward(&batch, arena)?));
        }
        Ok(hasher.finish())
    }

    fn batch(&self, sequences: usize, start: usize, token: usize) -> Batch {
        let (slot_bytes, block_bytes) = (self.layout.slot_bytes, self.layout.block_bytes);
        let mut batch = Batch::default();
        for i in 0..sequences {
            let start = if i + 1 == sequences { start } else { 0 };
            let slot = block_bytes.next_multiple_of(64) + i * self.stride();
            let write = if slot_bytes == 0 { NO_SLOT } else { slot };
            let table = batch.tables.len();
            batch.tables.extend([0].repeat(start / BLOCK_LEN));
            batch.tables.push((slot + slot_bytes).next_multiple_of(64));
            batch.tokens.push(((i * 7 + token * 3 + 1) % self.spec.vocab_size) as u32);
            batch.logits.push(LogitSource::Row(i));
            let read = if token == 0 { NO_SLOT } else { write };
            let table = table..batch.tables.len();
            batch.spans.push(Span::step(i, start + token, (read, write), table));
        }
        batch
    }
}

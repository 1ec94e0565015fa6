//! Steps of one generated token for each sequence, recorded as graphs.
//!
//! ```text
//! rows     1  2  4  8  16  24 ...   a step is padded to the next of these
//! segments 1  2  4  8  16 ...       and launched for as many as its longest sequence needs
//!
//! first step of a shape    upload   layers, head (loads kernels), then recorded
//! every later one          upload   replay
//! ```
//!
//! A graph names buffers that are where they were: the step's table, working memory, the arena.
//! What a step is about is in the table, which goes up before the graph runs; padding is spans that
//! read and write nowhere. Rows that a launch has too many, and segments, leave at once by what the
//! table says.

use std::collections::{BTreeSet, HashMap};

use kernels::cuda::Graph;
use kernels::{BLOCK_LEN, Form, SEGMENT_LEN, Span};

use super::Most;
use crate::models::batch::Batch;

/// What a graph is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Rows, padding among them.
    pub rows: usize,
    /// Segments of the longest sequence, at most.
    pub segments: usize,
    /// Where the arena is.
    pub arena: u64,
}

/// The graphs of a model.
#[derive(Debug)]
pub(super) struct Graphs {
    most_rows: usize,
    most_segments: usize,
    recorded: HashMap<Shape, Graph>,
    replays: u64,
    /// Why steps are not recorded, if they are not.
    off: Option<String>,
}

/// The rows that a step of `rows` rows is padded to.
pub(super) fn bucket(rows: usize) -> usize {
    if rows <= 8 { rows.next_power_of_two() } else { rows.next_multiple_of(8) }
}

impl Graphs {
    /// None yet, for a model whose batches have at most so much.
    pub fn new(most: Most) -> Graphs {
        Graphs {
            most_rows: most.rows.min(most.logits),
            most_segments: segments_of(most.positions),
            recorded: HashMap::new(),
            replays: 0,
            off: None,
        }
    }

    /// The shape of a batch's graph, if all its rows are generated tokens of sequences of their
    /// own and a graph has room for them. Launches check what they are given and a replay does not:
    /// a batch that breaks a rule has no shape.
    pub fn shape(&self, batch: &Batch, arena: u64) -> Option<Shape> {
        let (rows, segments) = (bucket(batch.rows()), segments(batch));
        let is_one_token = |span: &Span| {
            let has_table = span.table.len() * BLOCK_LEN >= span.end();
            span.form == Form::Step && span.rows == 1 && has_table
        };
        let has_room = rows <= self.most_rows && segments <= self.most_segments;
        let is_plain = batch.snapshots.is_empty() && batch.spans.iter().all(is_one_token);
        (self.off.is_none() && has_room && is_plain).then(|| {
            let segments = segments.next_power_of_two().min(self.most_segments);
            Shape { rows, segments, arena }
        })
    }

    /// The graph of a shape.
    pub fn get(&mut self, shape: Shape) -> Option<&Graph> {
        let graph = self.recorded.get(&shape);
        self.replays += u64::from(graph.is_some());
        graph
    }

    pub fn insert(&mut self, shape: Shape, graph: Graph) {
        self.recorded.insert(shape, graph);
    }

    /// Drops all: memory that they name is no longer used.
    pub fn forget(&mut self) {
        self.recorded.clear();
    }

    /// Records no step from now on, and why.
    pub fn turn_off(&mut self, why: String) {
        self.forget();
        self.off = Some(why);
    }

    pub fn turn_on(&mut self) {
        self.off = None;
    }

    pub fn off(&self) -> Option<&str> {
        self.off.as_deref()
    }

    /// Rows of the graphs, each number once and rising.
    pub fn rows(&self) -> Vec<usize> {
        let rows: BTreeSet<usize> = self.recorded.keys().map(|shape| shape.rows).collect();
        rows.into_iter().collect()
    }

    /// Steps so far that ran as a graph.
    pub fn replays(&self) -> u64 {
        self.replays
    }
}

/// Segments of a batch's longest sequence after the step, at least one.
pub(super) fn segments(batch: &Batch) -> usize {
    segments_of(batch.spans.iter().map(Span::end).max().unwrap_or(0))
}

fn segments_of(positions: usize) -> usize {
    positions.div_ceil(SEGMENT_LEN).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_padded_to_the_next_bucket() {
        let padded: Vec<usize> = (1..=26).map(bucket).collect();
        let mut want = vec![1, 2, 4, 4, 8, 8, 8, 8];
        want.extend([16; 8].into_iter().chain([24; 8]).chain([32; 2]));
        assert_eq!(padded, want);
    }
}

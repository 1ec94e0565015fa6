//! A model on a CUDA device: the decoder of [`super::decoder`] over the device's memory.
//!
//! The layers, their order and what they remember are those of the CPU; operators are
//! [`kernels::cuda`]'s, held to the same definitions. A batch goes up as one table, and what draws
//! look at comes down: a token, some with their logits, or a row of logits.
//!
//! ```text
//! run     upload -> layers of `network` | graph of `graphs` -> logits on the device
//! take    likeliest tokens, first tokens, rows
//! ```

mod bytes;
mod ffn;
mod graphs;
mod logits;
mod mixer;
mod network;
mod self_test;
mod weights;
mod workspace;

use std::fmt;

use kernels::cuda::rows::Origin;
use kernels::cuda::{Capacity, Cuda, CudaError, DeviceArena, DeviceSpans, StepTable};
use kernels::{BLOCK_LEN, Spans};

use self::graphs::{Graphs, Shape};
use self::network::{Network, Uploaded};
use self::workspace::Workspace;
use super::batch::{Batch, LogitSource};
use super::decoder::Model;
use super::files::{LayerFiles, ModelError, ModelFiles};
use super::layout::{LayerLayout, StateLayout};
use super::spec::ModelSpec;

pub use self::logits::{Taken, Wanted};
pub use self::workspace::EXPANDED;

/// The most that batches of a model have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Most {
    /// Rows of a batch.
    pub rows: usize,
    /// Sequences of a batch.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub positions: usize,
    /// Positions of each of so many sequences whose segments are attended side by side; those of
    /// longer ones are attended one after another.
    pub split: usize,
    /// Rows whose logits are asked for at once.
    pub logits: usize,
}

impl Most {
    /// Room that a batch takes in a table.
    fn table(&self) -> Capacity {
        Capacity {
            spans: self.rows.max(self.sequences),
            rows: self.rows,
            snapshots: self.rows.div_ceil(BLOCK_LEN) + self.sequences,
            blocks: self.sequences * self.positions.div_ceil(BLOCK_LEN),
        }
    }

    /// With the sequences that a graph is padded to.
    fn padded(self) -> Most {
        Most { sequences: graphs::bucket(self.sequences), ..self }
    }
}

/// Why a model is not on a device.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its weights cannot be loaded.
    #[error(transparent)]
    Files(#[from] ModelError),
    /// The device has no room for it, or failed.
    #[error(transparent)]
    Device(#[from] CudaError),
}

/// A model with its weights on a device, ready to run.
pub struct CudaModel {
    cuda: Cuda,
    spec: ModelSpec,
    layout: StateLayout,
    most: Most,
    graphs: Graphs,
    network: Network,
    table: StepTable,
    work: Workspace,
    /// Rows of the last batch.
    rows: usize,
}

/// What a layer's operators share in a step.
struct Step<'a> {
    cuda: &'a Cuda,
    /// The spans as the host knows them.
    host: Spans<'a>,
    /// The spans on the device.
    spans: &'a DeviceSpans<'a>,
    arena: &'a mut DeviceArena,
    /// Where the layer's memory lies in slots and blocks.
    place: LayerLayout,
    /// Positions of the longest sequence after the step, at least.
    most_positions: usize,
}

impl CudaModel {
    /// Takes the weights to the device, a layer after another ([`ModelFiles::rows`]).
    ///
    /// # Errors
    /// When they cannot be loaded, or the device has no room.
    pub fn new(
        mut cuda: Cuda,
        files: &ModelFiles,
        mut weights: LayerFiles<'_>,
        most: Most,
    ) -> Result<CudaModel, LoadError> {
        let spec = files.spec.clone();
        cuda.compute = spec.compute;
        let network = Network::new(&cuda, &spec, &mut weights)?;
        let routed = network.routed(&cuda, most)?;
        Ok(CudaModel {
            table: StepTable::new(&cuda, most.table())?,
            work: Workspace::new(&cuda, &spec, most.padded(), routed)?,
            layout: Model::layout_of(&spec),
            graphs: Graphs::new(most),
            network,
            most,
            spec,
            cuda,
            rows: 0,
        })
    }

    /// Bytes on a device that a model takes besides its weights as they are stored, for batches of
    /// up to `most`; somewhat more than it takes.
    pub fn work_bytes(spec: &ModelSpec, most: Most) -> usize {
        bytes::work_bytes(spec, most.padded())
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Where its memory lies in slots and blocks.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// The device.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Runs no step as a graph from now on; `why` is what [`CudaModel::graphs_off`] tells.
    pub fn turn_graphs_off(&mut self, why: &str) {
        self.graphs.turn_off(why.into());
    }

    /// Why no step runs as a graph, if none does.
    pub fn graphs_off(&self) -> Option<&str> {
        self.graphs.off()
    }

    /// The numbers of rows for which there are graphs, each once and rising.
    pub fn graph_rows(&self) -> Vec<usize> {
        self.graphs.rows()
    }

    /// Steps so far that ran as a graph.
    pub fn graph_replays(&self) -> u64 {
        self.graphs.replays()
    }

    /// Runs a batch: writes its states and per-token rows to `arena`, and leaves the logits it asks
    /// for on the device ([`CudaModel::take`]). A batch of one generated token for each sequence
    /// runs as a graph, from the second of its shape on; bits are those that it would have
    /// otherwise.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the batch breaks a rule of [`Batch::check`] or is larger than the model was made for.
    pub fn run(&mut self, batch: &Batch, arena: &mut DeviceArena) -> Result<(), CudaError> {
        let spans = batch.check(self.layout.slot_bytes);
        for copy in &batch.copies {
            arena.copy_within(&self.cuda, copy.source, copy.target, self.layout.block_bytes)?;
        }
        self.rows = batch.rows();
        if batch.rows() > 0 {
            let shape = self.graphs.shape(batch, arena.place());
            self.compute(batch, spans, arena, shape)?;
            let rows = (0..).map(LogitSource::Row);
            if shape.is_some() && batch.logits.iter().copied().eq(rows.take(batch.logits.len())) {
                self.work.logits.set_count(batch.logits.len());
                return Ok(());
            }
        }
        self.compute_logits(&batch.logits, arena)
    }

    /// [`CudaModel::run`], and all logits, `[sources][vocab_size]`.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// As [`CudaModel::run`].
    pub fn forward(&mut self, batch: &Batch, arena: &mut DeviceArena) -> Result<&[f32], CudaError> {
        self.run(batch, arena)?;
        self.work.logits.all(&self.cuda)
    }

    /// Waits, and takes what is wanted of the last logits to the host.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When more first tokens are wanted than there can be, or a row that is not there.
    pub fn take(&mut self, wanted: Wanted<'_>) -> Result<Taken<'_>, CudaError> {
        self.work.logits.take(&self.cuda, wanted)
    }

    /// The rows of a batch; of one that has a shape, the logits of all rows too.
    fn compute(
        &mut self,
        batch: &Batch,
        host: Spans<'_>,
        arena: &mut DeviceArena,
        shape: Option<Shape>,
    ) -> Result<(), CudaError> {
        let CudaModel { cuda, spec, layout, graphs, network, table, work, .. } = self;
        let spans = table.upload(
            cuda,
            kernels::cuda::Step {
                spans: host,
                tables: &batch.tables,
                block_bytes: layout.block_bytes,
                tokens: &batch.tokens,
                padded_rows: shape.map_or(batch.rows(), |shape| shape.rows),
                arena,
            },
        )?;
        if work.reserve(cuda, spec, &spans)? {
            graphs.forget();
        }
        let segments = shape.map_or(graphs::segments(batch), |shape| shape.segments);
        let step = Uploaded { cuda, spec, layout, host, spans, segments };
        let Some(shape) = shape else { return network.forward(&step, arena, work) };
        if let Some(graph) = graphs.get(shape) {
            return cuda.replay(graph);
        }
        let mut run = || {
            network.forward(&step, arena, work)?;
            let Workspace { normed, logits, rounded, .. } = &mut *work;
            let x = (normed.rows(shape.rows, spec.hidden), shape.rows);
            logits.of_rows(cuda, network.head(), x, rounded)
        };
        // This step as it is, which loads its kernels; the next of its shape as a graph.
        run()?;
        match cuda.capture(run) {
            Ok(graph) => graphs.insert(shape, graph),
            Err(error) => graphs.turn_off(format!("graphs are off: {error}")),
        }
        Ok(())
    }

    /// The logits of rows of the last batch, or of slots, `[sources][vocab_size]`.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When there are more sources than the model was made for.
    pub fn logits(
        &mut self,
        sources: &[LogitSource],
        arena: &DeviceArena,
    ) -> Result<&[f32], CudaError> {
        self.compute_logits(sources, arena)?;
        self.work.logits.all(&self.cuda)
    }

    fn compute_logits(
        &mut self,
        sources: &[LogitSource],
        arena: &DeviceArena,
    ) -> Result<(), CudaError> {
        let CudaModel { cuda, spec, layout, work, network, rows, .. } = self;
        let origin = |source: &LogitSource| match source {
            LogitSource::Row(row) => Origin::Row(*row),
            LogitSource::Slot(slot) => {
                let at = layout.hidden_row.expect("only models with slots sample from one");
                Origin::Arena(slot + at)
            }
        };
        let origins: Vec<Origin> = sources.iter().map(origin).collect();
        let Workspace { normed, logits, rounded, .. } = work;
        let x = (normed.rows(*rows, spec.hidden), arena);
        logits.of_origins(cuda, network.head(), x, &origins, rounded)
    }
}

impl fmt::Debug for CudaModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaModel").field("spec", &self.spec).finish_non_exhaustive()
    }
}

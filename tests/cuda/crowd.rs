//! Decoding without a prompt, in memory that looks used: steps as graphs have the bits of the same
//! steps without, whoever else is in them.

use std::path::Path;

use deltapool::models::cuda::{CudaModel, Most};
use deltapool::models::{Batch, LogitSource, ModelFiles};
use kernels::cuda::DeviceArena;
use kernels::{BLOCK_LEN, Compute, KvDtype, NO_SLOT, Span};

use super::cuda_support::{Device, Values, assert_caught, device};
use super::{files, open};

/// Positions that sequences of a crowd are at: few, around the borders of blocks and of segments.
const POSITIONS: [usize; 11] = [1030, 5, 63, 0, 64, 1023, 130, 1024, 7, 200, 77];
/// Blocks of a sequence.
const BLOCKS: usize = 17;

/// A model and memory that looks used, to decode in without a prompt.
struct Crowd {
    model: CudaModel,
    arena: DeviceArena,
    memory: Vec<u32>,
}

impl Crowd {
    fn new(device: &Device, files: &ModelFiles) -> Crowd {
        let most = Most {
            rows: 16,
            sequences: 11,
            positions: BLOCKS * BLOCK_LEN,
            split: BLOCKS * BLOCK_LEN,
            logits: 16,
        };
        let weights = files.rows().expect("it is sound");
        let model = CudaModel::new(open(device), files, weights, most).expect("there is room");
        // Values as f32, and in pairs as bf16.
        let mut values = Values::new(5);
        let value = |x: f32| u32::from(half::bf16::from_f32(x).to_bits()) * 0x1_0001;
        let words = POSITIONS.len() * Crowd::stride(&model) / 4;
        let memory: Vec<u32> = values.take(words).into_iter().map(value).collect();
        let arena = DeviceArena::new(model.cuda(), 4 * words).expect("there is room");
        Crowd { model, arena, memory }
    }

    fn block_stride(model: &CudaModel) -> usize {
        model.layout().block_bytes.next_multiple_of(64)
    }

    /// Bytes of a sequence.
    fn stride(model: &CudaModel) -> usize {
        model.layout().slot_bytes.next_multiple_of(64) + BLOCKS * Crowd::block_stride(model)
    }

    /// The bits of the logits of some sequences, by sequence, over `steps` steps together.
    fn decode(&mut self, who: &[usize], steps: usize) -> Vec<Vec<u32>> {
        let cuda = self.model.cuda();
        self.arena.write(cuda, 0, bytemuck::cast_slice(&self.memory)).expect("it copies");
        let mut bits = vec![Vec::new(); who.len()];
        for step in 0..steps {
            let batch = self.batch(who, step);
            let vocab = self.model.spec().vocab_size;
            let logits = self.model.forward(&batch, &mut self.arena).expect("it runs");
            for (bits, logits) in bits.iter_mut().zip(logits.chunks_exact(vocab)) {
                assert!(logits.iter().all(|logit| logit.is_finite()));
                bits.extend(logits.iter().map(|logit| logit.to_bits()));
            }
        }
        bits
    }

    fn batch(&self, who: &[usize], step: usize) -> Batch {
        let (slot_bytes, mut batch) = (self.model.layout().slot_bytes, Batch::default());
        for (row, id) in who.iter().enumerate() {
            let (slot, start) = (id * Crowd::stride(&self.model), POSITIONS[*id] + step);
            let (table, blocks) = (batch.tables.len(), slot + slot_bytes.next_multiple_of(64));
            let block = |i| blocks + i * Crowd::block_stride(&self.model);
            batch.tables.extend((0..=start / BLOCK_LEN).map(block));
            batch.tokens.push(((id * 31 + step * 7) % self.model.spec().vocab_size) as u32);
            batch.logits.push(LogitSource::Row(row));
            let place = if slot_bytes == 0 { NO_SLOT } else { slot };
            let table = table..batch.tables.len();
            batch.spans.push(Span::step(row, start, (place, place), table));
        }
        batch
    }
}

/// A sequence alone, without a graph, and in graphs of several sizes, whoever was in them before.
fn same_bits(device: &Device, files: &ModelFiles) {
    let mut crowd = Crowd::new(device, files);
    crowd.model.turn_graphs_off("for the test");
    let alone: Vec<_> = (0..POSITIONS.len()).map(|id| crowd.decode(&[id], 2).remove(0)).collect();
    assert_eq!((crowd.model.graph_replays(), crowd.model.graphs_off()), (0, Some("for the test")));
    let mut crowd = Crowd::new(device, files);
    let mut decode = |who: &[usize]| {
        let before = crowd.model.graph_replays();
        for (id, bits) in who.iter().zip(crowd.decode(who, 2)) {
            assert!(bits == alone[*id], "sequence {id} among {who:?} has other bits");
        }
        crowd.model.graph_replays() - before
    };
    // Each size twice: the first records in its first step.
    let sizes: [(&[usize], &[usize]); 4] = [
        (&[1], &[6]),
        (&[0], &[7]),
        (&[2, 4, 1], &[4, 8, 6]),
        (&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &[10, 7, 5, 9, 2, 3, 4, 0, 6]),
    ];
    for (first, then) in sizes {
        assert_eq!((decode(first), decode(then)), (1, 2), "{first:?}, {then:?}");
    }
    assert_eq!(crowd.model.graph_rows(), [1, 4, 16]);
}

#[test]
fn a_sequence_has_the_same_bits_in_a_graph_of_any_size() {
    let Some(device) = device() else { return };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    for name in ["kimi_linear_tiny", "llama_tiny"] {
        let mut files = files(&models.join(name));
        same_bits(&device, &files);
        (files.spec.compute, files.spec.kv_dtype) = (Compute::Bf16, KvDtype::Bf16);
        same_bits(&device, &files);
    }
}

const NAME: &str = "crowd::a_sequence_has_the_same_bits_in_a_graph_of_any_size";

/// Rows that only fill a graph up, in the slot and the first block of the first sequence.
#[test]
fn padding_on_a_live_slot_is_caught() {
    let right = "if (span.write == NO_SLOT) {\n    if ((int)threadIdx.x < a.value_dim)";
    let wrong = "if (span.write == NO_SLOT) span.read = span.write = a.spans[0].write;\n  \
                 if (false) {\n    if ((int)threadIdx.x < a.value_dim)";
    assert_caught(NAME, ("cuda/kda.cu", right, wrong), "has other bits");
    let (right, wrong) = ("c >= a.total || span.write == NO_SLOT", "c >= a.total");
    assert_caught(NAME, ("cuda/attention.cu", right, wrong), "has other bits");
}

/// From the third upload of a table on, the end of its block tables is that of the second.
#[test]
fn a_stale_block_table_in_a_replay_is_caught() {
    let right = "return push(stream, [=] { memcpy((void*)to, from, bytes); });";
    let wrong = "{\n    static std::map<Address, int> uploads;\n    \
                 if (++uploads[to] > 2) bytes -= 8;\n    \
                 return push(stream, [=] { memcpy((void*)to, from, bytes); });\n  }";
    assert_caught(NAME, ("emu/driver.cpp", right, wrong), "has other bits");
}

//! What draws look at, against all logits.

use std::path::Path;

use deltapool::models::cuda::{CudaModel, Most, Wanted};
use deltapool::models::{Batch, LogitSource};
use kernels::cuda::DeviceArena;
use kernels::cuda::sampling::Verdict;
use kernels::{Form, NO_SLOT, Span};

use super::cuda_support::{device, with_seeds};
use super::{files, open};

const ROWS: usize = 5;

/// A prompt of which every row's logits are asked for.
fn prompt(slot_bytes: usize) -> Batch {
    Batch {
        tokens: vec![1, 5, 9, 2, 7],
        spans: vec![Span {
            first_row: 0,
            rows: ROWS,
            start: 0,
            form: Form::Chunk,
            absorbed_from: 0,
            read: NO_SLOT,
            write: 0,
            table: 0..1,
            snapshots: 0..0,
        }],
        tables: vec![slot_bytes.next_multiple_of(64)],
        logits: (0..ROWS).map(LogitSource::Row).collect(),
        ..Batch::default()
    }
}

#[test]
fn likeliest_and_first_tokens_and_rows_are_those_of_all_logits() {
    let Some(device) = device() else { return };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    let files = files(&models.join("kimi_linear_tiny"));
    with_seeds(&device, 2, |_| {
        let most = Most { rows: 8, sequences: 1, positions: 64, split: 64, logits: 8 };
        let weights = files.rows().expect("it is sound");
        let mut model = CudaModel::new(open(&device), &files, weights, most).expect("room");
        let (slot, vocab) = (model.layout().slot_bytes, model.spec().vocab_size);
        let bytes = slot.next_multiple_of(64) + model.layout().block_bytes;
        let mut arena = DeviceArena::new(model.cuda(), bytes).expect("room");
        let all = model.forward(&prompt(slot), &mut arena).expect("it runs").to_vec();
        let row = |row: usize| &all[row * vocab..(row + 1) * vocab];
        model.run(&prompt(slot), &mut arena).expect("it runs");
        // Nothing, then more than before, then less: what is taken is what was asked for.
        for (verdicts, first, rows) in
            [(false, 0, &[][..]), (true, 0, &[2]), (true, 9, &[1, 4]), (false, 3, &[0])]
        {
            let taken = model.take(Wanted { verdicts, first, rows }).expect("it runs");
            assert_eq!(taken.verdicts.len(), if verdicts { ROWS } else { 0 });
            for (at, judged) in taken.verdicts.iter().enumerate() {
                let best = row(at).iter().copied().fold(f32::MIN, f32::max);
                let Verdict::Likeliest(id) = Verdict::from(*judged) else { panic!("{judged:?}") };
                assert_eq!(row(at).iter().position(|x| *x == best), Some(id as usize));
            }
            assert_eq!(taken.first.len(), ROWS * first);
            for (at, tokens) in taken.first.chunks(first.max(1)).enumerate() {
                let mut order: Vec<usize> = (0..vocab).collect();
                order.sort_by(|a, b| row(at)[*b].total_cmp(&row(at)[*a]).then(a.cmp(b)));
                for (candidate, id) in tokens.iter().zip(order) {
                    assert_eq!((candidate.id, candidate.score), (id as u32, row(at)[id]));
                }
            }
            let whole: Vec<f32> = rows.iter().flat_map(|at| row(*at)).copied().collect();
            assert_eq!(taken.rows, whole);
        }
    });
}

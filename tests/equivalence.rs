//! Same bits: however a prompt is cut on the grid, whatever stands beside it in a batch, wherever
//! its blocks and slots lie, however many threads run, with snapshots or without, resumed or not.
//!
//! Everything is compared as bits, of logits and of stored state. A model that is only almost right
//! passes tolerance tests; it does not pass these.

mod support;

#[path = "equivalence/requests.rs"]
mod requests;
#[path = "equivalence/reuse.rs"]
mod reuse;

use std::path::Path;

use deltapool::models::ModelFiles;
use deltapool::scheduler::Wanted;
use kernels::{BLOCK_LEN, Isa, KvDtype};
use state_pool::{SequenceState, SlotHandle};
use support::Random;
use support::rig::{Rig, Setting, Turn, argmax};

/// Their weights are bf16, and so are the rows they keep of tokens unless it is said.
const MODELS: [&str; 4] =
    ["kimi_linear_tiny", "kimi_linear_tiny, f32 rows", "llama_tiny", "qwen3_tiny, f32 rows"];

/// A golden's name, and how it keeps the rows of tokens.
fn golden_and_rows(model: &str) -> (&str, KvDtype) {
    let wide = model.strip_suffix(", f32 rows").map(|name| (name, KvDtype::F32));
    wide.unwrap_or((model, KvDtype::Bf16))
}

fn files(model: &str) -> ModelFiles {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    let (name, kv_dtype) = golden_and_rows(model);
    let mut files = ModelFiles::open(&root.join(name)).expect("a golden opens");
    assert_eq!(files.spec.kv_dtype, KvDtype::Bf16);
    files.spec.kv_dtype = kv_dtype;
    files
}

fn prompt(random: &mut Random, files: &ModelFiles, len: usize) -> Vec<u32> {
    (0..len).map(|_| random.below(files.spec.vocab_size) as u32).collect()
}

/// What a sequence left behind: the bits of its logits, its slot and its computed rows.
#[derive(PartialEq)]
struct Trace {
    logits: Vec<Vec<u32>>,
    slot: Vec<u32>,
    rows: Vec<u32>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Bits of the first `len` rows of every attention layer, and of the slot.
fn stored(rig: &Rig, sequence: usize, len: usize) -> (Vec<u32>, Vec<u32>) {
    use deltapool::models::layout::LayerLayout;
    let model = rig.executor.model();
    let slot = bits(&rig.slot(rig.sequences[sequence].state().expect("it runs").slot()));
    let mut rows = Vec::new();
    for (layer, place) in model.spec().layers.iter().zip(&model.layout().layers) {
        let LayerLayout::Attention { rows: place } = place else { continue };
        let values = BLOCK_LEN * layer.mixer.values_per_token();
        for (i, block) in rig.block_rows(sequence, *place, values).into_iter().enumerate() {
            let used = len.saturating_sub(i * BLOCK_LEN).min(BLOCK_LEN);
            let mut rest = &block[..];
            for width in layer.mixer.runs() {
                let (run, behind) = rest.split_at(BLOCK_LEN * width);
                rows.extend(bits(&run[..used * width]));
                rest = behind;
            }
            assert!(rest.is_empty(), "runs are all of a block");
        }
    }
    (slot, rows)
}

fn trace(rig: &Rig, sequence: usize, logits: Vec<Vec<u32>>) -> Trace {
    let (slot, rows) = stored(rig, sequence, rig.sequences[sequence].computed());
    Trace { logits, slot, rows }
}

/// The prompt in one span where the batch allows, then some greedy steps: the reference.
fn alone(files: &ModelFiles, prompt: &[u32], steps: usize, setting: Setting) -> Trace {
    let mut rig = Rig::new(files, setting);
    let sequence = rig.add(prompt);
    let mut logits = rig.prefill(sequence, setting.most_rows);
    let mut all = vec![bits(&logits)];
    for _ in 0..steps {
        rig.sequences[sequence].push(argmax(&logits));
        logits = rig.step(&[Turn::new(sequence, 1, Wanted::Last)]);
        all.push(bits(&logits));
    }
    let trace = trace(&rig, sequence, all);
    rig.finish();
    trace
}

/// Every length from 1 to 200: the logits of position p are those of a run that ends there, as far
/// as both compute the position in one form.
#[test]
fn every_prompt_length_continues_like_its_own_longer_runs() {
    for model in MODELS {
        let files = files(model);
        let mut random = Random::new(1);
        let tokens = prompt(&mut random, &files, 200);
        let setting = Setting::default();
        // Form by position: rows below the last cell border of a prompt are computed expanded. So
        // prompts within one cell share all rows below it; compare each with the next longer one.
        let mut rig = Rig::new(&files, setting);
        let mut previous: Option<(usize, Vec<u32>)> = None;
        for len in 1..=200 {
            let sequence = rig.add(&tokens[..len]);
            let vocab = files.spec.vocab_size;
            let logits = rig.step(&[Turn::new(sequence, 256, Wanted::All)]);
            assert_eq!(logits.len(), len * vocab);
            let last = rig.sequences.pop().expect("the sequence just run");
            last.release(&mut rig.pool);
            if let Some((before, old)) = &previous
                && before / 64 == len / 64
            {
                let shared = bits(&logits[..before * vocab]);
                assert!(&shared == old, "{model}: prompts of {before} and {len} tokens differ");
            }
            previous = Some((len, bits(&logits)));
        }
        rig.finish();
    }
}

/// Random cuts of a prompt, each on the grid.
fn cuts(random: &mut Random, len: usize, grid: usize) -> Vec<usize> {
    let mut budgets = Vec::new();
    let mut done = 0;
    while done < len {
        let cells = 1 + random.below(4);
        let budget =
            if grid == 1 { 1 + random.below(90) } else { cells * grid + random.below(grid) };
        budgets.push(budget);
        done += if grid == 1 { budget } else { budget / grid * grid };
    }
    budgets
}

/// Lengths on the grid, one beyond, and ragged ones.
fn lengths(random: &mut Random) -> Vec<usize> {
    let mut lengths = vec![1, 2, 3, 63, 64, 65, 128, 129, 192, 193, 256, 257];
    lengths.extend((0..8).map(|_| 1 + random.below(300)));
    lengths
}

#[test]
fn cuts_threads_and_snapshots_do_not_change_a_bit() {
    for model in MODELS {
        let files = files(model);
        let mut random = Random::new(2);
        for len in lengths(&mut random) {
            let tokens = prompt(&mut random, &files, len);
            let reference = alone(&files, &tokens, 3, Setting::default());
            for round in 0..3 {
                let threads = 1 + (round + len) % 4;
                let setting = Setting { threads, ..Setting::default() };
                let mut rig = Rig::new(&files, setting);
                rig.shuffle_pool(&mut random, 3, 9);
                let sequence = rig.add(&tokens);
                let kept = run_with_cuts(&mut rig, sequence, &mut random, round % 2 == 1);
                let mut logits = kept.logits;
                let mut all = vec![bits(&logits)];
                for _ in 0..3 {
                    rig.sequences[sequence].push(argmax(&logits));
                    logits = rig.step(&[Turn::new(sequence, 1, Wanted::Last)]);
                    all.push(bits(&logits));
                }
                let what = format!("{model}: {len} tokens, {threads} threads, round {round}");
                assert!(trace(&rig, sequence, all) == reference, "{what}");
                for slot in kept.snapshots {
                    rig.pool.release(slot);
                }
                rig.finish();
            }
        }
    }
}

struct Cut {
    logits: Vec<f32>,
    snapshots: Vec<SlotHandle>,
}

/// Computes a prompt in random spans, with a snapshot at every grid position or with none.
fn run_with_cuts(rig: &mut Rig, sequence: usize, random: &mut Random, snapshots: bool) -> Cut {
    let len = rig.sequences[sequence].tokens().len();
    let mut cut = Cut { logits: Vec::new(), snapshots: Vec::new() };
    let wanted = snapshots && rig.grid > 1;
    for budget in cuts(random, len, rig.grid) {
        let start = rig.sequences[sequence].computed();
        if start == len {
            break;
        }
        let end = if budget >= len - start { len } else { (start + budget) / rig.grid * rig.grid };
        let positions = start / 64 + 1..if wanted { end / 64 + 1 } else { 0 };
        let fresh: Vec<SlotHandle> =
            positions.clone().map(|_| rig.pool.alloc_slot().expect("a slot is free")).collect();
        let at: Vec<(usize, &SlotHandle)> =
            positions.map(|cell| cell * 64 - start).zip(&fresh).collect();
        cut.logits = rig.step(&[Turn { sequence, budget, wanted: Wanted::Last, snapshots: &at }]);
        cut.snapshots.extend(fresh);
    }
    cut
}

/// A snapshot at 64k holds the bytes of a run of the first 64k tokens, and a run resumed from it
/// gives the bits of the uninterrupted one, hidden row included.
#[test]
fn snapshots_hold_the_bytes_of_a_shorter_run_and_resume_it() {
    let files = files("kimi_linear_tiny");
    let mut random = Random::new(3);
    let tokens = prompt(&mut random, &files, 230);
    let reference = alone(&files, &tokens, 2, Setting::default());
    let mut rig = Rig::new(&files, Setting::default());
    let whole = rig.add(&tokens);
    let cut = run_with_cuts(&mut rig, whole, &mut random, true);
    assert_eq!(cut.snapshots.len(), 3);
    for (i, snapshot) in cut.snapshots.into_iter().enumerate() {
        let position = (i + 1) * 64;
        // The reference of the snapshot: the first tokens of the same prompt, and no more. Its
        // rows are computed in the form they have in the whole prompt, which the cell border
        // decides, so it is the same prompt run up to the position.
        let mut short = Rig::new(&files, Setting::default());
        let sequence = short.add(&tokens);
        let prefix = bits(&short.step(&[Turn::new(sequence, position, Wanted::Last)]));
        assert_eq!(short.sequences[sequence].computed(), position);
        let (slot, _) = stored(&short, sequence, position);
        assert!(slot == bits(&rig.slot(&snapshot)), "the snapshot at {position}");
        short.finish();
        // A prompt of exactly these tokens has the same state: all its rows lie below its border.
        let own = alone(&files, &tokens[..position], 0, Setting::default());
        assert!(own.slot == slot && own.logits[0] == prefix, "a prompt of {position} tokens");
        // Resume: the blocks up to the position and the snapshot are shared; the slot is read where
        // it lies and a fresh one written.
        let table = rig.sequences[whole]
            .state()
            .expect("it runs")
            .table()
            .share_first(&mut rig.pool, i + 1);
        let kept = bits(&rig.slot(&snapshot));
        let shared = rig.pool.share(&snapshot);
        let resumed = rig.add_with(&tokens, SequenceState::from_parts(table, shared, position));
        let mut logits = rig.prefill(resumed, 512);
        let mut all = vec![bits(&logits)];
        for _ in 0..2 {
            rig.sequences[resumed].push(argmax(&logits));
            logits = rig.step(&[Turn::new(resumed, 1, Wanted::Last)]);
            all.push(bits(&logits));
        }
        assert!(trace(&rig, resumed, all) == reference, "resumed from {position}");
        assert!(kept == bits(&rig.slot(&snapshot)), "the snapshot itself is untouched");
        rig.pool.release(snapshot);
    }
    rig.finish();
}

/// One sequence alone, and the same among seven others that start at other times, with slots and
/// blocks taken in a random order and tables that grow in turns.
#[test]
fn eight_sequences_in_one_batch_keep_the_bits_of_each_alone() {
    for model in MODELS {
        let files = files(model);
        let mut random = Random::new(4);
        let lens = [1, 5, 64, 65, 127, 128, 150, 200];
        let prompts: Vec<Vec<u32>> =
            lens.iter().map(|len| prompt(&mut random, &files, *len)).collect();
        let steps = 6;
        let references: Vec<Trace> =
            prompts.iter().map(|p| alone(&files, p, steps, Setting::default())).collect();
        for threads in [1, 3] {
            let memory = 16 << 20;
            let setting = Setting { threads, memory, most_rows: 1_024, ..Setting::default() };
            let mut rig = Rig::new(&files, setting);
            rig.shuffle_pool(&mut random, 12, 40);
            for prompt in &prompts {
                rig.add(prompt);
            }
            let logits = run_together(&mut rig, &mut random, steps);
            let tables: Vec<Vec<usize>> = rig
                .sequences
                .iter()
                .map(|s| s.state().expect("it runs").table().ids().map(|id| id.index()).collect())
                .collect();
            let scattered = |t: &&Vec<usize>| t.windows(2).any(|pair| pair[1] != pair[0] + 1);
            assert!(tables.iter().filter(scattered).count() >= 3, "tables are not contiguous");
            for (i, (logits, reference)) in logits.into_iter().zip(&references).enumerate() {
                let what = format!("{model}: sequence {i} of eight, {threads} threads");
                assert!(trace(&rig, i, logits) == *reference, "{what}");
            }
            rig.finish();
        }
    }
}

/// Steps of which each holds a span of a random part of the unfinished sequences.
fn run_together(rig: &mut Rig, random: &mut Random, steps: usize) -> Vec<Vec<Vec<u32>>> {
    let count = rig.sequences.len();
    let vocab = rig.executor.model().spec().vocab_size;
    let mut logits: Vec<Vec<Vec<u32>>> = vec![Vec::new(); count];
    while logits.iter().any(|l| l.len() <= steps) {
        let mut turns = Vec::new();
        for (i, logits) in logits.iter().enumerate() {
            if logits.len() <= steps && random.below(3) > 0 {
                turns.push(Turn::new(i, rig.grid.max(40) + random.below(100), Wanted::Last));
            }
        }
        let before: Vec<usize> = rig.sequences.iter().map(|s| s.computed()).collect();
        let out = rig.step(&turns);
        let mut rows = out.chunks_exact(vocab);
        for turn in &turns {
            let sequence = &mut rig.sequences[turn.sequence];
            if sequence.computed() == before[turn.sequence] {
                continue; // the budget held no cell
            }
            let row = rows.next().expect("a row of logits for each span");
            if sequence.computed() == sequence.tokens().len() {
                let logits = &mut logits[turn.sequence];
                logits.push(bits(row));
                if logits.len() <= steps {
                    sequence.push(argmax(row));
                }
            }
        }
    }
    logits
}

/// Generated tokens replayed together after a loss of state give the bits of one by one.
#[test]
fn replayed_steps_keep_their_bits() {
    for model in MODELS {
        let files = files(model);
        let mut random = Random::new(5);
        let tokens = prompt(&mut random, &files, 100);
        let mut rig = Rig::new(&files, Setting::default());
        let first = rig.add(&tokens);
        let mut logits = rig.prefill(first, 512);
        let mut answer = Vec::new();
        for _ in 0..70 {
            answer.push(argmax(&logits));
            rig.sequences[first].push(argmax(&logits));
            logits = rig.step(&[Turn::new(first, 1, Wanted::Last)]);
        }
        let reference = trace(&rig, first, vec![bits(&logits)]);
        let again = rig.add(&tokens);
        rig.step(&[Turn::new(again, 512, Wanted::Last)]);
        answer.iter().for_each(|token| rig.sequences[again].push(*token));
        let logits = [33, 1, 512].map(|budget| rig.step(&[Turn::new(again, budget, Wanted::Last)]));
        let replayed = trace(&rig, again, vec![bits(&logits[2])]);
        assert!(replayed == reference, "{model}: replayed in three spans");
        rig.finish();
    }
}

/// Three segments of keys: 2,500 tokens in spans of one row, of 64, and all at once.
#[test]
fn long_contexts_keep_their_bits_over_segments_threads_and_cuts() {
    for model in ["kimi_linear_tiny", "qwen3_tiny"] {
        let files = files(model);
        let mut random = Random::new(6);
        let tokens = prompt(&mut random, &files, 2_500);
        let long =
            |threads| Setting { threads, memory: 24 << 20, most_rows: 2_560, ..Setting::default() };
        let reference = alone(&files, &tokens, 2, long(1));
        for threads in 1..=4 {
            let mut rig = Rig::new(&files, long(threads));
            let sequence = rig.add(&tokens);
            let mut logits = rig.prefill(sequence, 64);
            let mut all = vec![bits(&logits)];
            for _ in 0..2 {
                rig.sequences[sequence].push(argmax(&logits));
                logits = rig.step(&[Turn::new(sequence, 1, Wanted::Last)]);
                all.push(bits(&logits));
            }
            let what = format!("{model}: spans of 64, {threads} threads");
            assert!(trace(&rig, sequence, all) == reference, "{what}");
            rig.finish();
        }
        generated_one_by_one_or_together(&files, &mut random, long(2));
    }
}

/// A short prompt and 2,440 generated tokens: row by row, and in spans of 64 rows.
fn generated_one_by_one_or_together(files: &ModelFiles, random: &mut Random, setting: Setting) {
    let (head, tail) = (prompt(random, files, 60), prompt(random, files, 2_440));
    let run = |budget: usize| {
        let mut rig = Rig::new(files, setting);
        let sequence = rig.add(&head);
        rig.step(&[Turn::new(sequence, 64, Wanted::Last)]);
        tail.iter().for_each(|token| rig.sequences[sequence].push(*token));
        let logits = rig.prefill(sequence, budget);
        let trace = trace(&rig, sequence, vec![bits(&logits)]);
        rig.finish();
        trace
    };
    assert!(run(1) == run(64), "generated tokens in spans of one row and of 64");
}

/// Each instruction set keeps the rule by itself; two sets need not agree with each other.
#[test]
fn every_instruction_set_keeps_the_bits_of_a_cut_prompt() {
    let files = files("kimi_linear_tiny");
    let mut random = Random::new(7);
    let tokens = prompt(&mut random, &files, 177);
    for isa in Isa::available() {
        let setting = Setting { isa, ..Setting::default() };
        let reference = alone(&files, &tokens, 0, setting);
        let mut rig = Rig::new(&files, Setting { threads: 2, ..setting });
        let sequence = rig.add(&tokens);
        let cut = run_with_cuts(&mut rig, sequence, &mut random, true);
        let all = vec![bits(&cut.logits)];
        assert!(trace(&rig, sequence, all) == reference, "{}", isa.name());
        cut.snapshots.into_iter().for_each(|slot| {
            rig.pool.release(slot);
        });
        rig.finish();
    }
}

//! Whole models on a CUDA device, or on the emulated one: the scheduler, the pools and the prefix
//! tree over device memory, against the same requests on the processor, and steps as graphs against
//! the same steps without.

#[allow(unsafe_code)] // it loads libraries; the file is of `kernels`
#[path = "../kernels/tests/cuda_support/mod.rs"]
mod cuda_support;

#[path = "cuda/crowd.rs"]
mod crowd;
#[path = "cuda/golden.rs"]
mod golden;
mod support;
#[path = "cuda/transfers.rs"]
mod transfers;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use cuda_support::{Device, assert_caught, device, with_seeds};
use deltapool::config::{EngineConfig, MemorySize, Preempt};
use deltapool::engine::core::Core;
use deltapool::engine::cuda::CudaExecutor;
use deltapool::engine::executor::Executor;
use deltapool::engine::{Engine, EngineLimits, RequestId};
use deltapool::models::ModelFiles;
use deltapool::models::cuda::Most;
use deltapool::request::{Finish, Request, SamplingParams};
use kernels::cuda::{Cuda, Options};
use kernels::{Compute, KvDtype};

/// Requests run three at a time, and every fifth step one of them is pushed out.
fn config() -> EngineConfig {
    EngineConfig {
        max_num_batched_tokens: 64,
        max_num_seqs: Some(3),
        max_model_len: Some(256),
        device_memory: MemorySize::Bytes(64 << 20),
        host_memory: MemorySize::Bytes(64 << 20),
        preempt: Preempt::Swap,
        park_every: Some(5),
        threads: 1,
        ..EngineConfig::default()
    }
}

/// The model of a folder, in single precision.
fn files(dir: &Path) -> ModelFiles {
    in_f32(ModelFiles::open(dir).expect("a model opens"))
}

fn in_f32(mut files: ModelFiles) -> ModelFiles {
    files.spec.compute = Compute::F32;
    files.spec.kv_dtype = KvDtype::F32;
    files
}

/// Prompts of less than a cell, more than one, less again, and the second's beginning again.
fn requests(vocab: usize) -> Vec<Request> {
    let tokens = |seed: usize, len: usize| -> Vec<u32> {
        (0..len).map(|i| ((i * i * 7 + i * 13 + seed * 101) % vocab) as u32).collect()
    };
    let long = tokens(2, 100);
    let again: Vec<u32> = long[..80].iter().copied().chain(tokens(3, 9)).collect();
    let request = |(i, prompt): (u64, Vec<u32>)| Request {
        sampling: SamplingParams {
            temperature: if i == 1 { 0.8 } else { 0.0 },
            seed: Some(i),
            ..SamplingParams::default()
        },
        ignore_eos: true,
        ..Request::new(prompt, 10)
    };
    (0..).zip([tokens(1, 20), long, tokens(4, 9), again]).map(request).collect()
}

/// Answers to the requests, the last of which comes when the others have ended.
fn answers<E: Executor>(core: &mut Core<E>, vocab: usize) -> BTreeMap<u64, (Vec<u32>, Finish)> {
    let mut answers: BTreeMap<u64, (Vec<u32>, Option<Finish>)> = BTreeMap::new();
    let mut run = |core: &mut Core<E>, requests: Vec<(u64, Request)>| {
        for (id, request) in requests {
            core.door().check(&request).expect("it is taken");
            core.submit(RequestId(id), Arc::new(request), id);
        }
        while !core.is_idle() {
            for (id, event) in core.step() {
                let answer = answers.entry(id.0).or_default();
                answer.0.extend(event.token);
                answer.1 = event.finish.or(answer.1.take());
            }
        }
    };
    let mut all: Vec<(u64, Request)> = (0..).zip(requests(vocab)).collect();
    let last = all.split_off(3);
    run(core, all);
    run(core, last);
    let ended = |(id, (tokens, finish)): (u64, (Vec<u32>, Option<Finish>))| {
        (id, (tokens, finish.expect("it ended")))
    };
    answers.into_iter().map(ended).collect()
}

/// The loop of an engine over the device.
fn on_device(
    files: ModelFiles,
    open: impl FnOnce(&ModelFiles) -> CudaExecutor,
) -> Core<CudaExecutor> {
    let executor = open(&files);
    let builder = Engine::builder(files).config(config());
    builder.build_core(|_| executor).expect("it is built")
}

fn executor(cuda: Cuda, files: &ModelFiles) -> CudaExecutor {
    let limits = EngineLimits::derive(&files.spec, &config(), None).expect("it fits");
    let most = Most {
        rows: limits.most_rows,
        sequences: limits.max_num_seqs,
        positions: limits.max_model_len,
        logits: 64,
    };
    let weights = files.load_rows(&mut |_, _| {}).expect("it loads");
    let bytes = (limits.device.arena_bytes(), limits.host.arena_bytes());
    let made = CudaExecutor::new(cuda, (files, weights), bytes, bytes.1, most);
    let (executor, not_pinned) = made.expect("there is room");
    assert!(not_pinned.is_none(), "{not_pinned:?}");
    executor
}

/// Another handle of the device that the test holds.
fn open(device: &Device) -> Cuda {
    let options = Options { compile: device.stand_in.is_some(), ..Options::default() };
    Cuda::open(options).expect("the device opens")
}

fn compare(device: &Device, model: impl Fn() -> ModelFiles, seeds: u64) {
    let vocab = model().spec.vocab_size;
    let is_recurrent = model().spec.is_recurrent();
    let cpu = Engine::builder(model()).config(config()).build_core(|executor| executor);
    let expected = answers(&mut cpu.expect("it is built"), vocab);
    with_seeds(device, seeds, |seed| {
        let mut core = on_device(model(), |files| executor(open(device), files));
        let given = answers(&mut core, vocab);
        let model = core.executor_mut().model();
        assert_eq!(model.graphs_off(), None);
        assert_eq!(model.graph_rows(), [1, 2, 4], "three rows are padded to four");
        assert!(model.graph_replays() > 8, "{} replays", model.graph_replays());
        assert_eq!(given.len(), 4);
        for (id, (tokens, finish)) in &given {
            assert_eq!(*tokens, expected[id].0, "answer {id}, order {seed}");
            assert_eq!(finish.reason, expected[id].1.reason);
        }
        assert!(given.values().any(|(_, finish)| finish.figures.swapped_bytes > 0), "no swap");
        let cached = if is_recurrent { 64 } else { 80 };
        assert!(given[&3].1.figures.cached_tokens >= cached, "{:?}", given[&3].1.figures);
    });
}

#[test]
fn small_models_answer_as_on_the_processor_whatever_is_swapped_or_found() {
    let Some(device) = device() else { return };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    for name in ["kimi_linear_tiny", "llama_tiny", "qwen3_tiny"] {
        compare(&device, || files(&models.join(name)), 3);
    }
}

#[test]
fn the_model_in_the_binary_answers_as_on_the_processor() {
    let Some(device) = device() else { return };
    compare(&device, || in_f32(ModelFiles::embedded().expect("the model is sound")), 1);
}

#[test]
fn a_graph_that_leaves_something_out_is_caught() {
    let (right, wrong) = (
        "for (auto& work : ((Graph*)executable)->work) push(stream, work);",
        "auto& all = ((Graph*)executable)->work;\n  for (auto& work : all)\n    \
         if (&work != &all[all.size() / 2]) push(stream, work);",
    );
    let name = "the_model_in_the_binary_answers_as_on_the_processor";
    assert_caught(name, ("emu/driver.cpp", right, wrong), "graphs are off: a step of 1 sequences");
}

#[test]
fn a_driver_that_records_nothing_is_told() {
    let (right, wrong) = ("*graph = new Graph{std::move(stream->captured)};", "return NOT_FOUND;");
    let name = "the_model_in_the_binary_answers_as_on_the_processor";
    assert_caught(name, ("emu/driver.cpp", right, wrong), "graphs are off: ending a graph failed");
}

//! Whole models on a CUDA device, or on the emulated one: the scheduler, the pools and the prefix
//! tree over device memory, against the same requests on the processor, and steps as graphs against
//! the same steps without.

#[allow(unsafe_code)] // it loads libraries; the file is of `kernels`
#[path = "../kernels/tests/cuda_support/mod.rs"]
mod cuda_support;

#[path = "cuda/crowd.rs"]
mod crowd;
#[path = "cuda/draws.rs"]
mod draws;
#[path = "cuda/golden.rs"]
mod golden;
mod support;
#[path = "cuda/transfers.rs"]
mod transfers;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use cuda_support::{Device, assert_caught, device, emulated, options, with_seeds};
use deltapool::config::{CheckpointDtype, EngineConfig, MemorySize, Preempt};
use deltapool::engine::core::Core;
use deltapool::engine::cuda::CudaExecutor;
use deltapool::engine::executor::Executor;
use deltapool::engine::{Engine, EngineBuilder, EngineLimits, OpenDevice, RequestId, SubmitError};
use deltapool::models::ModelFiles;
use deltapool::models::cuda::CudaModel;
use deltapool::request::{Event, Finish, FinishReason, Request, SamplingParams};
use kernels::cuda::Cuda;
use kernels::{Compute, KvDtype, Quantization};

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

/// Prompts of less than a cell, more than one, less again, and the second's beginning again. Draws
/// that look at whole rows of logits stand beside such that look at a few tokens or one.
fn requests(vocab: usize) -> Vec<Request> {
    let tokens = |seed: usize, len: usize| -> Vec<u32> {
        (0..len).map(|i| ((i * i * 7 + i * 13 + seed * 101) % vocab) as u32).collect()
    };
    let long = tokens(2, 100);
    let again: Vec<u32> = long[..80].iter().copied().chain(tokens(3, 9)).collect();
    let request = |(i, prompt): (u64, Vec<u32>)| Request {
        sampling: SamplingParams {
            temperature: if i == 1 || i == 2 { 0.8 } else { 0.0 },
            top_k: if i == 2 { 5 } else { 0 },
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
    let weights = files.rows().expect("it is sound");
    let bytes = (limits.device.arena_bytes(), limits.host.arena_bytes());
    let made = CudaExecutor::new(cuda, (files, weights), bytes, bytes.1, limits.most());
    let (executor, not_pinned) = made.expect("there is room");
    assert!(not_pinned.is_none(), "{not_pinned:?}");
    executor
}

/// Another handle of the device that the test holds.
fn open(_held: &Device) -> Cuda {
    Cuda::open(options()).expect("the device opens")
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

/// An engine to be, on the device that the test holds.
fn builder(device: &Device, config: EngineConfig) -> EngineBuilder<'static> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    let files = files(&models.join("kimi_linear_tiny"));
    let opened = OpenDevice::Cuda(Box::new(open(device)));
    Engine::builder(files).config(config).on(opened)
}

/// What `config` derives to on the device, or what is said.
fn limits(device: &Device, config: EngineConfig) -> Result<EngineLimits, String> {
    builder(device, config).limits().map_err(|error| error.to_string())
}

#[test]
fn limits_are_of_the_devices_memory_after_the_weights() {
    let Some(device) = device() else { return };
    let free = device.cuda.free_bytes().expect("it answers");
    let asked = EngineConfig { preempt: Preempt::Auto, park_every: None, ..config() };
    let quarter = EngineConfig { device_memory: MemorySize::Percent(25.0), ..asked };
    let derived = limits(&device, quarter).expect("it fits");
    let (bytes, page) = (derived.device.arena_bytes(), derived.device.page_bytes);
    // The weights of the tiny model are less than a MiB.
    assert!(bytes <= free / 4 && bytes + page + (1 << 20) > free / 4, "{bytes} of {free}");
    // What probes of the processor say is nothing to go by.
    assert_eq!(derived.config.preempt, Preempt::Swap);
    let rates = EngineConfig {
        link_bytes_per_second: Some(1e10),
        prefill_tokens_per_second: Some(1e3),
        ..quarter
    };
    assert_eq!(limits(&device, rates).expect("it fits").config.preempt, Preempt::Auto);
    let all = EngineConfig { device_memory: MemorySize::Bytes(free), ..asked };
    let error = limits(&device, all).expect_err("no room to work");
    assert!(error.contains("on the CUDA device: sequences "), "{error}");
    let left = error.split("give --device-memory ").nth(1).expect("a value that works");
    let left = left.split(' ').next().and_then(|bytes| bytes.parse().ok()).expect("bytes");
    let less = EngineConfig { device_memory: MemorySize::Bytes(left), ..asked };
    limits(&device, less).expect("the value works");
}

#[test]
fn what_a_device_does_not_do_is_refused_by_name() {
    let Some(device) = device() else { return };
    let asked = config();
    for (refused, why) in [
        (EngineConfig { audit_percent: 5.0, ..asked }, "--audit 5: not on a CUDA device"),
        (
            EngineConfig { checkpoint_dtype: CheckpointDtype::Bf16, ..asked },
            "--checkpoint-dtype bf16: not on a CUDA device",
        ),
        (
            EngineConfig { max_num_batched_tokens: 1 << 18, ..asked },
            "--max-num-batched-tokens 262144: 131072 at most on a CUDA device",
        ),
        (
            EngineConfig { max_num_batched_tokens: 1 << 17, max_num_seqs: Some(1 << 15), ..asked },
            "--max-num-seqs 32768: 16384 at most on a CUDA device",
        ),
    ] {
        let error = limits(&device, refused).expect_err("it is refused");
        assert!(error.starts_with(why), "{error}");
    }
    let mut quantized = builder(&device, asked).quantize(Some(Quantization::Q8));
    let error = quantized.limits().expect_err("it is refused").to_string();
    assert!(error.starts_with("--quantize q8: not on a CUDA device"), "{error}");
}

/// What is said of a model's memory before it is there holds, and not by far too much.
#[test]
fn a_model_takes_about_as_much_memory_as_is_said_before() {
    let Some(device) = device() else { return };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    for name in ["kimi_linear_tiny", "llama_tiny", "qwen3_tiny"] {
        let files = files(&models.join(name));
        let wide = EngineConfig { max_num_batched_tokens: 4096, ..config() };
        let limits = EngineLimits::derive(&files.spec, &wide, None).expect("it fits");
        let weights = files.weight_bytes().expect("it reads").expect("there are some").stored;
        let said = CudaModel::work_bytes(&files.spec, limits.most()) + weights;
        let free = device.cuda.free_bytes().expect("it answers");
        let loaded = files.rows().expect("it is sound");
        let model = CudaModel::new(open(&device), &files, loaded, limits.most());
        let taken = free - device.cuda.free_bytes().expect("it answers");
        drop(model.expect("there is room"));
        assert!(taken <= said, "{name} takes {taken} bytes, {said} were said");
        assert!(said / 4 < taken + (8 << 20), "{name} takes {taken} bytes, {said} were said");
    }
}

/// Requests that run and that wait end with what the device said, and so does every later one.
#[test]
fn a_device_that_fails_ends_every_request_with_its_reason() {
    let Some((device, stand_in)) = emulated() else { return };
    for nth in [1, 40, 400] {
        let engine = builder(&device, config()).build().expect("it is built");
        stand_in.fail(Some(nth));
        let handles: Vec<_> = requests(768)
            .into_iter()
            .map(|request| engine.submit(request).expect("it is taken"))
            .collect();
        for handle in handles {
            let events: Vec<Event> = handle.into_iter().collect();
            let finish = events.last().and_then(|event| event.finish.clone()).expect("an end");
            let FinishReason::Failed(reason) = finish.reason else { panic!("{finish:?}") };
            assert!(reason.contains("CUDA error 719"), "{reason}");
        }
        let again = engine.submit(Request::new(vec![1], 1)).map(|_| ());
        let Err(SubmitError::Failed(reason)) = again else { panic!("{again:?}") };
        assert!(reason.contains("CUDA error 719"), "{reason}");
        assert_eq!(engine.fault(), Some(reason.as_str()));
        engine.drain();
        assert_eq!(engine.stats().pages_held(), 0);
        drop(engine);
        stand_in.fail(None);
    }
}

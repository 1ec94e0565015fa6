//! Whole requests: forty of them have the tokens and the logprob bits that each has alone, whatever
//! runs beside them, whatever the budget, however often they are pushed out and however late or
//! badly their memory is copied.

use deltapool::config::{MemorySize, Preempt};
use deltapool::engine::RequestId;
use deltapool::models::ModelFiles;
use deltapool::request::{Request, SamplingParams};
use deltapool::scheduler::SequenceId;
use kernels::{Compute, KvDtype, Quantization};

use super::support::seeds::seeds;
use super::support::stepped::{Answer, Answers, Setting, Stepped};
use super::support::{Random, Tensors, tell};
use super::{MODELS, files, golden_and_rows};

/// The models: the one in the binary where it is, and the goldens.
pub(super) fn models() -> Vec<String> {
    let embedded = cfg!(feature = "embedded-model").then_some("embedded");
    embedded.into_iter().chain(MODELS).map(str::to_owned).collect()
}

/// The files of `model`, of `model+q8` with its weights quantised, or of `model+bf16` whose
/// products are to be computed in bf16.
pub(super) fn open(model: &str) -> ModelFiles {
    let (name, how) = model.split_once('+').unwrap_or((model, ""));
    let mut files = match name {
        #[cfg(feature = "embedded-model")]
        "embedded" => ModelFiles::embedded().expect("the model is sound"),
        name => files(name),
    };
    let all = [Quantization::Q8, Quantization::Q4];
    files.spec.quantize = all.into_iter().find(|quantization| quantization.as_str() == how);
    files.spec.compute = if how == "bf16" { Compute::Bf16 } else { Compute::F32 };
    files
}

/// Forty requests: lengths from 1 to 700, on the grid and one beyond, one to three answers, greedy
/// and sampled. The first is a golden's own prompt.
fn requests(model: &str, random: &mut Random) -> Vec<Request> {
    let spec = open(model).spec;
    let longest = 700.min(spec.context - 80);
    let mut lengths = vec![1, 2, 3, 63, 64, 65, 127, 128, 129, 192, 193, 320, 321, longest];
    lengths.extend((lengths.len()..39).map(|i| {
        let most = if i % 3 == 0 { longest } else { 200 };
        1 + random.below(most)
    }));
    let mut prompts: Vec<Vec<u32>> = lengths
        .into_iter()
        .map(|len| (0..len).map(|_| random.below(spec.vocab_size) as u32).collect())
        .collect();
    prompts.insert(0, golden(model).map_or_else(|| vec![1, 2, 3], |golden| golden.0));
    let request = |(i, prompt): (usize, Vec<u32>)| {
        // Some answers go on past the end of their last block.
        let most = if i % 6 == 5 { 70 } else { 16 };
        let mut request = Request::new(prompt, 1 + random.below(most));
        request.n = if i % 5 == 3 { 2 + i % 2 } else { 1 };
        request.ignore_eos = true;
        request.sampling = SamplingParams {
            temperature: if i % 4 == 0 { 0.0 } else { 0.9 },
            seed: Some(1_000 + i as u64),
            logprobs: Some(2),
            ..SamplingParams::default()
        };
        if i == 0 {
            request.max_tokens = golden(model).map_or(8, |golden| golden.1.len());
        }
        request
    };
    prompts.into_iter().enumerate().map(request).collect()
}

/// Prompt and greedy answer of a golden model.
fn golden(model: &str) -> Option<(Vec<u32>, Vec<u32>)> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    let (name, kv_dtype) = golden_and_rows(model);
    if kv_dtype == KvDtype::Bf16 {
        return None; // the oracle keeps f32
    }
    let file = root.join(name).join("golden.safetensors");
    file.is_file().then(|| {
        let golden = Tensors::read(&file);
        (golden.ids("prompt_ids"), golden.ids("greedy_ids"))
    })
}

/// Each answer as the only one there is, with nothing kept of those before: a request for `n`
/// answers is `n` requests, the seeds counted up.
pub(super) fn alone(model: &str, requests: &[Request]) -> Answers {
    let setting = Setting::roomy().with(|config| config.prefix_cache = false);
    let mut engine = Stepped::new(open(model), setting);
    let mut answers = Answers::new();
    for (i, request) in requests.iter().enumerate() {
        for choice in 0..request.n {
            let mut one = Request { n: 1, ..request.clone() };
            one.sampling.seed = request.sampling.seed.map(|seed| seed + choice as u64);
            engine.submit(&one);
            engine.finish();
            let answer = std::mem::take(&mut engine.answers).into_values().next();
            answers.insert((i as u64, choice), answer.expect("one answer"));
        }
    }
    answers
}

/// How answers are parked beside what memory asks for.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) enum Parks {
    #[default]
    Never,
    /// Every answer of four tokens or more twice, at seeded steps.
    Twice,
    /// One of the requests at times.
    Some,
}

/// What is done to the requests beside running them.
#[derive(Clone, Copy, Default)]
pub(super) struct Storm {
    pub(super) parks: Parks,
    /// Neighbours join and are cancelled at any moment.
    pub(super) cancel: bool,
    /// Requests come over time, in an order of their own, instead of all at once.
    pub(super) scatter: bool,
}

/// Runs the requests together and compares each with itself alone. Returns the engine, to be asked
/// what happened.
pub(super) fn together(
    what: &str,
    model: &str,
    requests: &[Request],
    reference: &Answers,
    setting: Setting,
    storm: Storm,
) -> Stepped {
    let mut engine = Stepped::new(open(model), setting);
    let mut random = Random::new(setting.seed);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    if storm.scatter {
        (1..order.len()).for_each(|i| order.swap(i, random.below(i + 1)));
    }
    let (mut ids, mut neighbours) = (Vec::new(), Vec::new());
    let mut order = order.into_iter().peekable();
    let mut first_sequence = 0;
    while order.peek().is_some() || !engine.core.is_idle() {
        while let Some(i) = order.next_if(|_| !storm.scatter || random.below(3) == 0) {
            let id = engine.submit(&requests[i]);
            ids.push((i, id, first_sequence));
            first_sequence += requests[i].n as u64;
        }
        if storm.cancel {
            if random.below(4) == 0 {
                let i = random.below(requests.len());
                neighbours.push(engine.submit(&requests[i]));
                first_sequence += requests[i].n as u64;
            }
            if !neighbours.is_empty() && random.below(3) == 0 {
                engine.core.cancel(neighbours.swap_remove(random.below(neighbours.len())));
            }
        }
        match storm.parks {
            Parks::Never => {}
            Parks::Twice => park_twice(&mut engine, &ids, requests, &mut random),
            Parks::Some => {
                if random.below(3) == 0 && !ids.is_empty() {
                    engine.core.park(ids[random.below(ids.len())].1);
                }
            }
        }
        engine.step();
    }
    engine.finish();
    for (i, id, _) in ids {
        for choice in 0..requests[i].n {
            let (got, expected) =
                (&engine.answers[&(id.0, choice)], &reference[&(i as u64, choice)]);
            let len = requests[i].prompt.len();
            let which = format!(
                "{what}, {model}: request {i} of {len} tokens, choice {choice}: {:?}",
                got.finish
            );
            assert_eq!(got.ids, expected.ids, "{which}: tokens");
            assert_eq!(got.logprobs, expected.logprobs, "{which}: bits of logprobs");
            if storm.parks == Parks::Twice && got.ids.len() >= 4 {
                assert!(figures(got).preemptions >= 2, "{which}: parked twice");
            }
        }
    }
    engine
}

/// Parks those requests of which an answer was pushed out less than twice: by chance after the first
/// token, for certain after the second.
fn park_twice(
    engine: &mut Stepped,
    ids: &[(usize, RequestId, u64)],
    requests: &[Request],
    random: &mut Random,
) {
    for (i, id, first) in ids {
        let pushed_out = |choice: u64| {
            let sequence = engine.core.scheduler().sequence(SequenceId(first + choice));
            sequence.map_or(2, |sequence| sequence.counters().preemptions)
        };
        let fewest = (0..requests[*i].n as u64).map(pushed_out).min().unwrap_or(2);
        let generated = engine.generated(*id);
        if fewest < 2 && (generated > 1 || generated == 1 && random.below(2) == 0) {
            engine.core.park(*id);
        }
    }
}

fn figures(answer: &Answer) -> deltapool::request::Figures {
    answer.finish.as_ref().expect("it ended").figures
}

fn with_reference(test: impl Fn(&str, &[Request], &Answers)) {
    for model in models() {
        let requests = requests(&model, &mut Random::new(11));
        let reference = alone(&model, &requests);
        if let Some((_, greedy)) = golden(&model) {
            assert_eq!(reference[&(0, 0)].ids, greedy, "{model}: the golden's greedy ids");
        }
        test(&model, &requests, &reference);
    }
}

/// Bytes of a device that holds the longest request and little more.
pub(super) fn small(model: &str) -> MemorySize {
    let files = open(model);
    let layout = deltapool::models::Model::layout_of(&files.spec);
    MemorySize::Bytes(6 * layout.slot_bytes + 24 * layout.block_bytes + (1 << 16))
}

#[test]
fn requests_together_have_the_bits_of_each_alone() {
    with_reference(|model, requests, reference| {
        let roomy = Setting::roomy();
        let calm = Storm::default();
        let engine = together("all at once", model, requests, reference, roomy, calm);
        let computed = engine.core.stats().scheduler.prompt_tokens as usize;
        let prompts: usize = requests.iter().map(|request| request.prompt.len()).sum();
        assert_eq!(computed, prompts, "{model}: each prompt is computed once, however many forks");
        for budget in [64, 128, 8192] {
            let setting = roomy.with(|config| config.max_num_batched_tokens = budget);
            together(&format!("budget {budget}"), model, requests, reference, setting, calm);
        }
        for threads in [2, 3] {
            let setting = roomy.with(|config| config.threads = threads);
            together(&format!("{threads} threads"), model, requests, reference, setting, calm);
        }
        let storm = Storm { cancel: true, scatter: true, ..calm };
        together("cancelled neighbours", model, requests, reference, roomy, storm);
    });
}

#[test]
fn requests_that_are_pushed_out_come_back_with_the_same_bits() {
    with_reference(|model, requests, reference| {
        let small = small(model);
        let swap = Setting::roomy().with(|config| {
            config.device_memory = small;
            config.preempt = Preempt::Swap;
        });
        let (calm, park) = (Storm::default(), Storm { parks: Parks::Twice, ..Storm::default() });
        let engine = together("parked twice", model, requests, reference, swap, park);
        let stats = engine.core.stats().scheduler;
        assert!(stats.parked > 60 && stats.parked == stats.returned, "{model}: {stats:?}");
        assert_eq!(stats.recomputed, 0, "{model}: parked means parked");
        let late = Setting { late: true, ..swap };
        together("late transfers", model, requests, reference, late, park);
        let failing = Setting { failing: 3, ..swap };
        let storm = Storm { scatter: true, ..calm };
        let engine = together("failing transfers", model, requests, reference, failing, storm);
        let stats = engine.core.stats().scheduler;
        assert!(stats.failed_transfers > 0 || stats.parked < 5, "{model}: {stats:?}");
        let recompute = swap.with(|config| config.preempt = Preempt::Recompute);
        let engine = together("recompute", model, requests, reference, recompute, calm);
        let stats = engine.core.stats().scheduler;
        assert!(stats.recomputed > 0 && stats.parked == 0, "{model}: {stats:?}");
        let no_host = swap.with(|config| config.host_memory = MemorySize::Bytes(0));
        let engine = together("no host", model, requests, reference, no_host, calm);
        let stats = engine.core.stats().scheduler;
        assert!(stats.host_full > 0 && stats.parked == 0, "{model}: {stats:?}");
    });
}

/// Rows are quantised and rounded one by one, groups are summed exactly and pairs in order, so
/// quantised weights and products in bf16 change nothing of the rule.
#[test]
fn quantised_models_and_bf16_products_keep_the_bits_of_each_request_alone() {
    let quantised = ["kimi_linear_tiny+q8", "kimi_linear_tiny+q4", "qwen3_tiny+q4"];
    for model in quantised.into_iter().chain(["kimi_linear_tiny+bf16", "qwen3_tiny+bf16"]) {
        let requests = requests(model, &mut Random::new(12));
        let requests = &requests[8..20];
        let reference = alone(model, requests);
        let stored = alone(model.split('+').next().expect("a name"), &requests[..1]);
        assert_ne!(stored[&(0, 0)].logprobs, reference[&(0, 0)].logprobs, "{model} is another");
        let cut = Setting::roomy().with(|config| {
            config.max_num_batched_tokens = 64;
            config.threads = 2;
        });
        together("budget 64", model, requests, &reference, cut, Storm::default());
        let small = small(model);
        let swap = Setting::roomy().with(|config| {
            config.device_memory = small;
            config.preempt = Preempt::Swap;
        });
        let park = Storm { parks: Parks::Twice, ..Storm::default() };
        together("parked twice", model, requests, &reference, swap, park);
        let recompute = swap.with(|config| config.preempt = Preempt::Recompute);
        together("recompute", model, requests, &reference, recompute, Storm::default());
    }
}

/// Everything at once, by chance: `DELTAPOOL_SEED` repeats one seed.
#[test]
fn random_storms_change_no_bit() {
    let seeds = seeds(6);
    with_reference(|model, requests, reference| {
        for seed in seeds.clone() {
            let mut random = Random::new(77 + seed);
            let small = small(model);
            let mut setting = Setting::roomy().with(|config| {
                config.max_num_batched_tokens = [64, 96, 128, 200, 512][random.below(5)];
                config.max_num_seqs = Some([2, 5, 40, 64][random.below(4)]);
                config.threads = 1 + random.below(3);
                config.preempt =
                    [Preempt::Swap, Preempt::Auto, Preempt::Recompute][random.below(3)];
                config.watermark_percent = [0.0, 2.0, 20.0][random.below(3)];
                if random.below(4) > 0 {
                    config.device_memory = small;
                }
                if random.below(3) == 0 {
                    config.host_memory = small;
                }
            });
            setting.late = random.below(2) == 0;
            setting.failing = [0, 0, 2, 5][random.below(4)];
            setting.seed = seed + 1;
            let parks = [Parks::Never, Parks::Some, Parks::Some][random.below(3)];
            let storm = Storm { parks, cancel: random.below(2) == 0, scatter: true };
            let what = format!("DELTAPOOL_SEED={seed}");
            let engine = together(&what, model, requests, reference, setting, storm);
            let stats = engine.core.stats().scheduler;
            tell(&format!(
                "{what}, {model}: {} parked, {} recomputed",
                stats.parked, stats.recomputed
            ));
        }
    });
}

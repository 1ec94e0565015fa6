//! Faults that users of other engines reported, each by its recipe, and the invariants they break.
//!
//! The numbers are those of the project's fault log: preemption and abort (14 to 20), memory and
//! admission (26 to 34), batching and determinism (46 to 52), and the kinds of wrong state K4 to
//! K7, K9 and K11. K1 (a stale slot) and K6 (rows of nobody) are what the memory of [`Stepped`] is
//! for: whatever is free is not-a-number in every test here.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use deltapool::config::{EngineConfig, MemorySize, Policy, Preempt};
use deltapool::engine::{Engine, EngineError, RequestId, SubmitError};
use deltapool::models::{Model, ModelFiles};
use deltapool::request::{FinishReason, Request, SamplingParams};
use deltapool::scheduler::{Place, SequenceId};
use deltapool::text::{TextFiles, Tokenizer};
use kernels::{BLOCK_LEN, KvDtype};
use support::Random;
use support::stepped::{Answer, Setting, Stepped};

fn folder(model: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(model)
}

/// With rows of tokens in f32: of half the bytes a page would hold twice the blocks, and memories
/// as small as these tests want could not be had.
fn files() -> ModelFiles {
    let mut files = ModelFiles::open(&folder("kimi_linear_tiny")).expect("a golden opens");
    files.spec.kv_dtype = KvDtype::F32;
    files
}

/// Tokens of no meaning.
fn prompt(len: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(500) as u32).collect()
}

/// A request of a prompt and an answer of exactly these lengths.
fn request(len: usize, seed: u64, max_tokens: usize) -> Request {
    Request {
        ignore_eos: true,
        sampling: SamplingParams {
            seed: Some(seed),
            logprobs: Some(0),
            ..SamplingParams::default()
        },
        ..Request::new(prompt(len, seed), max_tokens)
    }
}

/// Memory for so many slots and blocks, each kind on its own pages.
fn memory(slots: usize, blocks: usize) -> MemorySize {
    let model = Model::layout_of(&files().spec);
    let page = page_bytes();
    let slot_pages = slots.div_ceil(page / model.slot_bytes);
    let block_pages = blocks.div_ceil(page / model.block_bytes);
    MemorySize::Bytes((slot_pages + block_pages) * page)
}

fn page_bytes() -> usize {
    let roomy = Stepped::new(files(), Setting::roomy());
    roomy.core.scheduler().device().layout().page_bytes
}

fn swapping(device: MemorySize, host: MemorySize) -> Setting {
    Setting::roomy().with(|config| {
        config.device_memory = device;
        config.host_memory = host;
        config.preempt = Preempt::Swap;
        config.watermark_percent = 0.0;
    })
}

/// What each request answers when it is the only one.
fn solo(requests: &[Request]) -> Vec<Answer> {
    let mut engine = Stepped::new(files(), Setting::roomy());
    let run = |request: &Request| {
        let id = engine.submit(request);
        engine.finish();
        engine.answers.remove(&(id.0, 0)).expect("it ended")
    };
    requests.iter().map(run).collect()
}

fn assert_same(got: &Answer, alone: &Answer, what: &str) {
    assert_eq!((&got.ids, &got.logprobs), (&alone.ids, &alone.logprobs), "{what}");
}

/// 14: a request that is pushed out and computed again streams every token once, and counts right.
#[test]
fn a_preempted_stream_has_no_gap_and_no_repeat() {
    let dir = folder("kimi_linear_tiny");
    let text = TextFiles::read(&dir).expect("its tokenizer's files");
    let tokenizer = Arc::new(Tokenizer::from_files(&text).expect("a tokenizer"));
    let requests: Vec<Request> = (0..8).map(|i| request(40 + i, i as u64, 90)).collect();
    for preempt in [Preempt::Swap, Preempt::Recompute] {
        let setting = swapping(memory(3, 8), memory(8, 24)).with(|config| config.preempt = preempt);
        let builder = Engine::builder(files()).config(setting.config);
        let builder = builder.tokenizer(Some(Arc::clone(&tokenizer)));
        let mut engine = Stepped::over(builder, setting);
        let ids: Vec<RequestId> = requests.iter().map(|request| engine.submit(request)).collect();
        engine.finish();
        let stats = engine.core.stats().scheduler;
        assert!(stats.parked + stats.recomputed > 3, "{preempt:?}: {stats:?}");
        for id in ids {
            let answer = &engine.answers[&(id.0, 0)];
            let finish = answer.finish.as_ref().expect("it ended");
            assert_eq!(finish.reason, FinishReason::Length);
            assert_eq!((answer.ids.len(), finish.figures.generated_tokens), (90, 90));
            assert_eq!(answer.text, tokenizer.decode(&answer.ids), "{preempt:?}");
        }
    }
}

/// 15: a host that holds less than one victim, exactly one, or none at all never stops the engine.
/// On a model without recurrent layers a page is a block, so a host can be as small as that.
#[test]
fn a_host_too_small_for_a_victim_falls_back_and_drains() {
    let llama = || ModelFiles::open(&folder("llama_tiny")).expect("a golden opens");
    let requests: Vec<Request> =
        (0..50).map(|i| request(65 + (i * 37) % 230, i as u64, 70)).collect();
    let mut roomy = Stepped::new(llama(), Setting::roomy());
    requests.iter().for_each(|request| {
        roomy.submit(request);
    });
    roomy.finish();
    let block = Model::layout_of(&llama().spec).block_bytes;
    for host_blocks in [0, 1, 4, 400] {
        let device = MemorySize::Bytes(10 * block);
        let setting = swapping(device, MemorySize::Bytes(host_blocks * block));
        let mut engine = Stepped::new(llama(), setting);
        requests.iter().for_each(|request| {
            engine.submit(request);
        });
        engine.finish();
        let stats = engine.core.stats().scheduler;
        let what = format!("a host of {host_blocks} blocks: {stats:?}");
        assert_eq!(stats.parked > 0, host_blocks > 1, "{what}");
        assert_eq!(stats.recomputed > 0, host_blocks < 400, "{what}");
        for (id, alone) in &roomy.answers {
            assert_same(&engine.answers[id], alone, &what);
        }
    }
}

/// 18, K9: callers that leave after the third token leave nothing behind.
#[test]
fn callers_that_leave_give_everything_back() {
    let config = EngineConfig {
        device_memory: memory(6, 30),
        host_memory: memory(6, 30),
        max_model_len: Some(600),
        threads: 1,
        ..EngineConfig::default()
    };
    let engine = Engine::builder(files()).config(config).build().expect("an engine");
    for round in 0..10 {
        let handles: Vec<_> = (0..20)
            .map(|i| engine.submit(request(30 + i, round * 20 + i as u64, 500)).expect("it fits"))
            .collect();
        for mut handle in handles {
            (0..3).for_each(|_| assert!(handle.recv().is_some_and(|event| event.finish.is_none())));
        }
    }
    let last = engine.submit(request(100, 1, 5)).expect("the engine still serves");
    assert_eq!(last.into_iter().filter(|event| event.token.is_some()).count(), 5);
    engine.drain();
    let stats = engine.stats();
    assert_eq!(
        (stats.device.free_pages, stats.host.free_pages),
        (stats.device.pages, stats.host.pages)
    );
    assert_eq!((stats.occupancy, stats.finished), (Default::default(), 201));
}

/// 19: around the capacity of the device, what is taken runs and what is not is refused at once;
/// later requests run.
#[test]
fn requests_about_as_large_as_the_device_run_or_are_refused() {
    let setting = swapping(memory(1, 8), MemorySize::Bytes(0));
    let mut engine = Stepped::new(files(), setting);
    let capacity = engine.core.door().limits.max_model_len;
    let mut taken = 0;
    for len in (capacity - 70..capacity + 6).step_by(3) {
        for max_tokens in [1, 16] {
            let request = request(len, len as u64, max_tokens);
            let fits = len + max_tokens <= capacity;
            match engine.core.door().check(&request) {
                Ok(()) => assert!(fits, "{len} + {max_tokens}"),
                Err(SubmitError::Refused(error)) => {
                    let message = error.to_string();
                    assert!(!fits && message.contains("--max-model-len is"), "{message}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
            let id = engine.submit(&request);
            taken += 1;
            if taken % 2 == 0 {
                engine.step();
                engine.core.cancel(id);
            }
        }
    }
    engine.submit(&request(3, 3, 3));
    engine.finish();
    assert!(taken > 20);
}

/// 20: one that was pushed out returns before newer ones of its number, and is not pushed out again
/// and again.
#[test]
fn a_parked_request_returns_before_newer_ones_and_is_not_tossed_about() {
    let setting = swapping(memory(4, 6), memory(20, 60)).with(|config| {
        config.policy = Policy::Priority;
    });
    let mut engine = Stepped::new(files(), setting);
    let submit = |engine: &mut Stepped, seed| {
        engine.submit(&Request { priority: Some(1), ..request(60, seed, 120) })
    };
    let old: Vec<RequestId> = (0..3).map(|seed| submit(&mut engine, seed)).collect();
    (0..40).for_each(|_| engine.step());
    let new: Vec<RequestId> = (3..9).map(|seed| submit(&mut engine, seed)).collect();
    let ended = |engine: &Stepped, ids: &[RequestId]| {
        ids.iter().filter(|id| engine.has_ended(**id)).count()
    };
    while ended(&engine, &old) < old.len() {
        engine.step();
        assert_eq!(ended(&engine, &new), 0, "a newer one ends first");
    }
    engine.finish();
    assert!(engine.core.stats().scheduler.parked > 0, "nothing was pushed out");
    let pushed_out = |answer: &Answer| answer.finish.as_ref().expect("ended").figures.preemptions;
    let most = engine.answers.values().map(pushed_out).max();
    assert!(most <= Some(4), "{most:?} times");
}

/// 26: two requests that each take nearly all of the memory: one runs, one waits, both end.
#[test]
fn two_requests_of_nearly_all_memory_end_one_after_the_other() {
    let mut engine = Stepped::new(files(), swapping(memory(2, 24), memory(2, 24)));
    let capacity = engine.core.door().limits.max_model_len;
    let requests = [request(capacity - 140, 1, 100), request(capacity - 150, 2, 100)];
    let alone = solo(&requests);
    let ids = [&requests[0], &requests[1]].map(|request| engine.submit(request));
    engine.finish();
    for (id, alone) in ids.iter().zip(&alone) {
        assert_same(&engine.answers[&(id.0, 0)], alone, "one after the other");
    }
}

/// 28: what can never fit is refused with both limits, and holds up nobody.
#[test]
fn one_that_can_never_fit_is_refused_and_blocks_nobody() {
    let config = EngineConfig {
        device_memory: memory(4, 8),
        host_memory: MemorySize::Bytes(0),
        threads: 1,
        ..EngineConfig::default()
    };
    let engine = Engine::builder(files()).config(config).build().expect("an engine");
    let limit = engine.limits().max_model_len;
    let error = engine.submit(request(limit, 1, 1)).expect_err("one token too many").to_string();
    assert!(error.contains(&format!("--max-model-len is {limit}")), "{error}");
    assert!(error.contains("the device memory holds one sequence of"), "{error}");
    let small: Vec<_> =
        (0..10).map(|i| engine.submit(request(20, i, 5)).expect("it fits")).collect();
    for handle in small {
        assert_eq!(handle.into_iter().filter(|event| event.token.is_some()).count(), 5);
    }
}

/// 29: limits that cannot work are told before any weight is read: here there is none.
#[test]
fn limits_are_checked_before_weights_are_loaded() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let config = folder("kimi_linear_tiny").join("config.json");
    std::fs::copy(config, dir.path().join("config.json")).expect("a copy");
    let build = |config| {
        let files = ModelFiles::open(dir.path()).expect("a config suffices");
        Engine::builder(files).config(config).build().expect_err("there are no weights")
    };
    let few = EngineConfig { device_memory: MemorySize::Bytes(5_000), ..EngineConfig::default() };
    assert!(matches!(build(few), EngineError::Layout { .. }));
    let many = EngineConfig { max_num_seqs: Some(4_096), ..EngineConfig::default() };
    assert!(matches!(build(many), EngineError::Limit(_)));
    assert!(matches!(build(EngineConfig::default()), EngineError::Model(_)));
}

/// 30, 31: at every concurrency the slots held are the sequences that run, none is kept for
/// padding, and every slot can be used.
#[test]
fn as_many_slots_are_held_as_sequences_run_and_all_of_them_can_be() {
    // The cache takes what nobody else needs: without it all that is held is what runs.
    let setting = swapping(memory(6, 12), MemorySize::Bytes(0));
    let setting = setting.with(|config| config.prefix_cache = false);
    for count in 1..=6 {
        let mut engine = Stepped::new(files(), setting);
        (0..count).for_each(|i| {
            engine.submit(&request(50, i, 10));
        });
        let mut most = 0;
        while !engine.core.is_idle() {
            engine.step();
            let running = engine.core.scheduler().occupancy().running;
            let slots = engine.core.scheduler().device().stats().slots;
            assert_eq!((slots.held, slots.handles), (running, running));
            most = most.max(engine.core.stats().most_running);
        }
        assert_eq!(most as u64, count);
        assert_eq!(engine.core.stats().scheduler.second_slots, 0);
    }
}

/// A fork's first step is the only one that holds a second slot.
#[test]
fn a_second_slot_is_held_in_the_first_step_after_a_fork_alone() {
    let mut engine = Stepped::new(files(), Setting::roomy());
    engine.submit(&Request { n: 4, ..request(100, 1, 10) });
    engine.finish();
    // All four read the shared slot in one step, so each writes a fresh one.
    assert_eq!(engine.core.stats().scheduler.second_slots, 4);
}

/// 32: a short request waits for the prompts that came before it, not for those that come after.
#[test]
fn a_short_request_is_not_starved_by_long_prompts_that_keep_coming() {
    let setting = Setting::roomy().with(|config| config.max_num_batched_tokens = 64);
    let mut engine = Stepped::new(files(), setting);
    let mut seed = 0;
    let mut long = |engine: &mut Stepped| {
        seed += 1;
        engine.submit(&request(1_280, seed, 1));
    };
    (0..2).for_each(|_| long(&mut engine));
    let short = engine.submit(&request(10, 99, 1));
    let mut steps = 0;
    while !engine.has_ended(short) {
        if steps % 10 == 0 {
            long(&mut engine);
        }
        engine.step();
        steps += 1;
        assert!(steps <= 2 * 20 + 2, "two prompts of twenty cells come first");
    }
}

/// 33: small ones may pass a large one that does not fit, but not for ever.
#[test]
fn a_large_request_that_does_not_fit_is_passed_by_a_bounded_number() {
    let mut engine = Stepped::new(files(), swapping(memory(8, 40), memory(8, 40)));
    let blocks = engine.core.scheduler().device().layout().max_tokens() / BLOCK_LEN;
    // One that holds most of the memory, a large one that has to wait for it, and small ones
    // without end.
    engine.submit(&request((blocks - 8) * BLOCK_LEN, 1, 300));
    engine.step();
    let large = engine.submit(&request((blocks - 12) * BLOCK_LEN, 2, 2));
    let (mut seed, mut passed_by, mut small) = (10, 0, BTreeSet::new());
    while engine.generated(large) == 0 {
        seed += 1;
        small.insert(engine.submit(&request(5, seed, 3)).0);
        engine.step();
        passed_by = small.iter().filter(|id| engine.has_ended(RequestId(**id))).count();
        assert!(passed_by <= 40, "the large one starves");
    }
    assert!(passed_by > 0, "the small ones do not have to wait");
    engine.finish();
}

/// 34: whichever limit is reached, places or memory, a lower number goes first.
#[test]
fn a_lower_number_pushes_out_a_higher_one_whatever_the_limit_is() {
    for (what, places, device) in [("places", 1, memory(8, 40)), ("memory", 8, memory(1, 6))] {
        let setting = swapping(device, memory(4, 40)).with(|config| {
            config.policy = Policy::Priority;
            config.max_num_seqs = Some(places);
        });
        let mut engine = Stepped::new(files(), setting);
        let low = Request { priority: Some(5), ..request(200, 1, 150) };
        let high = Request { priority: Some(0), ..request(300, 2, 20) };
        let alone = solo(&[low.clone(), high.clone()].map(|r| Request { priority: None, ..r }));
        let low = engine.submit(&low);
        (0..20).for_each(|_| engine.step());
        let high = engine.submit(&high);
        while !engine.has_ended(high) {
            engine.step();
            assert!(!engine.has_ended(low), "{what}: the higher number ended first");
        }
        engine.finish();
        for (id, alone) in [low, high].iter().zip(&alone) {
            assert_same(&engine.answers[&(id.0, 0)], alone, what);
        }
        assert!(engine.core.stats().scheduler.parked > 0, "{what}: nobody was pushed out");
    }
}

/// 46, K7: equal prompts give one answer, and each of several different ones what it gives alone,
/// though one ends in every step (48).
#[test]
fn sequences_of_one_batch_do_not_mix() {
    let mut engine = Stepped::new(files(), Setting::roomy());
    let equal: Vec<RequestId> = (0..8).map(|_| engine.submit(&request(70, 5, 12))).collect();
    let different: Vec<Request> = (0..9).map(|i| request(30 + i, i as u64, 1 + i)).collect();
    let alone = solo(&different);
    let ids: Vec<RequestId> = different.iter().map(|request| engine.submit(request)).collect();
    engine.finish();
    for id in &equal {
        let (first, other) = (&engine.answers[&(equal[0].0, 0)], &engine.answers[&(id.0, 0)]);
        assert_same(other, first, "equal prompts");
    }
    for (id, alone) in ids.iter().zip(&alone) {
        assert_same(&engine.answers[&(id.0, 0)], alone, "different prompts");
    }
}

/// 49: the same request twenty times in a row, and then among others.
#[test]
fn a_repeated_request_has_one_answer_with_and_without_load() {
    let repeated = request(90, 3, 20);
    let mut engine = Stepped::new(files(), Setting::roomy());
    let mut answers = Vec::new();
    for _ in 0..20 {
        let id = engine.submit(&repeated);
        engine.finish();
        answers.push(engine.answers[&(id.0, 0)].clone());
    }
    (0..15).for_each(|i| {
        engine.submit(&request(10 * i + 1, 50 + i as u64, 30));
    });
    (0..5).for_each(|_| engine.step());
    let id = engine.submit(&repeated);
    engine.finish();
    answers.push(engine.answers[&(id.0, 0)].clone());
    answers.iter().for_each(|answer| assert_same(answer, &answers[0], "repeated"));
}

/// 50, K5: prompts shorter than the convolution's window, and none.
#[test]
fn the_shortest_prompts_work_and_an_empty_one_is_refused() {
    let requests: Vec<Request> = (1..=4).map(|len| request(len, len as u64, 70)).collect();
    let alone = solo(&requests);
    let mut engine = Stepped::new(files(), swapping(memory(2, 4), memory(4, 8)));
    let ids: Vec<RequestId> = requests.iter().map(|request| engine.submit(request)).collect();
    engine.finish();
    for (id, alone) in ids.iter().zip(&alone) {
        assert_same(&engine.answers[&(id.0, 0)], alone, "short prompts");
    }
    let error = engine.core.door().check(&request(0, 1, 1)).expect_err("nothing to go on from");
    assert_eq!(error.to_string(), "prompt is empty, allowed: at least one token");
}

/// 52: a budget below a cell of the grid is refused; any other is right.
#[test]
fn every_budget_is_right_or_refused() {
    let long = request(200, 8, 10);
    let alone = solo(std::slice::from_ref(&long));
    for budget in [1, 2, 3, 7, 16, 63, 64, 65, 127] {
        let config = EngineConfig { max_num_batched_tokens: budget, ..Setting::roomy().config };
        if budget < 64 {
            let error = Engine::builder(files()).config(config).build().expect_err("too small");
            assert!(error.to_string().starts_with("--max-num-batched-tokens"), "{error}");
            continue;
        }
        let mut engine = Stepped::new(files(), Setting { config, ..Setting::roomy() });
        let id = engine.submit(&long);
        engine.finish();
        assert_same(&engine.answers[&(id.0, 0)], &alone[0], &format!("budget {budget}"));
    }
}

/// K7: a state of broken numbers ends its own request, with the token's position; the others go on
/// as if alone.
#[test]
fn a_state_that_is_not_a_number_fails_its_own_request_alone() {
    let requests: Vec<Request> = (0..4).map(|i| request(40 + i, i as u64, 30)).collect();
    let alone = solo(&requests);
    let mut engine = Stepped::new(files(), Setting::roomy());
    requests.iter().for_each(|request| {
        engine.submit(request);
    });
    (0..10).for_each(|_| engine.step());
    let scheduler = engine.core.scheduler();
    let state = scheduler.sequence(SequenceId(2)).and_then(|s| s.state()).expect("it runs");
    let layout = scheduler.device().layout();
    let (at, values) = (layout.slot_offset(state.slot().id()), layout.slot_bytes / 4);
    engine.core.executor_mut().inner.memory_mut().0.f32s_mut(at, values).fill(f32::NAN);
    engine.finish();
    for (i, alone) in alone.iter().enumerate() {
        let answer = &engine.answers[&(i as u64, 0)];
        let reason = &answer.finish.as_ref().expect("ended").reason;
        if i == 2 {
            let FinishReason::Failed(reason) = reason else { panic!("{reason:?}") };
            let position = 42 + answer.ids.len();
            let expected = format!("token {position}: the logit of token 0 is not a number");
            assert_eq!((answer.ids.len(), reason), (10, &expected));
        } else {
            assert_same(answer, alone, "a neighbour");
        }
    }
}

/// K4: a choice that waits for a slot of its own finds the shared state as the prompt left it, while
/// the others go on.
#[test]
fn a_shared_state_is_not_written_while_somebody_reads_it() {
    let three = Request { n: 3, ..request(100, 6, 20) };
    let mut engine = Stepped::new(files(), swapping(memory(2, 6), memory(4, 12)));
    engine.submit(&three);
    engine.step();
    let waits = SequenceId(1);
    let slot = |engine: &Stepped| {
        let sequence = engine.core.scheduler().sequence(waits).expect("it is known");
        sequence.state().map(|state| state.slot().id())
    };
    let (shared, before) = (slot(&engine), bytes_of(&mut engine, waits));
    engine.step();
    assert_eq!(slot(&engine), shared, "there was a free slot after all");
    assert!(before == bytes_of(&mut engine, waits), "the shared bytes changed");
    engine.finish();
    assert!(engine.core.stats().scheduler.forks_without_slot > 0);
    let mut one_by_one = vec![three.clone(); 3];
    for (i, request) in one_by_one.iter_mut().enumerate() {
        (request.n, request.sampling.seed) = (1, Some(6 + i as u64));
    }
    for (choice, alone) in solo(&one_by_one).iter().enumerate() {
        assert_same(&engine.answers[&(0, choice)], alone, "a choice");
    }
}

/// K11: what comes back from the host is every byte of what left: slot, windows, hidden row, rows.
#[test]
fn a_round_trip_keeps_every_byte() {
    let mut engine = Stepped::new(files(), Setting::roomy());
    let id = engine.submit(&request(150, 4, 40));
    (0..10).for_each(|_| engine.step());
    // The step that parks computes nothing of it, nor does the one that brings it back.
    let before = bytes_of(&mut engine, SequenceId(0));
    engine.core.park(id);
    engine.step();
    assert_eq!(engine.core.scheduler().occupancy().parked, 1);
    engine.submit(&request(200, 5, 1));
    engine.step();
    assert_eq!(engine.core.scheduler().stats().returned, 1);
    let after = bytes_of(&mut engine, SequenceId(0));
    assert!(before == after, "bytes differ");
    engine.finish();
}

/// The bytes of a sequence's slot and of its blocks' computed rows, as bits.
fn bytes_of(engine: &mut Stepped, id: SequenceId) -> Vec<u32> {
    let scheduler = engine.core.scheduler();
    let sequence = scheduler.sequence(id).expect("it is known");
    let Place::Device(state) = sequence.place() else { panic!("it runs") };
    let layout = scheduler.device().layout().clone();
    let slot = (layout.slot_offset(state.slot().id()), layout.slot_bytes);
    let used = state.len().div_ceil(BLOCK_LEN);
    let blocks = state.table().ids().take(used);
    let places: Vec<_> = std::iter::once(slot)
        .chain(blocks.map(|id| (layout.block_offset(id), layout.block_bytes)))
        .collect();
    let arena = engine.core.executor_mut().inner.memory_mut().0;
    let bits = |(at, bytes): (usize, usize)| {
        arena.f32s(at, bytes / 4).iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
    };
    places.into_iter().flat_map(bits).collect()
}

/// Selective batching: a step computes one product per linear layer over all of its tokens, however
/// many sequences they are of.
#[test]
fn a_step_makes_one_product_per_linear_layer() {
    let dir = folder("llama_tiny");
    let llama = || ModelFiles::open(&dir).expect("a golden opens");
    // Query, key, value, output, gate, up, down; and the head.
    let expected = 7 * llama().spec.layers.len() as u64 + 1;
    let mut engine = Stepped::new(llama(), Setting::roomy());
    for (sequences, lens) in [(1, 10..11), (5, 3..40), (12, 30..100)] {
        (0..sequences).for_each(|i| {
            let len = lens.start + i % lens.len();
            let prompt = (0..len as u32).map(|t| t % 500).collect();
            engine.submit(&Request { ignore_eos: true, ..Request::new(prompt, 3 + i) });
        });
        while !engine.core.is_idle() {
            let before = engine.core.executor_mut().inner.cpu().products();
            engine.step();
            let after = engine.core.executor_mut().inner.cpu().products();
            assert_eq!(after - before, expected, "{sequences} sequences");
        }
    }
    assert!(engine.core.stats().most_running >= 12);
}

//! Faults of prefix reuse that users of other engines reported, each by its recipe.
//!
//! The numbers are those of the project's fault log: wrong output after a hit (1 to 12) here,
//! caches that are useless or wasteful (36 to 41) in `waste`, chats in `chats`. K2, K3, K8 and K10
//! are its kinds of wrong state. What needs drafts (1 and 21 to 23 in part), captured graphs (11)
//! or a store (6, 41 in part) has no counterpart here. Every other exact state that is taken from
//! the cache is derived again and compared: a difference fails the test.

mod support;

#[path = "reuse_faults/chats.rs"]
mod chats;
#[path = "reuse_faults/waste.rs"]
mod waste;

use std::path::Path;
use std::sync::Arc;

use deltapool::config::{EngineConfig, MemorySize, Preempt};
use deltapool::engine::{Engine, RequestId};
use deltapool::models::layout::LayerLayout;
use deltapool::models::{Model, ModelFiles};
use deltapool::request::{Figures, FinishReason, Request, SamplingParams};
use deltapool::scheduler::SequenceId;
use deltapool::text::{TextFiles, Tokenizer};
use kernels::KvDtype;
use support::Random;
use support::stepped::{Answer, Setting, Stepped};

const MODELS: [&str; 3] = ["kimi_linear_tiny", "llama_tiny", "qwen3_tiny"];

fn folder(model: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(model)
}

/// With rows of tokens in f32: of half the bytes a page would hold twice the blocks, and memories
/// as small as these tests want could not be had.
fn files(model: &str) -> ModelFiles {
    let mut files = ModelFiles::open(&folder(model)).expect("a golden opens");
    files.spec.kv_dtype = KvDtype::F32;
    files
}

fn kimi(change: impl FnOnce(&mut EngineConfig)) -> Stepped {
    Stepped::new(files(MODELS[0]), Setting::roomy().with(change))
}

/// Tokens of no meaning.
fn tokens(len: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(500) as u32).collect()
}

/// A greedy request with the bits of its logprobs.
fn greedy(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        ignore_eos: true,
        sampling: SamplingParams {
            temperature: 0.0,
            logprobs: Some(0),
            ..SamplingParams::default()
        },
        ..Request::new(prompt.to_vec(), max_tokens)
    }
}

/// Steps until nothing is left to do; what is kept stays.
fn drain(engine: &mut Stepped) {
    while !engine.core.is_idle() {
        engine.step();
    }
}

fn run(engine: &mut Stepped, request: &Request) -> Answer {
    let id = engine.submit(request);
    drain(engine);
    engine.answers[&(id.0, 0)].clone()
}

/// What a request answers on a fresh engine that keeps nothing.
fn solo(model: &str, request: &Request) -> Answer {
    let setting = Setting::roomy().with(|config| {
        config.prefix_cache = false;
        (config.device_memory, config.host_memory) =
            (MemorySize::Bytes(4 << 20), MemorySize::Bytes(0));
    });
    run(&mut Stepped::new(files(model), setting), request)
}

fn figures(answer: &Answer) -> Figures {
    answer.finish.as_ref().expect("it ended").figures
}

fn assert_same(got: &Answer, alone: &Answer, what: &str) {
    assert_eq!((&got.ids, &got.logprobs), (&alone.ids, &alone.logprobs), "{what}");
}

/// Memory for so many slots and blocks, each kind on its own pages.
fn memory(slots: usize, blocks: usize) -> MemorySize {
    let model = Model::layout_of(&files(MODELS[0]).spec);
    let page = kimi(|_| {}).core.scheduler().device().layout().page_bytes;
    let slot_pages = slots.div_ceil(page / model.slot_bytes);
    let block_pages = blocks.div_ceil(page / model.block_bytes);
    MemorySize::Bytes((slot_pages + block_pages) * page)
}

/// 1, without drafts: a chat of twelve turns with the cache on; each turn answers as alone.
#[test]
fn each_of_twelve_turns_answers_as_alone_where_only_exact_states_are_used() {
    let mut engine = kimi(|config| config.exact_prefix = true);
    let mut said = Vec::new();
    for turn in 0..12 {
        said.extend(tokens(5 + 7 * turn, 100 + turn as u64));
        let request = greedy(&said, 9);
        let answer = run(&mut engine, &request);
        assert_same(&answer, &solo(MODELS[0], &request), &format!("turn {turn}"));
        said.extend(&answer.ids);
    }
    assert!(engine.core.stats().scheduler.cached_tokens > 1_000);
    engine.finish();
}

/// 2, K3: more tokens of a prompt are known than any state stands behind. The sequence goes on from
/// where the state is, not from where the blocks end.
#[test]
fn a_match_longer_than_the_state_goes_on_from_the_state() {
    let mut engine = kimi(|_| {});
    let first = tokens(300, 1);
    run(&mut engine, &greedy(&first, 4));
    // Blocks of 256 tokens are there, but the only state behind fewer than 250 of them is none.
    let mut parts = first[..250].to_vec();
    parts.extend(tokens(30, 2));
    for (position, reason) in [(0, Some("never_taken")), (192, None)] {
        let request = greedy(&parts, 6);
        let answer = run(&mut engine, &request);
        assert_same(&answer, &solo(MODELS[0], &request), "parts in a block");
        let figures = figures(&answer);
        assert_eq!((figures.matched_tokens, figures.cached_tokens), (250, position));
        assert_eq!((figures.replayed_tokens, figures.miss_reason), (250 - position, reason));
        // The next one parts a token later, where the last has left a state at the junction.
        parts.truncate(250);
        parts.push(first[250] + 1);
        parts.extend(tokens(30, 3));
    }
    engine.finish();
}

/// 2: states that were evicted while their tokens are remembered are no reason to skip a token.
#[test]
fn a_prompt_whose_states_were_evicted_is_computed_from_the_start() {
    let mut engine = kimi(|config| {
        (config.device_memory, config.host_memory) = (memory(2, 12), MemorySize::Bytes(0));
        config.watermark_percent = 0.0;
    });
    let request = greedy(&tokens(200, 1), 6);
    let first = run(&mut engine, &request);
    for seed in 2..8 {
        run(&mut engine, &greedy(&tokens(600, seed), 2));
    }
    let again = run(&mut engine, &request);
    assert_same(&again, &first, "after eviction");
    assert_same(&again, &solo(MODELS[0], &request), "after eviction");
    let figures = figures(&again);
    assert_eq!((figures.cached_tokens, figures.miss_reason), (0, Some("evicted")));
    engine.finish();
}

/// 5: a second pass over the same questions gives what the first gave.
#[test]
fn a_second_pass_over_the_same_questions_has_the_same_answers() {
    for model in MODELS {
        let mut engine = Stepped::new(files(model), Setting::roomy());
        let questions: Vec<Request> =
            (0..6).map(|i| greedy(&tokens(60 + 17 * i, i as u64), 10)).collect();
        let first: Vec<Answer> = questions.iter().map(|q| run(&mut engine, q)).collect();
        for (question, first) in questions.iter().zip(&first) {
            let second = run(&mut engine, question);
            assert_same(&second, first, model);
            let whole = figures(&second).prompt_tokens / 64 * 64;
            assert!(figures(&second).cached_tokens >= whole.min(60), "{model}");
        }
        engine.finish();
    }
}

/// 7: a second turn that differs in the middle of the first one's prompt answers its own question.
#[test]
fn a_turn_that_differs_in_the_middle_answers_as_alone() {
    for model in MODELS {
        let setting = Setting::roomy().with(|config| config.checkpoint_every = Some(64));
        let mut engine = Stepped::new(files(model), setting);
        let mut prompt = tokens(320, 1);
        let first = run(&mut engine, &greedy(&prompt, 8));
        prompt.extend(&first.ids);
        for at in [10, 64, 127, 130, 191, 192, 250] {
            let mut edited = prompt.clone();
            edited[at] = (edited[at] + 1) % 500;
            let request = greedy(&edited, 8);
            let answer = run(&mut engine, &request);
            assert_same(&answer, &solo(model, &request), &format!("{model}: edited at {at}"));
            let cached = figures(&answer).cached_tokens;
            assert!((at / 64 * 64..=at).contains(&cached), "{model}: edited at {at}: {cached}");
        }
        engine.finish();
    }
}

/// 8: eight turns with edits over repeated digits. A state of generated tokens differs from a cold
/// run by rounding alone: the same tokens, and logprobs as near as chunks and steps are.
#[test]
fn turns_with_edits_differ_from_a_cold_run_by_rounding_alone() {
    let mut engine = kimi(|_| {});
    let mut said: Vec<u32> = (0..400).map(|i| [7, 7, 7, 8, 8, 9][i % 6]).collect();
    let mut kept = 0;
    for turn in 0..8 {
        said.extend([7, 7, 8, 8, 8, 9, 9].iter().map(|digit| digit + turn % 2));
        let len = said.len();
        said[len - 3] = 40 + turn;
        let request = greedy(&said, 12);
        let answer = run(&mut engine, &request);
        let cold = solo(MODELS[0], &request);
        assert_eq!(answer.ids, cold.ids, "turn {turn}");
        for (warm, cold) in answer.logprobs.iter().zip(&cold.logprobs) {
            let (warm, cold) = (f32::from_bits(*warm), f32::from_bits(*cold));
            assert!((warm - cold).abs() < 1e-4, "turn {turn}: {warm} for {cold}");
        }
        assert_eq!(figures(&answer).cached_tokens, kept, "turn {turn}");
        said.extend(&answer.ids);
        kept = said.len() - 1;
    }
    engine.finish();
}

/// 9: the same system text before two different questions, on each kind of model.
#[test]
fn a_second_question_after_the_same_system_text_answers_as_alone() {
    for model in MODELS {
        let mut engine = Stepped::new(files(model), Setting::roomy());
        let system = tokens(130, 9);
        for (i, seed) in [20, 21, 22].into_iter().enumerate() {
            let mut prompt = system.clone();
            prompt.extend(tokens(25, seed));
            let request = greedy(&prompt, 10);
            let answer = run(&mut engine, &request);
            assert_same(&answer, &solo(model, &request), model);
            assert!(i < 2 || figures(&answer).cached_tokens >= 128, "{model}: {i}");
        }
        engine.finish();
    }
}

/// Makes what a running sequence holds as its slot not-a-number.
fn break_state(engine: &mut Stepped, id: SequenceId) {
    let scheduler = engine.core.scheduler();
    let state = scheduler.sequence(id).and_then(|s| s.state()).expect("it runs");
    let layout = scheduler.device().layout();
    let (at, values) = (layout.slot_offset(state.slot().id()), layout.slot_bytes / 4);
    engine.core.executor_mut().inner.memory_mut().0.f32s_mut(at, values).fill(f32::NAN);
}

/// 12: a state of broken numbers fails its own request alone, and what that one left is not used
/// again.
#[test]
fn what_a_failed_request_left_is_not_used_again() {
    let requests: Vec<Request> = (0..4).map(|i| greedy(&tokens(140 + i, i as u64), 20)).collect();
    let mut engine = kimi(|config| config.audit_percent = 0.0);
    requests.iter().for_each(|request| {
        engine.submit(request);
    });
    (0..6).for_each(|_| engine.step());
    break_state(&mut engine, SequenceId(2));
    drain(&mut engine);
    for (i, request) in requests.iter().enumerate() {
        let (answer, alone) = (engine.answers[&(i as u64, 0)].clone(), solo(MODELS[0], request));
        if i == 2 {
            let reason = &answer.finish.as_ref().expect("it ended").reason;
            assert!(matches!(reason, FinishReason::Failed(_)), "{reason:?}");
        } else {
            assert_same(&answer, &alone, "a neighbour");
        }
        let again = run(&mut engine, request);
        assert_same(&again, &alone, "asked again");
        assert_eq!(figures(&again).cached_tokens, if i == 2 { 0 } else { 128 }, "{i}");
    }
    engine.finish();
}

/// 12: a kept state of broken numbers fails the one that goes on from it, once.
#[test]
fn a_kept_state_that_is_not_a_number_fails_one_request_and_is_gone() {
    let request = greedy(&tokens(150, 1), 5);
    let mut engine = kimi(|config| config.audit_percent = 0.0);
    let first = run(&mut engine, &request);
    // All slots that are held are the cache's.
    let pool = engine.core.scheduler().device();
    let layout = pool.layout();
    let slots: Vec<usize> = pool.held_slots().map(|id| layout.slot_offset(id)).collect();
    let values = layout.slot_bytes / 4;
    assert!(slots.len() >= 2);
    for at in slots {
        engine.core.executor_mut().inner.memory_mut().0.f32s_mut(at, values).fill(f32::NAN);
    }
    let fails = run(&mut engine, &request);
    let reason = &fails.finish.as_ref().expect("it ended").reason;
    assert!(matches!(reason, FinishReason::Failed(_)), "{reason:?}");
    let again = run(&mut engine, &request);
    assert_same(&again, &first, "asked again");
    assert_eq!(figures(&again).cached_tokens, 0);
    engine.finish();
}

/// A bit of a kept state flips: the audit names the layer, and neither that state nor what was
/// computed from it is used again.
#[test]
fn an_audit_names_the_layer_that_differs_and_what_it_found_is_not_used_again() {
    let (request, layout) = (greedy(&tokens(150, 1), 5), Model::layout_of(&files(MODELS[0]).spec));
    let first_attention =
        layout.layers.iter().position(|layer| matches!(layer, LayerLayout::Attention { .. }));
    let first_attention = first_attention.expect("a hybrid");
    for layer in [0, 1, first_attention, layout.layers.len()] {
        let mut engine = kimi(|config| config.audit_percent = 100.0);
        let first = run(&mut engine, &request);
        let pool = engine.core.scheduler().device();
        let (slots, blocks): (Vec<usize>, Vec<usize>) = (
            pool.held_slots().map(|id| pool.layout().slot_offset(id)).collect(),
            pool.held_blocks().map(|id| pool.layout().block_offset(id)).collect(),
        );
        let (units, at) = match layout.layers.get(layer) {
            Some(LayerLayout::Recurrent { state, .. }) => (slots, *state),
            Some(LayerLayout::Attention { rows }) => (blocks, rows.at),
            None => (slots, layout.hidden_row.expect("a hybrid")),
        };
        let arena = engine.core.executor_mut().inner.memory_mut().0;
        for unit in units {
            let value = &mut arena.f32s_mut(unit + at, 1)[0];
            *value = f32::from_bits(value.to_bits() ^ 1);
        }
        // Enough tokens for the shadow to catch up meanwhile.
        run(&mut engine, &greedy(&request.prompt, 40));
        let stats = engine.core.stats();
        assert_eq!(stats.scheduler.first_differing_layer, Some(layer));
        assert_eq!((stats.scheduler.audits_that_differ, stats.tree.nodes), (1, 0), "{layer}");
        let again = run(&mut engine, &request);
        assert_same(&again, &first, "asked again");
        assert_eq!(figures(&again).cached_tokens, 0);
    }
}

/// K2: a state stands behind as many tokens as its key says. Every grid position of a prompt is
/// gone on from, by prompts that end there, a token later and a cell later.
#[test]
fn every_kept_position_has_the_state_of_just_its_tokens() {
    let prompt = tokens(450, 1);
    let mut engine = kimi(|config| config.checkpoint_every = Some(64));
    run(&mut engine, &greedy(&prompt, 1));
    for cells in 1..=6 {
        for beyond in [0, 1, 63] {
            let mut part = prompt[..64 * cells + beyond].to_vec();
            *part.last_mut().expect("it has tokens") ^= u32::from(beyond > 0);
            let request = greedy(&part, 3);
            let answer = run(&mut engine, &request);
            let what = format!("{cells} cells and {beyond}");
            assert_same(&answer, &solo(MODELS[0], &request), &what);
            assert_eq!(figures(&answer).cached_tokens, 64 * cells, "{what}");
        }
    }
    engine.finish();
}

/// K8, 23: a stop token is no part of the state, and the next turn goes on right behind the answer.
#[test]
fn a_state_ends_before_the_token_that_stopped_it() {
    let prompt = tokens(90, 3);
    let free = solo(MODELS[0], &greedy(&prompt, 30));
    let at = (1..30).rev().find(|i| !free.ids[..*i].contains(&free.ids[*i])).expect("a new token");
    let mut engine = kimi(|_| {});
    let stopping = Request { stop_token_ids: vec![free.ids[at]], ..greedy(&prompt, 30) };
    let answer = run(&mut engine, &stopping);
    assert_eq!(answer.ids, free.ids[..=at]);
    // What stands in for the stop token in the next turn is another one.
    let mut next = prompt.clone();
    next.extend(&free.ids[..at]);
    next.extend([499, 7, 7]);
    let turn = run(&mut engine, &greedy(&next, 3));
    assert_eq!(figures(&turn).cached_tokens, 90 + at);
    // The same without a stop, and so with the stop token in nobody's state.
    let mut other = kimi(|_| {});
    run(&mut other, &greedy(&prompt, at + 1));
    assert_same(&run(&mut other, &greedy(&next, 3)), &turn, "a run that never drew it");
    engine.finish();
}

/// K8: text that ends inside a token leaves no turn end, and is counted; text that ends with one
/// does.
#[cfg(feature = "embedded-model")]
#[test]
fn a_stop_string_within_a_token_leaves_no_turn_end() {
    let text = TextFiles::embedded();
    let tokenizer = Arc::new(Tokenizer::from_files(&text).expect("a tokenizer"));
    let encode = |text: &str| {
        let plain = deltapool::text::Specials::Plain;
        tokenizer.encode_prompt(text, plain).expect("it encodes")
    };
    // The answer begins " there was a young girl named Clara".
    for (stop, ended, left_out) in
        [("irl", " there was a young g", 1), (" girl", " there was a young", 0)]
    {
        let files = ModelFiles::embedded().expect("the model is sound");
        let builder = Engine::builder(files).config(Setting::roomy().config);
        let builder = builder.tokenizer(Some(Arc::clone(&tokenizer)));
        let mut engine = Stepped::over(builder, Setting::roomy());
        let prompt = encode("Once upon a time");
        let request = Request { stop: vec![stop.to_owned()], ..greedy(&prompt, 20) };
        let answer = run(&mut engine, &request);
        assert_eq!(answer.text, ended);
        assert_eq!(engine.core.stats().scheduler.turn_ends_left_out, left_out, "{stop:?}");
        let mut next = prompt.clone();
        next.extend(&answer.ids);
        let cached = figures(&run(&mut engine, &greedy(&next, 2))).cached_tokens;
        let end = prompt.len() + answer.ids.len() - 1;
        assert_eq!(cached, if left_out == 1 { 0 } else { end }, "{stop:?}");
        engine.finish();
    }
}

/// K10: every state there is is read by somebody, or on its way to the host: work goes on.
#[test]
fn work_goes_on_though_every_checkpoint_is_held() {
    let prompt = tokens(128, 1);
    for (late, host) in
        [(false, MemorySize::Bytes(0)), (true, memory(2, 12)), (true, memory(9, 60))]
    {
        let mut setting = Setting::roomy().with(|config| {
            (config.device_memory, config.host_memory) = (memory(2, 12), host);
            config.preempt = Preempt::Swap;
            config.watermark_percent = 0.0;
        });
        setting.late = late;
        let mut engine = Stepped::new(files(MODELS[0]), setting);
        run(&mut engine, &greedy(&prompt, 1));
        let mut requests = Vec::new();
        for i in 0..8 {
            let mut prompt = prompt.clone();
            prompt.extend(tokens(i * 9, i as u64));
            requests.push(greedy(&prompt, 30));
        }
        let ids: Vec<RequestId> = requests.iter().map(|request| engine.submit(request)).collect();
        engine.finish();
        for (id, request) in ids.iter().zip(&requests) {
            let what = format!("host {host:?}, late {late}");
            assert_same(&engine.answers[&(id.0, 0)], &solo(MODELS[0], request), &what);
        }
    }
}

//! Prefix reuse: what a request finds in the cache changes no bit of its answer.
//!
//! The reference is an engine that keeps nothing. A state at a grid position of a prompt has the
//! bits of a cold run, so every hit on one must give the cold answer. The end of a turn has not:
//! its tokens were generated, and a cold run would compute them as a prompt. What goes on from
//! there is compared with the answer that was never interrupted.

use deltapool::config::{EngineConfig, MemorySize, Preempt};
use deltapool::request::{Figures, Request, SamplingParams};
use deltapool::scheduler::Wanted;

use super::requests::{Parks, Storm, alone, models, open, small, together};
use super::support::Random;
use super::support::rig::{self, Rig, Turn, argmax};
use super::support::seeds::seeds;
use super::support::stepped::{Answer, Setting, Stepped};
use super::{MODELS, files};

fn tokens(random: &mut Random, model: &str, len: usize) -> Vec<u32> {
    let vocab = open(model).spec.vocab_size;
    (0..len).map(|_| random.below(vocab) as u32).collect()
}

/// A greedy request with the bits of its logprobs.
fn greedy(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        ignore_eos: true,
        sampling: SamplingParams {
            temperature: 0.0,
            logprobs: Some(2),
            ..SamplingParams::default()
        },
        ..Request::new(prompt.to_vec(), max_tokens)
    }
}

fn engine(model: &str, change: impl FnOnce(&mut EngineConfig)) -> Stepped {
    let setting = Setting::roomy().with(|config| {
        (config.device_memory, config.host_memory) =
            (MemorySize::Bytes(12 << 20), MemorySize::Bytes(4 << 20));
    });
    Stepped::new(open(model), setting.with(change))
}

/// The answer of an engine that keeps nothing.
fn cold(model: &str, request: &Request) -> Answer {
    let keeps_nothing = |config: &mut EngineConfig| {
        config.prefix_cache = false;
        (config.device_memory, config.host_memory) =
            (MemorySize::Bytes(4 << 20), MemorySize::Bytes(0));
    };
    run(&mut engine(model, keeps_nothing), request)
}

/// Runs one request to its end; what it leaves stays in the cache.
fn run(engine: &mut Stepped, request: &Request) -> Answer {
    let id = engine.submit(request);
    while !engine.core.is_idle() {
        engine.step();
    }
    engine.answers[&(id.0, 0)].clone()
}

fn figures(answer: &Answer) -> Figures {
    answer.finish.as_ref().expect("it ended").figures
}

fn assert_same(got: &Answer, expected: &Answer, what: &str) {
    assert_eq!(got.ids, expected.ids, "{what}: tokens");
    assert_eq!(got.logprobs, expected.logprobs, "{what}: bits of logprobs");
}

/// Requests that part from one prompt at many places, on the grid and off it, and go on for a few
/// tokens or for many; some are equal.
fn family(model: &str, random: &mut Random) -> Vec<Request> {
    let trunk = tokens(random, model, 330);
    let ends = [(330, 0), (64, 1), (65, 3), (128, 0), (128, 64), (128, 63), (129, 2), (192, 70)];
    let more = [(200, 9), (256, 1), (256, 0), (300, 40), (320, 130), (330, 1), (128, 0), (64, 0)];
    let request = |(i, (common, new)): (usize, (usize, usize))| {
        let mut prompt = trunk[..common].to_vec();
        prompt.extend(tokens(random, model, new));
        let mut request = greedy(&prompt, 2 + i % 7);
        request.n = if i % 5 == 4 { 3 } else { 1 };
        request.sampling.temperature = if i % 2 == 0 { 0.0 } else { 0.9 };
        request.sampling.seed = Some(300 + i as u64);
        request.checkpoint_at = (0..i % 3).map(|_| 1 + random.below(prompt.len())).collect();
        request
    };
    ends.into_iter().chain(more).enumerate().map(request).collect()
}

#[test]
fn a_cache_that_is_cold_or_warm_changes_no_bit() {
    for model in models() {
        let requests = family(&model, &mut Random::new(21));
        let reference = alone(&model, &requests);
        let mut engine = engine(&model, |_| {});
        let (mut cached, mut passes) = (0, Vec::new());
        for pass in 0..2 {
            for (i, request) in requests.iter().enumerate() {
                let id = engine.submit(request);
                while !engine.core.is_idle() {
                    engine.step();
                }
                for choice in 0..request.n {
                    let answer = &engine.answers[&(id.0, choice)];
                    let what = format!("{model}, pass {pass}: request {i}, choice {choice}");
                    assert_same(answer, &reference[&(i as u64, choice)], &what);
                }
                cached += figures(&engine.answers[&(id.0, 0)]).cached_tokens;
            }
            passes.push(cached);
        }
        let stats = engine.core.stats().scheduler;
        assert_eq!(stats.cached_tokens as usize, cached, "{model}");
        assert!(passes[0] > 1_500 && passes[1] > 2 * passes[0], "{model}: {passes:?}");
        assert!(stats.audits > 3, "{model}: {stats:?}");
        engine.finish();
    }
}

#[test]
fn requests_that_share_prompts_have_the_bits_of_each_alone_whatever_happens() {
    for model in models() {
        let requests = family(&model, &mut Random::new(22));
        let reference = alone(&model, &requests);
        let check = |what: &str, setting, storm| {
            let engine = together(what, &model, &requests, &reference, setting, storm);
            let stats = engine.core.stats().scheduler;
            assert!(stats.cached_tokens > 500, "{what}, {model}: {stats:?}");
            engine
        };
        let (roomy, calm) = (Setting::roomy(), Storm::default());
        let scatter = Storm { scatter: true, ..calm };
        for budget in [64, 96] {
            let setting = roomy.with(|config| config.max_num_batched_tokens = budget);
            check(&format!("budget {budget}"), setting, scatter);
        }
        let engine = check("all at once", roomy, calm);
        assert!(engine.core.stats().scheduler.followed > 0, "{model}: nobody waited");
        check("three threads", roomy.with(|config| config.threads = 3), scatter);
        check("cancelled neighbours", roomy, Storm { cancel: true, ..scatter });
        let swap = roomy.with(|config| {
            config.device_memory = small(&model);
            config.preempt = Preempt::Swap;
        });
        let park = Storm { parks: Parks::Some, ..scatter };
        check("parked", swap, park);
        check("late and failing transfers", Setting { late: true, failing: 3, ..swap }, park);
    }
}

/// Everything at once, by chance: `DELTAPOOL_SEED` repeats one seed.
#[test]
fn random_storms_over_shared_prompts_change_no_bit() {
    let seeds = seeds(1);
    for model in models() {
        let requests = family(&model, &mut Random::new(23));
        let reference = alone(&model, &requests);
        for seed in seeds.clone() {
            let mut random = Random::new(177 + seed);
            let small = small(&model);
            let mut setting = Setting::roomy().with(|config| {
                config.max_num_batched_tokens = [64, 96, 200, 512][random.below(4)];
                config.max_num_seqs = Some([2, 5, 40][random.below(3)]);
                config.preempt =
                    [Preempt::Swap, Preempt::Auto, Preempt::Recompute][random.below(3)];
                config.watermark_percent = [0.0, 2.0, 20.0][random.below(3)];
                config.checkpoint_every = [None, Some(64)][random.below(2)];
                if random.below(4) > 0 {
                    config.device_memory = small;
                }
                config.host_memory =
                    [small, MemorySize::Bytes(0), config.host_memory][random.below(3)];
            });
            setting.late = random.below(2) == 0;
            setting.failing = [0, 0, 1, 2, 5][random.below(5)];
            setting.seed = seed + 1;
            let parks = [Parks::Never, Parks::Some][random.below(2)];
            let storm = Storm { parks, cancel: random.below(2) == 0, scatter: true };
            let what = format!("DELTAPOOL_SEED={seed}");
            together(&what, &model, &requests, &reference, setting, storm);
        }
    }
}

/// The prompt's end at 128 leaves 0, 1, 2, 3, 63 and 64 tokens to compute; a model without
/// recurrent layers always computes the last token.
#[test]
fn a_hit_may_leave_any_number_of_tokens_to_compute() {
    for model in models() {
        let prompt = tokens(&mut Random::new(31), &model, 192);
        let is_recurrent = open(&model).spec.grid() > 1;
        for left in [0, 1, 2, 3, 63, 64] {
            let mut engine = engine(&model, |_| {});
            run(&mut engine, &greedy(&prompt[..128], 1));
            for n in [1, 3] {
                let mut request = greedy(&prompt[..128 + left], 4);
                (request.n, request.sampling.temperature) = (n, 0.9);
                request.sampling.seed = Some(7);
                let what = format!("{model}: {left} tokens left, {n} answers");
                let id = engine.submit(&request);
                while !engine.core.is_idle() {
                    engine.step();
                }
                let reference = alone(&model, std::slice::from_ref(&request));
                for choice in 0..n {
                    let answer = &engine.answers[&(id.0, choice)];
                    assert_same(answer, &reference[&(0, choice)], &what);
                }
                let cached = figures(&engine.answers[&(id.0, 0)]).cached_tokens;
                if n == 1 {
                    let whole = if is_recurrent { 128 } else { 128.min(127 + left) };
                    assert_eq!(cached, whole, "{what}");
                }
            }
            let full_hits = engine.core.stats().scheduler.full_hits;
            assert_eq!(full_hits > 0, is_recurrent && left.is_multiple_of(64), "{model}: {left}");
            engine.finish();
        }
    }
}

/// A request for what was said but for the last token goes on with the bits that more `max_tokens`
/// would have given: its state was written by the answer itself, and the draw is of the hidden row
/// that it left.
#[test]
fn a_turn_goes_on_like_the_answer_that_was_not_interrupted() {
    for model in models() {
        if open(&model).spec.grid() == 1 {
            continue; // without recurrent layers the last token is computed again, as a prompt
        }
        for (len, turn) in [(40, 5), (64, 10), (100, 60), (128, 70), (63, 2)] {
            let prompt = tokens(&mut Random::new(41), &model, len);
            let whole = cold(&model, &greedy(&prompt, turn + 12));
            let mut said = prompt.clone();
            said.extend(&whole.ids[..turn - 1]);
            for threads in [1, 2] {
                let mut engine = engine(&model, |config| config.threads = threads);
                run(&mut engine, &greedy(&prompt, turn));
                let answer = run(&mut engine, &greedy(&said, 13));
                let what = format!("{model}: {len} tokens and {turn}, {threads} threads");
                assert_eq!(figures(&answer).cached_tokens, said.len(), "{what}");
                assert_eq!(answer.ids, whole.ids[turn - 1..], "{what}");
                assert_eq!(answer.logprobs, whole.logprobs[3 * (turn - 1)..], "{what}");
                engine.finish();
            }
        }
    }
}

/// The next turn as chats have it: the prompt, all of the answer and more. What the state of the
/// turn's end gives is what a sequence gives that computes the new tokens on the state it has; with
/// `exact_prefix` the turn's end is let be, and the answer is the cold one.
#[test]
fn a_next_turn_continues_the_state_of_the_last_or_with_exact_prefix_the_prompt() {
    for model in MODELS {
        let mut random = Random::new(42);
        for (len, turn, more) in [(70, 9, 30), (128, 40, 1), (150, 50, 150), (5, 3, 64)] {
            let prompt = tokens(&mut random, model, len);
            let mut engine = engine(model, |_| {});
            let first = run(&mut engine, &greedy(&prompt, turn));
            let mut next = prompt.clone();
            next.extend(&first.ids);
            next.extend(tokens(&mut random, model, more));
            let request = greedy(&next, 8);
            let what = format!("{model}: {len} + {turn} + {more}");
            let answer = run(&mut engine, &request);
            assert_eq!(figures(&answer).cached_tokens, len + turn - 1, "{what}");
            assert_eq!(answer.ids, uninterrupted(model, &prompt, &first.ids, &next, 8), "{what}");
            engine.finish();
            let cold = cold(model, &request);
            let mut exact = self::engine(model, |config| config.exact_prefix = true);
            run(&mut exact, &greedy(&prompt, turn));
            let answer = run(&mut exact, &request);
            assert_same(&answer, &cold, &what);
            let figures = figures(&answer);
            assert_eq!(figures.cached_tokens, len / 64 * 64, "{what}");
            assert_eq!(figures.miss_reason, Some("not_exact"), "{what}");
            exact.finish();
        }
    }
}

/// Greedy tokens of one sequence that has computed a prompt and its answer, and goes on with the
/// tokens of `next` without having been away.
fn uninterrupted(
    model: &str,
    prompt: &[u32],
    answer: &[u32],
    next: &[u32],
    count: usize,
) -> Vec<u32> {
    let mut rig = Rig::new(&files(model), rig::Setting::default());
    let first = rig.add(prompt);
    rig.prefill(first, 512);
    for token in &answer[..answer.len() - 1] {
        rig.sequences[first].push(*token);
        rig.step(&[Turn::new(first, 1, Wanted::Last)]);
    }
    let state = rig.sequences[first].state().expect("it runs").fork(&mut rig.pool);
    let second = rig.add_with(next, state);
    let mut logits = rig.prefill(second, 512);
    let mut ids = Vec::new();
    for _ in 0..count {
        ids.push(argmax(&logits));
        rig.sequences[second].push(argmax(&logits));
        logits = rig.step(&[Turn::new(second, 1, Wanted::Last)]);
    }
    rig.finish();
    ids
}

/// A mark anywhere is kept at the grid position below it, and changes nothing else.
#[test]
fn marks_anywhere_change_no_bit_and_can_be_gone_on_from() {
    let mut random = Random::new(51);
    for model in models() {
        let prompt = tokens(&mut random, &model, 300);
        let plain = cold(&model, &greedy(&prompt, 6));
        let is_recurrent = open(&model).spec.grid() > 1;
        for mark in [1, 63, 64, 65, 127, 128, 200, 256, 299, 300] {
            let mut engine = engine(&model, |config| config.max_num_batched_tokens = 96);
            let checkpoint_at = vec![mark, 1 + random.below(300)];
            let marked = Request { checkpoint_at, ..greedy(&prompt, 6) };
            assert_same(&run(&mut engine, &marked), &plain, &format!("{model}: mark {mark}"));
            // A prompt that parts from it right behind the mark.
            let mut other = prompt[..mark].to_vec();
            other.extend(tokens(&mut random, &model, 20));
            let other = greedy(&other, 6);
            let answer = run(&mut engine, &other);
            assert_same(&answer, &cold(&model, &other), &format!("{model}: behind {mark}"));
            let cached = figures(&answer).cached_tokens;
            let least = if is_recurrent { mark / 64 * 64 } else { mark.min(256) };
            assert!(cached >= least, "{model}: {cached} of {mark}");
            engine.finish();
        }
    }
}

#[test]
fn different_salts_share_nothing_and_have_the_same_bits() {
    for model in models() {
        let prompt = tokens(&mut Random::new(61), &model, 200);
        let reference = cold(&model, &greedy(&prompt, 5));
        let mut engine = engine(&model, |_| {});
        let salts = [None, Some("a"), Some("b"), Some("ab")];
        for round in 0..2 {
            for salt in salts {
                let cache_salt = salt.map(str::to_owned);
                let answer = run(&mut engine, &Request { cache_salt, ..greedy(&prompt, 5) });
                let what = format!("{model}, salt {salt:?}, round {round}");
                assert_same(&answer, &reference, &what);
                let figures = figures(&answer);
                let known = figures.matched_tokens.min(figures.cached_tokens);
                assert_eq!(known >= 192, round == 1, "{what}");
                assert!(round == 1 || figures.matched_tokens == 0, "{what}");
            }
        }
        // Beside each other, too: nobody follows one of another salt.
        let ids = [Some("x"), Some("y"), None].map(|salt: Option<&str>| {
            let cache_salt = salt.map(str::to_owned);
            engine.submit(&Request { cache_salt, ..greedy(&prompt[..195], 5) })
        });
        while !engine.core.is_idle() {
            engine.step();
        }
        let cached = ids.map(|id| figures(&engine.answers[&(id.0, 0)]).cached_tokens);
        assert!(cached[..2] == [0, 0] && cached[2] >= 192, "{model}: {cached:?}");
        engine.finish();
    }
}

/// A prompt that is cancelled on the way leaves what it has computed.
#[test]
fn a_prompt_that_was_cancelled_leaves_its_state_to_the_next() {
    for model in models() {
        let prompt = tokens(&mut Random::new(71), &model, 400);
        let request = greedy(&prompt, 5);
        let reference = cold(&model, &request);
        for steps in 1..=5 {
            let mut engine = engine(&model, |config| config.max_num_batched_tokens = 64);
            let first = engine.submit(&request);
            (0..steps).for_each(|_| engine.step());
            engine.core.cancel(first);
            let answer = run(&mut engine, &request);
            assert_same(&answer, &reference, &format!("{model}: {steps} steps"));
            assert_eq!(figures(&answer).cached_tokens, 64 * steps, "{model}");
            engine.finish();
        }
    }
}

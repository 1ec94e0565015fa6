//! Caches that are there and do not help, or cost more than they give.

use deltapool::config::{CheckpointDtype, MemorySize};
use deltapool::engine::RequestId;
use deltapool::request::Request;

use super::support::seeds::seeds;
use super::support::stepped::Setting;
use super::{
    Answer, MODELS, Stepped, drain, figures, files, greedy, kimi, memory, run, solo, tokens,
};

/// A shared part and one's own, by number.
fn split(shared: usize, own: usize, i: u64) -> Request {
    let mut prompt = tokens(shared, 1);
    prompt.extend(tokens(own, 100 + i));
    greedy(&prompt, 2)
}

/// 36: moving a hundred tokens between the shared and the own part changes nothing. From the third
/// request on all of the shared part is there but what lies above the grid.
#[test]
fn a_shared_part_is_found_from_the_third_request_on_wherever_it_ends() {
    let count = 3 + seeds(1).end - seeds(1).start;
    for (shared, own) in [(1_500, 700), (1_600, 600), (1_536, 64), (1_535, 65), (700, 1_500)] {
        let mut engine = kimi(|config| config.audit_percent = 0.0);
        for i in 0..count {
            let answer = run(&mut engine, &split(shared, own, i));
            let (figures, what) = (figures(&answer), format!("{shared} + {own}, request {i}"));
            if i > 1 {
                assert!(figures.cached_tokens > shared - 64, "{what}: {figures:?}");
            } else if i > 0 {
                assert_eq!(figures.matched_tokens, shared, "{what}");
                assert!(figures.cached_tokens > 0 || figures.miss_reason.is_some(), "{what}");
            }
        }
        engine.finish();
    }
}

/// 36, as a burst: those that wait say where prompts part, so that the second finds it.
#[test]
fn a_burst_computes_its_shared_part_once() {
    let mut engine = kimi(|config| {
        (config.max_num_batched_tokens, config.audit_percent) = (8_192, 0.0);
    });
    let requests: Vec<Request> = (0..6).map(|i| split(1_500, 100, i)).collect();
    let ids: Vec<RequestId> = requests.iter().map(|request| engine.submit(request)).collect();
    drain(&mut engine);
    for (id, request) in ids.iter().zip(&requests).skip(1) {
        let answer = &engine.answers[&(id.0, 0)];
        assert_eq!(figures(answer).cached_tokens, 1_472);
        assert_eq!(answer.ids, solo(MODELS[0], request).ids);
    }
    let computed = engine.core.stats().scheduler.prompt_tokens;
    assert_eq!(computed, 1_600 + 5 * 128);
    engine.finish();
}

/// 37: a system prompt of a hundred tokens is found, though it is shorter than any block of others.
#[test]
fn a_short_system_prompt_is_found() {
    for model in MODELS {
        let mut engine = Stepped::new(files(model), Setting::roomy());
        for i in 0..4 {
            let cached = figures(&run(&mut engine, &split(100, 40, i))).cached_tokens;
            assert!(i < 2 || cached >= 64, "{model}, request {i}: {cached}");
        }
        engine.finish();
    }
}

/// 38: one prompt three times in a row, then four times at once.
#[test]
fn an_identical_prompt_is_found_each_time_and_by_all_of_a_burst() {
    for len in [64, 100, 200, 256] {
        for model in MODELS {
            let mut engine = Stepped::new(files(model), Setting::roomy());
            let request = greedy(&tokens(len, 3), 4);
            for round in 0..3 {
                let cached = figures(&run(&mut engine, &request)).cached_tokens;
                assert!(round == 0 || cached >= len - 64, "{model}: {cached} of {len}");
            }
            let ids = [(); 4].map(|()| engine.submit(&request));
            drain(&mut engine);
            for id in ids {
                let cached = figures(&engine.answers[&(id.0, 0)]).cached_tokens;
                assert!(cached >= len - 64, "{model}, at once: {cached} of {len}");
            }
            // Without anything kept before, one computes it and three follow.
            let other = greedy(&tokens(len, 4), 4);
            let ids = [(); 4].map(|()| engine.submit(&other));
            drain(&mut engine);
            let cold = |id: &&RequestId| {
                figures(&engine.answers[&(id.0, 0)]).cached_tokens < len - 64.min(len - 1)
            };
            assert!(ids.iter().filter(cold).count() <= 1, "{model}, a burst of {len}");
            engine.finish();
        }
    }
}

/// 39: ten turns that only append, the first of them very short: each computes what is new.
#[test]
fn turns_that_append_compute_what_is_new() {
    for model in MODELS {
        for first in [1, 3, 64, 150] {
            let mut engine = Stepped::new(files(model), Setting::roomy());
            let (mut said, mut kept) = (tokens(first, 1), 0);
            for turn in 0..10 {
                let answer = run(&mut engine, &greedy(&said, 11));
                let cached = figures(&answer).cached_tokens;
                assert_eq!(cached, kept, "{model}: turn {turn} after {first}");
                said.extend(&answer.ids);
                kept = said.len() - 1;
                said.extend(tokens(20, 50 + turn));
            }
            engine.finish();
        }
    }
}

/// 40: thirty turns of three chats in a device that holds about two: no turn misses, the fourth and
/// fifth no more than the others.
#[test]
fn no_turn_of_three_chats_under_pressure_misses_what_was_kept() {
    let mut engine = kimi(|config| {
        (config.device_memory, config.host_memory) = (memory(3, 24), memory(12, 96));
        config.watermark_percent = 0.0;
    });
    let mut chats: Vec<(Vec<u32>, usize)> = (0..3).map(|i| (tokens(40, i), 0)).collect();
    let mut evicted = 0;
    for turn in 0..30 {
        for (i, (said, kept)) in chats.iter_mut().enumerate() {
            let answer = run(&mut engine, &greedy(said, 8));
            let figures = figures(&answer);
            let missed = kept.saturating_sub(figures.cached_tokens);
            assert!(missed <= 63, "turn {turn} of chat {i}: {figures:?}");
            said.extend(&answer.ids);
            *kept = said.len() - 1;
            said.extend(tokens(6, 500 + 31 * turn + i as u64));
        }
        evicted = engine.core.scheduler().tree_stats().expect("a tree").device.evicted;
    }
    assert!(evicted > 30, "{evicted}: there was no pressure");
    engine.finish();
}

/// 41, of the host: the same prompt twenty times is copied there no more than once.
#[test]
fn what_the_host_has_is_not_copied_again() {
    let mut engine = kimi(|config| {
        (config.device_memory, config.host_memory) = (memory(3, 12), memory(12, 96));
        config.watermark_percent = 0.0;
    });
    let request = greedy(&tokens(300, 1), 4);
    let other = |i: u64| greedy(&tokens(500, 70 + i % 2), 4);
    let mut after_two = 0;
    for i in 0..20_u64 {
        let cached = figures(&run(&mut engine, &request)).cached_tokens;
        assert_eq!(cached, if i == 0 { 0 } else { 256 }, "{i}");
        run(&mut engine, &other(i));
        if i == 2 {
            after_two = engine.core.stats().scheduler.demoted_bytes;
        }
    }
    let stats = engine.core.stats().scheduler;
    let tree = engine.core.scheduler().tree_stats().expect("a tree");
    assert!(after_two > 0 && stats.demoted_bytes == after_two, "{stats:?} {tree:?}");
    assert!(tree.promoted > 5, "{tree:?}");
    engine.finish();
}

/// Slots are short while blocks are not: snapshots are left out and counted, and nothing else
/// changes.
#[test]
fn snapshots_without_a_slot_are_left_out_and_counted() {
    let requests: Vec<Request> = (0..6).map(|i| split(300, 200, i)).collect();
    let mut engine = kimi(|config| {
        (config.device_memory, config.host_memory) = (memory(2, 60), MemorySize::Bytes(0));
        config.watermark_percent = 0.0;
        config.checkpoint_every = Some(64);
    });
    let ids: Vec<RequestId> = requests.iter().map(|request| engine.submit(request)).collect();
    drain(&mut engine);
    for (id, request) in ids.iter().zip(&requests) {
        let (answer, alone) = (&engine.answers[&(id.0, 0)], solo(MODELS[0], request));
        assert_eq!((&answer.ids, &answer.logprobs), (&alone.ids, &alone.logprobs));
    }
    let tree = engine.core.scheduler().tree_stats().expect("a tree");
    assert!(tree.left_out > 0, "{tree:?}");
    engine.finish();
}

/// Checkpoints on the host may be packed: they come back nearly as they were.
#[test]
fn packed_checkpoints_come_back_from_the_host_nearly_as_they_were() {
    let request = greedy(&tokens(300, 1), 6);
    let alone = solo(MODELS[0], &request);
    for (dtype, most) in [(CheckpointDtype::Bf16, 0.02), (CheckpointDtype::Int8, 0.2)] {
        let mut engine = kimi(|config| {
            (config.device_memory, config.host_memory) = (memory(3, 12), memory(12, 96));
            config.checkpoint_dtype = dtype;
            config.watermark_percent = 0.0;
        });
        run(&mut engine, &request);
        for i in 0..3 {
            run(&mut engine, &greedy(&tokens(500, 70 + i), 4));
        }
        let again = run(&mut engine, &request);
        let (figures, tree) = (figures(&again), engine.core.stats().tree);
        assert_eq!((figures.cached_tokens, tree.promoted), (256, 1), "{figures:?} {tree:?}");
        let first = |answer: &Answer| f32::from_bits(answer.logprobs[0]);
        let difference = (first(&again) - first(&alone)).abs();
        assert!(difference > 0.0 && difference < most, "{dtype:?}: {difference}");
        engine.finish();
    }
}

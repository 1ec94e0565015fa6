//! Who is served when: shortest first with promotion, programs by turns, places for long prompts,
//! request-level batching, caps. The scheduler alone, over pools of no bytes, on a clock of steps.

#[path = "support/control.rs"]
mod control;

use std::time::Duration;

use control::{BLOCK_BYTES, SLOT_BYTES, scheduler_of};
use deltapool::config::{Batching, Policy};
use deltapool::scheduler::{
    Caps, End, Limits, LongReserve, Place, Prompt, Scheduler, SequenceId, StepReport,
};

/// A scheduler with room for all, `running` of them at once, a millisecond a step.
struct Server {
    scheduler: Scheduler,
    now: Duration,
    report: StepReport,
}

impl Server {
    fn new(running: usize, change: impl FnOnce(&mut Limits)) -> Server {
        let bytes = 200 * 43_425_792;
        let scheduler = scheduler_of((SLOT_BYTES, BLOCK_BYTES), (bytes, 0), |limits| {
            (limits.max_num_batched_tokens, limits.max_num_seqs) = (8_192, running);
            change(limits);
        });
        Server { scheduler, now: Duration::ZERO, report: StepReport::default() }
    }

    fn submit(&mut self, len: usize, max_tokens: usize, program: Option<&str>) -> SequenceId {
        let tokens = vec![1; len];
        self.submit_prompt(&Prompt { program_id: program, ..Prompt::new(&tokens, max_tokens) })
    }

    fn submit_prompt(&mut self, prompt: &Prompt<'_>) -> SequenceId {
        let prompt = Prompt { submitted: self.now, ..*prompt };
        self.scheduler.submit(&prompt).expect("it fits")[0]
    }

    /// A step; returns who ended, each with `len` tokens of its answer.
    fn step(&mut self, len: impl Fn(SequenceId) -> usize) -> Vec<SequenceId> {
        self.now += Duration::from_millis(1);
        let plan = self.scheduler.plan(self.now);
        control::answer(&plan, &mut self.report);
        self.scheduler.commit(plan, &self.report);
        let drawn: Vec<SequenceId> = self.report.sampled.iter().map(|s| s.sequence).collect();
        let has_all = |id: &SequenceId| {
            let sequence = self.scheduler.sequence(*id).expect("it drew");
            sequence.tokens().len() - sequence.prompt_len() >= len(*id)
        };
        let ended: Vec<SequenceId> = drawn.into_iter().filter(has_all).collect();
        ended.iter().for_each(|id| self.scheduler.end(*id, End::Finished));
        ended
    }

    /// The order in which all that wait end.
    fn ends(&mut self, len: impl Fn(SequenceId) -> usize) -> Vec<SequenceId> {
        let mut ends = Vec::new();
        while !self.scheduler.is_idle() {
            ends.extend(self.step(&len));
            assert!(self.now < Duration::from_secs(100), "no end");
        }
        ends
    }

    fn runs(&self, id: SequenceId) -> bool {
        let sequence = self.scheduler.sequence(id);
        sequence.is_some_and(|sequence| matches!(sequence.place(), Place::Device(_)))
    }
}

/// One place, one long prompt first in the queue, twenty short ones behind it.
fn mix(policy: Policy, ageing: f64) -> Vec<u64> {
    let mut server = Server::new(1, |limits| {
        (limits.policy, limits.sjf_ageing) = (policy, ageing);
        // A prompt of 512 tokens costs 5.12 ms by this rate.
        limits.cost.tokens_per_second = 1e5;
    });
    server.submit(8_192, 1, None);
    for _ in 0..20 {
        server.submit(512, 1, None);
    }
    server.ends(|_| 1).into_iter().map(|id| id.0).collect()
}

#[test]
fn shortest_first_serves_the_short_ones_first_and_fcfs_does_not() {
    let in_order: Vec<u64> = (0..=20).collect();
    assert_eq!(mix(Policy::Fcfs, 0.0), in_order);
    let shorts_first: Vec<u64> = (1..=20).chain([0]).collect();
    assert_eq!(mix(Policy::Sjf, 0.0), shorts_first);
}

/// 76.8 ms of difference at 10 ms a ms: at 7.7 ms seven short ones have run, a millisecond each.
#[test]
fn a_long_prompt_that_waited_passes_shorter_ones_that_came_with_it() {
    let order = mix(Policy::Sjf, 10.0);
    let place = order.iter().position(|id| *id == 0).expect("it ends");
    assert_eq!(place, 7, "{order:?}");
}

#[test]
fn a_stream_of_short_prompts_starves_a_long_one_only_without_ageing() {
    starves_without_ageing(8_192, 120);
}

#[test]
fn a_stream_of_prompts_starves_one_that_is_little_longer_only_without_ageing() {
    starves_without_ageing(520, 20);
}

/// Two prompts come in each step, and one is served.
#[test]
fn a_prompt_that_has_aged_passes_those_that_came_later_and_none_that_came_before() {
    let mut server = Server::new(1, |limits| {
        (limits.policy, limits.sjf_ageing) = (Policy::Sjf, 1.0);
        limits.cost.tokens_per_second = 1e5;
    });
    let come = |server: &mut Server, steps: usize| -> Vec<SequenceId> {
        let mut ended = Vec::new();
        for _ in 0..steps {
            for _ in 0..2 {
                server.submit(512, 1, None);
            }
            ended.extend(server.step(|_| 1));
        }
        ended
    };
    come(&mut server, 50);
    let waiting = server.scheduler.occupancy().waiting;
    let longer = server.submit(520, 1, None);
    let ended = come(&mut server, 200);
    let before = ended.iter().position(|id| *id == longer).expect("it ends");
    // Those that waited, and what came until it had waited for eight tokens' time.
    assert!((waiting..waiting + 4).contains(&before), "{before} behind {waiting}");
    server.ends(|_| 1);
}

/// A prompt of `len` tokens beside a stream of such of 512: with ageing it ends within `steps`.
fn starves_without_ageing(len: usize, steps: usize) {
    for (ageing, ends_within) in [(0.0, None), (1.0, Some(steps))] {
        let mut server = Server::new(1, |limits| {
            (limits.policy, limits.sjf_ageing) = (Policy::Sjf, ageing);
            limits.cost.tokens_per_second = 1e5;
        });
        let long = server.submit(len, 1, None);
        let mut ended_at = None;
        for step in 0..400 {
            server.submit(512, 1, None);
            if server.step(|_| 1).contains(&long) {
                ended_at = Some(step);
            }
        }
        match ends_within {
            None => assert_eq!(ended_at, None),
            Some(most) => assert!(ended_at.is_some_and(|step| step <= most), "{ended_at:?}"),
        }
        server.ends(|_| 1);
    }
}

/// SEEDS.md U1: an agent of twenty requests, each after the last, beside twenty chats that are
/// always there. Returns the agent's share of what was served until it was done.
fn agent_share(policy: Policy, places: usize, chat: impl Fn(u64) -> Option<String>) -> f64 {
    const TOKENS: usize = 10;
    let mut server = Server::new(places, |limits| limits.policy = policy);
    let mut chats = 0;
    let mut submit_chat = |server: &mut Server| {
        let program = chat(chats);
        chats += 1;
        server.submit(1, TOKENS, program.as_deref());
    };
    (0..20).for_each(|_| submit_chat(&mut server));
    let (mut agent, mut served) = (server.submit(1, TOKENS, Some("agent")), 0);
    let mut left = 20;
    while left > 0 {
        assert!(served < 10_000, "the agent starves");
        for id in server.step(|_| TOKENS) {
            served += 1;
            if id == agent {
                left -= 1;
                agent = server.submit(1, TOKENS, Some("agent"));
            } else {
                submit_chat(&mut server);
            }
        }
    }
    server.ends(|_| TOKENS);
    20.0 / f64::from(served)
}

fn assert_share(share: f64, expected: f64) {
    assert!((share / expected - 1.0).abs() < 0.05, "{share} instead of {expected}");
}

#[test]
fn an_agent_gets_half_beside_one_rival_and_one_of_21_beside_20() {
    assert_share(agent_share(Policy::Fair, 1, |_| Some("chats".to_owned())), 0.5);
    assert_share(
        agent_share(Policy::Fair, 1, |chat| Some(format!("chat {}", chat % 20))),
        1.0 / 21.0,
    );
    assert_share(agent_share(Policy::Fcfs, 1, |_| Some("chats".to_owned())), 1.0 / 21.0);
}

/// Least attained service would give a newcomer all, and an agent one service of 2,000.
#[test]
fn new_programs_without_end_do_not_starve_an_old_one() {
    // The first of them are there before the agent's second request, and go before it.
    assert!(agent_share(Policy::Fair, 1, |chat| Some(format!("chat {chat}"))) > 0.9 / 21.0);
    assert!(agent_share(Policy::Fair, 1, |_| None) > 0.9 / 21.0);
}

/// It has one request at a time: an eighth is all that it can have.
#[test]
fn a_chain_of_requests_has_at_most_one_of_eight_places() {
    assert_share(agent_share(Policy::Fair, 8, |_| Some("chats".to_owned())), 0.125);
}

#[test]
fn long_prompts_have_their_places_while_one_of_them_waits() {
    let reserve = LongReserve { places: 2, prompt_tokens: 1_000 };
    let mut server = Server::new(4, |limits| limits.reserve_long = Some(reserve));
    let shorts: Vec<_> = (0..10).map(|_| server.submit(10, 50, None)).collect();
    server.step(|_| 50);
    // No long one waits: all places are for all.
    assert_eq!(shorts.iter().filter(|id| server.runs(**id)).count(), 4);
    let longs: Vec<_> = (0..3).map(|_| server.submit(1_000, 50, None)).collect();
    while shorts[..4].iter().any(|id| server.runs(*id)) {
        server.step(|_| 50);
    }
    server.step(|_| 50);
    // Two of the short ones that waited, and two long ones that came later.
    assert_eq!(shorts.iter().filter(|id| server.runs(**id)).count(), 2);
    assert_eq!(longs.iter().filter(|id| server.runs(**id)).count(), 2);
    assert_eq!(server.ends(|_| 50).len(), 9);
}

/// SEEDS.md G1: two places, answers of 3, 7, 2, 5, 4 and 1 steps.
/// When each ended, how many steps there were, and who was in each.
fn golden_timeline(batching: Batching) -> (Vec<u64>, u64, Vec<Vec<u64>>) {
    const LENS: [usize; 6] = [3, 7, 2, 5, 4, 1];
    let mut server = Server::new(2, |limits| limits.batching = batching);
    for len in LENS {
        server.submit(1, len, None);
    }
    let mut finish = vec![0; LENS.len()];
    let (mut step, mut batches) = (0, Vec::new());
    while !server.scheduler.is_idle() {
        step += 1;
        for id in server.step(|id| LENS[id.0 as usize]) {
            finish[id.0 as usize] = step;
        }
        let mut batch: Vec<u64> =
            server.report.sampled.iter().map(|drawn| drawn.sequence.0).collect();
        batch.sort_unstable();
        batches.push(batch);
    }
    (finish, step, batches)
}

#[test]
fn batches_of_requests_wait_for_their_longest_and_continuous_ones_do_not() {
    let (finish, steps, batches) = golden_timeline(Batching::Continuous);
    assert_eq!((finish, steps), (vec![3, 7, 5, 10, 11, 11], 11));
    let expected = [([0, 1], 3), ([1, 2], 2), ([1, 3], 2), ([3, 4], 3), ([4, 5], 1)];
    let expected: Vec<_> = expected.map(|(batch, steps)| vec![batch.to_vec(); steps]).concat();
    assert_eq!(batches, expected);
    let (finish, steps, batches) = golden_timeline(Batching::Static);
    assert_eq!((finish, steps), (vec![3, 7, 9, 12, 16, 13], 16));
    // 22 of 32 slot-steps are used.
    assert_eq!(batches.concat().len(), 22);
}

/// Those that ran at once when the first of them ended, batch after batch, each with `len` tokens.
fn batches_of(server: &mut Server, len: usize) -> Vec<usize> {
    let mut batches = Vec::new();
    let mut left = 0;
    while !server.scheduler.is_idle() {
        let running = server.scheduler.occupancy().running;
        let ended = server.step(|_| len).len();
        assert!(server.now < Duration::from_secs(100), "no end");
        if ended > 0 && left == 0 {
            left = running;
            batches.push(running);
        }
        left -= ended;
    }
    batches
}

#[test]
fn a_static_batch_is_full_where_checkpoints_fill_the_device_and_the_host_takes_copies() {
    let mut server = Server::new(8, |_| {});
    // Pages of a slot, or of 84 blocks: eight sequences and no more.
    let bytes = 9 * 43_425_792;
    server.scheduler = scheduler_of((SLOT_BYTES, BLOCK_BYTES), (bytes, 4 * bytes), |limits| {
        (limits.max_num_batched_tokens, limits.max_num_seqs) = (8_192, 8);
        limits.batching = Batching::Static;
        limits.reuse = Some(control::reuse(limits.grid));
    });
    for request in 0..32 {
        let tokens = [request; 100];
        server.submit_prompt(&Prompt::new(&tokens, 50));
    }
    assert_eq!(batches_of(&mut server, 50), [8; 4]);
    assert!(server.scheduler.stats().demoted_bytes > 0, "nothing was copied");
}

#[test]
fn a_static_batch_waits_for_those_that_follow_one_of_it() {
    let mut server = Server::new(8, |limits| {
        limits.batching = Batching::Static;
        limits.reuse = Some(control::reuse(limits.grid));
    });
    for request in 0..16 {
        let tokens = [vec![1; 256], vec![2 + request; 100]].concat();
        server.submit_prompt(&Prompt::new(&tokens, 50));
    }
    assert_eq!(batches_of(&mut server, 50), [8; 2]);
    assert!(server.scheduler.stats().followed > 0, "nobody followed");
}

#[test]
fn a_static_batch_of_several_steps_prompts_is_not_closed_by_the_look_at_lower_numbers() {
    let mut server = Server::new(8, |limits| {
        (limits.batching, limits.policy) = (Batching::Static, Policy::Priority);
        limits.max_num_batched_tokens = 128;
    });
    for _ in 0..16 {
        server.submit(100, 50, None);
    }
    assert_eq!(batches_of(&mut server, 50), [8; 2]);
}

#[test]
fn nobody_of_a_static_batch_is_pushed_out_for_one_who_could_not_come_in() {
    let mut server = Server::new(2, |limits| {
        (limits.batching, limits.policy) = (Batching::Static, Policy::Priority);
    });
    let batch = [5, 5].map(|number| {
        let prompt = Prompt { priority: Some(number), ..Prompt::new(&[1; 100], 50) };
        server.submit_prompt(&prompt)
    });
    server.step(|_| 50);
    let first = server.submit_prompt(&Prompt { priority: Some(1), ..Prompt::new(&[1; 100], 50) });
    server.step(|_| 50);
    assert!(batch.iter().all(|id| server.runs(*id)), "pushed out");
    assert_eq!(server.ends(|_| 50), [batch[0], batch[1], first]);
}

#[test]
fn caps_bound_the_tokens_of_a_step_and_who_comes_in_but_push_nobody_out() {
    let mut server = Server::new(8, |_| {});
    let ids: Vec<_> = (0..8).map(|_| server.submit(100, 50, None)).collect();
    server.scheduler.set_caps(Caps { max_prompt_tokens: Some(128), max_num_seqs: Some(3) });
    server.step(|_| 50);
    let plan = server.scheduler.plan(server.now);
    assert!(plan.spans.iter().map(|span| span.rows).sum::<usize>() <= 128);
    control::answer(&plan, &mut server.report);
    server.scheduler.commit(plan, &server.report);
    for _ in 0..5 {
        server.step(|_| 50);
    }
    assert_eq!(ids.iter().filter(|id| server.runs(**id)).count(), 3);
    server.scheduler.set_caps(Caps { max_prompt_tokens: None, max_num_seqs: Some(1) });
    server.step(|_| 50);
    assert_eq!(ids.iter().filter(|id| server.runs(**id)).count(), 3);
    server.scheduler.set_caps(Caps::default());
    assert_eq!(server.ends(|_| 50).len(), 8);
}

/// What a step costs then, `benches/scheduler.rs` measures.
#[test]
fn a_hundred_thousand_may_wait_under_each_policy_and_all_may_leave() {
    for policy in Policy::ALL {
        let mut server = Server::new(4, |limits| {
            (limits.policy, limits.sjf_ageing) = (policy, 0.2);
            limits.reserve_long = Some(LongReserve { places: 2, prompt_tokens: 64 });
        });
        let ids: Vec<_> = (0..100_000).map(|i| server.submit(1 + i % 70, 3, None)).collect();
        for _ in 0..2_000 {
            server.step(|_| 3);
        }
        ids.into_iter().for_each(|id| server.scheduler.end(id, End::Cancelled));
        assert!(server.scheduler.is_idle());
    }
}

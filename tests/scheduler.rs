//! The scheduler alone, over pools of no bytes: who goes before whom, who leaves, what is counted.

#[path = "support/control.rs"]
mod control;

use std::time::Duration;

use control::{BLOCK_BYTES, SLOT_BYTES, scheduler_of};
use deltapool::config::{Policy, Preempt};
use deltapool::scheduler::{
    Blocked, End, Limits, Place, Prompt, Scheduler, SequenceId, StepPlan, StepReport,
};

const SLOT: usize = 3 * 4096;
const BLOCK: usize = 4096;

/// A scheduler over pages of one slot or three blocks.
fn scheduler(pages: usize, host_pages: usize, change: impl FnOnce(&mut Limits)) -> Scheduler {
    scheduler_of((SLOT, BLOCK), (pages * SLOT, host_pages * SLOT), |limits| {
        limits.policy = Policy::Priority;
        change(limits);
    })
}

fn answer(plan: &StepPlan) -> StepReport {
    let mut report = StepReport::default();
    control::answer(plan, &mut report);
    report
}

/// One step, after which those end that have the tokens they want. Returns the rows of each.
fn step(scheduler: &mut Scheduler, want: &dyn Fn(SequenceId) -> usize) -> Vec<(SequenceId, usize)> {
    let plan = scheduler.plan(Duration::ZERO);
    let rows = plan.spans.iter().map(|span| (span.sequence, span.rows)).collect();
    let report = answer(&plan);
    scheduler.commit(plan, &report);
    for sample in &report.sampled {
        let sequence = scheduler.sequence(sample.sequence).expect("it drew");
        if sequence.tokens().len() - sequence.prompt_len() >= want(sample.sequence) {
            scheduler.end(sample.sequence, End::Finished);
        }
    }
    rows
}

fn submit(scheduler: &mut Scheduler, len: usize, max_tokens: usize, priority: i32) -> SequenceId {
    let prompt = vec![1; len];
    let prompt = Prompt { priority: Some(priority), ..Prompt::new(&prompt, max_tokens) };
    scheduler.submit(&prompt).expect("it fits")[0]
}

fn waits(scheduler: &Scheduler, id: SequenceId) -> bool {
    matches!(scheduler.sequence(id).expect("it is known").place(), Place::Waiting)
}

/// Steps until `id` does not wait any more, at most `most`.
fn until_it_runs(scheduler: &mut Scheduler, id: SequenceId, most: usize) {
    for _ in 0..most {
        if !waits(scheduler, id) {
            return;
        }
        step(scheduler, &|_| usize::MAX);
    }
    assert!(!waits(scheduler, id), "it waits for more than {most} steps");
}

/// A queue of one number is a queue, also at the end of the numbers.
#[test]
fn equal_numbers_never_push_each_other_out() {
    for priority in [i32::MIN, 0, i32::MAX] {
        for host in [0, 40] {
            let mut scheduler = scheduler(8, host, |limits| limits.max_num_seqs = 1);
            for _ in 0..3 {
                submit(&mut scheduler, 70, 100, priority);
            }
            let mut steps = 0;
            while !scheduler.is_idle() {
                step(&mut scheduler, &|_| 100);
                steps += 1;
                assert!(steps <= 3 * 102, "priority {priority}, host {host}");
            }
            assert_eq!(scheduler.stats().parked + scheduler.stats().recomputed, 0);
        }
    }
}

/// What pushes out and what admits ask for the same room.
#[test]
fn a_lower_number_does_not_wait_behind_the_watermark() {
    let mut scheduler = scheduler(6, 20, |limits| limits.watermark_pages = 2);
    submit(&mut scheduler, 200, 180, 5);
    for _ in 0..3 {
        step(&mut scheduler, &|_| 180);
    }
    let first = submit(&mut scheduler, 190, 5, 0);
    until_it_runs(&mut scheduler, first, 5);
    drain(&mut scheduler);
}

/// Though the higher number came back from the host just now.
#[test]
fn a_lower_number_never_leaves_for_a_higher_one() {
    let mut scheduler = scheduler(4, 20, |_| {});
    let low = submit(&mut scheduler, 180, 200, 0);
    let high = submit(&mut scheduler, 150, 40, 5);
    let want = |id: SequenceId| if id == low { 200 } else { 40 };
    for _ in 0..3 {
        step(&mut scheduler, &want);
    }
    scheduler.park(high);
    for i in 0..40 {
        step(&mut scheduler, &want);
        let place = scheduler.sequence(low).expect("it runs on").place();
        assert!(matches!(place, Place::Device(_)), "step {i}: {place:?}");
    }
    drain(&mut scheduler);
}

/// Ends everything, so that no handle is left.
fn drain(scheduler: &mut Scheduler) {
    (0..1_000).for_each(|id| scheduler.end(SequenceId(id), End::Cancelled));
    while !scheduler.is_idle() {
        step(scheduler, &|_| 1);
    }
}

#[test]
fn what_was_pushed_out_does_not_take_the_room_again() {
    for (host, preempt) in [(0, Preempt::Swap), (0, Preempt::Recompute), (60, Preempt::Swap)] {
        let mut scheduler = scheduler(16, host, |limits| limits.preempt = preempt);
        for _ in 0..8 {
            submit(&mut scheduler, 100, 90, 5);
        }
        for _ in 0..20 {
            step(&mut scheduler, &|_| 90);
        }
        // The room of four of them.
        let first = submit(&mut scheduler, 1_100, 5, 0);
        until_it_runs(&mut scheduler, first, 12);
        drain(&mut scheduler);
    }
}

#[test]
fn higher_numbers_are_not_admitted_to_be_pushed_out_at_once() {
    let mut scheduler = scheduler(16, 0, |_| {});
    let runs = submit(&mut scheduler, 2_000, 500, 0);
    for _ in 0..6 {
        step(&mut scheduler, &|_| 500);
    }
    // It does not fit beside the first, of its own number.
    submit(&mut scheduler, 2_000, 5, 0);
    for _ in 0..50 {
        submit(&mut scheduler, 100, 50, 5);
    }
    for _ in 0..100 {
        step(&mut scheduler, &|id| if id == runs { 500 } else { 50 });
    }
    assert_eq!(scheduler.stats().recomputed, 0);
    drain(&mut scheduler);
}

#[test]
fn a_lower_number_does_not_wait_for_the_prompt_of_a_higher_one() {
    let mut scheduler = scheduler(400, 0, |_| {});
    submit(&mut scheduler, 20_000, 5, 5);
    step(&mut scheduler, &|_| 5);
    let first = submit(&mut scheduler, 1_000, 5, 0);
    let rows = step(&mut scheduler, &|_| 5);
    assert_eq!(rows[0], (first, 512), "all of the step's tokens");
    drain(&mut scheduler);
}

/// Choices without a slot wait for one, while somebody who will free one runs.
#[test]
fn forks_under_swap_are_not_computed_again_while_others_run() {
    let mut scheduler = scheduler(8, 100, |limits| limits.policy = Policy::Fcfs);
    let other = scheduler.submit(&Prompt::new(&[1; 100], 12)).expect("it fits")[0];
    let four = Prompt { choices: 4, ..Prompt::new(&[2; 640], 30) };
    scheduler.submit(&four).expect("it fits");
    while !scheduler.is_idle() {
        step(&mut scheduler, &|id| if id == other { 12 } else { 30 });
    }
    let stats = scheduler.stats();
    assert_eq!((stats.recomputed, stats.prompt_tokens), (0, 740));
    assert!(stats.forks_without_slot > 0);
}

/// A sequence that computes its answer again takes what the others leave.
#[test]
fn a_replay_leaves_a_token_to_everybody() {
    let change = |limits: &mut Limits| {
        (limits.max_num_batched_tokens, limits.preempt) = (64, Preempt::Recompute);
    };
    let mut scheduler = scheduler(40, 0, change);
    let first = submit(&mut scheduler, 64, 2_000, 0);
    (0..1_000).for_each(|_| drop(step(&mut scheduler, &|_| 2_000)));
    let second = submit(&mut scheduler, 64, 2_000, 0);
    // A third of a lower number pushes the first two out, ends, and both replay.
    let big = submit(&mut scheduler, 38 * 3 * 64, 1, -1);
    while scheduler.sequence(big).is_some() {
        step(&mut scheduler, &|id| if id == big { 1 } else { 2_000 });
    }
    let mut replayed = 0;
    for _ in 0..30 {
        let rows = step(&mut scheduler, &|_| 2_000);
        replayed += usize::from(rows.iter().any(|(id, rows)| *id == first && *rows > 1));
        let both = rows.iter().filter(|(id, _)| [first, second].contains(id)).count();
        assert!(replayed == 0 || both == 2 || waits(&scheduler, second), "{rows:?}");
    }
    assert!(replayed > 10);
    drain(&mut scheduler);
}

#[test]
fn what_failed_is_not_counted_as_swapped() {
    let mut scheduler = scheduler(10, 10, |_| {});
    let id = submit(&mut scheduler, 100, 50, 0);
    for _ in 0..3 {
        step(&mut scheduler, &|_| 50);
    }
    scheduler.park(id);
    let plan = scheduler.plan(Duration::ZERO);
    let mut report = answer(&plan);
    report.failed = std::mem::take(&mut report.finished);
    assert_eq!(report.failed.len(), 1);
    scheduler.commit(plan, &report);
    let counters = scheduler.sequence(id).expect("it runs on").counters();
    assert_eq!((counters.swapped_bytes, counters.preemptions), (0, 0));
    assert_eq!((scheduler.stats().swapped_bytes, scheduler.stats().failed_transfers), (0, 1));
    drain(&mut scheduler);
}

#[test]
fn a_sequence_is_computed_again_when_that_is_asked_for() {
    let mut scheduler = scheduler(10, 10, |_| {});
    let id = submit(&mut scheduler, 100, 50, 0);
    for _ in 0..3 {
        step(&mut scheduler, &|_| 50);
    }
    let unknown = SequenceId(77);
    scheduler.recompute(unknown);
    scheduler.recompute(id);
    assert_eq!(step(&mut scheduler, &|_| 50), [(id, 100)], "the prompt");
    assert_eq!(step(&mut scheduler, &|_| 50), [(id, 3)], "what it had answered");
    assert_eq!(step(&mut scheduler, &|_| 50), [(id, 1)]);
    let counters = scheduler.sequence(id).expect("it runs on").counters();
    assert_eq!((counters.preemptions, counters.recomputed_tokens), (1, 102));
    assert_eq!((scheduler.stats().recomputed, scheduler.stats().parked), (1, 0));
    drain(&mut scheduler);
}

/// 35e9 bytes of Kimi-Linear with bf16 windows, hidden row and KV, by the scheduler itself; with the
/// default watermark and with none.
#[test]
fn kimi_linear_runs_the_sequences_of_the_design() {
    let units = (SLOT_BYTES, BLOCK_BYTES);
    for (tokens, expected) in [(4_000, [450, 460]), (8_000, [317, 323]), (32_000, [113, 115])] {
        for (watermark, expected) in [805 * 2 / 100, 0].into_iter().zip(expected) {
            let mut scheduler = scheduler_of(units, (35_000_000_000, 0), |limits| {
                limits.max_num_batched_tokens = 1 << 30;
                (limits.max_num_seqs, limits.max_model_len) = (1_000, 1 << 20);
                limits.watermark_pages = watermark;
            });
            let layout = scheduler.device().layout();
            assert_eq!((layout.page_bytes, layout.pages), (43_425_792, 805));
            for _ in 0..600 {
                scheduler.submit(&Prompt::new(&vec![1; tokens], 1)).expect("it fits");
            }
            let plan = scheduler.plan(Duration::ZERO);
            assert_eq!(scheduler.occupancy().running, expected, "{tokens} tokens");
            let report = answer(&plan);
            scheduler.commit(plan, &report);
            drain(&mut scheduler);
        }
    }
}

/// Pages, the prompt that does not fit beside one of 64 tokens, and what it does not find: the
/// units of one kind, or a page that both kinds want.
#[test]
fn what_a_waiting_sequence_does_not_find_is_told_in_every_step() {
    let lacking = |blocks, slots, places| Blocked { blocks, slots, places };
    for (pages, len, places, expected) in [
        (4, 9 * 64, 64, lacking(true, false, false)),
        (4, 7 * 64, 64, lacking(true, true, false)),
        (2, 64, 64, lacking(false, true, false)),
        (4, 64, 1, lacking(false, false, true)),
    ] {
        let mut scheduler = scheduler(pages, 0, |limits| limits.max_num_seqs = places);
        let first = submit(&mut scheduler, 64, 50, 0);
        submit(&mut scheduler, len, 1, 0);
        let want = |id| if id == first { 50 } else { 1 };
        // From the second step on the scheduler knows without looking.
        for _ in 0..3 {
            step(&mut scheduler, &want);
            assert_eq!(scheduler.blocked(), expected, "{len} tokens on {pages} pages");
        }
        let stats = scheduler.stats();
        assert_eq!(stats.blocked_for_blocks, 3 * u64::from(expected.blocks));
        assert_eq!(stats.blocked_for_slots, 3 * u64::from(expected.slots));
        assert_eq!(stats.blocked_for_places, 3 * u64::from(expected.places));
        while !scheduler.is_idle() {
            step(&mut scheduler, &want);
        }
        assert_eq!(scheduler.blocked(), Blocked::default());
    }
}

#[test]
fn what_sequences_hold_is_used_and_what_the_tree_alone_holds_is_cached() {
    let mut scheduler = control::scheduler(4, 1_000);
    scheduler.submit(&Prompt::new(&[1; 200], 3)).expect("it fits");
    step(&mut scheduler, &|_| 3);
    let (during, _) = scheduler.pool_use();
    assert_eq!((during.blocks.used, during.slots.used), (4, 1));
    assert!(during.blocks.usage() > 0.0);
    while !scheduler.is_idle() {
        step(&mut scheduler, &|_| 3);
    }
    let (after, _) = scheduler.pool_use();
    assert_eq!((after.blocks.used, after.slots.used), (0, 0));
    assert!(after.blocks.cached >= 4 && after.slots.cached >= 1, "{after:?}");
    assert_eq!(after.blocks.usage(), 0.0);
}

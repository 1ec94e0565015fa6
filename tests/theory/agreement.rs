//! The simulator runs the scheduler that the engine runs: with copies that take no time and the
//! same prompts, both plan the same steps.

use std::sync::Arc;

use deltapool::config::{EngineConfig, MemorySize, Preempt};
use deltapool::engine::{Engine, RequestId};
use deltapool::models::ModelFiles;
use deltapool::request::Request;
use deltapool::scheduler::SchedulerStats;
use deltapool::simulate::traffic::Arrival;
use deltapool::simulate::{
    HardwareProfile, ModelProfile, Run, Runs, Simulation, StepModel, Timing, Traffic,
};

const REQUESTS: usize = 200;

/// Prompts that share beginnings of several lengths, answers of several lengths.
fn traffic() -> Traffic {
    let request = |i: usize| {
        let shared = Run::new((i % 7) as u64, 64 * (i % 5));
        let own = Run::new(1_000 + i as u64, 30 + 17 * (i % 11));
        Arrival {
            follows: None,
            at: std::time::Duration::ZERO,
            prompt: [shared, own].into_iter().collect(),
            answer: [Run::new(5_000 + i as u64, 40 + 29 * (i % 9))].into_iter().collect(),
            program: None,
        }
    };
    let requests = (0..REQUESTS).map(request).collect();
    Traffic { name: "by hand".to_owned(), requests, open: None }
}

/// Token ids of the small model.
fn tokens(runs: &Runs, vocab_size: usize) -> Vec<u32> {
    runs.to_tokens().into_iter().map(|id| id % vocab_size as u32).collect()
}

/// What the engine's scheduler did, and the bytes of a slot and of a block.
fn engine(traffic: &Traffic, config: EngineConfig) -> (SchedulerStats, (usize, usize), usize) {
    let files = ModelFiles::embedded().expect("the model is sound");
    let (vocab_size, grid) = (files.spec.vocab_size, files.spec.grid());
    let mut builder = Engine::builder(files).config(config);
    let device = builder.limits().expect("it fits").device;
    let mut core = builder.build_core(|executor| executor).expect("it is built");
    for (i, arrival) in (0..).zip(&traffic.requests) {
        let prompt = tokens(&arrival.prompt, vocab_size);
        let request = Request { ignore_eos: true, ..Request::new(prompt, arrival.answer.len()) };
        core.submit(RequestId(i), Arc::new(request), i);
    }
    while !core.is_idle() {
        core.step();
    }
    core.clear_prefix_cache();
    (core.stats().scheduler, (device.slot_bytes, device.block_bytes), grid)
}

/// What the simulator's did, over pools of the same bytes.
fn simulator(
    traffic: &Traffic,
    config: EngineConfig,
    (slot_bytes, block_bytes): (usize, usize),
    grid: usize,
) -> deltapool::simulate::Report {
    let bytes = |size| match size {
        MemorySize::Bytes(bytes) => bytes,
        other => panic!("{other} is no number of bytes"),
    };
    let mut hardware = HardwareProfile::preset("h200").expect("a preset");
    (hardware.link_out, hardware.link_in) = (1e40, 1e40);
    let mut model = ModelProfile::preset("kimi-linear").expect("a preset");
    (model.state_bytes, model.conv_bytes) = (slot_bytes as u64, 0);
    (model.kv_bytes, model.grid) = (block_bytes as f64 / 64.0, grid);
    let simulation = Simulation {
        timing: Timing {
            model,
            hardware,
            step_model: StepModel::Phased,
            overlap_copies: true,
            dead_slots_pay: false,
            buckets: Vec::new(),
            padding_reads: false,
        },
        device_bytes: bytes(config.device_memory),
        host_bytes: bytes(config.host_memory),
        config,
        slo_ttft: None,
        slo_tpot: None,
    };
    simulation.run(traffic, &mut |_| {}, None).expect("it runs")
}

#[test]
fn engine_and_simulator_preempt_and_reuse_alike_to_the_last_count() {
    let traffic = traffic();
    for preempt in [Preempt::Swap, Preempt::Recompute] {
        let config = EngineConfig {
            device_memory: MemorySize::Bytes(5 << 20),
            host_memory: MemorySize::Bytes(8 << 20),
            max_num_seqs: Some(24),
            max_num_batched_tokens: 256,
            watermark_percent: 0.0,
            preempt,
            // Constants, so that nothing is measured.
            link_bytes_per_second: Some(1e10),
            prefill_tokens_per_second: Some(1e4),
            threads: 1,
            ..EngineConfig::default()
        };
        let (engine, bytes, grid) = engine(&traffic, config);
        let report = simulator(&traffic, config, bytes, grid);
        println!(
            "{preempt:?}: {} steps, {} parked, {} computed again, {} of {} tokens cached",
            engine.steps,
            engine.parked,
            engine.recomputed,
            engine.cached_tokens,
            engine.admitted_tokens
        );
        assert!(engine.parked + engine.recomputed >= 20, "memory is short");
        assert!(engine.cached_tokens > 5_000, "prompts begin alike");
        let (preempted, reuse, pools) = (report.preempted, report.reuse, report.pools);
        assert_eq!(
            (preempted.parked, preempted.recomputed, preempted.host_full),
            (engine.parked, engine.recomputed, engine.host_full),
        );
        assert_eq!(preempted.swapped_bytes, engine.swapped_bytes);
        assert_eq!(
            (reuse.prompt_tokens, reuse.matched_tokens, reuse.cached_tokens),
            (engine.admitted_tokens, engine.matched_tokens, engine.cached_tokens),
        );
        assert_eq!(
            (pools.blocked_for_blocks, pools.blocked_for_slots, pools.blocked_for_places),
            (engine.blocked_for_blocks, engine.blocked_for_slots, engine.blocked_for_places),
        );
        assert_eq!(report.steps.count, engine.steps);
    }
}

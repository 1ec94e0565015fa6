//! What a step costs: the three step models at the lectures' steps, chunks, state, padding.

use deltapool::simulate::{
    Bound, HardwareProfile, ModelProfile, StepCost, StepModel, StepWork, step_cost,
};

const MODELS: [StepModel; 3] = [StepModel::Roofline, StepModel::Phased, StepModel::Additive];

fn hardware(name: &str) -> HardwareProfile {
    HardwareProfile::preset(name).unwrap()
}

fn model(name: &str) -> ModelProfile {
    ModelProfile::preset(name).unwrap()
}

fn near(value: f64, expected: f64, tolerance: f64) {
    assert!((value / expected - 1.0).abs() <= tolerance, "{value} is not {expected}");
}

#[test]
fn the_three_step_models_agree_with_section_5_point_17() {
    let (hardware, model) = (hardware("h100-seed-b"), model("7b-mha-seed"));
    for (chunks, expected) in [
        (&[][..], [20.07, 20.51, 24.65]),
        (&[(0, 512)], [20.15, 34.58, 38.8]),
        (&[(0, 4096)], [125.0, 141.0, 146.0]),
    ] {
        let context = 164.0 * 640.0;
        let work = StepWork { decodes: 164, decode_context: context, chunks, dead_context: 0.0 };
        for (step_model, ms) in MODELS.into_iter().zip(expected) {
            let cost = step_cost(step_model, &hardware, &model, &work);
            near(cost.seconds * 1e3, ms, 3e-3);
        }
    }
}

#[test]
fn chunks_of_a_prompt_cost_the_flops_of_the_prompt_wherever_it_is_cut() {
    let model = model("70b-gqa");
    for rows in [480, 2016, 8160] {
        let starts = (0..8192).step_by(rows);
        let flops: f64 = starts.map(|start| model.chunk_flops(start, rows.min(8192 - start))).sum();
        near(flops, 1.234841e15, 1e-6);
        near(flops, model.prefill_flops(8192.0), 1e-12);
    }
}

#[test]
fn an_empty_step_costs_nothing_and_overhead_counts_once() {
    let (mut hardware, model) = (hardware("h100-seed-a"), model("70b-gqa"));
    hardware.step_overhead = 3e-3;
    for step_model in MODELS {
        let empty = step_cost(step_model, &hardware, &model, &StepWork::default());
        assert_eq!((empty.seconds, empty.bytes, empty.flops), (0.0, 0.0, 0.0));
    }
    let work = StepWork { decodes: 32, decode_context: 65_536.0, ..StepWork::default() };
    let cost = step_cost(StepModel::Roofline, &hardware, &model, &work);
    // 160.97 GB and 4.65 TFLOP (C30, C31).
    near(cost.bytes, 160.97e9, 1e-4);
    near(cost.flops, 4.65e12, 1e-3);
    near(cost.seconds, 56.53e-3 + 3e-3, 1e-4);
    assert_eq!(cost.bound, Bound::Bandwidth);
    hardware.step_overhead = 0.1;
    assert_eq!(step_cost(StepModel::Phased, &hardware, &model, &work).bound, Bound::Overhead);
}

#[test]
fn a_step_turns_from_bandwidth_to_compute_where_the_roofline_bends() {
    let (hardware, model) = (hardware("h100-seed-a"), model("70b-gqa"));
    let cost = |rows: usize| {
        let chunks = [(0, rows)];
        let work = StepWork { chunks: &chunks, ..decodes(32, 2048) };
        step_cost(StepModel::Roofline, &hardware, &model, &work)
    };
    assert_eq!(cost(199 - 32 - 1).bound, Bound::Bandwidth);
    assert_eq!(cost(199 - 32 + 1).bound, Bound::Compute);
}

fn decodes(count: usize, context: usize) -> StepWork<'static> {
    let decode_context = (count * context) as f64;
    StepWork { decodes: count, decode_context, chunks: &[], dead_context: 0.0 }
}

#[test]
fn a_recurrent_state_is_read_and_written_per_decode_and_per_chunk_whatever_the_length() {
    let hardware = hardware("h100-seed-a");
    let mut model = model("k3-real");
    model.kv_bytes = 0.0;
    let bytes = |work: &StepWork<'_>| {
        let weights = model.weight_bytes((work.decodes + work.chunks.len()) as f64);
        step_cost(StepModel::Phased, &hardware, &model, work).bytes - weights
    };
    // 64 states of 449,372,160 bytes, read and written: 57.5 GB (M7).
    for context in [10, 10_000] {
        near(bytes(&decodes(64, context)), 57.5e9, 1e-3);
    }
    let chunks = [(0, 1), (64, 1)];
    near(bytes(&StepWork { chunks: &chunks, ..StepWork::default() }), 4.0 * model.state(), 1e-5);
}

#[test]
fn a_chunk_reads_its_prefix_and_dead_rows_read_their_context() {
    let (hardware, model) = (hardware("h100-seed-b"), model("7b-mha-seed"));
    let bytes = |work: &StepWork<'_>| step_cost(StepModel::Phased, &hardware, &model, work).bytes;
    let chunks = [(1000, 24)];
    let chunk = bytes(&StepWork { chunks: &chunks, ..StepWork::default() });
    assert_eq!(chunk - 13.5e9, 1024.0 * 512e3);
    let (live, dead) =
        (decodes(8, 640), StepWork { dead_context: 24.0 * 640.0, ..decodes(8, 640) });
    assert_eq!(bytes(&dead), bytes(&decodes(32, 640)));
    assert!(bytes(&live) < bytes(&dead));
}

#[test]
fn a_measured_prefill_rate_sets_the_time_of_chunks() {
    let hardware = hardware("h100-seed-a");
    let k3 = ModelProfile { weights: model("7b-mha").weights, ..model("k3") };
    let chunks = [(0, 4550)];
    let work = StepWork { chunks: &chunks, ..StepWork::default() };
    let StepCost { seconds, flops, .. } = step_cost(StepModel::Roofline, &hardware, &k3, &work);
    near(seconds, 1.0, 1e-12);
    near(flops, k3.prefill_flops(4550.0), 1e-12);
}

#[test]
fn products_of_few_rows_are_slower_by_the_profile_s_curve() {
    let (mut hardware, model) = (hardware("h100-seed-a"), model("70b-gqa"));
    let chunks = [(0, 512)];
    let work = StepWork { chunks: &chunks, ..StepWork::default() };
    let plain = step_cost(StepModel::Roofline, &hardware, &model, &work).seconds;
    hardware.gemm_efficiency = vec![(512, 0.5)];
    let slow = step_cost(StepModel::Roofline, &hardware, &model, &work).seconds;
    let attention = model.chunk_attention(0, 512) / 495e12;
    near(slow, 2.0 * (plain - attention) + attention, 1e-9);
}

#[test]
fn phased_lies_between_roofline_and_additive() {
    let hardware = hardware("h100");
    for name in ["70b-gqa", "7b-gqa8", "kimi-linear", "k3-real", "deepseek-v3"] {
        let model = model(name);
        for decodes in [0, 1, 32, 256] {
            for rows in [0, 1, 100, 4096] {
                let chunks = [(777, rows)];
                let work = StepWork { chunks: &chunks, ..self::decodes(decodes, 3000) };
                let cost = |step_model| step_cost(step_model, &hardware, &model, &work).seconds;
                let [roofline, phased, additive] = MODELS.map(cost);
                assert!(roofline <= phased + 1e-15 && phased <= additive + 1e-15, "{name}");
            }
        }
    }
}

#[test]
fn a_step_model_is_written_as_it_is_read() {
    for step_model in MODELS {
        assert_eq!(step_model.to_string().parse(), Ok(step_model));
    }
    let error = "fast".parse::<StepModel>().unwrap_err();
    assert_eq!(error, "\"fast\" is no step model; there are roofline, phased, additive");
    assert_eq!(StepModel::default(), StepModel::Phased);
}

/// `--preempt auto` would weigh a swap against a machine that does not exist otherwise.
#[test]
fn what_preemption_weighs_is_what_full_steps_of_a_prompt_take() {
    let mut hardware = hardware("h100-seed-a");
    hardware.gemm_efficiency = vec![(1, 0.1), (512, 0.6)];
    hardware.chunk_attention_efficiency = 0.3;
    let model = model("70b-gqa");
    let (token, pair) = hardware.prefill_seconds(&model);
    for start in [0, 65_536] {
        let chunks = &[(start, 4_096)];
        let work = StepWork { chunks, ..StepWork::default() };
        let cost = step_cost(StepModel::Phased, &hardware, &model, &work);
        let pairs = 4_096.0 * start as f64 + 4_096.0 * 4_096.0 / 2.0;
        near(cost.seconds, 4_096.0 * token + pairs * pair, 1e-2);
    }
}

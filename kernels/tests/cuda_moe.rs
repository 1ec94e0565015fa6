//! Routing and the products of experts on a device against their definitions.

mod cuda_support;

use cuda_support::{Device, Values, assert_caught, assert_close, device, sanitized, with_seeds};
use half::bf16;
use kernels::cuda::DeviceBuffer;
use kernels::cuda::gemm::{Inputs, RoundedRows};
use kernels::cuda::moe::{Choice, Experts, Workspace, experts, route};
use kernels::moe::{ExpertWeights, Router, Score, naive};
use kernels::{Dtype, Matrix, Rows, RowsMut, Values as Stored};

fn routers() -> Vec<Router> {
    let router = Router {
        experts: 40,
        top_k: 6,
        score: Score::Sigmoid,
        groups: 1,
        top_groups: 1,
        renormalize: true,
        scale: 2.446,
    };
    vec![
        Router { groups: 5, top_groups: 2, ..router.clone() },
        Router { groups: 40, top_groups: 7, ..router.clone() },
        Router { score: Score::Softmax, renormalize: false, scale: 1.0, ..router.clone() },
        Router { experts: 1024, top_k: 32, ..router.clone() },
        Router { experts: 3, top_k: 3, ..router },
    ]
}

/// The device's choices and the definition's.
fn routed(
    device: &Device,
    router: &Router,
    logits: &[f32],
    bias: &[f32],
) -> (Vec<Choice>, Vec<kernels::moe::Choice>) {
    let (cuda, rows) = (&device.cuda, logits.len() / router.experts);
    let mut want = vec![kernels::moe::Choice { expert: 0, weight: 0.0 }; rows * router.top_k];
    naive::route(router, Rows::new(logits, router.experts), bias, &mut want);
    let logits = DeviceBuffer::of(cuda, logits).expect("room");
    let bias = DeviceBuffer::of(cuda, bias).expect("room");
    let mut choices = DeviceBuffer::zeros(cuda, rows * router.top_k).expect("room");
    let bias = router.has_bias().then(|| bias.slice());
    route(cuda, router, logits.rows(rows, router.experts), bias, &mut choices)
        .expect("it launches");
    (choices.read(cuda).expect("it ran"), want)
}

fn assert_same_choices(got: &[Choice], want: &[kernels::moe::Choice]) {
    let ids = |got: &Choice, want: &kernels::moe::Choice| got.expert == want.expert;
    assert!(got.iter().zip(want).all(|(got, want)| ids(got, want)), "{got:?}, {want:?}");
    for (got, want) in got.iter().zip(want) {
        let both_broken = got.weight.is_nan() && want.weight.is_nan();
        let near = (got.weight - want.weight).abs() <= 1e-5 * want.weight.abs();
        assert!(both_broken || near, "{got:?}, {want:?}");
    }
}

#[test]
fn routing_is_its_definition() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| {
        for router in routers() {
            let mut values = Values::new(seed);
            let logits: Vec<f32> =
                values.take(9 * router.experts).iter().map(|x| x * 4.0).collect();
            let bias = match router.has_bias() {
                true => values.take(router.experts),
                false => Vec::new(),
            };
            let (got, want) = routed(&device, &router, &logits, &bias);
            assert_same_choices(&got, &want);
        }
    });
}

#[test]
fn equal_scores_go_to_lower_ids_and_broken_rows_to_nobody() {
    let Some(device) = device() else { return };
    for router in routers() {
        let experts = router.experts;
        let bias = vec![0.0; if router.has_bias() { experts } else { 0 }];
        // A row of few different scores, one of equals, and one that is broken at its end.
        let mut logits: Vec<f32> = (0..experts).map(|e| (e * 7 % 5) as f32 - 2.0).collect();
        logits.extend(vec![0.5; experts]);
        logits.extend(vec![0.25; experts]);
        *logits.last_mut().expect("there are some") = f32::NAN;
        let (got, want) = routed(&device, &router, &logits, &bias);
        assert_same_choices(&got, &want);
        let broken = &got[2 * router.top_k..];
        assert!(broken.iter().all(|choice| choice.weight.is_nan()));
    }
}

/// Matrices begin at multiples of 16 bytes.
fn padded(len: usize) -> usize {
    len.next_multiple_of(8)
}

/// A layer of experts, as a file has them.
struct Layer {
    hidden: usize,
    inter: usize,
    count: usize,
    f32s: Vec<f32>,
    bf16s: Vec<bf16>,
    dtype: Dtype,
}

impl Layer {
    fn new(hidden: usize, inter: usize, count: usize, dtype: Dtype) -> Layer {
        let f32s = Values::new(9).take(3 * count * padded(inter * hidden));
        let bf16s = f32s.iter().map(|x| bf16::from_f32(*x)).collect();
        Layer { hidden, inter, count, f32s, bf16s, dtype }
    }

    /// Gate, up and down of expert `e` as values from which to which, outputs and inputs.
    fn parts(&self, e: usize) -> [(usize, usize, usize); 3] {
        let (h, i) = (self.hidden, self.inter);
        [0, 1, 2].map(|part| ((3 * e + part) * padded(h * i), if part < 2 { i } else { h }, h * i))
    }

    fn on_host(&self) -> Vec<ExpertWeights<Matrix<'_>>> {
        let matrix = |(at, rows, len): (usize, usize, usize)| {
            let values = match self.dtype {
                Dtype::F32 => Stored::F32(&self.f32s[at..at + len]),
                _ => Stored::Bf16(&self.bf16s[at..at + len]),
            };
            Matrix::new(rows, len / rows, values)
        };
        let expert = |e| {
            let [gate, up, down] = self.parts(e).map(matrix);
            ExpertWeights { gate, up, down }
        };
        (0..self.count).map(expert).collect()
    }

    /// Different experts for each row, weights that are not in their order.
    fn choices(&self, rows: usize, top_k: usize) -> Vec<Choice> {
        let mut choices = Vec::new();
        for row in 0..rows {
            let mut ids: Vec<usize> =
                (0..top_k).map(|i| (row * 3 + i * (1 + row % 2)) % self.count).collect();
            ids.sort_unstable();
            let weight = |id: usize| ((id * 5 + row) % 7) as f32 / 7.0 - 0.2;
            choices.extend(ids.iter().map(|&id| Choice { expert: id as u32, weight: weight(id) }));
        }
        choices
    }

    fn run(&self, device: &Device, x: &[f32], choices: &[Choice], rounded: bool) -> Vec<f32> {
        let (cuda, rows) = (&device.cuda, x.len() / self.hidden);
        let top_k = choices.len() / rows;
        let weights = Experts::new(cuda, &self.on_host()).expect("room");
        let mut work = Workspace::new(cuda, &weights, rows, top_k).expect("room");
        let choices = DeviceBuffer::of(cuda, choices).expect("room");
        let x = DeviceBuffer::of(cuda, x).expect("room");
        let mut room = RoundedRows::new(cuda, rows, self.hidden).expect("room");
        let x_rows = x.rows(rows, self.hidden);
        let inputs = match rounded {
            true => Inputs::Bf16(room.round(cuda, x_rows).expect("it launches")),
            false => Inputs::F32(x_rows),
        };
        let mut out = DeviceBuffer::of(cuda, &vec![f32::NAN; x.len()]).expect("room");
        let out_rows = out.rows_mut(rows, self.hidden);
        experts(cuda, (inputs, &choices, top_k), &weights, &mut work, out_rows)
            .expect("it launches");
        out.read(cuda).expect("it ran")
    }
}

#[test]
fn products_of_experts_are_their_definition() {
    let Some(device) = device() else { return };
    // Few rows for each expert; many, so that tiles are shared; one expert; and rows that no
    // vector divides.
    let cases = [
        (3, 2, 40, 24, 11, Dtype::Bf16, true),
        (140, 4, 16, 40, 6, Dtype::Bf16, true),
        (140, 4, 16, 40, 6, Dtype::F32, false),
        (5, 1, 24, 16, 1, Dtype::Bf16, false),
        (9, 3, 19, 7, 5, Dtype::F32, false),
    ];
    with_seeds(&device, 2, |seed| {
        for (rows, top_k, hidden, inter, count, dtype, rounded) in cases {
            let layer = Layer::new(hidden, inter, count, dtype);
            let x = Values::new(seed).take(rows * hidden);
            let choices = layer.choices(rows, top_k);
            let got = layer.run(&device, &x, &choices, rounded);
            let on_host: Vec<_> = choices
                .iter()
                .map(|c| kernels::moe::Choice { expert: c.expert, weight: c.weight })
                .collect();
            let mut want = vec![0.0; x.len()];
            let out = RowsMut::new(&mut want, hidden);
            naive::experts(Rows::new(&x, hidden), &on_host, &layer.on_host(), out);
            let tolerance = if rounded { 0.02 } else { 1e-5 };
            assert_close(&format!("{rows} rows of {count} experts"), &got, &want, tolerance);
        }
    });
}

#[test]
fn a_row_of_experts_has_the_same_bits_in_every_batch() {
    let Some(device) = device() else { return };
    let (rows, top_k, hidden) = (140, 4, 16);
    for (dtype, rounded) in [(Dtype::F32, false), (Dtype::Bf16, true)] {
        let layer = Layer::new(hidden, 72, 6, dtype);
        let x = Values::new(4).take(rows * hidden);
        let choices = layer.choices(rows, top_k);
        let all = layer.run(&device, &x, &choices, rounded);
        for few in [1, 5, 30] {
            let some = layer.run(&device, &x[..few * hidden], &choices[..few * top_k], rounded);
            assert!(some == all[..few * hidden], "{few} rows of {dtype:?}");
        }
    }
}

#[test]
fn sanitizers_find_nothing() {
    let Some(device) = device() else { return };
    sanitized(&device, || {
        for router in routers() {
            let mut values = Values::new(2);
            let logits = values.take(3 * router.experts);
            let bias = values.take(if router.has_bias() { router.experts } else { 0 });
            routed(&device, &router, &logits, &bias);
        }
        let layer = Layer::new(16, 24, 6, Dtype::Bf16);
        let x = Values::new(4).take(5 * 16);
        layer.run(&device, &x, &layer.choices(5, 4), true);
    });
}

#[test]
fn ties_to_the_higher_expert_are_caught() {
    let change = ("cuda/moe.cu", "other_at < at", "other_at > at");
    assert_caught("equal_scores_go_to_lower_ids_and_broken_rows_to_nobody", change, "Choice");
}

#[test]
fn a_weight_that_has_the_bias_in_it_is_caught() {
    let change =
        ("cuda/moe.cu", "sum += row.scores[row.chosen[i]]", "sum += a.bias[row.chosen[i]]");
    assert_caught("routing_is_its_definition", change, "Choice");
}

#[test]
fn a_group_that_begins_one_row_late_is_caught() {
    let change = ("cuda/moe.cu", "= first + i * a.tile_rows;", "= first + 1 + i * a.tile_rows;");
    assert_caught("products_of_experts_are_their_definition", change, "apart");
}

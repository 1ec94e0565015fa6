//! What choosing a token needs of logits, against plain loops and full sorts.

mod cuda_support;

use cuda_support::{Values, assert_caught, device, sanitized, with_seeds};
use kernels::cuda::sampling::{Candidate, Verdict, first, judge};
use kernels::cuda::{Cuda, DeviceBuffer};

fn verdicts(cuda: &Cuda, logits: &[f32], width: usize) -> Vec<Verdict> {
    let rows = logits.len() / width;
    let on = DeviceBuffer::of(cuda, logits).expect("room");
    let mut out = DeviceBuffer::zeros(cuda, rows).expect("room");
    judge(cuda, on.rows(rows, width), &mut out).expect("it launches");
    out.read(cuda).expect("it ran").into_iter().map(Verdict::from).collect()
}

#[test]
fn verdicts_are_those_of_a_plain_loop() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| judged(&device.cuda, seed));
}

fn judged(cuda: &Cuda, seed: u64) {
    let width = 2600;
    let plain = Values::new(seed).take(width);
    let with = |changes: &[(usize, f32)]| {
        let mut row = plain.clone();
        changes.iter().for_each(|(i, x)| row[*i] = *x);
        row
    };
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let rows = [
        (with(&[(2599, 3.0)]), Verdict::Likeliest(2599)),
        // Equal ones, in other threads and in one; zeros of both signs.
        (with(&[(2598, 3.0), (1574, 3.0), (550, 3.0)]), Verdict::Likeliest(550)),
        (with(&[(40, 3.0), (8, 3.0)]), Verdict::Likeliest(8)),
        (vec![-0.0; width].into_iter().chain([0.0]).skip(1).collect(), Verdict::Likeliest(0)),
        (with(&[(2000, inf), (1999, inf), (2100, -inf)]), Verdict::Infinite(1999)),
        (with(&[(3, inf), (2000, nan), (1700, -nan)]), Verdict::NotANumber(1700)),
        (vec![-inf; width], Verdict::NothingLeft),
        (vec![-inf; width - 1].into_iter().chain([-1e38]).collect(), Verdict::Likeliest(2599)),
    ];
    let logits: Vec<f32> = rows.iter().flat_map(|(row, _)| row.clone()).collect();
    let want: Vec<_> = rows.iter().map(|(_, verdict)| *verdict).collect();
    assert_eq!(verdicts(cuda, &logits, width), want);
}

#[test]
fn the_first_tokens_are_those_of_a_full_sort() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| sorted(&device.cuda, seed));
}

fn sorted(cuda: &Cuda, seed: u64) {
    // Scores that differ, few different ones (ties at the last place), and one score only.
    for (width, count, levels) in
        [(3000, 64, 1e6), (3000, 1024, 7.0), (700, 5, 1.0), (40, 40, 3.0), (1025, 1, 2.0)]
    {
        let rows = 2;
        let mut values = Values::new(seed);
        // Zeros of both signs among them.
        let step = |x: f32| if x.abs() < 1.0 { x.signum() * 0.0 } else { x.trunc() * 0.25 };
        let logits: Vec<f32> =
            values.take(rows * width).into_iter().map(|x| step(x * levels)).collect();
        let on = DeviceBuffer::of(cuda, &logits).expect("room");
        let mut out = DeviceBuffer::zeros(cuda, rows * count).expect("room");
        first(cuda, on.rows(rows, width), count, &mut out).expect("it launches");
        let got = out.read(cuda).expect("it ran");
        for (row, got) in logits.chunks(width).zip(got.chunks(count)) {
            let mut ids: Vec<usize> = (0..width).collect();
            ids.sort_by(|a, b| row[*b].partial_cmp(&row[*a]).expect("numbers").then(a.cmp(b)));
            let want: Vec<_> = ids[..count]
                .iter()
                .map(|&id| Candidate { id: id as u32, score: row[id] })
                .collect();
            assert_eq!(got, want, "{count} of {width}");
        }
    }
}

#[test]
fn sanitizers_find_nothing() {
    let Some(device) = device() else { return };
    sanitized(&device, || {
        judged(&device.cuda, 1);
        sorted(&device.cuda, 1);
    });
}

#[test]
fn ties_to_the_higher_id_are_caught() {
    let change = ("cuda/sampling.cu", "b.at < a.at", "b.at > a.at");
    assert_caught("verdicts_are_those_of_a_plain_loop", change, "Likeliest");
}

//! Each fast operator against its naive twin at one real shape: Kimi-Linear's widths, or near them.
//!
//! `cargo bench --bench kernels`. The fast form runs on one thread with the best instruction set
//! this processor has (`DELTAPOOL_ISA` forces one).

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use kernels::norm::Scale;
use kernels::pack::{self, Part};
use kernels::{
    Arena, BLOCK_LEN, Cpu, Form, Forms, Isa, KvDtype, KvPlace, Matrix, NO_SLOT, NarrowRows,
    PackedDtype, PackedMatrix, Packing, Paged, Panels, Quantization, Rows, RowsMut, Scratch, Span,
    Spans, Values, activation, conv, gemm, gqa, kda, mla, moe, norm, rope,
};

const F32: usize = size_of::<f32>();

fn cpu() -> Cpu {
    let isa = match std::env::var("DELTAPOOL_ISA") {
        Ok(name) => Isa::by_name(&name).expect("an instruction set of this processor"),
        Err(_) => Isa::best(),
    };
    Cpu::new(isa, 1).expect("one thread")
}

/// Values like those of activations, the same in every run.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

fn span(rows: usize, start: usize, form: Form, absorbed_from: usize, blocks: usize) -> Span {
    Span {
        first_row: 0,
        rows,
        start,
        form,
        absorbed_from,
        read: NO_SLOT,
        write: 0,
        table: 0..blocks,
        snapshots: 0..0,
    }
}

fn group<'a>(
    c: &'a mut Criterion,
    name: &str,
    throughput: Throughput,
) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(10).throughput(throughput);
    group
}

fn gemms(c: &mut Criterion) {
    let cpu = cpu();
    let (n, k) = (2304, 2304);
    let w = values(n * k, 1);
    let w = Matrix::new(n, k, Values::F32(&w));
    let panels = PackedMatrix::new(w).expect("memory");
    for m in [1, 8, 64, 512] {
        let x = values(m * k, 2);
        let mut out = vec![0.0; m * n];
        let name = format!("gemm {m}x{n}x{k}");
        let mut group = group(c, &name, Throughput::Elements((2 * m * n * k) as u64));
        let x = Rows::new(&x, k);
        // More rows than these take the definition too long.
        if m <= 64 {
            group.bench_function("naive", |b| {
                b.iter(|| gemm::naive::gemm(x, w, RowsMut::new(black_box(&mut out), n)));
            });
        }
        group.bench_function(cpu.isa.name(), |b| {
            b.iter(|| {
                let out = RowsMut::new(black_box(&mut out), n);
                gemm::gemm(&cpu, x, panels.panels(), &mut NarrowRows::default(), out);
            });
        });
    }
}

/// What it costs to hand an operator to the threads: a task each that does nothing.
fn dispatch(c: &mut Criterion) {
    let mut group = group(c, "dispatch", Throughput::Elements(1));
    for threads in [1, 2] {
        let cpu = Cpu::new(Isa::best(), threads).expect("threads");
        group.bench_function(format!("{threads} threads"), |b| {
            b.iter(|| cpu.gang.run(threads, |_, task| _ = black_box(task)));
        });
    }
}

/// bf16 weights beside quantised ones, which come from memory: copies in turn, more than a cache
/// holds.
fn quantized_gemms(c: &mut Criterion) {
    const COPIES: usize = 12;
    let cpu = cpu();
    let (n, k) = (2048, 2048);
    let w: Vec<half::bf16> = values(n * k, 1).into_iter().map(half::bf16::from_f32).collect();
    let w = Matrix::new(n, k, Values::Bf16(&w));
    let forms = [None, Some(Quantization::Q8), Some(Quantization::Q4)];
    for m in [1, 8, 64] {
        let x = values(m * k, 2);
        let x = Rows::new(&x, k);
        let (mut out, mut work) =
            (vec![0.0; m * n], NarrowRows::new(Forms { int8: true, bf16: true }, m, k));
        let name = format!("weights from memory {m}x{n}x{k}");
        let mut group = group(c, &name, Throughput::Elements((2 * m * n * k) as u64));
        for form in forms {
            let copy = |_| match form {
                None => PackedMatrix::new(w).expect("memory"),
                Some(quantization) => PackedMatrix::quantized(w, quantization).expect("memory"),
            };
            // As many bytes of each form.
            let copies = COPIES * form.map_or(1, |q| 2 * n * k / q.bytes(n, k));
            let mut copies = (0..copies).map(copy).collect::<Vec<_>>();
            group.bench_function(form.map_or("bf16", Quantization::as_str), |b| {
                b.iter(|| {
                    copies.rotate_left(1);
                    let out = RowsMut::new(black_box(&mut out), n);
                    gemm::gemm(&cpu, x, copies[0].panels(), &mut work, out);
                });
            });
        }
    }
}

fn norms_and_activations(c: &mut Criterion) {
    let cpu = cpu();
    let (rows, width) = (64, 2304);
    let (x, w) = (values(rows * width, 1), values(width, 2));
    let mut out = vec![0.0; rows * width];
    let bytes = Throughput::Bytes((2 * rows * width * F32) as u64);
    let mut norms = group(c, "rms_norm 64x2304", bytes.clone());
    let (rows_in, scale) = (Rows::new(&x, width), Scale::Plain(&w));
    norms.bench_function("naive", |b| {
        b.iter(|| {
            norm::naive::rms_norm(rows_in, scale, 1e-5, RowsMut::new(black_box(&mut out), width))
        });
    });
    norms.bench_function(cpu.isa.name(), |b| {
        b.iter(|| {
            norm::rms_norm(&cpu, rows_in, scale, 1e-5, RowsMut::new(black_box(&mut out), width))
        });
    });
    norms.finish();
    let mut silu = group(c, "silu_mul 64x2304", bytes);
    silu.bench_function("naive", |b| {
        b.iter(|| activation::naive::silu_mul(RowsMut::new(black_box(&mut out), width), rows_in));
    });
    silu.bench_function(cpu.isa.name(), |b| {
        b.iter(|| activation::silu_mul(&cpu, RowsMut::new(black_box(&mut out), width), rows_in));
    });
}

fn rotations(c: &mut Criterion) {
    let cpu = cpu();
    let (rows, heads, dim) = (64, 32, 128);
    let rotation = rope::Rope::new(dim, 5e5, rope::RopeScaling::None);
    let mut table = vec![0.0; rows * dim];
    rope::angles(&rotation, &(0..rows).collect::<Vec<_>>(), &mut table);
    let (angles, width) = (Rows::new(&table, dim), heads * dim);
    let mut x = values(rows * width, 1);
    let mut group = group(c, "rope 64x32x128", Throughput::Bytes((2 * rows * width * F32) as u64));
    group.bench_function("naive", |b| {
        b.iter(|| rope::naive::rotate(RowsMut::new(black_box(&mut x), width), dim, angles));
    });
    group.bench_function(cpu.isa.name(), |b| {
        b.iter(|| rope::rotate(&cpu, RowsMut::new(black_box(&mut x), width), dim, angles));
    });
}

fn convolutions(c: &mut Criterion) {
    let cpu = cpu();
    let (rows, channels, width) = (64, 3 * 4096, 4);
    let (x, taps) = (values(rows * channels, 1), values(width * channels, 2));
    let taps = conv::Taps { channels, width, values: &taps };
    let mut arena = Arena::new(3 * channels * F32).expect("a small arena");
    let mut out = vec![0.0; rows * channels];
    let spans = [span(rows, 0, Form::Chunk, 0, 0)];
    let mut group = group(c, "conv 64x12288x4", Throughput::Elements((rows * channels) as u64));
    let x = Rows::new(&x, channels);
    macro_rules! windows {
        () => {
            conv::Windows {
                spans: Spans::new(&spans, &[], rows, 3 * channels * F32),
                arena: &mut arena,
                at: 0,
            }
        };
    }
    group.bench_function("naive", |b| {
        b.iter(|| {
            conv::naive::conv(x, taps, windows!(), RowsMut::new(black_box(&mut out), channels))
        });
    });
    group.bench_function(cpu.isa.name(), |b| {
        b.iter(|| {
            conv::conv(&cpu, x, taps, windows!(), RowsMut::new(black_box(&mut out), channels))
        });
    });
}

fn delta_rule(c: &mut Criterion) {
    let cpu = cpu();
    let heads = 8;
    let shape = kda::Shape { key_heads: heads, value_heads: heads, key_dim: 128, value_dim: 128 };
    let mut arena = Arena::new(heads * shape.head_state() * F32).expect("a small arena");
    let mut scratch = Scratch::new(1, kda::scratch_len(shape));
    for (name, rows, form) in [("chunk", 512, Form::Chunk), ("step", 1, Form::Step)] {
        let qkv = values(rows * shape.qkv_width(), 1);
        let decay: Vec<f32> = values(rows * heads * 128, 2).iter().map(|x| -x.abs()).collect();
        let beta: Vec<f32> = values(rows * heads, 3).iter().map(|x| x.abs()).collect();
        let inputs = kda::Inputs {
            qkv: Rows::new(&qkv, shape.qkv_width()),
            decay: Rows::new(&decay, heads * 128),
            beta: Rows::new(&beta, heads),
        };
        let spans = [span(rows, 0, form, 0, 0)];
        let mut out = vec![0.0; rows * heads * 128];
        let title = format!("kda {name}, {rows} rows, 8 heads of 128");
        let mut group = group(c, &title, Throughput::Elements((rows * heads) as u64));
        macro_rules! states {
            () => {
                kda::States {
                    spans: Spans::new(&spans, &[], rows, heads * shape.head_state() * F32),
                    arena: &mut arena,
                    at: 0,
                }
            };
        }
        let width = heads * 128;
        group.bench_function("naive", |b| {
            b.iter(|| {
                let out = RowsMut::new(black_box(&mut out), width);
                kda::naive::kda(shape, inputs, states!(), out);
            });
        });
        group.bench_function(cpu.isa.name(), |b| {
            b.iter(|| {
                let out = RowsMut::new(black_box(&mut out), width);
                kda::kda(&cpu, shape, inputs, states!(), &mut scratch, out);
            });
        });
    }
}

const PLACE: KvPlace = KvPlace { at: 0, dtype: KvDtype::F32 };

/// An arena of `len` cached positions of `row` values per position.
fn cached(len: usize, row: usize) -> (Arena, Vec<usize>) {
    let block = BLOCK_LEN * row * F32;
    let tables: Vec<usize> = (0..len.div_ceil(BLOCK_LEN)).map(|i| i * block).collect();
    let mut arena = Arena::new(tables.len() * block).expect("a small arena");
    let filled = arena.f32s_mut(0, tables.len() * block / F32);
    filled.copy_from_slice(&values(tables.len() * block / F32, 9));
    (arena, tables)
}

fn latent_attention(c: &mut Criterion) {
    let cpu = cpu();
    let shape = mla::Shape { heads: 4, nope: 128, rope: 64, value_dim: 128, rank: 512 };
    let (arena, tables) = cached(1024, shape.row());
    let up = values(shape.heads * 256 * shape.rank, 1);
    let up = Matrix::new(shape.heads * 256, shape.rank, Values::F32(&up));
    let packed_up = mla::Up::new(shape, up, None).expect("memory");
    let mut scratch = Scratch::new(1, mla::scratch_len(shape, 64));
    let mut work = mla::Workspace::new(shape, 64);
    for (name, rows, form, absorbed_from) in
        [("expanded", 64, Form::Chunk, 64), ("absorbed", 1, Form::Step, 0)]
    {
        let q = values(rows * shape.heads * shape.query(), 2);
        let inputs = mla::Inputs { q: Rows::new(&q, shape.heads * shape.query()), up };
        let spans = [span(rows, 1024 - rows, form, absorbed_from, tables.len())];
        let paged = Paged {
            spans: Spans::new(&spans, &[], rows, 0),
            tables: &tables,
            arena: &arena,
            place: PLACE,
        };
        let width = shape.heads * shape.value_dim;
        let mut out = vec![0.0; rows * width];
        let title = format!("mla {name}, {rows} rows at 1,024, 4 heads");
        let mut group = group(c, &title, Throughput::Elements(rows as u64));
        group.bench_function("naive", |b| {
            b.iter(|| {
                let out = RowsMut::new(black_box(&mut out), width);
                mla::naive::attend(shape, inputs, paged, out);
            });
        });
        group.bench_function(cpu.isa.name(), |b| {
            b.iter(|| {
                let out = RowsMut::new(black_box(&mut out), width);
                let inputs = mla::Inputs { q: inputs.q, up: &packed_up };
                mla::attend(&cpu, inputs, paged, &mut scratch, &mut work, out);
            });
        });
    }
}

fn grouped_attention(c: &mut Criterion) {
    let cpu = cpu();
    let shape = gqa::Shape { heads: 8, kv_heads: 2, head_dim: 128 };
    let (arena, tables) = cached(1024, 2 * 2 * 128);
    let rows = 64;
    let q = values(rows * 8 * 128, 2);
    let q = Rows::new(&q, 8 * 128);
    let spans = [span(rows, 1024 - rows, Form::Chunk, rows, tables.len())];
    let paged = Paged {
        spans: Spans::new(&spans, &[], rows, 0),
        tables: &tables,
        arena: &arena,
        place: PLACE,
    };
    let mut out = vec![0.0; rows * 8 * 128];
    let mut scratch = Scratch::new(1, gqa::scratch_len(shape));
    let mut work = gqa::Workspace::new(shape, rows);
    let title = "gqa 64 rows at 1,024, 8 heads over 2 of 128";
    let mut group = group(c, title, Throughput::Elements(rows as u64));
    group.bench_function("naive", |b| {
        b.iter(|| gqa::naive::attend(shape, q, paged, RowsMut::new(black_box(&mut out), 8 * 128)));
    });
    group.bench_function(cpu.isa.name(), |b| {
        b.iter(|| {
            let out = RowsMut::new(black_box(&mut out), 8 * 128);
            gqa::attend(&cpu, shape, q, paged, &mut scratch, &mut work, out);
        });
    });
}

fn panels_of_expert(packed: &[PackedMatrix; 3]) -> moe::ExpertWeights<Panels<'_>> {
    let [gate, up, down] = packed.each_ref().map(PackedMatrix::panels);
    moe::ExpertWeights { gate, up, down }
}

fn mixtures(c: &mut Criterion) {
    let cpu = cpu();
    let (rows, hidden, inter, experts, top_k) = (64, 768, 384, 16, 4);
    let router = moe::Router {
        experts,
        top_k,
        score: moe::Score::Sigmoid,
        groups: 1,
        top_groups: 1,
        renormalize: true,
        scale: 2.446,
    };
    let (logits, bias) = (values(rows * experts, 1), values(experts, 2));
    let logits = Rows::new(&logits, experts);
    let mut choices = vec![moe::Choice { expert: 0, weight: 0.0 }; rows * top_k];
    let mut routes = group(c, "moe route 64 rows, 4 of 16", Throughput::Elements(rows as u64));
    routes.bench_function("naive", |b| {
        b.iter(|| moe::naive::route(&router, logits, &bias, black_box(&mut choices)));
    });
    routes.bench_function(cpu.isa.name(), |b| {
        let mut scratch = Scratch::new(1, moe::route_scratch_len(&router));
        b.iter(|| {
            let choices = black_box(&mut choices[..]);
            moe::route(&cpu, &router, logits, &bias, &mut scratch, choices);
        });
    });
    routes.finish();
    let stored: Vec<Vec<f32>> =
        (0..3 * experts).map(|i| values(hidden * inter, i as u64)).collect();
    let matrix = |i: usize, rows, cols| Matrix::new(rows, cols, Values::F32(&stored[i]));
    let weights: Vec<moe::ExpertWeights<Matrix<'_>>> = (0..experts)
        .map(|e| moe::ExpertWeights {
            gate: matrix(3 * e, inter, hidden),
            up: matrix(3 * e + 1, inter, hidden),
            down: matrix(3 * e + 2, hidden, inter),
        })
        .collect();
    let packed = |w: &Matrix<'_>| PackedMatrix::new(*w).expect("memory");
    let in_panels: Vec<[PackedMatrix; 3]> =
        weights.iter().map(|e| [&e.gate, &e.up, &e.down].map(packed)).collect();
    let panels: Vec<_> = in_panels.iter().map(panels_of_expert).collect();
    let x = values(rows * hidden, 3);
    let x = Rows::new(&x, hidden);
    let mut out = vec![0.0; rows * hidden];
    let mut work = moe::Workspace::new(rows, top_k, experts, hidden, inter);
    let flops = Throughput::Elements((rows * top_k * 6 * hidden * inter) as u64);
    let mut products = group(c, "moe experts 64 rows, 4 of 16 x 384", flops);
    products.bench_function("naive", |b| {
        b.iter(|| {
            let out = RowsMut::new(black_box(&mut out), hidden);
            moe::naive::experts(x, &choices, &weights, out);
        });
    });
    products.bench_function(cpu.isa.name(), |b| {
        b.iter(|| {
            let out = RowsMut::new(black_box(&mut out), hidden);
            moe::experts(&cpu, x, &choices, &panels, &mut work, out);
        });
    });
}

/// Kimi-Linear's slot: bytes of it per second, beside a plain copy of as many bytes.
fn slots(c: &mut Criterion) {
    let cpu = cpu();
    let layer = [
        Part::State { heads: 32, value_dim: 128, key_dim: 128 },
        Part::Plain { bytes: 3 * 3 * 4096 * 2 },
    ];
    let row = Part::Plain { bytes: 2304 * 2 };
    let parts: Vec<Part> = layer.repeat(20).into_iter().chain([row]).collect();
    let packing = |dtype| Packing::new(dtype, parts.clone());
    let bytes = packing(PackedDtype::Bf16).slot_bytes();
    let mut slot = Arena::new(bytes).expect("43 MB");
    slot.f32s_mut(0, bytes / F32).copy_from_slice(&values(bytes / F32, 1));
    let mut target = Arena::new(bytes).expect("43 MB");
    let title = format!("slot of {bytes} bytes");
    let mut group = group(c, &title, Throughput::Bytes(bytes as u64));
    group.bench_function("copy", |b| {
        b.iter(|| black_box(&mut target).copy_from(0, &slot, 0, bytes));
    });
    for (name, dtype) in [("bf16", PackedDtype::Bf16), ("int8", PackedDtype::Int8)] {
        let packing = packing(dtype);
        let mut packed = Arena::new(packing.packed_bytes()).expect("half as much");
        group.bench_function(format!("pack {name}, naive"), |b| {
            b.iter(|| pack::naive::pack(&packing, &slot, 0, black_box(&mut packed), 0));
        });
        group.bench_function(format!("pack {name}, {}", cpu.isa.name()), |b| {
            b.iter(|| pack::pack(&cpu, &packing, &slot, 0, black_box(&mut packed), 0));
        });
        group.bench_function(format!("unpack {name}, naive"), |b| {
            b.iter(|| pack::naive::unpack(&packing, &packed, 0, black_box(&mut target), 0));
        });
        group.bench_function(format!("unpack {name}, {}", cpu.isa.name()), |b| {
            b.iter(|| pack::unpack(&cpu, &packing, &packed, 0, black_box(&mut target), 0));
        });
    }
}

criterion_group!(
    benches,
    dispatch,
    gemms,
    quantized_gemms,
    norms_and_activations,
    rotations,
    convolutions,
    delta_rule,
    latent_attention,
    grouped_attention,
    mixtures,
    slots
);
criterion_main!(benches);

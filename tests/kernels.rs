//! Every operator, naive and fast, against the oracle's values, with every instruction set of this
//! processor, one thread and several, and with all buffers poisoned before use.

mod support;

use kernels::attention::write_rows;
use kernels::norm::{GateKind, Scale};
use kernels::rope::{Rope, RopeScaling};
use kernels::{
    Arena, BLOCK_LEN, CELL_LEN, Compute, Cpu, Form, Forms, Isa, KvDtype, KvPlace, Matrix, NO_SLOT,
    NarrowRows, PackedMatrix, Paged, Panels, Quantization, Rows, RowsMut, Scratch, Snapshot, Span,
    Spans, Values, activation, conv, gemm, gqa, kda, mla, moe, norm, quant, rope,
};
use support::{Case, POISON, Random, assert_close, cases, cpus, error};

const F32: usize = size_of::<f32>();

/// Rows of tokens at the start of a block, in each form.
const PLACES: [KvPlace; 2] =
    [KvPlace { at: 0, dtype: KvDtype::F32 }, KvPlace { at: 0, dtype: KvDtype::Bf16 }];

/// How far from the oracle attention over rows in this form may be.
fn oracle_tolerance(place: KvPlace) -> f64 {
    match place.dtype {
        KvDtype::F32 => 1e-5,
        KvDtype::Bf16 => 2e-2,
    }
}

/// An output of `n` values that are not numbers until written.
fn poisoned(n: usize) -> Vec<f32> {
    vec![f32::NAN; n]
}

/// Runs `fast` with every processor setting and `naive` once, each into a fresh poisoned output,
/// and compares all of them with `expected`.
fn check(
    what: &str,
    expected: &[f32],
    tolerance: f64,
    naive: impl FnOnce(&mut [f32]),
    fast: impl Fn(&Cpu, &mut [f32]),
) {
    let mut out = poisoned(expected.len());
    naive(&mut out);
    assert_close(&format!("{what}, naive"), &out, expected, tolerance);
    for cpu in cpus() {
        let mut out = poisoned(expected.len());
        fast(&cpu, &mut out);
        let threads = cpu.gang.threads();
        let what = format!("{what}, {} with {threads} threads", cpu.isa.name());
        assert_close(&what, &out, expected, tolerance);
    }
}

#[test]
fn norms_match_the_oracle() {
    for case in cases("norms") {
        if !case.name.starts_with('D') {
            continue; // activations and block residuals
        }
        let (d, eps) = (case.size("D"), case.number("eps") as f32);
        let (x, w) = (Rows::new(case.values("x"), d), case.values("w"));
        let gate = Rows::new(case.values("gate"), d);
        for (name, scale) in [("rms", Scale::Plain(w)), ("rms_zero_centered", Scale::OnePlus(w))] {
            check(
                &format!("{}/{name}", case.name),
                case.values(name),
                3e-6,
                |out| norm::naive::rms_norm(x, scale, eps, RowsMut::new(out, d)),
                |cpu, out| {
                    norm::rms_norm(cpu, x, scale, eps, RowsMut::new(out, d));
                    let mut in_place = case.values("x").to_vec();
                    norm::rms_norm_in_place(cpu, RowsMut::new(&mut in_place, d), scale, eps);
                    assert_eq!(in_place, out, "where it lies or elsewhere");
                },
            );
        }
        for (name, kind) in [("gated_sigmoid", GateKind::Sigmoid), ("gated_silu", GateKind::Silu)] {
            check(
                &format!("{}/{name}", case.name),
                case.values(name),
                3e-6,
                |out| norm::naive::rms_norm_gated(x, w, eps, gate, kind, RowsMut::new(out, d)),
                |cpu, out| norm::rms_norm_gated(cpu, x, w, eps, gate, kind, RowsMut::new(out, d)),
            );
        }
    }
}

#[test]
fn silu_glu_matches_the_oracle() {
    for case in cases("norms").iter().filter(|case| case.name == "swiglu") {
        let d = case.tensor("gate").shape[1];
        let up = Rows::new(case.values("up"), d);
        check(
            "swiglu",
            case.values("y"),
            3e-6,
            |out| {
                out.copy_from_slice(case.values("gate"));
                activation::naive::silu_mul(RowsMut::new(out, d), up);
            },
            |cpu, out| {
                out.copy_from_slice(case.values("gate"));
                activation::silu_mul(cpu, RowsMut::new(out, d), up);
            },
        );
    }
}

#[test]
fn rope_matches_the_oracle() {
    for case in cases("rope") {
        let about = &case.about["rope"];
        let number = |key: &str| about[key].as_f64().expect("the case names its scaling");
        let scaling = match about["rope_type"].as_str() {
            Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: number("factor") },
            Some("llama3") => RopeScaling::Llama3 {
                factor: number("factor"),
                low_freq_factor: number("low_freq_factor"),
                high_freq_factor: number("high_freq_factor"),
                original_context: number("original_max_position_embeddings"),
            },
            _ => continue, // yarn belongs to a family that is not served yet
        };
        let (head_dim, dim) = (case.size("D"), case.size("rotary_dim"));
        let rope = Rope::new(dim, number("rope_theta"), scaling);
        let frequencies: Vec<f32> = rope.frequencies.iter().map(|f| *f as f32).collect();
        assert_close(&case.name, &frequencies, case.values("inv_freq"), 1e-6);
        let positions: Vec<usize> = case.values("pos").iter().map(|p| *p as usize).collect();
        let mut table = poisoned(positions.len() * dim);
        rope::angles(&rope, &positions, &mut table);
        let (x, angles) = (case.values("x"), Rows::new(&table, dim));
        let width = 2 * head_dim;
        check(
            &case.name,
            case.values("y_neox"),
            2e-6,
            |out| {
                out.copy_from_slice(x);
                rope::naive::rotate(RowsMut::new(out, width), head_dim, angles);
            },
            |cpu, out| {
                out.copy_from_slice(x);
                rope::rotate(cpu, RowsMut::new(out, width), head_dim, angles);
            },
        );
    }
}

#[test]
fn decay_gates_match_the_oracle() {
    for case in cases("kda_gate") {
        let (h, k) = (case.size("H"), case.size("K"));
        let (a_log, bias) = (case.values("A_log"), case.values("dt_bias"));
        let lower = case.number("lower_bound") as f32;
        for (name, kind) in
            [("g_softplus", kda::Gate::Softplus), ("g_lower_bound", kda::Gate::Bounded { lower })]
        {
            check(
                name,
                case.values(name),
                2e-6,
                |out| {
                    out.copy_from_slice(case.values("x"));
                    kda::naive::gate(kind, a_log, bias, RowsMut::new(out, h * k));
                },
                |cpu, out| {
                    out.copy_from_slice(case.values("x"));
                    kda::gate(cpu, kind, a_log, bias, RowsMut::new(out, h * k));
                },
            );
        }
    }
}

/// Spans of sequences that follow each other, sequence `i` reading and writing slot `i`, of
/// `slot_bytes`; `from_zero` reads no slot.
fn ragged(lens: &[usize], form: Form, slot_bytes: usize, from_zero: bool) -> Vec<Span> {
    let mut first_row = 0;
    let span = |(i, rows): (usize, &usize)| {
        let span = Span {
            first_row,
            rows: *rows,
            start: 0,
            form,
            absorbed_from: 0,
            read: if from_zero { NO_SLOT } else { i * slot_bytes },
            write: i * slot_bytes,
            table: 0..0,
            snapshots: 0..0,
        };
        first_row += rows;
        span
    };
    lens.iter().enumerate().map(span).collect()
}

fn lens(case: &Case, rows: usize) -> Vec<usize> {
    match case.about["lens"].as_array() {
        Some(lens) => lens.iter().map(|n| n.as_u64().expect("a length") as usize).collect(),
        None => vec![rows],
    }
}

/// `[rows][cols]` to `[cols][rows]`.
fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

#[test]
fn short_convolutions_match_the_oracle() {
    for case in cases("short_conv") {
        let (rows, d, w) = (case.size("T"), case.size("D"), case.size("W"));
        let lens = lens(&case, rows);
        let values = transposed(case.values("w"), d, w);
        let taps = conv::Taps { channels: d, width: w, values: &values };
        let x = Rows::new(case.values("x"), d);
        let window = (w - 1) * d;
        for kind in ["zero", "init"] {
            if !case.has(&format!("y_{kind}")) {
                continue;
            }
            let spans = ragged(&lens, Form::Chunk, window * F32, kind == "zero");
            let mut arena = Arena::new(lens.len() * window * F32).expect("a small arena");
            let run = |arena: &mut Arena, body: &mut dyn FnMut(conv::Windows<'_>)| {
                for (i, state) in case.values("state_in").chunks_exact(window).enumerate() {
                    let slot = arena.f32s_mut(i * window * F32, window);
                    slot.copy_from_slice(&transposed(state, d, w - 1));
                }
                let spans = Spans::new(&spans, &[], rows, window * F32);
                body(conv::Windows { spans, arena, at: 0 });
                let expected = case.values(&format!("state_{kind}"));
                for (i, state) in expected.chunks_exact(window).enumerate() {
                    let slot = arena.f32s(i * window * F32, window);
                    assert_eq!(slot, transposed(state, d, w - 1), "{} window", case.name);
                }
            };
            let arena = std::cell::RefCell::new(&mut arena);
            check(
                &format!("{}/{kind}", case.name),
                case.values(&format!("y_{kind}")),
                2e-6,
                |out| {
                    run(&mut arena.borrow_mut(), &mut |windows| {
                        conv::naive::conv(x, taps, windows, RowsMut::new(out, d));
                    });
                },
                |cpu, out| {
                    run(&mut arena.borrow_mut(), &mut |windows| {
                        conv::conv(cpu, x, taps, windows, RowsMut::new(out, d));
                    });
                },
            );
        }
    }
}

/// The rows of a KDA or GDN case, with queries, keys and values side by side.
struct Delta {
    shape: kda::Shape,
    qkv: Vec<f32>,
    lens: Vec<usize>,
}

impl Delta {
    fn new(case: &Case) -> Delta {
        let (k, v) = (&case.tensor("k").shape, &case.tensor("v").shape);
        let shape =
            kda::Shape { key_heads: k[1], value_heads: v[1], key_dim: k[2], value_dim: v[2] };
        let mut qkv = Vec::new();
        for t in 0..k[0] {
            for name in ["q", "k", "v"] {
                let values = case.values(name);
                let width = values.len() / k[0];
                qkv.extend_from_slice(&values[t * width..(t + 1) * width]);
            }
        }
        Delta { shape, qkv, lens: lens(case, k[0]) }
    }

    fn inputs<'a>(&'a self, case: &'a Case) -> kda::Inputs<'a> {
        let rows = case.tensor("q").shape[0];
        kda::Inputs {
            qkv: Rows::new(&self.qkv, self.shape.qkv_width()),
            decay: Rows::new(case.values("g"), case.values("g").len() / rows),
            beta: Rows::new(case.values("beta"), self.shape.value_heads),
        }
    }

    /// The oracle's `[K][V]` states of all sequences as `[V][K]`.
    fn states(&self, values: &[f32]) -> Vec<f32> {
        let (k, v) = (self.shape.key_dim, self.shape.value_dim);
        values.chunks_exact(k * v).flat_map(|s| transposed(s, k, v)).collect()
    }
}

fn delta_rule_matches_the_oracle(op: &str) {
    for case in cases(op) {
        let delta = Delta::new(&case);
        let shape = delta.shape;
        let slot = shape.value_heads * shape.head_state();
        let initial = delta.states(case.values("S0"));
        for kind in ["zero", "init"] {
            if !case.has(&format!("o_{kind}")) {
                continue;
            }
            let end = delta.states(case.values(&format!("S_{kind}")));
            for form in [Form::Chunk, Form::Step] {
                let what = format!("{op} {}/{kind}, {form:?}", case.name);
                let spans = ragged(&delta.lens, form, slot * F32, kind == "zero");
                let run = |body: &mut dyn FnMut(kda::States<'_>)| {
                    let mut arena = Arena::new(initial.len() * F32).expect("a small arena");
                    arena.f32s_mut(0, initial.len()).copy_from_slice(&initial);
                    let rows = delta.lens.iter().sum();
                    let spans = Spans::new(&spans, &[], rows, slot * F32);
                    body(kda::States { spans, arena: &mut arena, at: 0 });
                    let state = arena.f32s(0, end.len());
                    assert_close(&format!("{what}, state"), state, &end, 1e-5);
                };
                let width = shape.value_heads * shape.value_dim;
                check(
                    &what,
                    case.values(&format!("o_{kind}")),
                    1e-5,
                    |out| {
                        run(&mut |states| {
                            let inputs = delta.inputs(&case);
                            kda::naive::kda(shape, inputs, states, RowsMut::new(out, width));
                        });
                    },
                    |cpu, out| {
                        run(&mut |states| {
                            let len = kda::scratch_len(shape);
                            let mut scratch = Scratch::new(cpu.gang.threads(), len);
                            scratch.fill(f32::NAN);
                            let (inputs, out) = (delta.inputs(&case), RowsMut::new(out, width));
                            kda::kda(cpu, shape, inputs, states, &mut scratch, out);
                        });
                    },
                );
            }
        }
    }
}

#[test]
fn kda_matches_the_oracle() {
    delta_rule_matches_the_oracle("kda");
}

#[test]
fn gated_delta_net_matches_the_oracle() {
    delta_rule_matches_the_oracle("gdn");
}

/// A sequence of `len` cached positions in blocks that lie in the arena in reverse, so that a
/// table is needed to find them.
fn reversed_table(len: usize, block_bytes: usize) -> Vec<usize> {
    let blocks = len.div_ceil(BLOCK_LEN);
    (0..blocks).map(|i| (blocks - 1 - i) * block_bytes).collect()
}

/// An arena of poison.
fn poisoned_arena(bytes: usize) -> Arena {
    let mut arena = Arena::new(bytes).expect("a small arena");
    arena.f32s_mut(0, bytes / F32).fill(POISON);
    arena
}

#[test]
fn mla_matches_the_oracle_in_both_forms() {
    for case in cases("mla") {
        let [t, s] = ["T", "S"].map(|k| case.size(k));
        let shape = mla::Shape {
            heads: case.size("H"),
            nope: case.size("nope"),
            rope: case.size("rope"),
            value_dim: case.size("v"),
            rank: case.size("rank"),
        };
        let join = |a: &str, b: &str, rows: usize| -> Vec<f32> {
            let (a, b) = (case.values(a), case.values(b));
            let (na, nb) = (a.len() / rows, b.len() / rows);
            let row = |i| [&a[i * na..(i + 1) * na], &b[i * nb..(i + 1) * nb]].concat();
            (0..rows).flat_map(row).collect()
        };
        let q = join("q_nope", "q_pe", t * shape.heads);
        let latents = join("c_kv", "k_pe", s);
        for place in PLACES {
            let block_bytes = BLOCK_LEN * shape.row() * place.dtype.bytes();
            let tables = reversed_table(s, block_bytes);
            let mut arena = poisoned_arena(tables.len() * block_bytes);
            let table = 0..tables.len();
            let mut span = ragged(&[s], Form::Chunk, 0, true).remove(0);
            span.table = table.clone();
            let all = Rows::new(&latents, shape.row());
            mla::write(shape, (std::slice::from_ref(&span), &tables), all, &mut arena, place);
            let up = case.values("kv_b_proj");
            let up = Matrix::new(up.len() / shape.rank, shape.rank, Values::F32(up));
            let packed_up = mla::Up::new(shape, up, None).expect("memory");
            let inputs = mla::Inputs { q: Rows::new(&q, shape.heads * shape.query()), up };
            let width = shape.heads * shape.value_dim;
            for absorbed_from in [0, t / 2, t] {
                let span = Span {
                    rows: t,
                    start: s - t,
                    absorbed_from,
                    table: table.clone(),
                    ..span.clone()
                };
                let spans = [span];
                let spans = Spans::new(&spans, &[], t, 0);
                let paged = Paged { spans, tables: &tables, arena: &arena, place };
                check(
                    &format!("mla {}, absorbed from {absorbed_from} of {t}, {place:?}", case.name),
                    case.values("o"),
                    oracle_tolerance(place),
                    |out| mla::naive::attend(shape, inputs, paged, RowsMut::new(out, width)),
                    |cpu, out| {
                        let inputs = mla::Inputs { q: inputs.q, up: &packed_up };
                        out.copy_from_slice(&attended_mla(cpu, shape, inputs, paged));
                    },
                );
            }
        }
    }
}

#[test]
fn paged_gqa_matches_the_oracle() {
    for case in cases("gqa_paged") {
        let [heads, kv_heads, head_dim] = ["Hq", "Hk", "D"].map(|k| case.size(k));
        let shape = gqa::Shape { heads, kv_heads, head_dim };
        let old_block = case.size("block_size");
        let old_tables = case.tensor("block_tables");
        for place in PLACES {
            let block_bytes = 2 * kv_heads * BLOCK_LEN * head_dim * place.dtype.bytes();
            let kv_lens: Vec<usize> = case.values("kv_lens").iter().map(|x| *x as usize).collect();
            let q_lens: Vec<usize> = case.values("q_lens").iter().map(|x| *x as usize).collect();
            let mut tables: Vec<usize> = Vec::new();
            let mut spans = Vec::new();
            let mut first_row = 0;
            for (rows, len) in q_lens.iter().zip(&kv_lens) {
                let own = reversed_table(*len, block_bytes);
                let base = tables.len() * block_bytes;
                let table = tables.len()..tables.len() + own.len();
                tables.extend(own.iter().map(|offset| base + offset));
                let span = ragged(&[*rows], Form::Step, 0, true).remove(0);
                spans.push(Span { first_row, start: len - rows, table, ..span });
                first_row += rows;
            }
            let mut arena = poisoned_arena(tables.len() * block_bytes);
            for (i, span) in spans.iter().enumerate() {
                let per_row = kv_heads * head_dim;
                let gather = |cache: &str| -> Vec<f32> {
                    let row = |t: usize| {
                        let width = old_tables.shape[1];
                        let block = old_tables.values[i * width + t / old_block] as usize;
                        let at = (block * old_block + t % old_block) * per_row;
                        case.values(cache)[at..at + per_row].to_vec()
                    };
                    (0..kv_lens[i]).flat_map(row).collect()
                };
                let (keys, values) = (gather("k_cache"), gather("v_cache"));
                let whole = Span { first_row: 0, rows: kv_lens[i], start: 0, ..span.clone() };
                let at = (std::slice::from_ref(&whole), &tables[..]);
                let rows = |x| Rows::new(x, per_row);
                gqa::write(shape, at, rows(&keys), rows(&values), &mut arena, place);
            }
            let q = Rows::new(case.values("q"), heads * head_dim);
            let spans = Spans::new(&spans, &[], q.count(), 0);
            let paged = Paged { spans, tables: &tables, arena: &arena, place };
            let width = heads * head_dim;
            check(
                &format!("gqa {}, {place:?}", case.name),
                case.values("o"),
                oracle_tolerance(place),
                |out| gqa::naive::attend(shape, q, paged, RowsMut::new(out, width)),
                |cpu, out| {
                    out.copy_from_slice(&attended_gqa(cpu, shape, q, paged));
                },
            );
        }
    }
}

#[test]
fn expert_routing_matches_the_oracle() {
    for case in cases("moe_routing") {
        let sigmoid = case.about["score"] == "sigmoid";
        let router = moe::Router {
            experts: case.size("E"),
            top_k: case.size("topk"),
            score: if sigmoid { moe::Score::Sigmoid } else { moe::Score::Softmax },
            groups: if sigmoid { case.size("n_group") } else { 1 },
            top_groups: if sigmoid { case.size("topk_group") } else { 1 },
            renormalize: case.about["norm_topk_prob"] == true,
            scale: if sigmoid { case.number("routed_scaling_factor") as f32 } else { 1.0 },
        };
        let x = Rows::new(case.values("x"), 32);
        let w = Matrix::new(router.experts, 32, Values::F32(case.values("w")));
        let bias = if sigmoid { case.values("bias") } else { &[] };
        let nobody = moe::Choice { expert: u32::MAX, weight: f32::NAN };
        let dense = |choices: &[moe::Choice], out: &mut [f32]| {
            out.fill(0.0);
            for (i, row) in choices.chunks_exact(router.top_k).enumerate() {
                assert!(row.is_sorted_by_key(|c| c.expert));
                row.iter().for_each(|c| out[i * router.experts + c.expert as usize] = c.weight);
            }
        };
        check(
            &format!("routing {}", case.name),
            case.values("dense"),
            1e-5,
            |out| {
                let mut logits = poisoned(x.count() * router.experts);
                gemm::naive::gemm(x, w, RowsMut::new(&mut logits, router.experts));
                let mut choices = vec![nobody; x.count() * router.top_k];
                let logits = Rows::new(&logits, router.experts);
                moe::naive::route(&router, logits, bias, &mut choices);
                dense(&choices, out);
            },
            |cpu, out| {
                let mut logits = poisoned(x.count() * router.experts);
                let packed = packed(w);
                let product = RowsMut::new(&mut logits, router.experts);
                gemm::gemm(cpu, x, packed.panels(), &mut NarrowRows::default(), product);
                let mut choices = vec![nobody; x.count() * router.top_k];
                let logits = Rows::new(&logits, router.experts);
                let mut scratch = Scratch::new(cpu.gang.threads(), moe::route_scratch_len(&router));
                scratch.fill(f32::NAN);
                moe::route(cpu, &router, logits, bias, &mut scratch, &mut choices);
                dense(&choices, out);
            },
        );
    }
}

#[test]
fn equal_scores_go_to_the_lower_expert() {
    let router = moe::Router {
        experts: 6,
        top_k: 3,
        score: moe::Score::Softmax,
        groups: 1,
        top_groups: 1,
        renormalize: true,
        scale: 1.0,
    };
    let logits = [1.0, 2.0, 1.0, 1.0, 2.0, 1.0];
    let nobody = moe::Choice { expert: u32::MAX, weight: 0.0 };
    for cpu in cpus() {
        let (mut fast, mut naive) = (vec![nobody; 3], vec![nobody; 3]);
        let mut scratch = Scratch::new(cpu.gang.threads(), moe::route_scratch_len(&router));
        moe::route(&cpu, &router, Rows::new(&logits, 6), &[], &mut scratch, &mut fast);
        moe::naive::route(&router, Rows::new(&logits, 6), &[], &mut naive);
        for choices in [fast, naive] {
            assert_eq!(choices.iter().map(|c| c.expert).collect::<Vec<_>>(), [0, 1, 4]);
        }
    }
}

/// Values that every storage type holds exactly, so that one result is right for all three.
fn exact_values(random: &mut Random, n: usize) -> Vec<f32> {
    (0..n).map(|_| (random.below(255) as f32 - 127.0) / 64.0).collect()
}

/// A matrix in each storage type.
struct Stored {
    f32s: Vec<f32>,
    bf16s: Vec<half::bf16>,
    f16s: Vec<half::f16>,
}

impl Stored {
    fn new(values: Vec<f32>) -> Stored {
        Stored {
            bf16s: values.iter().map(|x| half::bf16::from_f32(*x)).collect(),
            f16s: values.iter().map(|x| half::f16::from_f32(*x)).collect(),
            f32s: values,
        }
    }

    fn all(&self, rows: usize, cols: usize) -> [Matrix<'_>; 3] {
        let stored = [Values::F32(&self.f32s), Values::Bf16(&self.bf16s), Values::F16(&self.f16s)];
        stored.map(|values| Matrix::new(rows, cols, values))
    }
}

/// A copy of a matrix in panels.
fn packed(matrix: Matrix<'_>) -> PackedMatrix {
    PackedMatrix::new(matrix).expect("memory")
}

/// `out` is `rows` times `w`: added to `start` it is their sum, and each row alone gives the same.
fn check_added_and_alone(
    what: &str,
    cpu: &Cpu,
    (rows, w): (Rows<'_>, Panels<'_>),
    work: &mut NarrowRows,
    start: &[f32],
    out: &[f32],
) {
    let n = w.rows();
    let mut sum = start.to_vec();
    gemm::gemm_add(cpu, rows, w, work, RowsMut::new(&mut sum, n));
    let added: Vec<f32> = start.iter().zip(out).map(|(a, b)| a + b).collect();
    assert_eq!(sum, added, "{what}, added");
    for (i, expected) in out.chunks_exact(n).enumerate() {
        let mut alone = poisoned(n);
        let row = Rows::new(rows.row(i), rows.width());
        gemm::gemm(cpu, row, w, work, RowsMut::new(&mut alone, n));
        assert_eq!(alone, expected, "{what}, row {i} alone");
    }
}

/// Ragged sizes around every tile and panel, every storage type; a row's bits do not depend on its
/// company.
#[test]
fn products_match_their_definition_and_rows_keep_their_bits() {
    let mut random = Random::new(7);
    // The last ones go over their inputs in blocks.
    for (m, n, k) in [
        (1, 1, 1),
        (1, 7, 5),
        (2, 9, 17),
        (3, 24, 16),
        (5, 33, 50),
        (13, 97, 131),
        (70, 40, 301),
        (9, 20, 513),
        (31, 40, 1_301),
        (70, 24, 2_051),
    ] {
        let x = random.normals(m * k);
        let w = Stored::new(exact_values(&mut random, n * k));
        let start = random.normals(m * n);
        let mut expected = poisoned(m * n);
        let rows = Rows::new(&x, k);
        gemm::naive::gemm(rows, w.all(n, k)[0], RowsMut::new(&mut expected, n));
        for cpu in cpus() {
            for w in w.all(n, k).map(packed) {
                let w = w.panels();
                let what = format!("{m}x{n}x{k} {} {:?}", cpu.isa.name(), cpu.gang);
                let mut out = poisoned(m * n);
                let work = &mut NarrowRows::default();
                gemm::gemm(&cpu, rows, w, work, RowsMut::new(&mut out, n));
                assert_close(&what, &out, &expected, 1e-5);
                check_added_and_alone(&what, &cpu, (rows, w), work, &start, &out);
            }
        }
    }
}

/// Of every form in one call, two matrices beside each other, columns of wider rows.
#[test]
fn products_of_the_same_rows_have_the_bits_of_each_alone() {
    let mut random = Random::new(73);
    for (m, k) in [(1, 40), (7, 40), (12, 600)] {
        let x = random.normals(m * k);
        let x = Rows::new(&x, k);
        let sizes = [33, 16, 7, 40];
        let weights = sizes.map(|n| exact_values(&mut random, n * k));
        let halves: Vec<half::bf16> = weights[3].iter().map(|w| half::bf16::from_f32(*w)).collect();
        let of = |i: usize| Matrix::new(sizes[i], k, Values::F32(&weights[i]));
        let bf16 = Matrix::new(sizes[3], k, Values::Bf16(&halves));
        let matrices =
            [packed(of(0)), packed(of(1)), quantized(of(2), Quantization::Q8), packed(bf16)];
        for compute in [Compute::F32, Compute::Bf16] {
            for mut cpu in cpus() {
                cpu.compute = compute;
                let w = matrices.each_ref().map(PackedMatrix::panels);
                let work = &mut NarrowRows::default();
                let expected = w.map(|w| {
                    let mut out = poisoned(m * w.rows());
                    gemm::gemm(&cpu, x, w, work, RowsMut::new(&mut out, w.rows()));
                    out
                });
                let (mut beside, mut wide) = (poisoned(m * 49), poisoned(m * 60));
                let products = [
                    gemm::Product { w: &w[..2], out: RowsMut::new(&mut beside, 49) },
                    gemm::Product { w: &w[2..], out: RowsMut::new(&mut wide, 60).columns(5, 47) },
                ];
                gemm::gemm_each(&cpu, x, products, work);
                for row in 0..m {
                    let alone = |i: usize| &expected[i][row * sizes[i]..][..sizes[i]];
                    let what = format!("{m}x{k}, row {row}, {} {compute:?}", cpu.isa.name());
                    assert_eq!(beside[row * 49..][..49], [alone(0), alone(1)].concat(), "{what}");
                    let wide = &wide[row * 60..][..60];
                    assert_eq!(wide[5..52], [alone(2), alone(3)].concat(), "{what}");
                    let outside = wide[..5].iter().chain(&wide[52..]);
                    assert!(outside.into_iter().all(|x| x.is_nan()), "{what}: and no more");
                }
            }
        }
    }
}

/// Of bf16 weights multiplied as such, with rows of an odd width and one that is not a number.
#[test]
fn bf16_products_match_their_definition_and_rows_keep_their_bits() {
    let mut random = Random::new(71);
    for (m, n, k) in
        [(1, 1, 1), (1, 70, 5), (2, 40, 17), (3, 24, 16), (6, 33, 50), (13, 97, 131), (70, 40, 301)]
    {
        let x = random.normals(m * k);
        let w = Stored::new(exact_values(&mut random, n * k));
        let matrix = Matrix::new(n, k, Values::Bf16(&w.bf16s));
        let start = random.normals(m * n);
        let (mut expected, mut exact) = (poisoned(m * n), poisoned(m * n));
        let rows = Rows::new(&x, k);
        gemm::naive::gemm_bf16(rows, matrix, RowsMut::new(&mut expected, n));
        gemm::naive::gemm(rows, matrix, RowsMut::new(&mut exact, n));
        assert!(error(&exact, &expected) > 1e-5, "{m}x{n}x{k}: rounding shows");
        for mut cpu in cpus() {
            cpu.compute = Compute::Bf16;
            let packed = packed(matrix);
            let w = packed.panels();
            let what = format!("{m}x{n}x{k} {} {:?}", cpu.isa.name(), cpu.gang);
            let work = &mut NarrowRows::new(Forms { bf16: true, int8: false }, m, k);
            work.poison();
            let mut out = poisoned(m * n);
            gemm::gemm(&cpu, rows, w, work, RowsMut::new(&mut out, n));
            assert_close(&what, &out, &expected, 1e-5);
            check_added_and_alone(&what, &cpu, (rows, w), work, &start, &out);
            let mut broken = x.clone();
            broken[(m - 1) * k] = f32::NAN;
            let rows = Rows::new(&broken, k);
            gemm::gemm(&cpu, rows, w, work, RowsMut::new(&mut out, n));
            assert!(out[(m - 1) * n..].iter().all(|y| y.is_nan()), "{what}: a broken row is told");
            assert!(out[..(m - 1) * n].iter().all(|y| y.is_finite()), "{what}: and no other");
        }
    }
}

const QUANTIZATIONS: [Quantization; 2] = [Quantization::Q8, Quantization::Q4];

fn quantized(matrix: Matrix<'_>, quantization: Quantization) -> PackedMatrix {
    PackedMatrix::quantized(matrix, quantization).expect("memory")
}

/// Groups that need care among ordinary ones: zeros, values at the largest, one large value among
/// small ones, and values too small for a scale.
fn uneven(random: &mut Random, n: usize) -> Vec<f32> {
    let mut values = random.normals(n);
    for (i, group) in values.chunks_mut(32).enumerate() {
        match i % 7 {
            1 => group.fill(0.0),
            2 => group.iter_mut().for_each(|x| *x = 3.0f32.copysign(*x)),
            3 => group[i % group.len()] = 1e4,
            4 => group.iter_mut().for_each(|x| *x *= 1e-38),
            _ => {}
        }
    }
    values
}

/// Sums of quantised products are exact within a group and added in one order: the bits of the
/// definition, in every set, for all ragged sizes, alone or in company, whatever lay in the working
/// memory.
#[test]
fn quantised_products_have_the_bits_of_their_definition() {
    let mut random = Random::new(23);
    let sizes = [1, 2, 3, 4, 5, 7, 8, 9, 30, 31, 70].map(|m| {
        let (n, k) = (1 + random.below(40), 1 + random.below(200));
        (m, n, k)
    });
    let fixed = [(1, 1, 1), (3, 16, 32), (4, 17, 33), (2, 40, 31), (1, 100, 96), (70, 40, 301)];
    for (m, n, k) in sizes.into_iter().chain(fixed) {
        let x = uneven(&mut random, m * k);
        let w = Stored::new(exact_values(&mut random, n * k));
        let rough = uneven(&mut random, n * k);
        let rough = Matrix::new(n, k, Values::F32(&rough));
        let start = random.normals(m * n);
        let rows = Rows::new(&x, k);
        for quantization in QUANTIZATIONS {
            let exact = w.all(n, k);
            for (i, matrix) in exact.into_iter().chain([rough]).enumerate() {
                let mut expected = poisoned(m * n);
                let naive = RowsMut::new(&mut expected, n);
                quant::naive::gemm(quantization, rows, matrix, naive);
                let packed = quantized(matrix, quantization);
                for cpu in cpus() {
                    let isa = cpu.isa.name();
                    let what = format!("{m}x{n}x{k} {quantization:?} {i} {isa} {:?}", cpu.gang);
                    let mut work = NarrowRows::new(Forms { int8: true, bf16: false }, m, k);
                    work.poison();
                    let (w, mut out) = (packed.panels(), poisoned(m * n));
                    gemm::gemm(&cpu, rows, w, &mut work, RowsMut::new(&mut out, n));
                    assert_eq!(out, expected, "{what}");
                    check_added_and_alone(&what, &cpu, (rows, w), &mut work, &start, &out);
                }
            }
        }
    }
}

/// A weight comes back within half a step of its group's scale, and the panels hold what they say.
#[test]
fn quantised_weights_are_near_those_they_were() {
    let mut random = Random::new(31);
    for (n, k) in [(1, 1), (15, 31), (17, 33), (40, 100)] {
        let values = random.normals(n * k);
        let matrix = Matrix::new(n, k, Values::F32(&values));
        for (quantization, steps) in [(Quantization::Q8, 127.0), (Quantization::Q4, 7.0)] {
            let packed = quantized(matrix, quantization);
            let panels = packed.panels();
            assert_eq!(panels.bytes(), quantization.bytes(n, k));
            for row in 0..n {
                let (mut exact, mut found) = (vec![0.0; k], poisoned(k));
                matrix.copy_row(row, &mut exact);
                panels.copy_row(row, &mut found);
                for (exact, found) in exact.chunks(32).zip(found.chunks(32)) {
                    let most = exact.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    // Half a step, and what rounding the scale to f16 adds; the largest of the
                    // values on the side of seven may be a whole step off.
                    let within = if quantization == Quantization::Q4 { 1.01 } else { 0.57 };
                    for (exact, found) in exact.iter().zip(found) {
                        let error = (exact - found).abs() * steps / most;
                        assert!(error <= within, "{exact} became {found}: {error} steps");
                    }
                }
            }
        }
    }
}

/// A row that is broken stays so: its request must fail instead of going on with another text.
#[test]
fn a_broken_row_gives_no_numbers_and_leaves_others_alone() {
    let mut random = Random::new(37);
    let (m, n, k) = (3, 20, 70);
    let w = random.normals(n * k);
    let matrix = Matrix::new(n, k, Values::F32(&w));
    for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = random.normals(m * k);
        x[k + 65] = broken;
        for quantization in QUANTIZATIONS {
            let packed = quantized(matrix, quantization);
            let mut naive = poisoned(m * n);
            let rows = Rows::new(&x, k);
            quant::naive::gemm(quantization, rows, matrix, RowsMut::new(&mut naive, n));
            for cpu in cpus() {
                let mut out = poisoned(m * n);
                let work = &mut NarrowRows::default();
                gemm::gemm(&cpu, rows, packed.panels(), work, RowsMut::new(&mut out, n));
                for (i, (out, naive)) in out.iter().zip(&naive).enumerate() {
                    assert_eq!(out.is_nan(), i / n == 1, "{broken} output {i}");
                    assert!(out.is_nan() && naive.is_nan() || out == naive);
                }
            }
        }
    }
}

/// The definition of quantised experts: each product by the one of single products.
fn quantised_experts(
    quantization: Quantization,
    x: Rows<'_>,
    choices: &[moe::Choice],
    weights: &[moe::ExpertWeights<Matrix<'_>>],
) -> Vec<f32> {
    let product = |x: &[f32], w: Matrix<'_>| {
        let mut out = poisoned(w.rows);
        let rows = RowsMut::new(&mut out, w.rows);
        quant::naive::gemm(quantization, Rows::new(x, w.cols), w, rows);
        out
    };
    let top_k = choices.len() / x.count();
    let mut all = Vec::new();
    for (i, choices) in choices.chunks_exact(top_k).enumerate() {
        let mut sum = vec![0.0; x.width()];
        for choice in choices {
            let expert = &weights[choice.expert as usize];
            let mut gate = product(x.row(i), expert.gate);
            let (up, inter) = (product(x.row(i), expert.up), gate.len());
            activation::naive::silu_mul(RowsMut::new(&mut gate, inter), Rows::new(&up, inter));
            let y = product(&gate, expert.down);
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += choice.weight * y);
        }
        all.extend(sum);
    }
    all
}

/// Widths that no tile and no group divides, and tokens that share experts. The activation between
/// the products is not bit-equal to its definition, so a value may be rounded to its neighbour.
#[test]
fn quantised_experts_match_their_definition_and_rows_keep_their_bits() {
    let mut random = Random::new(41);
    let (tokens, hidden, inter, count, top_k) = (23, 50, 137, 7, 3);
    let values: Vec<[Vec<f32>; 3]> =
        (0..count).map(|_| [(); 3].map(|()| random.normals(inter * hidden))).collect();
    let x = random.normals(tokens * hidden);
    let mut choices = Vec::new();
    for _ in 0..tokens {
        let first = random.below(count - top_k) as u32;
        for i in 0..top_k as u32 {
            choices.push(moe::Choice { expert: first + i, weight: random.normal() });
        }
    }
    let matrices: Vec<moe::ExpertWeights<Matrix<'_>>> = values
        .iter()
        .map(|[gate, up, down]| moe::ExpertWeights {
            gate: Matrix::new(inter, hidden, Values::F32(gate)),
            up: Matrix::new(inter, hidden, Values::F32(up)),
            down: Matrix::new(hidden, inter, Values::F32(down)),
        })
        .collect();
    let rows = Rows::new(&x, hidden);
    for quantization in QUANTIZATIONS {
        let packed = |w| quantized(w, quantization);
        let in_panels: Vec<[PackedMatrix; 3]> =
            matrices.iter().map(|e| [e.gate, e.up, e.down].map(packed)).collect();
        let fast: Vec<_> = in_panels.iter().map(panels_of_expert).collect();
        let expected = quantised_experts(quantization, rows, &choices, &matrices);
        for cpu in cpus() {
            let work = moe::Workspace::new(tokens, top_k, count, hidden, inter);
            let mut work = work.narrowed(Forms { int8: true, bf16: false }, hidden, inter);
            work.fill(f32::NAN);
            let mut out = poisoned(tokens * hidden);
            moe::experts(&cpu, rows, &choices, &fast, &mut work, RowsMut::new(&mut out, hidden));
            assert_close(&format!("experts {}", cpu.isa.name()), &out, &expected, 3e-3);
            for i in 0..tokens {
                let mut alone = poisoned(hidden);
                let row = Rows::new(&x[i * hidden..(i + 1) * hidden], hidden);
                let own = &choices[i * top_k..(i + 1) * top_k];
                moe::experts(&cpu, row, own, &fast, &mut work, RowsMut::new(&mut alone, hidden));
                assert_eq!(alone, out[i * hidden..(i + 1) * hidden], "token {i} alone");
            }
        }
    }
}

fn panels_of_expert(packed: &[PackedMatrix; 3]) -> moe::ExpertWeights<Panels<'_>> {
    let [gate, up, down] = packed.each_ref().map(PackedMatrix::panels);
    moe::ExpertWeights { gate, up, down }
}

#[test]
fn expert_products_match_their_definition_and_rows_keep_their_bits() {
    let mut random = Random::new(11);
    let (tokens, hidden, inter, count, top_k) = (23, 50, 37, 7, 3);
    let weights: Vec<[Stored; 3]> = (0..count)
        .map(|_| [(); 3].map(|()| Stored::new(exact_values(&mut random, inter * hidden))))
        .collect();
    let x = random.normals(tokens * hidden);
    let mut choices = Vec::new();
    for _ in 0..tokens {
        let first = random.below(count - top_k) as u32;
        for i in 0..top_k as u32 {
            choices.push(moe::Choice { expert: first + i, weight: random.normal() });
        }
    }
    for dtype in 0..3 {
        let experts: Vec<moe::ExpertWeights<Matrix<'_>>> = weights
            .iter()
            .map(|[gate, up, down]| moe::ExpertWeights {
                gate: gate.all(inter, hidden)[dtype],
                up: up.all(inter, hidden)[dtype],
                down: down.all(hidden, inter)[dtype],
            })
            .collect();
        let in_panels: Vec<[PackedMatrix; 3]> =
            experts.iter().map(|e| [e.gate, e.up, e.down].map(packed)).collect();
        let fast: Vec<_> = in_panels.iter().map(panels_of_expert).collect();
        let rows = Rows::new(&x, hidden);
        let mut expected = poisoned(tokens * hidden);
        moe::naive::experts(rows, &choices, &experts, RowsMut::new(&mut expected, hidden));
        for cpu in cpus() {
            let mut work = moe::Workspace::new(tokens, top_k, count, hidden, inter);
            work.fill(f32::NAN);
            let mut out = poisoned(tokens * hidden);
            moe::experts(&cpu, rows, &choices, &fast, &mut work, RowsMut::new(&mut out, hidden));
            assert_close(&format!("experts {}", cpu.isa.name()), &out, &expected, 1e-5);
            for i in 0..tokens {
                let mut alone = poisoned(hidden);
                let row = Rows::new(&x[i * hidden..(i + 1) * hidden], hidden);
                let own = &choices[i * top_k..(i + 1) * top_k];
                moe::experts(&cpu, row, own, &fast, &mut work, RowsMut::new(&mut alone, hidden));
                assert_eq!(alone, out[i * hidden..(i + 1) * hidden], "token {i} alone");
            }
        }
    }
}

/// Experts of bf16 weights that are multiplied as such, wider than a task's columns and of odd
/// width: near the definition by what rounding takes, and a token's bits are its own.
#[test]
fn bf16_experts_stay_near_their_definition_and_rows_keep_their_bits() {
    let mut random = Random::new(61);
    let (tokens, hidden, inter, count, top_k) = (23, 51, 137, 5, 2);
    let weights: Vec<[Stored; 3]> = (0..count)
        .map(|_| [(); 3].map(|()| Stored::new(exact_values(&mut random, inter * hidden))))
        .collect();
    let x = random.normals(tokens * hidden);
    let rows = Rows::new(&x, hidden);
    let choices: Vec<moe::Choice> = (0..tokens)
        .flat_map(|i| [i % (count - 1), i % (count - 1) + 1])
        .map(|expert| moe::Choice { expert: expert as u32, weight: 0.5 })
        .collect();
    // The last expert's weights may be of another type: then all stay f32.
    for last in [1, 0] {
        let dtype = |e: usize| if e + 1 == count { last } else { 1 };
        let experts: Vec<moe::ExpertWeights<Matrix<'_>>> = weights
            .iter()
            .enumerate()
            .map(|(e, [gate, up, down])| moe::ExpertWeights {
                gate: gate.all(inter, hidden)[dtype(e)],
                up: up.all(inter, hidden)[dtype(e)],
                down: down.all(hidden, inter)[dtype(e)],
            })
            .collect();
        let in_panels: Vec<[PackedMatrix; 3]> =
            experts.iter().map(|e| [e.gate, e.up, e.down].map(packed)).collect();
        let fast: Vec<_> = in_panels.iter().map(panels_of_expert).collect();
        let mut expected = poisoned(tokens * hidden);
        moe::naive::experts(rows, &choices, &experts, RowsMut::new(&mut expected, hidden));
        for mut cpu in cpus() {
            cpu.compute = Compute::Bf16;
            let work = moe::Workspace::new(tokens, top_k, count, hidden, inter);
            let mut work = work.narrowed(Forms { int8: false, bf16: true }, hidden, inter);
            work.fill(f32::NAN);
            let mut out = poisoned(tokens * hidden);
            moe::experts(&cpu, rows, &choices, &fast, &mut work, RowsMut::new(&mut out, hidden));
            let off = error(&out, &expected);
            let is_rounded = last == 1;
            assert!(off <= 2e-2 && (off > 1e-4) == is_rounded, "{}: {off}", cpu.isa.name());
            for i in 0..tokens {
                let mut alone = poisoned(hidden);
                let row = Rows::new(&x[i * hidden..(i + 1) * hidden], hidden);
                let own = &choices[i * top_k..(i + 1) * top_k];
                moe::experts(&cpu, row, own, &fast, &mut work, RowsMut::new(&mut alone, hidden));
                assert_eq!(alone, out[i * hidden..(i + 1) * hidden], "token {i} alone");
            }
        }
    }
}

/// A state carried over any cut on the grid, and kept by a snapshot, is the state of one run.
#[test]
fn kda_chunks_and_snapshots_do_not_depend_on_where_spans_are_cut() {
    let shape = kda::Shape { key_heads: 2, value_heads: 2, key_dim: 24, value_dim: 20 };
    let slot = shape.value_heads * shape.head_state() * F32;
    let (rows, mut random) = (230, Random::new(3));
    let qkv = random.normals(rows * shape.qkv_width());
    let decay: Vec<f32> = random.normals(rows * 48).iter().map(|x| -x.abs() * 4.0).collect();
    let beta: Vec<f32> = random.normals(rows * 2).iter().map(|x| x.abs().min(1.0)).collect();
    for cpu in cpus() {
        let mut scratch = Scratch::new(cpu.gang.threads(), kda::scratch_len(shape));
        let mut whole = None;
        for cuts in [vec![], vec![64], vec![128, 192], vec![64, 128, 192]] {
            let mut arena = poisoned_arena(slot * 8);
            let mut out = poisoned(rows * 40);
            let mut start = 0;
            let snapshots: Vec<Snapshot> = (1..4)
                .map(|i| Snapshot { after_rows: i * CELL_LEN, slot: (2 + i) * slot })
                .collect();
            for (i, end) in cuts.iter().copied().chain([rows]).enumerate() {
                // Slots alternate, so reading and writing different ones is part of the test.
                let span = Span {
                    first_row: 0,
                    rows: end - start,
                    start,
                    form: Form::Chunk,
                    absorbed_from: 0,
                    read: if start == 0 { NO_SLOT } else { (i + 1) % 2 * slot },
                    write: i % 2 * slot,
                    table: 0..0,
                    snapshots: if cuts.is_empty() { 0..3 } else { 0..0 },
                };
                let part = |x: &[f32], width: usize| x[start * width..end * width].to_vec();
                let (qkv, decay, beta) =
                    (part(&qkv, shape.qkv_width()), part(&decay, 48), part(&beta, 2));
                let inputs = kda::Inputs {
                    qkv: Rows::new(&qkv, shape.qkv_width()),
                    decay: Rows::new(&decay, 48),
                    beta: Rows::new(&beta, 2),
                };
                let spans = [span];
                let spans = Spans::new(&spans, &snapshots, end - start, slot);
                let states = kda::States { spans, arena: &mut arena, at: 0 };
                let rows_out = RowsMut::new(&mut out[start * 40..end * 40], 40);
                kda::kda(&cpu, shape, inputs, states, &mut scratch, rows_out);
                if let Some((_, kept)) = &whole
                    && end < rows
                {
                    let kept: &Vec<Vec<f32>> = kept;
                    let state = arena.f32s(i % 2 * slot, slot / F32);
                    assert_eq!(state, kept[end / CELL_LEN - 1], "state at {end}");
                }
                start = end;
            }
            let kept: Vec<Vec<f32>> =
                snapshots.iter().map(|s| arena.f32s(s.slot, slot / F32).to_vec()).collect();
            match &whole {
                None => whole = Some((out, kept)),
                Some((first, _)) => assert_eq!(&out, first, "{} cut at {cuts:?}", cpu.isa.name()),
            }
        }
    }
}

/// Strong gates, then weak ones: sums of log-decays over a chunk reach hundreds, and a weak decay
/// after a strong one must not be lost in their low bits. Trained models reach -17.
#[test]
fn chunks_keep_weak_decays_exact_after_strong_ones() {
    let shape = kda::Shape { key_heads: 1, value_heads: 1, key_dim: 64, value_dim: 64 };
    let (rows, slot) = (64, shape.head_state() * F32);
    let mut random = Random::new(13);
    let qkv = random.normals(rows * shape.qkv_width());
    let beta: Vec<f32> = (0..rows).map(|_| random.normal().abs().min(1.0)).collect();
    type Pattern = fn(usize, usize) -> f32;
    let patterns: [(&str, Pattern); 5] = [
        ("sixteen rows at -17", |row, _| if row < 16 { -17.0 } else { -0.001 }),
        ("half a chunk at -17.3", |row, _| if row < 32 { -17.3 } else { -0.0137 }),
        ("every eighth channel", |row, c| if row < 32 && c % 8 == 0 { -17.3 } else { -0.01 }),
        ("within a block", |row, _| if row % 16 < 5 { -17.0 } else { -0.002 }),
        ("rows in turn", |row, c| if (row + c) % 3 == 0 { -16.9 } else { -0.003 }),
    ];
    for (name, pattern) in patterns {
        let decay: Vec<f32> = (0..rows * 64).map(|i| pattern(i / 64, i % 64)).collect();
        let inputs = kda::Inputs {
            qkv: Rows::new(&qkv, shape.qkv_width()),
            decay: Rows::new(&decay, 64),
            beta: Rows::new(&beta, 1),
        };
        let spans = ragged(&[rows], Form::Chunk, slot, false);
        let spans = Spans::new(&spans, &[], rows, slot);
        let mut arena = Arena::new(slot).expect("a small arena");
        let start = random.normals(slot / F32);
        arena.f32s_mut(0, slot / F32).copy_from_slice(&start);
        let mut expected = poisoned(rows * 64);
        let states = kda::States { spans, arena: &mut arena, at: 0 };
        kda::naive::kda(shape, inputs, states, RowsMut::new(&mut expected, 64));
        let end = arena.f32s(0, slot / F32).to_vec();
        for cpu in cpus() {
            arena.f32s_mut(0, slot / F32).copy_from_slice(&start);
            let mut scratch = Scratch::new(cpu.gang.threads(), kda::scratch_len(shape));
            let mut out = poisoned(rows * 64);
            let states = kda::States { spans, arena: &mut arena, at: 0 };
            kda::kda(&cpu, shape, inputs, states, &mut scratch, RowsMut::new(&mut out, 64));
            assert_close(&format!("{name}, {}", cpu.isa.name()), &out, &expected, 1e-5);
            assert_close(&format!("{name}, state"), arena.f32s(0, slot / F32), &end, 1e-5);
        }
    }
}

/// A router row or bias that is not a number must not be read as a low score: the request would go
/// on with another text.
#[test]
fn a_broken_router_breaks_its_row_and_no_other() {
    let router = moe::Router {
        experts: 8,
        top_k: 2,
        score: moe::Score::Sigmoid,
        groups: 1,
        top_groups: 1,
        renormalize: true,
        scale: 1.0,
    };
    let mut random = Random::new(19);
    let mut logits = random.normals(3 * 8);
    logits[8 + 5] = f32::NAN;
    let nobody = moe::Choice { expert: u32::MAX, weight: 0.0 };
    let is_broken = |choices: &[moe::Choice]| choices.iter().all(|c| c.weight.is_nan());
    for cpu in cpus() {
        let (mut fast, mut naive) = (vec![nobody; 6], vec![nobody; 6]);
        let mut scratch = Scratch::new(cpu.gang.threads(), moe::route_scratch_len(&router));
        let (rows, bias) = (Rows::new(&logits, 8), [0.0; 8]);
        moe::route(&cpu, &router, rows, &bias, &mut scratch, &mut fast);
        moe::naive::route(&router, rows, &bias, &mut naive);
        for choices in [fast, naive] {
            let broken: Vec<bool> = choices.chunks_exact(2).map(is_broken).collect();
            assert_eq!(broken, [false, true, false], "{}", cpu.isa.name());
        }
    }
}

#[test]
fn small_operators_match_their_definitions() {
    let mut random = Random::new(29);
    for (rows, width) in [(1, 1), (3, 5), (7, 16), (9, 131)] {
        let (x, y) = (random.normals(rows * width), random.normals(rows * width));
        let rows_of = |x| Rows::new(x, width);
        let run = |body: &dyn Fn(RowsMut<'_>)| {
            let mut out = x.clone();
            body(RowsMut::new(&mut out, width));
            out
        };
        let sigmoid = run(&|out| activation::naive::sigmoid(out));
        let sum = run(&|out| activation::naive::add(out, rows_of(&y)));
        let unit = run(&|out| norm::naive::l2_norm(rows_of(&x), 0.25, out));
        for cpu in cpus() {
            let what = format!("{rows}x{width} {}", cpu.isa.name());
            assert_close(&what, &run(&|out| activation::sigmoid(&cpu, out)), &sigmoid, 1e-6);
            assert_eq!(run(&|out| activation::add(&cpu, out, rows_of(&y))), sum, "{what}");
            let fast = run(&|out| norm::l2_norm(&cpu, rows_of(&x), 0.25, out));
            assert_close(&what, &fast, &unit, 1e-6);
        }
    }
}

/// What the kernels let threads write together is checked before they do.
#[test]
fn spans_that_would_write_the_same_place_are_refused() {
    let spans = ragged(&[3, 4], Form::Chunk, 64, true);
    let refused = |change: &dyn Fn(&mut Vec<Span>)| {
        let mut spans = spans.clone();
        change(&mut spans);
        std::panic::catch_unwind(|| Spans::new(&spans, &[], 7, 64)).is_err()
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|spans| spans[1].write = spans[0].write));
    assert!(refused(&|spans| spans[1].write = spans[0].write + 32), "half a slot further");
    assert!(refused(&|spans| spans[1].first_row = 2), "a row in two spans");
    assert!(refused(&|spans| spans[1].rows = 5));
    assert!(refused(&|spans| spans[0].read = spans[1].write), "read while it is written");
    assert!(refused(&|spans| spans[0].read = spans[1].write + 16));
    assert!(refused(&|spans| spans[0].write = NO_SLOT));
    assert!(refused(&|spans| spans[0].absorbed_from = 4));
}

/// Three segments of keys: the fast forms against one softmax over all of them.
#[test]
fn attention_over_several_segments_matches_its_definition() {
    let mut random = Random::new(5);
    let shape = mla::Shape { heads: 3, nope: 10, rope: 6, value_dim: 12, rank: 20 };
    let len = 2_500;
    let latents = random.normals(len * shape.row());
    let up = random.normals(shape.heads * 22 * shape.rank);
    let up = Matrix::new(66, shape.rank, Values::F32(&up));
    let packed_up = mla::Up::new(shape, up, None).expect("memory");
    let last = 70;
    let q = random.normals(last * shape.heads * shape.query());
    for place in PLACES {
        let block_bytes = BLOCK_LEN * shape.row() * place.dtype.bytes();
        let tables = reversed_table(len, block_bytes);
        let mut arena = poisoned_arena(tables.len() * block_bytes);
        let mut span = ragged(&[len], Form::Chunk, 0, true).remove(0);
        span.table = 0..tables.len();
        let rows = Rows::new(&latents, shape.row());
        write_rows((std::slice::from_ref(&span), &tables), rows, shape.row(), &mut arena, place);
        let inputs = mla::Inputs { q: Rows::new(&q, shape.heads * shape.query()), up };
        let spans = [Span { rows: last, start: len - last, absorbed_from: 40, ..span }];
        let spans = Spans::new(&spans, &[], last, 0);
        let paged = Paged { spans, tables: &tables, arena: &arena, place };
        let width = shape.heads * shape.value_dim;
        let mut expected = poisoned(last * width);
        mla::naive::attend(shape, inputs, paged, RowsMut::new(&mut expected, width));
        for cpu in cpus() {
            let inputs = mla::Inputs { q: inputs.q, up: &packed_up };
            let out = attended_mla(&cpu, shape, inputs, paged);
            let what = format!("{}, {place:?}", cpu.isa.name());
            assert_close(&what, &out, &expected, 1e-5);
        }
    }
}

/// Both forms, over two segments, and widths that fill no group.
#[test]
fn a_quantised_up_projection_matches_its_definition_in_both_forms() {
    let mut random = Random::new(57);
    let len = 1_100;
    for (shape, place) in [
        (mla::Shape { heads: 3, nope: 10, rope: 6, value_dim: 12, rank: 20 }, PLACES[0]),
        (mla::Shape { heads: 2, nope: 64, rope: 8, value_dim: 33, rank: 96 }, PLACES[1]),
    ] {
        let latents = random.normals(len * shape.row());
        let outputs = shape.heads * (shape.nope + shape.value_dim);
        let up = random.normals(outputs * shape.rank);
        let up = Matrix::new(outputs, shape.rank, Values::F32(&up));
        let block_bytes = BLOCK_LEN * shape.row() * place.dtype.bytes();
        let tables = reversed_table(len, block_bytes);
        let mut arena = poisoned_arena(tables.len() * block_bytes);
        let mut span = ragged(&[len], Form::Chunk, 0, true).remove(0);
        span.table = 0..tables.len();
        let all = Rows::new(&latents, shape.row());
        write_rows((std::slice::from_ref(&span), &tables), all, shape.row(), &mut arena, place);
        let rows = 9;
        // Small, so that a row attends to many positions.
        let q: Vec<f32> =
            random.normals(rows * shape.heads * shape.query()).iter().map(|q| q * 0.02).collect();
        let q = Rows::new(&q, shape.heads * shape.query());
        let spans = [Span { rows, start: len - rows, absorbed_from: 5, ..span }];
        let spans = Spans::new(&spans, &[], rows, 0);
        let paged = Paged { spans, tables: &tables, arena: &arena, place };
        let width = shape.heads * shape.value_dim;
        let inputs = mla::Inputs { q, up };
        let mut exact = poisoned(rows * width);
        mla::naive::attend(shape, inputs, paged, RowsMut::new(&mut exact, width));
        for (quantization, loss) in [(Quantization::Q8, 0.02), (Quantization::Q4, 0.2)] {
            let packed_up = mla::Up::new(shape, up, Some(quantization)).expect("memory");
            let mut expected = poisoned(rows * width);
            let out = RowsMut::new(&mut expected, width);
            mla::naive::attend_quantized(shape, quantization, inputs, paged, out);
            let what = format!("{}, {shape:?}", quantization.as_str());
            assert_close(&format!("{what}: the definition"), &expected, &exact, loss);
            for cpu in cpus() {
                let inputs = mla::Inputs { q, up: &packed_up };
                let out = attended_mla(&cpu, shape, inputs, paged);
                // Another order of sums may round a latent to the next of its 255 values.
                assert_close(&format!("{what}, {}", cpu.isa.name()), &out, &expected, 5e-4);
            }
        }
    }
}

/// Heads around what a task takes and half of it, for one row and for more: which of them go
/// together depends on the threads, and no bit on that.
#[test]
fn absorbed_heads_keep_their_bits_in_any_company() {
    let mut random = Random::new(51);
    let sizes = [(1, 1), (8, 5), (9, 1), (16, 2), (17, 3), (33, 1), (33, 6)];
    for ((heads, rows), place) in sizes.into_iter().flat_map(|size| PLACES.map(|p| (size, p))) {
        let shape = mla::Shape { heads, nope: 10, rope: 6, value_dim: 12, rank: 20 };
        let len = 1_100;
        let latents = random.normals(len * shape.row());
        let up = random.normals(shape.heads * 22 * shape.rank);
        let block_bytes = BLOCK_LEN * shape.row() * place.dtype.bytes();
        let tables = reversed_table(len, block_bytes);
        let mut arena = poisoned_arena(tables.len() * block_bytes);
        let mut span = ragged(&[len], Form::Chunk, 0, true).remove(0);
        span.table = 0..tables.len();
        let all = Rows::new(&latents, shape.row());
        write_rows((std::slice::from_ref(&span), &tables), all, shape.row(), &mut arena, place);
        let q = random.normals(rows * shape.heads * shape.query());
        let q = Rows::new(&q, shape.heads * shape.query());
        let up = Matrix::new(heads * 22, shape.rank, Values::F32(&up));
        let packed_up = mla::Up::new(shape, up, None).expect("memory");
        let spans = [Span { rows, start: len - rows, absorbed_from: 0, ..span }];
        let spans = Spans::new(&spans, &[], rows, 0);
        let paged = Paged { spans, tables: &tables, arena: &arena, place };
        let width = shape.heads * shape.value_dim;
        let mut expected = poisoned(rows * width);
        let inputs = mla::Inputs { q, up };
        mla::naive::attend(shape, inputs, paged, RowsMut::new(&mut expected, width));
        for isa in Isa::available() {
            let mut first: Option<Vec<f32>> = None;
            for threads in [1, 2, 3, 7] {
                let cpu = Cpu::new(isa, threads).expect("threads start");
                let inputs = mla::Inputs { q, up: &packed_up };
                let out = attended_mla(&cpu, shape, inputs, paged);
                let what =
                    format!("{heads} heads, {rows} rows, {place:?}, {}, {threads}", isa.name());
                assert_close(&what, &out, &expected, 1e-5);
                let first = first.get_or_insert_with(|| out.clone());
                assert_eq!(&out, first, "{what} threads");
            }
        }
    }
}

/// What every row attends to, from memory that is poisoned.
fn attended_gqa(cpu: &Cpu, shape: gqa::Shape, q: Rows<'_>, paged: Paged<'_>) -> Vec<f32> {
    let mut scratch = Scratch::new(cpu.gang.threads(), gqa::scratch_len(shape));
    scratch.fill(f32::NAN);
    let mut work = gqa::Workspace::new(shape, q.count());
    work.fill(f32::NAN);
    let mut out = poisoned(q.count() * q.width());
    let target = RowsMut::new(&mut out, q.width());
    gqa::attend(cpu, shape, q, paged, &mut scratch, &mut work, target);
    out
}

/// The same of latent attention.
fn attended_mla(
    cpu: &Cpu,
    shape: mla::Shape,
    inputs: mla::Inputs<'_, &mla::Up>,
    paged: Paged<'_>,
) -> Vec<f32> {
    let rows = inputs.q.count();
    let mut scratch = Scratch::new(cpu.gang.threads(), mla::scratch_len(shape, rows));
    scratch.fill(f32::NAN);
    let mut work = mla::Workspace::new(shape, rows);
    work.fill(f32::NAN);
    let width = shape.heads * shape.value_dim;
    let mut out = poisoned(rows * width);
    mla::attend(cpu, inputs, paged, &mut scratch, &mut work, RowsMut::new(&mut out, width));
    out
}

/// Keys and values of `len` positions, `[len][kv_heads * head_dim]`, in an arena.
fn cached_gqa(
    shape: gqa::Shape,
    (keys, values): (&[f32], &[f32]),
    place: KvPlace,
) -> (Arena, Vec<usize>) {
    let width = shape.kv_heads * shape.head_dim;
    let (keys, values) = (Rows::new(keys, width), Rows::new(values, width));
    let block_bytes = 2 * width * BLOCK_LEN * place.dtype.bytes();
    let tables = reversed_table(keys.count(), block_bytes);
    let mut arena = poisoned_arena(tables.len() * block_bytes);
    let mut span = ragged(&[keys.count()], Form::Chunk, 0, true).remove(0);
    span.table = 0..tables.len();
    gqa::write(shape, (std::slice::from_ref(&span), &tables), keys, values, &mut arena, place);
    (arena, tables)
}

/// Groups and widths that no vector divides, one row and many, beyond a segment. Many rows widen a
/// tile first and few do not: a row has the same bits among others and alone.
#[test]
fn grouped_attention_matches_its_definition_and_rows_keep_their_bits() {
    let mut random = Random::new(53);
    let len = 1_100;
    for (heads, kv_heads, head_dim, rows) in [(1, 1, 7, 1), (6, 2, 20, 30), (4, 4, 16, 70)] {
        let shape = gqa::Shape { heads, kv_heads, head_dim };
        let [keys, values] = [(); 2].map(|()| random.normals(len * kv_heads * head_dim));
        let width = heads * head_dim;
        let q = random.normals(rows * width);
        for place in PLACES {
            let (arena, tables) = cached_gqa(shape, (&keys, &values), place);
            let mut span = ragged(&[rows], Form::Chunk, 0, true).remove(0);
            (span.start, span.table) = (len - rows, 0..tables.len());
            let spans = [span];
            let mut expected = poisoned(rows * width);
            let tables = &tables[..];
            let spans_of_all = Spans::new(&spans, &[], rows, 0);
            let all = Paged { spans: spans_of_all, tables, arena: &arena, place };
            gqa::naive::attend(
                shape,
                Rows::new(&q, width),
                all,
                RowsMut::new(&mut expected, width),
            );
            for cpu in cpus() {
                let attend = |q: &[f32], paged: Paged<'_>| {
                    attended_gqa(&cpu, shape, Rows::new(q, width), paged)
                };
                let what = format!("{shape:?}, {rows} rows, {place:?}, {}", cpu.isa.name());
                let out = attend(&q, all);
                assert_close(&what, &out, &expected, 1e-5);
                for row in [0, rows / 2, rows - 1] {
                    let alone = Span { rows: 1, start: len - rows + row, ..spans[0].clone() };
                    let alone = [alone];
                    let one = Paged { spans: Spans::new(&alone, &[], 1, 0), ..all };
                    let at = row * width..(row + 1) * width;
                    assert_eq!(attend(&q[at.clone()], one), out[at], "{what}: row {row} alone");
                }
            }
        }
    }
}

/// More threads than key heads attend segments of a long sequence; who attends which is no bit of
/// the result.
#[test]
fn grouped_rows_keep_their_bits_however_many_threads_share_their_segments() {
    let mut random = Random::new(59);
    let len = 3_200;
    for (heads, kv_heads, head_dim, rows) in [(1, 1, 12, 1), (6, 2, 20, 3), (8, 1, 16, 4)] {
        let shape = gqa::Shape { heads, kv_heads, head_dim };
        let [keys, values] = [(); 2].map(|()| random.normals(len * kv_heads * head_dim));
        let width = heads * head_dim;
        // The rows of a long sequence, and of a short one that starts like it.
        let q = random.normals(2 * rows * width);
        let q = Rows::new(&q, width);
        for place in PLACES {
            let (arena, tables) = cached_gqa(shape, (&keys, &values), place);
            let mut spans = ragged(&[rows, rows], Form::Step, 0, true);
            for (span, end) in spans.iter_mut().zip([len, 1_000]) {
                (span.start, span.table) = (end - rows, 0..tables.len());
            }
            let spans = Spans::new(&spans, &[], 2 * rows, 0);
            let paged = Paged { spans, tables: &tables, arena: &arena, place };
            let mut expected = poisoned(2 * rows * width);
            gqa::naive::attend(shape, q, paged, RowsMut::new(&mut expected, width));
            for isa in Isa::available() {
                let mut first: Option<Vec<f32>> = None;
                for threads in [1, 2, 3, 7] {
                    let cpu = Cpu::new(isa, threads).expect("threads start");
                    let out = attended_gqa(&cpu, shape, q, paged);
                    let what = format!("{shape:?}, {rows} rows, {place:?}, {}", isa.name());
                    assert_close(&what, &out, &expected, 1e-5);
                    let first = first.get_or_insert_with(|| out.clone());
                    assert_eq!(&out, first, "{what}, {threads} threads");
                }
            }
        }
    }
}

/// What is kept is the nearest bf16 value, ties to even, and attention sees nothing else: over rows
/// that are rounded beforehand it has the same bits.
#[test]
fn rows_kept_in_bf16_are_rounded_before_attention_reads_them() {
    let mut random = Random::new(57);
    let shape = gqa::Shape { heads: 2, kv_heads: 1, head_dim: 6 };
    let len = 70;
    // Half way between two values of bf16: up to the even one, down to it, and just off.
    let ties = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x3f81_7fff].map(f32::from_bits);
    let [mut keys, mut values] = [(); 2].map(|()| random.normals(len * 6));
    keys[..4].copy_from_slice(&ties);
    values[..4].copy_from_slice(&ties);
    let round = |values: &[f32]| -> Vec<f32> {
        values.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect()
    };
    let (rounded_keys, rounded_values) = (round(&keys), round(&values));
    assert_eq!(rounded_keys[..4], [1.0, 1.015_625, 1.007_812_5, 1.007_812_5]);
    let [wide, narrow] = PLACES;
    let (kept, tables) = cached_gqa(shape, (&keys, &values), narrow);
    let stored = |at: usize| kept.values::<half::bf16>(tables[0] + 2 * at, 1)[0].to_f32();
    for (column, (key, value)) in rounded_keys.iter().zip(&rounded_values).enumerate().take(6) {
        assert_eq!((stored(column * BLOCK_LEN), stored(6 * BLOCK_LEN + column)), (*key, *value));
    }
    let (beforehand, wide_tables) = cached_gqa(shape, (&rounded_keys, &rounded_values), wide);
    let q = random.normals(3 * 12);
    let mut span = ragged(&[3], Form::Step, 0, true).remove(0);
    (span.start, span.table) = (len - 3, 0..tables.len());
    let spans = [span];
    let spans = Spans::new(&spans, &[], 3, 0);
    let attend = |arena: &Arena, tables: &[usize], place| {
        let paged = Paged { spans, tables, arena, place };
        let mut all = vec![poisoned(3 * 12)];
        let q = Rows::new(&q, 12);
        gqa::naive::attend(shape, q, paged, RowsMut::new(&mut all[0], 12));
        for cpu in cpus() {
            all.push(attended_gqa(&cpu, shape, q, paged));
        }
        all
    };
    assert_eq!(attend(&kept, &tables, narrow), attend(&beforehand, &wide_tables, wide));
}

//! Buffers of the forward pass, made once for the largest batch and reused.

use kernels::rope::{Rope, angles};
use kernels::{NarrowRows, Scratch, gqa, kda, mla, moe};

use super::batch::Batch;
use super::spec::{Ffn, Layer, Mixer, ModelSpec};

/// Working memory of [`Model::forward`](super::decoder::Model::forward).
///
/// Buffers are `[rows][width]` with the width of the layer at hand; each is as large as the widest
/// layer needs.
#[derive(Debug)]
pub struct Workspace {
    /// The residual stream.
    pub(super) x: Vec<f32>,
    /// The residual stream after a norm.
    pub(super) normed: Vec<f32>,
    /// Queries, keys and values as projected; MLA's queries.
    pub(super) qkv: Vec<f32>,
    /// KDA's queries, keys and values after the convolution; MLA's latent rows.
    pub(super) mixed: Vec<f32>,
    /// KDA's log-decays.
    pub(super) decay: Vec<f32>,
    /// KDA's output gate.
    pub(super) gate: Vec<f32>,
    /// The narrow middles of KDA's two-factor projections, beside each other.
    pub(super) narrow: Vec<f32>,
    /// KDA's write strengths.
    pub(super) beta: Vec<f32>,
    /// What a mixer gives before its output projection.
    pub(super) attended: Vec<f32>,
    /// Gate and up of feed-forward parts.
    pub(super) ffn_gate: Vec<f32>,
    pub(super) ffn_up: Vec<f32>,
    /// Router logits and choices.
    pub(super) router: Vec<f32>,
    pub(super) choices: Vec<moe::Choice>,
    /// Sum of the experts.
    pub(super) experts_out: Vec<f32>,
    pub(super) experts: Option<moe::Workspace>,
    /// Scratch of kernels, and what the threads of attention share.
    pub(super) scratch: Scratch,
    pub(super) mla: mla::Workspace,
    pub(super) gqa: gqa::Workspace,
    /// The rows that products multiply, in fewer bits.
    pub(super) narrowed: NarrowRows,
    /// Angles of the batch's rows, for each rotation the model has.
    pub(super) angles: Vec<(Rope, Vec<f32>)>,
    /// Hidden rows that logits are asked for, and the logits.
    pub(super) head_rows: Vec<f32>,
    pub(super) logits: Vec<f32>,
    most_rows: usize,
}

/// The first `count` rows of `width` values of a buffer.
pub(super) fn rows(buffer: &mut [f32], count: usize, width: usize) -> &mut [f32] {
    &mut buffer[..count * width]
}

impl Workspace {
    /// For batches of up to `most_rows` rows on `threads` threads.
    pub fn new(spec: &ModelSpec, most_rows: usize, threads: usize) -> Workspace {
        let widths = Widths::of(spec, most_rows);
        let buffer = |width: usize| vec![0.0; most_rows * width];
        Workspace {
            x: buffer(spec.hidden),
            normed: buffer(spec.hidden),
            qkv: buffer(widths.qkv),
            mixed: buffer(widths.mixed),
            decay: buffer(widths.inner),
            gate: buffer(widths.inner),
            narrow: buffer(widths.narrow),
            beta: buffer(widths.heads),
            attended: buffer(widths.attended),
            ffn_gate: buffer(widths.ffn),
            ffn_up: buffer(widths.ffn),
            router: buffer(widths.experts),
            choices: vec![moe::Choice { expert: 0, weight: 0.0 }; most_rows * widths.top_k],
            experts_out: buffer(if widths.experts > 0 { spec.hidden } else { 0 }),
            experts: (widths.experts > 0).then(|| widths.experts_workspace(most_rows, spec)),
            scratch: Scratch::new(threads, widths.scratch),
            mla: widths.mla.map_or_else(Default::default, |s| mla::Workspace::new(s, most_rows)),
            gqa: widths.gqa.map_or_else(Default::default, |s| gqa::Workspace::new(s, most_rows)),
            narrowed: NarrowRows::new(spec.forms(), most_rows, widths.inputs(spec))
                .with_sums(most_rows, spec.hidden),
            angles: rotations(spec, most_rows),
            head_rows: Vec::new(),
            logits: Vec::new(),
            most_rows,
        }
    }

    /// Bytes of a workspace that computes up to `logit_rows` rows of logits at once.
    pub fn bytes(spec: &ModelSpec, most_rows: usize, logit_rows: usize, threads: usize) -> usize {
        let w = Widths::of(spec, most_rows);
        let angles: usize = rotations(spec, 0).iter().map(|(rope, _)| rope.dim).sum();
        // The residual stream, what is normed, the experts' sum, and sums that wait.
        let row = 4 * spec.hidden
            + w.qkv
            + w.mixed
            + 2 * w.inner
            + w.narrow
            + w.heads
            + w.attended
            + 2 * w.ffn
            + w.experts
            + w.top_k * (4 + 2 * (spec.hidden + w.expert_inter))
            + angles;
        let logits = logit_rows.saturating_mul(spec.hidden + spec.vocab_size);
        let values = most_rows.saturating_mul(row).saturating_add(logits);
        let values = values.saturating_add(threads.saturating_mul(w.scratch));
        let values = values.saturating_add(w.mla.map_or(0, mla::Workspace::len));
        let values = values.saturating_add(w.gqa.map_or(0, gqa::Workspace::len));
        values
            .saturating_mul(size_of::<f32>())
            .saturating_add(w.narrow_bytes(most_rows, logit_rows, spec))
    }

    /// Overwrites every buffer with not-a-number, so that a test sees whatever relies on old
    /// contents.
    pub fn poison(&mut self) {
        for buffer in [
            &mut self.x,
            &mut self.normed,
            &mut self.qkv,
            &mut self.mixed,
            &mut self.decay,
            &mut self.gate,
            &mut self.narrow,
            &mut self.beta,
            &mut self.attended,
            &mut self.ffn_gate,
            &mut self.ffn_up,
            &mut self.router,
            &mut self.experts_out,
            &mut self.head_rows,
            &mut self.logits,
        ] {
            buffer.fill(f32::NAN);
        }
        self.scratch.fill(f32::NAN);
        self.mla.fill(f32::NAN);
        self.gqa.fill(f32::NAN);
        self.narrowed.poison();
        if let Some(experts) = &mut self.experts {
            experts.fill(f32::NAN);
        }
    }

    /// Computes what all layers share.
    pub(super) fn begin(&mut self, batch: &Batch, spec: &ModelSpec) {
        let count = batch.rows();
        assert!(count <= self.most_rows, "{count} rows in a workspace for {}", self.most_rows);
        debug_assert!(batch.tokens.iter().all(|t| (*t as usize) < spec.vocab_size));
        if self.angles.is_empty() {
            return;
        }
        let positions = batch.positions();
        for (rope, table) in &mut self.angles {
            table.resize(count * rope.dim, 0.0);
            angles(rope, &positions, table);
        }
    }

    /// The batch's angles for one of the model's rotations.
    pub(super) fn angles_of(angles: &[(Rope, Vec<f32>)], rope: &Rope) -> usize {
        angles.iter().position(|(r, _)| r == rope).expect("every rotation has its table")
    }
}

/// The model's rotations, each with room for the angles of `most_rows` rows.
fn rotations(spec: &ModelSpec, most_rows: usize) -> Vec<(Rope, Vec<f32>)> {
    let mut found: Vec<(Rope, Vec<f32>)> = Vec::new();
    for layer in &spec.layers {
        if let Mixer::Gqa(gqa) = &layer.mixer
            && found.iter().all(|(rope, _)| *rope != gqa.rope)
        {
            found.push((gqa.rope.clone(), Vec::with_capacity(most_rows * gqa.rope.dim)));
        }
    }
    found
}

/// The widest of each kind of row that any layer needs, and of a thread's scratch.
#[derive(Default)]
struct Widths {
    qkv: usize,
    mixed: usize,
    inner: usize,
    narrow: usize,
    heads: usize,
    attended: usize,
    ffn: usize,
    experts: usize,
    top_k: usize,
    expert_inter: usize,
    scratch: usize,
    /// All layers of a kind of attention have one shape.
    mla: Option<mla::Shape>,
    gqa: Option<gqa::Shape>,
}

impl Widths {
    fn of(spec: &ModelSpec, most_rows: usize) -> Widths {
        let mut widest = Widths::default();
        let raise = |width: &mut usize, to: usize| *width = (*width).max(to);
        for layer in &spec.layers {
            raise(&mut widest.qkv, qkv_width(&layer.mixer));
            raise(&mut widest.mixed, mixed_width(&layer.mixer));
            raise(&mut widest.attended, attended_width(&layer.mixer));
            raise(&mut widest.scratch, scratch_len(layer, most_rows));
            if let Mixer::Kda(kda) = &layer.mixer {
                raise(&mut widest.inner, kda.inner());
                raise(&mut widest.narrow, 2 * kda.head_dim);
                raise(&mut widest.heads, kda.heads);
            }
            if let Mixer::Mla(mla) = &layer.mixer {
                widest.mla = Some(mla.shape());
            }
            if let Mixer::Gqa(gqa) = &layer.mixer {
                widest.gqa = Some(gqa.shape());
            }
            match &layer.ffn {
                Ffn::Dense { inter } => raise(&mut widest.ffn, *inter),
                Ffn::Moe(moe) => {
                    raise(&mut widest.ffn, moe.shared_inter);
                    raise(&mut widest.experts, moe.router.experts);
                    raise(&mut widest.top_k, moe.router.top_k);
                    raise(&mut widest.expert_inter, moe.inter);
                }
            }
        }
        widest
    }

    fn experts_workspace(&self, rows: usize, spec: &ModelSpec) -> moe::Workspace {
        let (hidden, inter) = (spec.hidden, self.expert_inter);
        let work = moe::Workspace::new(rows, self.top_k, self.experts, hidden, inter);
        work.narrowed(spec.forms(), hidden, inter)
    }

    /// The most inputs of a matrix, experts' apart.
    fn inputs(&self, spec: &ModelSpec) -> usize {
        spec.hidden.max(self.attended).max(self.ffn)
    }

    /// Bytes of rows in fewer bits, those of experts' pairs with them.
    fn narrow_bytes(&self, rows: usize, logit_rows: usize, spec: &ModelSpec) -> usize {
        let pairs = rows.saturating_mul(self.top_k);
        let bytes = |rows: usize, width: usize| NarrowRows::bytes(spec.forms(), rows, width);
        // The head may multiply more rows than a layer.
        let of_rows = bytes(rows, self.inputs(spec)).max(bytes(logit_rows, spec.hidden));
        of_rows
            .saturating_add(bytes(pairs, spec.hidden))
            .saturating_add(bytes(pairs, self.expert_inter))
    }
}

fn qkv_width(mixer: &Mixer) -> usize {
    match mixer {
        Mixer::Kda(kda) => 3 * kda.inner(),
        Mixer::Mla(mla) => mla.heads * (mla.nope + mla.rope),
        Mixer::Gqa(gqa) => (gqa.heads + 2 * gqa.kv_heads) * gqa.head_dim,
    }
}

fn mixed_width(mixer: &Mixer) -> usize {
    match mixer {
        Mixer::Kda(kda) => 3 * kda.inner(),
        Mixer::Mla(mla) => mla.rank + mla.rope,
        Mixer::Gqa(_) => 0,
    }
}

fn attended_width(mixer: &Mixer) -> usize {
    match mixer {
        Mixer::Kda(kda) => kda.inner(),
        Mixer::Mla(mla) => mla.heads * mla.value_dim,
        Mixer::Gqa(gqa) => gqa.heads * gqa.head_dim,
    }
}

fn scratch_len(layer: &Layer, most_rows: usize) -> usize {
    let mixer = match &layer.mixer {
        Mixer::Kda(k) => kda::scratch_len(k.shape()),
        Mixer::Mla(m) => mla::scratch_len(m.shape(), most_rows),
        Mixer::Gqa(g) => gqa::scratch_len(g.shape()),
    };
    let ffn = match &layer.ffn {
        Ffn::Dense { .. } => 0,
        Ffn::Moe(m) => moe::route_scratch_len(&m.router),
    };
    mixer.max(ffn)
}

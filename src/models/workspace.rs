//! Buffers of the forward pass, made once for the largest batch and reused.

use std::ops::Range;

use kernels::rope::{Rope, angles};
use kernels::{Scratch, gqa, kda, mla, moe};

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
    /// The narrow middle of KDA's two-factor projections.
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
    /// Scratch of kernels, and their list of tasks.
    pub(super) scratch: Scratch,
    pub(super) tasks: Vec<(usize, Range<usize>)>,
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
        let widest = |width: &dyn Fn(&Layer) -> usize| {
            vec![0.0; most_rows * spec.layers.iter().map(width).max().unwrap_or(0)]
        };
        let kda = |width: fn(&super::spec::Kda) -> usize| {
            widest(&|layer| match &layer.mixer {
                Mixer::Kda(kda) => width(kda),
                _ => 0,
            })
        };
        let ffn_width = |layer: &Layer| match &layer.ffn {
            Ffn::Dense { inter } => *inter,
            Ffn::Moe(moe) => moe.shared_inter,
        };
        let scratch = spec.layers.iter().map(scratch_len).max();
        let routed = RoutedSizes::of(spec);
        Workspace {
            x: vec![0.0; most_rows * spec.hidden],
            normed: vec![0.0; most_rows * spec.hidden],
            qkv: widest(&|layer| qkv_width(&layer.mixer)),
            mixed: widest(&|layer| mixed_width(&layer.mixer)),
            decay: kda(|kda| kda.inner()),
            gate: kda(|kda| kda.inner()),
            narrow: kda(|kda| kda.head_dim),
            beta: kda(|kda| kda.heads),
            attended: widest(&|layer| attended_width(&layer.mixer)),
            ffn_gate: widest(&ffn_width),
            ffn_up: widest(&ffn_width),
            router: vec![0.0; most_rows * routed.experts],
            choices: vec![moe::Choice { expert: 0, weight: 0.0 }; most_rows * routed.top_k],
            experts_out: vec![0.0; if routed.experts > 0 { most_rows * spec.hidden } else { 0 }],
            experts: (routed.experts > 0).then(|| routed.workspace(most_rows, spec.hidden)),
            scratch: Scratch::new(threads, scratch.unwrap_or(0)),
            tasks: Vec::new(),
            angles: rotations(spec),
            head_rows: Vec::new(),
            logits: Vec::new(),
            most_rows,
        }
    }

    /// Rows of the largest batch.
    pub fn most_rows(&self) -> usize {
        self.most_rows
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

fn rotations(spec: &ModelSpec) -> Vec<(Rope, Vec<f32>)> {
    let mut found: Vec<(Rope, Vec<f32>)> = Vec::new();
    for layer in &spec.layers {
        if let Mixer::Gqa(gqa) = &layer.mixer
            && found.iter().all(|(rope, _)| *rope != gqa.rope)
        {
            found.push((gqa.rope.clone(), Vec::new()));
        }
    }
    found
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

fn scratch_len(layer: &Layer) -> usize {
    let mixer = match &layer.mixer {
        Mixer::Kda(k) => kda::scratch_len(k.shape()),
        Mixer::Mla(m) => mla::scratch_len(m.shape()),
        Mixer::Gqa(g) => gqa::scratch_len(g.shape()),
    };
    let ffn = match &layer.ffn {
        Ffn::Dense { .. } => 0,
        Ffn::Moe(m) => moe::route_scratch_len(&m.router),
    };
    mixer.max(ffn)
}

/// The largest sizes of the model's routed layers.
#[derive(Default)]
struct RoutedSizes {
    experts: usize,
    top_k: usize,
    inter: usize,
}

impl RoutedSizes {
    fn of(spec: &ModelSpec) -> RoutedSizes {
        let mut sizes = RoutedSizes::default();
        for layer in &spec.layers {
            if let Ffn::Moe(moe) = &layer.ffn {
                sizes.experts = sizes.experts.max(moe.router.experts);
                sizes.top_k = sizes.top_k.max(moe.router.top_k);
                sizes.inter = sizes.inter.max(moe.inter);
            }
        }
        sizes
    }

    fn workspace(&self, rows: usize, hidden: usize) -> moe::Workspace {
        moe::Workspace::new(rows, self.top_k, self.experts, hidden, self.inter)
    }
}

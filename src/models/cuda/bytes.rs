//! Bytes that a model takes on a device besides its weights: known before any weight is loaded.

use kernels::cuda::kda;
use kernels::cuda::sampling::{Candidate, Judged, MOST_FIRST};
use kernels::{CELL_LEN, SEGMENT_LEN};

use super::Most;
use super::workspace::{EXPANDED, Widest};
use crate::models::spec::{Ffn, Mixer, ModelSpec};

/// What rounding to whole allocations, norms in f32 and lists of experts come to.
const SMALL: usize = 8 << 20;

/// Bytes of the buffers of [`Workspace`](super::workspace::Workspace), of the step's table, and of
/// the copies of MLA's up-projections, as for f32.
pub(super) fn work_bytes(spec: &ModelSpec, most: Most) -> usize {
    let widest = Widest::of(spec);
    let (values, halves) = row(spec, &widest);
    let rows = most.rows.saturating_mul(4 * values + 2 * halves);
    let rounded = most.rows.max(most.logits).saturating_mul(2 * (widest.input + 8));
    let first = size_of::<Judged>() + MOST_FIRST.min(spec.vocab_size) * size_of::<Candidate>();
    let logits = most.logits.saturating_mul(4 * (spec.hidden + spec.vocab_size) + first);
    let layers = spec.layers.iter().map(|layer| copies(&layer.mixer)).sum::<usize>();
    [rows, rounded, logits, 4 * layers, 4 * shared(spec, most), most.table().bytes(), SMALL]
        .into_iter()
        .fold(0, usize::saturating_add)
}

/// Values of 32 and of 16 bits for each row of a step.
fn row(spec: &ModelSpec, w: &Widest) -> (usize, usize) {
    let (mut angles, mut latent, mut rounded_latent) = (0, 0, 0);
    let (mut routed, mut rounded_routed) = (0, 0);
    for layer in &spec.layers {
        match &layer.mixer {
            Mixer::Mla(mla) => {
                latent = latent.max(mla.heads * (2 * mla.rank + mla.value_dim + 2));
                let wide = mla.heads * (mla.nope + mla.rope).max(mla.rank);
                rounded_latent = rounded_latent.max(wide + 8);
            }
            Mixer::Gqa(gqa) => angles = angles.max(gqa.rope.dim),
            Mixer::Kda(_) => {}
        }
        if let Ffn::Moe(moe) = &layer.ffn {
            let each = 2 * moe.inter + spec.hidden + 8;
            let pairs = moe.router.top_k * each;
            routed = routed.max(moe.router.experts + spec.hidden + pairs);
            rounded_routed = rounded_routed.max(moe.router.top_k * (moe.inter + 8));
        }
    }
    let plain = w.qkv + w.mixed + w.values + w.narrow + 2 * w.inner + w.heads + w.attended;
    let values = 2 * spec.hidden + plain + 2 * w.ffn + angles + latent + routed;
    (values, rounded_latent + rounded_routed)
}

/// Values that rows share: parts of segments, expanded latents, chunks of KDA.
fn shared(spec: &ModelSpec, most: Most) -> usize {
    let segments = most.sequences.saturating_mul(most.split.div_ceil(SEGMENT_LEN));
    let cells = most.rows.min(most.rows.div_ceil(CELL_LEN) + most.sequences);
    let (mut mla_len, mut gqa_len, mut kda_len) = (0, 0, 0);
    for layer in &spec.layers {
        match &layer.mixer {
            Mixer::Kda(kda) => kda_len = kda_len.max(kda::work_len(kda.shape(), cells)),
            Mixer::Mla(mla) => {
                let parts = segments.saturating_mul(mla.heads * (mla.rank + 2));
                let expanded = mla.rank + 8 + mla.heads * (mla.nope + mla.value_dim);
                mla_len = mla_len.max(parts.saturating_add(EXPANDED * expanded));
            }
            Mixer::Gqa(gqa) => {
                gqa_len = gqa_len.max(segments.saturating_mul(gqa.heads * (gqa.head_dim + 2)));
            }
        }
    }
    [mla_len, gqa_len, kda_len].into_iter().fold(0, usize::saturating_add)
}

/// Values of a layer that are on the device twice.
fn copies(mixer: &Mixer) -> usize {
    match mixer {
        Mixer::Mla(mla) => mla.heads * mla.nope * mla.rank,
        Mixer::Kda(_) | Mixer::Gqa(_) => 0,
    }
}

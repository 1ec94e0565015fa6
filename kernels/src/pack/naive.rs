//! The definition of packing: one value at a time.

use half::bf16;

use super::{MOST_STEPS, PackedDtype, Packing, Part};
use crate::arena::Arena;

/// Packs the slot at byte `source` of `from` to the packed slot at byte `target` of `to`.
pub fn pack(packing: &Packing, from: &Arena, source: usize, to: &mut Arena, target: usize) {
    packing.check((from, source), (to, target));
    for (part, source, target) in packing.places(source, target) {
        match part {
            Part::Plain { bytes } => to.copy_from(target, from, source, bytes),
            Part::State { heads, value_dim, key_dim } => {
                let state = from.f32s(source, heads * value_dim * key_dim);
                match packing.dtype {
                    PackedDtype::Bf16 => {
                        let packed = to.values_mut(target, state.len());
                        packed.copy_from_slice(
                            &state.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>(),
                        );
                    }
                    PackedDtype::Int8 => pack_int8(state, (heads, value_dim, key_dim), to, target),
                }
            }
        }
    }
}

fn pack_int8(
    state: &[f32],
    (heads, value_dim, key_dim): (usize, usize, usize),
    to: &mut Arena,
    target: usize,
) {
    let steps_at = target + heads * key_dim * size_of::<f32>();
    for head in 0..heads {
        for k in 0..key_dim {
            let index = |v: usize| (head * value_dim + v) * key_dim + k;
            let channel: Vec<f32> = (0..value_dim).map(|v| state[index(v)]).collect();
            let scale = scale(&channel);
            to.f32s_mut(target, heads * key_dim)[head * key_dim + k] = scale;
            let steps = to.values_mut::<i8>(steps_at, state.len());
            for (v, x) in channel.iter().enumerate() {
                steps[index(v)] = steps_of(*x, scale);
            }
        }
    }
}

/// The scale of one key channel.
fn scale(channel: &[f32]) -> f32 {
    let largest = channel.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    if !channel.iter().all(|x| x.is_finite()) {
        f32::NAN
    } else if largest == 0.0 {
        0.0
    } else {
        (largest / MOST_STEPS).max(f32::MIN_POSITIVE)
    }
}

/// The nearest whole number of scales; 0 where the scale says all there is.
fn steps_of(x: f32, scale: f32) -> i8 {
    if scale > 0.0 { (x / scale).round_ties_even().clamp(-MOST_STEPS, MOST_STEPS) as i8 } else { 0 }
}

/// Unpacks the packed slot at byte `source` of `from` to the slot at byte `target` of `to`.
pub fn unpack(packing: &Packing, from: &Arena, source: usize, to: &mut Arena, target: usize) {
    packing.check((to, target), (from, source));
    for (part, target, source) in packing.places(target, source) {
        match part {
            Part::Plain { bytes } => to.copy_from(target, from, source, bytes),
            Part::State { heads, value_dim, key_dim } => {
                let state = to.f32s_mut(target, heads * value_dim * key_dim);
                match packing.dtype {
                    PackedDtype::Bf16 => {
                        let packed = from.values::<bf16>(source, state.len());
                        for (x, packed) in state.iter_mut().zip(packed) {
                            *x = packed.to_f32();
                        }
                    }
                    PackedDtype::Int8 => {
                        let scales = from.f32s(source, heads * key_dim);
                        let steps_at = source + size_of_val(scales);
                        let steps = from.values::<i8>(steps_at, state.len());
                        for (i, x) in state.iter_mut().enumerate() {
                            let head = i / (value_dim * key_dim);
                            *x = f32::from(steps[i]) * scales[head * key_dim + i % key_dim];
                        }
                    }
                }
            }
        }
    }
}

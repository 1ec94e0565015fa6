//! The definition: the recurrence, row by row, whatever the form.

use super::{Gate, Inputs, Shape, States};
use crate::norm;
use crate::rows::{Rows, RowsMut};
use crate::span::NO_SLOT;

/// Runs every span; see the module's description.
pub fn kda(shape: Shape, inputs: Inputs<'_>, states: States<'_>, mut out: RowsMut<'_>) {
    inputs.check(&shape);
    let (dk, dv) = (shape.key_dim, shape.value_dim);
    for span in states.spans.all() {
        for head in 0..shape.value_heads {
            let at = states.at + head * shape.head_state() * size_of::<f32>();
            let mut state = vec![0.0; shape.head_state()];
            if span.read != NO_SLOT {
                state.copy_from_slice(states.arena.f32s(span.read + at, shape.head_state()));
            }
            for r in 0..span.rows {
                let row = span.first_row + r;
                let output = &mut out.row(row)[head * dv..(head + 1) * dv];
                recurrence(shape, inputs, row, head, &mut state, output);
                for snapshot in states.spans.snapshots(span) {
                    if snapshot.after_rows == r + 1 {
                        let slot = states.arena.f32s_mut(snapshot.slot + at, dk * dv);
                        slot.copy_from_slice(&state);
                    }
                }
            }
            states.arena.f32s_mut(span.write + at, dk * dv).copy_from_slice(&state);
        }
    }
}

fn recurrence(
    shape: Shape,
    inputs: Inputs<'_>,
    row: usize,
    head: usize,
    state: &mut [f32],
    out: &mut [f32],
) {
    let dk = shape.key_dim;
    let [q_at, k_at, v_at] = shape.columns(head);
    let qkv = inputs.qkv.row(row);
    let (mut q, mut k) = (vec![0.0; dk], vec![0.0; dk]);
    let scale = 1.0 / (dk as f32).sqrt();
    norm::naive::l2_norm(Rows::new(&qkv[q_at..q_at + dk], dk), scale, RowsMut::new(&mut q, dk));
    norm::naive::l2_norm(Rows::new(&qkv[k_at..k_at + dk], dk), 1.0, RowsMut::new(&mut k, dk));
    let per_head = inputs.decay.width() == shape.value_heads;
    let decay = |c: usize| inputs.decay.row(row)[if per_head { head } else { head * dk + c }];
    let beta = inputs.beta.row(row)[head];
    for (v, s) in state.chunks_exact_mut(dk).enumerate() {
        s.iter_mut().enumerate().for_each(|(c, s)| *s *= decay(c).exp());
        let read: f32 = s.iter().zip(&k).map(|(s, k)| s * k).sum();
        let write = beta * (qkv[v_at + v] - read);
        s.iter_mut().zip(&k).for_each(|(s, k)| *s += write * k);
        out[v] = s.iter().zip(&q).map(|(s, q)| s * q).sum();
    }
}

/// Turns the raw gate into log-decays where it lies: `raw` is `[rows][heads * group]`, `a_log`
/// `[heads]`, `bias` `[heads * group]`.
pub fn gate(kind: Gate, a_log: &[f32], bias: &[f32], mut raw: RowsMut<'_>) {
    let group = bias.len() / a_log.len();
    for i in 0..raw.count() {
        for (c, (x, bias)) in raw.row(i).iter_mut().zip(bias).enumerate() {
            let rate = a_log[c / group].exp();
            let z = *x + bias;
            *x = match kind {
                Gate::Softplus => -rate * (z.max(0.0) + (-z.abs()).exp().ln_1p()),
                Gate::Bounded { lower } => lower / (1.0 + (-rate * z).exp()),
            };
        }
    }
}

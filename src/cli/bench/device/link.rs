//! Copies between the host's pinned memory and the device's: the link, and sequences over it.

use kernels::BLOCK_LEN;
use kernels::cuda::{Cuda, CudaError, DeviceArena, Direction, HostArena, Piece};
use serde::Serialize;

use super::lab::Lab;
use super::report::{Judged, Target};
use super::shapes::Shapes;
use crate::cli::bench::spread::Spread;

/// Least share of the link's rate at which a sequence is swapped.
const SWAP_SHARE: f64 = 0.9;

/// What was measured of the link. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Link {
    /// Why the host's memory is not pinned, if it is not.
    pub not_pinned: Option<String>,
    pub rows: Vec<LinkRow>,
}

/// A copy. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct LinkRow {
    pub what: &'static str,
    /// Bytes of all directions together.
    pub bytes: usize,
    pub pieces: usize,
    /// In 10^9 bytes a second.
    pub gb_per_second: Spread,
    pub targets: Vec<Judged>,
}

/// Measures the link; targets are judged if `is_judged`.
pub fn measure(lab: &mut Lab, shapes: &Shapes, is_judged: bool) -> Result<Link, CudaError> {
    let sequence = sequence(shapes);
    let bytes = shapes.link_bytes.max(sequence.iter().map(|piece| piece.bytes).sum());
    let mut device = DeviceArena::new(&lab.cuda, 2 * bytes)?;
    let mut tiers = Vec::new();
    let mut not_pinned = None;
    // One for each direction: copies of one arena wait for each other.
    for _ in 0..2 {
        let (mut host, why) = HostArena::new(&lab.cuda, bytes, bytes)?;
        not_pinned = not_pinned.or(why.map(|why| why.to_string()));
        host.write()?.fill(1);
        tiers.push(host);
    }
    let mut rows = Vec::new();
    let whole = [Piece { device: 0, host: 0, bytes: shapes.link_bytes }];
    for (what, pieces, directions, share) in [
        ("to host", &whole[..], &[Direction::ToHost][..], None),
        ("to device", &whole, &[Direction::ToDevice], None),
        ("both ways", &whole, &[Direction::ToHost, Direction::ToDevice], None),
        ("sequence to host", &sequence, &[Direction::ToHost], Some(0)),
        ("sequence to device", &sequence, &[Direction::ToDevice], Some(1)),
    ] {
        let micros = lab
            .repeat(|cuda| copies(cuda, directions, (pieces, bytes), &mut device, &mut tiers), 1)?;
        let total: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let bytes = total * directions.len();
        let gb_per_second = rates(micros, bytes as f64 / 1e3);
        let judged = share.map(|of: usize| {
            let link: &LinkRow = &rows[of];
            let share = gb_per_second.median / link.gb_per_second.median;
            Target::LinkShare(SWAP_SHARE).judge(share, is_judged)
        });
        let targets = judged.into_iter().collect();
        rows.push(LinkRow { what, bytes, pieces: pieces.len(), gb_per_second, targets });
    }
    Ok(Link { not_pinned, rows })
}

/// What a number of things in each of so many microseconds is a rate of.
pub fn rates(micros: Spread, things: f64) -> Spread {
    Spread { min: things / micros.max, median: things / micros.median, max: things / micros.min }
}

/// Copies the pieces in each of the directions, all at once; the second has bytes of its own.
fn copies(
    cuda: &Cuda,
    directions: &[Direction],
    (pieces, bytes): (&[Piece], usize),
    device: &mut DeviceArena,
    tiers: &mut [HostArena],
) -> Result<(), CudaError> {
    let mut transfers = Vec::with_capacity(directions.len());
    for (i, (direction, host)) in directions.iter().zip(tiers).enumerate() {
        let behind = |piece: &Piece| Piece { device: piece.device + i * bytes, ..*piece };
        let pieces: Vec<Piece> = pieces.iter().map(behind).collect();
        transfers.push(cuda.transfer(*direction, &pieces, device, host)?);
    }
    transfers.iter().try_for_each(|transfer| cuda.follow(transfer))
}

/// The slot and the blocks of a sequence, as they are swapped: each in one piece, with something
/// between them.
fn sequence(shapes: &Shapes) -> Vec<Piece> {
    let inner = shapes.heads * shapes.head_dim;
    let of_layer = 4 * (inner * shapes.head_dim + (shapes.conv_width - 1) * 3 * inner);
    let slot = shapes.kda_layers * of_layer + 4 * shapes.hidden;
    let block = shapes.mla_layers * BLOCK_LEN * shapes.mla.row() * 2;
    let mut pieces = vec![Piece { device: 0, host: 0, bytes: slot.next_multiple_of(64) }];
    for _ in 0..shapes.context.div_ceil(BLOCK_LEN) {
        let last = pieces[pieces.len() - 1];
        let (device, host) = (last.device + last.bytes, last.host + last.bytes);
        pieces.push(Piece { device, host, bytes: block });
    }
    // Freed and taken again, blocks lie in any order on the device.
    let places: Vec<usize> = pieces[1..].iter().rev().map(|piece| piece.device).collect();
    for (piece, device) in pieces[1..].iter_mut().zip(places) {
        piece.device = device;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::super::shapes::KIMI_LINEAR;
    use super::*;

    /// `inspect` says 44,901,376 bytes of a slot and 516,096 of a block.
    #[test]
    fn a_sequence_has_the_bytes_of_the_model_and_no_piece_lies_on_another() {
        let pieces = sequence(&KIMI_LINEAR);
        assert_eq!((pieces[0].bytes, pieces[1].bytes), (44_901_376, 516_096));
        assert_eq!(pieces.len(), 129);
        for place in [|piece: &Piece| piece.device, |piece: &Piece| piece.host] {
            let mut places: Vec<_> = pieces.iter().map(|p| (place(p), p.bytes)).collect();
            places.sort_unstable();
            assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        }
    }
}

//! What choosing a token needs of logits, on a device.
//!
//! The draw itself stays on the host: it sums weights in double precision in an order of its own,
//! and may penalize, bias or rule out any token. A row whose draw is the likeliest token needs only
//! [`judge`]; one that keeps the first few by [`first`] is drawn from those with the same bits,
//! since a draw under top-k looks at no other token; all others need their row of logits.

use bytemuck::{Pod, Zeroable};

use super::launch::{Argument, Kernel};
use super::{Cuda, CudaError, DeviceBuffer, DeviceRows};

const FILE: &str = "sampling.cu";
const JUDGE: Kernel<JudgeArgument> = Kernel::new(FILE, "judge", 1024).shared(512);
const FIRST: Kernel<FirstArgument> = Kernel::new(FILE, "first", 1024).shared(9_232);

/// Most tokens that [`first`] gives.
pub const MOST_FIRST: usize = 1024;

#[repr(C)]
#[derive(Clone, Copy)]
struct JudgeArgument {
    logits: u64,
    out: u64,
    stride: i64,
    width: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in sampling.cu.
unsafe impl Argument for JudgeArgument {}

#[repr(C)]
#[derive(Clone, Copy)]
struct FirstArgument {
    logits: u64,
    out: u64,
    stride: i64,
    width: i32,
    count: i32,
}
// SAFETY: the struct of the same name in sampling.cu.
unsafe impl Argument for FirstArgument {}

/// What a row of logits is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// A distribution, whose likeliest token this is: the lowest id of equals.
    Likeliest(u32),
    /// The logit of this token is not a number; it is the first such.
    NotANumber(u32),
    /// The logit of this token is plus infinity; it is the first such, and all are numbers.
    Infinite(u32),
    /// Every logit is minus infinity.
    NothingLeft,
}

/// A [`Verdict`] as the device writes it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Judged {
    verdict: i32,
    id: u32,
}

impl From<Judged> for Verdict {
    fn from(judged: Judged) -> Verdict {
        match judged.verdict {
            0 => Verdict::Likeliest(judged.id),
            1 => Verdict::NotANumber(judged.id),
            2 => Verdict::Infinite(judged.id),
            _ => Verdict::NothingLeft,
        }
    }
}

/// A [`Verdict`] of each row.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When there is no room in `out`.
pub fn judge(
    cuda: &Cuda,
    logits: DeviceRows<'_>,
    out: &mut DeviceBuffer<Judged>,
) -> Result<(), CudaError> {
    let logits = logits.extent;
    assert!(logits.count <= out.len(), "{} rows", logits.count);
    let argument = JudgeArgument {
        logits: logits.at,
        out: out.address(),
        stride: logits.stride as i64,
        width: logits.width as i32,
        unused: 0,
    };
    // SAFETY: a block reads its row and writes one verdict, for which there is room.
    unsafe { cuda.launch(&JUDGE, [logits.count, 1, 1], argument) }
}

/// A token and its logit.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Candidate {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub score: f32,
}

/// The first `count` tokens of each row by falling logit, equal ones by rising id: `out` becomes
/// `[rows][count]`. Rows that are no distribution give what means nothing.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When `count` is more than [`MOST_FIRST`] or a row has, or there is no room in `out`.
pub fn first(
    cuda: &Cuda,
    logits: DeviceRows<'_>,
    count: usize,
    out: &mut DeviceBuffer<Candidate>,
) -> Result<(), CudaError> {
    let logits = logits.extent;
    assert!(count <= MOST_FIRST.min(logits.width), "the first {count} of {}", logits.width);
    assert!(logits.count * count <= out.len(), "{} rows", logits.count);
    let argument = FirstArgument {
        logits: logits.at,
        out: out.address(),
        stride: logits.stride as i64,
        width: logits.width as i32,
        count: count as i32,
    };
    // SAFETY: a block reads its row and writes `count` tokens, for which there is room.
    unsafe { cuda.launch(&FIRST, [logits.count, 1, 1], argument) }
}

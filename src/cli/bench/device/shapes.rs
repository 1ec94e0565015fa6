//! What operators are measured with.

use kernels::mla;

/// Widths and lengths.
#[derive(Debug)]
pub struct Shapes {
    /// Whose they are.
    pub name: &'static str,
    pub hidden: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub conv_width: usize,
    pub kda_layers: usize,
    pub mla: mla::Shape,
    pub mla_layers: usize,
    pub experts: usize,
    pub top_k: usize,
    pub inter: usize,
    pub vocabulary: usize,
    /// Sequences that generate together.
    pub sequences: &'static [usize],
    /// Tokens that each of them has.
    pub context: usize,
    /// Tokens of prompts.
    pub prompts: &'static [usize],
    /// Rows of a step of prompts.
    pub step: usize,
    /// Rows, outputs and inputs of the largest product.
    pub square: usize,
    /// Bytes that are copied on the device, and over the link.
    pub copy_bytes: usize,
    pub link_bytes: usize,
    /// Bytes that are copied to empty the second-level cache: more than it has.
    pub evict_bytes: usize,
    /// KDA of prompts whose times others have published.
    pub published: &'static [Published],
}

/// A time that others have published for KDA of prompts with heads of 128.
#[derive(Debug, Clone, Copy)]
pub struct Published {
    /// Tokens of all prompts together.
    pub tokens: usize,
    pub heads: usize,
    pub prompts: usize,
    pub micros: f64,
    /// By whom, on what.
    pub source: &'static str,
}

const fn published(
    (tokens, heads, prompts): (usize, usize, usize),
    micros: f64,
    source: &'static str,
) -> Published {
    Published { tokens, heads, prompts, micros, source }
}

const FLASH_KDA: &str = "FlashKDA, H100 SXM (cudnn-frontend #1017)";
const CULA: &str = "cuLA, H200 (BENCHMARK_H200.md)";

/// Those of Kimi-Linear-48B.
pub const KIMI_LINEAR: Shapes = Shapes {
    name: "Kimi-Linear-48B",
    hidden: 2304,
    heads: 32,
    head_dim: 128,
    conv_width: 4,
    kda_layers: 20,
    mla: mla::Shape { heads: 32, nope: 128, rope: 64, value_dim: 128, rank: 512 },
    mla_layers: 7,
    experts: 256,
    top_k: 8,
    inter: 1024,
    vocabulary: 163_840,
    sequences: &[1, 32, 128],
    context: 8192,
    prompts: &[512, 2048, 8192],
    step: 2048,
    square: 8192,
    copy_bytes: 2 << 30,
    link_bytes: 1 << 30,
    evict_bytes: 256 << 20,
    published: &[
        published((8192, 24, 1), 1003.0, FLASH_KDA),
        published((8192, 16, 1), 938.0, FLASH_KDA),
        published((16384, 16, 8), 503.0, FLASH_KDA),
        published((8192, 12, 4), 345.0, FLASH_KDA),
        published((2048, 16, 1), 288.0, FLASH_KDA),
        published((1024, 4, 1), 153.0, FLASH_KDA),
        published((512, 64, 1), 230.0, CULA),
        published((8192, 64, 1), 1758.0, CULA),
        published((16384, 64, 2), 2210.0, CULA),
    ],
};

/// Some kilobytes, of all that [`KIMI_LINEAR`] has.
pub const TINY: Shapes = Shapes {
    name: "tiny",
    hidden: 64,
    heads: 2,
    head_dim: 32,
    conv_width: 4,
    kda_layers: 2,
    mla: mla::Shape { heads: 2, nope: 16, rope: 16, value_dim: 16, rank: 48 },
    mla_layers: 2,
    experts: 6,
    top_k: 2,
    inter: 32,
    vocabulary: 200,
    sequences: &[1, 32],
    context: 128,
    prompts: &[100],
    step: 80,
    square: 128,
    copy_bytes: 1 << 20,
    link_bytes: 1 << 20,
    evict_bytes: 1 << 16,
    published: &[published((128, 2, 2), 1.0, "nobody, nowhere")],
};

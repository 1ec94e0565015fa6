//! simd
pub enum Isa {
    Scalar,
}

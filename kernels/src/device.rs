//! device
pub struct Cpu;

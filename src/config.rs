//! Limits of an engine, derived once, and what the machine has.

use std::fs;
use std::thread;

/// Rows of a step by default on a CPU.
pub const DEFAULT_MAX_NUM_BATCHED_TOKENS: usize = 512;

/// Below this a prompt could not advance from one grid position to the next.
pub const LEAST_MAX_NUM_BATCHED_TOKENS: usize = 64;

/// Most threads a gang may have.
pub const MOST_THREADS: usize = 1024;

/// Limits of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Tokens a step may compute.
    pub max_num_batched_tokens: usize,
    /// Tokens a sequence may reach, prompt and answer together.
    pub max_model_len: usize,
    /// Threads that compute.
    pub threads: usize,
}

/// A limit that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{flag} {value}: {reason}")]
pub struct InvalidLimit {
    /// The flag that sets it.
    pub flag: &'static str,
    /// What it was.
    pub value: usize,
    /// Why it cannot work, with a value that would.
    pub reason: String,
}

impl EngineConfig {
    /// Refuses limits that cannot work.
    ///
    /// # Errors
    /// The first such limit, with a value that would work.
    pub fn check(&self) -> Result<(), InvalidLimit> {
        let refuse = |flag, value, reason: &str| {
            Err(InvalidLimit { flag, value, reason: reason.to_owned() })
        };
        let rows = self.max_num_batched_tokens;
        if rows < LEAST_MAX_NUM_BATCHED_TOKENS {
            let reason = "a step must hold one cell of a prompt, 64 tokens or more";
            return refuse("--max-num-batched-tokens", rows, reason);
        }
        if !(1..=MOST_THREADS).contains(&self.threads) {
            return refuse("--threads", self.threads, "1 to 1024");
        }
        Ok(())
    }
}

/// Threads to compute with when nobody says: one for each core this process may use.
pub fn default_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS)
}

/// Bytes of memory that are free for new allocations, where the system says so.
pub fn available_memory() -> Option<usize> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_cannot_work_are_refused_with_one_that_would() {
        let good = EngineConfig { max_num_batched_tokens: 64, max_model_len: 1, threads: 1 };
        assert_eq!(good.check(), Ok(()));
        let error = EngineConfig { max_num_batched_tokens: 63, ..good }.check().unwrap_err();
        assert_eq!(
            error.to_string(),
            "--max-num-batched-tokens 63: a step must hold one cell of a prompt, 64 tokens or more"
        );
        let error = EngineConfig { threads: 0, ..good }.check().unwrap_err();
        assert_eq!(error.to_string(), "--threads 0: 1 to 1024");
    }
}

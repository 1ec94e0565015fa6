//! CPU time: what other work on the machine does not stretch.

use std::time::Duration;

use cpu_time::{ProcessTime, ThreadTime};

/// CPU time of this process so far, all its threads together.
pub fn process_cpu() -> Duration {
    ProcessTime::now().as_duration()
}

/// CPU time of the calling thread so far.
pub fn thread_cpu() -> Duration {
    ThreadTime::now().as_duration()
}

//! The machine that a figure was measured on, and what this process has taken of it.

use std::fs;

use kernels::Isa;
use serde::Serialize;

/// Which machine a figure belongs to. Field names are the keys of the JSON form.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// As the system names it; none where it does not.
    pub processor: Option<String>,
    /// Cores the system lets this process use.
    pub cores: usize,
    /// The instruction set kernels are run with.
    pub isa: &'static str,
}

impl Machine {
    /// This machine.
    pub fn this(isa: Isa) -> Machine {
        let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Machine { processor: processor(&text), cores, isa: isa.name() }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let processor = self.processor.as_deref().unwrap_or("unknown processor");
        write!(f, "{processor}, {} cores, {}", self.cores, self.isa)
    }
}

/// Name, family and model of the first processor in the text of `/proc/cpuinfo`: names alone do
/// not tell the generations of some makers apart.
fn processor(text: &str) -> Option<String> {
    let field = |wanted: &str| {
        let mut fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == wanted).map(|(_, value)| value.trim())
    };
    let name = field("model name")?;
    Some(match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => format!("{name} (family {family} model {model})"),
        _ => name.to_owned(),
    })
}

/// The most bytes of memory this process has had in use at a time; none where the system does not
/// say.
pub fn peak_rss_bytes() -> Option<usize> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_named_with_its_generation() {
        let text = "processor : 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n";
        assert_eq!(processor(text).as_deref(), Some("AMD EPYC (family 25 model 1)"));
        assert_eq!(processor("model name : X").as_deref(), Some("X"));
        assert_eq!(processor(""), None);
    }
}

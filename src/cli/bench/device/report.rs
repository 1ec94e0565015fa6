//! What `bench device` measures in which order, and what it prints: tables, and one JSON object.

use std::fmt;

use indicatif::ProgressBar;
use kernels::cuda::{Cuda, CudaError, DeviceArena};
use serde::Serialize;

use super::lab::Lab;
use super::link::{self, Link, rates};
use super::shapes::Shapes;
use super::{attention, products, recurrent};
use crate::cli::bench::spread::Spread;

/// The device whose targets are judged, by what its name has in it.
const JUDGED: &str = "H200";

/// The figures of a run. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Report {
    bench: &'static str,
    device: Device,
    shapes: &'static str,
    repeats: usize,
    /// Whether targets are judged: they are of one kind of device, and of real shapes.
    is_judged: bool,
    /// Bytes read and written, in 10^9 a second.
    copy_gb_per_second: Spread,
    /// Operations of the largest product, in 10^12 a second.
    product_tflop_per_second: Spread,
    link: Link,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    compute_capability: String,
    multiprocessors: usize,
    memory_bytes: usize,
    driver: String,
}

impl Device {
    fn of(cuda: &Cuda) -> Device {
        let properties = cuda.properties().clone();
        let (major, minor) = properties.capability;
        Device {
            name: properties.name,
            compute_capability: format!("{major}.{minor}"),
            multiprocessors: properties.multiprocessors,
            memory_bytes: properties.memory_bytes,
            driver: format!("{}.{}", properties.driver / 1000, properties.driver % 1000 / 10),
        }
    }
}

/// An operator. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Row {
    operator: &'static str,
    case: String,
    us: Spread,
    bytes: usize,
    operations: usize,
    gb_per_second: f64,
    tflop_per_second: f64,
    floor_us: f64,
    /// The floor over the median.
    floor_share: f64,
    /// What the floor is of.
    limit: &'static str,
    targets: Vec<Judged>,
}

/// What an operator cannot do without.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    pub bytes: usize,
    pub operations: usize,
}

/// What is wanted of a figure.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// At least this share of the rate at which memory is copied.
    CopyShare(f64),
    /// At least this share of the link's rate.
    LinkShare(f64),
    /// At most so many microseconds, by whom.
    Micros(f64, &'static str),
}

/// A target, and what became of it. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Judged {
    target: String,
    got: f64,
    /// `met`, `missed`, or `not judged`.
    verdict: &'static str,
}

impl Target {
    /// Holds what was got against it.
    pub fn judge(self, got: f64, is_judged: bool) -> Judged {
        let (target, is_met) = match self {
            Target::CopyShare(share) => {
                (format!(">= {:.0} % of the copy rate", 100.0 * share), got >= share)
            }
            Target::LinkShare(share) => {
                (format!(">= {:.0} % of the link", 100.0 * share), got >= share)
            }
            Target::Micros(most, by) => (format!("<= {most} us: {by}"), got <= most),
        };
        let verdict = match (is_judged, is_met) {
            (false, _) => "not judged",
            (true, true) => "met",
            (true, false) => "missed",
        };
        Judged { target, got, verdict }
    }

    fn got(self, micros: f64, copy_share: f64) -> f64 {
        match self {
            Target::Micros(..) => micros,
            Target::CopyShare(_) | Target::LinkShare(_) => copy_share,
        }
    }
}

impl Judged {
    fn got(&self) -> String {
        match self.target.starts_with(">=") {
            true => format!("{:.1} %", 100.0 * self.got),
            false => format!("{:.1} us", self.got),
        }
    }
}

/// What is measured with, and what was measured so far.
pub struct Bench<'a> {
    pub lab: Lab,
    bar: &'a ProgressBar,
    is_judged: bool,
    /// Bytes and operations a microsecond.
    limits: [f64; 2],
    rows: Vec<Row>,
}

impl Bench<'_> {
    /// Notes what an operator took.
    pub fn row(
        &mut self,
        operator: &'static str,
        case: String,
        us: Spread,
        cost: Cost,
        targets: Vec<Target>,
    ) {
        self.bar.set_message(format!("{operator} {case}"));
        let Cost { bytes, operations } = cost;
        let [memory, compute] = [bytes as f64 / self.limits[0], operations as f64 / self.limits[1]];
        let floor_us = memory.max(compute);
        let judge = |target: Target| {
            target.judge(target.got(us.median, memory / us.median), self.is_judged)
        };
        self.rows.push(Row {
            operator,
            case,
            us,
            bytes,
            operations,
            gb_per_second: bytes as f64 / us.median / 1e3,
            tflop_per_second: operations as f64 / us.median / 1e6,
            floor_us,
            floor_share: floor_us / us.median,
            limit: if memory > compute { "memory" } else { "compute" },
            targets: targets.into_iter().map(judge).collect(),
        });
    }
}

/// Measures all of it.
pub fn measure(
    cuda: Cuda,
    shapes: &'static Shapes,
    repeats: usize,
    bar: &ProgressBar,
) -> Result<Report, CudaError> {
    let mut cuda = cuda;
    cuda.compute = kernels::Compute::Bf16;
    let device = Device::of(&cuda);
    let is_judged = device.name.contains(JUDGED) && shapes.name != super::shapes::TINY.name;
    bar.set_message("the copy rate");
    let mut lab = Lab::new(cuda, repeats, shapes.evict_bytes)?;
    let copy = copy(&mut lab, shapes.copy_bytes)?;
    bar.set_message("the link");
    let link = link::measure(&mut lab, shapes, is_judged)?;
    let limits = [copy.median, 1.0];
    let mut bench = Bench { lab, bar, is_judged, limits, rows: Vec::new() };
    bar.set_message("the largest product");
    let product = products::ceiling(&mut bench, shapes)?;
    bench.limits[1] = product.median;
    recurrent::steps(&mut bench, shapes)?;
    attention::steps(&mut bench, shapes)?;
    recurrent::prompts(&mut bench, shapes)?;
    attention::prompts(&mut bench, shapes)?;
    products::products(&mut bench, shapes)?;
    products::experts(&mut bench, shapes)?;
    products::rows_alone(&mut bench, shapes)?;
    Ok(Report {
        bench: "device",
        device,
        shapes: shapes.name,
        repeats,
        is_judged,
        copy_gb_per_second: scaled(copy, 1e-3),
        product_tflop_per_second: scaled(product, 1e-6),
        link,
        rows: bench.rows,
    })
}

/// Bytes that a copy within the device reads and writes in a microsecond.
fn copy(lab: &mut Lab, bytes: usize) -> Result<Spread, CudaError> {
    let mut arena = DeviceArena::new(&lab.cuda, 2 * bytes)?;
    let micros = lab.repeat(|cuda| arena.copy_within(cuda, 0, bytes, bytes), 1)?;
    Ok(rates(micros, 2.0 * bytes as f64))
}

fn scaled(spread: Spread, by: f64) -> Spread {
    let Spread { min, median, max } = spread;
    Spread { min: min * by, median: median * by, max: max * by }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Device { name, compute_capability, multiprocessors, driver, .. } = &self.device;
        writeln!(
            f,
            "device     {name}, compute capability {compute_capability}, {multiprocessors} \
             multiprocessors, driver for CUDA {driver}"
        )?;
        writeln!(f, "shapes     {}; {} repeats of each", self.shapes, self.repeats)?;
        if !self.is_judged {
            writeln!(f, "targets    are of an {JUDGED} and real shapes: nothing is judged here")?;
        }
        if let Some(why) = &self.link.not_pinned {
            writeln!(f, "link       {why}")?;
        }
        let titles = format!("{:>9} {:>9} {:>9}", "min", "median", "max");
        writeln!(f, "\n{:<20}{titles}", "limits")?;
        writeln!(f, "{:<20}{} GB/s read and written", "copy", self.copy_gb_per_second)?;
        writeln!(f, "{:<20}{} TFLOP/s", "largest product", self.product_tflop_per_second)?;
        for row in &self.link.rows {
            let (bytes, pieces) = (row.bytes as f64 / 1e6, row.pieces);
            write!(f, "{:<20}{} GB/s, {bytes:.1} MB in {pieces}", row.what, row.gb_per_second)?;
            targets(f, &row.targets)?;
        }
        let columns = "     GB/s  TFLOP/s  floor us    of it  limit";
        writeln!(f, "\n{:<12}{:<28}{titles} us{columns}", "operator", "case")?;
        for row in &self.rows {
            let Row { operator, case, us, gb_per_second, tflop_per_second, .. } = row;
            write!(f, "{operator:<12}{case:<28}{us}    {gb_per_second:>8.1} ")?;
            write!(f, "{tflop_per_second:>8.2} {:>9.2}", row.floor_us)?;
            write!(f, " {:>6.1} %  {:<7}", 100.0 * row.floor_share, row.limit)?;
            targets(f, &row.targets)?;
        }
        Ok(())
    }
}

/// The targets behind a row, and the end of its line.
fn targets(f: &mut fmt::Formatter<'_>, targets: &[Judged]) -> fmt::Result {
    for judged in targets {
        write!(f, "  {} ({}): {}", judged.got(), judged.target, judged.verdict)?;
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_at_its_edge_and_judged_on_one_device_alone() {
        let share = Target::CopyShare(0.8);
        let verdicts = [0.8, 0.79].map(|got| share.judge(got, true).verdict);
        assert_eq!(verdicts, ["met", "missed"]);
        assert_eq!(share.judge(0.9, false).verdict, "not judged");
        let most = Target::Micros(40.0, "somebody").judge(40.1, true);
        assert_eq!((most.verdict, most.got().as_str()), ("missed", "40.1 us"));
        assert_eq!(most.target, "<= 40 us: somebody");
        assert_eq!(share.judge(0.8, true).got(), "80.0 %");
    }
}

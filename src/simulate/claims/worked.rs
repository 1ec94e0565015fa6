//! A formula being worked out.

/// The grids of the two columns, and what takes down a figure of each.
pub const GRIDS: [(usize, TakeDown); 2] = [(1, Worked::result), (64, Worked::grid_result)];

/// Takes down a figure of a claim, with its text and unit.
pub type TakeDown = fn(&mut Worked, &str, f64, &str) -> f64;

/// What a claim's work gives.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Worked {
    /// The figures, in the order of the claim's `expected`.
    pub values: Vec<f64>,
    /// The unit of each, empty for a bare number.
    pub units: Vec<String>,
    /// The figures of a model whose spans end at multiples of 64 tokens; empty where the grid plays
    /// no part. Those above are on a grid of 1.
    pub grid_values: Vec<f64>,
    /// The unit of each of them.
    pub grid_units: Vec<String>,
    /// How they came about, a line each.
    pub lines: Vec<String>,
}

impl Worked {
    /// What `work` writes down.
    pub fn by(work: impl FnOnce(&mut Worked)) -> Worked {
        let mut worked = Worked::default();
        work(&mut worked);
        worked
    }

    /// A figure of the claim, and the line that ends in it.
    pub fn result(&mut self, text: &str, value: f64, unit: &str) -> f64 {
        self.values.push(value);
        self.units.push(unit.to_owned());
        self.step(text, value, unit)
    }

    /// A figure on a grid of 64, and the line that ends in it.
    pub fn grid_result(&mut self, text: &str, value: f64, unit: &str) -> f64 {
        self.grid_values.push(value);
        self.grid_units.push(unit.to_owned());
        self.step(&format!("grid 64: {text}"), value, unit)
    }

    /// A figure on the way.
    pub fn step(&mut self, text: &str, value: f64, unit: &str) -> f64 {
        self.lines.push(format!("{text} = {} {unit}", figure(value)).trim_end().to_owned());
        value
    }

    /// The figures in a line, `-` if there are none; a unit stands behind the last figure that has
    /// it.
    pub fn figures(&self) -> String {
        listed(&self.values, &self.units)
    }

    /// The same of the figures on a grid of 64; `same` if they are those of a grid of 1.
    pub fn grid_figures(&self) -> String {
        let listed = listed(&self.grid_values, &self.grid_units);
        match !self.grid_values.is_empty() && listed == self.figures() {
            true => "same".to_owned(),
            false => listed,
        }
    }

    /// A line without a figure.
    pub fn note(&mut self, text: &str) {
        self.lines.push(text.to_owned());
    }
}

fn listed(values: &[f64], units: &[String]) -> String {
    let mut text = String::new();
    for (i, (value, unit)) in values.iter().zip(units).enumerate() {
        let is_last_of_unit = units.get(i + 1).is_none_or(|next| next != unit);
        let separator = match i {
            0 => "",
            _ if units[i - 1] == *unit => ", ",
            _ => "; ",
        };
        text += &format!("{separator}{}", figure(*value));
        if is_last_of_unit && !unit.is_empty() {
            text += &format!(" {unit}");
        }
    }
    if text.is_empty() { "-".to_owned() } else { text }
}

/// A number as a reader can check it: whole ones below ten billion as they are, others to five
/// digits.
pub fn figure(value: f64) -> String {
    if value.is_infinite() {
        return "infinite".to_owned();
    }
    let size = value.abs();
    if value.fract() == 0.0 && size < 1e10 {
        return format!("{value}");
    }
    if !(1e-4..1e7).contains(&size) {
        return format!("{value:.4e}");
    }
    let whole_digits = size.log10().floor() as i32 + 1;
    let decimals = (5 - whole_digits).max(0) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_stands_behind_the_last_figure_that_has_it() {
        let worked = Worked::by(|w| {
            w.result("a", 1.5, "ms");
            w.result("b", 2.0, "ms");
            w.result("c", 0.5, "");
            w.result("d", 3.0, "x");
        });
        assert_eq!(worked.figures(), "1.5000, 2 ms; 0.50000; 3 x");
        assert_eq!(worked.lines[0], "a = 1.5000 ms");
        assert_eq!(Worked::default().figures(), "-");
    }

    #[test]
    fn figures_on_a_grid_are_told_where_they_are_others() {
        let by = |on_grid: &[f64]| {
            let mut worked = Worked::default();
            worked.result("a", 18.0, "steps");
            for value in on_grid {
                worked.grid_result("a", *value, "steps");
            }
            worked.grid_figures()
        };
        assert_eq!([by(&[]), by(&[18.0]), by(&[19.0])], ["-", "same", "19 steps"]);
    }

    #[test]
    fn figures_have_five_digits_and_whole_numbers_all_of_theirs() {
        let shown =
            [0.0, 163.0, 217_055_232.0, 0.034336, 12_110.94, 1.234841e15, 2.5e-7, 7.16].map(figure);
        let expected =
            ["0", "163", "217055232", "0.034336", "12111", "1.2348e15", "2.5000e-7", "7.1600"];
        assert_eq!(shown, expected);
        assert_eq!(figure(f64::INFINITY), "infinite");
    }
}

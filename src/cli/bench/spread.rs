//! How far measurements of one thing lie apart.

use std::fmt;

use serde::Serialize;

/// Least, middle and greatest of some values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

impl Spread {
    /// The spread of `values`; none when there are none.
    pub fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let half = values.len() / 2;
        let median = match values.len() % 2 {
            1 => values[half],
            _ => (values[half - 1] + values[half]) / 2.0,
        };
        Some(Spread { min, median, max })
    }
}

/// Three columns.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = f.precision().unwrap_or(1);
        let Spread { min, median, max } = self;
        write!(f, "{min:>9.places$} {median:>9.places$} {max:>9.places$}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(Spread::of(Vec::new()), None);
        let of = |values: &[f64]| Spread::of(values.to_vec()).expect("some values").median;
        assert_eq!((of(&[3.0, 1.0, 2.0]), of(&[4.0, 1.0, 3.0, 2.0])), (2.0, 2.5));
    }
}

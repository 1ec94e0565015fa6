//! A straight line through measurements.

/// The line that is off the least, by the squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// The mean of the points, which it goes through.
    mean: (f64, f64),
    /// By how much it rises for each unit of x.
    pub slope: f64,
    /// How much of the spread of y it explains (R^2); none where y or x has none.
    pub r_squared: Option<f64>,
}

impl Line {
    /// The line through `points`; level through points of one x.
    pub fn through(points: &[(f64, f64)]) -> Line {
        let count = points.len().max(1) as f64;
        let sum = |value: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(value).sum::<f64>();
        let (x, y) = (sum(&|point| point.0) / count, sum(&|point| point.1) / count);
        let of = |term: &dyn Fn(f64, f64) -> f64| sum(&|point| term(point.0 - x, point.1 - y));
        let (xx, xy, yy) = (of(&|x, _| x * x), of(&|x, y| x * y), of(&|_, y| y * y));
        Line {
            mean: (x, y),
            slope: if xx > 0.0 { xy / xx } else { 0.0 },
            r_squared: (xx > 0.0 && yy > 0.0).then(|| xy * xy / (xx * yy)),
        }
    }

    /// The line through the same mean that does not fall.
    pub fn rising(self) -> Line {
        Line { slope: self.slope.max(0.0), ..self }
    }

    /// Its height at `x`.
    pub fn at(&self, x: f64) -> f64 {
        self.mean.1 + self.slope * (x - self.mean.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_straight_line_is_told_from_a_cloud() {
        let line = Line::through(&[(1., 3.), (2., 5.), (3., 7.)]);
        assert_eq!((line.at(0.0), line.slope, line.r_squared), (1.0, 2.0, Some(1.0)));
        let cloud = Line::through(&[(1., 1.), (2., 5.), (3., 1.)]);
        assert!(cloud.r_squared.is_some_and(|share| share < 0.1));
    }

    #[test]
    fn a_line_through_steps_is_found() {
        let steps: Vec<(f64, f64)> = (1..20).map(f64::from).map(|n| (n, 0.5 + 0.25 * n)).collect();
        assert!((Line::through(&steps).at(100.0) - 25.5).abs() < 1e-9);
    }

    #[test]
    fn points_without_a_spread_have_a_level_line() {
        let line = Line::through(&[(2., 1.), (2., 3.)]);
        assert_eq!((line.at(9.0), line.r_squared), (2.0, None));
        assert_eq!(Line::through(&[(1., 3.), (2., 1.)]).rising().at(5.0), 2.0);
    }
}

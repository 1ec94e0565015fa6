//! Charts: one description, drawn as text for a terminal or as SVG for a file, or listed as CSV.
//!
//! A point that its axes have no place for (not finite, or not above 0 on a logarithmic axis) is
//! left out.

mod svg;
mod text;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;

use super::CliError;
use super::output::print;

/// Columns and rows of a chart in a terminal.
const TEXT_SIZE: (usize, usize) = (78, 20);

/// Where a chart goes beside the terminal.
#[derive(Debug, Args)]
pub struct DrawingArgs {
    /// Draw the chart as SVG.
    #[arg(long, value_name = "FILE", value_parser = parse_file)]
    pub svg: Option<PathBuf>,
    /// Write the points of the chart as CSV.
    #[arg(long, value_name = "FILE", value_parser = parse_file)]
    pub csv: Option<PathBuf>,
}

fn parse_file(text: &str) -> Result<PathBuf, String> {
    match text {
        "-" => Err("standard output has the text: name a file".to_owned()),
        text => Ok(text.into()),
    }
}

impl DrawingArgs {
    /// The files that are asked for.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.svg, &self.csv].into_iter().flatten().map(PathBuf::as_path)
    }

    /// Whether a file is asked for.
    pub fn is_asked(&self) -> bool {
        self.files().next().is_some()
    }

    /// Writes a chart to the files that are asked for.
    ///
    /// # Errors
    /// A file that cannot be written, by its name.
    pub fn write(&self, chart: &Chart) -> Result<(), CliError> {
        if let Some(path) = &self.svg {
            chart.write_svg(path)?;
        }
        match &self.csv {
            Some(path) => {
                fs::write(path, chart.csv()).map_err(|source| CliError::file(path, source))
            }
            None => Ok(()),
        }
    }

    /// Shows a chart in the terminal, and writes it where that is asked for.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn show(&self, chart: &Chart) -> Result<(), CliError> {
        print(&chart.text(TEXT_SIZE.0, TEXT_SIZE.1))?;
        self.write(chart)
    }
}

/// How values lie on an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Equal steps for equal differences.
    Linear,
    /// Equal steps for equal ratios; values above 0 alone.
    Log,
}

/// An axis.
#[derive(Debug, Clone)]
pub struct Axis {
    /// What its values are, with the unit.
    pub label: String,
    /// How they lie.
    pub scale: Scale,
}

/// How the points of a series are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A line through them.
    Line,
    /// A line, and a dot at each.
    Dots,
    /// A dot at each, and no line.
    Points,
    /// A bar from the first to the second, from the third to the fourth, and so on.
    Bars,
}

/// Points with a name.
#[derive(Debug, Clone)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// How it is drawn.
    pub mark: Mark,
    /// Its colour in SVG: series of one number have one colour.
    pub colour: usize,
    /// Its points, `(x, y)`; x ascending where a line is drawn.
    pub points: Vec<(f64, f64)>,
}

/// A chart.
#[derive(Debug, Clone)]
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// Along the bottom.
    pub x: Axis,
    /// Up the side.
    pub y: Axis,
    /// What is drawn, the last on top.
    pub series: Vec<Series>,
}

impl Chart {
    /// The chart as lines of text of up to `width` columns, with `height` of them for the plot.
    pub fn text(&self, width: usize, height: usize) -> String {
        text::draw(self, width, height)
    }

    /// Writes the chart as SVG.
    ///
    /// # Errors
    /// A file that cannot be written, by its name.
    pub fn write_svg(&self, path: &Path) -> Result<(), CliError> {
        let svg = svg::draw(self).map_err(CliError::Failed)?;
        fs::write(path, svg).map_err(|source| CliError::file(path, source))
    }

    /// The points as CSV: the series, x, y.
    pub fn csv(&self) -> String {
        let mut text = format!("series,{},{}\n", quoted(&self.x.label), quoted(&self.y.label));
        for series in &self.series {
            let name = quoted(&series.name);
            series.points.iter().for_each(|(x, y)| text += &format!("{name},{x},{y}\n"));
        }
        text
    }

    /// Where the points of `series` lie that can be drawn.
    fn drawn<'a>(&'a self, series: &'a Series) -> impl Iterator<Item = (f64, f64)> + 'a {
        let has_place = |&(x, y): &(f64, f64)| self.x.has_place(x) && self.y.has_place(y);
        series.points.iter().copied().filter(has_place)
    }

    /// From the least to the greatest value on each axis, with some room around; none without a
    /// point.
    fn ranges(&self) -> Option<(Range, Range)> {
        let points: Vec<(f64, f64)> = self.series.iter().flat_map(|s| self.drawn(s)).collect();
        let x = Range::of(self.x.scale, points.iter().map(|point| point.0))?;
        let y = Range::of(self.y.scale, points.iter().map(|point| point.1))?;
        Some((x, y.roomy()))
    }
}

impl Axis {
    /// An axis for values of this name.
    pub fn new(label: &str, scale: Scale) -> Axis {
        Axis { label: label.to_owned(), scale }
    }

    fn has_place(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }
}

/// Values of an axis from one end to the other, which differ.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Range {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Range {
    /// The range of `values`; none when there are none.
    fn of(scale: Scale, values: impl Iterator<Item = f64> + Clone) -> Option<Range> {
        let low = values.clone().min_by(f64::total_cmp)?;
        let high = values.max_by(f64::total_cmp)?;
        let range = Range { scale, low, high };
        Some(if low < high { range } else { range.around() })
    }

    /// A range around its one value.
    fn around(self) -> Range {
        match self.scale {
            Scale::Log => Range { low: self.low / 2.0, high: self.high * 2.0, ..self },
            Scale::Linear => {
                let room = (self.low.abs() / 2.0).max(0.5);
                Range { low: self.low - room, high: self.high + room, ..self }
            }
        }
    }

    /// The range with a twentieth more at either end, a linear one from 0 if it was above it.
    fn roomy(self) -> Range {
        let (low, high) = (self.value(-0.05), self.value(1.05));
        match self.scale {
            Scale::Linear if self.low >= 0.0 => Range { low: 0.0, high, ..self },
            _ => Range { low, high, ..self },
        }
    }

    /// Where a value lies: 0 at the low end, 1 at the high end.
    fn place(self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    /// The value at a place.
    fn value(self, place: f64) -> f64 {
        match self.scale {
            Scale::Linear => self.low + place * (self.high - self.low),
            Scale::Log => self.low * (self.high / self.low).powf(place),
        }
    }
}

/// A field of CSV (RFC 4180).
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

/// A value as an axis shows it: three digits or so, thousands in words of one letter.
fn number(value: f64) -> String {
    let (value, unit) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 0.001 || size == 0.0 => format!("{value:.3}"),
        _ => return format!("{value:.1e}"),
    };
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: Scale, points: &[(f64, f64)]) -> Chart {
        let series = Series {
            name: "a <b> & \"c\"".into(),
            mark: Mark::Dots,
            colour: 0,
            points: points.to_vec(),
        };
        let axis = |label| Axis::new(label, scale);
        Chart { title: "title".into(), x: axis("x"), y: axis("y"), series: vec![series] }
    }

    #[test]
    fn a_text_chart_has_its_points_where_they_lie_and_names_what_it_draws() {
        let text = chart(Scale::Log, &[(1.0, 1.0), (100.0, 100.0)]).text(60, 11);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "title");
        let plot = &lines[1..12];
        let marks =
            |line: &str| line.split_once('|').map_or(0, |(_, row)| row.matches('o').count());
        // A straight line from the bottom left to the top right.
        assert!(plot.iter().all(|line| marks(line) > 0), "{text}");
        let column = |line: &str| line.find('o').expect("a mark");
        assert!(plot.windows(2).all(|pair| column(pair[0]) > column(pair[1])), "{text}");
        assert!(lines.last().expect("a legend").contains("o a <b>"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 60), "{text}");
    }

    #[test]
    fn what_has_no_place_on_an_axis_is_left_out() {
        let odd = [(0.0, 5.0), (1.0, f64::NAN), (2.0, -1.0), (3.0, f64::INFINITY)];
        assert!(chart(Scale::Log, &odd).text(60, 8).contains("nothing to draw"));
        assert!(svg::draw(&chart(Scale::Log, &odd)).is_ok());
        let one = chart(Scale::Linear, &[(7.0, 7.0)]);
        assert!(one.text(60, 8).contains('o'));
        assert!(svg::draw(&one).is_ok());
    }

    #[test]
    fn svg_is_drawn_on_all_axes_and_its_texts_are_escaped() {
        for x in [Scale::Linear, Scale::Log] {
            for y in [Scale::Linear, Scale::Log] {
                let mut chart = chart(x, &[(64.0, 0.5), (8192.0, 900.0)]);
                chart.y.scale = y;
                let svg = svg::draw(&chart).expect("it draws");
                assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
                assert!(svg.contains("polyline") && svg.contains("a &lt;b&gt; &amp;"), "{svg}");
            }
        }
    }

    #[test]
    fn bars_are_drawn_from_point_to_point_and_nothing_between_them() {
        let mut chart = chart(Scale::Linear, &[(0.0, 1.0), (2.0, 1.0), (8.0, 1.0), (10.0, 1.0)]);
        chart.series[0].mark = Mark::Bars;
        let text = chart.text(61, 3);
        let row = text.lines().find(|line| line.contains('o')).expect("a row");
        assert_eq!(row.matches('o').count(), 22, "{text}");
        assert!(row.contains("o     ") && row.trim_end().ends_with("ooo"), "{text}");
        let svg = svg::draw(&chart).expect("it draws");
        let widths = svg.matches("stroke-width=\"7\"").count();
        assert_eq!(widths, 2, "{svg}");
        chart.series[0].mark = Mark::Points;
        assert_eq!(chart.text(61, 3).matches('o').count(), 4 + 1);
    }

    #[test]
    fn csv_has_a_line_for_each_point_and_quotes_what_needs_it() {
        let mut chart = chart(Scale::Linear, &[(1.0, 2.5), (3.0, 4.0)]);
        chart.y.label = "%, or states".to_owned();
        let name = "\"a <b> & \"\"c\"\"\"";
        let expected = format!("series,x,\"%, or states\"\n{name},1,2.5\n{name},3,4\n");
        assert_eq!(chart.csv(), expected);
    }

    #[test]
    fn numbers_on_axes_are_short() {
        let values = [0.0, 0.00012, 0.05, 1.5, 12.34, 640.0, 8192.0, 131_072.0, 2.5e6, 3e9];
        let texts = ["0", "1.2e-4", "0.05", "1.5", "12.3", "640", "8192", "131k", "2.5M", "3G"];
        assert_eq!(values.map(number), texts);
    }
}

//! A chart as SVG. Nothing is read from the system: fonts are named, not measured.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::combinators::BindKeyPoints;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::{Chart, Mark, Scale, Series, number};

/// Width and height.
const SIZE: (u32, u32) = (960, 600);

/// Colours that can be told apart by most eyes.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(60, 60, 60),
];

/// Height of a bar.
const BAR: u32 = 7;

/// Width of the legend, right of the chart; length of its samples, and height of a line.
const LEGEND: u32 = 210;
const SAMPLE: i32 = 22;
const LINE: i32 = 22;

/// Letters of a name in the legend, and of the title: what there is room for.
const NAME_LETTERS: usize = 28;
const TITLE_LETTERS: usize = 92;

/// The chart as the text of an SVG file.
///
/// # Errors
/// What the library says; no chart is known to cause one.
pub fn draw(chart: &Chart) -> Result<String, String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|error| error.to_string())?;
        let (x, y) = match chart.ranges() {
            Some((x, y)) => (x.low..x.high, y.low..y.high),
            None => (1.0..2.0, 1.0..2.0),
        };
        let title = shortened(&chart.title, TITLE_LETTERS);
        let below = root.titled(&title, ("sans-serif", 20)).map_err(|error| error.to_string())?;
        let (left, right) = below.split_horizontally(SIZE.0 - LEGEND);
        let log = |range: Range<f64>| {
            let labels = ticks(&range);
            range.log_scale().with_key_points(labels)
        };
        match (chart.x.scale, chart.y.scale) {
            (Scale::Linear, Scale::Linear) => plot(&left, chart, x, y)?,
            (Scale::Linear, Scale::Log) => plot(&left, chart, x, log(y))?,
            (Scale::Log, Scale::Linear) => plot(&left, chart, log(x), y)?,
            (Scale::Log, Scale::Log) => plot(&left, chart, log(x), log(y))?,
        }
        legend(&right, &chart.series).map_err(|error| error.to_string())?;
        root.present().map_err(|error| error.to_string())?;
    }
    Ok(svg)
}

fn plot<X, Y>(
    root: &DrawingArea<SVGBackend<'_>, Shift>,
    chart: &Chart,
    x: X,
    y: Y,
) -> Result<(), String>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let text = |error: DrawingAreaErrorKind<_>| error.to_string();
    let mut area = ChartBuilder::on(root)
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(72)
        .build_cartesian_2d(x, y)
        .map_err(text)?;
    area.configure_mesh()
        .x_desc(&chart.x.label)
        .y_desc(&chart.y.label)
        .x_label_formatter(&|value| number(*value))
        .y_label_formatter(&|value| number(*value))
        .x_labels(8)
        .y_labels(8)
        .max_light_lines(3)
        .light_line_style(RGBColor(240, 240, 240))
        .draw()
        .map_err(text)?;
    for series in &chart.series {
        let colour = colour_of(series);
        let style = colour.stroke_width(match series.mark {
            Mark::Line => 1,
            Mark::Dots | Mark::Points => 2,
            Mark::Bars => BAR,
        });
        let points: Vec<(f64, f64)> = chart.drawn(series).collect();
        let pieces = match series.mark {
            Mark::Line | Mark::Dots => vec![points.clone()],
            Mark::Bars => points.chunks_exact(2).map(<[_]>::to_vec).collect(),
            Mark::Points => Vec::new(),
        };
        let lines = pieces.into_iter().map(|piece| PathElement::new(piece, style));
        area.draw_series(lines).map_err(text)?;
        if matches!(series.mark, Mark::Dots | Mark::Points) {
            let dots = points.iter().map(|point| Circle::new(*point, 4, colour.filled()));
            area.draw_series(dots).map_err(text)?;
        }
    }
    Ok(())
}

/// What the colours stand for.
fn legend(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    series: &[Series],
) -> Result<(), DrawingAreaErrorKind<<SVGBackend<'static> as DrawingBackend>::ErrorType>> {
    for (line, series) in (1..).zip(series) {
        let (y, colour) = (LINE * line, colour_of(series));
        let is_dot = series.mark == Mark::Points;
        match is_dot {
            true => area.draw(&Circle::new((SAMPLE / 2, y), 4, colour.filled()))?,
            false => {
                let sample = vec![(0, y), (SAMPLE, y)];
                area.draw(&PathElement::new(sample, colour.stroke_width(2)))?;
            }
        }
        let name = shortened(&series.name, NAME_LETTERS);
        area.draw(&Text::new(name, (SAMPLE + 6, y - 6), ("sans-serif", 13)))?;
    }
    Ok(())
}

fn colour_of(series: &Series) -> RGBColor {
    COLOURS[series.colour % COLOURS.len()]
}

fn shortened(text: &str, letters: usize) -> String {
    match text.char_indices().nth(letters) {
        Some(_) => text.chars().take(letters - 2).chain("..".chars()).collect(),
        None => text.to_owned(),
    }
}

/// Where a logarithmic axis has labels: at 1, 2 and 5 times the powers of ten, or at these alone
/// where there are many.
fn ticks(range: &Range<f64>) -> Vec<f64> {
    const FEW_DECADES: f64 = 3.0;
    let (low, high) = (range.start.log10(), range.end.log10());
    let factors: &[f64] = if high - low < FEW_DECADES { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let powers = low.floor() as i32..=high.ceil() as i32;
    let all = powers.flat_map(|power| factors.iter().map(move |x| x * 10f64.powi(power)));
    all.filter(|x| (range.start..=range.end).contains(x)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logarithmic_axis_has_labels_however_short_it_is() {
        assert_eq!(ticks(&(30.0..700.0)), [50.0, 100.0, 200.0, 500.0]);
        assert_eq!(ticks(&(0.5..100_000.0)), [1.0, 10.0, 100.0, 1e3, 1e4, 1e5]);
    }
}

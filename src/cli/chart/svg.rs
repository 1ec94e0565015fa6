//! A chart as SVG. Nothing is read from the system: fonts are named, not measured.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::{Chart, Mark, Scale, number};

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

/// Length of a legend's line.
const SAMPLE: i32 = 22;

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
        match (chart.x.scale, chart.y.scale) {
            (Scale::Linear, Scale::Linear) => plot(&root, chart, x, y)?,
            (Scale::Linear, Scale::Log) => plot(&root, chart, x, y.log_scale())?,
            (Scale::Log, Scale::Linear) => plot(&root, chart, x.log_scale(), y)?,
            (Scale::Log, Scale::Log) => plot(&root, chart, x.log_scale(), y.log_scale())?,
        }
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
        .caption(&chart.title, ("sans-serif", 20))
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
        let colour = COLOURS[series.colour % COLOURS.len()];
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
        area.draw_series(lines)
            .map_err(text)?
            .label(&series.name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + SAMPLE, y)], style));
        if matches!(series.mark, Mark::Dots | Mark::Points) {
            let dots = points.iter().map(|point| Circle::new(*point, 4, colour.filled()));
            area.draw_series(dots).map_err(text)?;
        }
    }
    area.configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .legend_area_size(SAMPLE + 8)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(160, 160, 160))
        .draw()
        .map_err(text)
}

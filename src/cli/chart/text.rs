//! A chart in letters.

use super::{Chart, Mark, Range, Series, number};

/// Letters of the series, in turn.
const LETTERS: &[u8] = b"ox+*#@%&=~";

/// Columns of the labels on the left.
const LABELS: usize = 9;

/// Rows between two labels.
const ROWS_A_LABEL: usize = 4;

/// Columns between two labels below.
const COLUMNS_A_LABEL: usize = 14;

/// The chart with `height` rows of plot, all in `width` columns.
pub fn draw(chart: &Chart, width: usize, height: usize) -> String {
    let title = wrapped(&chart.title, width);
    let Some((x, y)) = chart.ranges() else { return format!("{title}\nnothing to draw\n") };
    let columns = width.saturating_sub(LABELS + 2).max(2);
    let mut plot = Plot { x, y, cells: vec![vec![b' '; columns]; height.max(2)] };
    for (series, letter) in chart.series.iter().zip(LETTERS.iter().cycle()) {
        let points: Vec<(f64, f64)> = chart.drawn(series).collect();
        let piece = match series.mark {
            Mark::Line | Mark::Dots => points.len(),
            Mark::Bars => 2,
            Mark::Points => 1,
        };
        points.chunks(piece.max(1)).for_each(|piece| plot.draw(piece, *letter));
    }
    let mut text = format!("{title}\n");
    let last = plot.cells.len() - 1;
    for (row, cells) in plot.cells.iter().enumerate() {
        let is_labelled = row % ROWS_A_LABEL == 0 || row == last;
        let value = y.value((last - row) as f64 / last as f64);
        let label = if is_labelled { number(value) } else { String::new() };
        text += &format!("{label:>LABELS$} |{}\n", String::from_utf8_lossy(cells).trim_end());
    }
    text += &format!("{:LABELS$} +{}\n", "", "-".repeat(columns));
    text += &below(x, columns);
    let axes = format!("{:LABELS$}  x: {}, y: {}\n", "", chart.x.label, chart.y.label);
    text + &axes + &legend(&chart.series, width)
}

/// Lines of whole words, none longer than `width` but for a word that is.
fn wrapped(text: &str, width: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                *line += " ";
                *line += word;
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

struct Plot {
    x: Range,
    y: Range,
    /// Rows, the uppermost first.
    cells: Vec<Vec<u8>>,
}

impl Plot {
    /// Draws a line through `points`, or a letter where there is one alone.
    fn draw(&mut self, points: &[(f64, f64)], letter: u8) {
        let (rows, columns) = (self.cells.len() - 1, self.cells[0].len() - 1);
        let places: Vec<(f64, f64)> = points
            .iter()
            .map(|(x, y)| {
                (self.x.place(*x) * columns as f64, (1.0 - self.y.place(*y)) * rows as f64)
            })
            .collect();
        let mut dot = |column: f64, row: f64| {
            self.cells[row.round() as usize][column.round() as usize] = letter;
        };
        places.iter().for_each(|(column, row)| dot(*column, *row));
        for pair in places.windows(2) {
            let [(column, row), (to_column, to_row)] = [pair[0], pair[1]];
            let steps = (to_column - column).abs().max((to_row - row).abs()).ceil();
            for step in 1..steps as usize {
                let way = step as f64 / steps;
                dot(column + way * (to_column - column), row + way * (to_row - row));
            }
        }
    }
}

/// The labels below.
fn below(x: Range, columns: usize) -> String {
    let mut line = " ".repeat(LABELS + 2);
    let labels = (columns / COLUMNS_A_LABEL).max(1);
    for label in 0..=labels {
        let place = label as f64 / labels as f64;
        let text = number(x.value(place));
        // The last one ends where the plot does.
        let at = LABELS + 2 + (place * (columns - 1) as f64).round() as usize;
        let at = at.min(LABELS + 2 + columns - text.len().min(columns));
        line += &" ".repeat(at.saturating_sub(line.len()));
        line += &text;
    }
    line + "\n"
}

/// The letters and what they stand for, as many a line as there is room for.
fn legend(series: &[Series], width: usize) -> String {
    let mut lines = vec![String::new()];
    for (series, letter) in series.iter().zip(LETTERS.iter().cycle()) {
        let entry = format!("{} {}", char::from(*letter), series.name);
        let line = lines.last_mut().expect("there is one");
        let gap = if line.is_empty() { LABELS + 2 } else { 3 };
        if !line.is_empty() && line.chars().count() + gap + entry.chars().count() > width {
            lines.push(" ".repeat(LABELS + 2) + &entry);
        } else {
            *line += &(" ".repeat(gap) + &entry);
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

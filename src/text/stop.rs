//! Stop strings, found across token borders.

use super::TextError;

/// Finds stop strings in text that arrives in pieces.
///
/// The match that ends first wins, and of those that end together the longest. With that rule the
/// outcome is the same however the text is cut into pieces: a stream stops at the first character
/// that completes a stop string, and never waits to see whether a longer one might have begun
/// earlier.
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text that could be the start of a stop string: a proper prefix of one.
    held: String,
    stopped_by: Option<usize>,
    /// Whether the stop string that matched is part of the text.
    including: bool,
}

/// Text that no stop string can touch any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// The text; if a stop string matched it ends before it, or behind it where that is asked for.
    pub text: String,
    /// Whether more text was given than up to the end of the stop string.
    pub is_cut: bool,
    /// Which stop string matched, by its place in the list.
    pub stopped_by: Option<usize>,
}

impl StopMatcher {
    /// A matcher for these stop strings; none at all is fine, an empty one is refused.
    pub fn new(stops: Vec<String>) -> Result<Self, TextError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::EmptyStopString { index });
        }
        Ok(Self { stops, held: String::new(), stopped_by: None, including: false })
    }

    /// Leaves the stop string that matches in the text.
    pub fn including(self) -> Self {
        Self { including: true, ..self }
    }

    /// Whether the stop string that matches is left in the text.
    pub fn is_including(&self) -> bool {
        self.including
    }

    /// Takes the next piece and returns what is safe to show. After a match all text is dropped.
    pub fn push(&mut self, text: &str) -> Released {
        if self.stopped_by.is_none() {
            self.held.push_str(text);
            if let Some((start, index)) = self.first_match() {
                self.stopped_by = Some(index);
                let stop_end = start + self.stops[index].len();
                let is_cut = stop_end < self.held.len();
                self.held.truncate(if self.including { stop_end } else { start });
                let text = std::mem::take(&mut self.held);
                return Released { text, is_cut, stopped_by: self.stopped_by };
            }
        }
        let text = match self.stopped_by {
            Some(_) => String::new(),
            None => {
                let kept = self.held.split_off(self.held.len() - self.open_bytes());
                std::mem::replace(&mut self.held, kept)
            }
        };
        Released { text, is_cut: false, stopped_by: self.stopped_by }
    }

    /// Whether text is held back that could begin a stop string.
    pub fn holds_text(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns the text still held: at the end nothing can complete it.
    pub fn finish(self) -> String {
        self.held
    }

    /// Start of the match that ends first, and its stop string.
    fn first_match(&self) -> Option<(usize, usize)> {
        let matches = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop)?;
            Some((start + stop.len(), start, index))
        });
        matches.min().map(|(_, start, index)| (start, index))
    }

    /// Bytes of the longest end of the held text that begins a stop string.
    fn open_bytes(&self) -> usize {
        let open = |stop: &String| {
            let cuts = stop.char_indices().map(|(cut, _)| cut).rev();
            cuts.into_iter().find(|&cut| self.held.ends_with(&stop[..cut])).unwrap_or(0)
        };
        self.stops.iter().map(open).max().unwrap_or(0)
    }
}

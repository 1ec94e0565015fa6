//! Marks, found in text that arrives in pieces.

/// Text in which marks are looked for.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    held: String,
}

/// What comes next in a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// Text before any mark, not empty.
    Text(String),
    /// A mark, by its place in the list.
    Mark(usize),
    /// Nothing that is certain yet.
    Nothing,
}

impl Scanner {
    pub(super) fn push(&mut self, text: &str) {
        self.held.push_str(text);
    }

    /// Takes what comes next: the mark that begins first, the longest of those that begin together,
    /// or the text before it. The end of the text is left where it could be the start of a mark.
    pub(super) fn next(&mut self, marks: &[&str]) -> Scan {
        let found = marks.iter().enumerate().filter_map(|(index, mark)| {
            let start = self.held.find(mark)?;
            Some((start, usize::MAX - mark.len(), index))
        });
        match found.min() {
            Some((0, _, index)) => {
                self.held.drain(..marks[index].len());
                Scan::Mark(index)
            }
            Some((start, ..)) => Scan::Text(self.held.drain(..start).collect()),
            None => {
                let certain = self.held.len() - self.open_bytes(marks);
                if certain == 0 {
                    return Scan::Nothing;
                }
                Scan::Text(self.held.drain(..certain).collect())
            }
        }
    }

    /// Takes one character.
    pub(super) fn next_char(&mut self) -> Option<char> {
        let char = self.held.chars().next()?;
        self.held.drain(..char.len_utf8());
        Some(char)
    }

    /// The next character, left where it is.
    pub(super) fn peek(&self) -> Option<char> {
        self.held.chars().next()
    }

    /// Puts text back in front of what is left.
    pub(super) fn put_back(&mut self, text: &str) {
        self.held.insert_str(0, text);
    }

    /// Takes all that is left.
    pub(super) fn take_rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes of the longest end of the text that begins a mark.
    fn open_bytes(&self, marks: &[&str]) -> usize {
        let open = |mark: &&str| {
            let cuts = mark.char_indices().map(|(cut, _)| cut).rev();
            cuts.into_iter().find(|&cut| self.held.ends_with(&mark[..cut])).unwrap_or(0)
        };
        marks.iter().map(open).max().unwrap_or(0)
    }
}

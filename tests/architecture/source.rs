//! Reads Rust sources well enough to find the paths they name.
//!
//! Not a parser: comments and the insides of strings are blanked, the rest becomes words and
//! signs, and paths are followed through `use` groups, `self`, `super` and nested modules.

/// One `.rs` file.
pub struct Source {
    /// Path from the workspace root, with `/`.
    pub path: String,
    /// The text as it is.
    pub text: String,
    /// The text with comments and the insides of literals blanked; lines stay lines.
    pub code: String,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        Self { path: path.into(), text: text.into(), code: blank(text) }
    }

    /// The code without inline `#[cfg(test)] mod ... { ... }`; empty for files of tests.
    pub fn library_code(&self) -> String {
        let is_library = self.path.starts_with("src/") || self.path.contains("/src/");
        if is_library && !self.path.ends_with("/tests.rs") {
            cut_tests(&self.code)
        } else {
            String::new()
        }
    }

    /// The module that the file is, from its crate's root: `src/engine/mod.rs` is `[engine]`.
    fn module(&self) -> Vec<String> {
        let inside = self.path.split_once("src/").map_or(self.path.as_str(), |(_, rest)| rest);
        let stem = inside.strip_suffix(".rs").unwrap_or(inside);
        let mut module: Vec<String> = stem.split('/').map(String::from).collect();
        if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
            module.pop();
        }
        module
    }

    /// Every path of two or more segments that `code` (this file's, or a part) names, from its
    /// crate's root when it starts with `crate`, `self` or `super`.
    pub fn paths(&self, code: &str) -> Vec<Named> {
        Reader { words: words(code), module: self.module(), nested: Vec::new() }.paths()
    }
}

/// A path named in a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    pub line: usize,
    pub segments: Vec<String>,
}

struct Reader {
    words: Vec<(usize, String)>,
    module: Vec<String>,
    /// Inline modules around the place, each with the brace depth it opened at.
    nested: Vec<(usize, String)>,
}

impl Reader {
    fn paths(mut self) -> Vec<Named> {
        let mut found = Vec::new();
        let (mut at, mut depth) = (0, 0);
        while at < self.words.len() {
            match self.word(at) {
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    self.nested.retain(|(opened, _)| *opened < depth + 1);
                }
                "mod" if self.word(at + 2) == "{" => {
                    self.nested.push((depth + 1, self.word(at + 1).into()));
                }
                word if is_name(word) && (self.word(at + 1) == "::" || self.is_use(at)) => {
                    let after = self.path(at, Vec::new(), &mut found);
                    at = after.max(at + 1);
                    continue;
                }
                _ => {}
            }
            at += 1;
        }
        found
    }

    fn word(&self, at: usize) -> &str {
        self.words.get(at).map_or("", |(_, word)| word)
    }

    fn is_use(&self, at: usize) -> bool {
        at > 0 && self.word(at - 1) == "use"
    }

    /// Follows the path at `at`, adds what it names, and returns where it ends.
    fn path(&self, mut at: usize, prefix: Vec<String>, found: &mut Vec<Named>) -> usize {
        let line = self.words[at].0;
        let mut segments = prefix;
        loop {
            let word = self.word(at);
            if word == "{" {
                return self.group(at, &segments, found);
            }
            if !is_name(word) && word != "*" {
                break;
            }
            segments.push(word.into());
            at += 1;
            if self.word(at) != "::" {
                break;
            }
            at += 1;
        }
        found.push(Named { line, segments: self.resolve(segments) });
        at
    }

    fn group(&self, mut at: usize, prefix: &[String], found: &mut Vec<Named>) -> usize {
        at += 1;
        while !matches!(self.word(at), "}" | "") {
            if is_name(self.word(at)) && self.word(at - 1) != "as" {
                at = self.path(at, prefix.to_vec(), found);
            } else {
                if self.word(at) == "*" {
                    let mut segments = prefix.to_vec();
                    segments.push("*".into());
                    found.push(Named { line: self.words[at].0, segments: self.resolve(segments) });
                }
                at += 1;
            }
        }
        at + 1
    }

    /// Rewrites `self` and `super` to start at `crate`.
    fn resolve(&self, segments: Vec<String>) -> Vec<String> {
        if !matches!(segments[0].as_str(), "self" | "super") {
            return segments;
        }
        let mut here = self.module.clone();
        here.extend(self.nested.iter().map(|(_, name)| name.clone()));
        let mut rest = segments.as_slice();
        while let [first, tail @ ..] = rest {
            match first.as_str() {
                "self" => {}
                "super" => drop(here.pop()),
                _ => break,
            }
            rest = tail;
        }
        let root = ["crate".to_string()].into_iter();
        root.chain(here).chain(rest.iter().cloned()).collect()
    }
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Names, numbers, `::` and single signs, each with its line.
pub fn words(code: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (line, text) in code.lines().enumerate() {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let part_of_name = |c: char| c.is_alphanumeric() || c == '_';
            let len = if part_of_name(first) {
                rest.find(|c: char| !part_of_name(c)).unwrap_or(rest.len())
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            if !first.is_whitespace() {
                words.push((line + 1, rest[..len].into()));
            }
            rest = &rest[len..];
        }
    }
    words
}

/// Blanks comments, and the insides of strings and characters.
fn blank(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let name_before = out.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if first == '"' {
            quoted(rest, 1)
        } else if !name_before && raw_hashes(rest).is_some() {
            raw_string(rest)
        } else if first == '\'' {
            character(rest)
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        let blanked = rest[..len].chars().map(|c| if c == '\n' { '\n' } else { ' ' });
        out.extend(blanked);
        rest = &rest[len..];
    }
    out
}

fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if text[at..].starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length of a literal whose opening quote ends at `start`.
fn quoted(text: &str, start: usize) -> usize {
    let mut escaped = false;
    for (at, c) in text[start..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return start + at + 1,
            _ => {}
        }
    }
    text.len()
}

fn raw_hashes(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    rest[hashes..].starts_with('"').then_some(hashes)
}

fn raw_string(text: &str) -> usize {
    let hashes = raw_hashes(text).unwrap_or(0);
    let open = text.find('"').map_or(text.len(), |at| at + 1);
    let close = format!("\"{}", "#".repeat(hashes));
    text[open..].find(&close).map_or(text.len(), |at| open + at + close.len())
}

/// A character literal, or only the quote of a lifetime.
fn character(text: &str) -> usize {
    let inside = &text[1..];
    if let Some(escape) = inside.strip_prefix('\\') {
        let skip = escape.chars().next().map_or(0, char::len_utf8);
        return escape[skip..].find('\'').map_or(1, |at| 2 + skip + at + 1);
    }
    let len = inside.chars().next().map_or(0, char::len_utf8);
    if inside[len..].starts_with('\'') { 1 + len + 1 } else { 1 }
}

/// Drops every inline module that is marked as a test, up to its closing brace.
fn cut_tests(code: &str) -> String {
    let mut out = String::new();
    let mut rest = code;
    while let Some(start) = rest.find("#[cfg(test)]") {
        let after = &rest[start..];
        let open = after.find('{').unwrap_or(after.len());
        let is_module = words(&after[..open]).iter().any(|(_, word)| word == "mod");
        let ends = after.find(';').is_some_and(|end| end < open);
        let mut depth = 0;
        let close = after.char_indices().find(|&(_, c)| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            c == '}' && depth == 0
        });
        let end = match close {
            Some((end, _)) if is_module && !ends => end + 1,
            _ => "#[cfg(test)]".len(),
        };
        out.push_str(&rest[..start]);
        out.extend(after[..end].chars().filter(|&c| c == '\n'));
        rest = &after[end..];
    }
    out.push_str(rest);
    out
}

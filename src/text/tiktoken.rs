//! Kimi's `tiktoken.model`: byte-pair encoding by rank.
//!
//! A line of the file is `base64(bytes) rank`, and ranks are ids. A text is cut into pieces by a
//! pattern; a piece that is a token is that token, else its bytes are merged, always the adjacent
//! pair whose join has the lowest rank, the leftmost of equals. After the ranks come 256 control
//! tokens, named in `tokenizer_config.json`.
//!
//! Written here rather than handed to the tokenizers library as merges: the library orders merges,
//! not joins, so ties and whole pieces need care there, and finding the merges of 163,584 ranks
//! takes longer than reading the file. Only its regex engine is used.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokenizers::utils::SysRegex;

use super::TextError;
use super::files::{TIKTOKEN_MODEL, TokenizerConfig, bad_key};
use super::tokenizer::Specials;
use super::vocabulary::Vocabulary;

/// Control tokens after the ranks; those without a name are `<|reserved_token_ID|>`.
const CONTROL_TOKENS: u32 = 256;

/// The reference cuts texts at this many characters, and again where a run of (non-)whitespace
/// reaches `MAX_RUN_CHARS`, before it looks for anything else. The cuts show in the ids.
const MAX_SLICE_CHARS: usize = 400_000;
const MAX_RUN_CHARS: usize = 25_000;

/// How Kimi's tokenizer cuts text into pieces, tried in this order at each position.
const PATTERN: [&str; 8] = [
    r"[\p{Han}]+",
    concat!(
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    ),
    concat!(
        r"[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    ),
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];

/// Reads the ranks, and the names of the control tokens from the configuration.
pub(super) fn read(
    model: &[u8],
    config: &TokenizerConfig,
) -> Result<(RankBpe, Vocabulary), TextError> {
    let bad_file = |detail: String| TextError::BadFile { file: TIKTOKEN_MODEL, detail };
    let mut vocabulary = Vocabulary::default();
    let ranks = read_ranks(model, &mut vocabulary)?;
    let base = u32::try_from(ranks.len()).map_err(|_| bad_file("too many ranks".to_owned()))?;
    // Ids are unique, so as many ranks as ids means that none is left out.
    if vocabulary.len() != ranks.len() {
        return Err(bad_file(format!(
            "{} ranks reach up to {}: some are missing",
            ranks.len(),
            vocabulary.len() - 1
        )));
    }
    if let Some(byte) = (0..=255_u8).find(|byte| !ranks.contains_key(&[*byte][..])) {
        return Err(bad_file(format!("byte 0x{byte:02x} has no rank")));
    }
    for (id, content, special) in control_tokens(base, config)? {
        vocabulary
            .insert(id, content.as_bytes(), special)
            .and_then(|()| vocabulary.name(&content, id))
            .map_err(|detail| bad_key("added_tokens_decoder", detail))?;
    }
    let split = SysRegex::new(&PATTERN.join("|")).expect("the pattern is a constant");
    let controls = Controls::new(vocabulary.added());
    let longest_bytes = ranks.keys().map(|bytes| bytes.len()).max().unwrap_or(0);
    Ok((RankBpe { ranks, longest_bytes, split, controls }, vocabulary))
}

/// A tokenizer that merges by rank.
pub(super) struct RankBpe {
    ranks: HashMap<Box<[u8]>, u32>,
    /// Length of the longest token: no longer join is worth looking up.
    longest_bytes: usize,
    split: SysRegex,
    controls: Controls,
}

impl RankBpe {
    pub(super) fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        let mut ids = Vec::new();
        for mut rest in slices(text) {
            if specials == Specials::Parse {
                while let Some((start, end, id)) = self.controls.find(rest) {
                    self.encode_text(&rest[..start], &mut ids);
                    ids.push(id);
                    rest = &rest[end..];
                }
            }
            self.encode_text(rest, &mut ids);
        }
        ids
    }

    fn encode_text(&self, text: &str, ids: &mut Vec<u32>) {
        let mut covered = 0;
        for (start, end) in self.split.find_iter(text) {
            debug_assert_eq!(start, covered, "the pattern matches every character");
            self.encode_piece(&text.as_bytes()[covered..end], ids);
            covered = end;
        }
        self.encode_piece(&text.as_bytes()[covered..], ids);
    }

    /// Merges a piece's bytes. `next[i]` is the end of the part that starts at `i`, 0 once the part
    /// belongs to the one before it. The heap holds joins by (rank, start); one whose parts have
    /// changed since is skipped. So n bytes cost n log n, whatever they are.
    fn encode_piece(&self, piece: &[u8], ids: &mut Vec<u32>) {
        if piece.is_empty() {
            return;
        }
        if let Some(&id) = self.ranks.get(piece) {
            ids.push(id);
            return;
        }
        let mut next: Vec<usize> = (1..=piece.len()).collect();
        let mut previous: Vec<usize> = (0..=piece.len()).map(|i| i.saturating_sub(1)).collect();
        let mut joins = BinaryHeap::new();
        let join = |start: usize, next: &[usize]| {
            let middle = next[start];
            let end = *next.get(middle)?;
            if end - start > self.longest_bytes {
                return None;
            }
            let rank = *self.ranks.get(&piece[start..end])?;
            Some(Reverse((rank, start, middle, end)))
        };
        joins.extend((0..piece.len()).filter_map(|start| join(start, &next)));
        while let Some(Reverse((_, start, middle, end))) = joins.pop() {
            if next[start] != middle || next[middle] != end {
                continue;
            }
            next[start] = end;
            next[middle] = 0;
            previous[end] = start;
            joins.extend(join(start, &next));
            if start > 0 {
                joins.extend(join(previous[start], &next));
            }
        }
        let mut start = 0;
        while start < piece.len() {
            let part = &piece[start..next[start]];
            ids.push(*self.ranks.get(part).expect("every byte and every join has a rank"));
            start = next[start];
        }
    }
}

/// The control tokens, found in text.
struct Controls {
    /// Longest first, so that no token hides a longer one that begins with it.
    tokens: Vec<(String, u32)>,
    begins: [bool; 256],
}

impl Controls {
    fn new(added: &HashMap<String, u32>) -> Self {
        let mut tokens: Vec<(String, u32)> =
            added.iter().map(|(content, &id)| (content.clone(), id)).collect();
        tokens.sort_by_key(|(content, id)| (Reverse(content.len()), *id));
        let mut begins = [false; 256];
        for (content, _) in &tokens {
            begins[usize::from(content.as_bytes()[0])] = true;
        }
        Self { tokens, begins }
    }

    /// Start, end and id of the first control token in the text.
    fn find(&self, text: &str) -> Option<(usize, usize, u32)> {
        let bytes = text.as_bytes();
        let starts = (0..bytes.len()).filter(|&start| self.begins[usize::from(bytes[start])]);
        starts.into_iter().find_map(|start| {
            let rest = &bytes[start..];
            let (content, id) = self.tokens.iter().find(|(c, _)| rest.starts_with(c.as_bytes()))?;
            Some((start, start + content.len(), *id))
        })
    }
}

fn read_ranks(
    model: &[u8],
    vocabulary: &mut Vocabulary,
) -> Result<HashMap<Box<[u8]>, u32>, TextError> {
    let mut ranks = HashMap::new();
    for (index, line) in model.split(|&byte| byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let (bytes, rank) = read_line(line)
            .and_then(|(bytes, rank)| {
                vocabulary.insert(rank, &bytes, false)?;
                Ok((bytes, rank))
            })
            .map_err(|detail| TextError::BadRankLine { line: index + 1, detail })?;
        if let Some(other) = ranks.insert(bytes.into_boxed_slice(), rank) {
            let detail = format!("has the bytes of rank {other}");
            return Err(TextError::BadRankLine { line: index + 1, detail });
        }
    }
    if ranks.is_empty() {
        return Err(TextError::BadFile { file: TIKTOKEN_MODEL, detail: "is empty".to_owned() });
    }
    Ok(ranks)
}

fn read_line(line: &[u8]) -> Result<(Vec<u8>, u32), String> {
    let mut fields = line.split(|&byte| byte == b' ');
    let (Some(token), Some(rank), None) = (fields.next(), fields.next(), fields.next()) else {
        return Err("is not \"base64 rank\"".to_owned());
    };
    let bytes = STANDARD.decode(token).map_err(|error| format!("base64: {error}"))?;
    if bytes.is_empty() {
        return Err("the token is empty".to_owned());
    }
    let rank = std::str::from_utf8(rank).ok().and_then(|rank| rank.parse().ok());
    rank.map(|rank| (bytes, rank)).ok_or_else(|| "the rank is not a number".to_owned())
}

/// Id, text and special mark of all control tokens. A token that the file marks `special: false`
/// (the tool-call marks of some Kimi models) is one for encoding, and shows in decoded text.
fn control_tokens(
    base: u32,
    config: &TokenizerConfig,
) -> Result<Vec<(u32, String, bool)>, TextError> {
    const KEY: &str = "added_tokens_decoder";
    let mut tokens: Vec<(u32, String, bool)> = (base..base + CONTROL_TOKENS)
        .map(|id| (id, format!("<|reserved_token_{id}|>"), true))
        .collect();
    let named = config.get(KEY).ok_or_else(|| {
        bad_key(KEY, format!("is missing: it names the control tokens of {TIKTOKEN_MODEL}"))
    })?;
    let named = named.as_object().ok_or_else(|| bad_key(KEY, "is not an object"))?;
    for (id, token) in named {
        let key = || format!("{KEY}.{id}");
        let place =
            id.parse().ok().and_then(|id: u32| tokens.get_mut(id.checked_sub(base)? as usize));
        let Some(place) = place else {
            let range = format!("{base}..{}", base + CONTROL_TOKENS);
            return Err(bad_key(key(), format!("is not an id of a control token ({range})")));
        };
        let content = token.get("content").and_then(|content| content.as_str());
        place.1 = match content {
            Some(content) if !content.is_empty() => content.to_owned(),
            _ => return Err(bad_key(key(), "has no content")),
        };
        place.2 = token.get("special").and_then(|special| special.as_bool()).unwrap_or(true);
    }
    Ok(tokens)
}

/// The reference's cuts of a long text. Both counts start anew at each `MAX_SLICE_CHARS`.
fn slices(text: &str) -> Vec<&str> {
    let mut slices = Vec::new();
    let (mut start, mut slice_chars, mut run_chars, mut run_is_space) = (0, 0, 0, false);
    for (at, char) in text.char_indices() {
        let is_space = is_python_space(char);
        if slice_chars == MAX_SLICE_CHARS {
            slices.push(&text[start..at]);
            (start, slice_chars, run_chars) = (at, 0, 0);
        }
        if run_chars == 0 || is_space != run_is_space {
            (run_chars, run_is_space) = (0, is_space);
        } else if run_chars == MAX_RUN_CHARS {
            slices.push(&text[start..at]);
            (start, run_chars) = (at, 0);
        }
        slice_chars += 1;
        run_chars += 1;
    }
    slices.push(&text[start..]);
    slices
}

/// `str.isspace`: Unicode white space and the four ASCII separators.
fn is_python_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1C}'..='\u{1F}')
}

//! What streams must never do: emit half a character, lose a byte, or depend on where they are cut.

use deltapool::text::{Detokenizer, Specials, StopMatcher, Tokenizer};

use super::{array, golden_folders, ids, json, root, tokenizers};

/// Texts whose characters span tokens.
const TEXTS: [&str; 7] = [
    "plain words, and a stop",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and 🇨🇦",
    "漢字とかな、한국어",
    "combining e\u{301} n\u{303} \u{1F1E6}\u{300}",
    "\u{FFFD} already there",
    "العربية हिन्दी ไทย",
    "\u{10FFFF}\u{0}\u{7F}é\r\n\t",
];

/// Pushes the ids one by one; at every cut what came so far and what is to come make up the whole.
fn check_stream(label: &str, tokenizer: &Tokenizer, ids: &[u32]) {
    for with_specials in [false, true] {
        let new = || match with_specials {
            true => Detokenizer::with_specials(tokenizer),
            false => Detokenizer::new(tokenizer),
        };
        let decode = |ids: &[u32]| match with_specials {
            true => tokenizer.decode_with_specials(ids),
            false => tokenizer.decode(ids),
        };
        let bytes: Vec<u8> = ids
            .iter()
            .filter(|&&id| with_specials || !tokenizer.is_special(id))
            .flat_map(|&id| tokenizer.token_bytes(id).expect("a token"))
            .copied()
            .collect();
        let whole = String::from_utf8_lossy(&bytes);
        assert_eq!(decode(ids), whole, "{label}");
        let mut stream = new();
        let mut emitted = String::new();
        for cut in 0..=ids.len() {
            // To stop here is to decode the ids so far.
            let mut stopped = new();
            let mut text: String = ids[..cut].iter().map(|&id| stopped.push(id)).collect();
            assert_eq!(text, emitted, "{label}: emitted at {cut}");
            assert!(whole.starts_with(&text), "{label}: taken back after {cut}");
            text += &stopped.finish();
            assert_eq!(text, decode(&ids[..cut]), "{label}: cut at {cut}");
            if let Some(&id) = ids.get(cut) {
                emitted += &stream.push(id);
            }
        }
        emitted += &stream.finish();
        assert_eq!(emitted, whole, "{label}");
    }
}

#[test]
fn streams_equal_whole_decodes_at_every_cut() {
    let mut streams = 0;
    for folder in golden_folders() {
        let golden = json(folder.join("encode.json"));
        for (label, name, tokenizer) in tokenizers(&folder) {
            for case in array(&golden["tokenizers"][name]["cases"]) {
                // Quadratic in the ids; the start of a long text is as good as all of it.
                let all = ids(&case["ids"]);
                check_stream(&label, &tokenizer, &all[..all.len().min(300)]);
                streams += 1;
            }
            for text in TEXTS {
                let encoded = tokenizer.encode(text, Specials::Plain).expect("it encodes");
                check_stream(&label, &tokenizer, &encoded);
                if name != "qwen" {
                    assert_eq!(tokenizer.decode(&encoded), text, "{label}");
                }
                streams += 1;
            }
        }
    }
    println!("{streams} streams run");
}

/// Bytes that are no UTF-8, alone and between text, in every order of three.
#[test]
fn invalid_bytes_become_replacements_once_they_are_certain() {
    let folder = root().join("tests/goldens/tokenizers");
    for (label, _, tokenizer) in tokenizers(&folder) {
        let token_of = |byte: u8| {
            let is_byte = |id: &u32| tokenizer.token_bytes(*id) == Some(&[byte][..]);
            (0..tokenizer.vocab_size() as u32).find(is_byte).expect("every byte is a token")
        };
        // A letter, a continuation, starts of two, three and four bytes, edge cases of UTF-8
        // (surrogates, overlong forms), and bytes that are never valid.
        let bytes = [0x61, 0x80, 0xBF, 0xC2, 0xE0, 0xE4, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0xC0, 0xFF];
        let tokens = bytes.map(token_of);
        for a in tokens {
            for b in tokens {
                for c in tokens {
                    check_stream(&label, &tokenizer, &[a, b, c, tokens[0]]);
                }
            }
        }
        let mut stream = Detokenizer::new(&tokenizer);
        let emitted: Vec<String> = [0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xE4, 0x61, 0xE4, 0xB8]
            .map(|b| stream.push(token_of(b)))
            .into();
        assert_eq!(emitted, ["", "", "", "😀", "\u{FFFD}", "", "\u{FFFD}a", "", ""], "{label}");
        assert_eq!(stream.finish(), "\u{FFFD}", "{label}");
    }
}

/// What a matcher makes of a text that arrives in these pieces: the text, and the stop string.
fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
    let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let mut matcher = StopMatcher::new(stops).expect("no empty stop string");
    let (mut text, mut stopped_by) = (String::new(), None);
    for piece in pieces {
        let released = matcher.push(piece);
        assert!(stopped_by.is_none() || released.text.is_empty(), "text after the stop");
        text += &released.text;
        stopped_by = released.stopped_by;
    }
    (text + &matcher.finish(), stopped_by)
}

/// The rule, told the slow way: the first end at which some stop string ends; there the longest.
fn expected(stops: &[&str], text: &str) -> (String, Option<usize>) {
    for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        let ending = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(**stop));
        if let Some((index, stop)) = ending.max_by_key(|(_, stop)| stop.len()) {
            return (text[..end - stop.len()].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

#[test]
fn stop_strings_match_however_the_text_is_cut() {
    let cases: [(&[&str], &str); 12] = [
        (&["stop"], "do not stop here"),
        (&["stop"], "sto stosstop"),
        (&["aab"], "aaaab"),
        (&["\n\n"], "one\ntwo\n\nthree"),
        (&["User:", "\nUser"], "hello\nUser: hi"),
        (&["bcd", "abcde"], "xabcde"),
        (&["abcde", "bcd"], "xabce bcd"),
        (&["b", "ab"], "aab"),
        (&["終わり", "。"], "これは終わ、終わり。"),
        (&["😀"], "a😁b😀c"),
        (&["never"], "nothing, neve"),
        (&[], "no stop strings at all"),
    ];
    for (stops, text) in cases {
        let borders: Vec<usize> =
            (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)).collect();
        let expected = expected(stops, text);
        assert_eq!(run(stops, &[text]), expected, "{stops:?} in {text:?}");
        for &a in &borders {
            for &b in borders.iter().filter(|&&b| b >= a) {
                let pieces = [&text[..a], &text[a..b], &text[b..]];
                assert_eq!(run(stops, &pieces), expected, "{stops:?} in {pieces:?}");
            }
        }
        let chars: Vec<String> = text.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(run(stops, &chars), expected, "{stops:?} in {chars:?}");
    }
}

/// All texts of six letters over {a, b} and all pairs of stop strings up to three letters, by
/// letters and at once.
#[test]
fn stop_strings_match_in_all_small_texts() {
    let words = |length: u32| {
        let letter = |bits: u32, i: u32| if bits >> i & 1 == 0 { 'a' } else { 'b' };
        (0..1 << length).map(move |bits| (0..length).map(|i| letter(bits, i)).collect::<String>())
    };
    let stops: Vec<String> = (1..=3).flat_map(words).collect();
    for text in words(6) {
        for first in &stops {
            for second in &stops {
                let stops = [first.as_str(), second.as_str()];
                let (expected, index) = expected(&stops, &text);
                let letters: Vec<&str> = text.split("").collect();
                for pieces in [&[text.as_str()][..], &letters] {
                    let (shown, stopped_by) = run(&stops, pieces);
                    assert_eq!(shown, expected, "{stops:?} in {pieces:?}");
                    assert_eq!(stopped_by.map(|i| stops[i]), index.map(|i| stops[i]));
                }
            }
        }
    }
}

/// Text is held only while it can still become a stop string.
#[test]
fn no_more_text_is_held_than_must_be() {
    let mut matcher = StopMatcher::new(vec!["<end>".to_owned()]).expect("not empty");
    let shown: Vec<String> = ["a", " <", "e", "x", "<en", "<en", "d", ">b", "c"]
        .map(|piece| matcher.push(piece).text)
        .into();
    assert_eq!(shown, ["a", " ", "", "<ex", "", "<en", "", "", ""]);
    assert_eq!(matcher.push("later").stopped_by, Some(0));
    assert_eq!(matcher.finish(), "");
}

/// A stop string that begins and ends inside tokens, with the text split by a real tokenizer.
#[test]
fn stop_strings_match_across_tokens() {
    let folder = root().join("tests/goldens/tokenizers");
    let text = "The answer is 漢字 😀 done.\n\nQuestion: and so on";
    for (label, _, tokenizer) in tokenizers(&folder) {
        let encoded = tokenizer.encode(text, Specials::Plain).expect("it encodes");
        let borders: Vec<usize> =
            (0..text.len()).filter(|&cut| text.is_char_boundary(cut)).collect();
        for &start in &borders {
            for stop in borders.iter().filter(|&&end| end > start).map(|&end| &text[start..end]) {
                let mut matcher = StopMatcher::new(vec![stop.to_owned()]).expect("not empty");
                let mut stream = Detokenizer::new(&tokenizer);
                let shown: String =
                    encoded.iter().map(|&id| matcher.push(&stream.push(id)).text).collect();
                assert_eq!(shown, text.split(stop).next().unwrap_or(""), "{label}: {stop:?}");
            }
        }
    }
}

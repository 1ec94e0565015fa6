//! Text to ids and back, against the goldens of transformers, tokenizers and tiktoken, and against
//! every way of cutting a stream into pieces.
//!
//! `tests/goldens/tokenizers` travels with the project. Where the larger set of goldens stands
//! beside it (`../shared/goldens/tokenizers`), the same tests run on that too.

#[path = "text/bad_files.rs"]
mod bad_files;
#[path = "text/streams.rs"]
mod streams;
#[path = "text/templates.rs"]
mod templates;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use deltapool::text::{Chat, ChatTemplate, Specials, TextError, TextFiles, Tokenizer};
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folders of goldens that are there: one or two.
fn golden_folders() -> Vec<PathBuf> {
    let own = root().join("tests/goldens/tokenizers");
    assert!(own.is_dir(), "the project carries {}", own.display());
    let shared = root().join("../shared/goldens/tokenizers");
    [own, shared].into_iter().filter(|folder| folder.is_dir()).collect()
}

fn json(path: PathBuf) -> Value {
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn array(value: &Value) -> &[Value] {
    value.as_array().expect("the golden holds an array here")
}

fn ids(value: &Value) -> Vec<u32> {
    array(value).iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// The golden tokenizers of a folder: name, name of their cases, tokenizer. Kimi's comes twice,
/// from each of its two files.
fn tokenizers(folder: &Path) -> Vec<(String, &'static str, Tokenizer)> {
    let mut all = Vec::new();
    for name in ["kimi", "qwen", "llama3"] {
        let mut files = TextFiles::read(&folder.join(name)).expect("the folder is there");
        let label = format!("{} {name}", folder.display());
        if files.tiktoken_model.is_some() {
            let tokenizer = Tokenizer::from_files(&files).expect("tiktoken.model loads");
            all.push((format!("{label} (tiktoken.model)"), name, tokenizer));
            files.tiktoken_model = None;
        }
        let tokenizer = Tokenizer::from_files(&files).expect("tokenizer.json loads");
        all.push((label, name, tokenizer));
    }
    assert_eq!(all.len(), 4);
    all
}

/// Checks one tokenizer against its rows of encode.json; returns how many rows it ran.
fn check_encode(label: &str, tokenizer: &Tokenizer, golden: &Value) -> usize {
    assert_eq!(tokenizer.vocab_size() as u64, golden["vocab_size"].as_u64().expect("a size"));
    for (id, hex) in golden["token_bytes_hex"].as_object().into_iter().flatten() {
        let bytes = tokenizer.token_bytes(id.parse().expect("an id")).expect("a token");
        let bytes: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(&bytes, hex.as_str().expect("hex"), "{label}: bytes of token {id}");
    }
    for case in array(&golden["cases"]) {
        let text = case["text"].as_str().expect("a text");
        let prompt_ids = ids(&case["ids"]);
        let encode = |specials| tokenizer.encode(text, specials).expect("it encodes");
        let encode_prompt = |specials| tokenizer.encode_prompt(text, specials).expect("encodes");
        assert_eq!(encode_prompt(Specials::Parse), prompt_ids, "{label}: {text:?}");
        let bare_ids = case.get("ids_no_bos").unwrap_or(&case["ids"]);
        assert_eq!(encode(Specials::Parse), ids(bare_ids), "{label}: {text:?} bare");
        if let Some(plain_ids) = case.get("ids_no_special") {
            assert_eq!(encode(Specials::Plain), ids(plain_ids), "{label}: {text:?} plain");
        }
        match (case.get("decoded"), case.get("decoded_with_special")) {
            (Some(decoded), Some(with_specials)) => {
                assert_eq!(&tokenizer.decode(&prompt_ids), decoded, "{label}: {text:?}");
                assert_eq!(&tokenizer.decode_with_specials(&prompt_ids), with_specials);
            }
            _ => assert_eq!(tokenizer.decode_with_specials(&prompt_ids), text, "{label}"),
        }
        // Plain ids hold no control token, and give the text back where nothing normalises it.
        let plain_ids = encode(Specials::Plain);
        assert!(!plain_ids.iter().any(|&id| tokenizer.is_special(id)), "{label}: {text:?}");
        if !label.contains("qwen") {
            assert_eq!(tokenizer.decode(&plain_ids), text, "{label}");
        }
    }
    array(&golden["cases"]).len()
}

#[test]
fn encoding_equals_the_goldens() {
    for folder in golden_folders() {
        let golden = json(folder.join("encode.json"));
        let rows = |name: &str| array(&golden["tokenizers"][name]["cases"]).len();
        let held: usize = 2 * rows("kimi") + rows("qwen") + rows("llama3");
        assert_eq!(golden["tokenizers"].as_object().expect("an object").len(), 3);
        let mut ran = 0;
        for (label, name, tokenizer) in tokenizers(&folder) {
            ran += check_encode(&label, &tokenizer, &golden["tokenizers"][name]);
        }
        println!("{}: encode.json: {ran} cases run, {held} held", folder.display());
        assert_eq!(ran, held);
    }
}

#[test]
fn chats_equal_the_goldens() {
    for folder in golden_folders() {
        let golden = json(folder.join("chat.json"));
        let cases = golden["cases"].as_object().expect("an object");
        let held: usize = cases.values().map(|cases| array(cases).len()).sum();
        let mut ran = 0;
        for (name, cases) in cases {
            let files = TextFiles::read(&folder.join(name)).expect("the folder is there");
            let tokenizer = Tokenizer::from_files(&files).expect("the tokenizer loads");
            let in_config = TextFiles { chat_template: None, ..files.clone() };
            let templates = [&files, &in_config]
                .map(|files| ChatTemplate::from_files(files).expect("the template compiles"));
            for case in array(cases) {
                for template in &templates {
                    check_chat(&format!("{name} {}", case["name"]), template, &tokenizer, case);
                }
                ran += 1;
            }
        }
        println!("{}: chat.json: {ran} cases run, {held} held", folder.display());
        assert_eq!(ran, held);
    }
}

fn check_chat(label: &str, template: &ChatTemplate, tokenizer: &Tokenizer, case: &Value) {
    let rendered = template.render(&Chat {
        messages: array(&case["messages"]),
        tools: case["tools"].as_array().map(Vec::as_slice),
        add_generation_prompt: case["add_generation_prompt"].as_bool().expect("a flag"),
        variables: case["extra"].as_object().expect("an object"),
    });
    if let Some(error) = case["error"].as_str() {
        match rendered {
            Err(TextError::TemplateRaised { message }) => assert_eq!(message, error, "{label}"),
            other => panic!("{label}: {other:?} instead of {error:?}"),
        }
        return;
    }
    let text = rendered.unwrap_or_else(|e| panic!("{label}: {e}"));
    assert_eq!(text, case["text"].as_str().expect("a text"), "{label}");
    let encoded = tokenizer.encode(&text, Specials::Parse).expect("it encodes");
    assert_eq!(encoded, ids(&case["ids"]), "{label}");
}

/// Kimi K3's chats are built segment by segment, control tokens and text encoded apart; a text
/// that spells a control token must stay text.
#[test]
fn segments_equal_the_goldens() {
    for folder in golden_folders() {
        let path = folder.join("k3_chat.json");
        if !path.is_file() {
            continue;
        }
        let tokenizer = Tokenizer::load(&folder.join("kimi_k3")).expect("tiktoken.model alone");
        let golden = json(path);
        let cases = array(&golden["cases"]);
        for case in cases {
            let mut encoded = Vec::new();
            for segment in array(&case["segments"]) {
                let is_control = segment[1].as_bool().expect("a flag");
                let specials = if is_control { Specials::Parse } else { Specials::Plain };
                let text = segment[0].as_str().expect("a text");
                encoded.extend(tokenizer.encode(text, specials).expect("it encodes"));
            }
            assert_eq!(encoded, ids(&case["ids"]), "{}", case["name"]);
            assert_eq!(tokenizer.decode_with_specials(&encoded), case["text"], "{}", case["name"]);
        }
        println!("{}: k3_chat.json: {} cases run", folder.display(), cases.len());
        assert!(!cases.is_empty());
    }
}

/// `add_bos_token` is true in assets/tiny-model and its tokenizer.json has no post-processor: the
/// reference ids of its golden prompts begin with BOS all the same.
#[test]
fn the_embedded_model_prompts_begin_with_bos() {
    let folder = root().join("assets/tiny-model");
    let tokenizer = Tokenizer::load(&folder).expect("it loads");
    let golden = json(folder.join("golden.json"));
    let cases = array(&golden);
    for case in cases {
        let prompt = case["prompt"].as_str().expect("a prompt");
        let prompt_ids = ids(&case["prompt_ids"]);
        assert_eq!(tokenizer.encode_prompt(prompt, Specials::Parse).expect("encodes"), prompt_ids);
        assert_eq!(tokenizer.encode(prompt, Specials::Parse).expect("encodes"), prompt_ids[1..]);
        assert_eq!(tokenizer.decode(&ids(&case["greedy_ids"])), case["text"], "{prompt}");
    }
    println!("assets/tiny-model: {} prompts run", cases.len());
    assert_eq!(cases.len(), 5);
    let bos = tokenizer.bos().expect("a BOS token");
    assert_eq!((bos.content.as_str(), bos.id), ("<|bos|>", 0));
    assert_eq!(tokenizer.eos().map(|eos| eos.id), Some(1));
    assert_eq!(tokenizer.special_id("<|pad|>"), Some(2));
    assert_eq!(tokenizer.special_id("<|no such token|>"), None);
}

/// A post-processor that already puts BOS first is not helped a second time.
#[test]
fn bos_is_not_doubled() {
    let mut files =
        TextFiles::read(&root().join("tests/goldens/tokenizers/llama3")).expect("there");
    let config = r#"{"bos_token": {"content": "<|begin_of_text|>"}, "add_bos_token": true}"#;
    files.tokenizer_config = Some(config.as_bytes().into());
    let tokenizer = Tokenizer::from_files(&files).expect("it loads");
    let bos = tokenizer.bos().expect("a BOS token").id;
    let prompt_ids = tokenizer.encode_prompt("Hi", Specials::Parse).expect("it encodes");
    assert_eq!(prompt_ids.iter().filter(|&&id| id == bos).count(), 1);
    assert_eq!(prompt_ids[0], bos);
}

#[test]
fn unnamed_control_tokens_are_reserved() {
    let tokenizer =
        Tokenizer::load(&root().join("tests/goldens/tokenizers/kimi")).expect("it loads");
    assert_eq!(tokenizer.special_id("<|reserved_token_517|>"), Some(517));
    assert_eq!(tokenizer.encode("<|reserved_token_517|>", Specials::Parse).unwrap(), [517]);
    assert!(tokenizer.is_special(517) && !tokenizer.is_special(511));
    assert_eq!(tokenizer.decode(&[517, 512]), "");
    assert_eq!(tokenizer.decode_with_specials(&[517]), "<|reserved_token_517|>");
    assert_eq!(
        (tokenizer.token_bytes(767), tokenizer.token_bytes(768)),
        (Some(&b"[PAD]"[..]), None)
    );
    assert_eq!(tokenizer.decode(&[768, u32::MAX]), "", "ids of a padded head are no text");
}

/// Long pieces must cost n log n: 200,000 letters without a space once took minutes in tokenizers
/// that rescan all pairs after each merge. Also the reference's cuts: at 25,000 characters of a
/// run, and at 400,000 of any text.
#[test]
fn long_texts_encode_in_good_time_and_with_the_cuts_of_the_reference() {
    let tokenizer =
        Tokenizer::load(&root().join("tests/goldens/tokenizers/kimi")).expect("it loads");
    let encode = |text: &str| tokenizer.encode(text, Specials::Plain).expect("it encodes");
    for text in ["the", "A", "é", "漢", "…", "  "] {
        let long = text.repeat(200_000);
        let start = std::time::Instant::now();
        let encoded = encode(&long);
        assert!(start.elapsed().as_secs() < 20, "{text:?} took {:?}", start.elapsed());
        assert_eq!(tokenizer.decode(&encoded), long);
        let chars: Vec<char> = long.chars().collect();
        let cut: Vec<u32> =
            chars.chunks(25_000).flat_map(|c| encode(&String::from_iter(c))).collect();
        assert_eq!(encoded, cut, "{text:?}");
    }
    // No run is long here, so only the cut at 400,000 shows; it splits the word at its border.
    let words = "the ".repeat(99_999) + "th the";
    let (head, tail) = words.split_at(400_000);
    assert_eq!(encode(&words), [encode(head), encode(tail)].concat());
    assert_eq!(tail, "he");
    assert_ne!(encode(&words[399_990..]), encode(&words)[encode(&words[..399_990]).len()..]);
}

/// The definition of merging by rank, told the slow way over the tokens' bytes: of all adjacent
/// pairs the one whose join has the lowest rank, the leftmost of equals.
#[test]
fn merging_equals_its_definition() {
    let tokenizer =
        Tokenizer::load(&root().join("tests/goldens/tokenizers/kimi")).expect("it loads");
    let ranks: HashMap<Vec<u8>, u32> =
        (0..512).map(|id| (tokenizer.token_bytes(id).expect("a token").to_vec(), id)).collect();
    let mut seed = 20_261_128_u64;
    for round in 0..4_000 {
        // Letters of one case are one piece, whatever they spell; few letters make many ties.
        let letters = if round % 2 == 0 { "aethinors" } else { "ae" };
        let word: String = (0..round % 61)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                char::from(letters.as_bytes()[(seed >> 33) as usize % letters.len()])
            })
            .collect();
        let mut parts: Vec<Vec<u8>> = word.bytes().map(|byte| vec![byte]).collect();
        loop {
            let joins = parts
                .windows(2)
                .enumerate()
                .filter_map(|(at, pair)| Some((*ranks.get(&pair.concat())?, at)));
            let Some((_, at)) = joins.min() else { break };
            let right = parts.remove(at + 1);
            parts[at].extend(right);
        }
        let expected: Vec<u32> = parts.iter().map(|part| ranks[part]).collect();
        assert_eq!(
            tokenizer.encode(&word, Specials::Plain).expect("it encodes"),
            expected,
            "{word}"
        );
    }
}

/// The regex library panics where a pattern backtracks too long; the caller gets an error.
#[test]
fn endless_backtracking_is_an_error() {
    let mut files = TextFiles::read(&root().join("tests/goldens/tokenizers/qwen")).expect("there");
    let mut value: Value =
        serde_json::from_slice(&files.tokenizer_json.expect("there")).expect("it is JSON");
    value["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$".into();
    files.tokenizer_json = Some(value.to_string().into_bytes().into());
    let tokenizer = Tokenizer::from_files(&files).expect("it loads");
    let error = tokenizer.encode(&("a".repeat(40) + "b"), Specials::Parse).expect_err("endless");
    assert_eq!(
        error.to_string(),
        "cannot encode the text: Onig: Regex search error: retry-limit-in-match over"
    );
}

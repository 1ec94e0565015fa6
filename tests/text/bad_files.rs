//! Files that must be refused, with the words, and none of which may panic.

use std::path::Path;

use deltapool::text::{ChatTemplate, StopMatcher, TextError, TextFiles, Tokenizer};
use serde_json::{Value, json};

use super::root;

fn goldens(name: &str) -> TextFiles {
    TextFiles::read(&root().join("tests/goldens/tokenizers").join(name)).expect("it is there")
}

fn refusal(files: &TextFiles, why: &str) -> String {
    match Tokenizer::from_files(files) {
        Ok(_) => panic!("taken: {why}"),
        Err(error) => error.to_string(),
    }
}

fn kimi(model: &[u8], config: &Value) -> TextFiles {
    TextFiles {
        tiktoken_model: Some(model.to_vec().into()),
        tokenizer_config: Some(config.to_string().into_bytes().into()),
        ..TextFiles::default()
    }
}

#[test]
fn bad_rank_files_are_refused() {
    let files = goldens("kimi");
    let model = files.tiktoken_model.expect("it is there");
    let config = json!({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {}});
    let with = |line: &str| [&model[..], line.as_bytes()].concat();
    let without_line_3: Vec<u8> = model
        .split_inclusive(|&b| b == b'\n')
        .enumerate()
        .filter(|(i, _)| *i != 2)
        .flat_map(|(_, l)| l)
        .copied()
        .collect();
    let mut last_cut = model.to_vec();
    last_cut.truncate(model.trim_ascii_end().len() - 4);
    for (model, expected) in [
        (with("!!!! 512\n"), "tiktoken.model: line 513: base64: Invalid symbol 33, offset 0."),
        (with("YWI 512\n"), "tiktoken.model: line 513: base64: Invalid padding"),
        (with("enp6enp6 12\n"), "tiktoken.model: line 513: id 12 is given twice"),
        (with("IQ== 512\n"), "tiktoken.model: line 513: has the bytes of rank 0"),
        (with("enp6enp6 514\n"), "tiktoken.model: 513 ranks reach up to 514: some are missing"),
        (
            with("enp6enp6 99999999\n"),
            "tiktoken.model: line 513: id 99999999 is beyond any vocabulary (limit 16777216)",
        ),
        (with("enp6enp6 -1\n"), "tiktoken.model: line 513: the rank is not a number"),
        (with("enp6enp6\n"), "tiktoken.model: line 513: is not \"base64 rank\""),
        (with("enp6enp6 512 9\n"), "tiktoken.model: line 513: is not \"base64 rank\""),
        (with(" 512\n"), "tiktoken.model: line 513: is not \"base64 rank\""),
        (without_line_3, "tiktoken.model: 511 ranks reach up to 511: some are missing"),
        (b"IQ== 0\n".to_vec(), "tiktoken.model: byte 0x00 has no rank"),
        (b"\n \n".to_vec(), "tiktoken.model: is empty"),
        (last_cut, "tiktoken.model: line 512: is not \"base64 rank\""),
        (b"\xFF\xFE 0\n".to_vec(), "tiktoken.model: line 1: base64: Invalid symbol 255, offset 0."),
    ] {
        assert_eq!(refusal(&kimi(&model, &config), expected), expected);
    }
}

#[test]
fn bad_configurations_are_refused() {
    let model = goldens("kimi").tiktoken_model.expect("it is there");
    let config = |extra: Value| {
        let mut config =
            json!({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {}});
        let entries = config.as_object_mut().expect("an object");
        entries.extend(extra.as_object().expect("an object").clone());
        config
    };
    for (config, expected) in [
        (
            json!({}),
            "tokenizer_class: must be TikTokenTokenizer: no other class's tiktoken.model is supported",
        ),
        (
            config(json!({"tokenizer_class": "QWenTokenizer"})),
            "tokenizer_class: must be TikTokenTokenizer: no other class's tiktoken.model is supported",
        ),
        (config(json!({"tokenizer_class": 7})), "tokenizer_class: is not a string"),
        (
            config(json!({"added_tokens_decoder": null})),
            "added_tokens_decoder: is missing: it names the control tokens of tiktoken.model",
        ),
        (config(json!({"added_tokens_decoder": []})), "added_tokens_decoder: is not an object"),
        (
            config(json!({"added_tokens_decoder": {"511": {"content": "x"}}})),
            "added_tokens_decoder.511: is not an id of a control token (512..768)",
        ),
        (
            config(json!({"added_tokens_decoder": {"768": {"content": "x"}}})),
            "added_tokens_decoder.768: is not an id of a control token (512..768)",
        ),
        (
            config(json!({"added_tokens_decoder": {"x": {"content": "x"}}})),
            "added_tokens_decoder.x: is not an id of a control token (512..768)",
        ),
        (
            config(json!({"added_tokens_decoder": {"512": {"content": ""}}})),
            "added_tokens_decoder.512: has no content",
        ),
        (
            config(json!({"added_tokens_decoder": {"512": "x"}})),
            "added_tokens_decoder.512: has no content",
        ),
        (
            config(
                json!({"added_tokens_decoder": {"512": {"content": "x"}, "513": {"content": "x"}}}),
            ),
            "added_tokens_decoder: \"x\" is both id 512 and id 513",
        ),
        (
            config(json!({"bos_token": "[BOS]"})),
            "bos_token: \"[BOS]\" is not among the added tokens",
        ),
        (config(json!({"eos_token": []})), "eos_token: is neither a string nor has a content"),
        (
            config(json!({"add_bos_token": true})),
            "add_bos_token: is true, but there is no bos_token",
        ),
        (config(json!({"add_bos_token": "yes"})), "add_bos_token: is not true or false"),
    ] {
        let expected = format!("tokenizer_config.json: {expected}");
        assert_eq!(refusal(&kimi(&model, &config), &expected), expected);
    }
    let mut files = goldens("kimi");
    files.tokenizer_json = None;
    files.tokenizer_config = Some(br#"{"bos_token": "[BOS]""#.into());
    assert_eq!(
        refusal(&files, "cut"),
        "tokenizer_config.json: EOF while parsing an object at line 1 column 21"
    );
    files.tokenizer_config = Some(b"[]".into());
    assert_eq!(
        refusal(&files, "a list"),
        "tokenizer_config.json: invalid type: sequence, expected a map at line 1 column 0"
    );
}

#[test]
fn bad_tokenizer_json_is_refused() {
    let json = goldens("llama3").tokenizer_json.expect("it is there");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut value: Value = serde_json::from_slice(&json).expect("the golden is JSON");
        change(&mut value);
        value.to_string().into_bytes()
    };
    let byte_fallback =
        json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"});
    for (json, expected) in [
        (json[..2000].to_vec(), "tokenizer.json: EOF while parsing a"),
        (Vec::new(), "tokenizer.json: EOF while parsing a value at line 1 column 0"),
        (b"{}".to_vec(), "tokenizer.json: "),
        (
            with(&|v| v["decoder"] = byte_fallback.clone()),
            "tokenizer.json: decoder: Sequence of ByteFallback, Fuse is not supported, only ByteLevel is",
        ),
        (
            with(&|v| v["decoder"] = metaspace.clone()),
            "tokenizer.json: decoder: Metaspace is not supported, only ByteLevel is",
        ),
        (
            with(&|v| v["decoder"] = Value::Null),
            "tokenizer.json: decoder: none is not supported, only ByteLevel is",
        ),
        (
            with(&|v| v["added_tokens"][0]["id"] = json!(700)),
            "tokenizer.json: added_tokens: \"<|begin_of_text|>\" cannot have id 700",
        ),
        (
            with(&|v| {
                v["model"]["vocab"]["zzzz"] = json!(4_000_000_000_u32);
                v["added_tokens"] = json!([]);
            }),
            "tokenizer.json: model.vocab: id 4000000000 is beyond any vocabulary (limit 16777216)",
        ),
        (
            with(&|v| {
                v["model"]["vocab"]["zzzz"] = json!(65);
                v["added_tokens"] = json!([]);
            }),
            "tokenizer.json: model.vocab: id 65 is given twice",
        ),
        (
            with(&|v| v["model"]["merges"][0] = json!(["nope", "nope"])),
            "tokenizer.json: Token `nope` out of vocabulary",
        ),
        (
            with(&|v| v["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("(")),
            "tokenizer.json: ",
        ),
    ] {
        let files = TextFiles { tokenizer_json: Some(json.into()), ..TextFiles::default() };
        let error = refusal(&files, expected);
        assert!(error.starts_with(expected), "{error}\ninstead of\n{expected}");
    }
}

/// Files cut anywhere are errors (or, where only white space is lost, still good), never a panic.
#[test]
fn truncated_files_never_panic() {
    let whole = goldens("kimi");
    let cut =
        |bytes: &std::borrow::Cow<'static, [u8]>, at: usize| Some(bytes[..at].to_vec().into());
    let (json, model) = (whole.tokenizer_json.clone(), whole.tiktoken_model.clone());
    let (json, model) = (json.expect("there"), model.expect("there"));
    let config = whole.tokenizer_config.clone().expect("there");
    for at in (0..json.len()).step_by(991) {
        let files =
            TextFiles { tokenizer_json: cut(&json, at), tiktoken_model: None, ..whole.clone() };
        assert!(refusal(&files, "cut").starts_with("tokenizer.json: "), "{at}");
    }
    for at in (0..model.len() - 8).step_by(7) {
        // Without its last lines a rank file is a smaller rank file; the control tokens' ids tell.
        let files = TextFiles { tiktoken_model: cut(&model, at), ..whole.clone() };
        refusal(&files, "cut");
    }
    for at in (0..config.trim_ascii_end().len()).step_by(13) {
        let files =
            TextFiles { tokenizer_config: cut(&config, at), chat_template: None, ..whole.clone() };
        assert!(refusal(&files, "cut").starts_with("tokenizer_config.json: EOF"), "{at}");
        let error = ChatTemplate::from_files(&files).err().expect("cut").to_string();
        assert!(error.starts_with("tokenizer_config.json: EOF"), "{at}: {error}");
    }
    let template = whole.chat_template.clone().expect("there");
    for at in 0..template.len() {
        let files = TextFiles { chat_template: cut(&template, at), ..whole.clone() };
        if let Err(error) = ChatTemplate::from_files(&files) {
            assert!(error.to_string().starts_with("chat template: syntax error"), "{at}: {error}");
        }
    }
}

#[test]
fn missing_files_are_named() {
    assert_eq!(
        refusal(&TextFiles::default(), "nothing"),
        "no tokenizer: the model has neither tokenizer.json nor tiktoken.model"
    );
    let folder = tempfile::tempdir().expect("a folder");
    assert!(matches!(Tokenizer::load(folder.path()), Err(TextError::NoTokenizer)));
    let error = Tokenizer::load(Path::new("/no/such/folder")).err().expect("no folder").to_string();
    assert_eq!(error, "/no/such/folder/tokenizer.json: No such file or directory (os error 2)");
    std::fs::create_dir(folder.path().join("tiktoken.model")).expect("a folder in its place");
    let error = Tokenizer::load(folder.path()).err().expect("a folder").to_string();
    assert!(error.ends_with("tiktoken.model: Is a directory (os error 21)"), "{error}");
    let files = TextFiles { chat_template: Some(b"\xFF".into()), ..TextFiles::default() };
    let error = ChatTemplate::from_files(&files).err().expect("not UTF-8").to_string();
    assert_eq!(error, "chat_template.jinja: invalid utf-8 sequence of 1 bytes from index 0");
    let error = StopMatcher::new(vec!["a".to_owned(), String::new()]).err().expect("empty");
    assert_eq!(error.to_string(), "stop string 1 is empty");
}

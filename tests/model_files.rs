//! Weight files: sound ones load, broken ones are refused with everything that is wrong, by name.

use std::fs;
use std::path::{Path, PathBuf};

use deltapool::models::spec::Part;
use deltapool::models::{ModelError, ModelFiles, ModelWeights};
use half::{bf16, f16};
use kernels::{KvDtype, Panels, Quantization};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const FAMILIES: [&str; 3] = ["kimi_linear_tiny", "llama_tiny", "qwen3_tiny"];
const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn golden(name: &str) -> PathBuf {
    root().join("tests/goldens/models").join(name)
}

fn try_load(dir: &Path) -> Result<ModelWeights, ModelError> {
    ModelFiles::open(dir)?.load(&mut |_, _| {})
}

fn load(dir: &Path) -> ModelWeights {
    try_load(dir).unwrap_or_else(|error| panic!("{error}"))
}

/// A tensor in a file under test: name, dtype, shape, bytes.
#[derive(Clone)]
struct Entry {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn entries(file: &Path) -> Vec<Entry> {
    let all = fs::read(file).unwrap();
    let (length, rest) = all.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors
        .map(|(name, info)| {
            let number = |value: &Value| value.as_u64().unwrap() as usize;
            let [from, to] = [0, 1].map(|i| number(&info["data_offsets"][i]));
            Entry {
                name,
                dtype: info["dtype"].as_str().unwrap().to_owned(),
                shape: info["shape"].as_array().unwrap().iter().map(number).collect(),
                bytes: data[from..to].to_vec(),
            }
        })
        .collect()
}

/// The bytes of a safetensors file; `padding` spaces more than needed after its header.
fn file_of(entries: &[Entry], padding: usize) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for Entry { name, dtype, shape, bytes } in entries {
        let offsets = [data.len(), data.len() + bytes.len()];
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), info);
        data.extend(bytes);
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8) + padding, b' ');
    [(text.len() as u64).to_le_bytes().as_slice(), &text, &data].concat()
}

/// A copy of a golden's config, without weights.
fn folder(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json"] {
        fs::copy(golden(name).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

/// The llama golden with its entries changed.
fn with_entries(change: impl FnOnce(&mut Vec<Entry>)) -> TempDir {
    let dir = folder("llama_tiny");
    let mut list = entries(&golden("llama_tiny").join(FILE));
    change(&mut list);
    fs::write(dir.path().join(FILE), file_of(&list, 0)).unwrap();
    dir
}

/// The llama golden in two shards, with index and shards changed.
fn with_shards(change: impl FnOnce(&mut Map<String, Value>, &mut [Vec<Entry>; 2])) -> TempDir {
    let dir = folder("llama_tiny");
    let list = entries(&golden("llama_tiny").join(FILE));
    let (first, second) = list.split_at(20);
    let mut shards = [first.to_vec(), second.to_vec()];
    let mut index = Map::new();
    for (shard, name) in shards.iter().zip(["a.safetensors", "b.safetensors"]) {
        index.extend(shard.iter().map(|entry| (entry.name.clone(), json!(name))));
    }
    change(&mut index, &mut shards);
    for (shard, name) in shards.iter().zip(["a.safetensors", "b.safetensors"]) {
        if !shard.is_empty() {
            fs::write(dir.path().join(name), file_of(shard, 0)).unwrap();
        }
    }
    fs::write(dir.path().join(INDEX), json!({"weight_map": index}).to_string()).unwrap();
    dir
}

/// The error of loading `dir`, with the folder's path written `DIR`.
fn fault(dir: &TempDir) -> String {
    let error = try_load(dir.path()).expect_err("a broken folder was loaded");
    error.to_string().replace(&dir.path().display().to_string(), "DIR")
}

#[track_caller]
fn assert_faults(dir: &TempDir, lines: &[&str]) {
    let expected = lines.iter().map(|line| format!("\n  {line}")).collect::<String>();
    assert_eq!(fault(dir), format!("the weights in DIR do not fit the model:{expected}"));
}

#[test]
fn goldens_load_with_progress() {
    for name in FAMILIES {
        let (mut last, mut calls) = ((0, 0), 0);
        let files = ModelFiles::open(&golden(name)).unwrap();
        let weights = files.load(&mut |done, total| {
            assert!(done > last.0 && done <= total);
            (last, calls) = ((done, total), calls + 1);
        });
        let bytes = files.weight_bytes().unwrap().expect("there are files");
        assert_eq!(last, (bytes.stored, bytes.stored), "{name}");
        assert!(calls > 10);
        assert_eq!(weights.unwrap().by_name().bytes(), bytes.held, "{name}");
    }
}

/// The large matrices are held in 8.5 or 4.5 bits a weight, all others have the values of the
/// files;
/// a tied head is a quantised copy beside an embedding that is as it was.
#[test]
fn large_matrices_are_quantised_and_nothing_else() {
    let kept = [
        "embed",
        "norm",
        "conv1d",
        "kv_b_proj",
        "f_a_proj",
        "f_b_proj",
        "g_a_proj",
        "g_b_proj",
        "self_attn.b_proj",
        "A_log",
        "dt_bias",
        "block_sparse_moe.gate",
    ];
    for name in FAMILIES {
        for (quantization, bits) in [(Quantization::Q8, 8.5), (Quantization::Q4, 4.5)] {
            let mut files = ModelFiles::open(&golden(name)).unwrap();
            let stored = files.load(&mut |_, _| {}).unwrap().by_name().widened();
            let before = files.weight_bytes().unwrap().expect("there are files");
            let parameters = files.spec.parameters();
            files.spec.quantize = Some(quantization);
            let weights = files.load(&mut |_, _| {}).unwrap();
            let mut quantized_bytes = 0;
            for required in files.spec.required() {
                let tensor = weights.tensor(required.layer, required.part);
                let is_tied = files.spec.tied_head && required.part == Part::Head;
                let part = if is_tied { Part::Embedding } else { required.part };
                let file_name = files.tensor_name(required.layer, part);
                let exact = &stored[&file_name];
                let values = weights.vector(required.layer, required.part);
                if !is_tied && kept.iter().any(|kept| file_name.contains(kept)) {
                    assert_eq!(&values, exact, "{name}: {file_name}");
                    continue;
                }
                let Panels::Quantized(panels) = weights.panels(&tensor) else {
                    panic!("{name}: {file_name} is not quantised");
                };
                assert_ne!(&values, exact, "{name}: {file_name}");
                let padded =
                    tensor.rows().next_multiple_of(16) * tensor.cols().next_multiple_of(32);
                assert_eq!(panels.bytes().len() as f64, padded as f64 * bits / 8.0);
                quantized_bytes += panels.bytes().len();
            }
            let after = files.weight_bytes().unwrap().expect("there are files");
            assert_eq!(after.held, weights.by_name().bytes(), "{name}");
            assert_eq!((after.stored, files.spec.parameters()), (before.stored, parameters));
            // The copy of a tied head may be more than what all others save.
            let is_less = after.held < before.held || files.spec.tied_head;
            assert!(quantized_bytes < after.held && is_less, "{name}: {after:?} of {before:?}");
        }
    }
}

#[cfg(feature = "embedded-model")]
#[test]
fn embedded_model_equals_its_file() {
    let embedded = ModelFiles::embedded().unwrap().load(&mut |_, _| {}).unwrap();
    let folder = load(&root().join("assets/tiny-model"));
    assert_eq!(embedded.by_name().widened(), folder.by_name().widened());
}

#[test]
fn twins_in_other_dtypes_hold_equal_values() {
    for name in FAMILIES {
        let source = entries(&golden(name).join(FILE));
        let narrow = load(&golden(name)).by_name().widened();
        for dtype in ["F32", "F16"] {
            let dir = folder(name);
            let recode = |entry: &Entry| {
                let Entry { name, shape, .. } = entry.clone();
                let values = narrow[&name].iter();
                let bytes = match dtype {
                    "F32" => values.flat_map(|v| v.to_le_bytes()).collect(),
                    _ => values.flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
                };
                Entry { name, dtype: dtype.to_owned(), shape, bytes }
            };
            let list: Vec<Entry> = source.iter().map(recode).collect();
            fs::write(dir.path().join(FILE), file_of(&list, 0)).unwrap();
            let kv_dtype = ModelFiles::open(dir.path()).unwrap().spec.kv_dtype;
            let is_wide = dtype == "F32";
            assert_eq!(kv_dtype, if is_wide { KvDtype::F32 } else { KvDtype::Bf16 }, "{name}");
            let twin = load(dir.path()).by_name().widened();
            let rounded = |v: f32| if dtype == "F32" { v } else { f16::from_f32(v).to_f32() };
            for (tensor, values) in &narrow {
                let expected: Vec<f32> = values.iter().map(|v| rounded(*v)).collect();
                assert_eq!(twin[tensor], expected, "{name} {dtype} {tensor}");
            }
        }
        // What the file says, decoded here bit by bit.
        let first = source.iter().find(|entry| entry.dtype == "BF16").unwrap();
        let bits = first.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let decoded: Vec<f32> = bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect();
        assert_eq!(narrow[&first.name], decoded);
    }
}

/// Rows of tokens are no wider than most bytes of the weights in their files, whatever config.json
/// says; without files it is what config.json says.
#[test]
fn rows_of_tokens_are_as_wide_as_the_weights() {
    let kv_dtype = |dir: &Path| ModelFiles::open(dir).unwrap().spec.kv_dtype;
    let widen = |entry: &mut Entry| {
        assert_eq!(entry.dtype, "BF16");
        entry.dtype = "F32".to_owned();
        entry.bytes = entry.bytes.chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
    };
    let one = with_entries(|list| widen(&mut list[0]));
    assert_eq!(kv_dtype(one.path()), KvDtype::Bf16);
    let all = with_entries(|list| list.iter_mut().for_each(widen));
    assert_eq!(kv_dtype(all.path()), KvDtype::F32);
    let declared = |config: &str, value: Value| {
        let text = fs::read_to_string(golden("llama_tiny").join("config.json")).unwrap();
        let mut config_of: Map<String, Value> = serde_json::from_str(&text).unwrap();
        config_of.retain(|key, _| !key.ends_with("dtype"));
        config_of.insert(config.to_owned(), value);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), Value::Object(config_of).to_string()).unwrap();
        kv_dtype(dir.path())
    };
    assert_eq!(declared("dtype", json!("float32")), KvDtype::F32);
    assert_eq!(declared("torch_dtype", json!("float32")), KvDtype::F32);
    assert_eq!(declared("torch_dtype", json!("float16")), KvDtype::Bf16);
    assert_eq!(declared("use_cache", json!(true)), KvDtype::Bf16);
}

/// The F32 twins of the goldens, one of them in shards, lie beside the repository where it is
/// developed; they are too large to be in it.
#[test]
fn golden_twins_hold_equal_values() {
    for name in FAMILIES {
        let twin = root().join("../shared/goldens/models").join(format!("{name}_f32"));
        if twin.exists() {
            let (narrow, wide) = (load(&golden(name)), load(&twin));
            assert!(wide.by_name().bytes() > narrow.by_name().bytes() * 3 / 2, "{name}");
            assert_eq!(narrow.by_name().widened(), wide.by_name().widened(), "{name}");
        }
    }
}

#[test]
fn misaligned_tensors_are_copied_not_refused() {
    let dir = folder("kimi_linear_tiny");
    let list = entries(&golden("kimi_linear_tiny").join(FILE));
    for padding in 1..4 {
        fs::write(dir.path().join(FILE), file_of(&list, padding)).unwrap();
        let weights = load(dir.path());
        assert_eq!(
            weights.by_name().widened(),
            load(&golden("kimi_linear_tiny")).by_name().widened()
        );
    }
}

#[test]
fn places_have_shapes_whatever_the_file_adds() {
    let weights = load(&golden("kimi_linear_tiny"));
    let shape = |layer, part| {
        let tensor = weights.tensor(layer, part);
        (tensor.rows(), tensor.cols(), weights.vector(layer, part).len())
    };
    assert_eq!(shape(None, Part::Embedding), (768, 64, 768 * 64));
    assert_eq!(shape(Some(0), Part::QueryConv), (96, 4, 96 * 4));
    assert_eq!(shape(Some(0), Part::DecayLog), (1, 3, 3));
    assert_eq!(shape(Some(5), Part::ExpertDown(7)), (64, 32, 64 * 32));
    assert_eq!(weights.vector(Some(3), Part::LatentNorm).len(), 32);
    let first = entries(&golden("kimi_linear_tiny").join(FILE));
    let name = "model.layers.5.block_sparse_moe.experts.7.w2.weight";
    let expert = first.iter().find(|entry| entry.name == name).unwrap();
    let value = bf16::from_le_bytes([expert.bytes[0], expert.bytes[1]]).to_f32();
    assert_eq!(weights.vector(Some(5), Part::ExpertDown(7))[0], value);
}

#[test]
fn shards_load_like_one_file() {
    let dir = with_shards(|_, _| {});
    assert_eq!(
        load(dir.path()).by_name().widened(),
        load(&golden("llama_tiny")).by_name().widened()
    );
}

#[test]
fn all_faults_are_listed_at_once() {
    let dir = with_entries(|list| {
        list.retain(|entry| entry.name != "model.norm.weight");
        list[0].shape.reverse();
        list[1].dtype = "I16".to_owned();
        let mut extra = list[2].clone();
        extra.name = "model.layers.9.input_layernorm.weight".to_owned();
        list.push(extra);
    });
    assert_faults(
        &dir,
        &[
            "model.embed_tokens.weight: I16 in model.safetensors; only F32, BF16 and F16 can be used",
            "model.norm.weight [96]: missing",
            "lm_head.weight: [96, 544] in model.safetensors, the model wants [544, 96]",
            "model.layers.9.input_layernorm.weight: in model.safetensors, but the model has no use for it",
        ],
    );
}

#[test]
fn long_lists_are_cut() {
    let dir = with_entries(|list| list.truncate(1));
    let text = fault(&dir);
    assert_eq!(text.lines().count(), 1 + 20 + 1);
    assert_eq!(text.lines().last(), Some("  ... and 18 more like the last"));
}

#[test]
fn tables_and_heads_that_nobody_reads_may_stay() {
    let dir = with_entries(|list| {
        let (name, dtype) = ("model.layers.0.self_attn.rotary_emb.inv_freq", "F32");
        let bytes = vec![0; 32];
        list.push(Entry { name: name.to_owned(), dtype: dtype.to_owned(), shape: vec![8], bytes });
    });
    load(dir.path());

    let tied = folder("qwen3_tiny");
    let mut list = entries(&golden("qwen3_tiny").join(FILE));
    let mut head = list[0].clone();
    assert_eq!(head.name, "model.embed_tokens.weight");
    head.name = "lm_head.weight".to_owned();
    list.push(head);
    fs::write(tied.path().join(FILE), file_of(&list, 0)).unwrap();
    assert_eq!(load(tied.path()).by_name().tensor("lm_head.weight"), None);
}

#[test]
fn broken_files() {
    let sound = fs::read(golden("llama_tiny").join(FILE)).unwrap();
    let header = 8 + u64::from_le_bytes(*sound.first_chunk().unwrap()) as usize;
    let dir = folder("llama_tiny");
    let cases: &[(&[u8], &str)] = &[
        (b"", "model.safetensors: 0 bytes are too few for a safetensors file"),
        (&sound[..7], "model.safetensors: 7 bytes are too few for a safetensors file"),
        (&sound[..100], "model.safetensors: a header of 4040 bytes in a file of 100"),
        (
            &[&[255; 8], &sound[8..100]].concat(),
            "model.safetensors: a header of 18446744073709551615 bytes in a file of 100",
        ),
        (
            b"\x05\0\0\0\0\0\0\0what?",
            "model.safetensors: bad header: expected value at line 1 column 1",
        ),
        (
            &sound[..header + 1000],
            "model.safetensors: truncated: 5048 bytes, its header describes 872080",
        ),
        (
            &[&sound, b"?".as_slice()].concat(),
            "model.safetensors: 872081 bytes, its header describes only 872080",
        ),
    ];
    for (bytes, line) in cases {
        fs::write(dir.path().join(FILE), bytes).unwrap();
        assert_faults(&dir, &[line]);
    }
}

#[test]
fn broken_layouts() {
    let dir = folder("llama_tiny");
    assert_eq!(
        fault(&dir),
        "DIR: neither model.safetensors nor model.safetensors.index.json is there"
    );
    fs::write(dir.path().join(INDEX), "{").unwrap();
    assert_faults(
        &dir,
        &["model.safetensors.index.json: not JSON: EOF while parsing an object at line 1 column 1"],
    );
    fs::write(dir.path().join(INDEX), "{}").unwrap();
    assert_faults(&dir, &["model.safetensors.index.json: no object `weight_map` in it"]);
    fs::write(dir.path().join(INDEX), r#"{"weight_map": {"x": "../secret"}}"#).unwrap();
    assert_faults(
        &dir,
        &["model.safetensors.index.json: x is in \"../secret\", which is not a plain file name"],
    );
    fs::write(dir.path().join(INDEX), r#"{"weight_map": {"x": 3}}"#).unwrap();
    assert_faults(&dir, &["model.safetensors.index.json: x is in 3, which is no file name"]);
    fs::write(dir.path().join(FILE), "").unwrap();
    fs::write(dir.path().join(INDEX), r#"{"weight_map": {}}"#).unwrap();
    assert_eq!(
        fault(&dir),
        "DIR: model.safetensors is there, but model.safetensors.index.json does not name it; \
         remove one"
    );
}

#[test]
fn broken_shards() {
    // An absent file is one fault, not one for each of its tensors.
    let absent = with_shards(|_, shards| shards[1].clear());
    assert_faults(&absent, &["b.safetensors: named by the index, but not there"]);

    let elsewhere = with_shards(|_, shards| {
        let moved = shards[0].pop().unwrap();
        assert_eq!(moved.name, "model.layers.1.self_attn.v_proj.weight");
    });
    let name = "model.layers.1.self_attn.v_proj.weight";
    assert_faults(
        &elsewhere,
        &[
            &format!("{name}: the index says it is in a.safetensors, but it is not"),
            &format!("{name} [32, 96]: missing"),
        ],
    );

    let twice = with_shards(|_, shards| {
        let copy = shards[0][1].clone();
        shards[1].push(copy);
    });
    let name = "model.embed_tokens.weight";
    assert_faults(&twice, &[&format!("{name}: both in a.safetensors and in b.safetensors")]);

    let unlisted = with_shards(|index, shards| {
        index.remove("lm_head.weight");
        shards[0][0].name = "other.weight".to_owned();
    });
    assert_faults(
        &unlisted,
        &[
            "lm_head.weight [544, 96]: missing",
            "other.weight: in a.safetensors, but the model has no use for it",
        ],
    );
}

//! Models from their `config.json`: byte-exact figures (SEEDS.md section 7.2), presets against
//! configs, and what is refused.

use std::fs;
use std::path::Path;

use deltapool::models::ModelFiles;
use deltapool::models::spec::Mixer;
use deltapool::simulate::ModelProfile;
use deltapool::simulate::model::PRESETS;
use serde_json::{Value, json};

fn read(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/configs/{name}.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn profile(config: &Value) -> ModelProfile {
    ModelProfile::from_config(&config.to_string()).unwrap_or_else(|error| panic!("{error}"))
}

fn preset(name: &str) -> ModelProfile {
    ModelProfile::preset(name).unwrap()
}

#[test]
fn bytes_per_token_and_of_state_are_exact() {
    for (name, kv, state, conv, grid) in [
        ("kimi-k3", 27_648.0, 434_110_464, 15_261_696, 64),
        ("kimi-linear-48b", 8_064.0, 41_943_040, 1_474_560, 64),
        ("qwen3-next-80b", 24_576.0, 75_497_472, 1_769_472, 64),
        ("deepseek-v3", 70_272.0, 0, 0, 64),
        ("llama-3.1-8b", 131_072.0, 0, 0, 1),
        ("llama-2-7b", 524_288.0, 0, 0, 1),
    ] {
        let model = profile(&read(name));
        assert_eq!((model.kv_bytes, model.state_bytes, model.conv_bytes), (kv, state, conv));
        assert_eq!(model.grid, grid, "{name}");
    }
    // 70B: 80 layers, 8 KV heads of 128.
    let mut llama = read("llama-3.1-8b");
    llama["num_hidden_layers"] = json!(80);
    llama["hidden_size"] = json!(8192);
    llama["num_attention_heads"] = json!(64);
    assert_eq!(profile(&llama).kv_bytes, 327_680.0);
    assert_eq!(profile(&llama).attention, preset("70b-gqa").attention);
    // A layer of Llama 2 7B has 202,375,168 parameters in matrices.
    let mut shallow = read("llama-2-7b");
    shallow["num_hidden_layers"] = json!(31);
    let layer = profile(&read("llama-2-7b")).active_params - profile(&shallow).active_params;
    assert_eq!(layer, 202_375_168.0);
    // In bf16 K3's state is half of that.
    assert_eq!(preset("k3").state_bytes, 434_110_464 / 2);
}

#[test]
fn heads_that_do_not_share_alike_are_refused_by_their_keys() {
    for (key, value, why) in [
        ("num_key_value_heads", 5, "num_key_value_heads is 5; it must divide num_attention_heads"),
        ("num_key_value_heads", 64, "num_key_value_heads is 64; it must divide"),
        ("hidden_size", 100, "hidden_size is 100; it must be a multiple of num_attention_heads"),
    ] {
        let mut llama = read("llama-2-7b");
        llama[key] = json!(value);
        let error = ModelProfile::from_config(&llama.to_string()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// SEEDS.md section 4.9: KDA's layers cost alike however long the context is.
#[test]
fn only_full_attention_pays_for_pairs_of_tokens() {
    let all = profile(&read("kimi-linear-48b")).attention;
    let mut fewer = read("kimi-linear-48b");
    let layers = &mut fewer["linear_attn_config"];
    let last = layers["full_attn_layers"].as_array_mut().unwrap().pop().unwrap();
    layers["kda_layers"].as_array_mut().unwrap().push(last);
    // 32 heads, each with keys of 192 and values of 128 values.
    let layer = 2.0 * 32.0 * (192.0 + 128.0);
    assert_eq!((all, profile(&fewer).attention), (7.0 * layer, 6.0 * layer));
}

#[test]
fn presets_of_models_that_exist_are_what_their_configs_say() {
    for (name, config, params) in [
        ("k3-real", "kimi-k3", None),
        ("kimi-linear", "kimi-linear-48b", Some(3_105_767_424.0)),
        ("qwen3-next", "qwen3-next-80b", Some(3_562_373_120.0)),
        ("deepseek-v3", "deepseek-v3", None),
        ("llama-3.1-8b", "llama-3.1-8b", None),
        ("llama-2-7b", "llama-2-7b", None),
    ] {
        let (preset, mut config) = (preset(name), profile(&read(config)));
        // Those that are called 3B have the round figure in the preset.
        if let Some(params) = params {
            assert_eq!((config.active_params, preset.active_params), (params, 3e9));
            config.active_params = 3e9;
        }
        let prefill_rate = preset.prefill_rate;
        assert_eq!(preset, ModelProfile { name: name.into(), prefill_rate, ..config });
    }
    for name in PRESETS {
        assert_eq!(preset(name).name, *name);
    }
    assert_eq!(ModelProfile::preset("70b"), None);
}

#[test]
fn the_simulator_and_the_engine_read_the_same_out_of_a_config() {
    for name in ["kimi-linear-48b", "llama-3.1-8b"] {
        let config = read(name);
        let spec = ModelFiles::of_texts(&config.to_string(), None, &[]).unwrap().spec;
        let profile = profile(&config);
        assert_eq!(profile.active_params, spec.active_weights() as f64);
        assert_eq!((profile.grid, profile.max_context), (spec.grid(), Some(spec.context)));
        let kept: usize = spec.layers.iter().map(|layer| layer.mixer.values_per_token()).sum();
        assert_eq!(profile.kv_bytes, 2.0 * kept as f64);
        let kda = |layer: &deltapool::models::spec::Layer| match &layer.mixer {
            Mixer::Kda(kda) => (kda.state_values(), kda.window_values()),
            _ => (0, 0),
        };
        let states: usize = spec.layers.iter().map(|layer| kda(layer).0).sum();
        let windows: usize = spec.layers.iter().map(|layer| kda(layer).1).sum();
        assert_eq!(
            (profile.state_bytes, profile.conv_bytes),
            (4 * states as u64, 2 * windows as u64)
        );
    }
}

#[test]
fn qwen3_with_experts_in_every_layer() {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": false,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": false,
        "sliding_window": null, "max_window_layers": 48, "hidden_act": "silu"
    });
    let model = profile(&config);
    // 48 layers of 4 heads of 128, and 3.0e9 of 30.2e9 parameters beside the embedding.
    assert_eq!((model.kv_bytes, model.grid), (98_304.0, 1));
    assert_eq!(model.active_params, 3_041_656_832.0);
    refused(
        with(config.clone(), "num_experts_per_tok", json!(129)),
        &["129 experts a token, but there are 128"],
    );
    refused(
        with(config, "mlp_only_layers", json!([0])),
        &["mlp_only_layers is [0]; it must be [] or absent"],
    );
}

#[test]
fn experts_are_read_as_far_as_they_are_chosen() {
    let kimi = preset("kimi-linear");
    let experts = kimi.weights.experts.unwrap();
    // 256 experts, 8 a token: 32 tokens touch 63.8 % (F26).
    assert!((experts.touched(32.0) / 256.0 - 0.638).abs() < 5e-4);
    assert_eq!((experts.touched(0.0), experts.touched(1.0)), (0.0, 8.0));
    assert_eq!(kimi.weight_bytes(0.0), kimi.weights.always_bytes);
    let all = kimi.weight_bytes(1e9) + 163_840.0 * 2304.0 * 2.0;
    // All 49,122,681,728 parameters but norms, vectors and taps.
    assert!((all / 2.0 / 49_122_681_728.0 - 1.0).abs() < 1e-4, "{all}");
    // What K3's files hold beside vision: 1.56 TB, experts of MXFP4 with their scales.
    let k3 = preset("k3-real");
    assert!((k3.weight_bytes(1e9) / 1.556e12 - 1.0).abs() < 2e-3, "{}", k3.weight_bytes(1e9));
}

#[test]
fn attention_counts_the_widths_of_the_heads_that_attend() {
    // Plain: 4 d n. Latent, expanded: 2 heads (192 + 128) a layer, of attention layers only.
    assert_eq!(preset("llama-2-7b").attention, 4.0 * 4096.0 * 32.0);
    assert_eq!(profile(&read("kimi-linear-48b")).attention, 2.0 * 32.0 * 320.0 * 7.0);
    assert_eq!(profile(&read("qwen3-next-80b")).attention, 4.0 * 16.0 * 256.0 * 12.0);
    let mut narrow = read("kimi-linear-48b");
    narrow["qk_nope_head_dim"] = json!(64);
    assert_eq!(profile(&narrow).attention, 2.0 * 32.0 * 256.0 * 7.0);
}

#[test]
fn layer_lists_are_read_never_inferred() {
    // One MLA layer, at either end: the lists count from 1.
    for mla in [1, 27] {
        let mut kimi = read("kimi-linear-48b");
        let lists = &mut kimi["linear_attn_config"];
        lists["kda_layers"] = (1..=27).filter(|layer| *layer != mla).collect();
        lists["full_attn_layers"] = json!([mla]);
        let one = profile(&kimi);
        assert_eq!((one.kv_bytes, one.state_bytes), (1152.0, 26 * 2_097_152));
    }
    let mut qwen = read("qwen3-next-80b");
    qwen["layer_types"] = json!(vec!["full_attention"; 48]);
    assert_eq!(profile(&qwen).state_bytes, 0, "the list comes before the interval");
}

#[track_caller]
fn refused(config: Value, told: &[&str]) {
    let error = ModelProfile::from_config(&config.to_string()).expect_err("it is refused");
    assert_eq!(error.faults, told);
}

fn with(mut config: Value, path: &str, value: Value) -> Value {
    let mut at = &mut config;
    for step in path.split('.') {
        at = &mut at[step];
    }
    *at = value;
    config
}

#[test]
fn a_key_that_is_missing_or_unknown_is_named() {
    let (llama, kimi) = (read("llama-3.1-8b"), read("kimi-linear-48b"));
    let null = || Value::Null;
    for key in ["num_key_value_heads", "intermediate_size", "hidden_size", "vocab_size"] {
        let told = format!("{key} is missing");
        refused(with(llama.clone(), key, null()), &[&told]);
    }
    refused(with(llama.clone(), "torch_dtype", null()), &["dtype | torch_dtype is missing"]);
    refused(with(llama.clone(), "turbo", json!(1)), &["turbo is not understood"]);
    refused(
        with(llama.clone(), "quantization_config", json!({"quant_method": "awq"})),
        &["quantization_config is not understood"],
    );
    refused(
        with(kimi.clone(), "linear_attn_config.kda_layers", null()),
        &[
            "linear_attn_config.kda_layers is missing",
            "linear_attn_config.kda_layers and .full_attn_layers must name each layer from 1 to \
             27 once",
        ],
    );
    refused(
        with(kimi.clone(), "linear_attn_config.turbo", json!(1)),
        &["linear_attn_config.turbo is not understood"],
    );
    refused(with(kimi, "kv_lora_rank", null()), &["kv_lora_rank is missing"]);
    refused(
        with(read("qwen3-next-80b"), "full_attention_interval", null()),
        &["layer_types | full_attention_interval is missing"],
    );
    let k3 = with(read("kimi-k3"), "text_config.hidden_size", json!(0));
    refused(k3, &["text_config.hidden_size is 0; it must be a whole number from 1 to 2147483648"]);
    let families = "llama or qwen2 or qwen3 or qwen3_moe or deepseek_v2 or deepseek_v3 or \
                    kimi_linear or qwen3_next";
    let told = format!("model_type is \"gpt2\"; it must be {families}");
    refused(with(llama.clone(), "model_type", json!("gpt2")), &[&told]);
    refused(with(llama, "model_type", null()), &["model_type is missing"]);
    refused(json!([]), &["it is no object"]);
}

#[test]
fn attention_through_a_window_is_refused() {
    let mut qwen = read("llama-3.1-8b");
    qwen["model_type"] = json!("qwen2");
    qwen["use_sliding_window"] = json!(false);
    assert_eq!(profile(&qwen).kv_bytes, 131_072.0);
    refused(
        with(qwen.clone(), "use_sliding_window", json!(true)),
        &["use_sliding_window is true; it must be false or absent"],
    );
    refused(
        with(qwen, "layer_types", json!(["sliding_attention"])),
        &["layer_types must be a list of nothing but \"full_attention\""],
    );
}

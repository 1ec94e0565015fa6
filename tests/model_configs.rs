//! Configs: what the families make of sound ones, and how others are refused.

use std::fs;
use std::path::Path;

use deltapool::models::ModelFiles;
use deltapool::models::spec::{Ffn, Mixer};
use kernels::kda::Gate;
use kernels::rope::{Rope, RopeScaling};
use serde_json::{Value, json};

fn read(path: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn kimi() -> Value {
    read("goldens/models/kimi_linear_tiny/config.json")
}

fn llama() -> Value {
    read("goldens/models/llama_tiny/config.json")
}

fn qwen3() -> Value {
    read("goldens/models/qwen3_tiny/config.json")
}

fn open(config: &Value) -> ModelFiles {
    ModelFiles::of_texts(&config.to_string(), None, &[]).unwrap_or_else(|error| panic!("{error}"))
}

/// `config` with the value at each pointer set, or removed where it is null and named with `-`.
fn with(mut config: Value, changes: &[(&str, Value)]) -> Value {
    for (path, value) in changes {
        let (parent, key) = path.rsplit_once('.').unwrap_or(("", path));
        let object = if parent.is_empty() { &mut config } else { &mut config[parent] };
        match key.strip_prefix('-') {
            Some(key) => drop(object.as_object_mut().unwrap().remove(key)),
            None => object[key] = value.clone(),
        }
    }
    config
}

#[track_caller]
fn assert_refused(config: &Value, lines: &[&str]) {
    let error = ModelFiles::of_texts(&config.to_string(), None, &[])
        .expect_err("a config that must be refused was read");
    let expected = lines.iter().map(|line| format!("\n  {line}")).collect::<String>();
    assert_eq!(error.to_string(), format!("the binary's config.json cannot be used:{expected}"));
}

#[test]
fn kimi_linear_48b() {
    let files = open(&read("configs/kimi-linear-48b.json"));
    let spec = &files.spec;
    assert_eq!(spec.parameters(), 49_122_681_728);
    assert_eq!(spec.required().len(), 20_493);
    assert_eq!((spec.grid(), spec.context), (64, 1_048_576));
    let full: Vec<usize> =
        (0..spec.layers.len()).filter(|&i| matches!(spec.layers[i].mixer, Mixer::Mla(_))).collect();
    assert_eq!(full, [3, 7, 11, 15, 19, 23, 26]);
    let Mixer::Kda(kda) = &spec.layers[0].mixer else { panic!("layer 0 is KDA") };
    assert_eq!((kda.heads, kda.head_dim, kda.conv_width, kda.norm_eps), (32, 128, 4, 1e-5));
    assert_eq!(kda.gate, Gate::Softplus);
    let Mixer::Mla(mla) = &spec.layers[3].mixer else { panic!("layer 3 is MLA") };
    assert_eq!((mla.nope, mla.rope, mla.value_dim, mla.rank), (128, 64, 128, 512));
    assert_eq!(mla.latent_eps, 1e-6, "the class default, not rms_norm_eps");
    assert_eq!(spec.layers[0].ffn, Ffn::Dense { inter: 9216 });
    let Ffn::Moe(moe) = &spec.layers[1].ffn else { panic!("layer 1 has experts") };
    assert_eq!((moe.inter, moe.shared_inter), (1024, 1024));
    assert_eq!((moe.router.experts, moe.router.top_k, moe.router.scale), (256, 8, 2.446));
    assert!(moe.router.renormalize && moe.router.has_bias());
    assert_eq!(files.defaults.stop_tokens, [163_586]);
    assert_eq!(files.defaults.bos_token, Some(163_584));
}

#[test]
fn kimi_variants() {
    let bounded = with(kimi(), &[("linear_attn_config.gate_lower_bound", json!(-5.0))]);
    let Mixer::Kda(kda) = &open(&bounded).spec.layers[0].mixer else { panic!("layer 0 is KDA") };
    assert_eq!(kda.gate, Gate::Bounded { lower: -5.0 });
    let two_shared = with(kimi(), &[("num_shared_experts", json!(2))]);
    let Ffn::Moe(moe) = &open(&two_shared).spec.layers[1].ffn else { panic!("experts") };
    assert_eq!(moe.shared_inter, 64);
    // The same model under the names that other families use, nested.
    let renamed = with(
        kimi(),
        &[
            ("n_routed_experts", json!(8)),
            ("-num_experts", Value::Null),
            ("num_experts_per_tok", json!(3)),
            ("-num_experts_per_token", Value::Null),
            ("n_shared_experts", json!(1)),
            ("-num_shared_experts", Value::Null),
            ("norm_topk_prob", json!(true)),
            ("-moe_renormalize", Value::Null),
            ("n_group", json!(1)),
            ("-num_expert_group", Value::Null),
            ("scoring_func", json!("sigmoid")),
            ("-moe_router_activation_func", Value::Null),
            ("max_position_embeddings", json!(4096)),
            ("-model_max_length", Value::Null),
        ],
    );
    let nested = json!({"architectures": ["KimiLinearForCausalLM"], "text_config": renamed});
    assert_eq!(open(&nested).spec, open(&kimi()).spec);
    assert_eq!(open(&nested).defaults, open(&kimi()).defaults);
}

#[test]
fn llama_and_qwen3() {
    let llama8b = open(&read("configs/llama-3.1-8b.json"));
    assert_eq!(llama8b.spec.parameters(), 8_030_261_248);
    assert_eq!((llama8b.spec.grid(), llama8b.spec.context), (1, 131_072));
    assert_eq!(llama8b.defaults.stop_tokens, [128_001, 128_008, 128_009]);
    let Mixer::Gqa(gqa) = &llama8b.spec.layers[31].mixer else { panic!("GQA") };
    assert_eq!((gqa.heads, gqa.kv_heads, gqa.head_dim, gqa.qk_norm), (32, 8, 128, None));
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192.0,
    };
    assert_eq!(gqa.rope, Rope::new(128, 5e5, scaling));

    let Mixer::Gqa(gqa) = &open(&qwen3()).spec.layers[0].mixer else { panic!("GQA") };
    assert_eq!((gqa.head_dim, gqa.qk_norm), (32, Some(1e-6)));
    assert_eq!(gqa.rope, Rope::new(32, 1e6, RopeScaling::None));
    assert!(open(&qwen3()).spec.tied_head);

    // As newer writers put it.
    let parameters = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6});
    let newer = with(
        qwen3(),
        &[
            ("rope_parameters", parameters),
            ("-rope_theta", Value::Null),
            ("layer_types", json!(["full_attention", "full_attention"])),
        ],
    );
    let Mixer::Gqa(gqa) = &open(&newer).spec.layers[0].mixer else { panic!("GQA") };
    assert_eq!(gqa.rope, Rope::new(32, 1e6, RopeScaling::Linear { factor: 4.0 }));
}

#[test]
fn missing_wrong_and_unknown_keys_are_listed_at_once() {
    let config = with(
        kimi(),
        &[
            ("-num_experts", Value::Null),
            ("vocab_size", Value::Null),
            ("hidden_size", json!(-64)),
            ("intermediate_size", json!(112.5)),
            ("kv_lora_rank", json!(3_000_000_000_u64)),
            ("qk_rope_head_dim", json!("8")),
            ("num_attention_heads", json!(0)),
            ("num_key_value_heads", json!(1)),
            ("rms_norm_eps", json!(0)),
            ("moe_renormalize", json!(1)),
            ("linear_attn_config.taps", json!(4)),
            ("banana", json!(null)),
        ],
    );
    assert_refused(
        &config,
        &[
            "intermediate_size is 112.5; it must be a whole number from 1 to 2147483648",
            "rms_norm_eps is 0; it must be a number above 0",
            "num_attention_heads is 0; it must be a whole number from 1 to 2147483648",
            "qk_rope_head_dim is \"8\"; it must be a whole number from 1 to 2147483648",
            "kv_lora_rank is 3000000000; it must be a whole number from 1 to 2147483648",
            "num_experts | n_routed_experts | num_local_experts is missing",
            "moe_renormalize is 1; it must be true or false",
            "vocab_size is missing",
            "hidden_size is -64; it must be a whole number from 1 to 2147483648",
            "linear_attn_config.taps is not understood",
            "banana is not understood",
        ],
    );
}

#[test]
fn other_arithmetic_is_refused_by_name_and_value() {
    let only = |key: &str, value: &str, supported: &str| {
        format!("{key} is {value}, which is not supported; supported: {supported}")
    };
    let cases = [
        (llama(), "attention_bias", json!(true), "false, null"),
        (llama(), "mlp_bias", json!(true), "false, null"),
        (llama(), "hidden_act", json!("gelu"), "\"silu\""),
        (llama(), "quantization_config", json!({"bits": 4}), "null"),
        (qwen3(), "use_sliding_window", json!(true), "false, null"),
        (
            qwen3(),
            "layer_types",
            json!(["sliding_attention"]),
            "a list of nothing but \"full_attention\"",
        ),
        (kimi(), "q_lora_rank", json!(24), "null"),
        (kimi(), "mla_use_nope", json!(false), "true"),
        (kimi(), "num_nextn_predict_layers", json!(1), "0, null"),
        (kimi(), "moe_layer_freq", json!(2), "1"),
        (kimi(), "moe_router_activation_func", json!("softmax"), "\"sigmoid\""),
        (kimi(), "attn_res_block_size", json!(12), "null"),
        (kimi(), "routed_expert_hidden_size", json!(3584), "null"),
        (kimi(), "mla_use_output_gate", json!(true), "null, false"),
        (kimi(), "linear_attn_config.use_full_rank_gate", json!(true), "null, false"),
    ];
    for (config, key, value, supported) in cases {
        let line = only(key, &value.to_string(), supported);
        assert_refused(&with(config, &[(key, value)]), &[&line]);
    }
    for kind in ["yarn", "dynamic", "longrope"] {
        let scaling = json!({"type": kind, "factor": 4.0, "beta_fast": 32});
        let supported = r#""default", "linear", "llama3""#;
        let line = only("rope_scaling.type", &format!("\"{kind}\""), supported);
        assert_refused(&with(qwen3(), &[("rope_scaling", scaling)]), &[&line]);
    }
}

#[test]
fn values_that_do_not_go_together() {
    let cases = [
        (
            with(llama(), &[("num_key_value_heads", json!(4))]),
            "num_attention_heads (6) is not a multiple of num_key_value_heads (4)",
        ),
        (
            with(llama(), &[("-head_dim", Value::Null), ("hidden_size", json!(100))]),
            "without head_dim, hidden_size (100) must be a multiple of num_attention_heads (6)",
        ),
        (
            with(llama(), &[("head_dim", json!(15))]),
            "a head_dim of 15 cannot be rotated; it must be even and at most 4096",
        ),
        (
            with(llama(), &[("model_max_length", json!(99))]),
            "model_max_length is 99 but max_position_embeddings is 512; they mean the same",
        ),
        (with(qwen3(), &[("-head_dim", Value::Null)]), "head_dim is missing"),
        (
            with(
                llama(),
                &[("hidden_size", json!(1_u64 << 31)), ("vocab_size", json!(1_u64 << 31))],
            ),
            "the sizes describe a model of 4.6e18 parameters",
        ),
        (
            with(kimi(), &[("num_key_value_heads", json!(2))]),
            "num_key_value_heads is 2, but latent attention has all 4 heads",
        ),
        (
            with(kimi(), &[("linear_attn_config.kda_layers", json!([0, 1, 2, 4]))]),
            "linear_attn_config.kda_layers is [0,1,2,4]; it must be a list of whole numbers above 0",
        ),
        (
            with(kimi(), &[("linear_attn_config.kda_layers", json!([1, 2, 3, 4, 7]))]),
            "kda_layers and full_attn_layers must name each layer from 1 to 6 once; not named: [5], \
             named twice or not there: [7, 4]",
        ),
        (
            with(kimi(), &[("num_experts_per_token", json!(9))]),
            "num_experts_per_token (9) is above the 8 experts there are to choose from",
        ),
        (
            with(kimi(), &[("num_expert_group", json!(3)), ("num_experts_per_token", json!(2))]),
            "num_experts (8) cannot be split into num_expert_group (3) groups of 2 or more",
        ),
        // What the kernels have code for.
        (
            with(kimi(), &[("num_experts", json!(1_025))]),
            "num_experts is 1025; it must be a whole number from 1 to 1024",
        ),
        (
            with(kimi(), &[("linear_attn_config.short_conv_kernel_size", json!(9))]),
            "short_conv_kernel_size is 9; supported: 2 to 8",
        ),
        (
            with(kimi(), &[("linear_attn_config.short_conv_kernel_size", json!(1))]),
            "short_conv_kernel_size is 1; supported: 2 to 8",
        ),
        (with(kimi(), &[("topk_group", json!(2))]), "topk_group (2) is above num_expert_group (1)"),
        (
            with(llama(), &[("eos_token_id", json!([516, 544]))]),
            "eos_token_id (config.json) is [516,544]; it must be a token below 544, or a list of such",
        ),
        (with(llama(), &[("-eos_token_id", Value::Null)]), "eos_token_id is missing"),
    ];
    for (config, line) in cases {
        assert_refused(&config, &[line]);
    }
}

#[test]
fn families_that_are_not_there() {
    let supported = "supported: KimiLinearForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM";
    let cases = [
        (
            json!({"architectures": ["KimiK3ForConditionalGeneration"]}),
            "KimiK3ForConditionalGeneration",
        ),
        (json!({"model_type": "mamba"}), "mamba"),
        (json!({}), "neither architectures nor model_type"),
    ];
    for (config, found) in cases {
        let error = ModelFiles::of_texts(&config.to_string(), None, &[]).unwrap_err().to_string();
        let expected = format!("the binary's config.json: {found} is not supported; {supported}");
        assert_eq!(error, expected);
    }
    let error = ModelFiles::of_texts("[]", None, &[]).unwrap_err().to_string();
    assert!(error.starts_with("the binary's config.json: not a JSON object: invalid type"));
    let by_type = with(llama(), &[("-architectures", Value::Null)]);
    assert_eq!(open(&by_type).spec.family, "llama");
}

#[test]
fn generation_config_overrides() {
    let defaults = |generation: Value| {
        let text = generation.to_string();
        ModelFiles::of_texts(&llama().to_string(), Some(&text), &[]).map(|files| files.defaults)
    };
    let own = defaults(json!({"eos_token_id": [1, 2], "bos_token_id": 3})).unwrap();
    assert_eq!((own.stop_tokens, own.bos_token), (vec![1, 2], Some(3)));
    let inherited = defaults(json!({"do_sample": true})).unwrap();
    assert_eq!((inherited.stop_tokens, inherited.bos_token), (vec![516], Some(512)));
    let error = defaults(json!({"eos_token_id": "x"})).unwrap_err().to_string();
    assert!(error.contains("eos_token_id (generation_config.json) is \"x\"; it must be"));
}

//! `/metrics` and the dashboard made for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};

use crate::support::{PATIENCE, Server};

/// Every sample of the text: name and labels as they are printed, and the value.
struct Samples(BTreeMap<String, f64>);

impl Samples {
    fn of(server: &Server) -> Samples {
        let reply = server.get("/metrics");
        assert_eq!(reply.status, 200);
        assert_eq!(reply.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        let text = reply.text();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let samples = lines.map(|line| {
            let (name, value) = line.rsplit_once(' ').expect("a name and a value");
            (name.to_owned(), value.parse().expect("a number"))
        });
        Samples(samples.collect())
    }

    /// The samples of a metric that carry all of `labels`, added up.
    fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let named = |key: &str| key.split('{').next() == Some(name);
        let has = |key: &str| labels.iter().all(|label| key.contains(label));
        let all: Vec<f64> =
            self.0.iter().filter(|(key, _)| named(key) && has(key)).map(|(_, v)| *v).collect();
        assert!(!all.is_empty(), "there is no {name} with {labels:?}");
        all.iter().sum()
    }

    fn names(&self) -> BTreeSet<&str> {
        self.0.keys().map(|key| key.split('{').next().expect("a name")).collect()
    }
}

fn completion(prompt: &str, max_tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "temperature": 0 })
}

/// About 190 tokens: three blocks, and states behind the second and at the end.
fn story() -> String {
    "Once upon a time there was a little girl named Lily who liked to play outside. ".repeat(10)
}

#[test]
fn counts_agree_with_what_was_asked_and_with_each_other() {
    let server = Server::start(&[]);
    let usages: Vec<Value> = [(story(), 9), (story(), 5), ("Hello".to_owned(), 1)]
        .iter()
        .map(|(prompt, tokens)| {
            server.post("/v1/completions", &completion(prompt, *tokens)).json()["usage"].clone()
        })
        .collect();
    server.wait_until_idle();
    let of = |name: &str| usages.iter().map(|u| u[name].as_f64().expect("a count")).sum::<f64>();
    let cached = usages[1]["prompt_tokens_details"]["cached_tokens"].as_f64().expect("a count");
    assert!(cached > 64.0, "the second prompt was there: {usages:?}");

    let samples = Samples::of(&server);
    let sum = |name: &str| samples.sum(name, &[]);
    assert_eq!(sum("vllm:prompt_tokens_total"), of("prompt_tokens"));
    assert_eq!(sum("vllm:prompt_tokens_by_source_total"), of("prompt_tokens"));
    assert_eq!(sum("deltapool_prefix_tokens_total"), of("prompt_tokens"));
    assert_eq!(sum("vllm:generation_tokens_total"), of("completion_tokens"));
    assert_eq!(sum("vllm:prompt_tokens_cached_total"), cached);
    assert_eq!(samples.sum("vllm:request_success_total", &["finished_reason=\"length\""]), 3.0);
    assert_eq!(sum("vllm:request_success_total"), 3.0);
    assert_eq!(sum("vllm:time_to_first_token_seconds_count"), 3.0);
    // One gap less than tokens in each answer.
    assert_eq!(sum("vllm:inter_token_latency_seconds_count"), of("completion_tokens") - 3.0);
    assert_eq!(sum("deltapool_itl_seconds_count"), of("completion_tokens") - 3.0);
    assert_eq!(sum("vllm:request_prompt_tokens_sum"), of("prompt_tokens"));
    assert_eq!(sum("vllm:request_prefill_kv_computed_tokens_sum"), of("prompt_tokens") - cached);
    assert_eq!(samples.sum("vllm:e2e_request_latency_seconds_bucket", &["le=\"+Inf\""]), 3.0);
    let steps = sum("vllm:iteration_tokens_total_count");
    assert_eq!(sum("deltapool_step_seconds_count"), steps);
    // What is computed for an audit counts as a step's tokens, but as nobody's.
    assert!(sum("vllm:iteration_tokens_total_sum") >= sum("deltapool_computed_tokens_total"));
    let label = ["route=\"/v1/completions\"", "code=\"200\""];
    assert_eq!(samples.sum("deltapool_http_requests_total", &label), 3.0);
    assert_eq!(sum("deltapool_http_disconnects_total"), 0.0);
    for (key, value) in &samples.0 {
        assert!(key.contains("model_name=\"tiny\",engine=\"0\""), "{key}");
        assert!(value.is_finite() && *value >= 0.0, "{key} {value}");
    }
}

#[test]
fn an_idle_server_uses_nothing_and_keeps_states_as_cached() {
    let server = Server::start(&[]);
    server.post("/v1/completions", &completion(&story(), 4));
    server.wait_until_idle();
    // The units of a request are given back in the step of its last token, and figures told after
    // it: those of before have nothing used either, and nothing kept.
    let units = |samples: &Samples, state| samples.sum("deltapool_pool_units", &[state]);
    let started = Instant::now();
    let samples = loop {
        let samples = Samples::of(&server);
        let (used, cached) =
            (units(&samples, "state=\"used\""), units(&samples, "state=\"cached\""));
        if used == 0.0 && cached > 0.0 {
            break samples;
        }
        assert!(started.elapsed() < PATIENCE, "{used} units used, {cached} cached");
        thread::yield_now();
    };
    assert_eq!(samples.sum("vllm:kv_cache_usage_perc", &[]), 0.0);
    for unit in ["unit=\"block\"", "unit=\"slot\""] {
        let labels = ["tier=\"device\"", unit, "state=\"cached\""];
        assert!(samples.sum("deltapool_pool_units", &labels) > 0.0, "{unit}");
    }
    assert!(samples.sum("deltapool_checkpoints", &["tier=\"device\""]) > 0.0);
    let info = ["block_size=\"64\"", "num_gpu_blocks="];
    assert_eq!(samples.sum("vllm:cache_config_info", &info), 1.0);
}

#[test]
fn usage_is_that_of_the_fuller_pool_while_something_runs() {
    let server = Server::start(&[]);
    let seen = AtomicBool::new(false);
    thread::scope(|scope| {
        // One request may be over between two scrapes.
        scope.spawn(|| {
            while !seen.load(Ordering::Relaxed) {
                server.post("/v1/completions", &completion("Once", 400));
            }
        });
        while !seen.load(Ordering::Relaxed) {
            let samples = Samples::of(&server);
            let part = |unit: &str| {
                let of = |state: &str| {
                    let labels = ["tier=\"device\"", unit, state];
                    samples.sum("deltapool_pool_units", &labels)
                };
                of("state=\"used\"") / (of("state=\"used\"") + of("cached") + of("free"))
            };
            let fuller = part("unit=\"block\"").max(part("unit=\"slot\""));
            let usage = samples.sum("vllm:kv_cache_usage_perc", &[]);
            assert!((usage - fuller).abs() < 1e-9, "{usage} {fuller}");
            let runs = samples.sum("vllm:num_requests_running", &[]) == 1.0
                && samples.sum("deltapool_sequences", &["state=\"decode\""]) == 1.0;
            seen.store(runs && usage > 0.0, Ordering::Relaxed);
        }
    });
}

#[test]
fn what_keeps_a_request_off_the_device_is_named() {
    let server = Server::start(&["--max-num-seqs", "1"]);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| server.post("/v1/completions", &completion("Once", 60)).json());
        }
    });
    let samples = Samples::of(&server);
    assert!(samples.sum("deltapool_admission_blocked_total", &["unit=\"place\""]) > 0.0);
    assert_eq!(samples.sum("deltapool_admission_blocked_total", &["unit=\"block\""]), 0.0);
    assert_eq!(samples.sum("deltapool_admission_blocked_total", &["unit=\"slot\""]), 0.0);
}

#[test]
fn a_client_that_leaves_counts_as_aborted() {
    let server = Server::start(&[]);
    let mut body = completion("Once", 1_000);
    body["stream"] = true.into();
    let mut reply = server.post("/v1/completions", &body);
    reply.piece().expect("it has begun");
    drop(reply);
    server.wait_until_idle();
    let samples = Samples::of(&server);
    assert_eq!(samples.sum("vllm:request_success_total", &["finished_reason=\"abort\""]), 1.0);
    assert_eq!(samples.sum("deltapool_http_disconnects_total", &[]), 1.0);
}

#[test]
fn the_figures_need_a_key_unless_they_are_made_public() {
    let server = Server::start(&["--api-key", "secret"]);
    for path in ["/metrics", "/v1/engine/snapshot", "/v1/engine/events"] {
        assert_eq!(server.get(path).status, 401, "{path}");
        let headers = [("Authorization", "Bearer secret")];
        assert_eq!(server.request("GET", path, &headers, b"").status, 200, "{path}");
    }
    assert_eq!(server.get("/").status, 200);
    let head = server.request("HEAD", "/metrics", &[("Authorization", "Bearer secret")], b"");
    assert_eq!(head.status, 200);
}

/// A panel of a metric that does not exist shows nothing, and nobody notices.
#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    let text = include_str!("../../dashboards/grafana.json");
    let dashboard: Value = serde_json::from_str(text).expect("it is JSON");
    let mut asked = BTreeSet::new();
    let panels = dashboard["panels"].as_array().expect("it has panels");
    for panel in panels {
        for target in panel["targets"].as_array().into_iter().flatten() {
            asked.extend(metric_names(target["expr"].as_str().expect("an expression")));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().expect("it has variables") {
        asked.extend(metric_names(variable["query"].as_str().unwrap_or_default()));
    }
    assert!(asked.len() > 20, "{asked:?}");
    let server = Server::start(&[]);
    server.post("/v1/completions", &completion("Once", 3));
    let samples = Samples::of(&server);
    let unknown: Vec<_> = asked.difference(&samples.names()).copied().collect();
    assert!(unknown.is_empty(), "nobody emits {unknown:?}");
}

/// The words of an expression that are names of metrics.
fn metric_names(expression: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = expression.split(move |c| !is_part(c));
    words.filter(|word| word.starts_with("vllm:") || word.starts_with("deltapool_"))
}

/// Autoscalers, gateways and dashboards for vLLM look for these; a rate needs each from the start.
#[test]
fn the_names_that_tools_for_vllm_look_for_are_there_from_the_start() {
    let server = Server::start(&[]);
    let text = server.get("/metrics").text();
    let types: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE vllm:")?.split_once(' '))
        .collect();
    let names = |kind: &'static str, names: &'static str| {
        names.split_whitespace().map(move |name| (name, kind))
    };
    let gauges = names(
        "gauge",
        "num_requests_running num_requests_waiting num_requests_waiting_by_reason \
         num_requests_swapped kv_cache_usage_perc gpu_cache_usage_perc cpu_cache_usage_perc \
         cache_config_info",
    );
    let counters = names(
        "counter",
        "prefix_cache_queries_total prefix_cache_hits_total external_prefix_cache_queries_total \
         external_prefix_cache_hits_total num_preemptions_total prompt_tokens_total \
         prompt_tokens_cached_total prompt_tokens_by_source_total generation_tokens_total \
         request_success_total admission_rejections_total",
    );
    let histograms = names(
        "histogram",
        "time_to_first_token_seconds inter_token_latency_seconds \
         request_time_per_output_token_seconds e2e_request_latency_seconds \
         request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds \
         request_decode_time_seconds iteration_tokens_total request_prompt_tokens \
         request_generation_tokens request_max_num_generation_tokens request_params_n \
         request_params_max_tokens request_num_preemptions request_prefill_kv_computed_tokens",
    );
    for (name, kind) in gauges.chain(counters).chain(histograms) {
        assert_eq!(types.get(name), Some(&kind), "{name}");
        let labels = format!("vllm:{name}");
        let samples = text.lines().filter(|line| line.starts_with(&labels));
        assert!(samples.clone().count() > 0, "{name} has a value before the first request");
        assert!(samples.clone().all(|line| line.contains("model_name=\"tiny\"")), "{name}");
        assert!(samples.clone().all(|line| line.contains("engine=\"0\"")), "{name}");
    }
}

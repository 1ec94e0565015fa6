//! What other engines call things: vLLM's spellings where they mean the same, and for the rest an
//! error that says what there is instead.

use std::ffi::OsString;

use crate::cli::CliError;

/// Names that other engines give a flag, and what becomes of them here.
struct Spelling {
    names: &'static [&'static str],
    meaning: Meaning,
}

/// What becomes of a flag that is not ours.
enum Meaning {
    /// It is this flag of ours.
    Same(&'static str),
    /// A switch that changes nothing here, and why.
    Needless(&'static str),
    /// It and its value change nothing here, and why.
    NeedlessValue(&'static str),
    /// With one of these values it changes nothing; with others it is refused, and why.
    Only(&'static [&'static str], &'static str),
    /// It is refused; what to do instead.
    Refused(&'static str),
}

use Meaning::{Needless, NeedlessValue, Only, Refused, Same};

const fn row(names: &'static [&'static str], meaning: Meaning) -> Spelling {
    Spelling { names, meaning }
}

const CONTEXT: &str = "use --max-model-len";
const SEQUENCES: &str = "use --max-num-seqs";
const STEP: &str = "use --max-num-batched-tokens";
const MEMORY: &str =
    "use --device-memory: bytes (8GiB), or a percentage of what is free after the weights (25%)";
const BLOCKS: &str = "a block is 64 tokens";
const STATES: &str = "states take what --device-memory has free; there is no share to set";
const HOST: &str = "use --host-memory, in bytes (4GiB)";
const PLACES: &str = "use --checkpoint-every, a multiple of 64";
const PREFIX: &str = "use --no-prefix-cache";
const ONE_MACHINE: &str = "a model is computed by one process; use --threads";
const SEED: &str = "each request gives its own, in the field seed";
const TOKENIZER: &str = "the tokenizer is read from the model's folder";
const LORA: &str = "no adapters are served; merge them into the weights";
const DRAFT: &str = "there is no speculative decoding";
const NO_DOWNLOAD: &str = "nothing is downloaded; give the folder of a model as --model";
const PROXY: &str = "a reverse proxy does that";
const PARSER: &str = "the parser follows from the model";
const METRICS: &str = "figures are always served, at /metrics";
const WEIGHTS: &str = "use --quantize q8 or q4, which need no prepared weights";
const WHOLE: &str = "all weights are in one memory: that of --device cpu, or of --device cuda";

/// All of them.
const TABLE: &[Spelling] = &[
    // Further names of ours.
    row(&["--model-path", "--model-id"], Same("--model")),
    row(&["--alias", "-a"], Same("--served-model-name")),
    // vLLM.
    row(&["--kv-cache-memory-bytes"], Same("--device-memory")),
    row(&["--no-enable-prefix-caching"], Same("--no-prefix-cache")),
    row(&["--preemption-mode"], Same("--preempt")),
    row(&["--gpu-memory-utilization"], Refused(MEMORY)),
    row(&["--num-gpu-blocks-override"], Refused(MEMORY)),
    row(&["--swap-space", "--kv-offloading-size"], Refused(HOST)),
    row(&["--cpu-offload-gb"], Only(&["0"], WHOLE)),
    row(&["--mamba-block-size"], Refused(PLACES)),
    row(&["--mamba-cache-mode"], Refused("states are always kept; --no-prefix-cache keeps none")),
    row(
        &["--mamba-ssm-cache-dtype"],
        Only(&["auto", "float32"], "running states are f32, see --state-dtype"),
    ),
    row(&["--allowed-origins"], Refused("use --cors-origin, once for each")),
    row(&["--kv-cache-dtype"], Only(&["auto"], "use --kv-dtype f32 or bf16")),
    row(&["--dtype"], Only(&["auto"], "use --compute f32 or bf16")),
    row(&["--quantization"], Refused(WEIGHTS)),
    row(&["--load-format"], Only(&["auto", "safetensors"], "weights are safetensors")),
    row(&["--runner"], Only(&["auto", "generate"], "models generate, nothing else")),
    row(&["--task"], Only(&["auto", "generate"], "models generate, nothing else")),
    row(&["--disable-log-stats"], Refused("use --status-every 0")),
    row(&["--enable-lora", "--lora-modules", "--max-loras"], Refused(LORA)),
    row(&["--speculative-config", "--speculative-model"], Refused(DRAFT)),
    row(&["--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--root-path"], Refused(PROXY)),
    row(&["--download-dir", "--revision", "--hf-token"], Refused(NO_DOWNLOAD)),
    row(&["--tensor-parallel-size", "--tp-size", "--tp", "-tp"], Only(&["1"], ONE_MACHINE)),
    row(&["--pipeline-parallel-size", "--pp-size", "-pp"], Only(&["1"], ONE_MACHINE)),
    row(&["--data-parallel-size", "--dp-size", "-dp"], Only(&["1"], ONE_MACHINE)),
    row(&["--trust-remote-code"], Needless("no code of a model's folder is run")),
    row(&["--enforce-eager"], Needless("there is no graph to capture")),
    row(
        &["--disable-log-requests", "--no-enable-log-requests"],
        Needless("requests are never logged"),
    ),
    row(&["--enable-auto-tool-choice"], Needless("tools are always served")),
    row(&["--enable-prefix-caching"], Needless("prefixes are kept by default")),
    row(&["--enable-chunked-prefill"], Needless("prompts are always computed in pieces")),
    row(&["--enable-request-id-headers"], Needless("answers always carry their id")),
    row(&["--enable-prompt-tokens-details"], Needless("usage always has the details")),
    row(&["--enable-server-load-tracking"], Needless("/load is always there")),
    row(&["--tool-call-parser", "--reasoning-parser"], NeedlessValue(PARSER)),
    // SGLang.
    row(&["--context-length"], Refused(CONTEXT)),
    row(&["--max-running-requests"], Refused(SEQUENCES)),
    row(&["--chunked-prefill-size", "--max-prefill-tokens"], Refused(STEP)),
    row(&["--mem-fraction-static"], Refused(MEMORY)),
    row(&["--max-mamba-cache-size", "--mamba-full-memory-ratio"], Refused(STATES)),
    row(&["--mamba-track-interval"], Refused(PLACES)),
    row(&["--mamba-radix-cache-strategy"], Refused("where states are kept is always chosen")),
    row(&["--hicache-ratio", "--hicache-size"], Refused(HOST)),
    row(&["--max-queued-requests"], Refused("use --max-num-queued-reqs")),
    row(
        &["--schedule-policy", "--enable-priority-scheduling"],
        Refused("use --scheduling-policy fcfs or priority"),
    ),
    row(&["--disable-radix-cache"], Refused(PREFIX)),
    row(&["--block-size", "--page-size"], Only(&["64"], BLOCKS)),
    row(&["--seed", "--random-seed"], Refused(SEED)),
    row(&["--tokenizer", "--tokenizer-path"], Refused(TOKENIZER)),
    row(&["--enable-metrics", "--metrics"], Needless(METRICS)),
    row(&["--disable-metrics"], Refused(METRICS)),
    row(&["--watchdog-timeout"], Refused("use --stall-timeout")),
    // llama.cpp.
    row(&["--ctx-size", "-c"], Refused(CONTEXT)),
    row(&["--parallel", "-np"], Refused(SEQUENCES)),
    row(&["--batch-size", "-b", "--ubatch-size", "-ub"], Refused(STEP)),
    row(&["--n-gpu-layers", "--gpu-layers", "-ngl", "--fit"], Refused(WHOLE)),
    row(&["--ctx-checkpoints", "--cache-ram"], Refused(HOST)),
    row(&["--checkpoint-min-step"], Refused(PLACES)),
    row(
        &["--slot-save-path"],
        Refused("states are kept in memory and lost with the process; see --host-memory"),
    ),
    row(&["--no-cache-prompt"], Refused(PREFIX)),
    row(&["--chat-template-file"], Refused("use --chat-template")),
    row(&["--jinja"], Needless("chat templates are always applied")),
    row(&["--cont-batching", "-cb"], Needless("requests are always run together")),
    row(&["--reasoning-format"], NeedlessValue(PARSER)),
    row(&["--no-webui"], Refused("use --no-ui")),
    row(&["--cache-type-k", "-ctk", "--cache-type-v", "-ctv"], Refused("use --kv-dtype")),
    row(&["--models-preset"], Refused("use --config FILE, in TOML")),
    row(&["--hf-repo", "-hf", "-hfr"], Refused(NO_DOWNLOAD)),
    row(&["--lora"], Refused(LORA)),
    row(&["--model-draft", "-md"], Refused(DRAFT)),
    // mistral.rs.
    row(&["--max-seqs"], Refused(SEQUENCES)),
    row(&["--max-seq-len", "--pa-context-len"], Refused(CONTEXT)),
    row(&["--pa-memory-fraction", "--pa-memory-mb", "-mb"], Refused(MEMORY)),
    row(&["--prefix-cache-n"], Refused(PREFIX)),
    row(&["--pa-block-size"], Only(&["64"], BLOCKS)),
    row(&["--isq"], Refused(WEIGHTS)),
];

/// Arguments with the names of our flags, and a line for each that was left out.
///
/// # Errors
/// The first flag of another engine that has no meaning here, with what to use instead.
pub fn translate(args: Vec<OsString>) -> Result<(Vec<OsString>, Vec<String>), CliError> {
    let (mut ours, mut notes) = (Vec::with_capacity(args.len()), Vec::new());
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            ours.push(arg);
            break;
        }
        let Some((name, value)) = arg.to_str().filter(|text| text.starts_with('-')).map(parts)
        else {
            ours.push(arg);
            continue;
        };
        match meaning(&name) {
            None => ours.push(joined(&name, value)),
            Some(Same(flag)) => ours.push(joined(flag, value)),
            Some(Needless(why)) => notes.push(format!("{name} is ignored: {why}")),
            Some(NeedlessValue(why)) => {
                value_of(&name, value, &mut args)?;
                notes.push(format!("{name} is ignored: {why}"));
            }
            Some(Only(values, why)) => {
                let value = value_of(&name, value, &mut args)?;
                if !values.contains(&value.as_str()) {
                    return Err(CliError::Usage(format!("{name} {value} is not supported: {why}")));
                }
                notes.push(format!("{name} {value} is ignored: {why}"));
            }
            Some(Refused(instead)) => {
                return Err(CliError::Usage(format!("{name} is no flag here: {instead}")));
            }
        }
    }
    ours.extend(args);
    Ok((ours, notes))
}

/// What another engine's name of a setting is here.
pub enum Foreign {
    /// This setting of ours, without dashes in front.
    Same(&'static str),
    /// Nothing, and a line that says why.
    Needless(String),
}

/// What becomes of a key of a file, which is `name` as a flag without its dashes; none where no
/// engine is known that has it.
///
/// # Errors
/// One that has no meaning here, with what to use instead.
pub fn of_key(key: &str, name: &str, value: &str) -> Option<Result<Foreign, String>> {
    Some(match meaning(&format!("--{name}"))? {
        Same(flag) => Ok(Foreign::Same(flag.trim_start_matches('-'))),
        Needless(why) | NeedlessValue(why) => {
            Ok(Foreign::Needless(format!("{key} is ignored: {why}")))
        }
        Only(values, why) if values.contains(&value) => {
            Ok(Foreign::Needless(format!("{key} = {value} is ignored: {why}")))
        }
        Only(_, why) => Err(format!("{key} = {value} is not supported: {why}")),
        Refused(instead) => Err(format!("unknown key {key}: {instead}")),
    })
}

fn meaning(name: &str) -> Option<&'static Meaning> {
    let row = TABLE.iter().find(|row| row.names.contains(&name))?;
    Some(&row.meaning)
}

/// `--name=value` in two; `--max_num_seqs` is `--max-num-seqs`, as for vLLM.
fn parts(arg: &str) -> (String, Option<&str>) {
    let (name, value) = match arg.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (arg, None),
    };
    let name = if name.starts_with("--") { name.replace('_', "-") } else { name.to_owned() };
    (name, value)
}

fn joined(name: &str, value: Option<&str>) -> OsString {
    value.map_or_else(|| name.into(), |value| format!("{name}={value}").into())
}

/// The value of a flag: behind its `=`, or the next argument.
fn value_of(
    name: &str,
    value: Option<&str>,
    args: &mut impl Iterator<Item = OsString>,
) -> Result<String, CliError> {
    // What looks like a flag is one, and not the value.
    let is_flag = |text: &String| text.starts_with('-') && text.parse::<f64>().is_err();
    let value = value.map(str::to_owned).or_else(|| {
        let next = args.next().map(|value| value.to_string_lossy().into_owned());
        next.filter(|text| !is_flag(text))
    });
    value.ok_or_else(|| CliError::Usage(format!("{name} lacks its value")))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    fn translated(args: &[&str]) -> Result<(Vec<String>, Vec<String>), String> {
        let (args, notes) = translate(args.iter().map(OsString::from).collect())
            .map_err(|error| error.to_string())?;
        let text = |arg: OsString| arg.into_string().expect("it was text");
        Ok((args.into_iter().map(text).collect(), notes))
    }

    /// Flags of ours that a text names.
    fn flags_in(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
        words.filter(|word| word.starts_with("--"))
    }

    #[test]
    fn every_spelling_leads_to_a_flag_of_ours_a_note_or_an_error_that_helps() {
        let cli = Cli::command();
        let serve = cli.find_subcommand("serve").expect("it is a command");
        let is_ours = |flag: &str| {
            serve.get_arguments().any(|arg| {
                let long = arg.get_long().map(|long| format!("--{long}"));
                let short = arg.get_short().map(|short| format!("-{short}"));
                long.as_deref() == Some(flag) || short.as_deref() == Some(flag)
            })
        };
        for (name, meaning) in
            TABLE.iter().flat_map(|row| row.names.iter().map(move |name| (*name, &row.meaning)))
        {
            assert!(!is_ours(name), "{name} is a flag of ours");
            let rows = TABLE.iter().filter(|row| row.names.contains(&name)).count();
            assert_eq!(rows, 1, "{name} stands in one row");
            let with_value = |value: &str| translated(&[name, value, "--quiet"]);
            match meaning {
                Same(flag) => {
                    assert!(is_ours(flag), "{flag}");
                    let (args, notes) = with_value("x").expect("it is taken");
                    assert_eq!(
                        (args, notes.len()),
                        (vec![(*flag).into(), "x".into(), "--quiet".into()], 0)
                    );
                }
                Needless(_) => {
                    let (args, notes) = with_value("x").expect("it is taken");
                    assert_eq!((args.len(), notes.len()), (2, 1), "{name} takes no value");
                }
                NeedlessValue(_) => {
                    let (args, notes) = with_value("x").expect("it is taken");
                    assert_eq!((args.len(), notes.len()), (1, 1), "{name} takes its value along");
                }
                Only(values, why) => {
                    for value in *values {
                        let (args, notes) = with_value(value).expect("it is taken");
                        assert_eq!((args.len(), notes.len()), (1, 1), "{name} {value}");
                        let equals = format!("{name}={value}");
                        assert_eq!(translated(&[&equals]).map(|(args, _)| args.len()), Ok(0));
                    }
                    let error = with_value("2").expect_err("it is refused");
                    assert_eq!(error, format!("{name} 2 is not supported: {why}"));
                }
                Refused(instead) => {
                    let error = with_value("x").expect_err("it is refused");
                    assert_eq!(error, format!("{name} is no flag here: {instead}"));
                }
            }
            let text = match meaning {
                Same(text)
                | Needless(text)
                | NeedlessValue(text)
                | Only(_, text)
                | Refused(text) => text,
            };
            for flag in flags_in(text) {
                assert!(is_ours(flag), "{name} names {flag}, which is no flag");
            }
        }
    }

    #[test]
    fn underscores_are_dashes_and_what_follows_two_dashes_is_left_alone() {
        let (args, notes) = translated(&[
            "serve",
            "--max_num_seqs=4",
            "--model_path",
            "a_b",
            "--",
            "--enable-lora",
        ])
        .expect("it is taken");
        assert_eq!(args, ["serve", "--max-num-seqs=4", "--model", "a_b", "--", "--enable-lora"]);
        assert!(notes.is_empty());
        for args in [&["--tensor-parallel-size"][..], &["--tensor-parallel-size", "--print-config"]]
        {
            assert_eq!(translated(args), Err("--tensor-parallel-size lacks its value".to_owned()));
        }
    }
}

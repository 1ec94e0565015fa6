//! What the engine has done and holds, at the moment of a scrape.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::histogram::encode;
use crate::engine::{
    BLOCK_LEN, EngineLimits, EngineStats, EngineView, PoolLayout, PoolStats, PoolUse, StepKind,
    StepTotals, UnitUse,
};
use crate::server::app::App;

/// One moment of the engine.
#[derive(Debug)]
pub struct Sample {
    stats: EngineStats,
    view: EngineView,
    limits: EngineLimits,
}

impl Sample {
    /// What the engine of `app` shows now.
    pub fn of(app: &App) -> Sample {
        let engine = &app.engine;
        Sample { stats: engine.stats(), view: engine.view(), limits: engine.limits().clone() }
    }
}

impl Collector for Sample {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut page = Page(encoder);
        self.compatible(&mut page)?;
        self.reuse_as_vllm_counts(&mut page)?;
        self.pools(&mut page)?;
        self.sequences(&mut page)?;
        self.swaps(&mut page)?;
        self.checkpoints(&mut page)?;
        self.steps(&mut page)
    }
}

/// How full a tier is: the fuller of its pools, from 0 to 1.
pub fn usage(pool: &PoolUse, layout: &PoolLayout) -> f64 {
    units(pool, layout).iter().map(|(_, units, _)| units.usage()).fold(0.0, f64::max)
}

/// The kinds of unit that have bytes in a tier, and the bytes of each.
pub fn units(pool: &PoolUse, layout: &PoolLayout) -> Vec<(&'static str, UnitUse, usize)> {
    let all = [
        ("block", pool.blocks, layout.block_bytes),
        ("slot", pool.slots, layout.slot_bytes),
        ("packed", pool.packed, layout.packed_bytes),
    ];
    // With packed slots on the host, checkpoints and parked sequences both have slots there.
    all.into_iter().filter(|(.., bytes)| *bytes > 0).collect()
}

impl Sample {
    fn tiers(&self) -> [(&'static str, &PoolUse, &PoolStats, &PoolLayout); 2] {
        let (stats, view, limits) = (&self.stats, &self.view, &self.limits);
        [
            ("device", &view.device, &stats.device, &limits.device),
            ("host", &view.host, &stats.host, &limits.host),
        ]
    }

    fn compatible(&self, page: &mut Page<'_>) -> fmt::Result {
        let (now, limits) = (&self.stats.occupancy, &self.limits);
        page.gauge("vllm:num_requests_running", "Answers being computed", now.running as f64)?;
        page.gauge("vllm:num_requests_waiting", "Answers in the queue", now.waiting as f64)?;
        let capacity = now.waiting - now.following;
        page.gauges(
            "vllm:num_requests_waiting_by_reason",
            "Answers in the queue: for room, or for the prefix of one that is being computed",
            &[
                (&[("reason", "capacity")], capacity as f64),
                (&[("reason", "deferred")], now.following as f64),
            ],
        )?;
        let swapped = now.parked + now.in_flight;
        page.gauge("vllm:num_requests_swapped", "Answers on the host", swapped as f64)?;
        let device = usage(&self.view.device, &limits.device);
        let help = "How full the fuller of the device's pools is, blocks or slots, from 0 to 1";
        page.gauge("vllm:kv_cache_usage_perc", help, device)?;
        page.gauge("vllm:gpu_cache_usage_perc", help, device)?;
        let host = usage(&self.view.host, &limits.host);
        let help = "How full the fuller of the host's pools is, from 0 to 1";
        page.gauge("vllm:cpu_cache_usage_perc", help, host)?;
        let blocks = [&limits.device, &limits.host].map(|tier| tier.max_blocks().to_string());
        let labels = [
            ("block_size", &*BLOCK_LEN.to_string()),
            ("num_gpu_blocks", &*blocks[0]),
            ("num_cpu_blocks", &*blocks[1]),
        ];
        page.gauges("vllm:cache_config_info", "How memory is cut", &[(&labels, 1.0)])?;
        let labels = [("version", env!("CARGO_PKG_VERSION"))];
        page.gauges("deltapool_build_info", "What is running", &[(&labels, 1.0)])
    }

    fn reuse_as_vllm_counts(&self, page: &mut Page<'_>) -> fmt::Result {
        let stats = &self.stats.scheduler;
        let (queries, host) = (stats.admitted_tokens, stats.host_cached_tokens);
        let device = stats.cached_tokens - host;
        for (name, help, value) in [
            ("vllm:prefix_cache_queries", "Prompt tokens looked up", queries),
            ("vllm:prefix_cache_hits", "Prompt tokens that the device had", device),
            ("vllm:external_prefix_cache_queries", "Those that it did not", queries - device),
            ("vllm:external_prefix_cache_hits", "Prompt tokens that the host had", host),
            ("vllm:num_preemptions", "Times pushed out", stats.parked + stats.recomputed),
            ("vllm:prompt_tokens", "Prompt tokens, those that were there too", queries),
            ("vllm:prompt_tokens_cached", "Prompt tokens not computed", stats.cached_tokens),
        ] {
            page.counter(name, help, value)?;
        }
        page.counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where they came from: computed, the device, or the host",
            &[
                (&[("source", "local_compute")], queries - stats.cached_tokens),
                (&[("source", "local_cache_hit")], device),
                (&[("source", "external_kv_transfer")], host),
            ],
        )?;
        page.counters(
            "deltapool_prefix_tokens",
            "Prompt tokens: skipped since the state behind them was there, by tier; replayed \
             although known, since no state was kept there; or not known",
            &[
                (&[("result", "device")], device),
                (&[("result", "host")], host),
                (&[("result", "replayed")], stats.matched_tokens - stats.cached_tokens),
                (&[("result", "miss")], queries - stats.matched_tokens),
            ],
        )
    }

    fn pools(&self, page: &mut Page<'_>) -> fmt::Result {
        let (mut rows, mut bytes, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        for (tier, used, stats, layout) in self.tiers() {
            for (unit, of, size) in units(used, layout) {
                for (state, count) in [("used", of.used), ("cached", of.cached), ("free", of.free)]
                {
                    let labels = [("tier", tier), ("unit", unit), ("state", state)];
                    rows.push((labels, count as f64));
                    bytes.push((labels, (count * size) as f64));
                }
            }
            for (state, count) in [
                ("block", stats.blocks.pages),
                ("slot", stats.slots.pages),
                ("packed", stats.packed.pages),
                ("free", stats.free_pages),
            ] {
                pages.push(([("tier", tier), ("state", state)], count as f64));
            }
        }
        let help = "Units: held by sequences, by the prefix tree alone, or to be had now; the \
                    free pages of a tier are for any kind";
        page.gauges("deltapool_pool_units", help, &borrowed(&rows))?;
        page.gauges("deltapool_pool_bytes", "The same in bytes", &borrowed(&bytes))?;
        page.gauges("deltapool_pool_pages", "Pages by what they hold", &borrowed(&pages))?;
        let stats = &self.stats.scheduler;
        page.counters(
            "deltapool_admission_blocked",
            "Steps in which a sequence did not come onto the device, by what it did not find: a \
             unit, or a place among those that may run at once",
            &[
                (&[("unit", "block")], stats.blocked_for_blocks),
                (&[("unit", "slot")], stats.blocked_for_slots),
                (&[("unit", "place")], stats.blocked_for_places),
            ],
        )
    }

    fn sequences(&self, page: &mut Page<'_>) -> fmt::Result {
        let now = &self.stats.occupancy;
        let prefill = self.view.prefilling.min(now.running);
        page.gauges(
            "deltapool_sequences",
            "Sequences by where they are",
            &[
                (&[("state", "waiting")], now.waiting as f64),
                (&[("state", "prefill")], prefill as f64),
                (&[("state", "decode")], (now.running - prefill) as f64),
                (&[("state", "moving")], now.in_flight as f64),
                (&[("state", "parked")], now.parked as f64),
            ],
        )
    }

    fn swaps(&self, page: &mut Page<'_>) -> fmt::Result {
        let (stats, tree) = (&self.stats.scheduler, &self.stats.tree);
        let out = stats.swapped_bytes - stats.returned_bytes;
        let labels = |direction, what| [("direction", direction), ("what", what)];
        let (leave, come) = (labels("out", "sequence"), labels("in", "sequence"));
        let (demote, promote) = (labels("out", "checkpoint"), labels("in", "checkpoint"));
        page.counters(
            "deltapool_swaps",
            "Copies between the device and the host, of sequences and of checkpoints",
            &[
                (&leave, stats.parked),
                (&come, stats.returned),
                (&demote, tree.demoted as u64),
                (&promote, tree.promoted as u64),
            ],
        )?;
        page.counters(
            "deltapool_swap_bytes",
            "Bytes of these copies",
            &[
                (&leave, out),
                (&come, stats.returned_bytes),
                (&demote, stats.demoted_bytes),
                (&promote, stats.promoted_bytes),
            ],
        )?;
        page.counters(
            "deltapool_swap_decisions",
            "Sequences pushed out, by whether their state was kept on the host",
            &[
                (&[("choice", "swap")], stats.parked),
                (&[("choice", "recompute")], stats.recomputed),
            ],
        )?;
        let help = "Copies between the tiers that failed";
        page.counter("deltapool_swaps_failed", help, stats.failed_transfers)?;
        let help = "Blocks copied inside the device, since they were shared and to be written";
        page.counter("deltapool_block_copies", help, stats.copied_blocks)
    }

    fn checkpoints(&self, page: &mut Page<'_>) -> fmt::Result {
        let (stats, tree) = (&self.stats.scheduler, &self.stats.tree);
        page.gauges(
            "deltapool_checkpoints",
            "States kept in the prefix tree",
            &[
                (&[("tier", "device")], tree.device.slots as f64),
                (&[("tier", "host")], tree.host.slots as f64),
            ],
        )?;
        let events = [
            ("create", tree.inserted),
            ("resume", tree.resumed),
            ("promote", tree.promoted),
            ("demote", tree.demoted),
            ("evict", tree.device.evicted),
            ("evict_host", tree.host.evicted),
            ("lose", tree.lost),
            ("leave_out", tree.left_out),
        ];
        let labels = events.map(|(event, count)| ([("event", event)], count as u64));
        let rows: Vec<_> = labels.iter().map(|(label, count)| (&label[..], *count)).collect();
        let help = "What happened to checkpoints";
        page.counters("deltapool_checkpoint_events", help, &rows)?;
        let help = "Times a prompt waited for the snapshot of one that runs";
        page.counter("deltapool_followed", help, stats.followed)
    }

    fn steps(&self, page: &mut Page<'_>) -> fmt::Result {
        let (steps, stats) = (&self.stats.steps, &self.stats.scheduler);
        page.counters(
            "deltapool_computed_tokens",
            "Tokens computed, those of replays too",
            &[
                (&[("kind", "prompt")], stats.prompt_tokens),
                (&[("kind", "generated")], stats.generated_tokens),
            ],
        )?;
        let help = "Tokens of a step";
        let mut encoder = page.histogram("vllm:iteration_tokens_total", help)?;
        encode(&mut encoder, &StepTotals::TOKENS, &steps.tokens.counts, steps.tokens.sum)?;
        let help = "Duration of a step by what it computed";
        let mut encoder = page.histogram("deltapool_step_seconds", help)?;
        for kind in StepKind::ALL {
            let spread = &steps.seconds[kind as usize];
            let label = [("kind", kind.as_str())];
            let mut encoder = encoder.encode_family(&label)?;
            encode(&mut encoder, &StepTotals::SECONDS, &spread.counts, spread.sum)?;
        }
        Ok(())
    }
}

type Row<'a, V> = (&'a [(&'a str, &'a str)], V);

fn borrowed<'a, const N: usize>(
    rows: &'a [([(&'static str, &'static str); N], f64)],
) -> Vec<Row<'a, f64>> {
    rows.iter().map(|(labels, value)| (&labels[..], *value)).collect()
}

/// What metrics are written to.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    fn gauges(&mut self, name: &str, help: &str, rows: &[Row<'_, f64>]) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        rows.iter()
            .try_for_each(|(labels, value)| encoder.encode_family(labels)?.encode_gauge(value))
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        encoder.encode_counter::<NoLabelSet, _, u64>(&value, None)
    }

    fn counters(&mut self, name: &str, help: &str, rows: &[Row<'_, u64>]) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        rows.iter().try_for_each(|(labels, value)| {
            encoder.encode_family(labels)?.encode_counter::<NoLabelSet, _, u64>(value, None)
        })
    }

    fn histogram<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, MetricType::Histogram)
    }
}

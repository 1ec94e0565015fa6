//! The naive twin of the tree: a list of the states that are kept, compared by brute force.

use std::collections::BTreeSet;

use checkpoints::{MatchOptions, MissReason};
use state_pool::{BLOCK_LEN, SlotId, Tier};

/// Tokens under a salt.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path {
    pub salt: Option<&'static str>,
    pub tokens: Vec<u32>,
}

impl Path {
    /// The tokens in common, if the salt is.
    pub fn common(&self, other: &Path) -> usize {
        let pairs = self.tokens.iter().zip(&other.tokens);
        let common = pairs.take_while(|(left, right)| left == right).count();
        if self.salt == other.salt { common } else { 0 }
    }

    pub fn prefix(&self, tokens: usize) -> Path {
        Path { salt: self.salt, tokens: self.tokens[..tokens].to_vec() }
    }
}

/// A state that is kept: its path, how much of it is exact, and its slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub path: Path,
    pub exact_tokens: usize,
    pub device: Option<SlotId>,
    pub host: Option<SlotId>,
    /// A copy to the host is on its way.
    pub is_copied: bool,
}

impl Record {
    pub fn len(&self) -> usize {
        self.path.tokens.len()
    }

    pub fn is_exact(&self) -> bool {
        self.exact_tokens == self.len()
    }

    pub fn slot(&self, tier: Tier) -> Option<SlotId> {
        if tier == Tier::Device { self.device } else { self.host }
    }
}

pub struct Lost {
    pub path: Path,
    pub is_exact: bool,
    pub reason: MissReason,
}

#[derive(Default)]
pub struct Model {
    pub records: Vec<Record>,
    pub waiting: Vec<Path>,
    pub lost: Vec<Lost>,
}

impl Model {
    pub fn lose(&mut self, path: Path, is_exact: bool, reason: MissReason) {
        self.lost.retain(|lost| lost.path != path);
        self.lost.push(Lost { path, is_exact, reason });
    }

    pub fn find(&mut self, path: &Path, exact_tokens: usize) -> Option<&mut Record> {
        let mut records = self.records.iter_mut();
        records.find(|record| record.path == *path && record.exact_tokens == exact_tokens)
    }

    /// Every block that a tier's states need, once: its tokens from the first on, and how many of
    /// them are exact.
    pub fn blocks(&self, tier: Tier) -> usize {
        let mut blocks = BTreeSet::new();
        for record in self.records.iter().filter(|record| record.slot(tier).is_some()) {
            for index in 0..record.len().div_ceil(BLOCK_LEN) {
                let end = record.len().min((index + 1) * BLOCK_LEN);
                blocks.insert((record.path.prefix(end), record.exact_tokens.min(end)));
            }
        }
        blocks.len()
    }

    /// Matched tokens, the position used and whether it is exact and on the device, the reason.
    pub fn look_up(
        &self,
        asked: &Path,
        options: MatchOptions,
    ) -> (usize, Option<(usize, bool, bool)>, Option<MissReason>) {
        let limit = asked.tokens.len().min(options.limit_tokens);
        let matched = self.records.iter().map(|record| record.path.common(asked)).max();
        let matched = matched.unwrap_or(0);
        let fits = |path: &Path| {
            let is_prefix = path.salt == asked.salt && path.common(asked) == path.tokens.len();
            is_prefix && path.tokens.len() <= limit
        };
        let is_allowed = |is_exact: bool| is_exact || !options.exact_only;
        let states = || self.records.iter().filter(|record| fits(&record.path));
        let usable = states()
            .filter(|record| is_allowed(record.is_exact()))
            .map(|record| (record.len(), record.is_exact(), record.device.is_some()))
            .max();
        let used = usable.map_or(0, |(position, ..)| position);
        let not_allowed = states().filter(|record| !is_allowed(record.is_exact()));
        let not_allowed = not_allowed.map(Record::len).max().unwrap_or(0);
        let lost = self.lost.iter().filter(|lost| fits(&lost.path) && is_allowed(lost.is_exact));
        let lost = lost.max_by_key(|lost| lost.path.tokens.len());
        let lost = lost.filter(|lost| lost.path.tokens.len() > used.max(not_allowed));
        let on_grid = matched.min(limit) / BLOCK_LEN * BLOCK_LEN;
        let miss = lost.map(|lost| lost.reason);
        let miss = miss.or((not_allowed > used).then_some(MissReason::NotExact));
        (matched, usable, miss.or((on_grid > used).then_some(MissReason::NeverTaken)))
    }

    pub fn junctions(&self, asked: &Path) -> Vec<usize> {
        let mut positions = BTreeSet::new();
        let kept = self.records.iter().map(|record| (&record.path, false));
        let lost = self.lost.iter().map(|lost| (&lost.path, false));
        let waiting = self.waiting.iter().map(|path| (path, true));
        for (path, is_waiting) in kept.chain(lost).chain(waiting) {
            let common = path.common(asked);
            let ends_inside = common == path.tokens.len() && is_waiting;
            if common < asked.tokens.len() && (common < path.tokens.len() || ends_inside) {
                positions.insert(common / BLOCK_LEN * BLOCK_LEN);
            }
        }
        positions.into_iter().filter(|position| *position > 0).collect()
    }
}

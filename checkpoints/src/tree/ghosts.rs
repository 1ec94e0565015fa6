//! Prefixes the tree has no units for (rule 11): prompts that wait, and prefixes whose states were
//! evicted or never got a slot. They cost four bytes a token and tell where prompts part and why
//! a state is missing.
//!
//! A prompt that waits stays until it is taken out. What is only remembered leaves, oldest first,
//! when the bound on tokens is passed. Every leaf is one or the other.

use std::collections::BTreeMap;

use super::MissReason;
use super::radix::{Lineage, NodeId, Radix, Value, floor_to_block};

/// Tokens alone have no lineage; the ghosts' radix tree uses one of the two.
const NO_LINEAGE: Lineage = Lineage::Exact;

#[derive(Debug)]
pub(super) struct Ghosts {
    nodes: Radix<Marks>,
    /// What is remembered, oldest first.
    remembered: BTreeMap<u64, NodeId>,
    clock: u64,
    max_tokens: usize,
}

/// What is known about the prefix that ends with a node.
#[derive(Debug, Default)]
struct Marks {
    /// Prompts that wait and are exactly this.
    waiting: usize,
    lost: Option<Lost>,
}

/// A state that is not there.
#[derive(Debug)]
struct Lost {
    reason: MissReason,
    lineage: Lineage,
    remembered_at: u64,
}

impl Value for Marks {
    fn divide(&mut self, _blocks: usize) -> Marks {
        Marks::default()
    }
}

impl Ghosts {
    pub fn new(max_tokens: usize) -> Ghosts {
        let (nodes, remembered) = (Radix::new(), BTreeMap::new());
        Ghosts { nodes, remembered, clock: 0, max_tokens }
    }

    /// Notes a prompt that waits. False if it alone, with others that wait, passes the bound;
    /// then it is not noted.
    pub fn add_waiting(&mut self, salt: Option<&str>, tokens: &[u32]) -> bool {
        let id = self.reach(salt, tokens);
        self.nodes[id].value.waiting += 1;
        self.keep_bound();
        let fits = self.nodes.tokens() <= self.max_tokens;
        if !fits {
            self.nodes[id].value.waiting -= 1;
            self.prune(id);
        }
        fits
    }

    /// Takes a prompt out that waited. False if none like it is noted.
    pub fn remove_waiting(&mut self, salt: Option<&str>, tokens: &[u32]) -> bool {
        let Some(id) = self.find(salt, tokens) else { return false };
        let waiting = &mut self.nodes[id].value.waiting;
        let is_noted = *waiting > 0;
        *waiting = waiting.saturating_sub(1);
        self.prune(id);
        is_noted
    }

    /// Remembers why there is no state behind these tokens.
    pub fn remember(
        &mut self,
        salt: Option<&str>,
        tokens: &[u32],
        lineage: Lineage,
        reason: MissReason,
    ) {
        let id = self.reach(salt, tokens);
        self.clock += 1;
        let lost = Lost { reason, lineage, remembered_at: self.clock };
        if let Some(before) = self.nodes[id].value.lost.replace(lost) {
            self.remembered.remove(&before.remembered_at);
        }
        self.remembered.insert(self.clock, id);
        self.keep_bound();
    }

    /// The deepest lost state of these tokens at or above `limit`, and why it is lost.
    pub fn deepest_lost(
        &self,
        salt: Option<&str>,
        tokens: &[u32],
        limit: usize,
        exact_only: bool,
    ) -> Option<(usize, MissReason)> {
        let mut deepest: Option<(usize, MissReason)> = None;
        self.nodes.walk(self.nodes.find_root(salt)?, tokens, |id, common| {
            let node = &self.nodes[id];
            let Some(lost) = &node.value.lost else { return };
            let is_whole = common == node.tokens.len();
            let is_of_use = !exact_only || lost.lineage == Lineage::Exact;
            let is_deeper = deepest.is_none_or(|(position, _)| node.end() > position);
            if is_whole && is_of_use && is_deeper && node.end() <= limit {
                deepest = Some((node.end(), lost.reason));
            }
        });
        deepest
    }

    /// Shows the block borders where a ghost leaves the path of these tokens, and the last one of
    /// every waiting prompt that is a prefix of them.
    pub fn partings(&self, salt: Option<&str>, tokens: &[u32], mut see: impl FnMut(usize)) {
        let Some(root) = self.nodes.find_root(salt) else { return };
        self.nodes.partings(root, tokens, &mut see);
        self.nodes.walk(root, tokens, |id, common| {
            let node = &self.nodes[id];
            let is_inside = common == node.tokens.len() && node.end() < tokens.len();
            if is_inside && node.value.waiting > 0 {
                see(floor_to_block(node.end()));
            }
        });
    }

    /// True if a ghost goes on behind these tokens.
    pub fn lead_on(&self, salt: Option<&str>, tokens: &[u32]) -> bool {
        let Some(root) = self.nodes.find_root(salt) else { return false };
        let mut is_found = false;
        self.nodes.walk(root, tokens, |id, common| {
            let node = &self.nodes[id];
            let goes_on = common < node.tokens.len() || !node.is_leaf();
            is_found |= goes_on && node.start + common == tokens.len();
        });
        is_found
    }

    /// Tokens kept.
    pub fn tokens(&self) -> usize {
        self.nodes.tokens()
    }

    fn reach(&mut self, salt: Option<&str>, tokens: &[u32]) -> NodeId {
        let root = self.nodes.root(salt);
        self.nodes.reach(root, NO_LINEAGE, tokens)
    }

    fn find(&self, salt: Option<&str>, tokens: &[u32]) -> Option<NodeId> {
        let mut found = None;
        self.nodes.walk(self.nodes.find_root(salt)?, tokens, |id, common| {
            let node = &self.nodes[id];
            if common == node.tokens.len() && node.end() == tokens.len() {
                found = Some(id);
            }
        });
        found
    }

    fn keep_bound(&mut self) {
        while self.nodes.tokens() > self.max_tokens {
            let Some((_, oldest)) = self.remembered.pop_first() else { return };
            self.nodes[oldest].value.lost = None;
            self.prune(oldest);
        }
    }

    /// Takes out a node that nothing is known about, and those above it that were there for it.
    fn prune(&mut self, mut id: NodeId) {
        while let Some(parent) = self.nodes[id].parent {
            let node = &self.nodes[id];
            if !node.is_leaf() || node.value.waiting > 0 || node.value.lost.is_some() {
                return;
            }
            self.nodes.remove(id);
            if self.nodes.get(parent).is_none() {
                return;
            }
            id = parent;
        }
    }

    /// Scans the invariants of the header.
    pub fn check(&self) {
        self.nodes.check();
        assert!(self.tokens() <= self.max_tokens, "more ghosts than the bound allows");
        let mut lost = 0;
        for node in self.nodes.ids().map(|id| &self.nodes[id]) {
            lost += usize::from(node.value.lost.is_some());
            let is_known = node.value.waiting > 0 || node.value.lost.is_some();
            assert!(is_known || !node.is_leaf(), "a ghost nothing is known about");
        }
        assert_eq!(lost, self.remembered.len());
        for (time, id) in &self.remembered {
            let lost = self.nodes[*id].value.lost.as_ref().expect("what is in the order is lost");
            assert_eq!(lost.remembered_at, *time);
        }
    }
}

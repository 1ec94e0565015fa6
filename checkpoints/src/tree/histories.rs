//! How rows and states behind the exact ones were computed. A state goes with the rows of its own
//! history: with others of the same tokens it would be what no run has computed.

use state_pool::BLOCK_LEN;

use super::radix::{Lineage, NodeId};
use super::{Prefix, PrefixTree, Usable};

/// How tokens were computed. Equal tokens of equal histories have equal bits, since a step is a
/// function of what it reads: from which state it went on, and where its prompt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct History(u64);

impl History {
    /// As a cold run computes them.
    pub const EXACT: History = History(0);

    /// Goes on from a state behind `position` tokens of this history.
    pub fn resumed_at(self, position: usize) -> History {
        self.then(1, position)
    }

    /// What follows the last whole block of a prompt of `prompt_len` tokens: its own tail, and the
    /// answer.
    pub fn past_border(self, prompt_len: usize) -> History {
        self.then(2, prompt_len)
    }

    /// The state was packed, and came back as another.
    pub fn packed(self) -> History {
        self.then(3, 0)
    }

    /// A 64-bit hash of all that happened (the finaliser of splitmix64, once for each word).
    fn then(self, kind: u64, number: usize) -> History {
        let mix = |word: u64| {
            let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^ (word >> 31)
        };
        let event = mix((number as u64).wrapping_add(kind.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        History(mix(self.0.rotate_left(17) ^ event))
    }
}

impl PrefixTree {
    /// True if a block behind the exact ones is in the tree with another history.
    pub(super) fn has_other_history(&self, prefix: &Prefix) -> bool {
        let (exact, rest) = prefix.tokens.split_at(prefix.exact_tokens);
        if rest.is_empty() {
            return false;
        }
        let Some(root) = self.nodes.find_root(prefix.salt) else { return false };
        let Some(border) = self.nodes.find(root, Lineage::Exact, exact) else { return false };
        let mut is_other = false;
        self.nodes.follow(border, Lineage::NonExact, rest, |id, common| {
            let node = &self.nodes[id];
            let blocks = node.value.histories.iter().take(common.div_ceil(BLOCK_LEN));
            is_other |= (node.start..).step_by(BLOCK_LEN).zip(blocks).any(|(start, history)| {
                let last = node.end().min(start + BLOCK_LEN) - 1;
                history_at(prefix.histories, last) != *history
            });
        });
        is_other
    }

    /// Writes down how the nodes from `end` up to the exact ones were computed, where that is not
    /// known yet.
    pub(super) fn note_histories(&mut self, end: NodeId, histories: &[(usize, History)]) {
        let is_new = |id: &NodeId| {
            let node = &self.nodes[*id];
            node.lineage == Lineage::NonExact && node.value.histories.is_empty()
        };
        let path: Vec<NodeId> = self.nodes.path_up(end).take_while(is_new).collect();
        for id in path {
            let node = &mut self.nodes[id];
            let blocks = (node.start..node.end()).step_by(BLOCK_LEN);
            let last = |start: usize| node.end().min(start + BLOCK_LEN) - 1;
            let known = blocks.map(|start| history_at(histories, last(start))).collect();
            node.value.histories = known;
        }
    }

    /// How the blocks behind the exact ones of a state were computed: see [`Prefix::histories`].
    ///
    /// # Panics
    ///
    /// If the state was evicted since the match.
    pub fn histories(&self, usable: &Usable) -> Vec<(usize, History)> {
        let mut path: Vec<NodeId> = self.nodes.path_up(usable.node).collect();
        path.reverse();
        let mut histories: Vec<(usize, History)> = Vec::new();
        for node in path.into_iter().map(|id| &self.nodes[id]) {
            let blocks = (node.start..usable.position).step_by(BLOCK_LEN);
            for (start, history) in blocks.zip(&node.value.histories) {
                if histories.last().is_none_or(|(_, last)| last != history) {
                    histories.push((start, *history));
                }
            }
        }
        histories
    }
}

/// The history of token `at`: `histories` are positions in order, and what holds from each on.
fn history_at(histories: &[(usize, History)], at: usize) -> History {
    let before = histories.partition_point(|(from, _)| *from <= at);
    before.checked_sub(1).map_or(History::EXACT, |last| histories[last].1)
}

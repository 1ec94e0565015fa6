//! Where a prompt leaves snapshots (rule 12). What of them is kept is the business of eviction.

use std::collections::BTreeSet;

use crate::{Match, PrefixTree};

/// Tokens before the end of a prompt that a guard leaves to whatever re-renders its tail.
const GUARD_TOKENS: usize = 512;
/// Tokens from one state to the next inside a long prompt.
const SPREAD_TOKENS: usize = 4096;

/// Which positions of a prompt get a snapshot. The end of a turn is not one of them: its state is
/// the sequence's own and is always kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Where others leave the prompt: see [`PrefixTree::junctions`].
    pub junctions: bool,
    /// Where the match ends.
    pub branch: bool,
    /// Some way before the end of the prompt, since tails get rendered anew.
    pub guard: bool,
    /// The last grid position of the prompt.
    pub prompt_end: bool,
    /// Every few thousand tokens, for those that part where nobody has parted before.
    pub spread: bool,
    /// Multiples of so many tokens; asked for by the user.
    pub every: Option<usize>,
}

impl Default for Placement {
    fn default() -> Placement {
        Placement {
            junctions: true,
            branch: false,
            guard: true,
            prompt_end: true,
            spread: true,
            every: None,
        }
    }
}

impl PrefixTree {
    /// The positions on the grid, in order, at which a prompt of these tokens is to leave
    /// snapshots: above the position resumed from, and not beyond the prompt. The caller's
    /// `marks` are floored to the grid. None without recurrent layers.
    pub fn wanted(
        &self,
        salt: Option<&str>,
        tokens: &[u32],
        found: &Match,
        marks: &[usize],
        placement: &Placement,
    ) -> Vec<usize> {
        if !self.is_recurrent() {
            return Vec::new();
        }
        let from = found.usable.map_or(0, |usable| usable.position);
        let end = self.floor_to_grid(tokens.len());
        let mut positions: BTreeSet<usize> = BTreeSet::new();
        if placement.junctions {
            positions.extend(self.junctions(salt, tokens));
        }
        if placement.branch {
            positions.insert(found.matched_tokens);
        }
        if placement.guard {
            positions.insert(tokens.len().saturating_sub(GUARD_TOKENS));
        }
        if placement.prompt_end {
            positions.insert(end);
        }
        if placement.spread {
            let last = tokens.len().saturating_sub(SPREAD_TOKENS / 2);
            positions.extend(multiples(SPREAD_TOKENS, last));
        }
        positions.extend(placement.every.into_iter().flat_map(|step| multiples(step, end)));
        positions.extend(marks);
        let on_grid = positions.into_iter().map(|position| self.floor_to_grid(position));
        let wanted = on_grid.filter(|position| (from + 1..=end).contains(position));
        wanted.collect::<BTreeSet<usize>>().into_iter().collect()
    }
}
fn multiples(step: usize, last: usize) -> impl Iterator<Item = usize> {
    (1..=last / step.max(1)).map(move |count| count * step)
}

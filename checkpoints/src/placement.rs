//! Where prompts leave states.

use crate::tree::{Match, PrefixTree};

/// Kinds of positions at which a prompt leaves states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub junctions: bool,
    pub guard: bool,
    pub prompt_end: bool,
    pub every: Option<usize>,
}

impl Default for Placement {
    fn default() -> Placement {
        Placement { junctions: true, guard: false, prompt_end: true, every: None }
    }
}

impl PrefixTree {
    pub fn wanted(
        &self,
        salt: Option<&str>,
        tokens: &[u32],
        found: &Match,
        marks: &[usize],
        placement: &Placement,
    ) -> Vec<usize> {
        let grid = self.grid_tokens();
        let mut all = Vec::new();
        if placement.junctions {
            all.extend(self.junctions(salt, tokens));
            all.push(found.matched_tokens);
        }
        if placement.prompt_end {
            all.push(tokens.len());
        }
        if let Some(n) = placement.every {
            all.extend((1..=tokens.len() / n).map(|i| i * n));
        }
        all.extend(marks);
        let from = found.usable.map_or(0, |u| u.position);
        let mut all: Vec<usize> = all.into_iter().map(|p| p.min(tokens.len()) / grid * grid).filter(|p| *p > from).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

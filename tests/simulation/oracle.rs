//! The oracle: what a stream draws, from how each of its tokens was computed and from nothing else.
//!
//! A stream that started cold, or from what has the bits of a cold run, must draw what it draws
//! alone. One that went on from a turn's end has the rows that the earlier stream computed: the
//! oracle remembers how every stream computed its tokens and lets such a one continue any past of
//! the same tokens and salt. A state that stands behind other tokens than it is used for continues
//! none.

use std::collections::HashMap;

use deltapool::scheduler::SequenceId;

use super::mix;

/// The hash of no tokens.
pub const START: u64 = 7;
const VOCAB: u64 = 13;
/// What stands for the start of a chunk in a generated token's part of the state.
const STEP: u64 = 99;

/// What kind of model it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// It has recurrent layers, and so states.
    pub is_recurrent: bool,
    /// Prompt rows below the last cell border have an arithmetic of their own.
    pub has_border: bool,
    /// States of checkpoints are packed on the host, and come back as others.
    pub packs: bool,
}

/// What a token adds to a state; `chunk` is where its chunk started modulo 64, none when it was
/// generated.
pub fn absorb(kind: Kind, hash: u64, token: u32, chunk: Option<u64>) -> u64 {
    if !kind.is_recurrent {
        return hash;
    }
    mix(mix(hash, u64::from(token)), chunk.unwrap_or(STEP))
}

/// What a state is once it was packed.
pub fn pack(hash: u64) -> u64 {
    mix(hash, 0x9ac4)
}

/// A token's row in a block.
pub fn row(kind: Kind, token: u32, is_chunk: bool, is_below: bool) -> u64 {
    let is_below = is_below && kind.has_border;
    mix(u64::from(token), 2 + u64::from(is_chunk) * 2 + u64::from(is_below))
}

/// What is drawn from a hidden row.
pub fn draw(hidden: u64, choice: u64) -> u32 {
    (mix(hidden, choice) % VOCAB) as u32
}

/// How one token was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Computed {
    token: u32,
    chunk: Option<u64>,
    is_below: bool,
    /// The state behind it was packed before anything went on from it.
    is_packed: bool,
}

/// How the tokens of a stream were computed, and what they add up to.
#[derive(Debug, Clone)]
pub struct Past {
    kind: Kind,
    tokens: Vec<Computed>,
    hash: u64,
    seen: u64,
    /// The last hidden row.
    hidden: u64,
}

impl Past {
    fn new(kind: Kind) -> Past {
        Past { kind, tokens: Vec::new(), hash: START, seen: START, hidden: START }
    }

    /// Prompt tokens below the border, computed from the first on.
    fn cold(kind: Kind, tokens: &[u32]) -> Past {
        let mut past = Past::new(kind);
        tokens.iter().for_each(|token| past.push(*token, Some(0), true));
        past
    }

    fn push(&mut self, token: u32, chunk: Option<u64>, is_below: bool) {
        self.tokens.push(Computed { token, chunk, is_below, is_packed: false });
        self.hash = absorb(self.kind, self.hash, token, chunk);
        self.seen = mix(self.seen, row(self.kind, token, chunk.is_some(), is_below));
        self.hidden = mix(self.hash, self.seen);
    }

    /// The state goes to the host and comes back.
    fn packed(mut self) -> Past {
        if let Some(last) = self.tokens.last_mut() {
            last.is_packed = true;
            self.hash = pack(self.hash);
        }
        self
    }

    fn first(&self, len: usize) -> Past {
        let mut past = Past::new(self.kind);
        for computed in &self.tokens[..len] {
            past.push(computed.token, computed.chunk, computed.is_below);
            if computed.is_packed {
                past = past.packed();
            }
        }
        past
    }

    fn is_of(&self, tokens: &[u32]) -> bool {
        let own = self.tokens.iter().map(|computed| &computed.token);
        self.tokens.len() >= tokens.len() && own.zip(tokens).all(|(own, token)| own == token)
    }

    fn draw(&self, choice: u64) -> u32 {
        draw(self.hidden, choice)
    }
}

/// A stream that runs: the pasts it may have.
#[derive(Debug, Clone)]
struct Live {
    salt: Option<&'static str>,
    pasts: Vec<Past>,
    /// Tokens it did not compute.
    resumed_at: usize,
}

/// Remembers the pasts of all streams.
#[derive(Debug)]
pub struct Oracle {
    kind: Kind,
    live: HashMap<SequenceId, Live>,
    ended: Vec<(Option<&'static str>, Past)>,
}

/// Tokens of a stream that a step computes, or that it has when it draws without computing any.
pub struct Run<'a> {
    pub id: SequenceId,
    pub salt: Option<&'static str>,
    pub tokens: &'a [u32],
    pub prompt_len: usize,
    pub start: usize,
    pub rows: usize,
    /// Where it last resumed.
    pub resumed_at: usize,
}

impl Oracle {
    pub fn new(kind: Kind) -> Oracle {
        Oracle { kind, live: HashMap::new(), ended: Vec::new() }
    }

    /// Takes in what a step computes. False if the state it goes on from cannot be.
    pub fn computes(&mut self, run: &Run<'_>) -> bool {
        let Run { id, salt, tokens, prompt_len, start, rows, resumed_at } = *run;
        let border = prompt_len / 64 * 64;
        let goes_on = |live: &Live| live.pasts.iter().any(|past| past.tokens.len() == start);
        // It may have lost a state of just so many tokens before.
        if start == resumed_at || !self.live.get(&id).is_some_and(goes_on) {
            let pasts = self.pasts_of(salt, &tokens[..start], border);
            if pasts.is_empty() {
                return false;
            }
            self.live.insert(id, Live { salt, pasts, resumed_at: start });
        }
        let live = self.live.get_mut(&id).expect("it was just there");
        for (at, token) in (start..).zip(&tokens[start..start + rows]) {
            // Off the grid a chunk starts only where a stream resumed.
            let is_first = at / 64 == live.resumed_at / 64;
            let chunk_start = if is_first { live.resumed_at as u64 % 64 } else { 0 };
            let chunk = (at < prompt_len).then_some(chunk_start);
            let is_below = at < border;
            live.pasts.iter_mut().for_each(|past| past.push(*token, chunk, is_below));
        }
        true
    }

    /// All pasts of these tokens: that of a cold run, and those that streams have had.
    fn pasts_of(&self, salt: Option<&str>, tokens: &[u32], border: usize) -> Vec<Past> {
        let mut pasts = Vec::new();
        if tokens.len() <= border || !self.kind.has_border {
            pasts.push(Past::cold(self.kind, tokens));
        }
        let live = self.live.values().flat_map(|live| live.pasts.iter().map(|p| (live.salt, p)));
        let all = live.chain(self.ended.iter().map(|(salt, past)| (*salt, past)));
        for (_, past) in all.filter(|(other, past)| *other == salt && past.is_of(tokens)) {
            let past = past.first(tokens.len());
            if pasts.iter().all(|other| (other.hash, other.seen) != (past.hash, past.seen)) {
                pasts.push(past);
            }
        }
        if self.kind.packs {
            let packed: Vec<Past> = pasts.iter().cloned().map(Past::packed).collect();
            pasts.extend(packed);
        }
        pasts
    }

    /// A fork has the pasts of the stream it shares a state with.
    pub fn forks(&mut self, id: SequenceId, leader: SequenceId) {
        if let Some(live) = self.live.get(&leader).cloned() {
            self.live.insert(id, live);
        }
    }

    /// Takes in what a stream drew. False if no past of it draws that.
    pub fn draws(&mut self, id: SequenceId, choice: u64, token: u32) -> bool {
        let Some(live) = self.live.get_mut(&id) else { return false };
        live.pasts.retain(|past| past.draw(choice) == token);
        !live.pasts.is_empty()
    }

    /// A stream ends; others may go on from it.
    pub fn ends(&mut self, id: SequenceId) {
        if let Some(live) = self.live.remove(&id) {
            self.ended.extend(live.pasts.into_iter().map(|past| (live.salt, past)));
        }
    }
}

/// The tokens of a stream that has the machine for itself.
pub fn alone(kind: Kind, prompt: &[u32], choice: u64, want: usize) -> Vec<u32> {
    let mut past = Past::new(kind);
    let border = prompt.len() / 64 * 64;
    for (at, token) in prompt.iter().enumerate() {
        past.push(*token, Some(0), at < border);
    }
    let mut out = vec![past.draw(choice)];
    while out.len() < want {
        past.push(out[out.len() - 1], None, false);
        out.push(past.draw(choice));
    }
    out
}

//! Audits: a state that was taken from the tree or came back from the host is derived again from
//! the tokens, in budget and memory that nobody else wants, and compared bit for bit.
//!
//! A *shadow* is a sequence of the same tokens that starts cold and draws nothing. While it runs,
//! the audited state is held as shares, so that whoever goes on from it writes elsewhere. One audit
//! runs at a time; whoever lacks memory ends it without a verdict.

use checkpoints::common_tokens;
use state_pool::{SequenceState, SlotId};

use super::plan::TokenBudget;
use super::sequence::{Place, Sequence, SequenceId};
use super::{Planning, Scheduler, StepPlan, blocks_for};

/// Units to be compared once the spans of a plan are computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// Blocks: audited, derived again.
    pub blocks: Vec<(state_pool::BlockId, state_pool::BlockId)>,
    /// Tokens in them; in the last block only those before it count.
    pub tokens: usize,
    /// The slots.
    pub slot: (SlotId, SlotId),
}

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// All bits are equal.
    Same,
    /// The first layer that differs, the number of layers for the last hidden row.
    Differs {
        /// The layer.
        layer: usize,
    },
}

/// What is audited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Audited {
    /// A state of the tree.
    Checkpoint,
    /// What a sequence got back from the host.
    Return(SequenceId),
}

/// An audit that runs.
#[derive(Debug)]
pub(super) struct Audit {
    what: Audited,
    /// Shares of the audited state.
    reference: SequenceState,
    shadow: Sequence,
}

impl Scheduler {
    /// Begins to audit the state that a running sequence has just got, if its turn has come, none
    /// is audited, and there is memory to spare.
    pub(super) fn start_audit(&mut self, id: SequenceId, what: Audited) {
        let sequence = &self.sequences[&id];
        let len = sequence.computed();
        let Some(state) = sequence.state() else { return };
        let shares_slot = what == Audited::Checkpoint && self.limits.is_recurrent();
        if shares_slot && state.is_slot_sole(&self.device) {
            return; // it was handed over, for want of memory
        }
        if self.limits.audit_percent == 0.0 || !sequence.is_exact() || len == 0 {
            return;
        }
        self.audit_turns += 1;
        let drawn = self.audit_turns.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let is_turn = ((drawn % 10_000) as f64) < self.limits.audit_percent * 100.0;
        let watermark = self.limits.watermark_pages;
        // A slot for the shadow, and one for a sequence whose own slot is the audited one.
        let slots = 1 + usize::from(!shares_slot);
        let fits = self.device.fits_above(watermark, blocks_for(len) + 1, slots);
        if !is_turn || self.audit.is_some() || !fits {
            return;
        }
        let state = SequenceState::allocate(&mut self.device, len).expect("it fits");
        let shadow_id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let (tokens, prompt_len) = (sequence.tokens[..len].to_vec(), sequence.prompt_len.min(len));
        let mut shadow = Sequence::new(shadow_id, tokens, 0, Place::Device(state));
        (shadow.prompt_len, shadow.is_shadow) = (prompt_len, true);
        shadow.cache_salt = sequence.cache_salt.clone();
        let audited = self.sequences[&id].state().expect("it runs");
        let reference = audited.fork(&mut self.device);
        self.audit = Some(Audit { what, reference, shadow });
    }

    /// Computes more of the shadow in what is left of the budget, and has the states compared when
    /// it is done.
    pub(super) fn run_audit(&mut self, step: &mut Planning) {
        let Some(audit) = &mut self.audit else { return };
        let mut budget = TokenBudget::new(step.budget.left(), 0);
        let start = audit.shadow.computed();
        let grid = self.limits.grid;
        let added = step.plan.add(&mut audit.shadow, &mut self.device, &mut budget, grid);
        let rows = added.expect("a shadow has its units from the start");
        audit.shadow.planned_in = self.stats.steps;
        step.budget = TokenBudget::new(budget.left(), 0);
        if rows > 0 && start + rows == audit.shadow.tokens().len() {
            let shadow = audit.shadow.state().expect("it runs");
            let (old, new) = (audit.reference.table().ids(), shadow.table().ids());
            step.plan.comparison = Some(Comparison {
                blocks: old.zip(new).collect(),
                tokens: audit.shadow.tokens().len(),
                slot: (audit.reference.slot().id(), shadow.slot().id()),
            });
        }
    }

    /// Counts the rows of a shadow as computed. False if the span is not a shadow's.
    pub(super) fn advance_shadow(&mut self, id: SequenceId, rows: usize) -> bool {
        match &mut self.audit {
            Some(audit) if audit.shadow.id() == id => {
                audit.shadow.advance(rows);
                true
            }
            _ => false,
        }
    }

    /// Takes in what a comparison found: part of commit. What differs is not used again.
    pub(super) fn end_audit(&mut self, plan: &StepPlan, verdict: Option<Verdict>) {
        if plan.comparison.is_none() {
            return;
        }
        let verdict = verdict.expect("what is planned to be compared is compared");
        let audit = self.audit.take().expect("it is what is compared");
        self.stats.audits += 1;
        if let Verdict::Differs { layer } = verdict {
            self.stats.audits_that_differ += 1;
            self.stats.first_differing_layer.get_or_insert(layer);
            self.quarantine(&audit);
        }
        self.release_audit(audit);
    }

    /// Takes out of the tree whatever lies on the path of these tokens, and lets nobody who went on
    /// from a state of it leave anything there.
    fn quarantine(&mut self, audit: &Audit) {
        let (salt, tokens) = (audit.shadow.salt(), audit.shadow.tokens());
        if let Some(tree) = &mut self.tree {
            tree.discard((&mut self.device, &mut self.host), salt, tokens, 0);
        }
        for sequence in self.sequences.values_mut() {
            let common = common_tokens(&sequence.tokens, tokens);
            if sequence.salt() == salt && common > 0 && sequence.origin.position > 0 {
                sequence.is_suspect = true;
                sequence.wanted.clear();
            }
        }
        if let Audited::Return(id) = audit.what {
            let runs = |sequence: &Sequence| sequence.state().is_some();
            if self.sequences.get(&id).is_some_and(runs) {
                self.drop_state(id);
            }
        }
    }

    /// Ends an audit without a verdict: its memory is wanted. What this plan computes is read until
    /// its commit, and stays.
    pub(super) fn drop_audit(&mut self) {
        let steps = self.stats.steps;
        if let Some(audit) = self.audit.take_if(|audit| audit.shadow.planned_in != steps) {
            self.release_audit(audit);
        }
    }

    pub(super) fn release_audit(&mut self, audit: Audit) {
        audit.reference.release(&mut self.device);
        audit.shadow.release(&mut self.device);
    }

    /// The shadow of that name.
    pub(super) fn shadow(&self, id: SequenceId) -> Option<&Sequence> {
        self.audit.as_ref().map(|audit| &audit.shadow).filter(|shadow| shadow.id() == id)
    }

    /// Handles of slots that an audit holds.
    pub(super) fn audit_slots(&self) -> usize {
        if self.audit.is_some() { 2 } else { 0 }
    }
}

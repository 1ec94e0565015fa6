//! Shares of the programs under the policy `fair`: start-time fair queueing by tokens.
//!
//! A program is a chain or a bundle of requests of one `program_id`, an agent for example; a
//! request without one is a program of its own. A request starts at the later of the virtual time
//! and the moment its program's last request finishes, and takes as many virtual tokens as it has
//! real ones. Virtual time advances by the tokens served over the programs that have work: one
//! that comes new or after a pause is neither owed anything nor charged for anything, and an
//! endless row of new ones does not keep an old one waiting (SEEDS.md U1).

use std::sync::Arc;

use rustc_hash::FxHashMap;

/// Idle programs that are remembered before those are looked for that need not be.
const MOST_IDLE: usize = 1024;

/// A program.
#[derive(Debug, Default)]
struct Program {
    /// Sequences of it that have not ended.
    open: usize,
    /// Virtual time at which the last of its requests finishes.
    finish: f64,
}

/// The programs and their virtual time, in tokens.
#[derive(Debug, Default)]
pub(super) struct Fairness {
    programs: FxHashMap<Arc<str>, Program>,
    /// Programs with a sequence that has not ended, those without a name too.
    active: usize,
    virtual_time: f64,
}

impl Fairness {
    /// Takes a request of `choices` sequences and at most so many `tokens`; returns the virtual
    /// time at which it starts.
    pub fn submit(&mut self, name: Option<&Arc<str>>, choices: usize, tokens: usize) -> f64 {
        let Some(name) = name else {
            self.active += choices;
            return self.virtual_time;
        };
        if self.programs.len() > MOST_IDLE + self.active {
            let now = self.virtual_time;
            self.programs.retain(|_, program| program.open > 0 || program.finish > now);
        }
        let program = self.programs.entry(Arc::clone(name)).or_default();
        self.active += usize::from(program.open == 0);
        program.open += choices;
        let start = self.virtual_time.max(program.finish);
        program.finish = start + tokens as f64;
        start
    }

    /// Takes the tokens that a step computed.
    pub fn serve(&mut self, tokens: usize) {
        self.virtual_time += tokens as f64 / self.active.max(1) as f64;
    }

    /// A sequence ends that did not need `unserved` of the tokens it was submitted with.
    pub fn end(&mut self, name: Option<&Arc<str>>, unserved: usize) {
        let Some(name) = name else {
            self.active -= 1;
            return;
        };
        let program = self.programs.get_mut(name).expect("its program is known until it ends");
        program.open -= 1;
        program.finish -= unserved as f64;
        if program.open == 0 {
            self.active -= 1;
            if program.finish <= self.virtual_time {
                self.programs.remove(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_pays_for_what_it_was_served_and_for_no_more() {
        let name: Arc<str> = "agent".into();
        let mut fairness = Fairness::default();
        assert_eq!(fairness.submit(Some(&name), 1, 100), 0.0);
        assert_eq!(fairness.submit(None, 1, 100), 0.0);
        fairness.serve(40);
        assert_eq!(fairness.submit(Some(&name), 1, 50), 100.0);
        fairness.end(Some(&name), 70);
        assert_eq!(fairness.submit(Some(&name), 2, 10), 80.0);
        assert_eq!(fairness.submit(None, 1, 1), 20.0);
    }

    #[test]
    fn programs_that_are_idle_and_owe_nothing_are_forgotten() {
        let mut fairness = Fairness::default();
        for i in 0..10 * MOST_IDLE {
            let name: Arc<str> = i.to_string().into();
            fairness.submit(Some(&name), 1, 1);
            fairness.end(Some(&name), 0);
            fairness.serve(1);
        }
        assert!(fairness.programs.len() <= MOST_IDLE + 1 && fairness.active == 0);
        let name: Arc<str> = "served".into();
        fairness.submit(Some(&name), 1, 5);
        fairness.serve(5);
        fairness.end(Some(&name), 0);
        assert!(!fairness.programs.contains_key(&name), "it owes nothing");
    }
}

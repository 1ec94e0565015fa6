//! Where the prefix cache keeps states, as a name on a command line.

use std::fmt;
use std::str::FromStr;

/// Where states are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// As an engine does.
    Default,
    /// At these positions of prompts and nowhere else; a finished turn's state is not kept.
    Fixed {
        /// At multiples of so many tokens.
        every: Option<usize>,
        /// At the last grid position of a prompt.
        end: bool,
        /// Where a prompt leaves what earlier ones had.
        branch: bool,
    },
}

/// The names of all policies; N is a number of tokens.
pub const NAMES: &str = "default, end, end+branch, every=N, every=N+end+branch";

impl Policy {
    /// Refuses a policy whose positions are not on the grid.
    ///
    /// # Errors
    /// What is wrong, with the policy's name.
    pub fn check(self, grid: usize) -> Result<(), String> {
        match self {
            Policy::Fixed { every: Some(every), .. } if !every.is_multiple_of(grid) => {
                Err(format!("{self}: states are kept at multiples of the grid, {grid} tokens"))
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Policy, String> {
        let (every, rest) = match text.strip_prefix("every=") {
            None => (None, Some(text)),
            Some(text) => {
                let (every, rest) = match text.split_once('+') {
                    Some((every, rest)) => (every, Some(rest)),
                    None => (text, None),
                };
                let tokens = every.parse().ok().filter(|tokens| *tokens > 0);
                let tokens = tokens.ok_or(format!("{every:?} is no number of tokens above 0"))?;
                (Some(tokens), rest)
            }
        };
        match (every, rest) {
            (None, Some("default")) => Ok(Policy::Default),
            (None, Some("end")) => Ok(Policy::Fixed { every, end: true, branch: false }),
            (_, Some("end+branch")) => Ok(Policy::Fixed { every, end: true, branch: true }),
            (Some(_), None) => Ok(Policy::Fixed { every, end: false, branch: false }),
            _ => Err(format!("no such policy; there are {NAMES}")),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Policy::Fixed { every, end, branch } = *self else { return f.write_str("default") };
        let every = every.map(|every| format!("every={every}"));
        let parts = [every, end.then(|| "end".into()), branch.then(|| "branch".into())];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<String>>().join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_written_as_it_is_read() {
        for name in ["default", "end", "end+branch", "every=6144", "every=64+end+branch"] {
            assert_eq!(name.parse::<Policy>().map(|policy| policy.to_string()), Ok(name.into()));
        }
        for wrong in ["", "branch", "every", "every=", "every=0", "every=-1", "every=64+", "end+"] {
            assert!(wrong.parse::<Policy>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn positions_off_the_grid_are_refused() {
        let policy: Policy = "every=640+end+branch".parse().expect("a policy");
        assert_eq!(policy.check(64), Ok(()));
        let error = policy.check(512).unwrap_err();
        assert!(error.starts_with("every=640+end+branch: states are kept at multiples"), "{error}");
    }
}

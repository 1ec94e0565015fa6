//! Requests of a simulation, each with the time at which it arrives.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::runs::{ANSWER, Run, Runs, UNIQUE};
use super::sampling::{Arrivals, Lengths, Random};
use super::trace::{self, TraceError};
use super::workload::{Outline, Workload};

/// Streams of random numbers: arrivals, prompts, answers, and where in its second a line of a trace
/// arrives; how long somebody thinks between two turns.
const ARRIVAL_STREAM: u64 = 0;
const PROMPT_STREAM: u64 = 1;
const ANSWER_STREAM: u64 = 2;
const JITTER_STREAM: u64 = 3;
const THINK_STREAM: u64 = 4;

/// A request.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// When it arrives: counted from the beginning or, where it follows a request, from its end.
    pub at: Duration,
    /// The request whose end it waits for, by its place in the order, which is before its own.
    /// Nobody else follows that one.
    pub follows: Option<usize>,
    /// Its prompt.
    pub prompt: Runs,
    /// The answer that it will get, one token or more.
    pub answer: Runs,
    /// The program it is of, if there are any.
    pub program: Option<usize>,
}

/// Requests; those that follow none are in the order of their arrival.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// What it is, for people.
    pub name: String,
    /// The requests.
    pub requests: Vec<Arrival>,
    /// So many are open at any time, a request and all that follow it counting as one; the next
    /// comes when one ends: the times of those that follow none say nothing.
    pub open: Option<usize>,
}

/// What made-up traffic is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct MadeUp {
    /// Requests that follow none.
    pub requests: usize,
    /// When they arrive.
    pub arrivals: Arrivals,
    /// Turns of each: a request and those that follow one another from it. The prompt of a turn is
    /// all that was said before, and something new.
    pub turns: usize,
    /// Milliseconds from the end of a turn to the next one.
    pub think: Lengths,
    /// How long prompts are.
    pub prompts: Lengths,
    /// How long answers are.
    pub answers: Lengths,
    /// No answer is longer.
    pub most_answer: Option<usize>,
    /// Requests of each program in a round of all; empty where there are no programs.
    pub programs: Vec<usize>,
    /// Groups, of which the prompts are by turns, and the tokens that a group's prompts begin
    /// with, before their own.
    pub groups: Option<(usize, usize)>,
    /// Of its random numbers.
    pub seed: u64,
}

impl fmt::Display for MadeUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MadeUp { requests, arrivals, prompts, answers, turns, think, .. } = self;
        write!(
            f,
            "{requests} requests, arrivals {arrivals}, prompts {prompts}, answers {answers}"
        )?;
        if *turns > 1 {
            write!(f, ", {turns} turns each, {think} ms between")?;
        }
        if let Some(most) = self.most_answer {
            write!(f, ", {most} tokens at most")?;
        }
        match self.programs.as_slice() {
            [] => {}
            [first, rest @ ..] if rest.iter().all(|share| share == first) => {
                write!(f, ", {} programs", self.programs.len())?;
            }
            shares => {
                let shares: Vec<String> = shares.iter().map(usize::to_string).collect();
                write!(f, ", programs with {} requests in turn", shares.join(", "))?;
            }
        }
        if let Some((groups, tokens)) = self.groups {
            write!(f, ", {groups} groups with {tokens} tokens in common")?;
        }
        write!(f, ", seed {}", self.seed)
    }
}

/// The program of a request, where in a round each has so many.
fn program_of(request: usize, shares: &[usize]) -> Option<usize> {
    let round: usize = shares.iter().sum();
    let mut place = request.checked_rem(round)?;
    shares.iter().position(|&share| {
        let is_of = place < share;
        place = place.saturating_sub(share);
        is_of
    })
}

impl Traffic {
    /// Made-up traffic.
    pub fn made_up(plan: &MadeUp) -> Traffic {
        let stream = |stream| Random::new(plan.seed, stream);
        let (mut prompts, mut answers) = (stream(PROMPT_STREAM), stream(ANSWER_STREAM));
        let mut thoughts = stream(THINK_STREAM);
        let times = plan.arrivals.times(plan.requests, &mut stream(ARRIVAL_STREAM));
        let mut requests: Vec<Arrival> = Vec::with_capacity(plan.requests * plan.turns);
        for (first, begins) in times.into_iter().enumerate() {
            let shared = plan.groups.map(|(n, len)| Run::new((first % n) as u64, len));
            let mut said: Runs = shared.into_iter().collect();
            for turn in 0..plan.turns {
                let i = requests.len();
                said.push(Run::new(UNIQUE + i as u64, plan.prompts.draw(&mut prompts)));
                let len = plan.answers.draw(&mut answers);
                let len = len.min(plan.most_answer.unwrap_or(usize::MAX));
                let answer = Runs::from_iter([Run::new(ANSWER + i as u64, len)]);
                let (follows, at) = match turn {
                    0 => (None, begins),
                    _ => {
                        let thought = plan.think.draw(&mut thoughts);
                        (Some(i - 1), Duration::from_millis(thought as u64))
                    }
                };
                let program = program_of(first, &plan.programs);
                let prompt = said.clone();
                said.extend(&answer);
                requests.push(Arrival { at, follows, prompt, answer, program });
            }
        }
        Traffic {
            name: plan.to_string(),
            requests,
            open: match plan.arrivals {
                Arrivals::Closed(open) => Some(open),
                _ => None,
            },
        }
    }

    /// A named workload, in its order, with so many requests open at a time.
    pub fn of_workload(workload: Workload, open: usize) -> Traffic {
        let open = if workload.is_burst { workload.requests.len() } else { open };
        let requests = workload.requests.into_iter().map(|o| arrival(o, Duration::ZERO)).collect();
        Traffic { name: workload.name, requests, open: Some(open) }
    }

    /// The requests of a Mooncake trace, at most the first `limit`, `speed` times as fast as they
    /// came. With a `jitter` in seconds each comes up to so much later than its line says: the
    /// times of some traces are rounded to several seconds.
    ///
    /// # Errors
    /// A file that cannot be read, the first line that makes no sense or has no timestamp.
    pub fn of_trace(
        path: &Path,
        chat: bool,
        limit: Option<usize>,
        (speed, jitter): (f64, f64),
        seed: u64,
    ) -> Result<Traffic, TraceError> {
        let entries = trace::read(path, limit)?;
        let times = trace::arrivals(path, &entries)?;
        let mut random = Random::new(seed, JITTER_STREAM);
        let mut times: Vec<Duration> = times
            .into_iter()
            .map(|at| (at.as_secs_f64() + jitter * random.unit()) / speed)
            .map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
            .collect();
        // Who comes after whom stays, and with it who finds what.
        times.sort_unstable();
        let outlines =
            if chat { trace::chat(path, &entries) } else { trace::plain(path, &entries) };
        let requests = outlines.into_iter().zip(times).map(|(o, at)| arrival(o, at)).collect();
        let mut name = path.display().to_string();
        if chat {
            name.push_str(" as chats");
        }
        if speed != 1.0 {
            name.push_str(&format!(", {speed} times as fast"));
        }
        if jitter > 0.0 {
            name.push_str(&format!(", up to {jitter} s later, seed {seed}"));
        }
        Ok(Traffic { name, requests, open: None })
    }

    /// Tokens of the longest answer.
    pub fn most_answer(&self) -> usize {
        self.requests.iter().map(|request| request.answer.len()).max().unwrap_or(0)
    }

    /// Tokens of the longest request, prompt and answer together, and its place in the order.
    pub fn longest(&self) -> Option<(usize, usize)> {
        let tokens = |request: &Arrival| request.prompt.len() + request.answer.len();
        let all = self.requests.iter().enumerate();
        all.map(|(i, request)| (tokens(request), i)).max_by_key(|(tokens, _)| *tokens)
    }
}

fn arrival(outline: Outline, at: Duration) -> Arrival {
    let Outline { prompt, answer, .. } = outline;
    Arrival { at, follows: None, prompt, answer, program: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(arrivals: &str, prompts: &str) -> MadeUp {
        MadeUp {
            requests: 50,
            arrivals: arrivals.parse().expect("arrivals"),
            prompts: prompts.parse().expect("lengths"),
            turns: 1,
            think: Lengths::Const(1),
            answers: "geometric:20".parse().expect("lengths"),
            most_answer: Some(30),
            programs: vec![1; 3],
            groups: Some((2, 100)),
            seed: 11,
        }
    }

    fn answers(traffic: &Traffic) -> Vec<usize> {
        traffic.requests.iter().map(|request| request.answer.len()).collect()
    }

    /// Comparing two settings would compare two traffics otherwise.
    #[test]
    fn other_arrivals_or_prompts_leave_the_answers_as_they_are() {
        let one = Traffic::made_up(&plan("poisson:3", "100"));
        let two = Traffic::made_up(&plan("closed:4", "uniform:10:500"));
        assert_eq!(answers(&one), answers(&two));
        assert_eq!((one.open, two.open), (None, Some(4)));
        assert!(one.most_answer() <= 30);
    }

    #[test]
    fn prompts_of_a_group_begin_alike_and_go_on_for_themselves() {
        let traffic = Traffic::made_up(&plan("all", "50"));
        let tokens: Vec<_> = traffic.requests.iter().map(|r| r.prompt.to_tokens()).collect();
        let common = |a: usize, b: usize| {
            tokens[a].iter().zip(&tokens[b]).take_while(|(a, b)| a == b).count()
        };
        assert_eq!((tokens[0].len(), common(0, 2)), (150, 100));
        assert_eq!(common(0, 1), 0);
        assert_eq!(traffic.requests[4].program, Some(1));
    }

    #[test]
    fn a_turn_says_all_that_was_said_before_and_comes_after_a_thought() {
        let think = "uniform:200:300".parse().expect("lengths");
        let traffic = Traffic::made_up(&MadeUp { turns: 3, think, ..plan("all", "50") });
        let [first, second, third] = [3, 4, 5].map(|i| &traffic.requests[i]);
        assert_eq!((traffic.requests.len(), first.follows), (150, None));
        assert_eq!((second.follows, third.follows), (Some(3), Some(4)));
        let thought = Duration::from_millis(200)..=Duration::from_millis(300);
        assert!(first.at.is_zero() && thought.contains(&second.at) && thought.contains(&third.at));
        let said = |request: &Arrival| {
            let mut said = request.prompt.clone();
            said.extend(&request.answer);
            said.to_tokens()
        };
        assert!(second.prompt.to_tokens().starts_with(&said(first)));
        assert!(third.prompt.to_tokens().starts_with(&said(second)));
        assert_eq!(third.prompt.len(), said(second).len() + 50);
        assert_eq!([first.program, third.program], [Some(1); 2]);
    }
}

//! Requests of a simulation, each with the time at which it arrives.

use std::path::Path;
use std::time::Duration;

use super::runs::{Run, Runs};
use super::sampling::{Arrivals, Lengths, Random};
use super::trace::{self, TraceError};
use super::workload::{Outline, Workload};

/// First of the streams of tokens that a made-up request has for itself, and of its answer; groups
/// share the streams below.
const UNIQUE: u64 = 1_000_000_000;
const ANSWER: u64 = 2_000_000_000;

/// Streams of random numbers: arrivals, prompts, answers, and where in its second a line of a trace
/// arrives.
const ARRIVAL_STREAM: u64 = 0;
const PROMPT_STREAM: u64 = 1;
const ANSWER_STREAM: u64 = 2;
const JITTER_STREAM: u64 = 3;

/// A request.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// When it arrives.
    pub at: Duration,
    /// Its prompt.
    pub prompt: Runs,
    /// The answer that it will get, one token or more.
    pub answer: Runs,
    /// The program it is of, if there are any.
    pub program: Option<usize>,
}

/// Requests in the order of their arrival.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// What it is, for people.
    pub name: String,
    /// The requests.
    pub requests: Vec<Arrival>,
    /// So many are open at any time, the next comes when one ends: times say nothing.
    pub open: Option<usize>,
}

/// What made-up traffic is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct MadeUp {
    /// Requests.
    pub requests: usize,
    /// When they arrive.
    pub arrivals: Arrivals,
    /// How long prompts are.
    pub prompts: Lengths,
    /// How long answers are.
    pub answers: Lengths,
    /// No answer is longer.
    pub most_answer: Option<usize>,
    /// Programs, of which the requests are by turns; 0 for none.
    pub programs: usize,
    /// Groups, of which the prompts are by turns, and the tokens that a group's prompts begin
    /// with, before their own.
    pub groups: Option<(usize, usize)>,
    /// Of its random numbers.
    pub seed: u64,
}

impl Traffic {
    /// Made-up traffic.
    pub fn made_up(plan: &MadeUp) -> Traffic {
        let stream = |stream| Random::new(plan.seed, stream);
        let (mut prompts, mut answers) = (stream(PROMPT_STREAM), stream(ANSWER_STREAM));
        let times = plan.arrivals.times(plan.requests, &mut stream(ARRIVAL_STREAM));
        let request = |(i, at): (usize, Duration)| {
            let own = Run::new(UNIQUE + i as u64, plan.prompts.draw(&mut prompts));
            let shared = plan.groups.map(|(n, len)| Run::new((i % n) as u64, len));
            let len = plan.answers.draw(&mut answers);
            let len = len.min(plan.most_answer.unwrap_or(usize::MAX));
            Arrival {
                at,
                prompt: shared.into_iter().chain([own]).collect(),
                answer: [Run::new(ANSWER + i as u64, len)].into_iter().collect(),
                program: (plan.programs > 0).then(|| i % plan.programs),
            }
        };
        let (requests, prompts, answers) = (plan.requests, &plan.prompts, &plan.answers);
        let name = format!(
            "{requests} requests, arrivals {}, prompts {prompts}, answers {answers}",
            plan.arrivals
        );
        Traffic {
            name,
            requests: times.into_iter().enumerate().map(request).collect(),
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
        Ok(Traffic { name: path.display().to_string(), requests, open: None })
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
    Arrival { at, prompt: outline.prompt, answer: outline.answer, program: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(arrivals: &str, prompts: &str) -> MadeUp {
        MadeUp {
            requests: 50,
            arrivals: arrivals.parse().expect("arrivals"),
            prompts: prompts.parse().expect("lengths"),
            answers: "geometric:20".parse().expect("lengths"),
            most_answer: Some(30),
            programs: 3,
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
}

//! Made-up traffic: when requests arrive, and how long prompts and answers are.
//!
//! Each of the three has a stream of random numbers of its own, so that another policy, budget or
//! memory meets the same requests, and another arrival rate the same lengths.

use std::fmt;
use std::fs;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rand::distr::Distribution;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Exp, Gamma, Geometric, LogNormal};

/// Longest prompt or answer that is made up.
pub const MOST_TOKENS: usize = 1 << 24;

/// Rates, deviations and seconds of arrivals.
const NUMBERS: std::ops::RangeInclusive<f64> = 1e-3..=1e6;

/// How long prompts or answers are, in tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Lengths {
    /// `512`: all alike.
    Const(usize),
    /// `uniform:64:512`: between the two, both included.
    Uniform(usize, usize),
    /// `exp:128`: exponential with this mean, rounded up.
    Exp(f64),
    /// `geometric:128`: from 1, with this mean.
    Geometric(f64),
    /// `lognormal:MEAN:CV`: by its mean and its standard deviation over the mean, rounded up.
    LogNormal(f64, f64),
    /// `choice:512=0.7,8192=0.3`: lengths and their weights.
    Choice(Vec<(usize, f64)>),
    /// `file:PATH`: one of the lengths in a file, each as likely.
    File(String, Arc<[usize]>),
}

/// The forms of [`Lengths`], for a help text.
pub const LENGTHS: &str = "N, uniform:MIN:MAX, exp:MEAN, geometric:MEAN, lognormal:MEAN:CV, \
                           choice:N=WEIGHT,N=WEIGHT.., file:PATH (lengths, parted by spaces or \
                           lines)";

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Lengths, String> {
        let wrong = |what: &str| format!("{text:?}: {what}; there are {LENGTHS}");
        let (kind, rest) = text.split_once(':').unwrap_or(("const", text));
        let fields: Vec<&str> = rest.split(':').collect();
        let tokens = |text: &str| {
            let tokens: Option<usize> = text.trim().parse().ok();
            tokens.filter(|tokens| (1..=MOST_TOKENS).contains(tokens)).ok_or_else(|| {
                wrong(&format!("{text:?} is no number of tokens from 1 to {MOST_TOKENS}"))
            })
        };
        let number = |text: &str, least: f64| {
            let number: Option<f64> = text.trim().parse().ok();
            let most = MOST_TOKENS as f64;
            number
                .filter(|number| (least..=most).contains(number))
                .ok_or_else(|| wrong(&format!("{text:?} is no number from {least} to {most}")))
        };
        match (kind, fields.as_slice()) {
            ("file", _) => {
                let wrong = |what: &dyn fmt::Display| format!("{rest}: {what}");
                let file = fs::read_to_string(rest).map_err(|error| wrong(&error))?;
                let lengths: Vec<usize> = file
                    .split_ascii_whitespace()
                    .map(|word| tokens(word).map_err(|_| wrong(&format!("{word:?} is no length"))))
                    .collect::<Result<_, String>>()?;
                match lengths.is_empty() {
                    true => Err(wrong(&"no length in it")),
                    false => Ok(Lengths::File(rest.to_owned(), lengths.into())),
                }
            }
            ("const", [len]) => Ok(Lengths::Const(tokens(len)?)),
            ("uniform", [min, max]) => {
                let (min, max) = (tokens(min)?, tokens(max)?);
                if min > max {
                    return Err(wrong("MIN is above MAX"));
                }
                Ok(Lengths::Uniform(min, max))
            }
            ("exp", [mean]) => Ok(Lengths::Exp(number(mean, 1.0)?)),
            ("geometric", [mean]) => Ok(Lengths::Geometric(number(mean, 1.0)?)),
            ("lognormal", [mean, cv]) => {
                Ok(Lengths::LogNormal(number(mean, 1.0)?, number(cv, 0.0)?))
            }
            ("choice", [parts]) => {
                let part = |part: &str| {
                    let (len, weight) = part.split_once('=').ok_or_else(|| wrong("no weight"))?;
                    Ok((tokens(len)?, number(weight, 0.0)?))
                };
                let parts: Vec<_> = parts.split(',').map(part).collect::<Result<_, String>>()?;
                if parts.iter().map(|part| part.1).sum::<f64>() <= 0.0 {
                    return Err(wrong("all weights are 0"));
                }
                Ok(Lengths::Choice(parts))
            }
            _ => Err(wrong("no such form")),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lengths::Const(len) => write!(f, "{len}"),
            Lengths::Uniform(min, max) => write!(f, "uniform:{min}:{max}"),
            Lengths::Exp(mean) => write!(f, "exp:{mean}"),
            Lengths::Geometric(mean) => write!(f, "geometric:{mean}"),
            Lengths::LogNormal(mean, cv) => write!(f, "lognormal:{mean}:{cv}"),
            Lengths::Choice(parts) => {
                let parts: Vec<String> =
                    parts.iter().map(|(len, weight)| format!("{len}={weight}")).collect();
                write!(f, "choice:{}", parts.join(","))
            }
            Lengths::File(path, _) => write!(f, "file:{path}"),
        }
    }
}

impl Lengths {
    /// The next length, one token or more.
    pub fn draw(&self, random: &mut Random) -> usize {
        const RANGE: &str = "checked when it was read";
        let rng = &mut random.0;
        // The casts saturate.
        let len = match self {
            Lengths::Const(len) => *len,
            Lengths::Uniform(min, max) => rng.random_range(*min..=*max),
            Lengths::Exp(mean) => Exp::new(1.0 / mean).expect(RANGE).sample(rng).ceil() as usize,
            Lengths::Geometric(mean) => {
                1 + Geometric::new(1.0 / mean).expect(RANGE).sample(rng) as usize
            }
            Lengths::LogNormal(mean, cv) => {
                LogNormal::from_mean_cv(*mean, *cv).expect(RANGE).sample(rng).ceil() as usize
            }
            Lengths::Choice(parts) => {
                let all: f64 = parts.iter().map(|part| part.1).sum();
                let mut left = rng.random_range(0.0..all);
                let chosen = parts.iter().find(|(_, weight)| {
                    left -= weight;
                    left < 0.0
                });
                chosen.unwrap_or_else(|| parts.last().expect(RANGE)).0
            }
            Lengths::File(_, lengths) => lengths[rng.random_range(0..lengths.len())],
        };
        len.clamp(1, MOST_TOKENS)
    }
}

/// When requests arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// `all`: at once.
    All,
    /// `poisson:4.5`: so many a second, each when it pleases.
    Poisson(f64),
    /// `gamma:4.5:2`: so many a second, the gaps with this standard deviation over their mean.
    Gamma(f64, f64),
    /// `burst:N:SECONDS`: so many together, every so many seconds.
    Burst(usize, f64),
    /// `closed:N`: so many are open at any time, the next comes when one ends.
    Closed(usize),
}

/// The forms of [`Arrivals`], for a help text.
pub const ARRIVALS: &str =
    "all, poisson:PER_SECOND, gamma:PER_SECOND:CV, burst:N:SECONDS, closed:N";

impl FromStr for Arrivals {
    type Err = String;

    fn from_str(text: &str) -> Result<Arrivals, String> {
        let fields: Vec<&str> = text.split(':').collect();
        let above = |text: &str| text.parse().ok().filter(|n: &f64| NUMBERS.contains(n));
        let count = |text: &str| text.parse().ok().filter(|n: &usize| *n > 0);
        let arrivals = match fields.as_slice() {
            ["all"] => Some(Arrivals::All),
            ["poisson", rate] => above(rate).map(Arrivals::Poisson),
            ["gamma", rate, cv] => above(rate).zip(above(cv)).map(|(r, c)| Arrivals::Gamma(r, c)),
            ["burst", n, gap] => count(n).zip(above(gap)).map(|(n, gap)| Arrivals::Burst(n, gap)),
            ["closed", n] => count(n).map(Arrivals::Closed),
            _ => None,
        };
        arrivals.ok_or_else(|| {
            let (least, most) = (NUMBERS.start(), NUMBERS.end());
            let text: String = text.chars().take(40).collect();
            format!("{text:?}: numbers are from {least} to {most}; there are {ARRIVALS}")
        })
    }
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arrivals::All => f.write_str("all"),
            Arrivals::Poisson(rate) => write!(f, "poisson:{rate}"),
            Arrivals::Gamma(rate, cv) => write!(f, "gamma:{rate}:{cv}"),
            Arrivals::Burst(n, gap) => write!(f, "burst:{n}:{gap}"),
            Arrivals::Closed(n) => write!(f, "closed:{n}"),
        }
    }
}

impl Arrivals {
    /// When the next `count` requests arrive, in order; all at 0 where they wait for each other.
    pub fn times(&self, count: usize, random: &mut Random) -> Vec<Duration> {
        const RANGE: &str = "checked when it was read";
        let mut now = 0.0;
        let mut next = |i: usize| {
            now += match *self {
                Arrivals::All | Arrivals::Closed(_) => 0.0,
                Arrivals::Poisson(rate) => Exp::new(rate).expect(RANGE).sample(&mut random.0),
                Arrivals::Gamma(rate, cv) => {
                    let shape = 1.0 / (cv * cv);
                    let gaps = Gamma::new(shape, 1.0 / (rate * shape)).expect(RANGE);
                    gaps.sample(&mut random.0)
                }
                Arrivals::Burst(n, gap) if i > 0 && i.is_multiple_of(n) => gap,
                Arrivals::Burst(..) => 0.0,
            };
            Duration::try_from_secs_f64(now).unwrap_or(Duration::MAX)
        };
        (0..count).map(&mut next).collect()
    }
}

/// A stream of random numbers that is the same on every machine.
#[derive(Debug, Clone)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// The stream of this number of a seed.
    pub fn new(seed: u64, stream: u64) -> Random {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Random(rng)
    }

    /// From 0 to 1, without 1.
    pub fn unit(&mut self) -> f64 {
        self.0.random()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_written_as_they_are_read() {
        for text in [
            "512",
            "uniform:64:512",
            "exp:128",
            "geometric:128",
            "lognormal:900:1.5",
            "choice:512=0.7,8192=0.3",
        ] {
            assert_eq!(text.parse::<Lengths>().map(|l| l.to_string()), Ok(text.to_owned()));
        }
        for text in ["all", "poisson:4.5", "gamma:4.5:2", "burst:32:1.5", "closed:8"] {
            assert_eq!(text.parse::<Arrivals>().map(|a| a.to_string()), Ok(text.to_owned()));
        }
        for wrong in ["", "0", "uniform:5:4", "exp:0", "exp:nan", "choice:", "choice:5=0", "x:1"] {
            assert!(wrong.parse::<Lengths>().is_err(), "{wrong}");
        }
        for wrong in [
            "",
            "poisson:0",
            "poisson",
            "poisson:inf",
            "gamma:1",
            "closed:0",
            "burst:1",
            "gamma:1:1e200",
            "gamma:1:1e-200",
            "poisson:1e-300",
            "burst:1:1e300",
        ] {
            assert!(wrong.parse::<Arrivals>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn lengths_of_a_file_are_those_in_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.txt");
        let form = format!("file:{}", path.display());
        assert!(form.parse::<Lengths>().is_err_and(|error| error.contains("log.txt")));
        for (text, fault) in [("", "no length"), ("5 six", "\"six\""), ("0", "\"0\"")] {
            fs::write(&path, text).expect("written");
            assert!(form.parse::<Lengths>().is_err_and(|error| error.contains(fault)), "{text}");
        }
        fs::write(&path, "5\n70 5\n").expect("written");
        assert_eq!(form.parse::<Lengths>().map(|lengths| lengths.to_string()), Ok(form.clone()));
        assert!((mean(&form) / (80.0 / 3.0) - 1.0).abs() < 0.03);
    }

    fn mean(lengths: &str) -> f64 {
        let (lengths, mut random) =
            (lengths.parse::<Lengths>().expect("a form"), Random::new(7, 1));
        (0..40_000).map(|_| lengths.draw(&mut random) as f64).sum::<f64>() / 40_000.0
    }

    #[test]
    fn lengths_have_the_means_they_are_named_by() {
        for (lengths, expected) in [
            ("geometric:128", 128.0),
            // Rounded up, half a token more.
            ("exp:128", 128.5),
            ("lognormal:900:0.5", 900.5),
            ("uniform:64:512", 288.0),
            ("choice:512=0.7,8192=0.3", 2816.0),
        ] {
            assert!((mean(lengths) / expected - 1.0).abs() < 0.03, "{lengths}: {}", mean(lengths));
        }
    }

    #[test]
    fn arrivals_have_the_rate_they_are_named_by() {
        for text in ["poisson:5", "gamma:5:2", "burst:10:2"] {
            let arrivals: Arrivals = text.parse().expect("a form");
            let times = arrivals.times(20_000, &mut Random::new(3, 0));
            assert!(times.is_sorted());
            let rate = 20_000.0 / times.last().expect("the last").as_secs_f64();
            assert!((rate / 5.0 - 1.0).abs() < 0.05, "{text}: {rate} a second");
        }
    }
}

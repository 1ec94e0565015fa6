//! Request-level batches beside continuous ones, as clients see them: requests with exponential
//! lengths over HTTP, all at once, to two servers that differ in `--batching` alone; and the gain
//! that the theory says (SEEDS.md F2 to F4).

use std::net::SocketAddr;
use std::thread;
use std::time::Instant;

use deltapool::config::{Batching, EngineConfig};
use deltapool::simulate::Lengths;
use deltapool::simulate::formulas::{
    gain_dead_slots_free, gain_dead_slots_pay, longest_exponential, static_efficiency,
};
use deltapool::simulate::sampling::Random;

use super::{Files, post, serve, spread};

/// Sequences that run at once.
const PLACES: usize = 16;
/// Batches of so many requests in a round.
const BATCHES: usize = 8;
/// Mean tokens of an answer.
const MEAN: usize = 48;
/// No answer is longer.
const MOST: usize = 12 * MEAN;
const ROUNDS: usize = 5;

/// Measures and prints.
pub fn run(files: &Files) {
    let server = |batching| {
        let places = Some(PLACES);
        serve(files, EngineConfig { batching, max_num_seqs: places, ..EngineConfig::default() })
    };
    let (fixed, joined) = (server(Batching::Static), server(Batching::Continuous));
    let mut random = Random::new(0, 0);
    let exponential = Lengths::Exp(MEAN as f64);
    let lengths: Vec<usize> =
        (0..PLACES * BATCHES).map(|_| exponential.draw(&mut random).min(MOST)).collect();
    let (mut gains, mut one, mut full) = (Vec::new(), Vec::new(), Vec::new());
    println!("round  static s  continuous s  gain");
    // The first round warms up.
    for round in 0..=ROUNDS {
        let (slow, fast) = (seconds(fixed, &lengths), seconds(joined, &lengths));
        let (alone, together) = (seconds(joined, &[MOST]), seconds(joined, &[MOST; PLACES]));
        if round > 0 {
            println!("{round:>5}  {slow:>8.3}  {fast:>12.3}  {:>4.2}", slow / fast);
            gains.push(slow / fast);
            one.push(alone / MOST as f64);
            full.push(together / MOST as f64);
        }
    }
    let ([min, median, max], [_, one, _], [_, full, _]) =
        (spread(&mut gains), spread(&mut one), spread(&mut full));
    // A step's time is a straight line over its sequences.
    let places = PLACES as f64;
    let step = |sequences: f64| one + (full - one) * (sequences - 1.0) / (places - 1.0);
    let efficiency = static_efficiency(MEAN as f64, longest_exponential(PLACES, MEAN as f64));
    println!(
        "continuous batching is {:.2} / {:.2} / {:.2} times as fast (min / median / max); by \
         theory {:.2} where ended sequences cost nothing, as here, and {:.2} where they cost as \
         much as others",
        min,
        median,
        max,
        gain_dead_slots_free(places, efficiency, step),
        gain_dead_slots_pay(efficiency),
    );
}

/// Seconds until requests with answers of so many tokens, all sent at once, have them.
fn seconds(address: SocketAddr, lengths: &[usize]) -> f64 {
    let start = Instant::now();
    let tokens: usize = thread::scope(|scope| {
        let client = |(index, &tokens)| scope.spawn(move || post(address, index, tokens));
        let clients: Vec<_> = lengths.iter().enumerate().map(client).collect();
        clients.into_iter().map(|client| client.join().expect("it ends")).sum()
    });
    assert_eq!(tokens, lengths.iter().sum::<usize>());
    start.elapsed().as_secs_f64()
}

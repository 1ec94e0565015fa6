//! The small workloads: shared system prompts, chats, agents, a burst.

use super::runs::{Run, Runs};
use super::workload::Outline;

/// The one whose requests are submitted together.
pub(super) const BURST: &str = "burst32";

/// The requests of a workload, if there is one of that name.
pub(super) fn requests(name: &str) -> Option<Vec<Outline>> {
    let requests = match name {
        "share1500+700x64" => shared(1500, 700),
        "share1600+600x64" => shared(1600, 600),
        "share2000+200x64" => shared(2000, 200),
        "chat32x10" => chats((0..10).flat_map(|turn| (0..32).map(move |chat| (turn, chat)))),
        "chat32x10_seq" => chats((0..32).flat_map(|chat| (0..10).map(move |turn| (turn, chat)))),
        "agents16x8" => agents(),
        BURST => burst(),
        _ => return None,
    };
    Some(with_ideal(requests))
}

/// 64 prompts that begin alike.
fn shared(shared: usize, unique: usize) -> Vec<(Runs, Runs)> {
    let prompt = |i: u64| [Run::new(7_000_001, shared), Run::new(7_100_000 + i, unique)];
    let answer = |i: u64| [Run::new(7_200_000 + i, 100)];
    (0..64).map(|i| (prompt(i).into_iter().collect(), answer(i).into_iter().collect())).collect()
}

/// Chats of one system prompt, with turns of 120 tokens and answers of 350, in the order of
/// `turns`: pairs of turn and chat.
fn chats(turns: impl Iterator<Item = (u64, u64)>) -> Vec<(Runs, Runs)> {
    let mut histories = vec![Runs::from_iter([Run::new(8_000_001, 600)]); 32];
    let mut requests = Vec::new();
    for (turn, chat) in turns {
        let of = chat * 1000 + turn;
        let said = [Run::new(8_100_000 + of, 120)].into_iter().collect();
        let answer = [Run::new(8_200_000 + of, 350)].into_iter().collect();
        requests.push(go_on(&mut histories[chat as usize], &said, answer));
    }
    requests
}

/// Agents of one system prompt with a role each: an observation of 800 tokens, an act of 150.
fn agents() -> Vec<(Runs, Runs)> {
    let role = |agent: u64| [Run::new(9_000_001, 6000), Run::new(9_100_000 + agent, 400)];
    let mut histories: Vec<Runs> = (0..16).map(|agent| role(agent).into_iter().collect()).collect();
    let mut requests = Vec::new();
    for step in 0..8 {
        for (agent, history) in (0..16).zip(&mut histories) {
            let of = agent * 100 + step;
            let seen = [Run::new(9_200_000 + of, 800)].into_iter().collect();
            let act = [Run::new(9_300_000 + of, 150)].into_iter().collect();
            requests.push(go_on(history, &seen, act));
        }
    }
    requests
}

/// The request of a history and what is new; both and the answer become the history.
fn go_on(history: &mut Runs, new: &Runs, answer: Runs) -> (Runs, Runs) {
    history.extend(new);
    let prompt = history.clone();
    history.extend(&answer);
    (prompt, answer)
}

/// 32 equal prompts with answers of their own.
fn burst() -> Vec<(Runs, Runs)> {
    let prompt = [Run::new(7_300_001, 2000)];
    let answer = |i: u64| [Run::new(7_400_000 + i, 100)].into_iter().collect();
    (0..32).map(|i| (prompt.into_iter().collect(), answer(i))).collect()
}

/// Adds the longest common prefix with an earlier prompt and the computed part of its answer: all
/// but its last token, which nothing follows. At most the prompt but for one token.
fn with_ideal(requests: Vec<(Runs, Runs)>) -> Vec<Outline> {
    let mut earlier: Vec<Vec<u32>> = Vec::new();
    let mut outlines = Vec::new();
    for (i, (prompt, answer)) in requests.into_iter().enumerate() {
        let mut tokens = prompt.to_tokens();
        let longest = earlier.iter().map(|other| common(other, &tokens)).max().unwrap_or(0);
        tokens.extend(answer.slice(0..answer.len() - 1).to_tokens());
        earlier.push(tokens);
        outlines.push(Outline {
            place: format!("request {i}"),
            ideal_tokens: longest.min(prompt.len() - 1),
            prompt,
            answer,
        });
    }
    outlines
}

/// Tokens that two sequences have in common from their start.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

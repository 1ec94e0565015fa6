//! Chats that go on turn by turn, more of them than the device has memory for.
#![cfg(feature = "embedded-model")]

use deltapool::config::MemorySize;
use deltapool::engine::RequestId;
use deltapool::models::{Model, ModelFiles};
use deltapool::request::{Figures, Request, SamplingParams};
use kernels::KvDtype;

use super::support::Random;
use super::support::stepped::{Setting, Stepped};

/// A chat: all its tokens so far, and where its state of the last turn stands.
struct Chat {
    tokens: Vec<u32>,
    random: Random,
    kept: usize,
}

impl Chat {
    fn new(seed: u64) -> Chat {
        Chat { tokens: Vec::new(), random: Random::new(seed), kept: 0 }
    }

    /// The request of the next turn: all that was said, and `new` tokens more.
    fn turn(&mut self, new: usize, max_tokens: usize) -> Request {
        self.tokens.extend((0..new).map(|_| self.random.below(3_072) as u32));
        Request {
            ignore_eos: true,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            ..Request::new(self.tokens.clone(), max_tokens)
        }
    }

    /// Takes the answer in; returns how many tokens of the prompt were computed beyond those that
    /// no state could have spared.
    fn take(&mut self, engine: &Stepped, id: RequestId) -> (usize, Figures) {
        let answer = &engine.answers[&(id.0, 0)];
        let figures = answer.finish.as_ref().expect("it ended").figures;
        let new = self.tokens.len() - self.kept;
        let computed = self.tokens.len() - figures.cached_tokens;
        self.tokens.extend(&answer.ids);
        // The last token of an answer is not computed before somebody goes on from it.
        self.kept = self.tokens.len() - 1;
        (computed.saturating_sub(new), figures)
    }
}

/// The model in the binary with rows of tokens in f32, as the memories below count on.
fn files() -> ModelFiles {
    let mut files = ModelFiles::embedded().expect("the model is sound");
    files.spec.kv_dtype = KvDtype::F32;
    files
}

fn setting(device_slots: usize, host_times: usize) -> Setting {
    let files = files();
    let bytes = device_slots * Model::layout_of(&files.spec).slot_bytes;
    Setting::roomy().with(|config| {
        config.device_memory = MemorySize::Bytes(bytes);
        config.host_memory = MemorySize::Bytes(host_times * bytes);
    })
}

/// Six chats of twenty turns in the device memory of six slots: while one is answered the other
/// five wait, so each turn finds what five others have left.
#[test]
fn a_chat_among_five_others_computes_a_cell_and_what_is_new() {
    let files = files();
    let mut engine = Stepped::new(files, setting(6, 8));
    let mut chats: Vec<Chat> = (0..6).map(Chat::new).collect();
    for turn in 0..20 {
        let ids: Vec<RequestId> =
            chats.iter_mut().map(|chat| engine.submit(&chat.turn(22, 12))).collect();
        while !engine.core.is_idle() {
            engine.step();
        }
        for (i, (chat, id)) in chats.iter_mut().zip(ids).enumerate() {
            let (again, figures) = chat.take(&engine, id);
            assert!(again <= 63, "turn {turn} of chat {i}: {again} again, {figures:?}");
        }
    }
    let stats = engine.core.stats().scheduler;
    assert!(stats.demoted_bytes > 0 && stats.recomputed == 0, "{stats:?}");
    engine.finish();
}

/// K10: the state of the last turn fills the device, and who goes on from it writes on its last
/// block: nobody else is there to give one, so the cache gives up its own share.
#[test]
fn a_state_that_fills_the_device_is_handed_to_the_next_turn() {
    let files = files();
    let mut engine = Stepped::new(files, setting(6, 0));
    let mut chat = Chat::new(1);
    for (new, kept) in [(650, 0), (5, 659), (9, 674)] {
        let id = engine.submit(&chat.turn(new, 10));
        while !engine.core.is_idle() {
            engine.step();
        }
        let (_, figures) = chat.take(&engine, id);
        assert_eq!(figures.cached_tokens, kept, "{figures:?}");
    }
    assert_eq!(engine.core.stats().scheduler.handed_over, 2);
    engine.finish();
}

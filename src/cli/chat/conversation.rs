//! The turns of a conversation, and the tokens they are for the model.

use serde_json::{Map, Value, json};

use crate::cli::CliError;
use crate::cli::prompt::known;
use crate::text::{Chat, ChatTemplate, Specials, Tokenizer};

/// A conversation in a model's chat template.
///
/// What the model has read and said is kept as ids. The next prompt begins with these very ids as
/// long as the template repeats the text they stand for: then it goes on from the state at the end
/// of the last answer, where encoding the whole text anew might cut it into other tokens.
pub struct Conversation<'m> {
    tokenizer: &'m Tokenizer,
    template: &'m ChatTemplate,
    vocab_size: usize,
    messages: Vec<Value>,
    /// None before the first turn, and where ids and text have parted.
    seen: Option<Seen>,
}

/// A text and the ids that stand for it.
#[derive(Debug, Clone, Default)]
struct Seen {
    text: String,
    ids: Vec<u32>,
}

impl<'m> Conversation<'m> {
    /// One without turns.
    pub fn new(
        tokenizer: &'m Tokenizer,
        template: &'m ChatTemplate,
        vocab_size: usize,
        system: Option<&str>,
    ) -> Conversation<'m> {
        let mut conversation =
            Conversation { tokenizer, template, vocab_size, messages: Vec::new(), seen: None };
        conversation.begin(system.map(|text| message("system", text)));
        conversation
    }

    /// Forgets all turns; what the system says stays.
    pub fn reset(&mut self) {
        let system = self.messages.first().filter(|first| first["role"] == "system").cloned();
        self.begin(system);
    }

    /// Begins anew, with another text of the system; none when it is empty.
    pub fn set_system(&mut self, text: &str) {
        self.begin((!text.is_empty()).then(|| message("system", text)));
    }

    fn begin(&mut self, system: Option<Value>) {
        self.messages.clear();
        self.messages.extend(system);
        self.seen = None;
    }

    /// Turns that were answered.
    pub fn turns(&self) -> usize {
        self.messages.iter().filter(|message| message["role"] == "assistant").count()
    }

    /// The prompt of a turn. It becomes part of the conversation with [`Conversation::answered`].
    ///
    /// # Errors
    /// What the template says of it, or a tokenizer that is another model's.
    pub fn ask(&self, text: &str) -> Result<Turn, CliError> {
        let question = message("user", text);
        let mut messages = self.messages.clone();
        messages.push(question.clone());
        let variables = &Map::new();
        let chat =
            Chat { messages: &messages, tools: None, add_generation_prompt: true, variables };
        let rendered = self.template.render(&chat)?;
        let ids = match self.continued(&rendered)? {
            Some(ids) => ids,
            None => self.tokenizer.encode(&rendered, Specials::Parse)?,
        };
        let ids = known(self.tokenizer, self.vocab_size, ids)?;
        Ok(Turn { question, seen: Seen { text: rendered, ids } })
    }

    /// What was seen and the ids of the rest of `text`, where that has all that was seen.
    fn continued(&self, text: &str) -> Result<Option<Vec<u32>>, CliError> {
        let Some(seen) = &self.seen else { return Ok(None) };
        let Some(rest) = text.strip_prefix(seen.text.as_str()) else { return Ok(None) };
        let more = self.tokenizer.encode(rest, Specials::Parse)?;
        // A tokenizer may begin a text with a space of its own.
        let is_rest = self.spell(&more, rest);
        Ok(is_rest.then(|| [seen.ids.as_slice(), &more].concat()))
    }

    /// Takes a turn in with its answer: the text, and the ids whose text it is.
    pub fn answered(&mut self, turn: Turn, text: &str, ids: &[u32]) {
        let Turn { question, mut seen } = turn;
        self.messages.push(question);
        self.messages.push(message("assistant", text));
        let is_whole = self.spell(ids, text);
        seen.text.push_str(text);
        seen.ids.extend(ids);
        self.seen = is_whole.then_some(seen);
    }

    /// Whether the ids stand for just this text.
    fn spell(&self, ids: &[u32], text: &str) -> bool {
        let mut left = text.as_bytes();
        ids.iter().all(|id| {
            let rest = self.tokenizer.token_bytes(*id).and_then(|bytes| left.strip_prefix(bytes));
            left = rest.unwrap_or(left);
            rest.is_some()
        }) && left.is_empty()
    }
}

/// What a user said, and the prompt it makes.
pub struct Turn {
    question: Value,
    seen: Seen,
}

impl Turn {
    /// The prompt's tokens.
    pub fn ids(&self) -> &[u32] {
        &self.seen.ids
    }
}

fn message(role: &str, text: &str) -> Value {
    json!({ "role": role, "content": text })
}

#[cfg(all(test, feature = "embedded-model"))]
mod tests {
    use super::*;
    use crate::text::TextFiles;

    const TURNS: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
                         {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

    fn with(template: &'static str, test: impl FnOnce(&Tokenizer, &ChatTemplate)) {
        let mut files = TextFiles::embedded();
        files.chat_template = Some(template.as_bytes().into());
        let tokenizer = Tokenizer::from_files(&files).expect("a tokenizer");
        test(&tokenizer, &ChatTemplate::from_files(&files).expect("a template"));
    }

    /// An answer whose ids are not those that its text would be given.
    fn unusual(tokenizer: &Tokenizer) -> (&'static str, Vec<u32>) {
        let letters = ["t", "h", "e"].map(|letter| tokenizer.encode(letter, Specials::Plain));
        let ids: Vec<u32> = letters.into_iter().flat_map(|ids| ids.expect("ids")).collect();
        assert_ne!(tokenizer.encode("the", Specials::Plain).expect("ids"), ids);
        ("the", ids)
    }

    #[test]
    fn a_prompt_begins_with_the_ids_of_the_turns_before_it() {
        with(TURNS, |tokenizer, template| {
            let mut conversation =
                Conversation::new(tokenizer, template, 10_000, Some("Be brief."));
            let first = conversation.ask("Who?").expect("a prompt");
            let (text, ids) = unusual(tokenizer);
            let so_far = [first.ids(), &ids].concat();
            conversation.answered(first, text, &ids);
            let second = conversation.ask("And?").expect("a prompt");
            assert!(second.ids().starts_with(&so_far));
            assert_eq!(
                tokenizer.decode(second.ids()),
                "[system]Be brief.[user]Who?[assistant]the[user]And?[assistant]"
            );
            conversation.reset();
            let again = conversation.ask("Who?").expect("a prompt");
            assert_eq!(tokenizer.decode(again.ids()), "[system]Be brief.[user]Who?[assistant]");
            conversation.set_system("");
            let without = conversation.ask("Who?").expect("a prompt");
            assert_eq!(tokenizer.decode(without.ids()), "[user]Who?[assistant]");
        });
    }

    /// A template that trims answers, and an answer that ends inside a token.
    #[test]
    fn where_ids_and_text_part_the_text_counts() {
        let trims = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}";
        for (template, text, cut) in [(trims, " the ", 0), (TURNS, "the", 1)] {
            with(template, |tokenizer, template| {
                let mut conversation = Conversation::new(tokenizer, template, 10_000, None);
                let first = conversation.ask("Who?").expect("a prompt");
                let ids = tokenizer.encode(text, Specials::Plain).expect("ids");
                conversation.answered(first, &text[..text.len() - cut], &ids);
                let second = conversation.ask("And?").expect("a prompt");
                let whole = tokenizer.decode(second.ids());
                let answer = text[..text.len() - cut].trim();
                assert!(whole.contains(&format!("]{answer}[user]And?")), "{whole}");
            });
        }
    }
}

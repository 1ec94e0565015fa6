//! The turns of a conversation, and the tokens they are for the model.

use serde_json::{Map, Value, json};

use crate::cli::CliError;
use crate::cli::prompt::known;
use crate::text::{Chat, ChatTemplate, Specials, TextError, Tokenizer};

/// A conversation in a model's chat template.
///
/// What the model has read and said is kept as ids, and the next prompt begins with these very ids:
/// then it goes on from the state at the end of the last answer. Encoding the whole text anew might
/// cut it into other tokens, and a template may put something between a question and its answer
/// that was not there when the answer was drawn.
pub struct Conversation<'m> {
    tokenizer: &'m Tokenizer,
    template: &'m ChatTemplate,
    vocab_size: usize,
    messages: Vec<Value>,
    /// All that was read and said, the last answer at its end. None before the first turn, and
    /// where an answer's ids are not those of its text.
    seen: Option<Vec<u32>>,
}

/// Stands for an answer while a template is asked what it writes around it; no model is sent it.
const ANSWER: &str = "\u{e000}";

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
        let rendered = self.render(&messages)?;
        let ids = match self.continued(&messages, &rendered)? {
            Some(ids) => ids,
            None => self.tokenizer.encode(&rendered, Specials::Parse)?,
        };
        let ids = known(self.tokenizer, self.vocab_size, ids)?;
        Ok(Turn { question, ids })
    }

    fn render(&self, messages: &[Value]) -> Result<String, TextError> {
        let variables = &Map::new();
        self.template.render(&Chat {
            messages,
            tools: None,
            add_generation_prompt: true,
            variables,
        })
    }

    /// What was seen and the ids of what the template writes behind the last answer. None where it
    /// leaves a part of that answer out, as the reasoning in it: then the template counts.
    fn continued(&self, messages: &[Value], text: &str) -> Result<Option<Vec<u32>>, CliError> {
        let Some(seen) = &self.seen else { return Ok(None) };
        let mut marked = messages.to_vec();
        // The question is the last.
        let answer =
            std::mem::replace(&mut marked[messages.len() - 2], message("assistant", ANSWER));
        let marked = self.render(&marked)?;
        let Some((before, behind)) = marked.split_once(ANSWER) else { return Ok(None) };
        let shown = text.strip_prefix(before).and_then(|text| text.strip_suffix(behind));
        let said = answer["content"].as_str().map(str::trim);
        if shown.map(str::trim) != said {
            return Ok(None);
        }
        let more = self.tokenizer.encode(behind, Specials::Parse)?;
        // A tokenizer may begin a text with a space of its own.
        let is_rest = self.spell(&more, behind);
        Ok(is_rest.then(|| [seen.as_slice(), &more].concat()))
    }

    /// Takes a turn in with its answer: the text, and the ids whose text it is.
    pub fn answered(&mut self, turn: Turn, text: &str, ids: &[u32]) {
        let Turn { question, ids: mut seen } = turn;
        self.messages.push(question);
        self.messages.push(message("assistant", text));
        seen.extend(ids);
        self.seen = self.spell(ids, text).then_some(seen);
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
    ids: Vec<u32>,
}

impl Turn {
    /// The prompt's tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
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

    /// A template that leaves reasoning out, and an answer that ends inside a token.
    #[test]
    fn where_ids_and_text_part_the_text_counts() {
        let omits = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}\
                     {% endfor %}";
        for (template, text, cut) in [(omits, "Hm.</think>the", 0), (TURNS, "the", 1)] {
            with(template, |tokenizer, template| {
                let mut conversation = Conversation::new(tokenizer, template, 10_000, None);
                let first = conversation.ask("Who?").expect("a prompt");
                let ids = tokenizer.encode(text, Specials::Plain).expect("ids");
                let text = &text[..text.len() - cut];
                conversation.answered(first, text, &ids);
                let second = conversation.ask("And?").expect("a prompt");
                let whole = tokenizer.decode(second.ids());
                let answer = text.split("</think>").last().expect("a part");
                assert!(whole.contains(&format!("]{answer}[user]And?")), "{whole}");
            });
        }
    }

    /// As the built-in template does, which no answer was ever drawn behind.
    #[test]
    fn what_was_drawn_stays_where_the_template_shows_it_in_another_place() {
        let parts = "{% for m in messages %}{{ m.content | trim }}\
                     {% if not loop.last %}//{% endif %}{% endfor %}";
        with(parts, |tokenizer, template| {
            let mut conversation = Conversation::new(tokenizer, template, 10_000, None);
            for (question, prompt) in [
                ("Who?", "Who?"),
                ("And?", "Who? the //And?"),
                ("So?", "Who? the //And? the //So?"),
            ] {
                let turn = conversation.ask(question).expect("a prompt");
                assert_eq!(tokenizer.decode(turn.ids()), prompt);
                let ids = tokenizer.encode(" the ", Specials::Plain).expect("ids");
                conversation.answered(turn, " the ", &ids);
            }
        });
    }
}

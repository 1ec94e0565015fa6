//! A reader of `config.json` for what a step costs: each key is asked for, or said to change
//! nothing, or refused. `models` has a reader of its own for what the arithmetic needs.
//!
//! Keys are dotted paths. Where the file has a `text_config`, a key is looked up there first.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// No size in a model comes near this; one that does is a mistake in the file.
const SIZE_LIMIT: u64 = 1 << 31;

/// A `config.json` being read. After a fault a read returns a harmless value; nothing may be made
/// of it before [`Keys::settled`] has passed.
pub struct Keys<'a> {
    levels: Vec<(&'static str, &'a Map<String, Value>)>,
    understood: BTreeSet<&'static str>,
    faults: Vec<String>,
}

impl<'a> Keys<'a> {
    /// A reader of `top`, the object that the file holds.
    pub fn new(top: &'a Map<String, Value>) -> Keys<'a> {
        let nested = top.get("text_config").and_then(Value::as_object);
        let levels = nested.map(|n| ("text_config.", n)).into_iter().chain([("", top)]).collect();
        Keys { levels, understood: BTreeSet::new(), faults: Vec::new() }
    }

    /// Says that `keys` are known and change no cost.
    pub fn inert(&mut self, keys: &[&'static str]) {
        self.understood.extend(keys);
    }

    /// A whole number of at least `least`, under the first of `names` that is there.
    pub fn whole(&mut self, names: &[&'static str], least: u64) -> usize {
        match self.find(names) {
            Some((key, value)) => self.number(&key, value, least),
            None => self.missing(names),
        }
    }

    /// A whole number above 0.
    pub fn size(&mut self, names: &[&'static str]) -> usize {
        self.whole(names, 1)
    }

    /// A whole number above 0; none when the key is absent or null.
    pub fn optional_size(&mut self, names: &[&'static str]) -> Option<usize> {
        let (key, value) = self.find(names)?;
        Some(self.number(&key, value, 1))
    }

    /// True or false; false when the key is absent or null.
    pub fn switch(&mut self, name: &'static str) -> bool {
        let Some((key, value)) = self.find(&[name]) else { return false };
        value.as_bool().unwrap_or_else(|| {
            self.wrong(&key, value, "true or false");
            false
        })
    }

    /// A list of whole numbers above 0.
    pub fn sizes(&mut self, name: &'static str) -> Vec<usize> {
        let Some((key, value)) = self.find(&[name]) else {
            self.missing(&[name]);
            return Vec::new();
        };
        let size = |v: &Value| v.as_u64().filter(|n| (1..=SIZE_LIMIT).contains(n));
        let list = value.as_array().map(|list| list.iter().map(size).collect::<Option<Vec<_>>>());
        match list.flatten() {
            Some(list) => list.into_iter().map(|number| number as usize).collect(),
            None => {
                self.wrong(&key, value, "a list of whole numbers above 0");
                Vec::new()
            }
        }
    }

    /// A text that is one of `allowed`, as its place among them; the first when the key is absent
    /// or null, if `allowed` begins with an empty text.
    pub fn choice(&mut self, names: &[&'static str], allowed: &[&str]) -> usize {
        let Some((key, value)) = self.find(names) else {
            return if allowed[0].is_empty() { 0 } else { self.missing(names) };
        };
        let text = value.as_str().unwrap_or_default();
        let at = allowed.iter().position(|one| !one.is_empty() && *one == text);
        at.unwrap_or_else(|| {
            let list: Vec<&str> = allowed.iter().copied().filter(|one| !one.is_empty()).collect();
            self.wrong(&key, value, &list.join(" or "));
            0
        })
    }

    /// Accepts `name` only when it is absent, null, or one of `allowed`, written as JSON.
    pub fn only(&mut self, name: &'static str, allowed: &[&str]) {
        let Some((key, value)) = self.find(&[name]) else { return };
        if !allowed.contains(&value.to_string().as_str()) {
            self.wrong(&key, value, &format!("{} or absent", allowed.join(" or ")));
        }
    }

    /// The value of a key that is there and not null, whatever it is.
    pub fn value(&mut self, name: &'static str) -> Option<&'a Value> {
        self.find(&[name]).map(|(_, value)| value)
    }

    /// Says `otherwise` unless `holds`.
    pub fn rule(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.faults.push(otherwise());
        }
    }

    /// The first thing that is wrong so far.
    pub fn first_fault(&self) -> Option<String> {
        self.faults.first().cloned()
    }

    /// Passes when nothing is wrong and no key is left that nobody asked for.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn settled(&mut self) -> Result<(), Vec<String>> {
        let mut faults = std::mem::take(&mut self.faults);
        for (prefix, map) in &self.levels {
            for (key, value) in map.iter() {
                let followed = prefix.is_empty() && key == "text_config" && value.is_object();
                if !followed {
                    self.unknown(key, value, prefix, &mut faults);
                }
            }
        }
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    fn unknown(&self, path: &str, value: &Value, prefix: &str, faults: &mut Vec<String>) {
        let inside = format!("{path}.");
        match value.as_object() {
            _ if self.understood.contains(path) => {}
            Some(map) if self.understood.iter().any(|key| key.starts_with(&inside)) => {
                for (key, value) in map {
                    self.unknown(&format!("{inside}{key}"), value, prefix, faults);
                }
            }
            _ => faults.push(format!("{prefix}{path} is not understood")),
        }
    }

    /// The first of `names` that is there and not null, with where it is.
    fn find(&mut self, names: &[&'static str]) -> Option<(String, &'a Value)> {
        self.understood.extend(names);
        for (prefix, map) in &self.levels {
            for name in names {
                let mut steps = name.split('.');
                let first = steps.next().and_then(|step| map.get(step));
                let value = first.and_then(|first| steps.try_fold(first, |v, step| v.get(step)));
                if let Some(value) = value.filter(|value| !value.is_null()) {
                    return Some((format!("{prefix}{name}"), value));
                }
            }
        }
        None
    }

    fn number(&mut self, key: &str, value: &Value, least: u64) -> usize {
        match value.as_u64().filter(|number| (least..=SIZE_LIMIT).contains(number)) {
            Some(number) => number as usize,
            None => {
                self.wrong(key, value, &format!("a whole number from {least} to {SIZE_LIMIT}"));
                1
            }
        }
    }

    /// Says that none of `names` is there; 0, for those who need a number.
    fn missing(&mut self, names: &[&str]) -> usize {
        self.faults.push(format!("{} is missing", names.join(" | ")));
        0
    }

    fn wrong(&mut self, key: &str, value: &Value, allowed: &str) {
        self.faults.push(format!("{key} is {value}; it must be {allowed}"));
    }
}

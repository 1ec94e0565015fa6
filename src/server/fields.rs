//! A JSON object, field by field.
//!
//! Each field is taken once, by name and type; an error names its path. A field that is null counts
//! as absent. What nobody has taken is unknown: the caller is told its names.

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of an object that nobody has taken yet.
#[derive(Debug)]
pub struct Fields {
    /// Path of the object; empty for the body itself.
    path: String,
    map: Map<String, Value>,
}

/// What a field can be read as.
pub trait FromJson: Sized {
    /// The type, with its article, for messages.
    const EXPECTED: &'static str;

    /// The value; none when it is something else.
    fn from_json(value: &Value) -> Option<Self>;

    /// The error of a value at `path` that is something else.
    fn wrong(path: String, value: &Value) -> ApiError {
        ApiError::wrong_type(path, Self::EXPECTED, value)
    }
}

impl Fields {
    /// The fields of the body of a request.
    pub fn of_body(map: Map<String, Value>) -> Fields {
        Fields { path: String::new(), map }
    }

    /// The fields of an object at `path`.
    ///
    /// # Errors
    /// When it is not an object.
    pub fn of(path: String, value: Value) -> Result<Fields, ApiError> {
        match value {
            Value::Object(map) => Ok(Fields { path, map }),
            other => Err(ApiError::wrong_type(path, "an object", &other)),
        }
    }

    /// The path of a field.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The value of a field as it is; none when it is absent or null.
    pub fn raw(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// The value of a field; none when it is absent or null.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn take<T: FromJson>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        match T::from_json(&value) {
            Some(read) => Ok(Some(read)),
            None => Err(T::wrong(self.path(name), &value)),
        }
    }

    /// [`Fields::take`], or `default` for what is absent.
    ///
    /// # Errors
    /// As [`Fields::take`].
    pub fn or<T: FromJson>(&mut self, name: &str, default: T) -> Result<T, ApiError> {
        Ok(self.take(name)?.unwrap_or(default))
    }

    /// [`Fields::take`] of what must be there.
    ///
    /// # Errors
    /// As [`Fields::take`], and when it is absent.
    pub fn need<T: FromJson>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::missing(self.path(name)))
    }

    /// The fields of an object in a field; none when it is absent or null.
    ///
    /// # Errors
    /// When it is no object.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        Fields::of(self.path(name), value).map(Some)
    }

    /// The elements of an array in a field, each with its path; none when it is absent or null.
    ///
    /// # Errors
    /// When it is no array.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<(String, Value)>>, ApiError> {
        let path = self.path(name);
        match self.raw(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(
                list.into_iter().enumerate().map(|(i, v)| (format!("{path}[{i}]"), v)).collect(),
            )),
            Some(other) => Err(ApiError::wrong_type(path, "an array", &other)),
        }
    }

    /// Sets a field, for what reads this object next.
    pub fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.to_owned(), value);
    }

    /// Takes fields that are known and change nothing here.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.shift_remove(*name);
        }
    }

    /// Refuses fields that would change the answer and are not served; null, false, an empty
    /// string and an empty list ask for nothing.
    ///
    /// # Errors
    /// The first of them that is there.
    pub fn refuse(&mut self, names: &[(&str, &str)]) -> Result<(), ApiError> {
        for (name, instead) in names {
            match self.raw(name) {
                None | Some(Value::Bool(false)) => {}
                Some(Value::String(text)) if text.is_empty() => {}
                Some(Value::Array(list)) if list.is_empty() => {}
                Some(_) => {
                    let path = self.path(name);
                    let message = format!("{path} is not supported{instead}");
                    return Err(ApiError::unsupported(path, message));
                }
            }
        }
        Ok(())
    }

    /// Refuses numbers that would change the answer and are not served, unless each is the one that
    /// changes nothing.
    ///
    /// # Errors
    /// The first of them that is another.
    pub fn refuse_unless(&mut self, neutral: &[(&str, f64)]) -> Result<(), ApiError> {
        for (name, neutral) in neutral {
            match self.raw(name) {
                Some(value) if value.as_f64() != Some(*neutral) => {
                    let path = self.path(name);
                    let message = format!("{path} is not supported, other than as {neutral}");
                    return Err(ApiError::unsupported(path, message));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The names of what is left.
    pub fn unknown(self) -> Vec<String> {
        self.map.into_iter().map(|(name, _)| name).collect()
    }

    /// What is left, as it is.
    pub fn rest(self) -> Map<String, Value> {
        self.map
    }
}

impl FromJson for bool {
    const EXPECTED: &'static str = "a boolean";
    fn from_json(value: &Value) -> Option<bool> {
        value.as_bool()
    }
}

impl FromJson for String {
    const EXPECTED: &'static str = "a string";
    fn from_json(value: &Value) -> Option<String> {
        value.as_str().map(str::to_owned)
    }
}

impl FromJson for f32 {
    const EXPECTED: &'static str = "a number";
    fn from_json(value: &Value) -> Option<f32> {
        value.as_f64().map(|x| x as f32)
    }
}

impl FromJson for f64 {
    const EXPECTED: &'static str = "a number";
    fn from_json(value: &Value) -> Option<f64> {
        value.as_f64()
    }
}

impl FromJson for i64 {
    const EXPECTED: &'static str = "an integer of 64 bits";
    fn from_json(value: &Value) -> Option<i64> {
        // Some clients write every number with a point.
        let whole = |x: &f64| x.fract() == 0.0 && x.abs() < 9e15;
        value.as_i64().or_else(|| value.as_f64().filter(whole).map(|x| x as i64))
    }
}

impl FromJson for i32 {
    const EXPECTED: &'static str = "an integer of 32 bits";
    fn from_json(value: &Value) -> Option<i32> {
        i64::from_json(value).and_then(|x| i32::try_from(x).ok())
    }
}

impl FromJson for usize {
    const EXPECTED: &'static str = "an integer, 0 or more";
    fn from_json(value: &Value) -> Option<usize> {
        i64::from_json(value).and_then(|x| usize::try_from(x).ok())
    }
}

impl FromJson for u32 {
    const EXPECTED: &'static str = "an integer from 0 to 4294967295";
    fn from_json(value: &Value) -> Option<u32> {
        i64::from_json(value).and_then(|x| u32::try_from(x).ok())
    }
}

impl FromJson for Map<String, Value> {
    const EXPECTED: &'static str = "an object";
    fn from_json(value: &Value) -> Option<Map<String, Value>> {
        value.as_object().cloned()
    }
}

impl FromJson for Vec<u32> {
    const EXPECTED: &'static str = "an array of token ids";
    fn from_json(value: &Value) -> Option<Vec<u32>> {
        value.as_array()?.iter().map(u32::from_json).collect()
    }
    fn wrong(path: String, value: &Value) -> ApiError {
        wrong_element::<u32>(path, value, Self::EXPECTED)
    }
}

impl FromJson for Vec<String> {
    const EXPECTED: &'static str = "an array of strings";
    fn from_json(value: &Value) -> Option<Vec<String>> {
        value.as_array()?.iter().map(String::from_json).collect()
    }
    fn wrong(path: String, value: &Value) -> ApiError {
        wrong_element::<String>(path, value, Self::EXPECTED)
    }
}

/// The error of an array, which is about the first element that is something else.
fn wrong_element<T: FromJson>(path: String, value: &Value, expected: &str) -> ApiError {
    let elements = value.as_array().into_iter().flatten().enumerate();
    match elements.into_iter().find(|(_, element)| T::from_json(element).is_none()) {
        Some((index, element)) => T::wrong(format!("{path}[{index}]"), element),
        None => ApiError::wrong_type(path, expected, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::of(String::new(), value).expect("an object")
    }

    #[test]
    fn an_error_names_the_path_and_the_type() {
        let mut body = fields(json!({"stream_options": {"include_usage": 3}}));
        let mut options = body.object("stream_options").expect("an object").expect("there");
        let error = options.take::<bool>("include_usage").expect_err("a number");
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
        assert!(error.message.contains("expected a boolean, got 3"), "{}", error.message);
        let error = fields(json!({"tokens": [1, -1]})).take::<Vec<u32>>("tokens");
        let error = error.expect_err("a negative id");
        assert_eq!(error.param.as_deref(), Some("tokens[1]"));
        assert!(error.message.ends_with("from 0 to 4294967295, got -1"), "{}", error.message);
        let error = fields(json!({"n": 1.5})).take::<usize>("n").expect_err("a fraction");
        assert_eq!(error.code, "invalid_type");
    }

    #[test]
    fn null_is_absent_and_what_is_left_is_unknown() {
        let mut body = fields(json!({"a": null, "b": 2.0, "c": 1, "functions": false}));
        assert_eq!(body.take::<bool>("a").expect("absent"), None);
        assert_eq!(body.take::<usize>("b").expect("whole"), Some(2));
        assert!(body.refuse(&[("functions", ""), ("audio", "")]).is_ok());
        assert_eq!(body.unknown(), ["c"]);
        let error = fields(json!({"audio": {}})).refuse(&[("audio", "")]).expect_err("there");
        assert_eq!(error.code, "unsupported_parameter");
    }
}

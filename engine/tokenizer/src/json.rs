//! JSON values of a conversation, with numbers kept as Python keeps them.
//!
//! Templates print numbers that clients sent (tool arguments, schemas), and models were
//! trained on what Python prints: an integer stays an integer (longer ones than templates
//! take are refused where they are rendered), a float is a 64-bit float. `serde_json` turns integers beyond 64 bits into floats unless all of
//! the build spells numbers as text, so values are read here. Its reader still checks
//! the syntax and decodes strings.

use indexmap::IndexMap;
use serde::de::IgnoredAny;

/// The same bound as that of `serde_json`.
const DEPTH_MAX: usize = 128;
/// Python refuses to read longer integers.
const DIGITS_MAX: usize = 4300;

/// The members of an object, in the order they were written.
pub type JsonObject = IndexMap<String, Json>;

/// A JSON value.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Json {
    #[default]
    Null,
    Bool(bool),
    Integer(i128),
    /// Decimal digits, with a sign if negative, of an integer beyond 128 bits.
    LongInteger(String),
    Float(f64),
    String(String),
    Array(Vec<Json>),
    Object(JsonObject),
}

impl Json {
    /// Reads one JSON text.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str::<IgnoredAny>(text).map_err(|error| error.to_string())?;
        let mut reader = Reader { text, at: 0 };
        reader.value(0)
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn as_array(&self) -> Option<&[Json]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    pub(crate) fn as_object(&self) -> Option<&JsonObject> {
        match self {
            Self::Object(members) => Some(members),
            _ => None,
        }
    }

    /// A member of an object.
    pub(crate) fn get(&self, key: &str) -> Option<&Json> {
        self.as_object()?.get(key)
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<serde_json::Value> for Json {
    fn from(value: serde_json::Value) -> Self {
        use serde_json::Value;
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(value),
            Value::Number(number) => match number.as_i128() {
                Some(integer) => Self::Integer(integer),
                None => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => Self::String(text),
            Value::Array(items) => Self::Array(items.into_iter().map(Self::from).collect()),
            Value::Object(members) => Self::Object(
                members
                    .into_iter()
                    .map(|(key, value)| (key, Self::from(value)))
                    .collect(),
            ),
        }
    }
}

/// Reads text that is known to be JSON.
struct Reader<'t> {
    text: &'t str,
    at: usize,
}

impl Reader<'_> {
    fn value(&mut self, depth: usize) -> Result<Json, String> {
        if depth > DEPTH_MAX {
            return Err(format!("nested deeper than {DEPTH_MAX} levels"));
        }
        match self.peek() {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => Ok(Json::String(self.string()?)),
            b'n' => self.word(4, Json::Null),
            b't' => self.word(4, Json::Bool(true)),
            b'f' => self.word(5, Json::Bool(false)),
            _ => self.number(),
        }
    }

    /// The next byte that is no blank.
    fn peek(&mut self) -> u8 {
        let rest = &self.text.as_bytes()[self.at..];
        let blank = |byte: &&u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        self.at += rest.iter().take_while(blank).count();
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }

    fn word(&mut self, length: usize, value: Json) -> Result<Json, String> {
        self.at += length;
        Ok(value)
    }

    fn object(&mut self, depth: usize) -> Result<Json, String> {
        let mut members = JsonObject::new();
        self.at += 1;
        while self.peek() != b'}' {
            if self.peek() == b',' {
                self.at += 1;
                self.peek();
            }
            let key = self.string()?;
            self.peek();
            self.at += 1;
            members.insert(key, self.value(depth + 1)?);
        }
        self.at += 1;
        Ok(Json::Object(members))
    }

    fn array(&mut self, depth: usize) -> Result<Json, String> {
        let mut items = Vec::new();
        self.at += 1;
        while self.peek() != b']' {
            if self.peek() == b',' {
                self.at += 1;
            }
            items.push(self.value(depth + 1)?);
        }
        self.at += 1;
        Ok(Json::Array(items))
    }

    fn string(&mut self) -> Result<String, String> {
        let rest = &self.text[self.at..];
        let mut escaped = false;
        let mut escapes = false;
        let end = rest.bytes().enumerate().skip(1).find(|&(_, byte)| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            escapes |= escaped;
            ends
        });
        let end = end.map_or(rest.len(), |(at, _)| at + 1);
        self.at += end;
        if !escapes && end >= 2 {
            return Ok(rest[1..end - 1].to_owned());
        }
        serde_json::from_str(&rest[..end]).map_err(|error| error.to_string())
    }

    fn number(&mut self) -> Result<Json, String> {
        let rest = &self.text[self.at..];
        let length = rest
            .bytes()
            .take_while(|byte| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E'))
            .count();
        let literal = &rest[..length];
        self.at += length;
        if literal
            .bytes()
            .any(|byte| matches!(byte, b'.' | b'e' | b'E'))
        {
            let float: f64 = literal.parse().map_err(|_| "invalid number".to_owned())?;
            return match float.is_finite() {
                true => Ok(Json::Float(float)),
                false => Err("a number is out of range".to_owned()),
            };
        }
        if literal.len() > DIGITS_MAX {
            return Err(format!("an integer has more than {DIGITS_MAX} digits"));
        }
        // The syntax was checked, so only the size can be wrong.
        Ok(literal
            .parse()
            .map_or_else(|_| Json::LongInteger(literal.to_owned()), Json::Integer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_any_length_stay_integers() {
        let text = r#" { "a" : [ 18446744073709551616 , -0, 1.0, 1e3 ], "b":
            340282366920938463463374607431768211456, "a": null } "#;
        let Json::Object(members) = Json::parse(text).unwrap() else {
            panic!("no object");
        };
        assert_eq!(members["a"], Json::Null);
        let long = "340282366920938463463374607431768211456";
        assert_eq!(members["b"], Json::LongInteger(long.to_owned()));
        assert_eq!(members.get_index(0).unwrap().0, "a");
        let parsed = Json::parse("[18446744073709551616, -0, 1.0, 1e3]").unwrap();
        let expect = [
            Json::Integer(18_446_744_073_709_551_616),
            Json::Integer(0),
            Json::Float(1.0),
            Json::Float(1000.0),
        ];
        assert_eq!(parsed, Json::Array(expect.to_vec()));
    }

    #[test]
    fn strings_and_shapes_are_those_of_the_other_reader() {
        for text in [
            r#""""#,
            r#""a\"\\\n\u00e9\ud83d\ude42é🙂""#,
            r#"{"":{"x\\":[[],{},[null,true,false]]}, "y" :-1.5e-3}"#,
            "[ 1 , 2 ]",
            "  7\n",
        ] {
            let expect: serde_json::Value = serde_json::from_str(text).unwrap();
            assert_eq!(Json::parse(text), Ok(Json::from(expect)), "{text}");
        }
    }

    #[test]
    fn what_is_no_json_is_refused() {
        let deep = "[".repeat(200) + &"]".repeat(200);
        let long = "9".repeat(DIGITS_MAX + 1);
        for text in [
            "",
            "{",
            "[1,]",
            "{\"a\":}",
            "01",
            "+1",
            "1.",
            "nul",
            "\"a",
            "\"\n\"",
            "1e999",
            r#""\ud800""#,
            "[] x",
            &deep,
            &long,
        ] {
            assert!(Json::parse(text).is_err(), "{text}");
        }
    }
}

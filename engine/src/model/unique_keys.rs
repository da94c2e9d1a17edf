//! Finds a key that an object of a JSON text has twice.
//!
//! The usual parsers keep one of the two values and say nothing, and which one differs
//! between them. The text is walked once without keeping any value; per object that is
//! open, the keys seen so far are held.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// # Errors
/// The text is no JSON, or an object has a key twice.
pub(super) fn check(text: &str) -> Result<(), serde_json::Error> {
    serde_json::from_str::<Checked>(text).map(|Checked| ())
}

/// Any value without a key that is there twice.
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Walk)
    }
}

struct Walk;

impl<'de> Visitor<'de> for Walk {
    type Value = Checked;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Checked, A::Error> {
        let mut seen = HashSet::new();
        while let Some(Key(key)) = map.next_key()? {
            if seen.contains(&key) {
                return Err(A::Error::custom(format!(
                    "the key `{}` is there twice",
                    key.escape_debug()
                )));
            }
            seen.insert(key);
            map.next_value::<Checked>()?;
        }
        Ok(Checked)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Checked, A::Error> {
        while seq.next_element::<Checked>()?.is_some() {}
        Ok(Checked)
    }

    fn visit_unit<E>(self) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_str<E>(self, _: &str) -> Result<Checked, E> {
        Ok(Checked)
    }
}

/// A key, borrowed from the text where it has no escapes.
struct Key<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn a_key_that_is_there_twice_is_named_at_any_depth() {
        for sound in [
            "{}",
            "[1, -2, 3.5e300, null, true, \"x\"]",
            r#"{"a": {"a": 1}, "b": [{"a": 2}]}"#,
        ] {
            check(sound).unwrap();
        }
        for twice in [
            r#"{"a": 1, "a": 1}"#,
            r#"{"b": [0, {"c": {}, "a": 1, "a": 2}]}"#,
            // The same key in two spellings.
            r#"{"a": 1, "\u0061": 2}"#,
        ] {
            let error = check(twice).unwrap_err().to_string();
            assert!(error.contains("the key `a` is there twice"), "{error}");
        }
        assert!(check("{\"a\": 1").is_err());
    }
}

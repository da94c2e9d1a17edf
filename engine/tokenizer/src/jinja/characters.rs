//! Python's classes of characters and its changes of case.
//!
//! Where Rust's tables and Python's may disagree, the answer is refused by name. New
//! characters of a newer Unicode than Python's are the one thing not told apart.

use std::sync::LazyLock;

use regex::Regex;

use super::error::{Error, Result};

/// `str.isspace`, and what `strip` and `split` take off.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// What `str.splitlines` splits at; `\r\n` is one break.
pub(crate) fn is_line_break(c: char) -> bool {
    matches!(
        c,
        '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

macro_rules! class {
    ($name:ident, $pattern:literal, $doc:literal) => {
        #[doc = $doc]
        pub(crate) fn $name(c: char) -> bool {
            static PATTERN: LazyLock<Regex> =
                LazyLock::new(|| Regex::new($pattern).expect("the pattern is constant"));
            PATTERN.is_match(c.encode_utf8(&mut [0; 4]))
        }
    };
}

class!(is_letter, r"\p{L}", "`str.isalpha`.");
class!(is_decimal, r"\p{Nd}", "`str.isdecimal`.");
class!(is_title, r"\p{Lt}", "A letter in title case, such as `ǅ`.");
class!(is_number, r"\p{N}", "A number by its general category.");
class!(is_ideograph, r"\p{Han}", "Some of these count as numeric.");
class!(
    is_other,
    r"[\p{C}\p{Z}]",
    "Controls, separators, unassigned."
);
class!(is_word, r"[\p{L}\p{N}_]", "`\\w` of Python's `re`.");

/// `str.isprintable`, which is also what `repr` leaves as it is.
pub(crate) fn is_printable(c: char) -> bool {
    c == ' ' || !is_other(c)
}

/// `str.isdigit`.
pub(crate) fn is_digit(c: char) -> Result<bool> {
    if is_number(c) && !is_decimal(c) {
        return Err(Error::unsupported(format!("whether `{c}` is a digit")));
    }
    Ok(is_decimal(c))
}

/// `str.isnumeric`.
pub(crate) fn is_numeric(c: char) -> Result<bool> {
    if is_ideograph(c) && !is_number(c) {
        return Err(Error::unsupported(format!("whether `{c}` is numeric")));
    }
    Ok(is_number(c))
}

/// The character that starts a word in `str.title` and `str.capitalize`.
pub(crate) fn title_of(c: char) -> Result<char> {
    let mut upper = c.to_uppercase();
    let differs = matches!(
        c,
        '\u{1c4}'..='\u{1cc}' | '\u{1f1}'..='\u{1f3}' | '\u{10d0}'..='\u{10ff}'
    );
    match (upper.next(), upper.next()) {
        (Some(single), None) if !differs => Ok(single),
        _ => Err(Error::unsupported(format!("the title case of `{c}`"))),
    }
}

/// Whether `c` belongs to a word in `str.title`.
pub(crate) fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || is_title(c)
}

/// `str.casefold`.
pub(crate) fn casefold(text: &str) -> Result<String> {
    match text.chars().find(|c| !c.is_ascii()) {
        None => Ok(text.to_ascii_lowercase()),
        Some(c) => Err(Error::unsupported(format!("`casefold` of `{c}`"))),
    }
}

/// `str.title` and `str.capitalize`: the first character by `title_of`, the rest lower.
pub(crate) fn capitalize(text: &str) -> Result<String> {
    let Some(first) = text.chars().next() else {
        return Ok(String::new());
    };
    let title = title_of(first)?;
    // The whole text is lowered, so that a final sigma sees what stands before it.
    let lower = text.to_lowercase();
    let first_lower: String = first.to_lowercase().collect();
    match lower.strip_prefix(&first_lower) {
        Some(rest) => Ok(format!("{title}{rest}")),
        None => Err(Error::unsupported(format!("the lower case of `{text}`"))),
    }
}

/// `str.title`.
pub(crate) fn title(text: &str) -> Result<String> {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if c == 'Σ' {
            return Err(Error::unsupported("`title` of `Σ`"));
        }
        if !is_cased(c) {
            out.push(c);
        } else if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.push(title_of(c)?);
        }
        in_word = is_cased(c);
    }
    Ok(out)
}

/// `str.swapcase`.
pub(crate) fn swapcase(text: &str) -> Result<String> {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            'Σ' => return Err(Error::unsupported("`swapcase` of `Σ`")),
            c if c.is_uppercase() => out.extend(c.to_lowercase()),
            c if c.is_lowercase() => out.extend(c.to_uppercase()),
            c => out.push(c),
        }
    }
    Ok(out)
}

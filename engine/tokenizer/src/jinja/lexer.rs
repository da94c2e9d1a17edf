//! A template's source as tokens, with Jinja2's rules for white space.
//!
//! The delimiters and options are those of `transformers`: `trim_blocks` (a tag takes
//! the line break after it), `lstrip_blocks` (a tag takes the blanks before it on its
//! line), no `keep_trailing_newline`.

use std::sync::Arc;

use super::characters::is_space;
use super::numbers;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Text(Arc<str>),
    BlockBegin,
    BlockEnd,
    VariableBegin,
    VariableEnd,
    Name(Arc<str>),
    Str(Arc<str>),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    Eof,
}

/// A token and its line, counted from 1.
#[derive(Clone, Debug)]
pub(super) struct Located {
    pub(super) token: Token,
    pub(super) line: u32,
}

/// Longest first, so that the first match is the right one.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    tokens: Vec<Located>,
}

/// *Errors*: message and line.
pub(super) fn tokens(source: &str) -> Result<Vec<Located>, (String, u32)> {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    let mut lexer = Lexer {
        source: &source,
        at: 0,
        line: 1,
        tokens: Vec::new(),
    };
    lexer.root().map_err(|message| (message, lexer.line))?;
    let line = lexer.line;
    lexer.tokens.push(Located {
        token: Token::Eof,
        line,
    });
    Ok(lexer.tokens)
}

type Lexed = Result<(), String>;

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn advance(&mut self, bytes: usize) {
        let passed = &self.source[self.at..self.at + bytes];
        self.line += passed.bytes().filter(|&byte| byte == b'\n').count() as u32;
        self.at += bytes;
    }

    fn push(&mut self, token: Token) {
        self.tokens.push(Located {
            token,
            line: self.line,
        });
    }

    fn root(&mut self) -> Lexed {
        while !self.rest().is_empty() {
            let rest = self.rest();
            let start = rest.match_indices('{').find_map(|(offset, _)| {
                let delimiter = rest.get(offset..offset + 2)?;
                matches!(delimiter, "{%" | "{{" | "{#").then_some((offset, delimiter))
            });
            let Some((offset, delimiter)) = start else {
                self.text(rest);
                self.advance(rest.len());
                break;
            };
            let after = &rest[offset + 2..];
            let sign = after.chars().next().filter(|c| matches!(c, '-' | '+'));
            self.text(self.before_tag(&rest[..offset], sign, delimiter));
            self.advance(offset + 2 + usize::from(sign.is_some()));
            match delimiter {
                "{#" => self.comment()?,
                "{{" => {
                    self.push(Token::VariableBegin);
                    self.code(false)?;
                }
                _ if self.raw_begins() => self.raw()?,
                _ => {
                    self.push(Token::BlockBegin);
                    self.code(true)?;
                }
            }
        }
        Ok(())
    }

    fn text(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(Token::Text(text.into()));
        }
    }

    /// What is left of the text before a tag.
    fn before_tag<'t>(&self, text: &'t str, sign: Option<char>, delimiter: &str) -> &'t str {
        if sign == Some('-') {
            return text.trim_end_matches(is_space);
        }
        if sign == Some('+') || delimiter == "{{" {
            return text;
        }
        let line_start = text.rfind('\n').map(|at| at + 1);
        // The tag that ended last may have taken its line break with it.
        let starts_line = self.at == 0 || self.source[..self.at].ends_with('\n');
        match line_start.or(starts_line.then_some(0)) {
            Some(start) if text[start..].chars().all(is_space) => &text[..start],
            _ => text,
        }
    }

    /// Passes the end of a tag and what it takes after itself.
    fn after_tag(&mut self, length: usize, strips: bool, trims: bool) {
        let after = &self.rest()[length..];
        let taken = if strips {
            after.len() - after.trim_start_matches(is_space).len()
        } else {
            usize::from(trims && after.starts_with('\n'))
        };
        self.advance(length + taken);
    }

    fn comment(&mut self) -> Lexed {
        let rest = self.rest();
        let Some(end) = rest.find("#}") else {
            return Err("missing end of comment tag".to_owned());
        };
        let sign = rest[..end].chars().next_back();
        self.advance(end);
        self.after_tag(2, sign == Some('-'), sign != Some('+'));
        Ok(())
    }

    fn raw_begins(&self) -> bool {
        let rest = self.rest().trim_start_matches(is_space);
        let Some(rest) = rest.strip_prefix("raw") else {
            return false;
        };
        let rest = rest.trim_start_matches(is_space);
        rest.starts_with("%}") || rest.starts_with("-%}")
    }

    fn raw(&mut self) -> Lexed {
        let end = self.rest().find("%}").unwrap_or_default();
        let strips = self.rest()[..end].ends_with('-');
        self.advance(end);
        self.after_tag(2, strips, false);
        let body = self.rest();
        let mut from = 0;
        while let Some(found) = body[from..].find("{%") {
            let tag = from + found;
            let mut inner = &body[tag + 2..];
            let sign = inner.chars().next().filter(|c| matches!(c, '-' | '+'));
            inner = &inner[usize::from(sign.is_some())..];
            let name = inner.trim_start_matches(is_space);
            let after = name
                .strip_prefix("endraw")
                .map(|after| after.trim_start_matches(is_space));
            let end = after.and_then(|after| {
                let (sign, rest) = match after.as_bytes().first() {
                    Some(b'-') => (Some('-'), &after[1..]),
                    Some(b'+') => (Some('+'), &after[1..]),
                    _ => (None, after),
                };
                rest.starts_with("%}")
                    .then(|| (sign, body.len() - rest.len()))
            });
            if let Some((end_sign, end_at)) = end {
                self.text(self.before_tag(&body[..tag], sign, "{%"));
                self.advance(end_at);
                self.after_tag(2, end_sign == Some('-'), end_sign != Some('+'));
                return Ok(());
            }
            from = tag + 2;
        }
        Err("missing end of raw directive".to_owned())
    }

    /// The inside of `{% %}` or `{{ }}`. Ends are looked for outside of brackets only.
    fn code(&mut self, is_block: bool) -> Lexed {
        let mut open: Vec<char> = Vec::new();
        loop {
            let rest = self.rest();
            let Some(c) = rest.chars().next() else {
                return Err("unexpected end of template inside a tag".to_owned());
            };
            let end = if is_block { "%}" } else { "}}" };
            if open.is_empty() {
                let sign = if rest.starts_with('-') || is_block && rest.starts_with('+') {
                    1
                } else {
                    0
                };
                if rest[sign..].starts_with(end) {
                    self.push(if is_block {
                        Token::BlockEnd
                    } else {
                        Token::VariableEnd
                    });
                    let strips = rest.starts_with('-');
                    self.after_tag(sign + 2, strips, is_block && sign == 0);
                    return Ok(());
                }
            }
            if is_space(c) {
                self.advance(c.len_utf8());
            } else if c.is_ascii_digit() {
                self.number()?;
            } else if c == '_' || c.is_alphanumeric() {
                let name = rest
                    .split(|c: char| c != '_' && !c.is_alphanumeric())
                    .next();
                let name = name.unwrap_or_default();
                if !name.is_ascii() {
                    return Err(format!(
                        "the name `{name}` is not ASCII, which is not supported"
                    ));
                }
                self.push(Token::Name(name.into()));
                self.advance(name.len());
            } else if c == '\'' || c == '"' {
                self.string(c)?;
            } else {
                let operator = OPERATORS.into_iter().find(|text| rest.starts_with(text));
                let Some(operator) = operator else {
                    return Err(format!("unexpected char `{c}`"));
                };
                let closes = match operator {
                    ")" => Some('('),
                    "]" => Some('['),
                    "}" => Some('{'),
                    _ => None,
                };
                if matches!(operator, "(" | "[" | "{") {
                    open.push(c);
                } else if closes.is_some() && open.pop() != closes {
                    return Err(format!("unexpected `{c}`"));
                }
                self.push(Token::Operator(operator));
                self.advance(operator.len());
            }
        }
    }

    fn number(&mut self) -> Lexed {
        let rest = self.rest();
        let bytes = rest.as_bytes();
        let digits = |from: usize| {
            let mut at = from;
            while bytes.get(at).is_some_and(u8::is_ascii_digit)
                || bytes.get(at) == Some(&b'_')
                    && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)
                    && at > from
            {
                at += 1;
            }
            at
        };
        let whole = digits(0);
        let mut end = whole;
        if bytes.get(end) == Some(&b'.') && digits(end + 1) > end + 1 {
            end = digits(end + 1);
        }
        if matches!(bytes.get(end), Some(b'e' | b'E')) {
            let signed = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            let exponent = digits(end + 1 + signed);
            if exponent > end + 1 + signed {
                end = exponent;
            }
        }
        // `a.1.2` is two indexes, not an index by a float.
        let after_dot = matches!(
            self.tokens.last().map(|last| &last.token),
            Some(Token::Operator("."))
        ) && self.source[..self.at].ends_with('.');
        if end > whole && !after_dot {
            let value: f64 = rest[..end]
                .replace('_', "")
                .parse()
                .map_err(|_| format!("bad number `{}`", &rest[..end]))?;
            self.push(Token::Float(value));
            self.advance(end);
            return Ok(());
        }
        let starts = |prefix: &str| {
            rest.get(..2)
                .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
        };
        let radix = [("0x", 16), ("0o", 8), ("0b", 2)]
            .into_iter()
            .find(|(prefix, _)| starts(prefix))
            .map(|(_, radix)| radix);
        let length = match radix {
            Some(radix) => {
                let text = &rest[2..];
                let other = text.find(|c: char| c != '_' && !c.is_digit(radix));
                2 + other.unwrap_or(text.len())
            }
            None if bytes[0] == b'0' => {
                let other = rest.find(|c: char| c != '0' && c != '_');
                other.unwrap_or(rest.len())
            }
            None => whole,
        };
        let text = rest[..length].trim_end_matches('_');
        match numbers::parse_int(text, 0) {
            Ok(Some(value)) => self.push(Token::Int(value)),
            Ok(None) => return Err(format!("bad number `{text}`")),
            Err(error) => return Err(error.message),
        }
        self.advance(text.len());
        Ok(())
    }

    fn string(&mut self, quote: char) -> Lexed {
        let rest = self.rest();
        let mut escaped = false;
        let end = rest[1..].char_indices().find(|&(_, c)| {
            if escaped {
                escaped = false;
                return false;
            }
            escaped = c == '\\';
            c == quote
        });
        let Some((length, _)) = end else {
            return Err(format!(
                "unexpected char `{quote}`: the string does not end"
            ));
        };
        let text = unescape(&rest[1..1 + length])?;
        self.push(Token::Str(text.into()));
        self.advance(length + 2);
        Ok(())
    }
}

/// The escapes of Python's string literals.
fn unescape(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some(escape) = rest.next() else {
            return Err("a string ends in a backslash".to_owned());
        };
        let hex = |rest: &mut std::str::Chars<'_>, digits: usize| {
            let code: String = rest.by_ref().take(digits).collect();
            let value = u32::from_str_radix(&code, 16).ok();
            value
                .filter(|_| code.len() == digits && code.chars().all(|c| c.is_ascii_hexdigit()))
                .and_then(char::from_u32)
                .ok_or_else(|| format!("the escape `\\{escape}{code}` is no character"))
        };
        match escape {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'v' => out.push('\u{b}'),
            '\\' | '\'' | '"' => out.push(escape),
            '\n' => {}
            'x' => out.push(hex(&mut rest, 2)?),
            'u' => out.push(hex(&mut rest, 4)?),
            'U' => out.push(hex(&mut rest, 8)?),
            'N' => return Err("the escape `\\N` is not supported".to_owned()),
            '0'..='7' => {
                let mut code = escape.to_digit(8).unwrap_or_default();
                for _ in 0..2 {
                    let Some(digit) = rest.clone().next().and_then(|c| c.to_digit(8)) else {
                        break;
                    };
                    rest.next();
                    code = code * 8 + digit;
                }
                out.extend(char::from_u32(code));
            }
            c if c.is_ascii() => {
                out.push('\\');
                out.push(c);
            }
            // Python reads this as a backslash and the character's own escape.
            c => return Err(format!("the escape `\\{c}` is not supported")),
        }
    }
    Ok(out)
}

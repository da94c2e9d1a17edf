//! Stop strings that spell out special tokens, which are no part of the text.

use super::*;

const END: u32 = 256;

fn rules(stop: &[&str], include_stop: bool, min_tokens: u32) -> StopRules {
    StopRules {
        stop: stop.iter().map(|text| (*text).to_owned()).collect(),
        include_stop,
        min_tokens,
    }
}

/// The text of tokens (`|` is the end token), how many of them count, and what ended it.
fn made(tokens: &str, rules: &StopRules) -> (String, u32, Option<String>) {
    let mut choice = ChoiceText::new(&byte_tokenizer(), &[u32::from(b'x')], rules);
    let id = |byte: u8| match byte {
        b'|' => END,
        byte => u32::from(byte),
    };
    let mut text = String::new();
    for byte in tokens.bytes() {
        text.push_str(&choice.push(vec![sampled(id(byte))]).text);
    }
    text.push_str(&choice.finish().text);
    let stop = choice.stopped().map(|stopped| stopped.stop_string.clone());
    (text, choice.tokens(), stop)
}

fn check(tokens: &str, rules: &StopRules, text: &str, count: u32, stop: Option<&str>) {
    let expected = (text.to_owned(), count, stop.map(str::to_owned));
    assert_eq!(made(tokens, rules), expected, "{tokens} under {rules:?}");
}

#[test]
fn a_special_tokens_spelling_stops_at_the_token() {
    check("ab|cd", &rules(&["</s>"], false, 0), "ab", 3, Some("</s>"));
    check(
        "ab|cd",
        &rules(&["</s>"], true, 0),
        "ab</s>",
        3,
        Some("</s>"),
    );
    check("|", &rules(&["zz", "</s>"], false, 0), "", 1, Some("</s>"));
    // Other special tokens and the same text made of other tokens.
    check(
        "ab</s>cd",
        &rules(&["</s>"], false, 0),
        "ab",
        6,
        Some("</s>"),
    );
    check("abcd", &rules(&["</s>"], false, 0), "abcd", 4, None);
}

#[test]
fn it_is_looked_for_only_after_min_tokens() {
    check("a|b|c", &rules(&["</s>"], false, 2), "ab", 4, Some("</s>"));
    check("a|b|c", &rules(&["</s>"], false, 1), "a", 2, Some("</s>"));
    check("a|bc", &rules(&["</s>"], false, 2), "abc", 4, None);
}

#[test]
fn it_may_stand_between_other_text() {
    let between = rules(&["b</s>c"], false, 0);
    check("ab|cd", &between, "a", 4, Some("b</s>c"));
    check(
        "ab|cd",
        &rules(&["b</s>c"], true, 0),
        "ab</s>c",
        4,
        Some("b</s>c"),
    );
    // Held back, and given out again.
    check("ab|bd", &between, "abbd", 5, None);
    check("ab|", &between, "ab", 3, None);
    check("abc", &between, "abc", 3, None);
    check("b||c", &between, "bc", 4, None);
    check("bb|c", &between, "b", 4, Some("b</s>c"));
    check(
        "|a||b",
        &rules(&["</s></s>b"], false, 0),
        "a",
        5,
        Some("</s></s>b"),
    );
}

#[test]
fn other_stop_strings_do_not_see_it() {
    check("ma|yb", &rules(&["ay"], false, 0), "m", 4, Some("ay"));
    check(
        "ma|yb",
        &rules(&["</s>y", "ayb"], false, 0),
        "ma",
        4,
        Some("</s>y"),
    );
}

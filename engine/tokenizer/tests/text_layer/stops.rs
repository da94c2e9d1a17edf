//! Stop strings, cut at any border.

use baton_tokenizer::{StopMatcher, StopStep};
use proptest::prelude::*;

const WALK: [&str; 6] = ["mo", "nda", "y", "tue", "sd", "ay!"];

/// Pushes the pieces; returns all text given out and the stop that ended it.
fn run(pieces: &[&str], stops: &[&str], include: bool) -> (String, Option<usize>) {
    let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
    let mut matcher = StopMatcher::new(stops.clone(), include);
    let mut text = String::new();
    for piece in pieces {
        let StopStep { emit, matched } = matcher.push(piece);
        text += &emit;
        if !include {
            let leaked = stops
                .iter()
                .any(|stop| !stop.is_empty() && text.contains(stop));
            assert!(!leaked, "{text}");
        }
        if matched.is_some() {
            let after = matcher.push("more");
            assert_eq!((after.emit.as_str(), after.matched), ("", matched));
            assert_eq!(matcher.finish(), "");
            return (text, matched);
        }
    }
    text += &matcher.finish();
    (text, None)
}

#[test]
fn text_ends_before_the_first_character_of_the_match() {
    for (stops, expect, stop) in [
        (&["daytues"][..], "mon", Some(0)),
        (&["a"], "mond", Some(0)),
        (&["day!"], "mondaytues", Some(0)),
        (&["yt", "tues"], "monda", Some(0)),
        (&["tues", "yt"], "monda", Some(1)),
        (&["mondaytuesday!"], "", Some(0)),
        (&["xyz"], "mondaytuesday!", None),
        (&["!", "zzz", "sday", "day?"], "mondaytue", Some(2)),
        (&["day!!"], "mondaytuesday!", None),
        (&["", "tt"], "mondaytuesday!", None),
        (&[], "mondaytuesday!", None),
    ] {
        assert_eq!(
            run(&WALK, stops, false),
            (expect.to_owned(), stop),
            "{stops:?}"
        );
    }
}

#[test]
fn the_stop_string_is_part_of_the_text_where_asked() {
    for (stops, expect) in [
        (&["daytues"][..], "mondaytues"),
        (&["a"], "monda"),
        (&["yt", "tues"], "mondayt"),
        (&["day!"], "mondaytuesday!"),
    ] {
        assert_eq!(run(&WALK, stops, true).0, expect);
    }
}

#[test]
fn only_text_that_may_become_a_stop_is_held_back() {
    let mut matcher = StopMatcher::new(vec!["daytues".into()], false);
    let emitted: Vec<String> = WALK[..3]
        .iter()
        .map(|text| matcher.push(text).emit)
        .collect();
    assert_eq!(emitted, ["mo", "n", ""]);
    assert_eq!(matcher.push("x").emit, "dayx");
    assert_eq!(matcher.push("dda").emit, "d");
    assert_eq!(matcher.finish(), "da");
}

#[test]
fn overlapping_beginnings_are_not_missed() {
    assert_eq!(run(&["aa", "ab"], &["aab"], false).0, "a");
    assert_eq!(run(&["abab", "abac"], &["abac"], false).0, "abab");
    // Two end at the same character: the one that began first decides.
    assert_eq!(
        run(&["xab", "c"], &["c", "abc"], false),
        ("x".into(), Some(1))
    );
    assert_eq!(
        run(&["ab", "c"], &["abcd", "bc"], false),
        ("a".into(), Some(1))
    );
    assert_eq!(run(&["é🙂", "é!"], &["🙂é"], false).0, "é");
}

/// The definition, without any streaming: the first end of any stop string.
fn naive(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
    for end in 0..=text.len() {
        let found = (0..stops.len())
            .filter(|&i| {
                !stops[i].is_empty() && text.as_bytes()[..end].ends_with(stops[i].as_bytes())
            })
            .rev()
            .max_by_key(|&i| stops[i].len());
        if let Some(index) = found {
            let keep = if include {
                end
            } else {
                end - stops[index].len()
            };
            return (text[..keep].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #[test]
    fn equals_a_whole_text_search_however_the_text_is_cut(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{0,5}", 0..4),
        include: bool,
    ) {
        let text = pieces.concat();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let names: Vec<&str> = stops.iter().map(String::as_str).collect();
        prop_assert_eq!(run(&pieces, &names, include), naive(&text, &stops, include));
    }
}

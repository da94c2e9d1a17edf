//! Cuts a text's tokens into windows that score every token once.

use baton_proto::TokenId;

/// Tokens that are read from position 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// With the token that starts a sequence, where the model wants one.
    pub tokens: Vec<TokenId>,
    /// First position whose logits are scored, against the token behind it; the last
    /// scored one is the last but one.
    pub first_scored: usize,
}

/// Text tokens before the first scored one of a window.
pub fn context(window: usize, bos: Option<TokenId>) -> usize {
    (window - usize::from(bos.is_some())) / 2
}

/// Tokens that a text must have for `scored` of them to be scored.
pub fn tokens_needed(window: usize, scored: usize, bos: Option<TokenId>) -> usize {
    context(window, bos) + scored
}

/// Windows of at most `window` tokens (at least 4) that score exactly `scored` of
/// `text`'s; `None` where it is too short.
pub fn cut(
    text: &[TokenId],
    window: usize,
    scored: usize,
    bos: Option<TokenId>,
) -> Option<Vec<Window>> {
    let text = text.get(..tokens_needed(window, scored, bos))?;
    let context = context(window, bos);
    let of_text = window - usize::from(bos.is_some());
    let windows = (0..scored)
        .step_by(of_text - context)
        .map(|start| Window {
            tokens: bos
                .into_iter()
                .chain(text[start..text.len().min(start + of_text)].iter().copied())
                .collect(),
            first_scored: usize::from(bos.is_some()) + context - 1,
        })
        .collect();
    Some(windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_behind_the_first_context_is_scored_once() {
        for (window, scored, bos) in [
            (8, 40, None),
            (8, 41, Some(999)),
            (9, 3, None),
            (4, 17, Some(999)),
            (512, 2048, Some(999)),
        ] {
            let text: Vec<TokenId> = (0..4000).collect();
            let windows = cut(&text, window, scored, bos).unwrap();
            let context = context(window, bos);
            let mut next = context as u32;
            for cut in &windows {
                assert!(cut.tokens.len() <= window);
                assert_eq!(bos.is_some(), cut.tokens[0] == 999);
                for position in cut.first_scored..cut.tokens.len() - 1 {
                    assert_eq!(cut.tokens[position + 1], next);
                    next += 1;
                    assert!(position + 1 >= context, "too little before it");
                }
            }
            assert_eq!(next as usize, context + scored, "{window} {scored}");
        }
    }

    #[test]
    fn a_text_that_is_too_short_is_none() {
        let text: Vec<TokenId> = (0..15).collect();
        assert_eq!(tokens_needed(8, 12, None), 16);
        assert_eq!(cut(&text, 8, 12, None), None);
        assert!(cut(&text, 8, 11, None).is_some());
    }
}

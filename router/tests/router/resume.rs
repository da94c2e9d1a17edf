//! Resuming a stream: what is refused and by which name, and who is fenced off.
//!
//! That a resumed stream is the undisturbed one, whatever was sampled, is shown with
//! real engines by the whole-cluster tests.

use std::time::Duration;

use baton_membership::Role;
use baton_proto::{ErrorKind, v1};
use baton_router::{CallContext, Tenant};
use futures::StreamExt as _;

use crate::cluster::{Cluster, Outcome, alphabet, call, request, sampling, until};
use crate::workers::Act;

const KEY: &str = "a key that is at least thirty-two bytes";

fn keyed(config: &mut baton_router::RouterConfig) {
    config.resume_keys = vec![KEY.to_owned()];
}

/// The request with what a client has of its stream.
fn resuming(
    asked: &v1::GenerateRequest,
    token: &[u8],
    choices: Vec<v1::ResumeChoice>,
) -> v1::GenerateRequest {
    v1::GenerateRequest {
        resume: Some(v1::Resume {
            resume_token: token.to_vec(),
            choices,
        }),
        ..asked.clone()
    }
}

fn counted(tokens: u32, bytes: u64) -> v1::ResumeChoice {
    v1::ResumeChoice {
        tokens_received: Some(tokens),
        text_bytes_received: bytes,
        ..v1::ResumeChoice::default()
    }
}

fn ids(ids: &[u32], bytes: u64) -> v1::ResumeChoice {
    v1::ResumeChoice {
        token_ids: ids.to_vec(),
        text_bytes_received: bytes,
        ..v1::ResumeChoice::default()
    }
}

/// The tokens and the text of a resumed stream whose first index is `first`.
fn rest(outcome: &mut Outcome, events: Vec<v1::GenerateEvent>, first: u32) {
    for mut event in events {
        if let Some(v1::generate_event::Event::Tokens(tokens)) = &mut event.event {
            tokens.first_index -= first;
        }
        outcome.take(event);
    }
}

async fn resume(cluster: &Cluster, request: v1::GenerateRequest, first: u32) -> Outcome {
    let mut outcome = Outcome::default();
    let context = CallContext::new(Tenant::new("default"));
    match cluster.frontend.generate(request, context).await {
        Err(error) => outcome.error = Some(error),
        Ok(mut stream) => {
            while let Some(event) = stream.next().await {
                match event {
                    Ok(event) => rest(&mut outcome, vec![event], first),
                    Err(error) => outcome.error = Some(error),
                }
            }
        }
    }
    outcome
}

#[tokio::test]
async fn another_router_with_the_key_goes_on_where_the_client_is() {
    let mut first = Cluster::start(keyed).await;
    let d = first.worker("d1", Role::Decode).await;
    let mut second = Cluster::start(keyed).await;
    second.list(&d).await;
    let asked = request(40, 20);
    let whole = first.run(asked.clone()).await;
    let accepted = whole.accepted.clone().unwrap();
    let token = &accepted.resume_token;
    for had in [0, 1, 7, 19, 20] {
        let known = &whole.ids[0][..had as usize];
        for choice in [counted(had, u64::from(had)), ids(known, u64::from(had))] {
            let asked = resuming(&asked, token, vec![choice]);
            let mut outcome = resume(&second, asked, had).await;
            outcome.ids.resize(1, Vec::new());
            assert_eq!(outcome.ids[0], whole.ids[0][had as usize..], "{outcome:?}");
            assert_eq!(outcome.text[0], whole.text[0][had as usize..]);
            assert_eq!(outcome.usage().completion_tokens, 20);
            let again = outcome.accepted.unwrap();
            assert_eq!(again.request_id, accepted.request_id);
            assert_eq!(
                (again.seed, again.created),
                (accepted.seed, accepted.created)
            );
        }
    }
    // Text may be behind or, at the end, ahead of the tokens.
    let behind = resuming(&asked, token, vec![ids(&whole.ids[0][..9], 4)]);
    let outcome = resume(&second, behind, 9).await;
    assert_eq!(outcome.text[0], whole.text[0][4..]);
    assert_eq!(outcome.ids[0], whole.ids[0][9..]);
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_choice_that_had_matched_its_stop_string_is_over_at_once() {
    let mut cluster = Cluster::start(keyed).await;
    let _d = cluster.worker("d1", Role::Decode).await;
    let asked = v1::GenerateRequest {
        stop: vec!["hij".into()],
        ..request(40, 20)
    };
    let whole = cluster.run(asked.clone()).await;
    assert_eq!(whole.text, [alphabet(0, 7)]);
    let token = &whole.accepted.as_ref().unwrap().resume_token;
    // Everything was there but the end of it; half of the stop string; nothing of it.
    for had in [10, 9, 3] {
        let bytes = had.min(7) as u64;
        let choice = ids(&whole.ids[0][..had], bytes);
        let asked = resuming(&asked, token, vec![choice]);
        let outcome = resume(&cluster, asked, had as u32).await;
        assert_eq!(outcome.text[0], whole.text[0][bytes as usize..]);
        assert_eq!(outcome.finished[0].stop_string.as_deref(), Some("hij"));
        assert_eq!(outcome.finished[0].output_tokens, 10);
        assert_eq!(outcome.usage().completion_tokens, 10);
    }
    cluster.stop().await;
}

#[tokio::test]
async fn what_does_not_fit_the_stream_is_refused_by_name() {
    let mut cluster = Cluster::start(keyed).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let mut stranger = Cluster::start(|_| {}).await;
    stranger.list(&d).await;
    let asked = sampling(request(40, 20), |s| s.stop_token_ids = vec![7]);
    let whole = cluster.run(asked.clone()).await;
    let token = whole.accepted.as_ref().unwrap().resume_token.clone();
    let known = whole.ids[0].clone();
    let good = || resuming(&asked, &token, vec![counted(3, 3)]);
    let with = |change: &dyn Fn(&mut v1::GenerateRequest)| {
        let mut request = good();
        change(&mut request);
        request
    };
    let has = |choice: v1::ResumeChoice| resuming(&asked, &token, vec![choice]);
    let mut damaged = token.clone();
    damaged[20] ^= 1;
    let text = |text: String| Some(v1::generate_request::Prompt::Text(text));
    let changed = |change: fn(&mut v1::SamplingParams)| sampling(good(), change);
    for (request, reason, field) in [
        (
            resuming(&asked, &damaged, vec![counted(3, 3)]),
            "RESUME_TOKEN_INVALID",
            "resume.resume_token",
        ),
        (
            with(&|r| r.prompt = text("x".repeat(41))),
            "RESUME_PROMPT_CHANGED",
            "prompt",
        ),
        (
            with(&|r| r.model = "other".into()),
            "RESUME_MODEL_CHANGED",
            "model",
        ),
        (
            changed(|s| s.seed = Some(1)),
            "RESUME_PARAMETER_CHANGED",
            "seed",
        ),
        (
            changed(|s| s.temperature = Some(0.5)),
            "RESUME_PARAMETER_CHANGED",
            "temperature",
        ),
        (
            changed(|s| s.max_tokens = Some(21)),
            "RESUME_PARAMETER_CHANGED",
            "max_tokens",
        ),
        (
            with(&|r| r.stop = vec!["a".into()]),
            "RESUME_PARAMETER_CHANGED",
            "stop",
        ),
        (
            resuming(&asked, &token, vec![]),
            "RESUME_MISMATCH",
            "resume.choices",
        ),
        (
            has(counted(21, 0)),
            "RESUME_MISMATCH",
            "resume.choices[0].tokens_received",
        ),
        (
            has(ids(&[1_000_000], 1)),
            "RESUME_MISMATCH",
            "resume.choices[0].token_ids",
        ),
        (
            has(ids(&[7, known[1]], 1)),
            "RESUME_MISMATCH",
            "resume.choices[0].token_ids",
        ),
        (
            has(v1::ResumeChoice {
                tokens_received: Some(2),
                ..ids(&known[..3], 3)
            }),
            "RESUME_MISMATCH",
            "resume.choices[0].tokens_received",
        ),
        // Found while the stream is made again.
        (
            has(counted(3, 5)),
            "RESUME_MISMATCH",
            "resume.choices[0].text_bytes_received",
        ),
        (
            has(counted(20, 25)),
            "RESUME_MISMATCH",
            "resume.choices[0].text_bytes_received",
        ),
        // The last token is drawn again, and is another one.
        (
            has(ids(&[known[0], known[0]], 2)),
            "RESUME_MISMATCH",
            "resume.choices[0].token_ids",
        ),
    ] {
        let outcome = resume(&cluster, request, 3).await;
        let error = outcome.failed();
        assert_eq!(
            (error.kind, error.reason.as_str(), error.field.as_str()),
            (ErrorKind::Invalid, reason, field),
            "{error:?}"
        );
        assert!(outcome.completed.is_none() && outcome.finished.is_empty());
    }
    let other_key = call(&stranger.frontend, good()).await;
    assert_eq!(other_key.failed().reason, "RESUME_TOKEN_INVALID");
    assert_eq!(cluster.metric("baton_token_conflicts_total"), 0.0);
    cluster.stop().await;
    stranger.stop().await;
}

#[tokio::test]
async fn the_older_attempt_ends_with_its_reason_wherever_it_runs() {
    let mut first = Cluster::start(keyed).await;
    let d = first.worker("d1", Role::Decode).await;
    let mut second = Cluster::start(keyed).await;
    second.list(&d).await;
    d.script.set(Act::Slowly(Duration::from_millis(20)));
    let asked = request(40, 1000);
    let context = || CallContext::new(Tenant::new("default"));
    // Resumed at its own router, then at another one.
    for other in [&first, &second] {
        let mut older = first
            .frontend
            .generate(asked.clone(), context())
            .await
            .unwrap();
        let mut outcome = Outcome::default();
        while outcome.ids.first().map_or(0, Vec::len) < 3 {
            outcome.take(older.next().await.unwrap().unwrap());
        }
        let token = outcome.accepted.as_ref().unwrap().resume_token.clone();
        let choice = ids(&outcome.ids[0], outcome.text[0].len() as u64);
        let mut newer = other
            .frontend
            .generate(resuming(&asked, &token, vec![choice]), context())
            .await
            .unwrap();
        let error = loop {
            match older.next().await.expect("a stream ends with a word") {
                Ok(event) => outcome.take(event),
                Err(error) => break error,
            }
        };
        assert_eq!(
            (error.kind, error.reason.as_str()),
            (ErrorKind::Fenced, "RESUMED_ELSEWHERE")
        );
        assert!(older.next().await.is_none() && outcome.completed.is_none());
        // The newer one goes on.
        newer.next().await.unwrap().unwrap();
        newer.next().await.unwrap().unwrap();
        drop(newer);
        until("nothing runs", || {
            d.script.running.load(std::sync::atomic::Ordering::Relaxed) == 0
        })
        .await;
    }
    first.stop().await;
    second.stop().await;
}

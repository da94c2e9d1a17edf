//! Transcripts of the request machine: `>` lines go in, the lines below each must
//! come out. Tokens end a choice with `!` (stop) or `.` (length).

use std::time::Duration;

use baton_proto::Epoch;
use baton_proto::sampling::SampledToken;

use super::token_log::Drawn;
use super::*;

struct Scene {
    machine: Request,
    now: Duration,
    session: u32,
    attempt: u32,
}

fn key(id: &str) -> WorkerKey {
    WorkerKey::new(id.into(), Epoch(1))
}

fn error(kind: &str) -> Error {
    let kind = match kind {
        "invalid" => ErrorKind::Invalid,
        "overloaded" => ErrorKind::Overloaded,
        "draining" => return baton_proto::worker_info::leaving(&"w".into()),
        "unavailable" => ErrorKind::Unavailable,
        "fenced" => ErrorKind::Fenced,
        "deadline" => ErrorKind::Deadline,
        "internal" => ErrorKind::Internal,
        "between" => {
            return Error::new(ErrorKind::Unavailable, "boom").with_reason("HANDOFF_PEER_LOST");
        }
        "resumed" => return baton_proto::live_requests::resumed_elsewhere(),
        other => panic!("no kind {other}"),
    };
    Error::new(kind, "boom")
}

fn token(text: &str) -> Drawn {
    let (id, finish) = match text.strip_suffix('!') {
        Some(id) => (id, Some(FinishReason::Stop)),
        None => match text.strip_suffix('.') {
            Some(id) => (id, Some(FinishReason::Length)),
            None => (text, None),
        },
    };
    let token = SampledToken {
        id: id.parse().unwrap(),
        logprob: None,
    };
    (token, finish)
}

fn tokens(words: &[&str]) -> Vec<Drawn> {
    words.iter().map(|word| token(word)).collect()
}

fn number(word: &str) -> u32 {
    word.parse()
        .unwrap_or_else(|_| panic!("`{word}` is no number"))
}

impl Scene {
    fn new(n: u32, max_tokens: u32) -> Self {
        let ms = Duration::from_millis;
        let spec = Spec {
            n,
            max_tokens,
            attempts_max: 3,
            exact: true,
            timeouts: Timeouts {
                total: ms(100_000),
                pool: ms(500),
                pool_of_stream: ms(300),
                gap: ms(1_500),
                silence: ms(1_000),
                answer: ms(1_000),
                queue: ms(20_000),
                prefill: ms(30_000),
                handoff: ms(10_000),
                stall: ms(15_000),
            },
        };
        Self {
            machine: Request::new(spec),
            now: Duration::ZERO,
            session: 0,
            attempt: 0,
        }
    }

    fn event(&mut self, line: &str) -> Event {
        let words: Vec<&str> = line.split_whitespace().collect();
        let decode = |session: u32, event| Event::Decode { session, event };
        match words.as_slice() {
            ["begin"] => Event::Begin,
            ["gone"] => Event::ClientGone,
            ["at", ms] => {
                self.now = Duration::from_millis(u64::from(number(ms)));
                Event::Tick
            }
            ["placed", "nobody"] => {
                Event::Placed(Err(error("unavailable").with_reason("NO_DECODE_WORKER")))
            }
            ["placed", "tried"] => {
                Event::Placed(Err(error("unavailable").with_reason("DECODE_WORKERS_TRIED")))
            }
            ["placed", "nowhere"] => Event::Placed(Err(error("unavailable"))),
            ["placed", "local", d] => Event::Placed(Ok(Placement {
                decode: key(d),
                prefill: None,
            })),
            ["placed", p, d] => Event::Placed(Ok(Placement {
                decode: key(d),
                prefill: Some(key(p)),
            })),
            ["lost", worker] => Event::WorkerLost {
                worker: key(worker),
                error: error("unavailable"),
            },
            ["stop", choice, at] => Event::StopMatched {
                choice: number(choice),
                output_tokens: number(at),
            },
            [d, rest @ ..] if d.starts_with('d') => {
                let session = d.strip_prefix("d#").map_or(self.session, number);
                decode(session, Self::decode_event(rest))
            }
            [p, rest @ ..] if p.starts_with('p') => Event::Prefill {
                attempt: p.strip_prefix("p#").map_or(self.attempt, number),
                event: Self::prefill_event(rest),
            },
            _ => panic!("no event `{line}`"),
        }
    }

    fn decode_event(words: &[&str]) -> DecodeEvent {
        match words {
            ["queued"] => DecodeEvent::Queued,
            ["reserved", attempt] => DecodeEvent::Reserved {
                attempt: number(attempt),
                lane: Box::default(),
            },
            ["started", cached] => DecodeEvent::Started {
                cached_tokens: number(cached),
            },
            ["committed", first @ ..] => DecodeEvent::Committed {
                first: tokens(first),
            },
            ["aborted", attempt] => DecodeEvent::Aborted {
                attempt: number(attempt),
                error: error("unavailable"),
            },
            ["tokens", at, run @ ..] => {
                let (choice, first_index) = at.split_once('@').unwrap();
                DecodeEvent::Tokens {
                    choice: number(choice),
                    first_index: number(first_index),
                    tokens: tokens(run),
                }
            }
            ["end", choice, reason, count] => DecodeEvent::Finished {
                choice: number(choice),
                reason: match *reason {
                    "stop" => FinishReason::Stop,
                    "length" => FinishReason::Length,
                    _ => FinishReason::Cancelled,
                },
                output_tokens: number(count),
            },
            ["leaving"] => DecodeEvent::Leaving,
            ["ended"] => DecodeEvent::Ended { error: None },
            ["ended", kind] => DecodeEvent::Ended {
                error: Some(error(kind)),
            },
            ["failed", kind] => DecodeEvent::Failed { error: error(kind) },
            _ => panic!("no decode event {words:?}"),
        }
    }

    fn prefill_event(words: &[&str]) -> PrefillEvent {
        match words {
            ["accepted"] => PrefillEvent::Accepted,
            ["started", cached] => PrefillEvent::Started {
                cached_tokens: number(cached),
            },
            ["first", first @ ..] => PrefillEvent::First {
                tokens: tokens(first),
            },
            ["handed"] => PrefillEvent::HandedOff { committed: true },
            ["empty-handed"] => PrefillEvent::HandedOff { committed: false },
            ["failed", kind] => PrefillEvent::Failed { error: error(kind) },
            _ => panic!("no prefill event {words:?}"),
        }
    }

    fn show(&mut self, action: Action) -> String {
        let lists = |forced: &[Vec<TokenId>]| match forced {
            [] => String::new(),
            lists => format!(" forced {lists:?}"),
        };
        let names = |what: &str, keys: &[WorkerKey]| match keys {
            [] => String::new(),
            keys => {
                let ids: Vec<&str> = keys.iter().map(|key| key.id.as_str()).collect();
                format!(" {what} {}", ids.join(","))
            }
        };
        match action {
            Action::Place(query) => {
                let mut excluded = query.exclude_decode.clone();
                excluded.extend(query.exclude_prefill.clone());
                let kept: Vec<WorkerKey> = query.keep_decode.into_iter().collect();
                let resume = match query.resumed_tokens {
                    0 => String::new(),
                    tokens => format!(" resume {tokens}"),
                };
                let split = if query.split_allowed {
                    ""
                } else {
                    " local-only"
                };
                format!(
                    "place{}{}{resume}{split}",
                    names("keep", &kept),
                    names("not", &excluded)
                )
            }
            Action::StartDecode {
                worker,
                local,
                attempt,
                forced,
            } => {
                self.session = attempt;
                let path = if local { "local" } else { "receive" };
                format!("start {} {path} #{attempt}{}", worker.id, lists(&forced))
            }
            Action::Reticket { attempt } => format!("reticket #{attempt}"),
            Action::PrefillLocally { attempt, forced } => {
                format!("prefill-locally #{attempt}{}", lists(&forced))
            }
            Action::CancelChoice { choice } => format!("cancel-choice {choice}"),
            Action::StartPrefill {
                worker,
                attempt,
                forced,
                ..
            } => {
                self.attempt = attempt;
                format!("prefill {} #{attempt}{}", worker.id, lists(&forced))
            }
            Action::DropPrefill => "drop-prefill".to_owned(),
            Action::AwaitPrefillEnd => "await-prefill-end".to_owned(),
            Action::CancelDecode => "cancel-decode".to_owned(),
            Action::AwaitDecodeEnd => "await-end".to_owned(),
            Action::SetDecodeAside => "set-aside".to_owned(),
            Action::TakeDecodeBack => "take-back".to_owned(),
            Action::DropDecodeAside => "drop-aside".to_owned(),
            Action::CountMove => "moved".to_owned(),
            Action::Emit { choice, run } => {
                let ids: Vec<String> = run.tokens.iter().map(|t| t.id.to_string()).collect();
                format!("emit {choice}@{} {}", run.first_index, ids.join(" "))
            }
            Action::FinishChoice { choice, reason } => {
                format!("finish {choice} {reason:?}").to_lowercase()
            }
            Action::Complete => "complete".to_owned(),
            Action::CountConflict => "conflict".to_owned(),
            Action::CountRetry {
                mid_stream,
                migration,
            } => format!(
                "retry{}{}",
                if mid_stream { " mid-stream" } else { "" },
                if migration { " migration" } else { "" }
            ),
            Action::Fail(error) => {
                format!("fail {:?} {}: {}", error.kind, error.reason, error.message)
            }
        }
    }
}

/// Plays a transcript; returns the machine as it stands at the end.
fn check(n: u32, max_tokens: u32, transcript: &str) -> Request {
    play(Scene::new(n, max_tokens), transcript)
}

fn play(mut scene: Scene, transcript: &str) -> Request {
    let mut seen = String::new();
    let mut wanted = String::new();
    for line in transcript.lines().map(str::trim) {
        if line.is_empty() {
            continue;
        }
        wanted.push_str(line);
        wanted.push('\n');
        if let Some(input) = line.strip_prefix("> ") {
            seen.push_str(line);
            seen.push('\n');
            if let Some(ms) = input.strip_prefix("foretold ") {
                let wait = Duration::from_millis(u64::from(number(ms)));
                scene.machine.foretold(Some(wait));
                continue;
            }
            let event = scene.event(input);
            for action in scene.machine.handle(scene.now, event) {
                seen.push_str(&scene.show(action));
                seen.push('\n');
            }
        }
    }
    assert_eq!(seen, wanted, "\nseen:\n{seen}\nwanted:\n{wanted}");
    scene.machine
}

/// The usual beginning of a split request, up to P's acceptance.
const SPLIT: &str = "
    > begin
    place
    > placed p1 d1
    start d1 receive #1
    > d reserved 1
    prefill p1 #1
    > p accepted
";

fn after_split(rest: &str) -> String {
    format!("{SPLIT}{rest}")
}

#[test]
fn a_split_request_sends_each_token_once_whoever_has_it_first() {
    let machine = check(
        1,
        4,
        &after_split(
            "
            > p started 16
            > p first 10
            emit 0@0 10
            > p handed
            drop-prefill
            > d committed 10
            > d tokens 0@0 10 11
            emit 0@1 11
            > d tokens 0@2 12
            emit 0@2 12
            > d tokens 0@3 13.
            emit 0@3 13
            finish 0 length
            complete
            await-end
            > d end 0 length 4
            > d ended
            ",
        ),
    );
    assert_eq!(machine.cached_tokens(), Some(16));
}

#[test]
fn the_decode_worker_may_be_faster_with_the_first_token() {
    check(
        1,
        8,
        &after_split(
            "
            > d committed 10
            emit 0@0 10
            > d tokens 0@0 10 11
            emit 0@1 11
            > p first 10
            > p handed
            drop-prefill
            > d tokens 0@2 12!
            emit 0@2 12
            finish 0 stop
            complete
            await-end
            ",
        ),
    );
}

#[test]
fn a_local_request_calls_no_prefill_worker() {
    check(
        1,
        8,
        "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d queued
        > d started 0
        > d tokens 0@0 10
        emit 0@0 10
        > d tokens 0@1 11
        emit 0@1 11
        > d end 0 stop 2
        finish 0 stop
        complete
        await-end
        ",
    );
}

#[test]
fn a_full_decode_worker_is_passed_over_before_any_prefill() {
    check(
        1,
        8,
        "
        > begin
        place
        > placed p1 d1
        start d1 receive #1
        > d failed overloaded
        cancel-decode
        retry
        place not d1
        > placed p1 d2
        start d2 receive #2
        > d#1 reserved 1
        > d reserved 2
        prefill p1 #2
        ",
    );
}

#[test]
fn when_all_are_full_the_client_hears_that_and_when_to_come_back() {
    check(
        1,
        8,
        "
        > begin
        place
        > placed p1 d1
        start d1 receive #1
        > d failed overloaded
        cancel-decode
        retry
        place not d1
        > placed nowhere
        fail Overloaded OVERLOADED: decode worker `d1`: boom
        ",
    );
}

#[test]
fn what_every_worker_would_refuse_is_not_tried_elsewhere() {
    check(
        1,
        8,
        "
        > begin
        place
        > placed p1 d1
        start d1 receive #1
        > d failed invalid
        cancel-decode
        fail Invalid INVALID_ARGUMENT: boom
        ",
    );
}

#[test]
fn prefill_worker_dies_before_its_first_token() {
    check(
        1,
        8,
        &after_split(
            "
            > p failed unavailable
            drop-prefill
            retry
            place keep d1 not p1
            > placed p2 d1
            reticket #2
            > d reserved 2
            prefill p2 #2
            > p#1 first 99
            > p accepted
            > p first 10
            emit 0@0 10
            > p handed
            drop-prefill
            > d committed 10
            > d tokens 0@0 10 11!
            emit 0@1 11
            finish 0 stop
            complete
            await-end
            ",
        ),
    );
}

#[test]
fn prefill_worker_dies_after_its_first_token_and_the_next_one_repeats_it() {
    check(
        1,
        8,
        &after_split(
            "
            > p first 10
            emit 0@0 10
            > p failed unavailable
            drop-prefill
            retry mid-stream
            place keep d1 not p1 resume 1
            > placed p2 d1
            reticket #2
            > d reserved 2
            prefill p2 #2
            > p accepted
            > p first 10
            > d committed 10
            > d tokens 0@0 10 11
            emit 0@1 11
            ",
        ),
    );
}

#[test]
fn prefill_worker_dies_after_its_commit_and_nobody_notices() {
    check(
        1,
        8,
        &after_split(
            "
            > p first 10
            emit 0@0 10
            > d committed 10
            > p failed unavailable
            drop-prefill
            > d tokens 0@0 10 11!
            emit 0@1 11
            finish 0 stop
            complete
            await-end
            ",
        ),
    );
}

#[test]
fn a_commit_that_overtakes_the_reticket_wins() {
    check(
        1,
        8,
        &after_split(
            "
            > p first 10
            emit 0@0 10
            > p failed unavailable
            drop-prefill
            retry mid-stream
            place keep d1 not p1 resume 1
            > placed p2 d1
            reticket #2
            > d committed 10
            > d tokens 0@0 10 11!
            emit 0@1 11
            finish 0 stop
            complete
            await-end
            ",
        ),
    );
}

#[test]
fn without_another_prefill_worker_the_reservation_is_filled_locally() {
    check(
        1,
        8,
        &after_split(
            "
            > p first 10
            emit 0@0 10
            > d aborted 1
            drop-prefill
            retry mid-stream
            place keep d1 not p1 resume 1
            > placed local d1
            prefill-locally #2 forced [[10]]
            > d aborted 1
            > d started 0
            > d tokens 0@1 11!
            emit 0@1 11
            finish 0 stop
            complete
            await-end
            ",
        ),
    );
}

#[test]
fn decode_worker_dies_mid_stream_and_the_next_one_is_forced_along() {
    check(
        1,
        8,
        &after_split(
            "
            > p first 10
            emit 0@0 10
            > d committed 10
            > p handed
            drop-prefill
            > d tokens 0@0 10 11 12
            emit 0@1 11 12
            > d failed unavailable
            cancel-decode
            retry mid-stream migration
            place not d1 resume 3
            > placed p1 d2
            start d2 receive #2 forced [[10, 11, 12]]
            > d#1 tokens 0@3 99
            > d reserved 2
            prefill p1 #2 forced [[10, 11, 12]]
            > p accepted
            > p first 13
            emit 0@3 13
            > p handed
            drop-prefill
            > d committed 13
            > d tokens 0@3 13 14!
            emit 0@4 14
            finish 0 stop
            complete
            await-end
            ",
        ),
    );
}

/// A split request that decodes; its last token is a second old.
const DECODING: &str = "
    > p first 10
    emit 0@0 10
    > d committed 10
    > p handed
    drop-prefill
    > at 1000
    > d tokens 0@0 10 11
    emit 0@1 11
";

#[test]
fn a_gap_after_a_death_is_bounded_by_what_was_foretold() {
    let died = "
        > at 1400
        > foretold 700
        > d failed unavailable
        cancel-decode
        retry mid-stream migration
        place not d1 resume 2
        > placed local d2
        start d2 local #2 forced [[10, 11]]
        > d started 0
    ";
    // From the last token on: the bound, and what computing takes.
    let ended = after_split(DECODING) + died;
    let ended = ended
        + "> at 3199\n> at 3200\n"
        + "fail Unavailable STREAM_STALLED: no token for 2200 ms since decode worker `d1`: boom; "
        + "computing it again was foretold to take 700 ms\ncancel-decode\n";
    check(1, 8, &ended);
    // A token in time, and gaps are again nobody's business but the stage's.
    let went_on = after_split(DECODING) + died;
    let went_on = went_on
        + "> at 3199
        > d tokens 0@2 12
        emit 0@2 12
        > at 9000
        ";
    check(1, 8, &went_on);
    // A stream that stood for long, for whatever reason, is not blamed on a death: that is
    // noticed within a second.
    let late = after_split(DECODING) + &died.replace("1400", "8000");
    check(
        1,
        8,
        &(late + "> at 9199\n> d tokens 0@2 12\nemit 0@2 12\n"),
    );
}

/// The prefill worker dies after the first token: the client waits for the second one.
#[test]
fn a_gap_after_the_first_token_is_bounded_too() {
    let transcript = after_split(
        "
        > p first 10
        emit 0@0 10
        > foretold 500
        > p failed unavailable
        drop-prefill
        retry mid-stream
        place keep d1 not p1 resume 1
        > placed p2 d1
        reticket #2
        > d reserved 2
        prefill p2 #2
        > p accepted
        > at 1999
        > at 2000
        fail Unavailable STREAM_STALLED: no token for 2000 ms since prefill worker `p1`: boom; computing it again was foretold to take 500 ms
        drop-prefill
        cancel-decode
        ",
    );
    check(1, 8, &transcript);
}

#[test]
fn decode_worker_dies_while_prefill_runs() {
    check(
        1,
        8,
        &after_split(
            "
            > lost d1
            drop-prefill
            cancel-decode
            retry
            place not d1
            > placed p1 d2
            start d2 receive #2
            > p#1 first 10
            ",
        ),
    );
}

#[test]
fn a_worker_lost_elsewhere_is_no_news() {
    check(
        1,
        8,
        &after_split(
            "
            > lost d9
            > lost p9
            > lost p1
            drop-prefill
            retry
            place keep d1 not p1
            ",
        ),
    );
}

#[test]
fn three_failures_end_the_request_with_the_last_ones_words() {
    check(
        1,
        8,
        &after_split(
            "
            > p failed internal
            drop-prefill
            retry
            place keep d1 not p1
            > placed p2 d1
            reticket #2
            > d reserved 2
            prefill p2 #2
            > p accepted
            > p failed internal
            drop-prefill
            retry
            place keep d1 not p1,p2
            > placed local d1
            prefill-locally #3
            > d started 0
            > d ended internal
            cancel-decode
            fail Internal INTERNAL: decode worker `d1`: boom
            ",
        ),
    );
}

#[test]
fn two_choices_interleave_and_each_is_sent_in_order() {
    check(
        2,
        4,
        &after_split(
            "
            > p first 10 20
            emit 0@0 10
            emit 1@0 20
            > d committed 10 20
            > d tokens 1@0 20 21
            emit 1@1 21
            > d tokens 0@0 10
            > d tokens 0@1 11!
            emit 0@1 11
            finish 0 stop
            > d tokens 1@2 22 23.
            emit 1@2 22 23
            finish 1 length
            complete
            await-prefill-end
            await-end
            ",
        ),
    );
}

#[test]
fn two_choices_migrate_locally_and_an_ended_one_gives_its_last_token_up() {
    check(
        2,
        8,
        "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d started 0
        > d tokens 0@0 10 11!
        emit 0@0 10 11
        finish 0 stop
        > d tokens 1@0 20
        emit 1@0 20
        > d failed unavailable
        cancel-decode
        retry mid-stream migration
        place not d1 resume 2 local-only
        > placed local d2
        start d2 local #2 forced [[10], [20]]
        > d started 0
        > d tokens 0@1 11!
        cancel-choice 0
        > d tokens 1@1 21!
        emit 1@1 21
        finish 1 stop
        complete
        await-end
        ",
    );
}

#[test]
fn duplicates_are_dropped_and_gaps_are_held() {
    check(
        1,
        8,
        "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d tokens 0@1 11 12
        > d end 0 length 4
        > d tokens 0@0 10 11
        emit 0@0 10 11 12
        > d tokens 0@0 10 11 12
        > d tokens 0@3 13
        emit 0@3 13
        finish 0 length
        complete
        await-end
        ",
    );
}

#[test]
fn two_sources_that_disagree_are_an_internal_error() {
    check(
        1,
        8,
        &after_split(
            "
            > p first 10
            emit 0@0 10
            > d committed 11
            conflict
            fail Internal INTERNAL: choice 0 index 0: one worker drew token 10, another 11
            drop-prefill
            cancel-decode
            ",
        ),
    );
}

#[test]
fn a_worker_that_passes_max_tokens_or_ends_too_early_is_an_internal_error() {
    let begin = "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d tokens 0@0 10 11
        emit 0@0 10 11
        ";
    check(
        1,
        4,
        &format!(
            "{begin}
            > d tokens 0@4 14
            conflict
            fail Internal INTERNAL: choice 0: a worker reported token index 4, max_tokens is 4
            cancel-decode
            "
        ),
    );
    check(
        1,
        4,
        &format!(
            "{begin}
            > d end 0 stop 1
            conflict
            fail Internal INTERNAL: choice 0: a worker reported its end after 1 tokens, 2 were sent
            cancel-decode
            "
        ),
    );
    check(
        1,
        4,
        &format!(
            "{begin}
            > d tokens 1@0 10
            fail Internal INTERNAL: choice 1 is not one of 1
            cancel-decode
            "
        ),
    );
}

#[test]
fn an_end_without_all_choices_is_a_failure_of_the_worker() {
    check(
        1,
        8,
        "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d tokens 0@0 10
        emit 0@0 10
        > d ended
        cancel-decode
        retry mid-stream migration
        place not d1 resume 1
        > placed nowhere
        fail Internal INTERNAL: decode worker `d1`: ended before every choice had ended
        ",
    );
}

#[test]
fn a_choice_that_a_worker_cancels_by_itself_goes_on_elsewhere() {
    check(
        1,
        8,
        "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d tokens 0@0 10
        emit 0@0 10
        > d end 0 cancelled 1
        cancel-decode
        retry mid-stream migration
        place not d1 resume 1
        ",
    );
}

#[test]
fn a_cancel_in_any_state_lets_go_of_what_is_held() {
    check(
        1,
        8,
        "> begin\nplace\n> placed local d1\nstart d1 local #1\n> gone\ncancel-decode",
    );
    check(
        1,
        8,
        "
        > begin
        place
        > placed p1 d1
        start d1 receive #1
        > d queued
        > gone
        cancel-decode
        > d reserved 1
        ",
    );
    check(
        1,
        8,
        &after_split("> gone\ndrop-prefill\ncancel-decode\n> p first 10"),
    );
    check(
        1,
        8,
        &after_split("> p first 10\nemit 0@0 10\n> gone\ndrop-prefill\ncancel-decode"),
    );
    check(
        1,
        8,
        &after_split(
            "
            > d committed 10
            emit 0@0 10
            > p handed
            drop-prefill
            > gone
            cancel-decode
            > d tokens 0@1 11
            > gone
            ",
        ),
    );
}

#[test]
fn a_stop_string_ends_a_choice_and_its_worker_hears_of_it() {
    let machine = check(
        1,
        8,
        &after_split(
            "
            > d committed 10
            emit 0@0 10
            > p handed
            drop-prefill
            > d tokens 0@0 10 11 12 13
            emit 0@1 11 12 13
            > stop 0 3
            cancel-choice 0
            finish 0 stop
            complete
            await-end
            > d tokens 0@4 14
            > d end 0 cancelled 5
            ",
        ),
    );
    assert_eq!(machine.output_tokens(0), 3);
}

#[test]
fn a_stop_string_in_the_first_token_waits_for_a_worker_that_knows_the_choice() {
    check(
        2,
        8,
        &after_split(
            "
            > p first 10 20
            emit 0@0 10
            emit 1@0 20
            > stop 0 1
            finish 0 stop
            > p handed
            drop-prefill
            > d committed 10 20
            cancel-choice 0
            > d tokens 0@1 11
            > d tokens 1@1 21!
            emit 1@1 21
            finish 1 stop
            complete
            await-end
            ",
        ),
    );
}

#[test]
fn all_choices_ending_with_the_first_token_need_no_handoff() {
    check(
        2,
        1,
        &after_split(
            "
            > p first 10. 20.
            emit 0@0 10
            emit 1@0 20
            finish 0 length
            finish 1 length
            complete
            await-prefill-end
            cancel-decode
            > p empty-handed
            > d aborted 1
            ",
        ),
    );
}

#[test]
fn a_prefill_worker_that_hands_nothing_over_has_failed() {
    check(
        1,
        8,
        &after_split(
            "
            > p first 10
            emit 0@0 10
            > p empty-handed
            drop-prefill
            retry mid-stream
            place keep d1 not p1 resume 1
            ",
        ),
    );
}

#[test]
fn every_wait_ends() {
    // No answer of D.
    check(
        1,
        8,
        "
        > begin
        place
        > placed p1 d1
        start d1 receive #1
        > at 999
        > at 1000
        cancel-decode
        retry
        place not d1
        > placed nowhere
        fail Unavailable RESERVE_TIMEOUT: decode worker `d1`: gave no answer for 1000 ms
        ",
    );
    // In D's queue: long, then overloaded.
    check(
        1,
        8,
        "
        > begin
        place
        > placed p1 d1
        start d1 receive #1
        > d queued
        > at 19000
        > d queued
        > at 20000
        cancel-decode
        retry
        place not d1
        > placed nowhere
        fail Overloaded QUEUE_TIMEOUT: decode worker `d1`: kept the request in its queue for 20000 ms
        ",
    );
    // P accepted, then nothing of it: its queue, then its computation.
    check(
        1,
        8,
        &after_split("> at 19999\n> at 20000\ndrop-prefill\nretry\nplace keep d1 not p1"),
    );
    check(
        1,
        8,
        &after_split(
            "> p started 0\n> at 29999\n> at 30000\ndrop-prefill\nretry\nplace keep d1 not p1",
        ),
    );
    // A handoff that stands still, counted from the first token on.
    check(
        1,
        8,
        &after_split(
            "
            > at 15000
            > p first 10
            emit 0@0 10
            > at 24999
            > at 25000
            drop-prefill
            retry mid-stream
            place keep d1 not p1 resume 1
            ",
        ),
    );
    // A decoding request that stalls.
    check(
        1,
        8,
        &after_split(
            "
            > d committed 10
            emit 0@0 10
            > at 14999
            > d tokens 0@1 11
            emit 0@1 11
            > at 29998
            > at 29999
            drop-prefill
            cancel-decode
            retry mid-stream migration
            place not d1 resume 2
            ",
        ),
    );
}

#[test]
fn the_worker_says_how_a_choice_of_full_length_ended() {
    // The last token may be an end token; only the worker knows.
    let begin = "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d tokens 0@0 10 11
        emit 0@0 10 11
        ";
    check(
        1,
        2,
        &format!("{begin}\n> d end 0 stop 2\nfinish 0 stop\ncomplete\nawait-end"),
    );
    // If it dies before it says so, the next one draws the last token again.
    check(
        1,
        2,
        &format!(
            "{begin}
            > d failed unavailable
            cancel-decode
            retry mid-stream migration
            place not d1 resume 2
            > placed local d2
            start d2 local #2 forced [[10]]
            > d tokens 0@1 11!
            finish 0 stop
            complete
            await-end
            "
        ),
    );
}

#[test]
fn a_workers_own_deadline_is_tried_elsewhere_and_the_requests_is_not() {
    check(
        1,
        8,
        &after_split("> p failed deadline\ndrop-prefill\nretry\nplace keep d1 not p1"),
    );
    check(
        1,
        8,
        &after_split(
            "
            > p started 0
            > at 99990
            drop-prefill
            fail Deadline DEADLINE_EXCEEDED: the request's time of 100000 ms ended while computing the prompt
            cancel-decode
            ",
        ),
    );
}

#[test]
fn the_deadline_names_what_it_interrupted() {
    check(
        1,
        8,
        &after_split(
            "
            > p started 0
            > at 100000
            fail Deadline DEADLINE_EXCEEDED: the request's time of 100000 ms ended while computing the prompt
            drop-prefill
            cancel-decode
            > at 100001
            ",
        ),
    );
}

#[test]
fn a_broken_lane_is_put_to_the_worker_that_turns_out_dead() {
    // P loses its receiver; the receiver falls silent a moment later: P is not at fault.
    let transcript = SPLIT.to_owned()
        + "
        > p failed between
        drop-prefill
        retry
        place keep d1 not p1
        > placed p2 d1
        reticket #2
        > lost d1
        cancel-decode
        retry
        place not d1
        > placed p1 d2
        start d2 receive #3
        > d reserved 3
        prefill p1 #3
        ";
    let machine = check(1, 8, &transcript);
    assert_eq!(machine.failures, 1, "one death, charged once");
}

#[test]
fn while_no_decode_worker_is_there_a_request_waits() {
    let machine = check(
        1,
        8,
        "
        > begin
        place
        > placed nobody
        > at 100
        > at 200
        place
        > placed nobody
        > at 400
        place
        > placed local d1
        start d1 local #1
        ",
    );
    assert_eq!(machine.failures, 0);
    check(
        1,
        8,
        "
        > begin
        place
        > placed nobody
        > at 200
        place
        > placed nobody
        > at 400
        place
        > placed nobody
        > at 600
        place
        > placed nobody
        fail Unavailable NO_DECODE_WORKER: boom
        ",
    );
}

/// The only decode worker dies before the first token. The router may see it in its list
/// for a moment more.
#[test]
fn what_nobody_has_seen_a_token_of_waits_for_another_life_of_its_worker() {
    let machine = check(
        1,
        8,
        "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d started 0
        > lost d1
        cancel-decode
        retry
        place not d1
        > placed tried
        > at 200
        place not d1
        > placed nobody
        > at 400
        place
        > placed local d1
        start d1 local #2
        ",
    );
    assert_eq!(machine.failures, 1, "a death is charged, the wait is not");
    let last = "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d failed overloaded
        cancel-decode
        retry
        place not d1
        > placed tried
        fail Overloaded OVERLOADED: decode worker `d1`: boom
        ";
    check(1, 8, last);
}

/// The only decode worker of a stream is cut off for a moment.
#[test]
fn a_stream_waits_for_its_only_worker_as_long_as_its_gap_may_be() {
    let broken = DECODING.to_owned()
        + "
        > d failed unavailable
        cancel-decode
        retry mid-stream migration
        place not d1 resume 2
        > placed tried
        > at 1200
        place not d1 resume 2
        > placed nobody
        ";
    let back = broken.clone()
        + "
        > at 1400
        place resume 2
        > placed p1 d1
        start d1 receive #2 forced [[10, 11]]
        ";
    let machine = check(1, 8, &after_split(&back));
    assert_eq!(machine.failures, 1, "a death is charged, the wait is not");
    let gone = broken
        + "
        > at 1400
        place resume 2
        > placed nobody
        fail Unavailable UNAVAILABLE: decode worker `d1`: boom
        ";
    check(1, 8, &after_split(&gone));
}

#[test]
fn a_decode_worker_that_nobody_reaches_is_left() {
    let transcript = SPLIT.to_owned()
        + "
        > p failed between
        drop-prefill
        retry
        place keep d1 not p1
        > placed p2 d1
        reticket #2
        > d reserved 2
        prefill p2 #2
        > p accepted
        > p failed between
        drop-prefill
        cancel-decode
        retry
        place not d1
        ";
    let machine = check(1, 8, &transcript);
    assert_eq!(machine.failures, 1);
}

#[test]
fn a_request_that_was_resumed_elsewhere_is_not_placed_again() {
    let machine = check(
        1,
        8,
        "
        > begin
        place
        > placed local d1
        start d1 local #1
        > d started 0
        > d tokens 0@0 5 6
        emit 0@0 5 6
        > d ended resumed
        cancel-decode
        fail Fenced RESUMED_ELSEWHERE: the client resumed this request on another connection
        ",
    );
    assert_eq!(machine.stage(), Stage::Finished);
}

fn resumed(n: u32, max_tokens: u32, ids: &[&[TokenId]]) -> Scene {
    let mut scene = Scene::new(n, max_tokens);
    for (choice, ids) in ids.iter().enumerate() {
        scene.machine.take_over(choice as u32, ids.to_vec());
    }
    scene
}

#[test]
fn what_a_client_has_is_forced_but_for_its_last_token() {
    play(
        resumed(1, 8, &[&[5, 6, 7]]),
        "
        > begin
        place resume 3
        > placed p1 d1
        start d1 receive #1 forced [[5, 6]]
        > d reserved 1
        prefill p1 #1 forced [[5, 6]]
        > p accepted
        > p started 4
        > p first 7
        > d committed 7
        > d tokens 0@3 8
        emit 0@3 8
        > d failed unavailable
        drop-prefill
        cancel-decode
        retry mid-stream migration
        place not d1 resume 4
        > placed local d2
        start d2 local #2 forced [[5, 6, 7, 8]]
        ",
    );
}

#[test]
fn a_choice_that_ended_with_the_clients_last_token_ends_again() {
    play(
        resumed(2, 8, &[&[5, 6], &[]]),
        "
        > begin
        place resume 2 local-only
        > placed local d1
        start d1 local #1 forced [[5], []]
        > d started 0
        > d tokens 0@1 6
        > d tokens 1@0 9
        emit 1@0 9
        > d end 0 stop 2
        finish 0 stop
        ",
    );
}

#[test]
fn a_last_token_that_was_never_sent_is_the_clients_mistake() {
    play(
        resumed(1, 8, &[&[5, 6]]),
        "
        > begin
        place resume 2
        > placed local d1
        start d1 local #1 forced [[5]]
        > d started 0
        > d tokens 0@1 7
        fail Invalid RESUME_MISMATCH: choice 0 index 1: the client claims token 6, 7 was drawn
        cancel-decode
        ",
    );
}

/// A stream that decodes at d1, with three tokens sent.
const RUNNING: &str = "
    > p first 10
    emit 0@0 10
    > p handed
    drop-prefill
    > d committed 10
    > d tokens 0@1 11 12
    emit 0@1 11 12
";

fn while_running(rest: &str) -> String {
    after_split(&format!("{RUNNING}{rest}"))
}

#[test]
fn a_worker_that_goes_decodes_on_until_another_one_runs() {
    check(
        1,
        9,
        &while_running(
            "
            > d leaving
            set-aside
            place not d1 resume 3
            > placed p1 d2
            start d2 receive #2 forced [[10, 11, 12]]
            > d#1 tokens 0@3 13
            emit 0@3 13
            > d reserved 2
            prefill p1 #2 forced [[10, 11, 12]]
            > p accepted
            > d#1 leaving
            > d#1 tokens 0@4 14
            emit 0@4 14
            > p first 13
            > p handed
            drop-prefill
            > d committed 13
            drop-aside
            moved
            > d tokens 0@4 14 15
            emit 0@5 15
            > d#1 tokens 0@5 99
            > d end 0 stop 6
            finish 0 stop
            complete
            await-end
            ",
        ),
    );
}

#[test]
fn a_stream_that_ends_while_it_moves_has_ended() {
    check(
        1,
        4,
        &while_running(
            "
            > d leaving
            set-aside
            place not d1 resume 3
            > placed p1 d2
            start d2 receive #2 forced [[10, 11, 12]]
            > d#1 tokens 0@3 13.
            emit 0@3 13
            finish 0 length
            complete
            drop-aside
            cancel-decode
            ",
        ),
    );
}

#[test]
fn a_stream_that_nobody_takes_stays_and_moves_later() {
    check(
        1,
        9,
        &while_running(
            "
            > d leaving
            set-aside
            place not d1 resume 3
            > placed p1 d2
            start d2 receive #2 forced [[10, 11, 12]]
            > d failed overloaded
            cancel-decode
            retry mid-stream
            place not d1,d2 resume 3
            > placed nowhere
            take-back
            > d#1 tokens 0@3 13
            emit 0@3 13
            > d#1 leaving
            set-aside
            place not d1 resume 4
            > placed p1 d2
            start d2 receive #3 forced [[10, 11, 12, 13]]
            > d#1 ended draining
            drop-aside
            > d reserved 3
            prefill p1 #3 forced [[10, 11, 12, 13]]
            > p first 14
            emit 0@4 14
            > d committed 14
            > gone
            drop-prefill
            cancel-decode
            ",
        ),
    );
}

#[test]
fn leaving_in_order_is_no_failure_of_a_worker() {
    // Three failures end a request; none of these is one.
    check(
        1,
        9,
        &after_split(
            "
            > p failed draining
            drop-prefill
            retry
            place keep d1 not p1
            > placed p2 d1
            reticket #2
            > d reserved 2
            prefill p2 #2
            > p accepted
            > d leaving
            drop-prefill
            cancel-decode
            retry
            place not d1,p1
            > placed p2 d2
            start d2 receive #3
            > d reserved 3
            prefill p2 #3
            > p first 10
            emit 0@0 10
            > d committed 10
            > d ended draining
            drop-prefill
            cancel-decode
            retry mid-stream migration
            place not d1,d2,p1 resume 1
            > placed p2 d3
            start d3 receive #4 forced [[10]]
            > d failed internal
            cancel-decode
            retry mid-stream
            place not d1,d2,d3,p1 resume 1
            > placed nowhere
            fail Internal INTERNAL: decode worker `d3`: boom
            ",
        ),
    );
}

/// Two workers of other arithmetic may draw other tokens: one at a time.
#[test]
fn without_exactness_a_worker_that_goes_is_let_go_first() {
    let mut scene = Scene::new(1, 9);
    scene.machine.spec.exact = false;
    play(
        scene,
        &while_running(
            "
            > d leaving
            cancel-decode
            retry mid-stream migration
            place not d1 resume 3
            > placed p1 d2
            start d2 receive #2 forced [[10, 11, 12]]
            > gone
            cancel-decode
            ",
        ),
    );
}

//! One look at a cluster as lines of text. Whatever a router sends stays within its line.

use baton_observability::one_line::one_line;
use baton_router::view::{BlockView, WorkerView};
use console::{Style, measure_text_width, pad_str, style, truncate_str};

use super::Look;

/// Characters of the bar of KV blocks.
const BAR: u64 = 10;
/// Digits of an epoch that are shown; two lives of a worker differ in the first ones.
const EPOCH_DIGITS: usize = 8;

const HEADINGS: [&str; 12] = [
    "WORKER",
    "EPOCH",
    "ROLE",
    "STATE",
    "RUN",
    "WAIT",
    "PREFILL",
    "KV BLOCKS",
    "HANDOFF/S",
    "HIT",
    "PREEMPT",
    "ADDRESS",
];
/// Columns of numbers stand to the right.
const NUMBERS: std::ops::RangeInclusive<usize> = 4..=6;

/// The look as lines of at most `width` characters. Rates are those since `last`; `trouble` is
/// why there is no newer look.
pub fn lines(
    url: &str,
    look: &Look,
    last: Option<&Look>,
    width: usize,
    trouble: Option<&str>,
) -> Vec<String> {
    let mut lines = head(url, look, last);
    if let Some(trouble) = trouble {
        let age = look.at.elapsed().as_secs();
        lines.push(format!(
            "{} ({age} s ago is the last look)",
            style(one_line(trouble)).red()
        ));
    }
    lines.push(String::new());
    if look.view.workers.is_empty() {
        lines.push("no worker is listed".to_owned());
    } else {
        table(look, last, &mut lines);
    }
    if width < usize::MAX {
        for line in &mut lines {
            *line = truncate_str(line, width, "").into_owned();
        }
    }
    lines
}

fn head(url: &str, look: &Look, last: Option<&Look>) -> Vec<String> {
    let router = &look.view.router;
    let state = if router.ready {
        style("ready".to_owned()).green()
    } else {
        style(format!("not ready: {}", one_line(&router.reason))).red()
    };
    let mut first = format!("{}  {url}  {state}", style("baton").bold());
    if router.membership_stale {
        let stale = "the list of workers is stale";
        first.push_str(&format!("  {}", style(stale).yellow()));
    }
    let mut second = format!(
        "requests {} in flight, {} waiting with {} prompt tokens",
        router.requests_in_flight, router.requests_waiting, router.prompt_tokens_waiting
    );
    let tokens = rate(look, last, |look| look.view.router.generation_tokens_total);
    let prompt = rate(look, last, |look| look.view.router.prompt_tokens_total);
    if let (Some(tokens), Some(prompt)) = (tokens, prompt) {
        second.push_str(&format!(
            "   tokens/s {tokens:.0} out, {prompt:.0} of prompts in"
        ));
    }
    vec![first, second]
}

/// How fast a count grows.
fn rate(look: &Look, last: Option<&Look>, count: impl Fn(&Look) -> u64) -> Option<f64> {
    let last = last?;
    let seconds = look.at.saturating_duration_since(last.at).as_secs_f64();
    // A count that shrank belongs to a router that was restarted.
    let grown = count(look).checked_sub(count(last))?;
    (seconds > 0.0).then(|| grown as f64 / seconds)
}

fn table(look: &Look, last: Option<&Look>, lines: &mut Vec<String>) {
    let mut workers: Vec<&WorkerView> = look.view.workers.iter().collect();
    workers.sort_by_key(|worker| (&worker.role, &worker.id, &worker.epoch));
    let rows: Vec<[String; 12]> = workers.iter().map(|w| row(w, look, last)).collect();
    let widths: Vec<usize> = (0..HEADINGS.len())
        .map(|column| {
            let cells = rows.iter().map(|row| measure_text_width(&row[column]));
            cells.fold(HEADINGS[column].len(), usize::max)
        })
        .collect();
    let line = |cells: &[String]| {
        let mut line = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let side = if NUMBERS.contains(&column) {
                console::Alignment::Right
            } else {
                console::Alignment::Left
            };
            if column > 0 {
                line.push_str("  ");
            }
            line.push_str(&pad_str(cell, widths[column], side, None));
        }
        line.trim_end().to_owned()
    };
    let headings = HEADINGS.map(str::to_owned);
    lines.push(style(line(&headings)).bold().to_string());
    for (worker, row) in workers.iter().zip(&rows) {
        lines.push(line(row));
        if !worker.reason.is_empty() {
            lines.push(format!("    {}", style(one_line(&worker.reason)).dim()));
        }
    }
}

fn row(worker: &WorkerView, look: &Look, last: Option<&Look>) -> [String; 12] {
    let handoffs = rate(look, last, |look| {
        let known = look.view.workers.iter();
        let mut same = known.filter(|w| w.id == worker.id && w.epoch == worker.epoch);
        same.next().map_or(u64::MAX, |worker| worker.handoffs_total)
    });
    let epoch: String = one_line(&worker.epoch).chars().take(EPOCH_DIGITS).collect();
    let unknown = || "-".to_owned();
    let share = |part: u64, whole: u64| match whole {
        0 => unknown(),
        _ => format!("{} %", part * 100 / whole),
    };
    [
        one_line(&worker.id).into_owned(),
        epoch,
        one_line(&worker.role).into_owned(),
        state_style(&worker.state)
            .apply_to(one_line(&worker.state))
            .to_string(),
        worker.requests_running.to_string(),
        worker.requests_waiting.to_string(),
        worker.prefill_tokens_waiting.to_string(),
        bar(&worker.blocks),
        handoffs.map_or_else(unknown, |rate| format!("{rate:.1}")),
        share(
            worker.prefix_hits_tokens_total,
            worker.prefix_queries_tokens_total,
        ),
        worker.preemptions_total.to_string(),
        one_line(&worker.control).into_owned(),
    ]
}

fn state_style(state: &str) -> Style {
    match state {
        "ready" => Style::new().green(),
        "lost" | "refused" => Style::new().red(),
        _ => Style::new().yellow(),
    }
}

/// `[##++......]  34 % of 2048`: in use, kept for prompts to come, free.
fn bar(blocks: &BlockView) -> String {
    if blocks.total == 0 {
        return "-".to_owned();
    }
    let used = blocks.total.saturating_sub(blocks.free + blocks.cached);
    // Whatever is there at all shows.
    let cells = |part: u64| (part * BAR).div_ceil(blocks.total);
    let in_use = cells(used).min(BAR) as usize;
    let kept = (cells(used + blocks.cached).min(BAR) as usize).saturating_sub(in_use);
    let free = BAR as usize - in_use - kept;
    format!(
        "[{}{}{}] {:>3} % of {}",
        "#".repeat(in_use),
        "+".repeat(kept),
        ".".repeat(free),
        used * 100 / blocks.total,
        blocks.total
    )
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use baton_router::ClusterView;
    use baton_router::view::RouterView;

    use super::*;

    fn worker(id: &str, role: &str) -> WorkerView {
        WorkerView {
            id: id.to_owned(),
            epoch: "00112233445566ff".to_owned(),
            role: role.to_owned(),
            state: "ready".to_owned(),
            control: "10.0.0.1:7000".to_owned(),
            ..WorkerView::default()
        }
    }

    fn look(at: Instant, router: RouterView, workers: Vec<WorkerView>) -> Look {
        let view = ClusterView { router, workers };
        Look { view, at }
    }

    fn plain(look: &Look, last: Option<&Look>, width: usize) -> String {
        console::set_colors_enabled(false);
        lines("http://here", look, last, width, None).join("\n")
    }

    #[test]
    fn a_look_shows_states_loads_blocks_and_rates() {
        let start = Instant::now();
        let before = look(
            start,
            RouterView {
                ready: true,
                ..RouterView::default()
            },
            vec![worker("d1", "decode")],
        );
        let mut decode = worker("d1", "decode");
        decode.requests_running = 12;
        decode.handoffs_total = 3;
        decode.blocks = BlockView {
            total: 2048,
            free: 1024,
            referenced: 700,
            cached: 324,
            ..BlockView::default()
        };
        let mut lost = worker("p1", "prefill");
        lost.state = "lost".to_owned();
        lost.reason = "no word for 1 s".to_owned();
        lost.prefix_queries_tokens_total = 200;
        lost.prefix_hits_tokens_total = 50;
        let router = RouterView {
            ready: true,
            membership_stale: true,
            requests_in_flight: 14,
            requests_waiting: 2,
            prompt_tokens_waiting: 512,
            generation_tokens_total: 620,
            ..RouterView::default()
        };
        let now = look(start + Duration::from_secs(2), router, vec![lost, decode]);
        let expected = "\
baton  http://here  ready  the list of workers is stale
requests 14 in flight, 2 waiting with 512 prompt tokens   tokens/s 310 out, 0 of prompts in

WORKER  EPOCH     ROLE     STATE  RUN  WAIT  PREFILL  KV BLOCKS                   HANDOFF/S  HIT   PREEMPT  ADDRESS
d1      00112233  decode   ready   12     0        0  [####+.....]  34 % of 2048  1.5        -     0        10.0.0.1:7000
p1      00112233  prefill  lost     0     0        0  -                           -          25 %  0        10.0.0.1:7000
    no word for 1 s";
        let shown = plain(&now, Some(&before), usize::MAX);
        assert_eq!(shown, expected, "\n{shown}\n");
        for line in plain(&now, Some(&before), 40).lines() {
            assert!(line.chars().count() <= 40, "{line}");
        }
    }

    #[test]
    fn what_a_router_sends_neither_adds_lines_nor_moves_the_cursor() {
        let hostile = "x\nd9  ready \u{1b}[2J\u{9b}1A\r";
        let all = WorkerView {
            id: hostile.to_owned(),
            epoch: hostile.to_owned(),
            role: hostile.to_owned(),
            state: hostile.to_owned(),
            reason: hostile.to_owned(),
            control: hostile.to_owned(),
            ..WorkerView::default()
        };
        let router = RouterView {
            reason: hostile.to_owned(),
            ..RouterView::default()
        };
        console::set_colors_enabled(false);
        let seen = look(Instant::now(), router, vec![all]);
        let lines = lines("http://here", &seen, None, usize::MAX, Some(hostile));
        assert_eq!(lines.len(), 7, "{lines:#?}");
        for line in lines {
            assert!(!line.contains(char::is_control), "{line:?}");
        }
    }

    #[test]
    fn a_cluster_without_workers_says_so() {
        let router = RouterView {
            reason: "no worker".to_owned(),
            ..RouterView::default()
        };
        let shown = plain(&look(Instant::now(), router, Vec::new()), None, 80);
        assert!(shown.contains("not ready: no worker"), "{shown}");
        assert!(shown.ends_with("no worker is listed"), "{shown}");
    }

    #[test]
    fn counts_of_a_restarted_router_give_no_rate() {
        let start = Instant::now();
        let router = |generation_tokens_total| RouterView {
            generation_tokens_total,
            ..RouterView::default()
        };
        let before = look(start, router(100), Vec::new());
        let now = look(start + Duration::from_secs(1), router(5), Vec::new());
        assert!(!plain(&now, Some(&before), 80).contains("tokens/s"));
    }
}

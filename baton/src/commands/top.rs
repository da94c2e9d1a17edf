//! `baton top`: a live view of a cluster, as one of its routers sees it.
//!
//! Everything shown is in one answer of the router (`GET /cluster`); nothing is asked of the
//! workers. On a terminal the view is redrawn in place until `q`; anywhere else each look is
//! printed below the last one.

mod frame;
mod screen;
mod source;

use std::time::{Duration, Instant};

use baton_observability::one_line::one_line;
use baton_router::ClusterView;
use tokio::sync::mpsc;

use self::screen::{Screen, Wish};
use self::source::Source;
use super::{print, runtime, shutdown_signal};
use crate::cli::TopArgs;

/// A look at the cluster, and when it was taken.
struct Look {
    view: ClusterView,
    at: Instant,
}

/// Watches until it is asked to end.
///
/// # Errors
/// A flag that cannot be used, or a first look that fails; later ones are shown and tried again.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let source = Source::new(args)?;
    let interval = Duration::from_millis(args.interval_ms);
    if args.once {
        let view = source.look()?;
        let now = Instant::now();
        return print(&text(args, &Look { view, at: now }, None)?);
    }
    let live = !args.json && console::Term::stdout().is_term();
    runtime()?.block_on(async {
        let stop = shutdown_signal()?;
        let (wishes, mut wished) = mpsc::channel(8);
        let mut screen = live.then(|| Screen::open(wishes)).transpose()?;
        let mut last: Option<Look> = None;
        loop {
            let asked = source.clone();
            let answer = tokio::task::spawn_blocking(move || asked.look()).await?;
            let at = Instant::now();
            match (answer, &mut screen) {
                (Ok(view), screen) => {
                    let look = Look { view, at };
                    match screen {
                        Some(screen) => screen.draw(|width| {
                            frame::lines(&args.url, &look, last.as_ref(), width, None)
                        })?,
                        None => print(&text(args, &look, last.as_ref())?)?,
                    }
                    last = Some(look);
                }
                // Nothing to keep showing: most likely a wrong address.
                (Err(error), _) if last.is_none() => return Err(error),
                (Err(error), Some(screen)) => {
                    let said = one_line(&error.to_string()).into_owned();
                    screen.draw(|width| match &last {
                        Some(look) => frame::lines(&args.url, look, None, width, Some(&said)),
                        None => vec![said.clone()],
                    })?;
                }
                (Err(error), None) => eprintln!("error: {}", one_line(&error.to_string())),
            }
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = stop.cancelled() => return Ok(()),
                wish = wished.recv(), if live => match wish {
                    Some(Wish::Redraw) => {}
                    Some(Wish::End) | None => return Ok(()),
                },
            }
        }
    })
}

/// One look as it is printed below others.
fn text(args: &TopArgs, look: &Look, last: Option<&Look>) -> anyhow::Result<String> {
    if args.json {
        return Ok(serde_json::to_string(&look.view)? + "\n");
    }
    let lines = frame::lines(&args.url, look, last, usize::MAX, None);
    Ok(lines.join("\n") + "\n")
}

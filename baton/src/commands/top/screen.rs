//! The terminal while `baton top` owns it.

use std::thread;

use anyhow::Context as _;
use console::{Key, Term};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

const ALTERNATE_ON: &str = "\x1b[?1049h";
const ALTERNATE_OFF: &str = "\x1b[?1049l";
const TO_LINE_END: &str = "\x1b[K";
const HOME: &str = "\x1b[H";
const TO_SCREEN_END: &str = "\x1b[J";

/// What somebody at the keyboard wants.
pub enum Wish {
    Redraw,
    End,
}

/// A screen of its own, given back as it was found when this is dropped.
pub struct Screen {
    term: Term,
    /// How the terminal was set. The thread that reads keys changes that while it waits, and is
    /// not waited for.
    found: Option<Termios>,
}

impl Screen {
    /// Takes the terminal and sends what is typed to `wishes`.
    ///
    /// # Errors
    /// Whatever the system reports of the terminal.
    pub fn open(wishes: mpsc::Sender<Wish>) -> anyhow::Result<Self> {
        let this = Self {
            term: Term::stdout(),
            found: tcgetattr(std::io::stdin()).ok(),
        };
        this.term
            .write_str(ALTERNATE_ON)
            .and_then(|()| this.term.hide_cursor())
            .context("write to the terminal")?;
        let keys = this.term.clone();
        let reading = thread::Builder::new().name("baton-keys".to_owned());
        // Nobody waits for it: a read from a terminal cannot be called off.
        reading
            .spawn(move || {
                while let Ok(key) = keys.read_key_raw() {
                    let wish = match key {
                        Key::Char('q' | 'Q') | Key::Escape | Key::CtrlC => Wish::End,
                        _ => Wish::Redraw,
                    };
                    // Another read would set the terminal anew, perhaps after it was given back.
                    let last = matches!(wish, Wish::End);
                    if wishes.blocking_send(wish).is_err() || last {
                        break;
                    }
                }
            })
            .context("start reading keys")?;
        Ok(this)
    }

    /// Draws the lines for the terminal's width over what was there; those beyond its height
    /// are left out, and it says so.
    ///
    /// # Errors
    /// Whatever the system reports of the terminal.
    pub fn draw(&self, lines: impl FnOnce(usize) -> Vec<String>) -> anyhow::Result<()> {
        let (height, width) = self.term.size();
        let mut lines = lines(usize::from(width));
        let height = usize::from(height).max(2);
        if lines.len() > height {
            let left_out = lines.len() - (height - 1);
            lines.truncate(height - 1);
            lines.push(format!(
                "({left_out} more lines: `baton top --once` prints all)"
            ));
        }
        let mut text = HOME.to_owned();
        for (at, line) in lines.iter().enumerate() {
            if at > 0 {
                text.push_str("\r\n");
            }
            text.push_str(line);
            text.push_str(TO_LINE_END);
        }
        text.push_str(TO_SCREEN_END);
        let drawn = self.term.write_str(&text);
        drawn.context("write to the terminal")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Whoever closed the terminal sees nothing of it.
        drop(self.term.show_cursor());
        drop(self.term.write_str(ALTERNATE_OFF));
        if let Some(found) = &self.found {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, found);
        }
    }
}

//! `baton chat`: a conversation in the terminal.
//!
//! Answers go to standard output. The prompt sign appears only where a person types;
//! with lines from a pipe the output is the answers alone.

use std::io::{BufRead as _, IsTerminal as _};

use anyhow::{Context as _, bail};
use baton_proto::v1;
use futures::StreamExt as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::source::{Source, chat_message};
use super::{print, runtime};
use crate::cli::ChatArgs;

/// Talks until the end of input, `/quit`, or Ctrl-C while nothing is being answered.
///
/// # Errors
/// Whatever the model, the cluster or the router reports before the first answer;
/// later refusals are shown and the conversation goes on.
pub fn run(args: ChatArgs) -> anyhow::Result<()> {
    runtime()?.block_on(async {
        let mut source = Source::open(
            args.connect.as_deref(),
            &args.model,
            &args.engine,
            &args.pools,
        )
        .await?;
        if !source.has_chat_template().await? {
            bail!(
                "model `{}` has no chat template; use `baton generate --raw`",
                source.model()
            );
        }
        let interrupts = signal(SignalKind::interrupt()).context("watch Ctrl-C")?;
        let person = std::io::stdin().is_terminal();
        if person {
            eprintln!(
                "talking to {}; /clear forgets, Ctrl-C stops an answer, /quit ends",
                source.model()
            );
        }
        let mut talk = Talk {
            source: &mut source,
            args: &args,
            lines: lines()?,
            interrupts,
            person,
        };
        let talked = talk.converse().await;
        let closed = source.close().await;
        talked.and(closed)
    })
}

/// Lines of standard input. The reader is a thread that nobody waits for: a read from a
/// terminal cannot be called off.
fn lines() -> anyhow::Result<mpsc::Receiver<std::io::Result<String>>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::Builder::new()
        .name("baton-stdin".to_owned())
        .spawn(move || {
            for line in std::io::stdin().lock().lines() {
                if sender.blocking_send(line).is_err() {
                    break;
                }
            }
        })
        .context("start reading standard input")?;
    Ok(receiver)
}

struct Talk<'a> {
    source: &'a mut Source,
    args: &'a ChatArgs,
    lines: mpsc::Receiver<std::io::Result<String>>,
    interrupts: Signal,
    person: bool,
}

impl Talk<'_> {
    async fn converse(&mut self) -> anyhow::Result<()> {
        let opening: Vec<v1::ChatMessage> = self
            .args
            .system
            .iter()
            .map(|text| chat_message("system", text))
            .collect();
        let mut messages = opening.clone();
        while let Some(line) = self.next_line().await? {
            match line.trim() {
                "" => continue,
                "/quit" => break,
                "/clear" => {
                    messages.clone_from(&opening);
                    continue;
                }
                words if words.starts_with('/') => {
                    eprintln!("[`{words}` is not one of /clear, /quit]");
                    continue;
                }
                words => messages.push(chat_message("user", words)),
            }
            let chat = v1::Chat {
                messages: messages.clone(),
                ..v1::Chat::default()
            };
            match self.answer(chat).await? {
                Some(text) => messages.push(chat_message("assistant", &text)),
                None => drop(messages.pop()),
            }
        }
        Ok(())
    }

    /// `None` at the end of input or on Ctrl-C.
    async fn next_line(&mut self) -> anyhow::Result<Option<String>> {
        if self.person {
            print("> ")?;
        }
        tokio::select! {
            line = self.lines.recv() => match line {
                Some(line) => Ok(Some(line.context("read standard input")?)),
                None => {
                    if self.person {
                        print("\n")?;
                    }
                    Ok(None)
                }
            },
            _ = self.interrupts.recv() => {
                print("\n")?;
                Ok(None)
            }
        }
    }

    /// Streams one answer. `None` where it was refused or broke, which is said.
    async fn answer(&mut self, chat: v1::Chat) -> anyhow::Result<Option<String>> {
        use v1::generate_event::Event;
        let prompt = v1::generate_request::Prompt::Chat(chat);
        let mut events = match self.source.generate(prompt, &self.args.sampling).await {
            Ok(events) => events,
            Err(error) => {
                eprintln!("[{error:#}]");
                return Ok(None);
            }
        };
        let mut text = String::new();
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                _ = self.interrupts.recv() => {
                    print("\n")?;
                    eprintln!("[stopped]");
                    break;
                }
            };
            let piece = match event {
                None => {
                    print("\n")?;
                    break;
                }
                Some(Err(error)) => {
                    print("\n")?;
                    eprintln!("[{error:#}]");
                    return Ok(None);
                }
                Some(Ok(event)) => match event.event {
                    Some(Event::Tokens(tokens)) => tokens.text,
                    Some(Event::Finished(finished)) => finished.text,
                    _ => continue,
                },
            };
            print(&piece)?;
            text.push_str(&piece);
        }
        Ok(Some(text))
    }
}

//! `baton chat`: a conversation in the terminal.

use std::io::{BufRead as _, Write as _};

use anyhow::{Context as _, bail};
use baton_proto::v1;
use futures::StreamExt as _;

use super::runtime;
use super::source::{Source, chat_message};
use crate::cli::ChatArgs;

/// Talks until the end of input or `/quit`.
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
        println!(
            "talking to {}; /clear forgets, /quit or Ctrl-D ends",
            source.model()
        );
        let talked = converse(&mut source, &args).await;
        let closed = source.close().await;
        talked.and(closed)
    })
}

async fn converse(source: &mut Source, args: &ChatArgs) -> anyhow::Result<()> {
    let opening = || -> Vec<v1::ChatMessage> {
        let system = args.system.as_deref();
        system
            .map(|text| chat_message("system", text))
            .into_iter()
            .collect()
    };
    let mut messages = opening();
    while let Some(line) = read_line().await? {
        match line.trim() {
            "" => continue,
            "/quit" => break,
            "/clear" => {
                messages = opening();
                continue;
            }
            words => messages.push(chat_message("user", words)),
        }
        let chat = v1::Chat {
            messages: messages.clone(),
            ..v1::Chat::default()
        };
        match answer(source, chat, args).await {
            Ok(text) => messages.push(chat_message("assistant", &text)),
            Err(error) => {
                println!("\n[{error:#}]");
                messages.pop();
            }
        }
    }
    Ok(())
}

/// One line of the user's; `None` at the end of input.
async fn read_line() -> anyhow::Result<Option<String>> {
    // A blocking read must not hold up the runtime's own threads.
    tokio::task::spawn_blocking(|| {
        print!("> ");
        std::io::stdout().flush().context("write")?;
        let mut line = String::new();
        let read = std::io::stdin()
            .lock()
            .read_line(&mut line)
            .context("read standard input")?;
        Ok((read > 0).then_some(line))
    })
    .await
    .context("read standard input")?
}

async fn answer(source: &mut Source, chat: v1::Chat, args: &ChatArgs) -> anyhow::Result<String> {
    use v1::generate_event::Event;
    let prompt = v1::generate_request::Prompt::Chat(chat);
    let mut events = source.generate(prompt, &args.sampling).await?;
    let mut text = String::new();
    while let Some(event) = events.next().await {
        let piece = match event?.event {
            Some(Event::Tokens(tokens)) => tokens.text,
            Some(Event::Finished(finished)) => finished.text,
            _ => continue,
        };
        print!("{piece}");
        std::io::stdout().flush().context("write")?;
        text.push_str(&piece);
    }
    println!();
    Ok(text)
}

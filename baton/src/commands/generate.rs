//! `baton generate`: one prompt, streamed to standard output.

use std::io::Read as _;

use anyhow::Context as _;
use baton_proto::v1;
use futures::StreamExt as _;

use super::source::{Source, chat_message};
use super::{print, runtime};
use crate::cli::GenerateArgs;

/// Generates and prints.
///
/// # Errors
/// Whatever the model, the cluster or the router reports.
pub fn run(args: GenerateArgs) -> anyhow::Result<()> {
    let prompt = read_prompt(&args.prompt)?;
    runtime()?.block_on(async {
        let mut source = Source::open(
            args.connect.as_deref(),
            &args.model,
            &args.engine,
            &args.pools,
        )
        .await?;
        let chat = !args.raw && source.has_chat_template().await?;
        let prompt = if chat {
            v1::generate_request::Prompt::Chat(v1::Chat {
                messages: vec![chat_message("user", &prompt)],
                ..v1::Chat::default()
            })
        } else {
            v1::generate_request::Prompt::Text(prompt)
        };
        let printed = stream(&mut source, prompt, &args).await;
        let closed = source.close().await;
        printed.and(closed)
    })
}

fn read_prompt(given: &str) -> anyhow::Result<String> {
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .context("read the prompt from standard input")?;
    Ok(text)
}

async fn stream(
    source: &mut Source,
    prompt: v1::generate_request::Prompt,
    args: &GenerateArgs,
) -> anyhow::Result<()> {
    use v1::generate_event::Event;
    let mut events = source.generate(prompt, &args.sampling).await?;
    let mut text = String::new();
    let (mut seed, mut completed) = (0, v1::Completed::default());
    while let Some(event) = events.next().await {
        let piece = match event?.event {
            Some(Event::Accepted(accepted)) => {
                seed = accepted.seed;
                continue;
            }
            Some(Event::Tokens(tokens)) => tokens.text,
            Some(Event::Finished(finished)) => finished.text,
            Some(Event::Completed(last)) => {
                completed = last;
                continue;
            }
            None => continue,
        };
        if args.json {
            text.push_str(&piece);
        } else {
            print(&piece)?;
        }
    }
    let usage = completed.usage.unwrap_or_default();
    let timings = completed.timings.unwrap_or_default();
    let rate = f64::from(usage.completion_tokens.saturating_sub(1))
        / (timings.total_us.saturating_sub(timings.ttft_us).max(1) as f64 / 1e6);
    if args.json {
        let report = serde_json::json!({
            "model": source.model(),
            "text": text,
            "seed": seed,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "ttft_ms": timings.ttft_us as f64 / 1e3,
            "total_ms": timings.total_us as f64 / 1e3,
            "decode_tokens_per_second": rate,
            "path": timings.path,
        });
        print(&format!("{report}\n"))?;
    } else {
        print("\n")?;
        eprintln!(
            "[{} prompt tokens, {} new, first after {:.0} ms, {rate:.1} tokens/s, {} path, seed {seed}]",
            usage.prompt_tokens,
            usage.completion_tokens,
            timings.ttft_us as f64 / 1e3,
            timings.path,
        );
    }
    Ok(())
}

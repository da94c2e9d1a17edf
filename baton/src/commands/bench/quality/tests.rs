//! The bench on the random checkpoint: what is the reference scores as the reference, and
//! fewer bits score worse.

use std::path::Path;

use super::*;
use crate::cli::CliCommand;
use crate::commands::bench::flags::BenchCommand;

fn fixture(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    folder.join(name).to_str().unwrap().to_owned()
}

fn measure(flags: &[&str]) -> anyhow::Result<Quality> {
    let (model, text) = (fixture("rand"), fixture("passage.txt"));
    let mut all = vec![
        "baton", "bench", "quality", "--model", &model, "--text", &text,
    ];
    all.extend(["--quiet", "--threads", "2"]);
    all.extend(flags);
    let parsed = crate::config::parse(all.iter().map(Into::into)).unwrap();
    let CliCommand::Bench(BenchCommand::Quality(args)) = parsed.command else {
        panic!("not `bench quality`");
    };
    run(&args)
}

#[test]
fn fewer_bits_score_worse_and_the_reference_as_itself() {
    let result = measure(&[
        "--weights",
        "f32,keep,q8,q4",
        "--kv-dtype",
        "f32,f16",
        "--tokens",
        "100",
        "--window",
        "48",
    ])
    .unwrap();
    // One of the window's 48 starts the sequence.
    assert_eq!((result.scored_tokens, result.context), (100, 23));
    let row = |weights: &str, kv: &str| {
        let found = result
            .rows
            .iter()
            .find(|row| row.weights == weights && row.kv_dtype == kv);
        found.unwrap()
    };
    assert_eq!(result.rows.len(), 8);
    for weights in ["f32", "keep"] {
        // BF16 weights are multiplied as f32, so keeping them is the reference too.
        let figures = row(weights, "f32").figures;
        assert_eq!(figures, result.reference.figures, "{weights}");
        assert_eq!(figures.top1_agreement_percent, 100.0);
        assert_eq!(figures.perplexity_change_percent, 0.0);
        assert!(figures.mean_kl < 1e-6, "{figures:?}");
    }
    let kl = |weights, kv| row(weights, kv).figures.mean_kl;
    assert!(kl("f32", "f16") > kl("f32", "f32"));
    assert!(kl("q8", "f32") > 10.0 * kl("f32", "f16"));
    assert!(kl("q4", "f32") > 4.0 * kl("q8", "f32"));
    assert!(
        row("q4", "f16").figures.top1_agreement_percent
            < row("q8", "f16").figures.top1_agreement_percent
    );
    assert!(row("q4", "f16").weight_bytes < row("q8", "f16").weight_bytes);
    assert_eq!(
        row("q4", "f32").kv_bytes_per_token,
        2 * row("q4", "f16").kv_bytes_per_token
    );

    let table = result.table();
    assert!(table.lines().count() == 12, "{table}");
    let json = serde_json::to_value(&result).unwrap();
    assert_eq!(json["rows"][7]["weights"], "q4");
}

#[test]
fn what_cannot_be_measured_is_refused_by_its_flag() {
    for (flags, words) in [
        (&["--tokens", "1000000"][..], ["--text", "1000255"]),
        (&["--window", "8192"], ["--window 8192", "4096"]),
    ] {
        let said = format!("{:#}", measure(flags).unwrap_err());
        for word in words {
            assert!(said.contains(word), "no `{word}` in: {said}");
        }
    }
}

//! What this binary is: version, commit, features, instruction sets.

use baton_kernels::Isa;

/// What `--version` says; `-V` says the first line.
pub fn long() -> String {
    let found: Vec<Isa> = Isa::available().collect();
    format!(
        "{version}\ncommit            {commit}\nfeatures          {features}\n\
         instruction sets  compiled: {compiled}; this machine: {found}; used: {used}",
        version = env!("CARGO_PKG_VERSION"),
        commit = env!("BATON_COMMIT"),
        features = features(),
        compiled = listed(Isa::COMPILED),
        found = listed(&found),
        used = Isa::detect(),
    )
}

fn features() -> String {
    let all = [
        ("simulate", cfg!(feature = "simulate")),
        ("nixl", cfg!(feature = "nixl")),
    ];
    let names = all.into_iter().filter(|(_, on)| *on).map(|(name, _)| name);
    match names.collect::<Vec<_>>() {
        names if names.is_empty() => "none".to_owned(),
        names => names.join(", "),
    }
}

fn listed(sets: &[Isa]) -> String {
    let names: Vec<String> = sets.iter().map(ToString::to_string).collect();
    names.join(", ")
}

# Short names for what the README and CI do.

# Build and start a whole cluster on this machine.
up *flags:
    ./scripts/up {{flags}}

# Everything that CI checks.
test:
    ./scripts/test

# On a minimal Debian that has nothing, for example `just fresh ./scripts/up`.
fresh *command:
    ./scripts/fresh-machine {{command}}

fmt:
    cargo fmt --all

lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings

# Licences, advisories and doubled dependencies (needs `cargo install cargo-deny`).
deny:
    cargo deny check

# Simulated clusters for eight hours; the stories of those that break a promise.
nightly minutes="480":
    cargo run --release -p baton -- simulate --minutes {{minutes}} --from "$(date +%s)000"

bench *flags:
    cargo run --release -p baton -- bench {{flags}}

//! Gives the data lanes their turns as the run's time goes on.

use std::time::Duration;

use baton_kv_transfer::mem::Network;
use tokio::time::Instant;

/// The shortest pause between two looks: the run's clock counts in milliseconds.
const TICK: Duration = Duration::from_millis(1);
/// Times that lanes may answer each other within one moment.
const ROUNDS_MAX: u32 = 64;

/// Keeps `network` at the run's time, for as long as the run goes.
pub async fn drive(network: Network) {
    let (start, begun) = (Instant::now(), network.now());
    let mut rounds = 0;
    loop {
        let now = Instant::now();
        let there = begun + (now - start);
        while network.step(there) {}
        let due = network
            .next_due()
            .map_or(now + Duration::from_secs(3600), |at| start + (at - begun))
            .max(now + TICK);
        if rounds == ROUNDS_MAX {
            rounds = 0;
            tokio::time::sleep(TICK).await;
            network.poke();
            continue;
        }
        tokio::select! {
            biased;
            () = Network::rung() => {
                rounds += 1;
                network.poke();
            }
            () = tokio::time::sleep_until(due) => rounds = 0,
        }
    }
}

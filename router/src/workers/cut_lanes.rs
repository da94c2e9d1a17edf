//! Lanes that do not come up, between workers that both live.
//!
//! ```text
//! a handoff breaks ----> cut: no prompt is sent that way ----> the lane comes up: as before
//!                         |   ^
//!                         +---+ every second the prefill worker tries it, without a prompt
//! ```
//! Health checks go another way than KV and say nothing of it, and an idle worker attracts
//! requests; so a lane that failed one request is not left for the next one to try. Whose
//! fault it was is not decided here: a data port that nobody reaches has all its lanes cut, and
//! its worker computes the prompts that it gets itself; a prefill worker that reaches nobody
//! gets none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_proto::status::from_status;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_proto::worker_info::HANDOFF_UNREACHABLE;
use baton_proto::{Error, ErrorKind, environment, v1};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Worker, Workers};
use crate::placement::Pair;

/// From one try of a lane to the next; spread out, so that routers do not all knock at once.
const TRY_INTERVAL: Duration = Duration::from_secs(1);
/// A try without an answer has failed. Longer than a prefill worker tries.
const TRY_TIME: Duration = Duration::from_secs(2);
/// A lane that nobody has been able to try for so long may be used again: the next prompt
/// tells, of which the worst is that it waits for a second. So it is with prefill workers that
/// are too old to try lanes.
const UNTRIED_MAX: Duration = Duration::from_secs(10);

/// Which lanes are cut. At most one entry for each pair of workers that are listed.
#[derive(Default)]
pub struct CutLanes {
    /// With the lane, while nobody looks after it.
    cut: Mutex<BTreeMap<Pair, Option<v1::Lane>>>,
    news: Notify,
}

impl CutLanes {
    /// No prompt goes this way until `lane` comes up.
    pub fn cut(&self, pair: Pair, lane: &v1::Lane) {
        self.lock()
            .entry(pair)
            .or_insert_with(|| Some(lane.clone()));
        self.news.notify_one();
    }

    /// Everything that is cut now, in order.
    pub fn all(&self) -> Vec<Pair> {
        self.lock().keys().cloned().collect()
    }

    fn unattended(&self) -> Vec<(Pair, v1::Lane)> {
        let mut cut = self.lock();
        let each = cut.iter_mut();
        each.filter_map(|(pair, lane)| Some((pair.clone(), lane.take()?)))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Pair, Option<v1::Lane>>> {
        self.cut.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks after what is cut, for ever.
pub(super) async fn look_after(workers: Arc<Workers>) {
    let mut tries = JoinSet::new();
    loop {
        for (pair, lane) in workers.cut_lanes.unattended() {
            tries.spawn(mend(Arc::clone(&workers), pair, lane));
        }
        tokio::select! {
            () = workers.cut_lanes.news.notified() => {}
            Some(ended) = tries.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "looking after a cut lane");
                }
            }
        }
    }
}

/// Lets a lane be used again, whatever ended the looking after it.
struct Mended<'a>(&'a CutLanes, &'a Pair);

impl Drop for Mended<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(self.1);
    }
}

/// Tries the lane until it comes up, one of its ends is gone, or nobody can say.
async fn mend(workers: Arc<Workers>, pair: Pair, lane: v1::Lane) {
    let _mended = Mended(&workers.cut_lanes, &pair);
    let (prefill, decode) = (&pair.prefill.id, &pair.decode.id);
    let mut heard = Instant::now();
    while let (Some(worker), Some(_)) = (workers.get(&pair.prefill), workers.get(&pair.decode)) {
        let next = TRY_INTERVAL.mul_f64(0.75 + 0.5 * environment::random::<f64>());
        let next = Instant::now() + next;
        match tried(&worker, lane.clone()).await {
            Ok(()) => {
                tracing::info!(%prefill, %decode, "the lane comes up: prompts go this way again");
                break;
            }
            Err(error) if error.reason == HANDOFF_UNREACHABLE => heard = Instant::now(),
            Err(error) if heard.elapsed() >= UNTRIED_MAX => {
                tracing::info!(%prefill, %decode, %error,
                    "nobody can try the lane: the next prompt will");
                break;
            }
            Err(error) => tracing::debug!(%prefill, %decode, %error, "could not try a lane"),
        }
        tokio::time::sleep_until(next).await;
    }
}

async fn tried(prefill: &Worker, lane: v1::Lane) -> Result<(), Error> {
    let mut client = PrefillWorkerClient::new(prefill.channel.clone());
    let call = client.probe_lane(v1::ProbeLaneRequest { lane: Some(lane) });
    match tokio::time::timeout(TRY_TIME, call).await {
        Ok(answer) => answer.map(drop).map_err(|status| from_status(&status)),
        Err(_) => Err(Error::new(ErrorKind::Unavailable, "no answer")),
    }
}

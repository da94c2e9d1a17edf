//! Tells a worker that leaves that this router knows, beside the watch stream that said so.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use tokio::task::JoinSet;
use tonic::Status;

use super::Worker;

/// A call without an answer is made again; the worker waits no longer for any.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// What one watch stream has to acknowledge. Dropped with it.
#[derive(Default)]
pub struct Acknowledging {
    done: bool,
    calls: JoinSet<Result<(), Status>>,
}

impl Acknowledging {
    /// The worker said on stream `watch` that it drains, and gets no new work any more.
    /// Returns at once; said again, it looks after the call before.
    pub fn draining(&mut self, worker: &Worker, watch: u64) {
        while let Some(ended) = self.calls.try_join_next() {
            match ended {
                Ok(Ok(())) => self.done = true,
                Ok(Err(status)) => tracing::debug!(worker = %worker.key.id, %status,
                    "could not acknowledge that it drains"),
                Err(panic) => tracing::error!(%panic, "acknowledging a drain"),
            }
        }
        // Number 0 is an older worker's, which waits for nobody.
        if self.done || watch == 0 || !self.calls.is_empty() {
            return;
        }
        let call = acknowledge(worker, watch);
        self.calls.spawn(async move {
            let answer = tokio::time::timeout(ANSWERED_WITHIN, call).await;
            answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer")))
        });
    }
}

fn acknowledge(
    worker: &Worker,
    watch: u64,
) -> impl Future<Output = Result<(), Status>> + Send + use<> {
    let channel = worker.channel.clone();
    let prefills = worker.role.prefills();
    let request = v1::AcknowledgeDrainRequest { watch };
    async move {
        let answer = if prefills {
            PrefillWorkerClient::new(channel)
                .acknowledge_drain(request)
                .await
        } else {
            DecodeWorkerClient::new(channel)
                .acknowledge_drain(request)
                .await
        };
        answer.map(drop)
    }
}

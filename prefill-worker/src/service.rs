//! The gRPC face of a prefill worker: one task per request, plain answers for the rest.

use std::sync::Arc;

use baton_proto::status::to_status;
use baton_proto::v1::prefill_worker_server::PrefillWorker;
use baton_proto::work::WorkOrder;
use baton_proto::worker_info::{HANDOFF_UNREACHABLE, ResponseStream};
use baton_proto::{Error, ErrorKind, RequestId, environment, v1};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::request::RequestTask;
use crate::ship::{Ours, parse_lane, parse_target};
use crate::worker::{PROBES_MAX, Shared};

/// Events that may wait for the router: a request sends at most four.
const OUT_EVENTS_MAX: usize = 8;

pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl PrefillWorker for Service {
    type PrefillStream = ResponseStream<v1::PrefillEvent>;
    type TokenizerSpecStream = ResponseStream<v1::TokenizerSpecChunk>;
    type WatchStream = ResponseStream<v1::WatchEvent>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let shared = &self.shared;
        shared.info.check_ready()?;
        let v1::PrefillRequest { work, lane } = request.into_inner();
        let work = work.ok_or_else(|| refuse("work", "missing"))?;
        let lane = lane.ok_or_else(|| refuse("lane", "missing"))?;
        let order = WorkOrder::from_wire(work, shared.info.epoch, &shared.info.card)
            .map_err(|error| to_status(&error))?;
        let id = order.request_id.clone();
        let layout = shared.engine.layout();
        let ours = Ours {
            layout,
            form: shared.form.as_ref(),
            tls: &shared.config.tls,
            sender: &shared.sender,
        };
        let lane = parse_lane(lane, &order, ours)
            .await
            .map_err(|error| to_status(&error))?;
        let stop = shared
            .live()
            .start(&id, order.fence.clone(), Instant::now().into_std())
            .map_err(|error| to_status(&error))?;

        let (out, events) = mpsc::channel(OUT_EVENTS_MAX);
        let task = match RequestTask::new(Arc::clone(shared), order, lane, out, stop) {
            Ok(task) => task,
            Err(error) => {
                shared.live().end(&id);
                return Err(to_status(&error));
            }
        };
        let shared = Arc::clone(shared);
        self.shared.tasks.spawn(async move {
            task.run().await;
            shared.live().end(&id);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        let known = self
            .shared
            .live()
            .take_cancel(request.into_inner(), Instant::now().into_std());
        Ok(Response::new(v1::CancelResponse { known }))
    }

    async fn drain(
        &self,
        _request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        let told = self.shared.start_draining().await;
        let left = self.shared.live().len();
        Ok(Response::new(v1::DrainResponse {
            requests_left: u32::try_from(left).unwrap_or(u32::MAX),
            routers_acknowledged: told.acknowledged,
            routers_silent: told.silent,
        }))
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        let described = self.shared.info.describe(request.get_ref());
        described
            .map(Response::new)
            .map_err(|error| to_status(&error))
    }

    async fn tokenizer_spec(
        &self,
        _request: Request<v1::TokenizerSpecRequest>,
    ) -> Result<Response<Self::TokenizerSpecStream>, Status> {
        Ok(Response::new(self.shared.info.tokenizer_stream()))
    }

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let stream = self.shared.info.watch_stream(request.into_inner());
        Ok(Response::new(stream))
    }

    async fn acknowledge_drain(
        &self,
        request: Request<v1::AcknowledgeDrainRequest>,
    ) -> Result<Response<v1::AcknowledgeDrainResponse>, Status> {
        let answer = self.shared.info.drain_acknowledged(request.into_inner());
        Ok(Response::new(answer))
    }

    async fn probe_lane(
        &self,
        request: Request<v1::ProbeLaneRequest>,
    ) -> Result<Response<v1::ProbeLaneResponse>, Status> {
        let lane = request.into_inner().lane;
        let lane = lane.ok_or_else(|| refuse("lane", "missing"))?;
        let probed = probe(&self.shared, &lane).await;
        probed.map_err(|error| to_status(&error))?;
        Ok(Response::new(v1::ProbeLaneResponse {}))
    }
}

/// Tries a lane on a thread of its own: connecting blocks.
async fn probe(shared: &Shared, lane: &v1::Lane) -> Result<(), Error> {
    let permit = Arc::clone(&shared.probes).try_acquire_owned();
    let permit = permit.map_err(|_| {
        let message = format!("{PROBES_MAX} lanes are tried already");
        Error::new(ErrorKind::Overloaded, message)
            .with_retry_after(shared.config.engine.limits.retry_after)
    })?;
    let (tls, sender) = (&shared.config.tls, shared.sender.clone());
    let target = parse_target(lane, &RequestId("probe".to_owned()), tls, &sender).await?;
    let tried = environment::off_runtime(move || {
        let _permit = permit;
        sender.probe(&target)
    });
    let tried = tried.await;
    let tried = tried.map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))?;
    tried.map_err(|error| {
        Error::new(ErrorKind::Unavailable, error.to_string()).with_reason(HANDOFF_UNREACHABLE)
    })
}

fn refuse(field: &str, message: &str) -> Status {
    to_status(&Error::invalid(field, message))
}

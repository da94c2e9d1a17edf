//! The gRPC face of a decode worker: one task per request, plain answers for the rest.

use std::sync::Arc;

use baton_proto::status::to_status;
use baton_proto::v1::decode_worker_server::DecodeWorker;
use baton_proto::work::WorkOrder;
use baton_proto::worker_info::ResponseStream;
use baton_proto::{Attempt, Error, v1};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::request::{Path, RequestTask};
use crate::worker::Shared;

/// Events that may wait for a reader before its request is paused.
const OUT_EVENTS_MAX: usize = 256;

pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl DecodeWorker for Service {
    type DecodeStream = ResponseStream<v1::DecodeEvent>;
    type TokenizerSpecStream = ResponseStream<v1::TokenizerSpecChunk>;
    type WatchStream = ResponseStream<v1::WatchEvent>;

    async fn decode(
        &self,
        request: Request<Streaming<v1::DecodeCommand>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        self.shared.info.check_ready()?;
        let mut commands = request.into_inner();
        let start = match commands.message().await? {
            Some(v1::DecodeCommand {
                command: Some(v1::decode_command::Command::Start(start)),
            }) => start,
            _ => return Err(refuse("command", "the first command must be start")),
        };
        let path = match start.path() {
            v1::decode_start::Path::Receive => Path::Receive,
            v1::decode_start::Path::Local => Path::Local,
            v1::decode_start::Path::Unspecified => {
                return Err(refuse("start.path", "must be receive or local"));
            }
        };
        let work = start.work.ok_or_else(|| refuse("start.work", "missing"))?;
        let shared = &self.shared;
        let order = WorkOrder::from_wire(work, shared.info.epoch, &shared.info.card)
            .map_err(|error| to_status(&error))?;
        let id = order.request_id.clone();
        let stop = shared
            .live()
            .start(&id, order.fence.clone(), Instant::now().into_std())
            .map_err(|error| to_status(&error))?;

        let (out, events) = mpsc::channel(OUT_EVENTS_MAX);
        let task = RequestTask::new(Arc::clone(shared), order, Attempt(start.attempt), out, stop);
        let shared = Arc::clone(shared);
        self.shared.tasks.spawn(async move {
            task.run(path, commands).await;
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
}

fn refuse(field: &str, message: &str) -> Status {
    to_status(&Error::invalid(field, message))
}

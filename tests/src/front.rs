//! A gRPC door in front of a prefill worker that refuses some of its prompts.
//!
//! Everything else goes through to the worker, so that routers take the door for it.

use std::net::SocketAddr;
use std::time::Duration;

use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_proto::v1::prefill_worker_server::{PrefillWorker, PrefillWorkerServer};
use baton_proto::worker_info::ResponseStream;
use baton_proto::{TokenId, limits, v1};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// A door that is open until it is dropped.
pub struct PrefillFront {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl PrefillFront {
    /// A door to a worker's control port, which need not listen yet. Prompts that begin with
    /// `refused` are answered by an internal error, `after` they came.
    ///
    /// # Panics
    /// If no port is free.
    pub async fn to(worker: SocketAddr, refused: TokenId, after: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let channel = Endpoint::from_shared(format!("http://{worker}"))
            .expect("an address")
            .connect_lazy();
        let door = Door {
            worker: PrefillWorkerClient::new(channel)
                .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
                .max_encoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX),
            refused,
            after,
        };
        let service = PrefillWorkerServer::new(door)
            .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX);
        let task = tokio::spawn(async move {
            let serving = Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpIncoming::from(listener));
            serving.await.expect("the door serves");
        });
        Self { address, task }
    }

    /// What the worker is to advertise.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for PrefillFront {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Door {
    worker: PrefillWorkerClient<Channel>,
    refused: TokenId,
    after: Duration,
}

/// A worker's stream as the door's own.
fn passed<T: Send + 'static>(answer: Response<Streaming<T>>) -> Response<ResponseStream<T>> {
    answer.map(|stream| Box::pin(stream) as ResponseStream<T>)
}

#[tonic::async_trait]
impl PrefillWorker for Door {
    type PrefillStream = ResponseStream<v1::PrefillEvent>;
    type TokenizerSpecStream = ResponseStream<v1::TokenizerSpecChunk>;
    type WatchStream = ResponseStream<v1::WatchEvent>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let work = request.get_ref().work.as_ref();
        if work.and_then(|work| work.prompt.first()) == Some(&self.refused) {
            tokio::time::sleep(self.after).await;
            return Err(Status::internal("this prompt is refused"));
        }
        self.worker.clone().prefill(request).await.map(passed)
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        self.worker.clone().cancel(request).await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        self.worker.clone().drain(request).await
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        self.worker.clone().describe(request).await
    }

    async fn tokenizer_spec(
        &self,
        request: Request<v1::TokenizerSpecRequest>,
    ) -> Result<Response<Self::TokenizerSpecStream>, Status> {
        self.worker
            .clone()
            .tokenizer_spec(request)
            .await
            .map(passed)
    }

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        self.worker.clone().watch(request).await.map(passed)
    }

    async fn acknowledge_drain(
        &self,
        request: Request<v1::AcknowledgeDrainRequest>,
    ) -> Result<Response<v1::AcknowledgeDrainResponse>, Status> {
        self.worker.clone().acknowledge_drain(request).await
    }

    async fn probe_lane(
        &self,
        request: Request<v1::ProbeLaneRequest>,
    ) -> Result<Response<v1::ProbeLaneResponse>, Status> {
        self.worker.clone().probe_lane(request).await
    }
}

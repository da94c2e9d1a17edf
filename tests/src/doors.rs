//! A cluster inside the test's process with both front doors open on free ports.

use std::net::SocketAddr;
use std::sync::Arc;

use baton::cluster::Doors;
use baton_engine::model::Model;
use baton_proto::v1::inference_client::InferenceClient;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::cluster::{Setup, TestCluster};
use crate::http::Http;

/// A cluster that can be asked over sockets. Its model is called `test`.
pub struct OpenCluster {
    pub cluster: Arc<TestCluster>,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    shutdown: CancellationToken,
    serving: JoinHandle<anyhow::Result<()>>,
}

impl OpenCluster {
    /// Starts a cluster and opens its doors.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn start(setup: &Setup, model: &Arc<Model>) -> Self {
        Self::start_as(setup, model, "test").await
    }

    /// The same of a model with another name.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn start_as(setup: &Setup, model: &Arc<Model>, name: &str) -> Self {
        let cluster = Arc::new(setup.start_as(model, name).await);
        let bind = || TcpListener::bind("127.0.0.1:0");
        let (http, grpc) = (
            bind().await.expect("a free port"),
            bind().await.expect("a free port"),
        );
        let (http_at, grpc_at) = (
            http.local_addr().expect("bound"),
            grpc.local_addr().expect("bound"),
        );
        let shutdown = CancellationToken::new();
        let serving = {
            let (cluster, shutdown) = (Arc::clone(&cluster), shutdown.clone());
            tokio::spawn(async move { cluster.cluster.serve(Doors { http, grpc }, shutdown).await })
        };
        Self {
            cluster,
            http: http_at,
            grpc: grpc_at,
            shutdown,
            serving,
        }
    }

    /// A client of the HTTP door.
    pub fn http(&self) -> Http {
        Http::new(self.http)
    }

    /// A client of the gRPC door, with a connection of its own.
    ///
    /// # Panics
    /// If the address is wrong, which it is not.
    pub fn grpc(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.channel())
    }

    /// A lazy connection to the gRPC door.
    ///
    /// # Panics
    /// As [`OpenCluster::grpc`].
    pub fn channel(&self) -> Channel {
        tonic::transport::Endpoint::from_shared(format!("http://{}", self.grpc))
            .expect("an address")
            .connect_lazy()
    }

    /// Closes the doors, then the cluster.
    ///
    /// # Panics
    /// If a role or a door ended badly.
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.serving
            .await
            .expect("the doors' task")
            .expect("the doors close well");
        let cluster = Arc::into_inner(self.cluster).expect("nobody else has the cluster");
        cluster.stop().await;
    }
}

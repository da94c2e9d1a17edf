//! One watch of the records under a prefix.

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::api::watch_client::WatchClient;
use crate::api::watch_request::RequestUnion;
use crate::api::{self, watch_create_request::FilterType};
use crate::connect::{Client, Error};
use crate::keys::prefix_end;

/// Which changes are wanted.
#[derive(Clone, Debug)]
pub struct WatchFrom {
    pub prefix: Vec<u8>,
    /// The first revision whose changes are.
    pub revision: i64,
    pub without_deletes: bool,
    /// Largest message.
    pub bytes_max: usize,
}

impl Client {
    /// Opens a watch.
    ///
    /// # Errors
    /// Whatever etcd or the connection says.
    pub async fn watch(&self, from: WatchFrom) -> Result<Watching, Error> {
        let bytes_max = from.bytes_max;
        let filter = from.without_deletes.then_some(FilterType::Nodelete as i32);
        let create = api::WatchCreateRequest {
            range_end: prefix_end(&from.prefix),
            key: from.prefix,
            start_revision: from.revision,
            filters: filter.into_iter().collect(),
            ..api::WatchCreateRequest::default()
        };
        let open = self.call(create, async |link, create| {
            let (requests, asked) = mpsc::channel(1);
            // There is room for it, and nobody else has the other end yet.
            let _ = requests.try_send(api::WatchRequest {
                request_union: Some(RequestUnion::CreateRequest(create)),
            });
            let mut client = WatchClient::new(link).max_decoding_message_size(bytes_max);
            let opened = client.watch(ReceiverStream::new(asked)).await?;
            Ok(opened.map(|answers| (requests, answers)))
        });
        let (requests, answers) = open.await?;
        Ok(Watching {
            _requests: requests,
            answers,
        })
    }
}

/// An open watch.
#[derive(Debug)]
pub struct Watching {
    /// etcd ends the watch when this end of its stream closes.
    _requests: mpsc::Sender<api::WatchRequest>,
    answers: Streaming<api::WatchResponse>,
}

impl Watching {
    /// The next message; `None` when etcd has ended the stream.
    ///
    /// # Errors
    /// Whatever etcd or the connection says.
    ///
    /// *Cancel safety*: cancel-safe; it polls one stream and keeps no state outside of it.
    pub async fn message(&mut self) -> Result<Option<api::WatchResponse>, Error> {
        Ok(self.answers.message().await?)
    }
}

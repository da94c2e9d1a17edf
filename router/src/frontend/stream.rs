//! A request's events as the front doors take them.

use std::pin::Pin;
use std::task::{Context, Poll};

use baton_proto::{Error, ErrorKind, RequestId, v1};
use futures::Stream;
use tokio_util::sync::DropGuard;

use crate::driver::Inlet;

/// The events of one request: `Accepted`, tokens and ends, `Completed`; or an
/// error, after which nothing follows. Dropping it cancels the request.
pub struct GenerateStream {
    inlet: Inlet,
    first: Option<v1::GenerateEvent>,
    request_id: RequestId,
    completed: bool,
    ended: bool,
    _cancel_on_drop: DropGuard,
}

impl GenerateStream {
    pub(super) fn new(inlet: Inlet, request_id: RequestId) -> Self {
        Self {
            _cancel_on_drop: inlet.gone.clone().drop_guard(),
            inlet,
            first: None,
            request_id,
            completed: false,
            ended: false,
        }
    }

    /// The unique id of the request on every hop.
    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// Waits until a worker took the request.
    pub(super) async fn wait_for_acceptance(&mut self) -> Result<(), Error> {
        match self.inlet.events.recv().await {
            Some(event) => {
                self.first = Some(event);
                Ok(())
            }
            None => Err(self.end()),
        }
    }

    /// The error of a stream that ended without its last event.
    fn end(&mut self) -> Error {
        self.ended = true;
        self.inlet
            .error
            .get()
            .cloned()
            .unwrap_or_else(|| Error::new(ErrorKind::Internal, "the request's task ended early"))
    }
}

impl Stream for GenerateStream {
    type Item = Result<v1::GenerateEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        match self.inlet.events.poll_recv(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(event)) => {
                let last = matches!(event.event, Some(v1::generate_event::Event::Completed(_)));
                self.completed |= last;
                Poll::Ready(Some(Ok(event)))
            }
            Poll::Ready(None) if self.completed => {
                self.ended = true;
                Poll::Ready(None)
            }
            Poll::Ready(None) => Poll::Ready(Some(Err(self.end()))),
        }
    }
}

//! Which requests this router serves, so that one that its client resumed ends here.
//!
//! Workers keep the same book ([`baton_proto::live_requests`]); this one ends the
//! older stream even while it is at no worker, and says why.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_proto::Error;
use baton_proto::live_requests::resumed_elsewhere;
use tokio_util::sync::CancellationToken;

type Book = Mutex<HashMap<String, (u64, CancellationToken)>>;

/// The requests of one router. Cheap to clone.
#[derive(Clone, Default)]
pub struct Fences {
    book: Arc<Book>,
}

/// A request's place in the book, until it is dropped.
pub struct Fenced {
    book: Arc<Book>,
    request_id: String,
    generation: u64,
    raised: CancellationToken,
}

fn lock(book: &Book) -> MutexGuard<'_, HashMap<String, (u64, CancellationToken)>> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fences {
    /// Lists a request; one of a lower generation hears of it.
    ///
    /// # Errors
    /// `RESUMED_ELSEWHERE` if a higher generation is served here.
    pub fn enter(&self, request_id: &str, generation: u64) -> Result<Fenced, Error> {
        let mut book = lock(&self.book);
        if let Some((other, raised)) = book.get(request_id) {
            if *other >= generation {
                return Err(resumed_elsewhere());
            }
            raised.cancel();
        }
        let raised = CancellationToken::new();
        book.insert(request_id.to_owned(), (generation, raised.clone()));
        Ok(Fenced {
            book: Arc::clone(&self.book),
            request_id: request_id.to_owned(),
            generation,
            raised,
        })
    }
}

impl Fenced {
    /// Which of the client's attempts this is.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Resolves when the client went on with a newer attempt. Cancel safe.
    pub async fn raised(&self) -> Error {
        self.raised.cancelled().await;
        resumed_elsewhere()
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        let mut book = lock(&self.book);
        if book
            .get(&self.request_id)
            .is_some_and(|(generation, _)| *generation == self.generation)
        {
            book.remove(&self.request_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[test]
    fn the_newest_attempt_stays_and_the_book_empties() {
        let fences = Fences::default();
        let first = fences.enter("a", 1).unwrap();
        let second = fences.enter("a", 2).unwrap();
        assert!(first.raised().now_or_never().is_some());
        assert!(second.raised().now_or_never().is_none());
        assert!(fences.enter("a", 2).is_err() && fences.enter("a", 1).is_err());
        let other = fences.enter("b", 1).unwrap();
        drop(first);
        assert!(
            fences.enter("a", 1).is_err(),
            "the second one is still there"
        );
        drop((second, other));
        assert!(lock(&fences.book).is_empty());
    }
}

//! A request whose stream is read as it goes, by a test that looks at the workers meanwhile.

use std::time::Duration;

use baton_proto::v1;
use baton_tests::client::{self, Answer, Collector};
use baton_tests::oracle::Case;
use baton_tests::process::RouterProcess;
use tonic::{Status, Streaming};

pub struct Asked {
    stream: Streaming<v1::GenerateEvent>,
    seen: Collector,
}

impl Asked {
    pub async fn new(router: &RouterProcess, case: &Case) -> Self {
        let request = v1::GenerateRequest {
            model: "rand".to_owned(),
            ..client::request(case)
        };
        let stream = router.grpc().generate(request).await;
        Self {
            stream: stream.expect("taken").into_inner(),
            seen: Collector::new(case.sampling.n),
        }
    }

    /// Whether its client has a token a moment later.
    pub async fn has_token(&mut self) -> bool {
        let moment = Duration::from_millis(1);
        while let Ok(event) = tokio::time::timeout(moment, self.stream.message()).await {
            match event.expect("no failure") {
                Some(event) => self.seen.take(event),
                None => break,
            }
        }
        self.seen.tokens() > 0
    }

    pub async fn rest(mut self) -> Result<Answer, Status> {
        while let Some(event) = self.stream.message().await? {
            self.seen.take(event);
        }
        Ok(self.seen.finish())
    }
}

//! Asks workers at known addresses who they are.

use std::sync::Arc;
use std::time::Duration;

use baton_membership::{Capacity, Role, WorkerRecord, WorkerState};
use baton_proto::protocol::{self, ProtocolVersion};
use baton_proto::status::from_status;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_proto::{Epoch, Error, ErrorKind, v1};

use super::Seed;
use crate::workers::Connect;

/// What one answer may take.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// The records of those who answer.
pub(super) async fn ask(seeds: Vec<Seed>, connect: Arc<dyn Connect>) -> Vec<WorkerRecord> {
    let asked = seeds.iter().map(|seed| async {
        let answer = tokio::time::timeout(ANSWER_TIME, describe(seed, &*connect)).await;
        let late = || Error::new(ErrorKind::Unavailable, "no answer in time");
        match answer.unwrap_or_else(|_| Err(late())) {
            Ok(record) => Some(record),
            Err(error) => {
                tracing::debug!(address = seed.address, %error, "a known worker does not answer");
                None
            }
        }
    });
    let answers = futures::future::join_all(asked).await;
    answers.into_iter().flatten().collect()
}

async fn describe(seed: &Seed, connect: &dyn Connect) -> Result<WorkerRecord, Error> {
    let channel = connect.connect(&seed.address)?;
    let request = v1::DescribeRequest {
        protocol: Some(protocol::CURRENT.into()),
    };
    let answer = if seed.role.prefills() {
        PrefillWorkerClient::new(channel).describe(request).await
    } else {
        DecodeWorkerClient::new(channel).describe(request).await
    };
    let said = answer.map_err(|status| from_status(&status))?.into_inner();
    record(seed, said)
}

fn record(seed: &Seed, said: v1::WorkerDescription) -> Result<WorkerRecord, Error> {
    let wrong = |field: &str, message: String| Error::invalid(field, message);
    let role = [Role::Prefill, Role::Decode, Role::Mixed]
        .into_iter()
        .find(|role| role.name() == said.role)
        .ok_or_else(|| wrong("role", format!("`{}` is not known here", said.role)))?;
    if role != seed.role {
        let message = format!("the worker is a {role} worker, not {}", seed.role);
        return Err(wrong("role", message));
    }
    let protocol = said
        .protocol
        .ok_or_else(|| wrong("protocol", "missing".to_owned()))?;
    let card = serde_json::from_str(&said.model_card_json)
        .map_err(|error| wrong("model_card_json", error.to_string()))?;
    let blocks = said.load.unwrap_or_default().blocks;
    let record = WorkerRecord {
        id: said.worker_id.into(),
        epoch: Epoch(said.epoch),
        role,
        // Its own stream says whether it takes work.
        state: WorkerState::Ready,
        control: seed.address.clone(),
        data: said.data_address,
        protocol: ProtocolVersion::from(protocol),
        card,
        capacity: Capacity {
            blocks: blocks.iter().map(|counts| counts.total).collect(),
            sequences_max: 0,
        },
        topology: String::new(),
    };
    record
        .validate()
        .map_err(|error| wrong("record", error.to_string()))?;
    Ok(record)
}

//! The product's own way: a grant, a lane, frames with digests, a commit.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use baton_kv_transfer::receiver::{
    BlockGrant, GrantRequest, GroupGrant, Receiver, ReceiverConfig, Senders,
};
use baton_kv_transfer::sender::{
    CommitOutcome, LaneTarget, Sender, SenderConfig, SourceBlock, TransportKind,
};
use baton_kv_transfer::{DataPort, DataPortConfig, LayoutDigest, NixlLender, NixlLibrary};
use baton_proto::kv_layout::ByteExtent;
use baton_proto::{Attempt, Epoch, RequestId};

use super::Sample;
use super::arena::{Arena, LAYERS};
use crate::commands::bench::cost::process_cpu_time;

const EPOCH: Epoch = Epoch(1);
const LAYOUT: LayoutDigest = LayoutDigest([0; 32]);
/// Long enough for any machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// A sender and a receiver with one transport between them.
pub struct Handoff {
    transport: TransportKind,
    runtime: tokio::runtime::Runtime,
    /// By ordinal and layer, at each end.
    sources: Vec<Vec<ByteExtent>>,
    targets: Vec<Vec<ByteExtent>>,
    sender: Sender,
    receiver: Receiver,
    port: DataPort,
}

impl Handoff {
    pub fn start(
        transport: TransportKind,
        from: &Arena,
        to: &Arena,
        nixl: Option<&NixlLibrary>,
    ) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start the runtime")?;
        let config = ReceiverConfig::new(EPOCH, LAYOUT, to.regions());
        let receiver = Receiver::start(config, Box::new(|_| {}))?;
        let port = DataPortConfig {
            nixl: nixl.cloned(),
            ..DataPortConfig::default()
        };
        let port = DataPort::bind(port, receiver.clone())?;
        let lender = nixl.map(|nixl| NixlLender::new(nixl, &from.regions()));
        let sender = Sender::start(SenderConfig {
            transports: vec![transport],
            nixl: lender.transpose()?,
            // Between rounds the others have their turn.
            lane_idle_max: DEADLINE,
            ..SenderConfig::new(from.regions())
        });
        let extents = |arena: &Arena| -> Vec<Vec<ByteExtent>> {
            let layers = |ordinal| {
                (0..LAYERS)
                    .map(|layer| arena.extent(ordinal, layer))
                    .collect()
            };
            (0..arena.ordinals()).map(layers).collect()
        };
        Ok(Self {
            transport,
            runtime,
            sources: extents(from),
            targets: extents(to),
            sender,
            receiver,
            port,
        })
    }

    /// Moves every part, from the first word to the receiver's acceptance.
    pub fn all(&mut self) -> anyhow::Result<Sample> {
        self.hand_over(self.sources.len(), LAYERS as usize)
    }

    /// Moves one part; microseconds.
    pub fn one_part(&mut self) -> anyhow::Result<f64> {
        Ok(self.hand_over(1, 1)?.seconds * 1e6)
    }

    fn hand_over(&self, ordinals: usize, layers: usize) -> anyhow::Result<Sample> {
        let blocks = self.targets[..ordinals].iter().zip(0..);
        let grant = self.receiver.grant(GrantRequest {
            request_id: RequestId::from("bench"),
            attempt: Attempt(1),
            epoch: EPOCH,
            groups: vec![GroupGrant {
                group: 0,
                layers: (0..layers as u32).collect(),
                blocks: blocks
                    .map(|(extents, ordinal)| BlockGrant {
                        ordinal,
                        layers: extents[..layers].to_vec(),
                    })
                    .collect(),
            }],
            senders: Senders::SameLayout,
            deadline: DEADLINE,
        })?;
        let target = LaneTarget {
            data_address: Some(self.port.local_address()),
            server_name: None,
            process_token: self.receiver.process_token(),
            lane_key: self.receiver.lane_key().clone(),
            ticket: grant.ticket,
            epoch: EPOCH,
            attempt: Attempt(1),
            request_id: RequestId::from("bench"),
            deadline: DEADLINE,
        };
        let (started, cpu) = (Instant::now(), process_cpu_time());
        let (outcome, statistics) = self.runtime.block_on(async {
            let transfer = self.sender.open(target, LAYOUT)?;
            for layer in 0..layers {
                let sources = self.sources[..ordinals].iter().zip(0..);
                let blocks: Vec<SourceBlock> = sources
                    .map(|(extents, ordinal)| SourceBlock {
                        ordinal,
                        extent: extents[layer],
                    })
                    .collect();
                transfer.push(0, layer as u32, &blocks).await?;
            }
            let outcome = transfer.commit(bytes::Bytes::new()).await;
            anyhow::Ok((outcome, transfer.statistics()))
        })?;
        let sample = Sample {
            seconds: started.elapsed().as_secs_f64(),
            cpu_seconds: (process_cpu_time() - cpu).as_secs_f64(),
        };
        ensure!(
            outcome == CommitOutcome::Committed && statistics.transport == Some(self.transport),
            "{:?}: {outcome:?} over {:?}",
            self.transport,
            statistics.transport
        );
        Ok(sample)
    }
}

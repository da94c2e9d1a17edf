//! Senders whose blocks are laid out otherwise: what arrives is what the receiver would
//! have written itself, whatever happens on the way, and nothing is written of what is
//! damaged, fenced or refused.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::fault_proxy::{Fault, FaultProxy};
use baton_kv_transfer::receiver::{
    AbortReason, BlockGrant, Convert, Event, EventKind, GrantRequest, GroupGrant, OtherLayouts,
    Receiver, ReceiverConfig, Regrant, RegrantRequest, Senders, Terminal, event,
};
use baton_kv_transfer::sender::{
    CommitOutcome, LaneTarget, Sender, SenderConfig, SourceBlock, Transfer, TransportKind, WireForm,
};
use baton_kv_transfer::{DataPort, DataPortConfig, LayoutDigest, Opening, Refusal, Ticket};
use baton_proto::kv_layout::{
    ByteExtent, KvDtype, KvGroup, KvGroupKind, KvLayout, KvOrigin, KvShard, SPAN_TOKENS,
};
use baton_proto::relayout::{KvRun, Relayout};
use baton_proto::{Attempt, Error, NumericsId, RequestId};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::pair::{Arena, EPOCH, Via, until};

const WINDOW: u32 = 30;
/// Blocks of a pool.
const BLOCKS: u32 = 64;

pub fn layout(block_size: u32, dtype: KvDtype) -> KvLayout {
    let group = |kind, layers: &[u32]| KvGroup {
        kind,
        layers: layers.to_vec(),
    };
    KvLayout {
        block_size,
        dtype,
        scale_group: dtype.scale_group(),
        kv_heads: 3,
        head_dim: 16,
        layers: 3,
        groups: vec![
            group(KvGroupKind::Full, &[0, 2]),
            group(KvGroupKind::SlidingWindow { window: WINDOW }, &[1]),
        ],
        numerics: NumericsId::derive(&[dtype.name().as_bytes()]),
        origin: Some(KvOrigin {
            model: "m".to_owned(),
            weights: "w".to_owned(),
            rope: "r".to_owned(),
            arithmetic: "a".to_owned(),
        }),
        shard: None,
    }
}

/// Heads 1 and 2.
pub fn shard(layout: KvLayout) -> KvLayout {
    KvLayout {
        kv_heads: 2,
        shard: Some(KvShard {
            first_head: 1,
            model_heads: 3,
        }),
        ..layout
    }
}

/// A span's bytes as a pool of `dtype` holds them. Those of one type are those of another
/// in the sense of [`Doubling`].
fn span(dtype: KvDtype, key: (u32, u32, u32, u32)) -> Vec<u8> {
    let (layer, kv, head, span) = key;
    let name = [layer as u8, kv as u8, head as u8, span as u8];
    let name = blake3::hash(&name);
    let half = name.as_bytes().iter().copied().cycle().take(16 * 16 * 2);
    match dtype {
        KvDtype::F16 => half.collect(),
        KvDtype::F32 => half.flat_map(|byte| [byte, byte]).collect(),
        other => panic!("no test data of {other}"),
    }
}

/// One layer of one block, by its first span.
fn part(layout: &KvLayout, layer: u32, ordinal: u32) -> Vec<u8> {
    let spans = layout.block_size / SPAN_TOKENS;
    let mut bytes = Vec::new();
    for kv in 0..2 {
        for head in layout.heads().0 {
            for at in ordinal * spans..(ordinal + 1) * spans {
                bytes.extend(span(layout.dtype, (layer, kv, head, at)));
            }
        }
    }
    bytes
}

/// A stand-in for the engine's arithmetic: every byte twice.
struct Doubling(Relayout);

impl Convert for Doubling {
    fn convert(&self, source: &[u8], target: &mut [u8], run: KvRun) {
        let (from, to) = (self.0.sender(), self.0.receiver());
        for kv in 0..2 {
            for head in 0..run.heads {
                for span in 0..run.spans {
                    let at = |layout: &KvLayout, first: u32, first_span: u32| {
                        (kv * layout.kv_heads + first + head) as usize * layout.head_bytes()
                            + (first_span + span) as usize * layout.span_bytes()
                    };
                    let from_at = at(from, run.from_head, run.from_span);
                    let to_at = at(to, run.to_head, run.to_span);
                    let source = &source[from_at..][..from.span_bytes()];
                    let target = &mut target[to_at..][..to.span_bytes()];
                    for (pair, byte) in target.chunks_exact_mut(2).zip(source) {
                        pair.fill(*byte);
                    }
                }
            }
        }
    }
}

pub struct Setup {
    pub via: Via,
    pub sender: KvLayout,
    pub receiver: KvLayout,
    pub tokens: u32,
    pub exact: bool,
    /// Positions that the receiver has already.
    pub hit: u32,
    /// What parts become on the wire.
    pub form: Option<WireForm>,
}

/// Both workers.
pub struct Pair {
    pub setup: Setup,
    pub receiver: Receiver,
    events: UnboundedReceiver<Event>,
    port: Option<DataPort>,
    pub proxy: Option<FaultProxy>,
    pub sender: Sender,
    source: Vec<Arc<Arena>>,
    destination: Vec<Arc<Arena>>,
    /// Block ids by group and ordinal.
    blocks: Vec<BTreeMap<u32, u32>>,
}

impl Pair {
    pub fn new(setup: Setup, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let shared = setup.via == Via::Shared;
        let mut arenas = |layout: &KvLayout, shared| -> Vec<Arc<Arena>> {
            let groups = 0..layout.groups.len();
            let bytes = |group| BLOCKS as usize * layout.block_bytes(group);
            groups
                .map(|group| Arena::new(bytes(group), shared, &mut rng))
                .collect()
        };
        let source = arenas(&setup.sender, shared);
        let destination = arenas(&setup.receiver, false);
        let wanted = |group: usize| -> Range<u32> {
            let layout = &setup.receiver;
            let first = layout.first_needed_ordinal(group, setup.tokens);
            first.max(setup.hit / layout.block_size)..layout.blocks_for(setup.tokens)
        };
        let mut shuffled = |ordinals: Range<u32>| {
            let mut blocks: Vec<u32> = (0..BLOCKS).collect();
            blocks.shuffle(&mut rng);
            ordinals.zip(blocks).collect()
        };
        let blocks = (0..2).map(|group| shuffled(wanted(group))).collect();

        let (sink, events) = event::channel();
        let regions = destination.iter().map(Arena::region).collect();
        let digest = LayoutDigest::of(&setup.receiver);
        let mut config = ReceiverConfig::new(EPOCH, digest, regions);
        config.resume_grace = Duration::from_secs(8);
        config.other_layouts = Some(OtherLayouts {
            own: setup.receiver.clone(),
            converters: Arc::new(|relayout| match relayout.sender().dtype {
                KvDtype::F16 => Ok(Box::new(Doubling(relayout.clone()))),
                other => Err(Error::invalid("kv_dtype", format!("no test reads {other}"))),
            }),
        });
        let receiver = Receiver::start(config, sink).unwrap();
        let port = DataPortConfig {
            silence_max: Duration::from_secs(5),
            ..DataPortConfig::default()
        };
        let port = (setup.via != Via::Loopback).then(|| DataPort::bind(port, receiver.clone()));
        let port = port.transpose().unwrap();
        let proxy = (setup.via == Via::Proxy)
            .then(|| FaultProxy::start(port.as_ref().unwrap().local_address()).unwrap());
        let mut config = SenderConfig::new(source.iter().map(Arena::region).collect());
        config.transports = vec![match setup.via {
            Via::Loopback => TransportKind::Loopback,
            Via::Shared => TransportKind::SharedMemory,
            _ => TransportKind::Tcp,
        }];
        if setup.form.is_some() {
            config.transports.push(TransportKind::Tcp);
        }
        config.silence_max = Duration::from_secs(5);
        config.reconnect_max = Duration::from_secs(8);
        let pair = Self {
            sender: Sender::start(config),
            setup,
            receiver,
            events,
            port,
            proxy,
            source,
            destination,
            blocks,
        };
        pair.compute(&pair.setup.sender);
        pair
    }

    /// The prompt's KV in the sender's pool: block n is ordinal n.
    fn compute(&self, layout: &KvLayout) {
        for (group, arena) in self.source.iter().enumerate() {
            for ordinal in 0..layout.blocks_for(self.setup.tokens) {
                for (index, layer) in layout.groups[group].layers.iter().enumerate() {
                    let at = extent(layout, group, ordinal, index).offset as usize;
                    arena.put(at, &part(layout, *layer, ordinal));
                }
            }
        }
    }

    pub fn grant(&self) -> Ticket {
        let layout = &self.setup.receiver;
        let group = |(group, blocks): (usize, &BTreeMap<u32, u32>)| {
            let layers = layout.groups[group].layers.clone();
            let block = |(ordinal, block): (&u32, &u32)| BlockGrant {
                ordinal: *ordinal,
                layers: (0..layers.len())
                    .map(|index| extent(layout, group, *block, index))
                    .collect(),
            };
            GroupGrant {
                group: group as u16,
                blocks: blocks.iter().map(block).collect(),
                layers: layers.clone(),
            }
        };
        let request = GrantRequest {
            request_id: RequestId::from("r"),
            attempt: Attempt(1),
            epoch: EPOCH,
            groups: self.blocks.iter().enumerate().map(group).collect(),
            senders: Senders::AnyLayout {
                tokens: self.setup.tokens,
                exact: self.setup.exact,
            },
            deadline: Duration::from_secs(20),
        };
        self.receiver.grant(request).unwrap().ticket
    }

    pub fn open(&self, ticket: Ticket, attempt: u32, layout: &KvLayout) -> Transfer {
        let target = self.target(ticket, attempt);
        match &self.setup.form {
            Some(form) => self.sender.open_as(target, form).unwrap(),
            None => {
                let opening = Opening::towards(layout, &self.setup.receiver);
                self.sender.open(target, opening).unwrap()
            }
        }
    }

    pub fn target(&self, ticket: Ticket, attempt: u32) -> LaneTarget {
        let address = self.port.as_ref().map(DataPort::local_address);
        LaneTarget {
            data_address: self.proxy.as_ref().map(FaultProxy::address).or(address),
            server_name: None,
            process_token: self.receiver.process_token(),
            lane_key: self.receiver.lane_key().clone(),
            ticket,
            epoch: EPOCH,
            attempt: Attempt(attempt),
            request_id: RequestId::from("r"),
            deadline: Duration::from_secs(20),
        }
    }

    /// Pushes what a sender laid out as `layout` has to, but for the layers in `without`.
    pub async fn push(&self, transfer: &Transfer, layout: &KvLayout, without: &[u32]) {
        let Ok(relayout) = Relayout::between(layout, &self.setup.receiver) else {
            return;
        };
        for group in 0..2 {
            let blocks = &self.blocks[group];
            let (Some((first, _)), Some((last, _))) =
                (blocks.first_key_value(), blocks.last_key_value())
            else {
                continue;
            };
            let sent = relayout.sent_ordinals(group, &(*first..last + 1), self.setup.tokens);
            for (index, layer) in layout.groups[group].layers.iter().enumerate() {
                let block = |ordinal| SourceBlock {
                    ordinal,
                    extent: extent(layout, group, ordinal, index),
                };
                let blocks: Vec<SourceBlock> = sent.clone().map(block).collect();
                if !without.contains(layer) {
                    // Fails once the receiver has refused.
                    let _ = transfer.push(group as u16, *layer, &blocks).await;
                }
            }
        }
    }

    pub async fn hand_off(&self) -> CommitOutcome {
        let transfer = self.open(self.grant(), 1, &self.setup.sender);
        self.push(&transfer, &self.setup.sender, &[]).await;
        let outcome = transfer.commit(Bytes::from_static(b"first")).await;
        transfer.quiesced().await;
        outcome
    }

    pub async fn terminal(&mut self) -> EventKind {
        loop {
            let event = tokio::time::timeout(Duration::from_secs(15), self.events.recv()).await;
            let what = event.expect("no event in time").unwrap().what;
            if !matches!(what, EventKind::Started | EventKind::LaneLost) {
                return what;
            }
        }
    }

    pub fn snapshot(&self) -> Vec<Vec<u8>> {
        self.destination.iter().map(|arena| arena.bytes()).collect()
    }

    /// Every position that the text after the prompt attends to is there as this receiver
    /// would have written it; what was not granted is as in `before`.
    pub fn assert_arrived(&self, before: &[Vec<u8>]) {
        let layout = &self.setup.receiver;
        let spans = layout.block_size / SPAN_TOKENS;
        let now = self.snapshot();
        for group in 0..2 {
            let mut expected = before[group].clone();
            let needed = match layout.groups[group].kind {
                KvGroupKind::Full => 0,
                KvGroupKind::SlidingWindow { window } => {
                    (self.setup.tokens + 1).saturating_sub(window)
                }
            };
            for (ordinal, block) in &self.blocks[group] {
                for (index, layer) in layout.groups[group].layers.iter().enumerate() {
                    let extent = extent(layout, group, *block, index);
                    let (at, len) = (extent.offset as usize, extent.len as usize);
                    let right = part(layout, *layer, *ordinal);
                    let bytes = layout.span_bytes();
                    for (nth, span) in right.chunks(bytes).enumerate() {
                        let position = (ordinal * spans + nth as u32 % spans) * SPAN_TOKENS;
                        let from = at + nth * bytes;
                        let granted =
                            position + SPAN_TOKENS > needed && position < self.setup.tokens;
                        // Outside of what is needed a block may hold its own past.
                        let kept = &now[group][from..from + bytes];
                        let span = if granted { span } else { kept };
                        expected[from..from + bytes].copy_from_slice(span);
                    }
                    assert_eq!(right.len(), len);
                }
            }
            assert!(now[group] == expected, "group {group}");
        }
    }
}

pub fn extent(layout: &KvLayout, group: usize, block: u32, index: usize) -> ByteExtent {
    let offset = block as usize * layout.block_bytes(group) + index * layout.layer_bytes();
    ByteExtent {
        offset: offset as u64,
        len: layout.layer_bytes() as u32,
        region: group as u16,
    }
}

pub fn setup(via: Via, sender: KvLayout, receiver: KvLayout) -> Setup {
    Setup {
        via,
        sender,
        receiver,
        tokens: 143,
        exact: false,
        hit: 0,
        form: None,
    }
}

#[tokio::test]
async fn every_pair_of_block_sizes_ends_in_the_receivers_own_bytes() {
    let mut rng = StdRng::seed_from_u64(1);
    for via in [Via::Loopback, Via::Shared, Via::Tcp] {
        for (from, to) in (0..16).map(|pair| (16 << (pair / 4), 16 << (pair % 4))) {
            let receiver = layout(to, KvDtype::F16);
            let mut setup = setup(via, layout(from, KvDtype::F16), receiver);
            setup.tokens = rng.random_range(1..400);
            setup.hit = rng.random_range(0..setup.tokens) / to * to;
            // The bits are kept, so the tokens are those of any other transfer.
            setup.exact = true;
            let mut pair = Pair::new(setup, rng.random());
            let before = pair.snapshot();
            assert_eq!(pair.hand_off().await, CommitOutcome::Committed);
            let EventKind::Completed { foreign, .. } = pair.terminal().await else {
                panic!("{via:?} {from} to {to}");
            };
            pair.assert_arrived(&before);
            // Larger blocks may reach behind the window, where the sender holds no more.
            assert!(!foreign || to > from, "{via:?} {from} to {to}");
        }
    }
}

#[tokio::test]
async fn another_type_is_converted_and_said_to_be_foreign() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp] {
        for (from, to) in [(16, 16), (32, 16), (16, 64)] {
            let sender = layout(from, KvDtype::F16);
            let receiver = shard(layout(to, KvDtype::F32));
            let mut pair = Pair::new(setup(via, sender, receiver), 2);
            let before = pair.snapshot();
            assert_eq!(pair.hand_off().await, CommitOutcome::Committed);
            let event = pair.terminal().await;
            let foreign = matches!(event, EventKind::Completed { foreign: true, .. });
            assert!(foreign, "{via:?} {event:?}");
            pair.assert_arrived(&before);
        }
    }
}

#[tokio::test]
async fn equal_layouts_take_the_plain_way() {
    for via in [Via::Loopback, Via::Tcp] {
        let both = layout(32, KvDtype::F16);
        let opening = Opening::towards(&both, &both);
        assert_eq!(opening, Opening::Same(LayoutDigest::of(&both)));
        let mut pair = Pair::new(setup(via, both.clone(), both), 3);
        let before = pair.snapshot();
        assert_eq!(pair.hand_off().await, CommitOutcome::Committed);
        let event = pair.terminal().await;
        assert!(matches!(event, EventKind::Completed { foreign: false, .. }));
        pair.assert_arrived(&before);
    }
}

#[tokio::test]
async fn only_blocks_that_lack_positions_behind_the_window_are_foreign() {
    // The window begins at 101 - 30 = 71. Blocks of 32 hold 64.. there, which blocks of
    // 16 hold as well; of 121 - 30 = 91 they hold 80.. only.
    for (tokens, lacks) in [(100, false), (120, true)] {
        let (from, to) = (layout(16, KvDtype::F16), layout(32, KvDtype::F16));
        let mut setup = setup(Via::Loopback, from, to);
        setup.tokens = tokens;
        let mut pair = Pair::new(setup, 4);
        assert_eq!(pair.hand_off().await, CommitOutcome::Committed);
        let EventKind::Completed { foreign, .. } = pair.terminal().await else {
            panic!("not completed");
        };
        assert_eq!(foreign, lacks, "{tokens}");
    }
}

#[tokio::test]
async fn faults_on_the_way_change_nothing() {
    for fault in [
        Fault::DropData(1),
        Fault::RepeatData(0),
        Fault::SwapData(0),
        Fault::DamagePayload(0),
        Fault::DamageHeader(1),
        Fault::CutInData(1),
        Fault::CutAfterData(0),
        Fault::CutBeforeCommit,
        Fault::CutAfterCommit,
    ] {
        let receiver = shard(layout(32, KvDtype::F32));
        let mut pair = Pair::new(setup(Via::Proxy, layout(16, KvDtype::F16), receiver), 5);
        let before = pair.snapshot();
        pair.proxy.as_ref().unwrap().inject(fault);
        assert_eq!(pair.hand_off().await, CommitOutcome::Committed, "{fault:?}");
        let event = pair.terminal().await;
        assert!(matches!(event, EventKind::Completed { .. }), "{event:?}");
        pair.assert_arrived(&before);
        assert!(pair.proxy.as_ref().unwrap().is_spent(), "{fault:?}");
    }
}

#[tokio::test]
async fn a_damaged_frame_reaches_no_block() {
    let receiver = layout(32, KvDtype::F32);
    let mut pair = Pair::new(setup(Via::Proxy, layout(16, KvDtype::F16), receiver), 6);
    let before = pair.snapshot();
    let proxy = pair.proxy.as_ref().unwrap();
    // The first frame damaged, however often it is sent.
    for frame in 0..64 {
        proxy.inject(Fault::DamagePayload(frame));
    }
    assert_eq!(
        pair.hand_off().await,
        CommitOutcome::Refused(Refusal::Corrupt)
    );
    let reason = AbortReason::Corrupt;
    assert_eq!(pair.terminal().await, EventKind::Aborted { reason });
    assert!(pair.snapshot() == before);
    assert!(pair.receiver.statistics().frames_corrupt > 3);
}

#[tokio::test]
async fn nothing_is_written_after_a_revoke_although_the_frame_goes_on() {
    let receiver = layout(32, KvDtype::F32);
    let pair = Pair::new(setup(Via::Proxy, layout(16, KvDtype::F16), receiver), 7);
    let proxy = pair.proxy.as_ref().unwrap();
    proxy.inject(Fault::HoldInData(1));
    let ticket = pair.grant();
    let transfer = pair.open(ticket, 1, &pair.setup.sender);
    pair.push(&transfer, &pair.setup.sender, &[]).await;
    until("the frame is held half way", || proxy.is_holding()).await;
    assert_eq!(pair.receiver.revoke(ticket).await, Some(Terminal::Fenced));
    // The blocks are ours again: their new owner writes them.
    pair.destination.iter().for_each(|arena| arena.fill(0xA5));
    let frames = pair.receiver.statistics().frames;
    proxy.release();
    until("the rest of the frame came in", || {
        pair.receiver.statistics().frames > frames
    })
    .await;
    let outcome = transfer.commit(Bytes::new()).await;
    assert_eq!(outcome, CommitOutcome::Refused(Refusal::Fenced));
    let owned = |arena: &Arc<Arena>| arena.bytes().iter().all(|byte| *byte == 0xA5);
    assert!(pair.destination.iter().all(owned));
}

#[tokio::test]
async fn a_commit_without_all_parts_of_the_senders_layout_is_refused() {
    let receiver = layout(16, KvDtype::F16);
    let pair = Pair::new(setup(Via::Tcp, layout(64, KvDtype::F16), receiver), 8);
    let transfer = pair.open(pair.grant(), 1, &pair.setup.sender);
    pair.push(&transfer, &pair.setup.sender, &[2]).await;
    let outcome = transfer.commit(Bytes::new()).await;
    assert_eq!(outcome, CommitOutcome::Refused(Refusal::Incomplete));
}

#[tokio::test]
async fn a_newer_attempt_may_come_from_another_layout() {
    let layouts = [
        layout(16, KvDtype::F16),
        layout(32, KvDtype::F16),
        layout(64, KvDtype::F16),
    ];
    for (first, second) in [(1, 2), (1, 0), (0, 1), (1, 1)] {
        let receiver = layouts[0].clone();
        let mut pair = Pair::new(setup(Via::Tcp, layouts[first].clone(), receiver), 9);
        let before = pair.snapshot();
        let ticket = pair.grant();
        let old = pair.open(ticket, 1, &layouts[first]);
        pair.push(&old, &layouts[first], &[1]).await;
        until("something arrived", || {
            pair.receiver.progress(ticket).unwrap().parts_received > 0
        })
        .await;
        let newer = RegrantRequest {
            attempt: Attempt(2),
            deadline: Duration::from_secs(20),
            keep_received: true,
        };
        let Ok(Regrant::Granted(grant)) = pair.receiver.regrant(ticket, newer).await else {
            panic!("not granted");
        };
        old.abort("superseded");
        old.quiesced().await;
        pair.compute(&layouts[second]);
        let new = pair.open(grant.ticket, 2, &layouts[second]);
        pair.push(&new, &layouts[second], &[]).await;
        assert_eq!(new.commit(Bytes::new()).await, CommitOutcome::Committed);
        new.quiesced().await;
        let event = pair.terminal().await;
        assert!(matches!(event, EventKind::Completed { .. }), "{event:?}");
        pair.assert_arrived(&before);
    }
}

#[tokio::test]
async fn what_does_not_fit_is_refused_before_any_byte_by_name() {
    let ours = || layout(16, KvDtype::F16);
    let other_rope = || {
        let mut layout = ours();
        layout.numerics = NumericsId([7; 16]);
        layout.origin.as_mut().unwrap().rope = "another".to_owned();
        layout
    };
    let mut fewer_layers = ours();
    fewer_layers.groups[0].layers.pop();
    fewer_layers.layers = 2;
    for (sender, receiver, exact, field, values) in [
        (other_rope(), ours(), false, "rope", ["another", "`r`"]),
        (fewer_layers, ours(), false, "layers", ["`2`", "`3`"]),
        (shard(ours()), ours(), false, "kv_heads", ["1..3", "0..3"]),
        (
            ours(),
            layout(16, KvDtype::F32),
            true,
            "kv_dtype",
            ["f16", "f32"],
        ),
        // The converters' own word.
        (
            layout(16, KvDtype::F32),
            ours(),
            false,
            "kv_dtype",
            ["no test", "f32"],
        ),
    ] {
        for via in [Via::Loopback, Via::Tcp] {
            let mut setup = setup(via, sender.clone(), receiver.clone());
            setup.exact = exact;
            let mut pair = Pair::new(setup, 10);
            let before = pair.snapshot();
            let transfer = pair.open(pair.grant(), 1, &pair.setup.sender);
            let outcome = transfer.commit(Bytes::new()).await;
            assert_eq!(outcome, CommitOutcome::Refused(Refusal::LayoutMismatch));
            let EventKind::Aborted {
                reason: AbortReason::Unfit(error),
            } = pair.terminal().await
            else {
                panic!("{field} was taken");
            };
            assert_eq!(error.field, field);
            for value in values {
                assert!(error.message.contains(value), "{}", error.message);
            }
            assert!(pair.snapshot() == before);
        }
    }
}

#[tokio::test]
async fn a_description_that_is_none_is_refused_and_the_lane_goes_on() {
    for text in ["", "{}", "[1", "\u{0}"] {
        let both = layout(16, KvDtype::F16);
        let mut pair = Pair::new(setup(Via::Tcp, both.clone(), both), 11);
        let address = pair.port.as_ref().map(DataPort::local_address);
        let target = LaneTarget {
            data_address: address,
            server_name: None,
            process_token: pair.receiver.process_token(),
            lane_key: pair.receiver.lane_key().clone(),
            ticket: pair.grant(),
            epoch: EPOCH,
            attempt: Attempt(1),
            request_id: RequestId::from("r"),
            deadline: Duration::from_secs(20),
        };
        let opening = Opening::Other(Bytes::copy_from_slice(text.as_bytes()));
        let transfer = pair.sender.open(target, opening).unwrap();
        let outcome = transfer.commit(Bytes::new()).await;
        assert_eq!(outcome, CommitOutcome::Refused(Refusal::LayoutMismatch));
        let EventKind::Aborted {
            reason: AbortReason::Unfit(error),
        } = pair.terminal().await
        else {
            panic!("`{text}` was taken");
        };
        assert_eq!(error.field, "layout");
        assert_eq!(pair.hand_off().await, CommitOutcome::Committed);
    }
}

//! Fuzz targets of what a sender describes itself by: its layout (`OpenAs`), and how its memory
//! can be read (`Lend`).
//!
//! `open_as`: a text that is taken for a layout never panics, takes memory in proportion to
//! itself and to what is granted, and, where it fits, sends every part into blocks that were
//! granted, inside their bounds. `lend`: decoding never panics and takes memory in proportion
//! to the payload; what decodes is the same after a second trip.
//!
//! `cargo test` draws a second's worth of cases per target. Longer, on stable:
//!
//! ```text
//! BOLERO_RANDOM_ITERATIONS=1000000000 BOLERO_RANDOM_TEST_TIME_MS=300000 \
//!     cargo test -p baton-kv-transfer --test fuzz_described -- --nocapture --test-threads 1
//! ```
//!
//! The targets are bolero's, so that `cargo bolero test --sanitizer NONE` can steer them by
//! coverage. A failure prints the case and the `BOLERO_RANDOM_SEED` that repeats it.

#[path = "../../engine/tests/model_support/allocations.rs"]
mod allocations;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use allocations::peak_of;
use baton_kv_transfer::codec::{CONTROL_BYTES_MAX, Control, HEADER_BYTES, Header, Kind, Scope};
use baton_kv_transfer::part::PartRange;
use baton_kv_transfer::receiver::parts::PartTable;
use baton_kv_transfer::receiver::relayout::Plan;
use baton_kv_transfer::receiver::{BlockGrant, Convert, GroupGrant, OtherLayouts};
use baton_proto::NumericsId;
use baton_proto::kv_layout::{
    ByteExtent, KvDtype, KvGroup, KvGroupKind, KvLayout, KvOrigin, KvShard, SPAN_TOKENS,
};
use baton_proto::relayout::{KvRun, Relayout};
use bolero::{TypeGenerator, produce};

const TEST_TIME: Duration = Duration::from_secs(1);
const LAYERS: u32 = 3;
/// Blocks granted in each group.
const BLOCKS: u32 = 6;

/// True 15 times in 16, so that most cases get past any one check.
#[derive(Clone, Copy, Debug, TypeGenerator)]
struct Odds(u8);

impl Odds {
    fn or<T>(self, right: T, other: T) -> T {
        if self.0 >= 16 { right } else { other }
    }
}

fn own() -> KvLayout {
    KvLayout {
        block_size: 32,
        dtype: KvDtype::F16,
        scale_group: 0,
        kv_heads: 2,
        head_dim: 16,
        layers: LAYERS,
        groups: vec![
            KvGroup {
                kind: KvGroupKind::Full,
                layers: vec![0, 2],
            },
            KvGroup {
                kind: KvGroupKind::SlidingWindow { window: 40 },
                layers: vec![1],
            },
        ],
        numerics: NumericsId([1; 16]),
        origin: Some(KvOrigin {
            model: "m".to_owned(),
            weights: "w".to_owned(),
            rope: "r".to_owned(),
            arithmetic: "a".to_owned(),
        }),
        shard: Some(KvShard {
            first_head: 1,
            model_heads: 4,
        }),
    }
}

/// A description that is nearly right, or right and of another layout.
#[derive(Clone, Debug, TypeGenerator)]
struct Described {
    block_size: (Odds, u32),
    blocks: u8,
    dtype: u8,
    scale_group: (Odds, u32),
    heads: (Odds, u32, u32, u32),
    first_head: u8,
    head_dim: (Odds, u32),
    layers: (Odds, u32),
    window: (Odds, u32),
    groups: (Odds, u8),
    numerics: (Odds, u8),
    origin: Odds,
    /// Bytes of the text that become others.
    typos: [(u16, u8); 3],
    typed: u8,
    cut: (Odds, u16),
}

impl Described {
    fn text(&self) -> Vec<u8> {
        let mut layout = own();
        let pick = |(odds, other): (Odds, u32), right| odds.or(right, other);
        layout.block_size = pick(self.block_size, 16 << (self.blocks % 4));
        layout.dtype = KvDtype::ALL[usize::from(self.dtype) % KvDtype::ALL.len()];
        layout.scale_group = pick(self.scale_group, layout.dtype.scale_group());
        let (odds, first_head, kv_heads, model_heads) = self.heads;
        let shard = (u32::from(self.first_head % 2), 3, 4);
        let (first, heads, of) = odds.or(shard, (first_head, kv_heads, model_heads));
        layout.kv_heads = heads;
        layout.shard = Some(KvShard {
            first_head: first,
            model_heads: of,
        });
        layout.head_dim = pick(self.head_dim, layout.head_dim);
        layout.layers = pick(self.layers, layout.layers);
        layout.groups[1].kind = KvGroupKind::SlidingWindow {
            window: pick(self.window, 40),
        };
        let groups = layout.groups.len();
        let kept = self
            .groups
            .0
            .or(groups, usize::from(self.groups.1) % groups);
        layout.groups.truncate(kept);
        layout.numerics =
            NumericsId([self.numerics.0.or(layout.dtype as u8 + 9, self.numerics.1); 16]);
        if layout.dtype == own().dtype {
            layout.numerics = self.numerics.0.or(own().numerics, layout.numerics);
        }
        if self.origin.or(false, true) {
            layout.origin = None;
        }
        let mut text = layout.to_json().into_bytes();
        // Most texts are whole.
        for (at, byte) in &self.typos[..usize::from(self.typed.saturating_sub(252))] {
            let at = usize::from(*at) % text.len();
            text[at] = *byte;
        }
        let (odds, len) = self.cut;
        let len = odds.or(text.len(), usize::from(len));
        text.truncate(len);
        text
    }
}

/// Fills what it is told to fill, and looks at nothing else.
struct Any;

impl Convert for Any {
    fn convert(&self, _: &[u8], _: &mut [u8], _: KvRun) {}
}

fn others() -> OtherLayouts {
    OtherLayouts {
        own: own(),
        converters: Arc::new(|_| Ok(Box::new(Any))),
    }
}

fn grants() -> Vec<GroupGrant> {
    let own = own();
    let bytes = own.layer_bytes() as u32;
    let group = |(index, group): (usize, &KvGroup)| GroupGrant {
        group: index as u16,
        layers: group.layers.clone(),
        blocks: (2..2 + BLOCKS)
            .map(|ordinal| BlockGrant {
                ordinal,
                layers: (0..group.layers.len() as u32)
                    .map(|layer| ByteExtent {
                        offset: u64::from((ordinal * LAYERS + layer) * bytes),
                        len: bytes,
                        region: index as u16,
                    })
                    .collect(),
            })
            .collect(),
    };
    own.groups.iter().enumerate().map(group).collect()
}

fn frame(kind: Kind, payload: &[u8]) -> Header {
    Header {
        kind,
        scope: Scope::LANE,
        range: PartRange {
            group: 0,
            layer: 0,
            first: 0,
            count: 0,
        },
        payload_len: payload.len() as u32,
        payload_crc: crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, payload) as u32,
    }
}

/// Whether `run` is inside a part of each end.
fn is_inside(run: KvRun, relayout: &Relayout) -> bool {
    let end = |first: u32, len: u32, of: u32| first.checked_add(len).is_some_and(|end| end <= of);
    let (from, to) = (relayout.sender(), relayout.receiver());
    let spans = |layout: &KvLayout| layout.block_size / SPAN_TOKENS;
    run.spans > 0
        && end(run.from_span, run.spans, spans(from))
        && end(run.to_span, run.spans, spans(to))
        && end(run.from_head, run.heads, from.kv_heads)
        && end(run.to_head, run.heads, to.kv_heads)
}

#[test]
fn open_as() {
    // A plan that panics leaves nothing of these behind.
    let others = AssertUnwindSafe(others());
    let grants = grants();
    let granted: Vec<ByteExtent> = (grants.iter().flat_map(|grant| &grant.blocks))
        .flat_map(|block| block.layers.clone())
        .collect();
    let fitting = std::sync::atomic::AtomicU64::new(0);
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator((produce::<Described>(), produce::<u32>()))
        .for_each(|(described, tokens): &(Described, u32)| {
            let others = &others;
            let text = described.text();
            let header = frame(Kind::OpenAs, &text);
            let Ok(Control::OpenAs { layout }) = Control::decode(&header, &text) else {
                panic!("any text is one");
            };
            assert_eq!(layout, text);
            let (plan, bytes) = peak_of(|| Plan::new(&layout, others));
            // Two layouts, their names, and an error that shows the groups.
            assert!(bytes <= 64 * text.len() + 16_384, "{bytes} bytes");
            let Ok(plan) = plan else { return };
            let relayout = Relayout::between(&KvLayout::from_json(&text).unwrap(), &own());
            let relayout = relayout.unwrap();
            fitting.fetch_add(1, std::sync::atomic::Ordering::Relaxed);

            let mut table = PartTable::new(&grants).unwrap();
            let plan = Arc::new(plan);
            let (parts, bytes) = peak_of(|| {
                table.arrange(Some(&plan), *tokens);
                table.progress().parts_total as usize
            });
            assert!(parts <= granted.len() * 8, "{parts} parts");
            assert!(bytes <= granted.len() * 2048, "{bytes} bytes");
            for number in 0..parts {
                for target in table.targets(number) {
                    assert!(granted.contains(&target.extent));
                    assert!(is_inside(target.run, &relayout), "{target:?}");
                    if !relayout.converts() {
                        for copy in relayout.copies(target.run) {
                            assert!(copy.from + copy.len <= relayout.sent_bytes());
                            assert!(copy.to + copy.len <= own().layer_bytes());
                        }
                    }
                }
            }
        });
    let fitting = fitting.into_inner();
    println!("open_as: {fitting} layouts that fit");
    assert!(fitting > 0, "nothing got past the checks");
}

/// A payload of `Lend` whose counts may lie.
#[derive(Clone, Debug, TypeGenerator)]
struct Lent {
    probe: [u8; 32],
    probe_at: u64,
    count: (Odds, u16),
    cut: (Odds, u16),
}

#[test]
fn lend() {
    let regions = produce::<Vec<(u64, u64)>>().with().len(0..=40_usize);
    let metadata = produce::<Vec<u8>>().with().len(0..=600_usize);
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator((produce::<Lent>(), regions, metadata))
        .for_each(|(lent, regions, metadata)| {
            let (odds, count) = lent.count;
            let count = odds.or(regions.len() as u16, count);
            let mut payload = lent.probe.to_vec();
            payload.extend(lent.probe_at.to_le_bytes());
            payload.extend(count.to_le_bytes());
            for (base, len) in regions {
                payload.extend(base.to_le_bytes());
                payload.extend(len.to_le_bytes());
            }
            payload.extend(metadata);
            let (odds, len) = lent.cut;
            let len = odds.or(payload.len(), usize::from(len));
            payload.truncate(len.min(CONTROL_BYTES_MAX));
            let header = frame(Kind::Lend, &payload);
            let header = Header::decode(&header.encode()).unwrap();
            let (decoded, bytes) = peak_of(|| Control::decode(&header, &payload));
            assert!(bytes <= 3 * payload.len() + 64, "{bytes} bytes");
            let Ok(control) = decoded else { return };
            let again = control.encode(Scope::LANE);
            assert_eq!(again[HEADER_BYTES..], payload);
            assert_eq!(
                Control::decode(&header, &again[HEADER_BYTES..]),
                Ok(control)
            );
        });
}

//! From the engine's ready layers to what a lane reads, and from the router's lane
//! to where it goes, and as what.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::api::OrdinalRange;
use baton_engine::kv::{KvMemory, LayerConverter};
use baton_kv_transfer::receiver::Convert;
use baton_kv_transfer::sender::{LaneTarget, Sender, SourceBlock, WireForm};
use baton_kv_transfer::{LaneKey, Opening, ProcessToken, Ticket, WireChoice};
use baton_proto::kv_layout::KvLayout;
use baton_proto::relayout::{Fit, KvRun, Relayout, int8_on_wire};
use baton_proto::transport::TlsSettings;
use baton_proto::work::WorkOrder;
use baton_proto::{Attempt, Epoch, Error, RequestId, v1};

/// A lane as the router passed it on, checked.
pub(crate) struct Lane {
    pub(crate) target: LaneTarget,
    /// What the receiver is told of this worker's layout.
    pub(crate) opening: Opening,
    /// What parts are on the wire, if that is not what the pool stores.
    pub(crate) form: Option<WireForm>,
    /// In this worker's ordinals.
    pub(crate) ship: Vec<OrdinalRange>,
}

/// Rounds what this worker stores as its engine would.
struct Rounded(LayerConverter);

impl Convert for Rounded {
    fn convert(&self, source: &[u8], target: &mut [u8], run: KvRun) {
        self.0.convert(source, target, run);
    }
}

/// What parts of a pool laid out as `own` are on the wire; `None` as they are stored, also
/// where another form would not be smaller.
///
/// # Errors
/// Whatever the engine says that cannot round such heads.
pub(crate) fn wire_form(choice: WireChoice, own: &KvLayout) -> Result<Option<WireForm>, Error> {
    let form = match choice {
        WireChoice::Native => None,
        WireChoice::Int8 => int8_on_wire(own),
    };
    let Some(form) = form else {
        return Ok(None);
    };
    let relayout = Relayout::between(own, &form)?;
    let converter = LayerConverter::new(&relayout)
        .map_err(|error| Error::new(error.kind(), error.to_string()))?;
    let form = WireForm::new(&relayout, Arc::new(Rounded(converter)))
        .map_err(|error| Error::invalid("kv_wire", error.to_string()))?;
    Ok(Some(form))
}

/// This worker's end of every lane.
#[derive(Clone, Copy)]
pub(crate) struct Ours<'a> {
    pub(crate) layout: &'a KvLayout,
    pub(crate) form: Option<&'a WireForm>,
    pub(crate) tls: &'a TlsSettings,
    pub(crate) sender: &'a Sender,
}

/// Checks a lane against this worker's layout and TLS settings, and resolves its address.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the field, or `UNAVAILABLE`: reason `LAYOUT_MISMATCH`,
/// naming the field that stands in the way and both values, or `DATA_TLS_MISMATCH`,
/// saying which end has TLS.
pub(crate) async fn parse_lane(
    wire: v1::Lane,
    order: &WorkOrder,
    ours: Ours<'_>,
) -> Result<Lane, Error> {
    let theirs = KvLayout::from_json(wire.layout_json.as_bytes())
        .map_err(|error| Error::invalid("lane.layout_json", error.to_string()))?;
    let relayout = meet(ours.layout, &theirs, order.exact)?;
    let tokens = order.prompt.len() as u32;
    let mut target = parse_target(&wire, &order.request_id, ours.tls, ours.sender).await?;
    if let Some(left) = order.deadline {
        target.deadline = target.deadline.min(left);
    }
    let form = ours.form.filter(|_| ours.sender.goes_over_tcp(&target));
    let form = form.and_then(|form| on_wire(form, &theirs, order.exact));
    let relayout = form.as_ref().map_or(&relayout, |(_, relayout)| relayout);
    Ok(Lane {
        ship: ranges(&wire.wanted, relayout, tokens)?,
        opening: Opening::towards(ours.layout, &theirs),
        form: form.map(|(form, _)| form),
        target,
    })
}

/// Where a lane leads.
///
/// # Errors
/// As [`parse_lane`], but for the layout, which is not looked at.
pub(crate) async fn parse_target(
    wire: &v1::Lane,
    request_id: &RequestId,
    tls: &TlsSettings,
    sender: &Sender,
) -> Result<LaneTarget, Error> {
    let malformed = |field: &str| Error::invalid(field, "has the wrong length");
    let process_token = ProcessToken::from_bytes(&wire.process_token)
        .ok_or_else(|| malformed("lane.process_token"))?;
    if !sender.stays_in_process(process_token) {
        check_tls(wire, tls.is_enabled())?;
    }
    Ok(LaneTarget {
        data_address: resolve(&wire.data_address).await?,
        server_name: match tls.is_enabled() && !wire.data_address.is_empty() {
            true => Some(tls.expected_name(&wire.data_address)?),
            false => None,
        },
        process_token,
        lane_key: LaneKey::from_bytes(&wire.lane_key).ok_or_else(|| malformed("lane.lane_key"))?,
        ticket: Ticket::from_bytes(&wire.ticket).ok_or_else(|| malformed("lane.ticket"))?,
        epoch: Epoch(wire.epoch),
        attempt: Attempt(wire.attempt),
        request_id: request_id.clone(),
        deadline: Duration::from_millis(wire.deadline_ms),
    })
}

/// The form, and how the receiver takes it; `None` for what travels as it is stored: tokens
/// that have to be exact, and whatever the receiver would not take.
fn on_wire(form: &WireForm, theirs: &KvLayout, exact: bool) -> Option<(WireForm, Relayout)> {
    let relayout = Relayout::between(form.layout(), theirs).ok()?;
    (!exact).then(|| (form.clone(), relayout))
}

/// How a receiver laid out as `theirs` takes this worker's blocks. The router asked the
/// same before it paired the two; this is the second line.
fn meet(ours: &KvLayout, theirs: &KvLayout, exact: bool) -> Result<Relayout, Error> {
    let relayout = Relayout::between(ours, theirs)?;
    if exact {
        relayout.check_exact()?;
    }
    Ok(relayout)
}

/// What of this worker's blocks holds the ordinals that the receiver wants.
fn ranges(
    wanted: &[v1::OrdinalRange],
    relayout: &Relayout,
    tokens: u32,
) -> Result<Vec<OrdinalRange>, Error> {
    let groups = relayout.sender().groups.len();
    wanted
        .iter()
        .map(|range| {
            let group = u16::try_from(range.group)
                .ok()
                .filter(|group| usize::from(*group) < groups);
            match (group, range.first.checked_add(range.count)) {
                (Some(group), Some(end)) if relayout.fit() == Fit::Same => Ok(OrdinalRange {
                    group,
                    first: range.first,
                    count: end - range.first,
                }),
                (Some(group), Some(end)) => {
                    let wanted = range.first..end;
                    let sent = relayout.sent_ordinals(usize::from(group), &wanted, tokens);
                    Ok(OrdinalRange {
                        group,
                        first: sent.start,
                        count: sent.end - sent.start,
                    })
                }
                _ => Err(Error::invalid(
                    "lane.wanted",
                    format!(
                        "group {} with ordinals {}+{} is not in the layout's {groups} groups",
                        range.group, range.first, range.count,
                    ),
                )),
            }
        })
        .collect()
}

/// Refuses a data port that has TLS if this worker has none, and the other way round.
fn check_tls(wire: &v1::Lane, ours: bool) -> Result<(), Error> {
    let Some(theirs) = wire.tls.filter(|theirs| *theirs != ours) else {
        return Ok(());
    };
    let word = |tls: bool| if tls { "with" } else { "without" };
    Err(Error::new(
        baton_proto::ErrorKind::Unavailable,
        format!(
            "the data port `{}` is {} TLS and this prefill worker is {} TLS settings",
            wire.data_address,
            word(theirs),
            word(ours)
        ),
    )
    .with_reason("DATA_TLS_MISMATCH"))
}

async fn resolve(address: &str) -> Result<Option<SocketAddr>, Error> {
    if address.is_empty() {
        return Ok(None);
    }
    let unreachable = |message: String| {
        Error::new(
            baton_proto::ErrorKind::Unavailable,
            format!("data address `{address}`: {message}"),
        )
        .with_reason("DATA_ADDRESS_UNREACHABLE")
    };
    let resolved = tokio::net::lookup_host(address)
        .await
        .map_err(|error| unreachable(error.to_string()))?;
    baton_proto::address::preferred(resolved)
        .map(Some)
        .ok_or_else(|| unreachable("resolves to nothing".to_owned()))
}

/// The extents of one layer in the given blocks, and their bytes together.
pub(crate) fn source_blocks(
    memory: &KvMemory,
    group: u16,
    layer: u32,
    blocks: &[(u32, u32)],
) -> Option<(Vec<SourceBlock>, u64)> {
    let group = usize::from(group);
    let index = memory.layout().groups[group]
        .layers
        .iter()
        .position(|own| *own == layer)?;
    let sources: Vec<SourceBlock> = blocks
        .iter()
        .map(|(ordinal, block)| SourceBlock {
            ordinal: *ordinal,
            extent: memory.extent(group, *block, index),
        })
        .collect();
    let bytes = sources
        .iter()
        .map(|source| u64::from(source.extent.len))
        .sum();
    Some((sources, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::NumericsId;
    use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvOrigin};

    fn layout(block_size: u32, dtype: KvDtype) -> KvLayout {
        KvLayout {
            block_size,
            dtype,
            scale_group: dtype.scale_group(),
            kv_heads: 1,
            head_dim: 16,
            layers: 1,
            groups: vec![KvGroup {
                kind: KvGroupKind::Full,
                layers: vec![0],
            }],
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

    #[test]
    fn wanted_ordinals_become_our_own() {
        let wanted = |group, first, count| v1::OrdinalRange {
            group,
            first,
            count,
        };
        for (ours, theirs, tokens, asked, ships) in [
            (16, 16, 100, (3, 4), Some((3, 4))),
            // Positions 48..100, in blocks of 32.
            (32, 16, 100, (3, 4), Some((1, 3))),
            // Positions 64..100, the last block half empty.
            (16, 64, 100, (1, 1), Some((4, 3))),
            (16, 64, 100, (u32::MAX, 1), None),
        ] {
            let [ours, theirs] = [ours, theirs].map(|size| layout(size, KvDtype::F16));
            let relayout = meet(&ours, &theirs, true).unwrap();
            let ranges = ranges(&[wanted(0, asked.0, asked.1)], &relayout, tokens);
            let got = ranges.ok().map(|ranges| (ranges[0].first, ranges[0].count));
            assert_eq!(got, ships);
        }
        let relayout = meet(&layout(16, KvDtype::F16), &layout(32, KvDtype::F16), true).unwrap();
        let error = ranges(&[wanted(1, 0, 1)], &relayout, 100).unwrap_err();
        assert_eq!(error.field, "lane.wanted");
    }

    #[test]
    fn int8_travels_for_what_need_not_be_exact_to_whoever_takes_it() {
        let own = layout(16, KvDtype::F16);
        let form = wire_form(WireChoice::Int8, &own).unwrap().unwrap();
        for theirs in [layout(16, KvDtype::F16), layout(64, KvDtype::Int4)] {
            assert!(on_wire(&form, &theirs, false).is_some());
            assert!(on_wire(&form, &theirs, true).is_none());
        }
        let silent = KvLayout {
            origin: None,
            ..own.clone()
        };
        assert!(on_wire(&form, &silent, false).is_none());
        assert!(wire_form(WireChoice::Native, &own).unwrap().is_none());
        let narrow = layout(16, KvDtype::Int4);
        assert!(wire_form(WireChoice::Int8, &narrow).unwrap().is_none());
    }

    #[test]
    fn what_travels_has_the_bits_of_the_scalar_conversion() {
        use baton_kernels::{Isa, KvConverter, KvShape, KvSpans};
        use rand::rngs::StdRng;
        use rand::{Rng as _, SeedableRng as _};

        let mut random = StdRng::seed_from_u64(0x51ca);
        for _ in 0..60 {
            let own = KvLayout {
                kv_heads: random.random_range(1..4),
                head_dim: 16 * random.random_range(1..9),
                ..layout(16 << random.random_range(0..3), KvDtype::F16)
            };
            let form = wire_form(WireChoice::Int8, &own).unwrap().unwrap();
            let shape = |dtype| KvShape {
                blocks: 1,
                block_size: own.block_size,
                layers: 1,
                kv_heads: own.kv_heads,
                head_dim: own.head_dim,
                dtype,
            };
            let [from, to] = [baton_kernels::KvDtype::F16, baton_kernels::KvDtype::Int8].map(shape);
            let scalar = KvConverter::new(Isa::Scalar, from, to).unwrap();
            let mut all = KvSpans {
                from_span: 0,
                to_span: 0,
                spans: own.block_size / 16,
                from_head: 0,
                to_head: 0,
                heads: own.kv_heads,
            };
            // Any finite values, in words so that both ends lie as f16 has to.
            let words = own.layer_bytes() / 2;
            let finite = |bits: u16| {
                if bits & 0x7c00 == 0x7c00 {
                    bits & !0x0400
                } else {
                    bits
                }
            };
            let stored: Vec<u8> = (0..words)
                .flat_map(|_| finite(random.random()).to_le_bytes())
                .collect();
            let len = form.part_bytes() as usize;
            let aligned = |bytes: &mut Vec<u8>| {
                bytes.resize(len + 64, 0);
                bytes.as_ptr().align_offset(64)
            };
            let (mut made, mut right) = (Vec::new(), Vec::new());
            let at = aligned(&mut made);
            form.make_part(&stored, &mut made[at..][..len]);
            let right_at = aligned(&mut right);
            scalar.convert(&stored, &mut right[right_at..][..len], &all);
            assert!(made[at..][..len] == right[right_at..][..len], "{own:?}");
            // The comparison sees a difference where there is one.
            if own.block_size > 16 {
                all.spans -= 1;
                right.fill(0);
                scalar.convert(&stored, &mut right[right_at..][..len], &all);
                assert!(made[at..][..len] != right[right_at..][..len]);
            }
        }
    }

    #[test]
    fn an_exact_request_is_not_shipped_to_kv_of_another_type() {
        let (ours, theirs) = (layout(16, KvDtype::F16), layout(16, KvDtype::Int8));
        assert!(meet(&ours, &theirs, false).is_ok());
        let error = meet(&ours, &theirs, true).unwrap_err();
        assert_eq!(error.field, "kv_dtype");
        for word in ["f16", "int8", "exact"] {
            assert!(error.message.contains(word), "{}", error.message);
        }
    }

    #[test]
    fn only_one_end_with_tls_is_refused_by_name() {
        let check = |theirs: Option<bool>, ours: bool| {
            let wire = v1::Lane {
                data_address: "decode:9".to_owned(),
                tls: theirs,
                ..v1::Lane::default()
            };
            check_tls(&wire, ours).map_err(|error| (error.reason, error.message))
        };
        assert_eq!(check(Some(true), true), Ok(()));
        assert_eq!(check(Some(false), false), Ok(()));
        // An older decode worker does not tell; connecting will show.
        assert_eq!(check(None, true), Ok(()));
        for (theirs, ours) in [(true, false), (false, true)] {
            let (reason, message) = check(Some(theirs), ours).unwrap_err();
            assert_eq!(reason, "DATA_TLS_MISMATCH");
            assert!(message.contains("`decode:9`"), "{message}");
        }
    }
}

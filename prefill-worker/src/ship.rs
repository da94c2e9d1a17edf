//! From the engine's ready layers to what a lane reads, and from the router's lane
//! to where it goes.

use std::net::SocketAddr;
use std::time::Duration;

use baton_engine::api::OrdinalRange;
use baton_engine::kv::KvMemory;
use baton_kv_transfer::sender::{LaneTarget, SourceBlock};
use baton_kv_transfer::{LaneKey, ProcessToken, Ticket};
use baton_proto::kv_layout::KvLayout;
use baton_proto::transport::TlsSettings;
use baton_proto::{Attempt, Epoch, Error, RequestId, v1};

/// A lane as the router passed it on, checked.
pub(crate) struct Lane {
    pub(crate) target: LaneTarget,
    pub(crate) ship: Vec<OrdinalRange>,
}

/// Checks a lane against this worker's layout and TLS settings, and resolves its address.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the field, or `UNAVAILABLE`: reason `LAYOUT_MISMATCH`,
/// naming the field that differs and both values, or `DATA_TLS_MISMATCH`, saying which
/// end has TLS.
pub(crate) async fn parse_lane(
    wire: v1::Lane,
    request_id: RequestId,
    layout: &KvLayout,
    tls: &TlsSettings,
    stays_in_process: impl FnOnce(ProcessToken) -> bool,
    time_left: Option<Duration>,
) -> Result<Lane, Error> {
    let theirs: KvLayout = serde_json::from_str(&wire.layout_json)
        .map_err(|error| Error::invalid("lane.layout_json", error.to_string()))?;
    theirs.validate()?;
    layout.check_peer(&theirs)?;
    let malformed = |field: &str| Error::invalid(field, "has the wrong length");
    let deadline = Duration::from_millis(wire.deadline_ms);
    let process_token = ProcessToken::from_bytes(&wire.process_token)
        .ok_or_else(|| malformed("lane.process_token"))?;
    if !stays_in_process(process_token) {
        check_tls(&wire, tls.is_enabled())?;
    }
    Ok(Lane {
        ship: ranges(&wire.wanted, layout)?,
        target: LaneTarget {
            data_address: resolve(&wire.data_address).await?,
            server_name: match tls.is_enabled() && !wire.data_address.is_empty() {
                true => Some(tls.expected_name(&wire.data_address)?),
                false => None,
            },
            process_token,
            lane_key: LaneKey::from_bytes(&wire.lane_key)
                .ok_or_else(|| malformed("lane.lane_key"))?,
            ticket: Ticket::from_bytes(&wire.ticket).ok_or_else(|| malformed("lane.ticket"))?,
            epoch: Epoch(wire.epoch),
            attempt: Attempt(wire.attempt),
            request_id,
            deadline: time_left.map_or(deadline, |left| left.min(deadline)),
        },
    })
}

fn ranges(wanted: &[v1::OrdinalRange], layout: &KvLayout) -> Result<Vec<OrdinalRange>, Error> {
    wanted
        .iter()
        .map(|range| {
            let group = u16::try_from(range.group)
                .ok()
                .filter(|group| usize::from(*group) < layout.groups.len());
            match group {
                Some(group) if range.first.checked_add(range.count).is_some() => Ok(OrdinalRange {
                    group,
                    first: range.first,
                    count: range.count,
                }),
                _ => Err(Error::invalid(
                    "lane.wanted",
                    format!(
                        "group {} with ordinals {}+{} is not in the layout's {} groups",
                        range.group,
                        range.first,
                        range.count,
                        layout.groups.len()
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
    let mut resolved = tokio::net::lookup_host(address)
        .await
        .map_err(|error| unreachable(error.to_string()))?;
    resolved
        .next()
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

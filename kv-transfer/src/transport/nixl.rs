//! The sender's end of a NIXL lane: a TCP lane over which memory is lent instead of bytes.
//!
//! The lane is authenticated (and perhaps encrypted) as any; its first frame tells the
//! receiver how to read this process' pools. Once that has read a first few bytes of it, data
//! frames are offers as in [`super::shared_memory`], and their guards are held until the
//! receiver is past them. A receiver that cannot is sent bytes over the same connection.

use std::time::{Duration, Instant};

use super::connect::{Destination, connect};
use super::shared_memory::SharedLane;
use super::tcp::TcpLane;
use super::{Lane, OutQueue};
use crate::codec::{Control, PAYLOAD_BYTES_MAX, Scope};
use crate::error::Error;
use crate::nixl::NixlLender;
use crate::sender::TransportKind;
use crate::ticket::SessionId;
use crate::wake::Bell;
use baton_proto::protocol::FEATURE_NIXL_LANE;

/// Connects and lends, all within `timeout`; what the lane became.
///
/// # Errors
/// As [`connect`]; [`Error::Unreachable`] if the receiver does not answer in time.
pub(crate) fn open(
    to: &Destination<'_>,
    session: SessionId,
    lender: &NixlLender,
    bell: &Bell,
    timeout: Duration,
) -> Result<(Box<dyn Lane>, TransportKind), Error> {
    let until = Instant::now() + timeout;
    let (stream, features) = connect(to, session, timeout)?;
    let mut lane = TcpLane::over(stream);
    let bytes = if features & FEATURE_NIXL_LANE == 0 {
        0
    } else {
        lend(&mut lane, lender, bell, until)?
    };
    // The last frame that is offered may go over the lane's limit.
    let Some(room) = bytes.checked_sub(PAYLOAD_BYTES_MAX as u64) else {
        return Ok((Box::new(lane), TransportKind::Tcp));
    };
    Ok((Box::new(SharedLane::over(lane, room)), TransportKind::Nixl))
}

/// What the receiver has room for; 0 if it cannot read here.
fn lend(
    lane: &mut TcpLane,
    lender: &NixlLender,
    bell: &Bell,
    until: Instant,
) -> Result<u64, Error> {
    let mut queue = OutQueue::default();
    queue.push_control(Scope::LANE, lender.control());
    loop {
        lane.flush(&mut queue, false)?;
        match lane.receive()? {
            Some((_, Control::Lent { bytes })) => return Ok(bytes),
            Some((scope, Control::Ping)) => queue.push_control(scope, Control::Pong),
            Some(_) => {}
            None => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    let text = "the receiver did not say in time whether it can read over NIXL";
                    return Err(Error::Unreachable(text.to_owned()));
                }
                // Whoever rang is looked after once the lane is open.
                lane.park(bell, !queue.is_empty(), left)?;
            }
        }
    }
}

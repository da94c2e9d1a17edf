//! The receiver's end of a NIXL lane: what was offered is read, then placed like any bytes.
//!
//! ```text
//! offer --> gathered --(full, or nothing more is here)--> one read of many parts
//!                                                           | done, in the order of posting
//!                                                           v
//!                       staging area --copy under the write guard, checksum--> blocks, Ack
//! ```
//! Reads overlap: while one is copied, the next ones are under way, up to the staging area's
//! size, beyond which the sender offers nothing. Frames that came behind an offer are heard
//! behind its bytes, as if these had travelled with it; only an abort and the lane's own
//! pings go ahead. No block is touched before its bytes are here, so a fence, a cancel or a
//! lost lane find nothing under way that they would have to wait for.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_proto::kv_layout::ByteExtent;

use super::ring::{Piece, Ring};
use super::{Lend, NixlError, NixlLibrary, REGIONS_MAX, Reads, agent};
use crate::codec::{Control, Header, Kind, PAYLOAD_BYTES_MAX, Scope};
use crate::error::Error;
use crate::part::PartRange;
use crate::receiver::lane::ReceiverLane;
use crate::transport::heard_despite_sleep;

/// What one lane may have offered and not yet placed: two of the largest frames, and enough
/// to keep 100 Gb/s busy for the time that a turn takes.
pub(crate) const STAGING_BYTES: usize = 2 * PAYLOAD_BYTES_MAX;
/// Offers are joined into one read up to this size.
const READ_BYTES: usize = 1 << 20;
/// Pieces of one read at most.
const PIECES_MAX: usize = 2048;
/// Frames that may wait behind reads; a sender that waits for its answers has a few a transfer.
const WAITING_MAX: usize = 4096;
/// Looks in a row that find nothing, before they come with pauses.
const LOOKS_MAX: u32 = 64;
/// A read is over some time within this; nothing rings when it is.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

/// A data frame whose payload lies, or will lie, in the staging area.
struct Offered {
    header: Header,
    at: u64,
}

enum Item {
    Read {
        read: agent::Read,
        offers: Vec<Offered>,
    },
    Behind(Scope, Control),
}

/// When there is something to do again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pulled {
    /// Nothing is under way.
    Idle,
    /// At once.
    Moved,
    /// A read may be over by then.
    Look(Duration),
}

/// Times of the lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) ping_interval: Duration,
    pub(crate) silence_max: Duration,
}

/// The reads of one lane. Dropping it ends what is under way.
pub(crate) struct Puller {
    regions: Vec<(u64, u64)>,
    ring: Ring,
    gathered: Vec<Offered>,
    gathered_bytes: usize,
    pieces: Vec<Piece>,
    items: VecDeque<Item>,
    /// When a read was last over, or the first of those under way was posted.
    moved_at: Instant,
    turned_at: Instant,
    ping_interval: Duration,
    /// Reads of which none ends for this long are lost, whatever the lane says: its end gives
    /// the sender its blocks back.
    stall_max: Duration,
    looks: u32,
    /// Behind `items`: reads end before what they land in.
    reads: Reads,
}

impl Puller {
    /// Prepares to read what a sender lends.
    ///
    /// # Errors
    /// [`NixlError`]: NIXL does not lead there.
    pub(crate) fn open(
        library: &NixlLibrary,
        lend: Lend,
        times: Times,
        now: Instant,
    ) -> Result<Self, NixlError> {
        let reads = Reads::open(library, &lend, STAGING_BYTES, times.silence_max)?;
        Ok(Self {
            regions: lend.regions,
            ring: Ring::new(STAGING_BYTES),
            gathered: Vec::new(),
            gathered_bytes: 0,
            pieces: Vec::new(),
            items: VecDeque::new(),
            moved_at: now,
            turned_at: now,
            ping_interval: times.ping_interval,
            stall_max: 2 * times.silence_max,
            looks: 0,
            reads,
        })
    }

    fn is_idle(&self) -> bool {
        self.items.is_empty() && self.gathered.is_empty()
    }

    /// Takes note of an offered frame.
    ///
    /// # Errors
    /// [`Error::Protocol`] unless it lies in what was lent and fits in.
    pub(crate) fn offer(
        &mut self,
        scope: Scope,
        range: PartRange,
        crc: u32,
        extents: &[ByteExtent],
        now: Instant,
    ) -> Result<(), Error> {
        let bytes: u64 = extents.iter().map(|extent| u64::from(extent.len)).sum();
        let fits = (1..=PAYLOAD_BYTES_MAX as u64).contains(&bytes);
        let at = if fits && extents.iter().all(|extent| self.holds(*extent)) {
            self.ring.take(bytes as usize)
        } else {
            None
        };
        let Some(at) = at else {
            return Err(Error::Protocol(format!(
                "an offer of `{bytes}` bytes does not lie in what was lent, or is over the \
                 lane's limit"
            )));
        };
        if self.gathered_bytes >= READ_BYTES || self.pieces.len() + extents.len() > PIECES_MAX {
            self.post(now)?;
        }
        self.ring
            .pieces(at, extents, &self.regions, &mut self.pieces);
        self.gathered_bytes += bytes as usize;
        let header = Header {
            kind: Kind::Data,
            scope,
            range,
            payload_len: bytes as u32,
            payload_crc: crc,
        };
        self.gathered.push(Offered { header, at });
        Ok(())
    }

    fn holds(&self, extent: ByteExtent) -> bool {
        let end = extent.offset.checked_add(u64::from(extent.len));
        let region = self.regions.get(usize::from(extent.region));
        let fits = region.zip(end).is_some_and(|((_, len), end)| end <= *len);
        fits && extent.len > 0
    }

    /// The frame, if it may be heard now; else it waits behind what was offered before.
    ///
    /// # Errors
    /// [`Error::Protocol`] if too many wait.
    pub(crate) fn hear(
        &mut self,
        scope: Scope,
        control: Control,
        now: Instant,
    ) -> Result<Option<Control>, Error> {
        let ahead = match control {
            Control::Abort { .. } => true,
            Control::Ping | Control::Pong => scope == Scope::LANE,
            _ => false,
        };
        if ahead || self.is_idle() {
            return Ok(Some(control));
        }
        if self.items.len() >= WAITING_MAX {
            return Err(Error::Protocol(format!(
                "more than `{WAITING_MAX}` frames wait behind what was offered"
            )));
        }
        // What it waits for has to be under way.
        self.post(now)?;
        self.items.push_back(Item::Behind(scope, control));
        Ok(None)
    }

    /// Begins to read what was gathered.
    fn post(&mut self, now: Instant) -> Result<(), Error> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        if self.items.is_empty() {
            self.moved_at = now;
        }
        let read = self.reads.post(&self.pieces).map_err(lost)?;
        self.pieces.clear();
        self.gathered_bytes = 0;
        let offers = std::mem::take(&mut self.gathered);
        self.items.push_back(Item::Read { read, offers });
        Ok(())
    }

    /// Places what has arrived, and hears what waited behind it.
    ///
    /// # Errors
    /// Any: the lane is gone.
    pub(crate) fn turn(
        &mut self,
        receiver: &mut ReceiverLane,
        scratch: &mut [u8],
        now: Instant,
    ) -> Result<Pulled, Error> {
        let slept_at = std::mem::replace(&mut self.turned_at, now);
        self.moved_at = heard_despite_sleep(self.moved_at, slept_at, now, self.ping_interval);
        self.post(now)?;
        let mut moved = false;
        while let Some(item) = self.items.front() {
            if let Item::Read { read, .. } = item
                && !self.reads.is_done(read).map_err(lost)?
            {
                break;
            }
            moved = true;
            match self.items.pop_front() {
                Some(Item::Read { offers, .. }) => {
                    for offered in offers {
                        self.place(offered, receiver, scratch)?;
                    }
                    // Replies have their turn between two reads.
                    break;
                }
                Some(Item::Behind(scope, control)) => receiver.control(scope, control)?,
                None => {}
            }
        }
        if moved {
            self.moved_at = now;
            self.looks = 0;
            return Ok(Pulled::Moved);
        }
        if self.items.is_empty() {
            return Ok(Pulled::Idle);
        }
        if now.saturating_duration_since(self.moved_at) >= self.stall_max {
            let reason = format!("no answer within {:?}", self.stall_max);
            let what = "read from the sender";
            return Err(lost(NixlError::Failed { what, reason }));
        }
        self.looks += 1;
        Ok(if self.looks < LOOKS_MAX {
            Pulled::Moved
        } else {
            Pulled::Look(LOOK_AGAIN)
        })
    }

    fn place(
        &mut self,
        offered: Offered,
        receiver: &mut ReceiverLane,
        scratch: &mut [u8],
    ) -> Result<(), Error> {
        let Offered { header, at } = offered;
        let len = header.payload_len as usize;
        // Only now: what is wanted may have come meanwhile, by a frame before this one.
        let mut incoming = receiver.data(header)?;
        let mut copied = 0;
        while !incoming.is_whole() {
            let (offset, room) = self.ring.offset(at + copied as u64);
            let here = room.min(len - copied);
            let reads = &self.reads;
            let brought = incoming.read(scratch, &mut [], |buffers| {
                Ok(reads.copy(offset, here, buffers))
            });
            copied += brought.map_err(|error| Error::io("copy", error))?.payload;
        }
        receiver.finish(incoming);
        self.ring.give(len);
        Ok(())
    }
}

/// A lane whose memory cannot be read is gone.
fn lost(error: NixlError) -> Error {
    tracing::warn!(%error, "a data lane over nixl ends");
    Error::PeerLost(error.to_string())
}

/// Whether a sender's description makes sense.
pub(crate) fn check(lend: &Lend) -> Result<(), Error> {
    let probe = (lend.probe_at, super::PROBE_BYTES as u64);
    let mut places = lend.regions.iter().chain([&probe]);
    let fits = places.all(|(base, len)| base.checked_add(*len).is_some());
    if fits && (1..=REGIONS_MAX).contains(&lend.regions.len()) {
        Ok(())
    } else {
        Err(Error::Protocol(
            "what a sender lends over NIXL is described wrongly".to_owned(),
        ))
    }
}

//! What can happen to a handoff, and over which transport the suite makes it happen.

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// None at all: what everything else is compared with.
    Clean,
    Drop,
    Duplicate,
    Reorder,
    Truncate,
    FlipPayload,
    FlipHeader,
    StaleTicket,
    WrongEpoch,
    /// At this much of its data frames, in percent.
    SenderKilled(u64),
    ReceiverKilled,
    LinkCut,
    Blackhole,
    SlowLink,
    Cancel,
    LeaseEnd,
    DuplicateCommit,
    LayoutMismatch,
}

impl Kind {
    pub const ALL: [Self; 21] = [
        Self::Clean,
        Self::Drop,
        Self::Duplicate,
        Self::Reorder,
        Self::Truncate,
        Self::FlipPayload,
        Self::FlipHeader,
        Self::StaleTicket,
        Self::WrongEpoch,
        Self::SenderKilled(25),
        Self::SenderKilled(50),
        Self::SenderKilled(75),
        Self::SenderKilled(99),
        Self::ReceiverKilled,
        Self::LinkCut,
        Self::Blackhole,
        Self::SlowLink,
        Self::Cancel,
        Self::LeaseEnd,
        Self::DuplicateCommit,
        Self::LayoutMismatch,
    ];

    pub fn name(self) -> String {
        match self {
            Self::Clean => "clean".to_owned(),
            Self::Drop => "drop".to_owned(),
            Self::Duplicate => "duplicate".to_owned(),
            Self::Reorder => "reorder".to_owned(),
            Self::Truncate => "truncate".to_owned(),
            Self::FlipPayload => "bit flip in payload".to_owned(),
            Self::FlipHeader => "bit flip in header".to_owned(),
            Self::StaleTicket => "stale ticket".to_owned(),
            Self::WrongEpoch => "wrong epoch".to_owned(),
            Self::SenderKilled(percent) => format!("sender killed at {percent} %"),
            Self::ReceiverKilled => "receiver killed".to_owned(),
            Self::LinkCut => "link cut and restored".to_owned(),
            Self::Blackhole => "blackhole".to_owned(),
            Self::SlowLink => "slow link".to_owned(),
            Self::Cancel => "cancel at every state".to_owned(),
            Self::LeaseEnd => "lease end while reading".to_owned(),
            Self::DuplicateCommit => "duplicate commit".to_owned(),
            Self::LayoutMismatch => "layout mismatch".to_owned(),
        }
    }
}

//! Which transports a worker uses, as an operator says it.
//!
//! Inside one process KV is always copied directly. Between processes, a prefill worker
//! takes the first way that both ends offer: the offer of a decode worker to be lent memory
//! is its listening socket, which only processes of its host can reach, so no host name is
//! compared.

use std::fmt;
use std::str::FromStr;

use baton_observability::labels::Transport;

use crate::sender::TransportKind;

/// How KV may leave a worker, or reach it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory between processes of one host and user, TCP between all others.
    #[default]
    Auto,
    /// Shared memory alone: peers elsewhere are refused, and no data port listens.
    SharedMemory,
    /// NIXL where both ends have it, TCP with the rest.
    Nixl,
    /// TCP alone: no memory is lent, nor taken.
    Tcp,
}

impl TransportChoice {
    /// Every choice.
    pub const ALL: [Self; 4] = [Self::Auto, Self::SharedMemory, Self::Nixl, Self::Tcp];

    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::SharedMemory => "shared-memory",
            Self::Nixl => "nixl",
            Self::Tcp => "tcp",
        }
    }

    /// Whether memory may be lent between processes of a host.
    pub const fn shares_memory(self) -> bool {
        matches!(self, Self::Auto | Self::SharedMemory)
    }

    /// Whether memory may be lent over NIXL.
    pub const fn uses_nixl(self) -> bool {
        matches!(self, Self::Nixl)
    }

    /// Whether bytes may travel.
    pub const fn uses_tcp(self) -> bool {
        !matches!(self, Self::SharedMemory)
    }

    /// What a sender tries, in order.
    pub fn kinds(self) -> Vec<TransportKind> {
        let mut kinds = vec![TransportKind::Loopback];
        kinds.extend(self.shares_memory().then_some(TransportKind::SharedMemory));
        kinds.extend(self.uses_nixl().then_some(TransportKind::Nixl));
        kinds.extend(self.uses_tcp().then_some(TransportKind::Tcp));
        kinds
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| "give auto, shared-memory, nixl or tcp".to_owned())
    }
}

/// What K and V are on the wire between two hosts, as an operator says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WireChoice {
    /// What the pool stores.
    #[default]
    Native,
    /// `int8`, if the pool stores something wider.
    Int8,
}

impl WireChoice {
    /// Every choice.
    pub const ALL: [Self; 2] = [Self::Native, Self::Int8];

    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Int8 => "int8",
        }
    }
}

impl fmt::Display for WireChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WireChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| "give native or int8".to_owned())
    }
}

impl From<TransportKind> for Transport {
    fn from(kind: TransportKind) -> Self {
        match kind {
            TransportKind::Loopback => Self::Loopback,
            TransportKind::SharedMemory => Self::SharedMemory,
            TransportKind::Nixl => Self::Nixl,
            TransportKind::Tcp => Self::Tcp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_decides_what_is_tried() {
        use TransportKind::{Loopback, Nixl, SharedMemory, Tcp};
        for (text, kinds) in [
            ("auto", vec![Loopback, SharedMemory, Tcp]),
            ("shared-memory", vec![Loopback, SharedMemory]),
            ("nixl", vec![Loopback, Nixl, Tcp]),
            ("tcp", vec![Loopback, Tcp]),
        ] {
            let choice: TransportChoice = text.parse().unwrap();
            assert_eq!((choice.kinds(), choice.to_string()), (kinds, text.into()));
        }
        for choice in WireChoice::ALL {
            assert_eq!(choice.name().parse(), Ok(choice));
        }
        assert!("int4".parse::<WireChoice>().is_err());
        assert!("shm".parse::<TransportChoice>().is_err());
    }
}

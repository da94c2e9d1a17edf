//! What a worker publishes, and under which key.
//!
//! Records are JSON. A reader tolerates fields it does not know (a newer worker)
//! and fills fields that are missing (an older one) where a default is harmless.
//! A record holds no load and no time: those change too often for a store.

use std::fmt;

use baton_proto::model_card::ModelCard;
use baton_proto::protocol::ProtocolVersion;
use baton_proto::{Epoch, WorkerId};
use serde::{Deserialize, Serialize};

use crate::Error;

/// Longest id, cluster or generation name, bytes.
const NAME_BYTES_MAX: usize = 128;

/// Which pool a worker belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Prefill,
    Decode,
    /// Both in one worker; it prefills what it decodes.
    Mixed,
}

impl Role {
    /// The name in keys, flags and labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
        }
    }

    /// Whether a router may send it prefill work.
    pub const fn prefills(self) -> bool {
        matches!(self, Self::Prefill)
    }

    /// Whether a router may send it decode work.
    pub const fn decodes(self) -> bool {
        matches!(self, Self::Decode | Self::Mixed)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a worker is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    /// Loading or warming up; gets no work.
    Starting,
    Ready,
    /// Finishes what it has; gets no new work.
    Draining,
}

/// What a worker has room for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capacity {
    /// KV blocks of each group, in the order of the card's layout.
    pub blocks: Vec<u32>,
    /// Sequences in one batch.
    pub sequences_max: u32,
}

/// One worker, as routers and peers see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    pub id: WorkerId,
    /// This life of the process; a restart has another one.
    pub epoch: Epoch,
    pub role: Role,
    pub state: WorkerState,
    /// `host:port` of its gRPC services.
    pub control: String,
    /// `host:port` of its KV data lane; empty if it has none.
    #[serde(default)]
    pub data: String,
    pub protocol: ProtocolVersion,
    pub card: ModelCard,
    #[serde(default)]
    pub capacity: Capacity,
    /// Where it stands (rack, host), for placement; empty if unknown.
    #[serde(default)]
    pub topology: String,
}

impl WorkerRecord {
    /// The record as stored.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain structs with string keys always serialise")
    }

    /// Reads a stored record; unknown fields are ignored.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the position of the first wrong byte or the missing field.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        serde_json::from_slice(bytes).map_err(|error| Error::invalid("record", error.to_string()))
    }

    /// Whether the record may be published.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn validate(&self) -> Result<(), Error> {
        check_name("id", self.id.as_str())?;
        check_address("control", &self.control)?;
        if !self.data.is_empty() {
            check_address("data", &self.data)?;
        }
        if self.card.name.is_empty() {
            return Err(Error::invalid("card.name", "the model's name is empty"));
        }
        Ok(())
    }
}

/// A name that becomes one part of a key.
pub(crate) fn check_name(field: &str, name: &str) -> Result<(), Error> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(allowed) {
        return Err(Error::invalid(
            field,
            format!("`{name}` is not 1 to {NAME_BYTES_MAX} of the characters A-Z a-z 0-9 - _ . :"),
        ));
    }
    Ok(())
}

fn check_address(field: &str, address: &str) -> Result<(), Error> {
    let port = address
        .rsplit_once(':')
        .filter(|(host, _)| !host.is_empty());
    match port.and_then(|(_, port)| port.parse::<u16>().ok()) {
        Some(port) if port != 0 => Ok(()),
        _ => Err(Error::invalid(
            field,
            format!("`{address}` is not host:port"),
        )),
    }
}

/// Where the records of one cluster and rollout generation lie:
/// `/baton/v1/{cluster}/{generation}/workers/{role}/{id}`.
///
/// A router pairs workers of one generation only, since a rollout may change the
/// KV layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keyspace {
    prefix: String,
}

impl Keyspace {
    /// # Errors
    /// [`Error::Invalid`] if a name has a character that does not belong in a key.
    pub fn new(cluster: &str, generation: &str) -> Result<Self, Error> {
        check_name("cluster", cluster)?;
        check_name("generation", generation)?;
        Ok(Self {
            prefix: format!("/baton/v1/{cluster}/{generation}/workers/"),
        })
    }

    /// What all keys of this cluster and generation begin with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The key of one worker.
    pub fn key(&self, role: Role, id: &WorkerId) -> String {
        format!("{}{role}/{id}", self.prefix)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};
    use baton_proto::{ModelRevision, NumericsId, protocol};

    pub(crate) fn record(id: &str, epoch: u64) -> WorkerRecord {
        WorkerRecord {
            id: id.into(),
            epoch: Epoch(epoch),
            role: Role::Decode,
            state: WorkerState::Ready,
            control: "127.0.0.1:7001".to_owned(),
            data: "127.0.0.1:7002".to_owned(),
            protocol: protocol::CURRENT,
            card: ModelCard {
                name: "m".to_owned(),
                revision: ModelRevision("m@1".to_owned()),
                architecture: "llama".to_owned(),
                vocab_size: 512,
                tokenizer_size: 512,
                context_max: 2048,
                parameters: 1000,
                created: 0,
                weight_bytes: 4000,
                layout: KvLayout {
                    block_size: 16,
                    dtype: KvDtype::F16,
                    scale_group: 0,
                    kv_heads: 2,
                    head_dim: 64,
                    layers: 2,
                    groups: vec![KvGroup {
                        kind: KvGroupKind::Full,
                        layers: vec![0, 1],
                    }],
                    numerics: NumericsId([1; 16]),
                    origin: None,
                    shard: None,
                },
                tokenizer_hash: "t".to_owned(),
            },
            capacity: Capacity {
                blocks: vec![100],
                sequences_max: 8,
            },
            topology: "rack-1".to_owned(),
        }
    }

    #[test]
    fn a_record_survives_the_store_with_its_whole_epoch() {
        let record = record("d-1", u64::MAX - 1);
        assert_eq!(WorkerRecord::from_json(&record.to_json()).unwrap(), record);
    }

    #[test]
    fn unknown_fields_are_tolerated_and_optional_ones_filled() {
        let mut json: serde_json::Value =
            serde_json::from_slice(&record("d-1", 5).to_json()).unwrap();
        let fields = json.as_object_mut().unwrap();
        fields.insert("shiny".to_owned(), serde_json::json!({"new": [1, 2]}));
        fields.remove("topology");
        fields.remove("capacity");
        let read = WorkerRecord::from_json(json.to_string().as_bytes()).unwrap();
        assert_eq!(read.topology, "");
        assert_eq!(read.capacity, Capacity::default());
        assert_eq!(read.epoch, Epoch(5));
    }

    #[test]
    fn junk_is_an_error_not_a_panic() {
        for junk in [&b""[..], b"{", b"[]", b"{\"id\":3}", &[0xff, 0xfe]] {
            assert!(WorkerRecord::from_json(junk).is_err());
        }
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        let refused = |change: fn(&mut WorkerRecord)| {
            let mut record = record("d-1", 1);
            change(&mut record);
            match record.validate().unwrap_err() {
                Error::Invalid { field, .. } => field,
                other => panic!("{other}"),
            }
        };
        assert_eq!(refused(|r| r.id = "a/b".into()), "id");
        assert_eq!(refused(|r| r.id = "".into()), "id");
        assert_eq!(refused(|r| r.control = "localhost".to_owned()), "control");
        assert_eq!(refused(|r| r.control = ":80".to_owned()), "control");
        assert_eq!(refused(|r| r.data = "h:0".to_owned()), "data");
        assert_eq!(refused(|r| r.card.name.clear()), "card.name");
    }

    #[test]
    fn keys_are_fixed_and_generations_do_not_overlap() {
        let keys = Keyspace::new("prod", "1").unwrap();
        let key = keys.key(Role::Prefill, &"p-0".into());
        assert_eq!(key, "/baton/v1/prod/1/workers/prefill/p-0");
        assert!(!key.starts_with(Keyspace::new("prod", "11").unwrap().prefix()));
        assert!(Keyspace::new("a/b", "0").is_err());
    }
}

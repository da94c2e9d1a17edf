//! What is served on while the store is silent, and how the file fares.

use baton_membership::{Capacity, WorkerState};
use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};
use baton_proto::model_card::ModelCard;
use baton_proto::{Epoch, ModelRevision, NumericsId, protocol};

use super::*;

fn record(id: &str, epoch: u64) -> WorkerRecord {
    WorkerRecord {
        id: id.into(),
        epoch: Epoch(epoch),
        role: Role::Decode,
        state: WorkerState::Ready,
        control: "127.0.0.1:7001".to_owned(),
        data: String::new(),
        protocol: protocol::CURRENT,
        card: ModelCard {
            name: "m".to_owned(),
            revision: ModelRevision("m@1".to_owned()),
            architecture: "llama".to_owned(),
            vocab_size: 320,
            tokenizer_size: 300,
            context_max: 64,
            parameters: 1,
            created: 0,
            weight_bytes: 1,
            layout: KvLayout {
                block_size: 16,
                dtype: KvDtype::F32,
                scale_group: 0,
                kv_heads: 2,
                head_dim: 8,
                layers: 1,
                groups: vec![KvGroup {
                    kind: KvGroupKind::Full,
                    layers: vec![0],
                }],
                numerics: NumericsId([0; 16]),
                origin: None,
                shard: None,
            },
            tokenizer_hash: String::new(),
        },
        capacity: Capacity::default(),
        topology: String::new(),
    }
}

fn store(ids: &[&str], stale_since: Option<Instant>) -> View {
    let workers = ids.iter().map(|id| ((*id).into(), record(id, 1)));
    View {
        workers: workers.collect(),
        stale_since,
        version: 1,
    }
}

fn ids(view: &View) -> Vec<&str> {
    view.workers.keys().map(|id| id.as_str()).collect()
}

#[test]
fn what_is_remembered_serves_until_the_store_is_read() {
    let begun = Instant::now();
    let at = |seconds| begun + Duration::from_secs(seconds);
    let mut merge = Merge::new(vec![record("a", 1), record("b", 1)], begun);
    let silent = store(&[], Some(begun));
    let view = merge.view(&silent, at(60));
    assert_eq!(
        (ids(&view), view.stale_since),
        (vec!["a", "b"], Some(begun))
    );
    // A restarted worker and a new one answer for themselves.
    assert!(merge.asks() && merge.learn(record("a", 2)) && merge.learn(record("c", 1)));
    assert!(!merge.learn(record("c", 1)), "no news");
    let view = merge.view(&silent, at(61));
    assert_eq!(ids(&view), ["a", "b", "c"]);
    assert_eq!(view.workers[&"a".into()].epoch, Epoch(2));

    // The store is back, and not everybody has registered again.
    let view = merge.view(&store(&["a"], None), at(70));
    assert_eq!(ids(&view), ["a", "b", "c"]);
    assert_eq!(
        view.workers[&"a".into()].epoch,
        Epoch(1),
        "the store's word"
    );
    assert!(view.stale_since.is_some() && !merge.asks() && !merge.learn(record("d", 1)));
    let view = merge.view(&store(&["a", "b", "c"], None), at(71));
    assert_eq!((ids(&view), view.stale_since), (vec!["a", "b", "c"], None));
    // Then its word is all that counts, in the next outage as well.
    assert_eq!(
        ids(&merge.view(&store(&["a", "b"], None), at(86))),
        ["a", "b"]
    );
    let view = merge.view(&store(&["a", "b"], Some(at(90))), at(91));
    assert_eq!(
        (ids(&view), view.stale_since),
        (vec!["a", "b"], Some(at(90)))
    );
}

#[test]
fn the_file_is_replaced_as_a_whole_and_a_damaged_one_is_left_aside() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    assert_eq!(file::read(&state), []);
    let workers = [record("a", 1), record("b", 7)];
    file::write(&state, &workers).unwrap();
    assert_eq!(file::read(&state), workers);
    file::write(&state, &workers[1..]).unwrap();
    assert_eq!(file::read(&state), workers[1..]);
    let path = state.join("workers.json");
    let whole = std::fs::read(&path).unwrap();
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(file::read(&state), [], "cut at {length}");
    }
    std::fs::write(&path, r#"{"format":2,"workers":[]}"#).unwrap();
    assert_eq!(file::read(&state), []);
    let names: Vec<_> = std::fs::read_dir(&state).unwrap().collect();
    assert_eq!(names.len(), 1, "nothing is left beside the file");
}

#[test]
fn a_seed_is_a_role_and_an_address() {
    let seed = Seed::parse("prefill=10.0.0.1:7001").unwrap();
    assert_eq!(
        (seed.role, seed.address.as_str()),
        (Role::Prefill, "10.0.0.1:7001")
    );
    assert_eq!(Seed::parse("decode=[::1]:5").unwrap().address, "[::1]:5");
    for wrong in [
        "",
        "decode",
        "router=a:1",
        "decode=a",
        "decode=:1",
        "decode=a:0",
        "decode=a:x",
    ] {
        assert_eq!(Seed::parse(wrong).unwrap_err().field, "worker", "{wrong}");
    }
}

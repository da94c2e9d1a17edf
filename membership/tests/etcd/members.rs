//! An etcd of three members, of which the leader dies.

use baton_etcd::api::{MemberListRequest, StatusRequest};
use baton_membership::{Etcd, EtcdConfig, Membership, RegistrationState};

use crate::etcd_server::EtcdServer;
use crate::{LEASE_IS_OVER, SOON, TTL, Witness, fresh, ids, record, until, until_state};

#[tokio::test]
async fn a_leader_that_dies_drops_nobody_and_new_workers_join() {
    let mut members = EtcdServer::start_three().await;
    let mut config = EtcdConfig::new(members.iter().map(EtcdServer::url).collect(), "test");
    config.ttl = TTL;
    let (workers, router) = (
        Etcd::start(config.clone()).unwrap(),
        Etcd::start(config).unwrap(),
    );
    let a = workers.register(record("a", 1)).await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"] && fresh(v)).await;
    let witness = Witness::of(router.watch(), "a");

    let client = members[0].client().await;
    let status = client.maintenance().status(StatusRequest {}).await.unwrap();
    let leader = status.into_inner().leader;
    let mut cluster = client.cluster();
    let listed = cluster.member_list(MemberListRequest::default()).await;
    let listed = listed.unwrap().into_inner().members;
    let name = listed.into_iter().find(|m| m.id == leader).unwrap().name;
    let dies = members.iter_mut().find(|member| member.name() == name);
    dies.unwrap().kill();

    let b = workers.register(record("b", 2)).await.unwrap();
    until(&mut view, 2 * SOON, "another joined", |v| {
        ids(v) == ["a", "b"] && fresh(v)
    })
    .await;
    until_state(&a, SOON, RegistrationState::Registered).await;
    // Both are kept alive by the members that are left.
    tokio::time::sleep(LEASE_IS_OVER).await;
    assert_eq!(ids(&view.borrow()), ["a", "b"]);
    witness.assert_never_missing().await;
    b.leave().await.unwrap();
}

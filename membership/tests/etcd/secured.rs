//! etcd that wants to know who asks: users, tokens, certificates.

use std::time::{Duration, Instant};

use baton_etcd::api;
use baton_membership::{Credentials, Etcd, EtcdConfig, Membership, TlsConfig, WorkerState};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::etcd_server::{EtcdServer, Tls};
use crate::{SOON, config, fresh, ids, record, until};

/// Turns authentication on, with one user.
async fn ask_for_users(server: &EtcdServer) {
    let mut users = server.client().await.auth();
    let (name, password) = ("root".to_owned(), "secret".to_owned());
    let user = api::AuthUserAddRequest {
        name: name.clone(),
        password,
        ..api::AuthUserAddRequest::default()
    };
    users.user_add(user).await.unwrap();
    let role = api::AuthRoleAddRequest { name: name.clone() };
    users.role_add(role).await.unwrap();
    let grant = api::AuthUserGrantRoleRequest {
        user: name.clone(),
        role: name,
    };
    users.user_grant_role(grant).await.unwrap();
    users.auth_enable(api::AuthEnableRequest {}).await.unwrap();
}

fn as_user(server: &EtcdServer) -> EtcdConfig {
    let mut config = config(&server.url());
    config.credentials = Some(Credentials {
        user: "root".to_owned(),
        password: "secret".to_owned(),
    });
    config
}

/// Nothing is learnt, and the reason is told.
async fn is_turned_away(config: EtcdConfig) {
    let stranger = Etcd::start(config).unwrap();
    let started = Instant::now();
    while stranger.health().last_error.is_none() {
        assert!(started.elapsed() < SOON, "no error was reported");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let view = stranger.watch();
    assert!(view.borrow().workers.is_empty() && !fresh(&view.borrow()));
}

#[tokio::test]
async fn users_with_a_password_are_served_and_others_are_not() {
    let server = EtcdServer::start().await;
    ask_for_users(&server).await;
    let known = Etcd::start(as_user(&server)).unwrap();
    let a = known.register(record("a", 1)).await.unwrap();
    until(&mut known.watch(), SOON, "joined", |v| ids(v) == ["a"]).await;
    is_turned_away(config(&server.url())).await;
    a.leave().await.unwrap();
}

#[tokio::test]
async fn a_token_that_ends_is_replaced_and_nobody_is_dropped() {
    let server = EtcdServer::start_with(&["--auth-token-ttl", "1"], None).await;
    ask_for_users(&server).await;
    let (workers, router) = (as_user(&server), as_user(&server));
    let (workers, router) = (Etcd::start(workers).unwrap(), Etcd::start(router).unwrap());
    let a = workers.register(record("a", 1)).await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"]).await;
    let witness = crate::Witness::of(router.watch(), "a");
    for state in [WorkerState::Draining, WorkerState::Ready] {
        // Three lives of a token.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let changed = tokio::time::timeout(SOON, async {
            // The first call may be the one that finds the token gone.
            while a.set_state(state).await.is_err() {}
        });
        changed.await.expect("no new token was asked for");
        let seen = |v: &std::sync::Arc<baton_membership::View>| {
            v.workers.get(&"a".into()).is_some_and(|w| w.state == state)
        };
        until(&mut view, SOON, "changed", seen).await;
    }
    witness.assert_never_missing().await;
}

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self { pem, issuer }
    }

    fn sign(&self) -> (String, String) {
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

#[tokio::test]
async fn certificates_are_shown_and_checked_on_both_sides() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let tls = Tls {
        authority: ours.pem.clone(),
        identity: ours.sign(),
    };
    let server = EtcdServer::start_with(&[], Some(&tls)).await;
    let with = |trusted: &Authority, identity: Option<(String, String)>| {
        let mut config = config(&server.url());
        config.tls = Some(TlsConfig {
            ca_pem: Some(trusted.pem.clone()),
            identity_pem: identity,
            domain: None,
        });
        config
    };
    let known = Etcd::start(with(&ours, Some(ours.sign()))).unwrap();
    let a = known.register(record("a", 1)).await.unwrap();
    let joined = |v: &std::sync::Arc<baton_membership::View>| ids(v) == ["a"] && fresh(v);
    until(&mut known.watch(), SOON, "joined", joined).await;
    // No certificate, somebody else's, and an etcd that is not ours.
    is_turned_away(with(&ours, None)).await;
    is_turned_away(with(&ours, Some(theirs.sign()))).await;
    is_turned_away(with(&theirs, Some(ours.sign()))).await;
    a.leave().await.unwrap();
}

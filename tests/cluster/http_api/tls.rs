//! Both front doors with certificates: only who trusts the authority, and is trusted
//! where that is asked, gets through.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_proto::transport::TlsSettings;
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::http::Http;
use baton_tests::models;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::{streamed, whole};

/// An authority and what it signs, as PEM.
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
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    fn sign(&self, name: &str) -> (String, String) {
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    fn client(&self, identity: Option<&(String, String)>) -> Arc<rustls::ClientConfig> {
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        Arc::new(match identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(
                    vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
                    PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
                )
                .unwrap(),
        })
    }
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

async fn open(tls: TlsSettings) -> OpenCluster {
    let setup = Setup {
        router: RouterConfig {
            tls,
            ..Setup::default().router
        },
        ..Setup::default()
    };
    OpenCluster::start(&setup, &models::fixture("rand")).await
}

async fn models_over_grpc(
    open: &OpenCluster,
    authority: &Authority,
    identity: Option<&(String, String)>,
) -> Result<usize, String> {
    let mut tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&authority.pem))
        .domain_name("localhost");
    if let Some((certificate, key)) = identity {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    let channel = Endpoint::from_shared(format!("https://{}", open.grpc))
        .unwrap()
        .tls_config(tls)
        .unwrap()
        .connect()
        .await
        .map_err(|error| format!("{error:?}"))?;
    let answer = InferenceClient::new(channel)
        .list_models(v1::ListModelsRequest {})
        .await
        .map_err(|status| status.to_string())?;
    Ok(answer.into_inner().models.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_doors_speak_tls_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::new(), Authority::new());
    let (certificate, key) = authority.sign("localhost");
    let open = open(TlsSettings {
        certificate: Some(write(folder.path(), "door.pem", &certificate)),
        key: Some(write(folder.path(), "door.key", &key)),
        ..TlsSettings::default()
    })
    .await;

    let http = Http::new(open.http).with_tls(authority.client(None));
    let body = json!({ "prompt": [30, 31, 32], "max_tokens": 3, "temperature": 0 });
    let answer = whole(&http, "/v1/completions", &body).await;
    let stream = streamed(&http, "/v1/completions", &body, false).await;
    assert_eq!(answer["choices"][0]["text"], stream.text(0).as_str());
    assert_eq!(models_over_grpc(&open, &authority, None).await, Ok(1));

    // A client of another authority does not believe the door.
    models_over_grpc(&open, &stranger, None).await.unwrap_err();
    let distrust = Http::new(open.http).with_tls(stranger.client(None));
    let refused = tokio::spawn(async move { distrust.get("/livez").await });
    assert!(refused.await.is_err(), "the handshake fails");
    // Plain text gets no answer of HTTP.
    let plain = Http::new(open.http);
    let refused = tokio::spawn(async move { plain.get("/livez").await });
    assert!(refused.await.is_err(), "no plain HTTP");
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_an_authority_a_door_asks_for_a_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::new(), Authority::new());
    let (certificate, key) = authority.sign("localhost");
    let open = open(TlsSettings {
        certificate: Some(write(folder.path(), "door.pem", &certificate)),
        key: Some(write(folder.path(), "door.key", &key)),
        authority: Some(write(folder.path(), "authority.pem", &authority.pem)),
        ..TlsSettings::default()
    })
    .await;
    let (known, unknown) = (authority.sign("client"), stranger.sign("client"));

    let http = Http::new(open.http).with_tls(authority.client(Some(&known)));
    assert_eq!(http.get("/v1/models").await.status, 200);
    assert_eq!(
        models_over_grpc(&open, &authority, Some(&known)).await,
        Ok(1)
    );
    for identity in [None, Some(&unknown)] {
        models_over_grpc(&open, &authority, identity)
            .await
            .unwrap_err();
        let http = Http::new(open.http).with_tls(authority.client(identity));
        let refused = tokio::spawn(async move { http.get("/v1/models").await });
        assert!(refused.await.is_err(), "{identity:?}");
    }
    open.stop().await;
}

//! Throw-away authorities and certificates for TLS tests of this and of other crates.
//!
//! Behind the feature `test-support`; nothing that serves depends on it. It panics
//! where a test could not go on anyway.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// Authorities made so far.
static AUTHORITIES: AtomicUsize = AtomicUsize::new(0);

/// A certificate and its key, as PEM.
#[derive(Clone, Debug)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

impl Identity {
    fn parts(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes());
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes());
        (
            vec![certificate.expect("a certificate of this module")],
            key.expect("a key of this module"),
        )
    }
}

/// Signs certificates that live as long as the test.
pub struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A fresh authority that nobody trusts yet.
    #[expect(clippy::new_without_default, reason = "each one is another one")]
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names to refuse");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Two of one name would be told apart by their signatures alone.
        let name = format!("authority {}", AUTHORITIES.fetch_add(1, Ordering::Relaxed));
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("random bytes");
        let pem = params.self_signed(&key).expect("own key").pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    /// The authority's own certificate.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate for `name`, a DNS name or an IP address.
    pub fn sign(&self, name: &str) -> Identity {
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        let key = KeyPair::generate().expect("random bytes");
        let certificate = params.signed_by(&key, &self.issuer).expect("own key");
        Identity {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    /// A server that shows `identity`; it demands certificates that `clients` signed.
    pub fn server(identity: &Identity, clients: Option<&Self>) -> Arc<ServerConfig> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("the provider's versions");
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let roots = Arc::new(authority.roots());
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
                builder.with_client_cert_verifier(verifier.build().expect("one root"))
            }
        };
        let (chain, key) = identity.parts();
        Arc::new(builder.with_single_cert(chain, key).expect("its own key"))
    }

    /// A client that trusts this authority and shows `identity` if it has one.
    pub fn client(&self, identity: Option<&Identity>) -> Arc<ClientConfig> {
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("the provider's versions")
            .with_root_certificates(self.roots());
        Arc::new(match identity.map(Identity::parts) {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => builder
                .with_client_auth_cert(chain, key)
                .expect("its own key"),
        })
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        let own = CertificateDer::from_pem_slice(self.pem.as_bytes()).expect("own certificate");
        roots.add(own).expect("own certificate");
        roots
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

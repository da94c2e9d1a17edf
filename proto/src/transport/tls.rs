//! One port's TLS settings, and what they mean to each library that speaks TLS.
//!
//! gRPC ports go through tonic; HTTP ports and the KV data lane take a rustls
//! configuration. All of them read the same files and give the same settings the same
//! meaning: a certificate and its key turn TLS on, an authority makes client
//! certificates mandatory. Files are read when a port opens, not again later.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde::{Deserialize, Serialize};
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

use crate::error::Error;

/// Files of one port's TLS identity and of what it trusts. All empty: plain text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsSettings {
    /// PEM certificate chain of this process.
    pub certificate: Option<PathBuf>,
    /// PEM private key of this process.
    pub key: Option<PathBuf>,
    /// PEM of the authorities trusted for peers. On a server it makes client
    /// certificates mandatory (mTLS).
    pub authority: Option<PathBuf>,
    /// Name expected in the peer's certificate; the host of the address if absent.
    pub peer_name: Option<String>,
}

impl TlsSettings {
    /// Whether any TLS is configured.
    pub fn is_enabled(&self) -> bool {
        self.certificate.is_some() || self.authority.is_some()
    }

    /// The files of this process's identity, which come together or not at all.
    fn identity_files(&self) -> Result<Option<(&Path, &Path)>, Error> {
        match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            (None, None) => Ok(None),
            (Some(_), None) => Err(Error::invalid("tls.key", "missing beside tls.certificate")),
            (None, Some(_)) => Err(Error::invalid("tls.certificate", "missing beside tls.key")),
        }
    }

    /// The identity that a server needs; `None` when TLS is off.
    fn server_files(&self) -> Result<Option<(&Path, &Path)>, Error> {
        let files = self.identity_files()?;
        if files.is_none() && self.authority.is_some() {
            return Err(Error::invalid(
                "tls.certificate",
                "a server needs one beside tls.authority",
            ));
        }
        Ok(files)
    }

    fn identity(&self) -> Result<Option<Identity>, Error> {
        let files = self.identity_files()?;
        files
            .map(|(certificate, key)| {
                Ok(Identity::from_pem(
                    read("tls.certificate", certificate)?,
                    read("tls.key", key)?,
                ))
            })
            .transpose()
    }

    /// The server side of a gRPC port; `None` when TLS is off.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] naming the setting and the file that cannot be read.
    pub fn server(&self) -> Result<Option<ServerTlsConfig>, Error> {
        if self.server_files()?.is_none() {
            return Ok(None);
        }
        let mut config = ServerTlsConfig::new();
        if let Some(identity) = self.identity()? {
            config = config.identity(identity);
        }
        if let Some(authority) = &self.authority {
            config =
                config.client_ca_root(Certificate::from_pem(read("tls.authority", authority)?));
        }
        Ok(Some(config))
    }

    /// The client side of a gRPC channel; `None` when TLS is off.
    ///
    /// # Errors
    /// As [`TlsSettings::server`].
    pub fn client(&self) -> Result<Option<ClientTlsConfig>, Error> {
        if !self.is_enabled() {
            return Ok(None);
        }
        let mut config = ClientTlsConfig::new();
        if let Some(authority) = &self.authority {
            config =
                config.ca_certificate(Certificate::from_pem(read("tls.authority", authority)?));
        }
        if let Some(identity) = self.identity()? {
            config = config.identity(identity);
        }
        if let Some(name) = &self.peer_name {
            config = config.domain_name(name.clone());
        }
        Ok(Some(config))
    }

    /// The server side of a port that rustls serves; `None` when TLS is off. `alpn` are
    /// the protocols it offers, the preferred one first; empty: it does not care.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] naming the setting and the file that cannot be used.
    pub fn rustls_server(&self, alpn: &[&[u8]]) -> Result<Option<Arc<ServerConfig>>, Error> {
        let Some((certificate, key)) = self.server_files()? else {
            return Ok(None);
        };
        let (chain, key) = (chain(certificate)?, private_key(key)?);
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid("tls", error.to_string()))?;
        let builder = match &self.authority {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(roots(path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                    .build()
                    .map_err(|error| unusable("tls.authority", path, &error))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| unusable("tls.certificate", certificate, &error))?;
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Ok(Some(Arc::new(config)))
    }

    /// The client side of a connection that rustls carries; `None` when TLS is off.
    ///
    /// # Errors
    /// As [`TlsSettings::rustls_server`]; also for a `peer_name` that is none, and without
    /// an authority, because then no peer's certificate could be checked.
    pub fn rustls_client(&self) -> Result<Option<Arc<ClientConfig>>, Error> {
        if !self.is_enabled() {
            return Ok(None);
        }
        let Some(authority) = &self.authority else {
            return Err(Error::invalid(
                "tls.authority",
                "missing: without it the certificates of peers cannot be checked",
            ));
        };
        if self.peer_name.is_some() {
            // Found now, not at the first connection.
            self.expected_name("")?;
        }
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid("tls", error.to_string()))?
            .with_root_certificates(roots(authority)?);
        let config = match self.identity_files()? {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(chain(certificate)?, private_key(key)?)
                .map_err(|error| unusable("tls.certificate", certificate, &error))?,
        };
        Ok(Some(Arc::new(config)))
    }

    /// The name that the certificate of the peer at `address` (`host:port`) must carry.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] for what is neither a DNS name nor an IP address.
    pub fn expected_name(&self, address: &str) -> Result<ServerName<'static>, Error> {
        let (field, name) = match &self.peer_name {
            Some(name) => ("tls.peer_name", name.as_str()),
            None => ("address", host_of(address)),
        };
        ServerName::try_from(name.to_owned())
            .map_err(|error| Error::invalid(field, format!("`{name}`: {error}")))
    }
}

/// The host of `host:port`, without the brackets of an IPv6 address.
fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

/// Named, not the process's default: a library must not depend on who set that first.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn roots(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for authority in certificates("tls.authority", path)? {
        roots
            .add(authority)
            .map_err(|error| unusable("tls.authority", path, &error))?;
    }
    if roots.is_empty() {
        return Err(unusable("tls.authority", path, &"holds no certificate"));
    }
    Ok(roots)
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    certificates("tls.certificate", path)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| unusable("tls.key", path, &error))
}

fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| unusable(field, path, &error))
}

fn unusable(field: &str, path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::invalid(field, format!("cannot use `{}`: {error}", path.display()))
}

fn read(field: &str, path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|error| {
        Error::invalid(field, format!("cannot read `{}`: {error}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(certificate: bool, key: bool, authority: bool) -> TlsSettings {
        let file = |there: bool| there.then(|| PathBuf::from("/nowhere/file.pem"));
        TlsSettings {
            certificate: file(certificate),
            key: file(key),
            authority: file(authority),
            peer_name: None,
        }
    }

    #[test]
    fn nothing_set_is_plain_on_every_side() {
        let off = TlsSettings::default();
        assert!(!off.is_enabled());
        assert!(off.server().unwrap().is_none() && off.client().unwrap().is_none());
        assert!(off.rustls_server(&[]).unwrap().is_none());
        assert!(off.rustls_client().unwrap().is_none());
    }

    #[test]
    fn half_settings_and_unreadable_files_are_named() {
        let server = |certificate, key, authority| {
            let settings = settings(certificate, key, authority);
            let rustls = settings.rustls_server(&[]).unwrap_err();
            assert_eq!(settings.server().unwrap_err().field, rustls.field);
            rustls.field
        };
        assert_eq!(server(true, false, false), "tls.key");
        assert_eq!(server(false, true, false), "tls.certificate");
        assert_eq!(server(false, false, true), "tls.certificate");
        assert_eq!(server(true, true, true), "tls.certificate");
        let client = settings(true, true, false).rustls_client().unwrap_err();
        assert_eq!(client.field, "tls.authority");
    }

    #[test]
    fn the_expected_name_is_the_host_or_the_one_set() {
        let name = |peer_name: Option<&str>, address: &str| {
            let settings = TlsSettings {
                peer_name: peer_name.map(str::to_owned),
                ..TlsSettings::default()
            };
            settings
                .expected_name(address)
                .map(|name| name.to_str().into_owned())
                .map_err(|error| error.field)
        };
        assert_eq!(name(None, "decode-3.local:9000").unwrap(), "decode-3.local");
        assert_eq!(name(None, "10.0.0.3:9000").unwrap(), "10.0.0.3");
        assert_eq!(name(None, "[::1]:9000").unwrap(), "::1");
        assert_eq!(name(Some("decode"), "10.0.0.3:9000").unwrap(), "decode");
        let refused = name(Some("not a name"), "10.0.0.3:9000").unwrap_err();
        assert_eq!(refused, "tls.peer_name");
    }
}

//! Who is calling: API key to tenant.
//!
//! Keys are compared by their hash under a key drawn at start, so that neither
//! timing nor a core dump's map order tells about them. The tenant's name decides
//! its domain of the prefix cache; a client never chooses it.

use std::collections::{BTreeMap, HashMap};

use baton_proto::{Error, ErrorKind};

/// The tenant of callers without a key, where none is asked for.
pub const ANONYMOUS: &str = "default";

/// Whose request it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tenant {
    pub name: String,
}

impl Tenant {
    /// The tenant of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }

    /// The tenant's domain of the prefix cache.
    pub fn cache_salt(&self) -> Vec<u8> {
        blake3::derive_key("baton.v1 tenant cache salt", self.name.as_bytes()).to_vec()
    }
}

/// The keys in force.
pub struct Keys {
    secret: [u8; 32],
    tenants: HashMap<[u8; 32], Tenant>,
}

impl Keys {
    /// Takes key to tenant; an empty map asks nobody for a key.
    pub fn new(keys: &BTreeMap<String, String>) -> Self {
        let secret = rand::random();
        let tenants = keys
            .iter()
            .map(|(key, tenant)| (hash(&secret, key), Tenant::new(tenant.as_str())))
            .collect();
        Self { secret, tenants }
    }

    /// The tenant of a bearer token.
    ///
    /// # Errors
    /// [`ErrorKind::Unauthenticated`] with a missing or wrong key where keys are in force.
    pub fn authenticate(&self, bearer: Option<&str>) -> Result<Tenant, Error> {
        if self.tenants.is_empty() {
            return Ok(Tenant::new(ANONYMOUS));
        }
        let refused = |message| Error::new(ErrorKind::Unauthenticated, message);
        let Some(bearer) = bearer.map(str::trim).filter(|key| !key.is_empty()) else {
            return Err(refused("an API key is needed: `authorization: Bearer KEY`")
                .with_reason("API_KEY_MISSING"));
        };
        self.tenants
            .get(&hash(&self.secret, bearer))
            .cloned()
            .ok_or_else(|| refused("the API key is not known").with_reason("API_KEY_INVALID"))
    }
}

fn hash(secret: &[u8; 32], key: &str) -> [u8; 32] {
    *blake3::keyed_hash(secret, key.as_bytes()).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_its_tenant_and_no_other_gets_in() {
        let keys = Keys::new(&BTreeMap::from([("k1".to_owned(), "a".to_owned())]));
        assert_eq!(keys.authenticate(Some("k1")).unwrap().name, "a");
        for wrong in [None, Some(""), Some("k2"), Some("K1")] {
            let error = keys.authenticate(wrong).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unauthenticated);
            assert!(!error.message.contains("k1"));
        }
    }

    #[test]
    fn without_keys_everybody_is_the_default_tenant() {
        let keys = Keys::new(&BTreeMap::new());
        assert_eq!(keys.authenticate(None).unwrap().name, ANONYMOUS);
        assert_eq!(keys.authenticate(Some("anything")).unwrap().name, ANONYMOUS);
    }

    #[test]
    fn tenants_share_no_cache() {
        assert_ne!(Tenant::new("a").cache_salt(), Tenant::new("b").cache_salt());
    }
}

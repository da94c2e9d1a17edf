//! What a client needs to go on with a stream at another router: the resume token.
//!
//! A token is a short record of how the stream began (request id, prompt hash, seed,
//! template time, model revision, numerics, parameters) under a keyed MAC. It holds no
//! text and no output; what the client has received it says itself, and
//! [`received`] keeps the two from overlapping. Tokens are neither stored nor looked
//! up: a router that has the key can go on with any stream.
//!
//! The MAC is what stops a client from naming another's request (and fencing it off)
//! or from continuing another tenant's stream. Contents are not secret.

pub mod fences;
pub mod received;

use baton_proto::sampling::SamplingParams;
use baton_proto::{Error, NumericsId, TokenId};
use prost::Message as _;

use crate::auth::Tenant;
use crate::text::StopRules;

/// The first byte of a token: how the rest is laid out.
const VERSION: u8 = 1;
const MAC_BYTES: usize = 32;
/// Bytes of a token that are read at all. Real ones have about 250.
const TOKEN_BYTES_MAX: usize = 2048;
/// Bytes of each parameter's hash. Enough to tell a changed parameter by name; the
/// MAC does the guarding.
const PARAMETER_BYTES: usize = 4;
/// Where a token stands in a request.
pub const TOKEN_FIELD: &str = "resume.resume_token";

/// How a stream began.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Claims {
    /// The id that the client knows, the same in every attempt.
    #[prost(string, tag = "1")]
    pub request_id: String,
    /// Rises with each resumption; the attempt with the highest one lives.
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    #[prost(bytes = "vec", tag = "3")]
    pub prompt_hash: Vec<u8>,
    #[prost(uint64, tag = "4")]
    pub seed: u64,
    /// Unix seconds; the template's clock.
    #[prost(int64, tag = "5")]
    pub created: i64,
    #[prost(string, tag = "6")]
    pub model_revision: String,
    /// Unix seconds after which the token is not taken any more.
    #[prost(int64, tag = "7")]
    pub expires: i64,
    #[prost(bytes = "vec", tag = "8")]
    pub numerics: Vec<u8>,
    #[prost(bytes = "vec", tag = "9")]
    pub tenant: Vec<u8>,
    /// What an absent `max_tokens` came to.
    #[prost(uint32, tag = "10")]
    pub max_tokens: u32,
    #[prost(bytes = "vec", tag = "11")]
    pub parameters: Vec<u8>,
}

impl Claims {
    /// The arithmetic that the stream's tokens were drawn with.
    pub fn numerics(&self) -> Option<NumericsId> {
        <[u8; 16]>::try_from(self.numerics.as_slice())
            .ok()
            .map(NumericsId)
    }
}

/// The hash that ties a token to its prompt.
pub fn prompt_hash(prompt: &[TokenId]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for id in prompt {
        hasher.update(&id.to_le_bytes());
    }
    hasher.finalize()
}

/// The tenant as a token names it.
pub fn tenant_hash(tenant: &Tenant) -> Vec<u8> {
    blake3::derive_key("baton.v1 resume tenant", tenant.name.as_bytes())[..16].to_vec()
}

/// Every parameter that decides the output, as a short hash each.
pub fn parameter_hashes(sampling: &SamplingParams, rules: &StopRules) -> Vec<u8> {
    parameters(sampling, rules)
        .iter()
        .flat_map(|(_, value)| blake3::hash(value).as_bytes()[..PARAMETER_BYTES].to_vec())
        .collect()
}

/// The first parameter that is not what the stream began with.
///
/// # Errors
/// [`baton_proto::ErrorKind::Invalid`], reason `RESUME_PARAMETER_CHANGED`, naming it.
pub fn check_parameters(
    claims: &Claims,
    sampling: &SamplingParams,
    rules: &StopRules,
) -> Result<(), Error> {
    let changed = |field: &str| {
        let message = "is not what the stream to be resumed began with";
        Error::invalid(field, message).with_reason("RESUME_PARAMETER_CHANGED")
    };
    let given = parameters(sampling, rules);
    let known = claims.parameters.chunks(PARAMETER_BYTES);
    if known.len() != given.len() {
        return Err(changed(TOKEN_FIELD));
    }
    let differs = given
        .iter()
        .zip(known)
        .find(|((_, value), known)| blake3::hash(value).as_bytes()[..PARAMETER_BYTES] != **known);
    differs.map_or(Ok(()), |((field, _), _)| Err(changed(field)))
}

/// Name and value of each parameter, in an order that tokens rely on.
fn parameters(sampling: &SamplingParams, rules: &StopRules) -> Vec<(&'static str, Vec<u8>)> {
    let SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        // Carried whole.
        seed: _,
        n,
        max_tokens,
        min_tokens,
        stop_token_ids,
        ignore_eos,
        logprobs,
    } = sampling;
    let float = |value: f32| value.to_bits().to_le_bytes().to_vec();
    let number = |value: u32| value.to_le_bytes().to_vec();
    let mut bias = logit_bias.clone();
    bias.sort_by_key(|(id, _)| *id);
    let bias = bias.iter().flat_map(|(id, bias)| {
        let bias = bias.to_bits().to_le_bytes();
        id.to_le_bytes().into_iter().chain(bias)
    });
    let mut stop = Vec::new();
    for text in &rules.stop {
        stop.extend((text.len() as u64).to_le_bytes());
        stop.extend(text.as_bytes());
    }
    let stop_ids = stop_token_ids.iter().flat_map(|id| id.to_le_bytes());
    vec![
        ("temperature", float(*temperature)),
        ("top_k", number(*top_k)),
        ("top_p", float(*top_p)),
        ("min_p", float(*min_p)),
        ("repetition_penalty", float(*repetition_penalty)),
        ("presence_penalty", float(*presence_penalty)),
        ("frequency_penalty", float(*frequency_penalty)),
        ("logit_bias", bias.collect()),
        ("n", number(*n)),
        ("max_tokens", number(*max_tokens)),
        ("min_tokens", number(*min_tokens)),
        ("stop_token_ids", stop_ids.collect()),
        ("ignore_eos", vec![u8::from(*ignore_eos)]),
        ("logprobs", number(logprobs.map_or(0, |top| top + 1))),
        ("stop", stop),
        ("include_stop_in_output", vec![u8::from(rules.include_stop)]),
    ]
}

/// The keys that tokens are signed and checked with.
pub struct ResumeKeys {
    /// The first one signs; each one checks.
    keys: Vec<[u8; 32]>,
}

impl ResumeKeys {
    /// Keys made of these secrets; without any, one that only this process has.
    pub fn new(secrets: &[String]) -> Self {
        let derive = |secret: &String| blake3::derive_key("baton.v1 resume key", secret.as_bytes());
        let mut keys: Vec<[u8; 32]> = secrets.iter().map(derive).collect();
        if keys.is_empty() {
            keys.push(rand::random());
        }
        Self { keys }
    }

    /// The token of these claims.
    pub fn seal(&self, claims: &Claims) -> Vec<u8> {
        let mut token = vec![VERSION];
        claims
            .encode(&mut token)
            .expect("a vector takes what is written");
        let mac = blake3::keyed_hash(&self.keys[0], &token);
        token.extend(mac.as_bytes());
        token
    }

    /// What a token claims, if one of the keys signed it for this tenant and it is
    /// still good at `now` (unix seconds).
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] naming the token: `RESUME_TOKEN_INVALID`
    /// (which does not say what is wrong with it) or `RESUME_TOKEN_EXPIRED`.
    pub fn open(&self, token: &[u8], tenant: &Tenant, now: i64) -> Result<Claims, Error> {
        let invalid = || {
            let message = "is not a token of this cluster: damaged, or signed with another key";
            Error::invalid(TOKEN_FIELD, message).with_reason("RESUME_TOKEN_INVALID")
        };
        if token.len() <= MAC_BYTES || token.len() > TOKEN_BYTES_MAX {
            return Err(invalid());
        }
        let (signed, mac) = token.split_at(token.len() - MAC_BYTES);
        let mac = blake3::Hash::from_bytes(mac.try_into().map_err(|_| invalid())?);
        // Comparing hashes takes the same time wherever they differ.
        let known = self
            .keys
            .iter()
            .any(|key| blake3::keyed_hash(key, signed) == mac);
        if !known || signed[0] != VERSION {
            return Err(invalid());
        }
        let claims = Claims::decode(&signed[1..]).map_err(|_| invalid())?;
        if claims.tenant != tenant_hash(tenant) {
            return Err(invalid());
        }
        if now > claims.expires {
            let message = format!("expired {} s ago", now - claims.expires);
            return Err(Error::invalid(TOKEN_FIELD, message).with_reason("RESUME_TOKEN_EXPIRED"));
        }
        Ok(claims)
    }
}

/// A token as text.
pub fn to_hex(token: &[u8]) -> String {
    use std::fmt::Write as _;
    token.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The token that a text names.
///
/// # Errors
/// [`baton_proto::ErrorKind::Invalid`] naming the token.
pub fn from_hex(text: &str) -> Result<Vec<u8>, Error> {
    let invalid = || {
        Error::invalid(TOKEN_FIELD, "is not a token in hexadecimal")
            .with_reason("RESUME_TOKEN_INVALID")
    };
    if text.len() > 2 * TOKEN_BYTES_MAX || !text.len().is_multiple_of(2) || !text.is_ascii() {
        return Err(invalid());
    }
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| invalid());
    (0..text.len()).step_by(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> Claims {
        Claims {
            request_id: "req-1".into(),
            generation: 7,
            prompt_hash: prompt_hash(&[1, 2, 3]).as_bytes().to_vec(),
            seed: 99,
            created: 1_000,
            model_revision: "rand@1".into(),
            expires: 5_000,
            numerics: vec![3; 16],
            tenant: tenant_hash(&Tenant::new("t")),
            max_tokens: 16,
            parameters: parameter_hashes(&SamplingParams::default(), &StopRules::default()),
        }
    }

    #[test]
    fn a_token_is_good_where_the_key_is_shared_until_it_expires() {
        let keys = |secrets: &[&str]| {
            let secrets: Vec<String> = secrets.iter().map(|s| (*s).to_owned()).collect();
            ResumeKeys::new(&secrets)
        };
        let tenant = Tenant::new("t");
        let token = keys(&["old"]).seal(&claims());
        // After a rotation the old key still checks.
        assert_eq!(
            keys(&["new", "old"]).open(&token, &tenant, 5_000),
            Ok(claims())
        );
        let reason = |keys: ResumeKeys, tenant: &str, now| {
            let error = keys.open(&token, &Tenant::new(tenant), now).unwrap_err();
            assert_eq!(error.field, TOKEN_FIELD);
            error.reason
        };
        assert_eq!(reason(keys(&["new"]), "t", 0), "RESUME_TOKEN_INVALID");
        assert_eq!(reason(keys(&[]), "t", 0), "RESUME_TOKEN_INVALID");
        assert_eq!(reason(keys(&["old"]), "u", 0), "RESUME_TOKEN_INVALID");
        assert_eq!(reason(keys(&["old"]), "t", 5_001), "RESUME_TOKEN_EXPIRED");
        assert_eq!(from_hex(&to_hex(&token)).unwrap(), token);
        for wrong in ["0", "zz", "\u{e9}\u{e9}", &"00".repeat(TOKEN_BYTES_MAX + 1)] {
            assert_eq!(from_hex(wrong).unwrap_err().field, TOKEN_FIELD);
        }
    }

    #[test]
    fn no_bit_of_a_token_can_be_changed() {
        let keys = ResumeKeys::new(&[]);
        let tenant = Tenant::new("t");
        let token = keys.seal(&claims());
        assert!(keys.open(&token, &tenant, 0).is_ok());
        for bit in 0..token.len() * 8 {
            let mut changed = token.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(keys.open(&changed, &tenant, 0).is_err(), "bit {bit}");
        }
        for length in 0..token.len() {
            assert!(keys.open(&token[..length], &tenant, 0).is_err());
        }
    }

    #[test]
    fn a_changed_parameter_is_named() {
        let named = |change: fn(&mut SamplingParams, &mut StopRules)| {
            let (mut sampling, mut rules) = (SamplingParams::default(), StopRules::default());
            change(&mut sampling, &mut rules);
            check_parameters(&claims(), &sampling, &rules).map_err(|error| error.field)
        };
        assert_eq!(named(|_, _| ()), Ok(()));
        // The seed is carried, not compared here.
        assert_eq!(named(|s, _| s.seed = 5), Ok(()));
        assert_eq!(
            named(|s, _| s.temperature = 0.5),
            Err("temperature".to_owned())
        );
        assert_eq!(named(|s, _| s.n = 2), Err("n".to_owned()));
        assert_eq!(
            named(|s, _| s.logprobs = Some(0)),
            Err("logprobs".to_owned())
        );
        assert_eq!(
            named(|s, _| s.logit_bias = vec![(1, 2.0)]),
            Err("logit_bias".to_owned())
        );
        assert_eq!(
            named(|_, r| r.stop = vec!["a".into()]),
            Err("stop".to_owned())
        );
    }
}

//! Which of a host name's addresses is used.
//!
//! A name such as `localhost` often has an IPv6 address and an IPv4 one. A process listens on one
//! address of a name and a KV lane connects to one, so both sides choose by the same rule: the
//! first IPv4 address, otherwise the first one. Which loopback address a name gives then does not
//! depend on how a system sorts them. Nothing is resolved here.

use std::net::SocketAddr;

/// The address that stands for a name; `None` if it has none. IPv4 addresses in IPv6 form
/// (`::ffff:127.0.0.1`) become what they are.
pub fn preferred(resolved: impl IntoIterator<Item = SocketAddr>) -> Option<SocketAddr> {
    let mut first = None;
    for address in resolved {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if address.is_ipv4() {
            return Some(address);
        }
        first = first.or(Some(address));
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(resolved: &[&str], expected: Option<&str>) {
        let resolved = resolved.iter().map(|text| text.parse().unwrap());
        let expected = expected.map(|text| text.parse().unwrap());
        assert_eq!(preferred(resolved), expected);
    }

    #[test]
    fn a_name_stands_for_its_first_ipv4_address_or_else_its_first_one() {
        check(
            &["[::1]:7", "127.0.0.1:7", "127.0.0.2:7"],
            Some("127.0.0.1:7"),
        );
        check(&["[2001:db8::1]:7", "[::1]:7"], Some("[2001:db8::1]:7"));
        check(&["[::ffff:127.0.0.1]:7"], Some("127.0.0.1:7"));
        check(&[], None);
    }
}

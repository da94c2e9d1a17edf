//! Who is let in where lanes go inside TLS, and how fast and clearly the others hear
//! no. That bytes arrive equal inside TLS, and what faults do there, is shown by the
//! same tests as without it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_transfer::codec::hello::HELLO_BYTES;
use baton_kv_transfer::receiver::EventKind;
use baton_kv_transfer::sender::{CommitOutcome, LaneTarget, Sender, SenderConfig, TransportKind};
use baton_observability::test_certificates::Authority;
use bytes::Bytes;
use rustls::{ClientConfig, ServerConfig};

use crate::pair::tunnel::Tunnel;
use crate::pair::{AUTHORITY, LAYOUT, Pair, Shape, Via, port_tls, sender_tls};

type ServerTls = Option<Arc<ServerConfig>>;
type ClientTls = Option<Arc<ClientConfig>>;

fn shape() -> Shape {
    Shape::single(2, 8, 4096)
}

fn pair(port: ServerTls, sender: ClientTls) -> Pair {
    Pair::with_port(
        Via::Tcp,
        shape(),
        31,
        |_| {},
        |config| config.tls = port,
        |config| config.tls = sender,
    )
}

/// Hands off to `target`, which must fail within the hello's time; why it did.
async fn refused(pair: &mut Pair, target: LaneTarget) -> String {
    let before = pair.snapshot();
    let started = Instant::now();
    let transfer = pair.sender.open(target, LAYOUT).unwrap();
    let _ = pair.push_all(&transfer).await;
    assert_eq!(transfer.commit(Bytes::new()).await, CommitOutcome::PeerLost);
    assert!(
        started.elapsed() < Duration::from_secs(15),
        "{:?}",
        started.elapsed()
    );
    transfer.quiesced().await;
    assert!(pair.snapshot() == before);
    pair.assert_no_terminal_event();
    transfer.failure().unwrap()
}

async fn refused_by_port(port: ServerTls, sender: ClientTls) -> String {
    let mut pair = pair(port, sender);
    let ticket = pair.grant(1);
    let target = pair.target(ticket, 1);
    let why = refused(&mut pair, target).await;
    pair.receiver.revoke(ticket).await;
    why
}

#[tokio::test]
async fn a_sender_without_tls_is_refused_by_a_port_with_it() {
    for mutual in [false, true] {
        let why = refused_by_port(Some(port_tls(mutual)), None).await;
        assert!(why.contains("it speaks TLS, and this worker has no TLS settings"));
    }
}

#[tokio::test]
async fn a_sender_with_tls_is_refused_by_a_port_without_it() {
    let why = refused_by_port(None, Some(sender_tls())).await;
    assert!(why.contains("it takes no TLS"), "{why}");
}

#[tokio::test]
async fn a_port_of_another_authority_or_name_is_not_trusted() {
    let stranger = Authority::new();
    let why = refused_by_port(Some(port_tls(false)), Some(stranger.client(None))).await;
    assert!(
        why.contains("its certificate is not accepted: UnknownIssuer"),
        "{why}"
    );

    let mut pair = pair(Some(port_tls(true)), Some(sender_tls()));
    let mut target = pair.target(pair.grant(1), 1);
    target.server_name = Some("decode-7".try_into().unwrap());
    let why = refused(&mut pair, target).await;
    assert!(
        why.contains("its certificate is not accepted: NotValidForName"),
        "{why}"
    );
}

#[tokio::test]
async fn a_name_that_is_not_the_address_can_be_expected() {
    let named = Authority::server(&AUTHORITY.sign("decode-7"), Some(&AUTHORITY));
    let pair = pair(Some(named), Some(sender_tls()));
    let before = pair.snapshot();
    let mut target = pair.target(pair.grant(1), 1);
    target.server_name = Some("decode-7".try_into().unwrap());
    let transfer = pair.sender.open(target, LAYOUT).unwrap();
    pair.push_all(&transfer).await.unwrap();
    let outcome = transfer.commit(Bytes::new()).await;
    assert_eq!(outcome, CommitOutcome::Committed);
    pair.assert_equal(&before);
}

#[tokio::test]
async fn a_port_with_an_authority_asks_for_certificates() {
    let why = refused_by_port(Some(port_tls(true)), Some(AUTHORITY.client(None))).await;
    assert!(
        why.contains("it refused this worker's side of TLS: CertificateRequired"),
        "{why}"
    );
    let forged = Authority::new().sign("prefill-0");
    let why = refused_by_port(Some(port_tls(true)), Some(AUTHORITY.client(Some(&forged)))).await;
    assert!(
        why.contains("it refused this worker's side of TLS"),
        "{why}"
    );

    // Without an authority of its own the port lets everybody in who knows the key.
    let pair = pair(Some(port_tls(false)), Some(AUTHORITY.client(None)));
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
    pair.assert_equal(&before);
}

#[tokio::test]
async fn a_tls_port_that_is_no_data_port_is_refused() {
    let mut pair = pair(Some(port_tls(true)), Some(sender_tls()));
    // The certificate is right, and so is everything behind it but the protocol's name.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        let mut tls = rustls::ServerConnection::new(port_tls(true)).unwrap();
        while tls.is_handshaking() && tls.complete_io(&mut stream).is_ok() {}
    });
    let mut target = pair.target(pair.grant(1), 1);
    target.data_address = Some(address);
    let why = refused(&mut pair, target).await;
    assert!(why.contains("it speaks TLS, but is no data port"), "{why}");
    server.join().unwrap();
}

#[tokio::test]
async fn a_port_that_never_answers_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let mut pair = Pair::with(
        Via::Tls,
        shape(),
        31,
        |_| {},
        |config| {
            config.connect_timeout = Duration::from_millis(200);
            config.reconnect_max = Duration::from_millis(300);
        },
    );
    let mut target = pair.target(pair.grant(1), 1);
    target.data_address = Some(address);
    let why = refused(&mut pair, target).await;
    let named = format!("data address `{address}`: ");
    assert!(why.starts_with("no lane") && why.contains(&named), "{why}");
}

/// Reads until the port closes; the bytes that came.
fn read_to_close(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("the port did not close: {error}"),
    }
}

fn knock(address: SocketAddr, said: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(15)))
        .unwrap();
    stream.write_all(said).unwrap();
    stream
}

/// The first message of a TLS client.
fn client_hello() -> Vec<u8> {
    let name = "127.0.0.1".try_into().unwrap();
    let mut client = rustls::ClientConnection::new(sender_tls(), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn half_handshakes_and_noise_are_dropped_within_the_hello_time() {
    for tls in [Some(port_tls(true)), None] {
        let sender = tls.is_some().then(sender_tls);
        let pair = pair(tls, sender);
        let address = pair.port.as_ref().unwrap().local_address();
        let hello = client_hello();
        let noise = [0x16, 0x03, 0x01, 0xff, 0xff, 7, 7];
        let endless = [&[0x16, 0x03][..], &[0xff; 100_000]].concat();
        let started = Instant::now();
        let knocks = [
            &b""[..],
            &hello[..hello.len() / 2],
            &hello,
            &noise,
            &[0x17; HELLO_BYTES],
        ];
        let knocks: Vec<TcpStream> = knocks.iter().map(|said| knock(address, said)).collect();
        // The port may close before all of it is said.
        let mut flood = TcpStream::connect(address).unwrap();
        let _ = flood.write_all(&endless);
        for stream in knocks {
            read_to_close(stream);
        }
        assert!(started.elapsed() < Duration::from_secs(15));
        let before = pair.snapshot();
        assert_eq!(pair.hand_off(b"canary").await, CommitOutcome::Committed);
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn a_byte_damaged_on_the_wire_costs_the_lane_but_not_the_transfer() {
    for damaged in [100_000, 400_000] {
        let mut pair = Pair::new(Via::Tls, Shape::single(3, 40, 12_288), 11);
        let before = pair.snapshot();
        let ticket = pair.grant(1);
        let tunnel = Tunnel::damaging(damaged, pair.port.as_ref().unwrap().local_address());
        let mut target = pair.target(ticket, 1);
        target.data_address = Some(tunnel.address);
        let transfer = pair.sender.open(target, LAYOUT).unwrap();
        pair.push_all(&transfer).await.unwrap();
        let outcome = transfer.commit(Bytes::new()).await;
        assert_eq!(
            outcome,
            CommitOutcome::Committed,
            "{:?}",
            transfer.failure()
        );
        assert_eq!(transfer.statistics().reconnects, 1);
        // TLS noticed: no checksum of a frame ever saw the damage.
        assert_eq!(pair.receiver.statistics().frames_corrupt, 0);
        assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn what_stays_in_the_process_needs_no_tls() {
    // The port has TLS and the sender has none, but neither is used.
    let pair = Pair::with_port(
        Via::Tcp,
        shape(),
        31,
        |_| {},
        |config| config.tls = Some(port_tls(true)),
        |config| config.transports = vec![TransportKind::Loopback, TransportKind::Tcp],
    );
    let token = pair.receiver.process_token();
    assert!(pair.sender.stays_in_process(token));
    let tcp_alone = SenderConfig {
        transports: vec![TransportKind::Tcp],
        ..SenderConfig::new(Vec::new())
    };
    assert!(!Sender::start(tcp_alone).stays_in_process(token));
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
    pair.assert_equal(&before);
}

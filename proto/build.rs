//! Compiles `baton.v1` with protox, so that no `protoc` is needed for it.

use std::path::PathBuf;

use prost::Message as _;

const PROTOS: [&str; 3] = [
    "proto/baton/v1/types.proto",
    "proto/baton/v1/inference.proto",
    "proto/baton/v1/worker.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    if std::env::var_os("CARGO_FEATURE_WIRE").is_none() {
        return Ok(());
    }
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    std::fs::write(
        out.join("baton_descriptor.bin"),
        descriptors.encode_to_vec(),
    )?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}

//! Whole-cluster tests, in one binary.

mod bad_input;
mod clients_gone;
mod giants;
mod grpc_api;
mod http_api;
mod kv_wire;
mod openai_client;
mod processes;
mod relayout;
mod resume;
mod slo;

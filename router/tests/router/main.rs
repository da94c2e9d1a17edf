//! The whole router against scripted workers: real sockets, real tonic, no engine.

mod bodies;
mod cluster;
mod faults;
mod front_door;
mod refusals;
mod requests;
mod resume;
mod targets;
mod workers;

//! The text layer as a client meets it: ids against Python's, streams, stops, chats,
//! hostile input. One binary, so that it links once.

mod chats;
mod control_tokens;
mod ids;
mod limits;
mod shapes;
mod specs;
mod stops;
mod streams;

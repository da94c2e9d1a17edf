//! The live page at `/`: what is served and how it fares, refreshed by the browser
//! from `/v1/models` and `/metrics`. One static file, no outside resources.

use axum::response::Html;

/// The page.
pub(crate) async fn page() -> Html<&'static str> {
    Html(include_str!("page.html"))
}

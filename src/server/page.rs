//! `GET /`: the page that shows the engine at work. One file, without anything from elsewhere.

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};

const PAGE: &str = include_str!("page.html");

/// Two bars, as the page has them: blocks and slots.
const ICON: &str = include_str!("icon.svg");

type Headers = [(HeaderName, &'static str); 5];

/// Nothing from another place is loaded or asked, and no other page may frame this one.
fn headers(kind: &'static str) -> Headers {
    let policy = "default-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; \
                  frame-ancestors 'none'";
    [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, policy),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
    ]
}

/// The page.
pub async fn page() -> (Headers, &'static str) {
    (headers("text/html; charset=utf-8"), PAGE)
}

/// Its icon.
pub async fn icon() -> (Headers, &'static str) {
    (headers("image/svg+xml"), ICON)
}

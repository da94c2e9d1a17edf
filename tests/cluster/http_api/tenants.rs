//! API keys: who gets in, and whose cached prompts are whose.

use baton_router::RouterConfig;
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::models;
use serde_json::json;

use super::whole;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_let_in_and_tenants_share_no_cache() {
    let keys = [("key-a", "a"), ("key-a2", "a"), ("key-b", "b")];
    let setup = Setup {
        router: RouterConfig {
            api_keys: keys
                .into_iter()
                .map(|(key, tenant)| (key.to_owned(), tenant.to_owned()))
                .collect(),
            ..Setup::default().router
        },
        ..Setup::default()
    };
    let open = OpenCluster::start(&setup, &models::fixture("rand")).await;
    let body = json!({ "prompt": (40..100).collect::<Vec<u32>>(), "max_tokens": 2 });

    for http in [
        open.http(),
        open.http().with_header("authorization", "Bearer nope"),
        open.http().with_header("authorization", "Bearer"),
        open.http().with_header("authorization", "Basic key-a"),
    ] {
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize"] {
            let error = http.post(path, &body).await.error(401);
            assert_eq!(error["type"], "authentication_error");
            assert!(!error.to_string().contains("key-a"));
        }
        http.get("/v1/models").await.error(401);
        // Probes have no key.
        assert_eq!(http.get("/livez").await.status, 200);
        assert_eq!(http.get("/readyz").await.status, 200);
    }

    let cached = async |key: &str| {
        let http = open
            .http()
            .with_header("authorization", &format!("Bearer {key}"));
        let answer = whole(&http, "/v1/completions", &body).await;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!(cached("key-a").await, 0, "fresh");
    assert_eq!(cached("key-a").await, 48, "the tenant's own prompt");
    assert_eq!(cached("key-b").await, 0, "another tenant's prompt");
    assert_eq!(cached("key-a2").await, 48, "another key of the same tenant");
    assert_eq!(cached("key-b").await, 48);
    open.stop().await;
}

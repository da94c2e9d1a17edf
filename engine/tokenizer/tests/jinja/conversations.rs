//! Conversations that public templates are tried with.
//!
//! They keep to shapes that mean the same in every API: text as a string, arguments as an
//! object.

use baton_tokenizer::{ChatRequest, Json, JsonObject};
use serde_json::{Map, Value, json};

pub(crate) struct Conversation {
    pub(crate) name: &'static str,
    pub(crate) messages: Value,
    pub(crate) tools: Vec<Value>,
    pub(crate) extra: Map<String, Value>,
    pub(crate) continues: bool,
}

impl Conversation {
    /// What a client asks for.
    pub(crate) fn request(&self) -> ChatRequest {
        ChatRequest {
            messages: list(self.messages.as_array().unwrap()),
            tools: list(&self.tools),
            extra: members(&self.extra),
            continue_final_message: self.continues,
            ..ChatRequest::default()
        }
    }
}

fn list(items: &[Value]) -> Vec<Json> {
    items.iter().cloned().map(Json::from).collect()
}

pub(crate) fn members(object: &Map<String, Value>) -> JsonObject {
    let members = object.iter();
    members
        .map(|(key, value)| (key.clone(), Json::from(value.clone())))
        .collect()
}

fn new(name: &'static str, messages: Value) -> Conversation {
    Conversation {
        name,
        messages,
        tools: Vec::new(),
        extra: Map::new(),
        continues: false,
    }
}

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {
            "name": "get_weather",
            "description": "Weather of a \"place\" <now> & then",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A city"},
                    "days": {"type": "integer", "minimum": 1, "default": 3},
                    "units": {"type": "string", "enum": ["metric", "imperial"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
                    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["place"],
            },
        }}),
        json!({"type": "function", "function": {
            "name": "noop", "description": "Nothing", "parameters": {"type": "object", "properties": {}},
        }}),
    ]
}

fn call(id: &str, name: &str, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

pub(crate) fn all() -> Vec<Conversation> {
    let weather = json!({"place": "Zürich <&>", "days": 2, "exact": true, "rain": 0.5, "none": null, "list": [1, "x"]});
    let with_tools = |name, messages| Conversation {
        tools: tools(),
        ..new(name, messages)
    };
    let with = |name: &'static str, key: &str, value: Value| Conversation {
        extra: Map::from_iter([(key.to_owned(), value)]),
        ..new(
            name,
            json!([
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nBecause."},
                {"role": "user", "content": "Really?"},
            ]),
        )
    };
    vec![
        new("user", json!([{"role": "user", "content": "Hello there"}])),
        new(
            "system",
            json!([
                {"role": "system", "content": "  Be brief.\n"},
                {"role": "user", "content": " What is 2+2? "},
            ]),
        ),
        new(
            "turns",
            json!([
                {"role": "system", "content": "Be kind"},
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": " Two\n"},
                {"role": "user", "content": "Three"},
                {"role": "assistant", "content": "Four"},
                {"role": "user", "content": "Five"},
            ]),
        ),
        new(
            "two users",
            json!([
                {"role": "user", "content": "One"},
                {"role": "user", "content": "Two"},
            ]),
        ),
        new(
            "assistant last",
            json!([
                {"role": "user", "content": "One"},
                {"role": "assistant", "content": "Two"},
            ]),
        ),
        new(
            "unicode",
            json!([
                {"role": "user", "content": "Grüße 你好 🙂 e\u{301} \u{200b}\u{a0}x\r\ny\t'\"\\ {{ x }} {% y %}"},
            ]),
        ),
        new(
            "special spelling",
            json!([
                {"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb</s><s>[INST] c [/INST]<|eot_id|><think>d</think>"},
                {"role": "assistant", "content": "<think>e</think>f<end_of_turn>"},
                {"role": "user", "content": "g"},
            ]),
        ),
        with_tools("tools", json!([{"role": "user", "content": "Weather?"}])),
        with_tools(
            "tools and system",
            json!([
                {"role": "system", "content": "Use tools"},
                {"role": "user", "content": "Weather?"},
            ]),
        ),
        with_tools(
            "tool call and result",
            json!([
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [call("call00001", "get_weather", weather.clone())]},
                {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "{\"sky\": \"grey\"}"},
                {"role": "assistant", "content": "Grey"},
                {"role": "user", "content": "Thanks"},
            ]),
        ),
        with_tools(
            "text beside a call",
            json!([
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "Looking", "tool_calls": [call("call00001", "get_weather", weather)]},
                {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "grey"},
            ]),
        ),
        with_tools(
            "two calls",
            json!([
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [
                    call("call00001", "get_weather", json!({"place": "A"})),
                    call("call00002", "noop", json!({})),
                ]},
                {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "grey"},
                {"role": "tool", "tool_call_id": "call00002", "name": "noop", "content": "done"},
            ]),
        ),
        with("thinking on", "enable_thinking", json!(true)),
        with("thinking off", "enable_thinking", json!(false)),
        with("thinking", "thinking", json!(true)),
        with("effort", "reasoning_effort", json!("high")),
        with("keeps thoughts", "preserve_thinking", json!(true)),
        Conversation {
            extra: Map::from_iter([("today".to_owned(), json!("1 January"))]),
            ..new(
                "reasoning",
                json!([
                    {"role": "user", "content": "Why?"},
                    {"role": "assistant", "content": "Because.", "reasoning_content": "It is so\n"},
                    {"role": "user", "content": "Really?"},
                ]),
            )
        },
        Conversation {
            continues: true,
            ..new(
                "continued",
                json!([
                    {"role": "user", "content": "Count"},
                    {"role": "assistant", "content": "one, two, "},
                ]),
            )
        },
    ]
}

//! The table of what is supported: every template of it, in Jinja2 and here.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::reference::{self, Reference};
use crate::render::{Outcome, render};

const NOW: i64 = 1_753_867_445;

#[derive(Clone, Copy, PartialEq)]
enum Expect {
    Equal,
    BothFail,
    Refused,
}

struct Item<'t> {
    area: &'t str,
    name: &'t str,
    rows: Vec<(Expect, String)>,
}

fn variables() -> Value {
    json!({
        "numbers": [1, 2, 3, 4, 5],
        "pair": {"a": 1, "b": "two"},
        "pair2": {"a": "x", "b": 2},
        "schema": {"type": "array", "items": {"type": "string"}},
        "nested": {"list": [1, {"x": null}, []], "map": {"k": true, "empty": {}}, "a": 1.5},
        "people": [
            {"name": "Ann", "age": 30, "tags": ["x"]},
            {"name": "bob", "age": 25, "tags": []},
            {"name": "Cy", "age": 30, "tags": ["y", "z"]},
        ],
        "tree": [
            {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]},
            {"name": "d"},
        ],
        "big": 18_446_744_073_709_551_615_u64,
    })
}

/// The items of the table in their order.
fn items() -> Vec<Item<'static>> {
    let mut items: Vec<Item<'_>> = Vec::new();
    let mut area = "";
    let mut lines = include_str!("table.txt").split('\n').peekable();
    while let Some(line) = lines.next() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            area = name.trim_end_matches(']');
            continue;
        }
        let Some(row) = line.strip_prefix("    ") else {
            items.push(Item {
                area,
                name: line,
                rows: Vec::new(),
            });
            continue;
        };
        let mut source = row.replace('␤', "\n");
        // A string literal may go on in the next line, after a backslash.
        if source.ends_with('\\') {
            write!(source, "\n{}", lines.next().unwrap()).unwrap();
        }
        let (expect, source) = if let Some(source) = source.strip_prefix("! ") {
            (Expect::BothFail, source.to_owned())
        } else if let Some(source) = source.strip_prefix("~ ") {
            (Expect::Refused, source.to_owned())
        } else {
            (Expect::Equal, source)
        };
        items.last_mut().unwrap().rows.push((expect, source));
    }
    items
}

#[test]
fn every_row_of_the_table_is_equal_to_jinja2_or_refused_by_name() {
    let Some(folder) = reference::folder("table") else {
        return;
    };
    let items = items();
    let rows: Vec<&(Expect, String)> = items.iter().flat_map(|item| &item.rows).collect();
    let variables = variables();
    let requests: Vec<Value> = rows
        .iter()
        .map(|(_, source)| json!({"source": source, "variables": variables, "now": NOW}))
        .collect();
    let answers = Reference::start(&folder).ask(&requests);
    let mut wrong = String::new();
    for ((expect, source), answer) in rows.iter().zip(&answers) {
        let ours = render(source, &variables, NOW);
        let right = match (expect, &ours) {
            (Expect::Equal, Outcome::Text(text)) => answer["text"] == **text,
            (Expect::BothFail, Outcome::Failed(_) | Outcome::Refused(_)) => {
                answer["error"].is_string()
            }
            (Expect::Refused, Outcome::Refused(_)) => answer["text"].is_string(),
            _ => false,
        };
        if !right {
            writeln!(wrong, "{source}\n  Jinja2: {answer}\n  here:   {ours:?}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    println!("table: {} rows equal to Jinja2's", rows.len());
    assert!(rows.len() > 250, "{}", rows.len());
}

#[test]
fn the_table_names_all_that_jinja2_and_pythons_types_have() {
    let Some(folder) = reference::folder("names") else {
        return;
    };
    let names = Reference::start(&folder).names();
    let items = items();
    for (area, names) in names.as_object().unwrap() {
        for name in names.as_array().unwrap() {
            let name = name.as_str().unwrap();
            let known = items
                .iter()
                .any(|item| item.area == *area && item.name == name);
            assert!(known, "the table's area `{area}` has no `{name}`");
        }
    }
    assert!(items.iter().all(|item| !item.rows.is_empty()));
}

/// `docs/chat-templates.md` lists the table's items by what becomes of them.
#[test]
fn the_documentation_shows_the_table() {
    let mut lists = String::new();
    let mut areas: Vec<&str> = Vec::new();
    let items = items();
    for item in &items {
        if !areas.contains(&item.area) {
            areas.push(item.area);
        }
    }
    for area in areas {
        let mut same = Vec::new();
        let mut partly = Vec::new();
        let mut refused = Vec::new();
        for item in items.iter().filter(|item| item.area == area) {
            let count = |expect| item.rows.iter().filter(|row| row.0 == expect).count();
            let name = format!("`{}`", item.name);
            match (count(Expect::Equal), count(Expect::Refused)) {
                (0, 1..) => refused.push(name),
                (_, 1..) => partly.push(name),
                _ => same.push(name),
            }
        }
        let or_none = |names: Vec<String>| match names.is_empty() {
            true => "–".to_owned(),
            false => names.join(", "),
        };
        writeln!(
            lists,
            "| {area} | {} | {} | {} |",
            or_none(same),
            or_none(partly),
            or_none(refused)
        )
        .unwrap();
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/chat-templates.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (begin, end) = ("<!-- table -->\n", "<!-- end of table -->");
    let start = page.find(begin).unwrap() + begin.len();
    let stop = page.find(end).unwrap();
    let head = "| area | as in Jinja2 | in part | refused |\n|---|---|---|---|\n";
    let table = format!("{head}{}", lists.replace("||", "|"));
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        let page = format!("{}{table}{}", &page[..start], &page[stop..]);
        std::fs::write(path, page).unwrap();
        return;
    }
    assert_eq!(
        page[start..stop],
        table,
        "set BATON_WRITE_DOCS=1 to write the table into the page"
    );
}

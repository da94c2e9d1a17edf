//! Random small templates: the same text as Jinja2's, or an error.
//!
//! The seed is printed and may be given as `BATON_SEED`. An error where Jinja2 renders
//! must be a refusal by name; text where Jinja2 fails is never right.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::reference::{self, Reference};
use crate::render::{Outcome, render};

const TEMPLATES: usize = 3_000;

/// A small generator of numbers (xorshift), so that a seed means the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

const ATOMS: [&str; 38] = [
    "0",
    "1",
    "2",
    "-3",
    "7",
    "1.5",
    "-0.25",
    "1e16",
    "2.0",
    "true",
    "false",
    "none",
    "''",
    "'a'",
    "'aB c'",
    "'  x y\\n'",
    "'a,b,,c'",
    "'héllo 🙂'",
    "'42'",
    "'%s|%s'",
    "'{}-{}'",
    "[]",
    "[1, 2, 3]",
    "['b', 'A', 'c']",
    "[[1, 'x'], [2, 'y']]",
    "(1, 2)",
    "(3,)",
    "{}",
    "{'a': 1, 'b': [2]}",
    "numbers",
    "text",
    "people",
    "pair",
    "nothing",
    "range(4)",
    "'it\\'s'",
    "'<b>&'",
    "10",
];
const BINARY: [&str; 18] = [
    "+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and",
    "or", "**",
];
const FILTERS: [&str; 46] = [
    "upper",
    "lower",
    "title",
    "capitalize",
    "trim",
    "length",
    "first",
    "last",
    "list",
    "sort",
    "reverse|list",
    "unique|list",
    "join('-')",
    "join",
    "tojson",
    "string",
    "int",
    "float",
    "abs",
    "round",
    "round(1)",
    "default('d')",
    "default('d', true)",
    "items|list",
    "dictsort",
    "sum",
    "min",
    "max",
    "batch(2)|list",
    "slice(2)|list",
    "map('upper')|list",
    "map('string')|join(',')",
    "select|list",
    "select('string')|list",
    "reject('number')|list",
    "replace('a', 'X')",
    "indent(2, true)",
    "center(9)",
    "wordcount",
    "urlencode",
    "escape",
    "truncate(5, true, '.', 0)",
    "map(attribute='0')|list",
    "selectattr('age')|list",
    "tojson(indent=1)",
    "count",
];
const METHODS: [&str; 36] = [
    "upper()",
    "lower()",
    "strip()",
    "lstrip('a ')",
    "split()",
    "split(',')",
    "rsplit(None, 1)",
    "partition('b')",
    "startswith('a')",
    "endswith(('c', 'o'))",
    "replace('a', 'zz', 1)",
    "find('b')",
    "count('l')",
    "title()",
    "swapcase()",
    "zfill(6)",
    "center(7, '*')",
    "ljust(6)",
    "splitlines()",
    "isdigit()",
    "isalpha()",
    "islower()",
    "join(['x', 'y'])",
    "format(1, 'z')",
    "removeprefix('a')",
    "expandtabs()",
    "items()",
    "keys()|list",
    "values()|list",
    "get('a')",
    "get('zz', 5)",
    "index(2)",
    "count(1)",
    "capitalize()",
    "rjust(5, '0')",
    "isspace()",
];
const TESTS: [&str; 18] = [
    "defined",
    "undefined",
    "none",
    "string",
    "number",
    "integer",
    "float",
    "mapping",
    "sequence",
    "iterable",
    "true",
    "false",
    "odd",
    "even",
    "callable",
    "divisibleby 3",
    "in numbers",
    "boolean",
];
const SLICES: [&str; 10] = [
    "[0]", "[-1]", "[1:]", "[:-1]", "[::-1]", "[::2]", "['a']", "[5]", "[1:2]", ".a",
];

fn expression(random: &mut Random, depth: usize) -> String {
    if depth == 0 {
        return random.pick(&ATOMS).to_owned();
    }
    let inner = |random: &mut Random| expression(random, depth - 1);
    match random.below(9) {
        0 => random.pick(&ATOMS).to_owned(),
        1 | 2 => {
            let left = inner(random);
            let operator = random.pick(&BINARY);
            // Powers of powers only overflow.
            let right = match operator {
                "**" => random.pick(&["0", "1", "2", "-1"]).to_owned(),
                _ => inner(random),
            };
            format!("({left} {operator} {right})")
        }
        3 => format!("({})|{}", inner(random), random.pick(&FILTERS)),
        4 => format!("({}).{}", inner(random), random.pick(&METHODS)),
        5 => {
            let not = random.pick(&["", "not "]);
            format!("({}) is {not}{}", inner(random), random.pick(&TESTS))
        }
        6 => format!("({}){}", inner(random), random.pick(&SLICES)),
        7 => format!(
            "({} if {} else {})",
            inner(random),
            inner(random),
            inner(random)
        ),
        _ => format!("[{}, {}]", inner(random), inner(random)),
    }
}

fn template(random: &mut Random) -> String {
    let depth = 1 + random.below(3);
    let value = expression(random, depth);
    match random.below(8) {
        0 => format!(
            "{{% for x in {value} %}}{{{{ x }}}}{{{{ loop.last }}}}{{{{ loop.revindex }}}};{{% else %}}none{{% endfor %}}"
        ),
        1 => format!("{{% set x = {value} %}}{{{{ x }}}}|{{{{ x ~ 'z' }}}}"),
        2 => format!("{{% if {value} %}}yes{{% else %}}no{{% endif %}}"),
        3 => format!("  {{%- if true -%}}\n {{{{ {value} }}}}\n  {{% endif %}}\n  z\n"),
        _ => format!("{{{{ {value} }}}}"),
    }
}

#[test]
fn random_templates_render_as_in_jinja2_or_are_refused_by_name() {
    let Some(folder) = reference::folder("random") else {
        return;
    };
    let seed = std::env::var("BATON_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(0x5eed_u64);
    println!("random: BATON_SEED={seed}");
    let mut random = Random(seed.max(1));
    let variables = json!({
        "numbers": [3, 1, 2],
        "text": "aBc d",
        "people": [{"name": "Ann", "age": 30}, {"name": "bob", "age": 0}],
        "pair": {"a": 1, "b": "two"},
    });
    let sources: Vec<String> = (0..TEMPLATES).map(|_| template(&mut random)).collect();
    let requests: Vec<Value> = sources
        .iter()
        .map(|source| json!({"source": source, "variables": variables}))
        .collect();
    let answers = Reference::start(&folder).ask(&requests);
    let mut wrong = String::new();
    let [mut equal, mut failed, mut refused] = [0; 3];
    for (source, answer) in sources.iter().zip(&answers) {
        let ours = render(source, &variables, 0);
        let right = match (&ours, answer["text"].as_str()) {
            (Outcome::Text(text), Some(expect)) => {
                equal += 1;
                text == expect
            }
            (Outcome::Failed(_), None) | (Outcome::Refused(_), None) => {
                failed += 1;
                true
            }
            (Outcome::Refused(_), Some(_)) => {
                refused += 1;
                true
            }
            _ => false,
        };
        if !right {
            writeln!(wrong, "{source}\n  Jinja2: {answer}\n  here:   {ours:?}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "seed {seed}\n{wrong}");
    println!("random: {equal} equal, {failed} failed in both, {refused} refused by name");
    assert!(equal > TEMPLATES / 4, "{equal}");
    assert!(refused < TEMPLATES / 20, "{refused}");
}

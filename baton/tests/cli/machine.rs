//! What the machine gives or does not give: a home, variables that are set and empty, names of
//! hosts, a terminal that is closed; and what the binary says of itself to shells and people.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use baton::cli::Cli;
use clap::CommandFactory as _;
use rustix::process::Signal;

use crate::{ENDS_WITHIN, Up, assert_says, baton, fixture, refused, shell, succeeds, text};

/// The places where a home or a cache folder could be named.
const HOMES: [&str; 2] = ["HOME", "XDG_CACHE_HOME"];

#[test]
fn a_local_model_needs_no_home_and_a_fetched_one_names_the_variable() {
    let rand = fixture("rand");
    for empty in [false, true] {
        let homeless = |args: &[&str]| {
            let mut command = baton(args);
            for name in HOMES {
                match empty {
                    true => command.env(name, ""),
                    false => command.env_remove(name),
                };
            }
            command
        };
        succeeds(&mut homeless(&["model", "inspect", &rand, "--json"]));
        succeeds(&mut homeless(&[
            "generate",
            "--model",
            &rand,
            "--max-tokens",
            "2",
            "x",
        ]));
        let list = succeeds(&mut homeless(&["model", "list"]));
        assert_says(&list, &["not fetched"]);
        for model in ["smollm2-135m-instruct", "hf:owner/repo"] {
            let said = refused(&mut homeless(&["model", "fetch", model]));
            assert_says(&said, &[model, "--cache-dir", "HOME", "XDG_CACHE_HOME"]);
        }
    }
}

/// Arguments with which a command ends soon, whatever its other flags are.
const SHORT: [(&str, &str); 18] = [
    ("up", "--http 192.0.2.1:1"),
    ("router", ""),
    ("prefill", "--etcd nowhere"),
    ("decode", "--etcd nowhere"),
    ("generate", "--connect 127.0.0.1:1 x"),
    ("chat", "--connect 127.0.0.1:1"),
    ("top", "--once --url http://127.0.0.1:1"),
    ("simulate", "--seeds 1 --from 7"),
    ("bench load", "--connect 127.0.0.1:1"),
    ("bench sweep", "--connect 127.0.0.1:1"),
    ("bench interference", "--connect 127.0.0.1:1"),
    ("bench engine", "--model /nowhere"),
    ("bench quality", "--model /nowhere --text /nowhere"),
    ("bench transfer", "--part-bytes 1"),
    ("model fetch", "/nowhere"),
    ("model list", ""),
    ("model inspect", "/nowhere"),
    ("man", "nothing"),
];

#[test]
fn an_empty_variable_is_absent_whichever_flag_it_belongs_to() {
    fn collect(command: &clap::Command, path: &str, found: &mut Vec<(String, Vec<String>)>) {
        let variables = command.get_arguments().filter_map(|arg| {
            let name = arg.get_env()?.to_str()?;
            Some(name.to_owned())
        });
        let variables: Vec<String> = variables.collect();
        if !variables.is_empty() && !command.has_subcommands() {
            found.push((path.trim().to_owned(), variables));
        }
        for below in command.get_subcommands() {
            collect(below, &format!("{path} {}", below.get_name()), found);
        }
    }
    let mut commands = Vec::new();
    collect(&Cli::command(), "", &mut commands);
    assert!(commands.len() >= SHORT.len() - 1, "{commands:?}");
    for (path, mut variables) in commands {
        let short = SHORT.iter().find(|(name, _)| *name == path);
        let (_, rest) = short.unwrap_or_else(|| panic!("`{path}` has no arguments here"));
        let args: Vec<&str> = path.split(' ').chain(rest.split_whitespace()).collect();
        let absent = baton(&args).output().unwrap();
        let mut command = baton(&args);
        variables.extend(["BATON_CONFIG", "BATON_LOG", "BATON_LOG_FORMAT"].map(str::to_owned));
        command.envs(variables.iter().map(|name| (name, "")));
        let empty = command.output().unwrap();
        assert_eq!(text(&empty.stderr), text(&absent.stderr), "{path}");
        assert_eq!(empty.status, absent.status, "{path}");
    }
}

#[test]
fn doors_open_at_names_and_ipv6_addresses_of_this_host_without_keys() {
    let mut hosts = vec!["localhost", "[::ffff:127.0.0.1]"];
    if TcpListener::bind("[::1]:0").is_ok() {
        hosts.push("[::1]");
    }
    for host in hosts {
        // The last of two flags counts.
        let taken = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [http, grpc] = taken.map(|door| door.local_addr().unwrap().port());
        let (http, grpc) = (format!("{host}:{http}"), format!("{host}:{grpc}"));
        let up = Up::at(&http, &grpc, &["--log", "warn"]);
        let once = ["top", "--once", "--url", &format!("http://{http}")];
        assert_says(&succeeds(&mut baton(&once)), &["decode"]);
        let asked = [
            "generate",
            "--connect",
            &grpc,
            "--raw",
            "--max-tokens",
            "2",
            "x",
        ];
        succeeds(&mut baton(&asked));
        let load = format!(
            "bench load --api openai --url http://{http} --requests 2 --quiet --json \
             --prompt-tokens fixed:4 --output-tokens fixed:2 --warmup-requests 0"
        );
        let load: Vec<&str> = load.split_whitespace().collect();
        succeeds(&mut baton(&load));
        up.terminate();
        up.ends(ENDS_WITHIN);
    }
    for (address, words) in [
        (
            "nowhere.invalid:80",
            ["--http", "nowhere.invalid:80", "no address"],
        ),
        ("localhost", ["--http", "localhost", "HOST:PORT"]),
        (":8000", ["--http", ":8000", "HOST:PORT"]),
        (
            "localhost:65536",
            ["--http", "localhost:65536", "HOST:PORT"],
        ),
        (
            "[::ffff:192.0.2.1]:80",
            ["http", "192.0.2.1:80", "not loopback"],
        ),
    ] {
        assert_says(&refused(&mut baton(&["up", "--http", address])), &words);
    }
}

/// `nohup` has a process ignore SIGHUP before it starts, and that is left as it is.
#[test]
fn sighup_is_ignored_where_the_process_was_started_so() {
    let up = Up::start_by("trap '' HUP; exec \"$@\"");
    up.signal(Signal::HUP);
    let ready = format!(
        "curl -s -o /dev/null -w '%{{http_code}}' {}/readyz",
        up.http
    );
    for _ in 0..20 {
        assert_eq!(shell(&ready), "200");
    }
    up.terminate();
    let log = up.ends(ENDS_WITHIN);
    assert_eq!(log.matches("signal received").count(), 1, "{log}");
}

#[test]
fn the_version_says_what_the_binary_is() {
    let short = succeeds(&mut baton(&["-V"]));
    assert_eq!(short, format!("baton {}\n", env!("CARGO_PKG_VERSION")));
    let long = succeeds(&mut baton(&["--version"]));
    assert!(long.starts_with(&short), "{long}");
    let line = |name: &str| {
        let mut lines = long.lines();
        let value = lines.find_map(|line| line.strip_prefix(name));
        value
            .unwrap_or_else(|| panic!("no `{name}` in {long}"))
            .trim()
    };
    let git = Command::new("git").args(["rev-parse", "HEAD"]).output();
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.git");
    let head = git
        .ok()
        .filter(|git| git.status.success() && checkout.exists());
    let head = head.map_or("unknown".to_owned(), |git| text(&git.stdout));
    assert_eq!(line("commit"), head.trim());
    let simulate = cfg!(feature = "simulate");
    assert_eq!(line("features").contains("simulate"), simulate);
    assert_says(
        line("instruction sets"),
        &["compiled: scalar", "this machine: scalar", "used: "],
    );
}

#[test]
fn shells_and_man_know_every_command() {
    for name in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeeds(&mut baton(&["completions", name]));
        assert_says(&script, &["baton", "interference", "kv-tokens"]);
    }
    // What bash itself completes.
    let program = env!("CARGO_BIN_EXE_baton");
    let asked = format!(
        "source <({program} completions bash); COMP_WORDS=(baton up --kv-to); COMP_CWORD=2; \
         _baton baton --kv-to up; echo ${{COMPREPLY[@]}}"
    );
    let completed = succeeds(Command::new("bash").args(["-c", &asked]));
    assert_eq!(completed.trim(), "--kv-tokens");

    let page = succeeds(&mut baton(&["man"]));
    assert_says(&page, &[".TH baton 1", "\\-\\-config"]);
    let page = succeeds(&mut baton(&["man", "bench", "load"]));
    assert_says(&page, &[".TH baton-bench-load 1", "\\-\\-concurrency"]);
    let said = refused(&mut baton(&["man", "bench", "nothing"]));
    assert_says(&said, &["`nothing`", "interference"]);
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("man1");
    succeeds(&mut baton(&["man", "--folder", into.to_str().unwrap()]));
    for page in ["baton.1", "baton-up.1", "baton-bench-load.1"] {
        assert!(into.join(page).is_file(), "{page}");
    }
}

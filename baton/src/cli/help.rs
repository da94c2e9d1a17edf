//! The examples below each command's flags. Written to be pasted as they stand.

pub const BATON: &str = "\
Start a whole cluster on this machine:
  baton up
Ask it something:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{\"model\":\"smollm2-135m-instruct\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello!\"}]}'

Every flag is also an environment variable and a key of the file given by --config;
a flag wins over the environment, the environment over the file:
  [up]
  model = \"smollm2-135m-instruct\"
  kv-tokens = 65536";

pub const UP: &str = "\
Examples:
  baton up
      fetch the default model once, serve it on 127.0.0.1:8000 and :50051
  baton up --model ./model.gguf --http 127.0.0.1:9000
      serve a file of your own
  baton up --prefill-workers 2 --decode-workers 2
      four workers share one copy of the weights
  baton up --prefill-workers 0
      one mixed worker instead of a split cluster
  baton up --model ./folder --weights q4
      quantise the weights to 4 bits while they are loaded
  BATON_KV_TOKENS=65536 baton up
      any flag by environment";

pub const ROUTER: &str = "\
Example:
  baton router --etcd http://127.0.0.1:2379
Then, beside it or elsewhere, as many workers as you like:
  baton prefill --etcd http://127.0.0.1:2379 --model smollm2-135m-instruct
  baton decode --etcd http://127.0.0.1:2379 --model smollm2-135m-instruct";

pub const PREFILL: &str = "\
Examples:
  baton prefill --etcd http://127.0.0.1:2379 --model smollm2-135m-instruct
  baton prefill --etcd http://127.0.0.1:2379 --model ./model.gguf --cores 0,1
  baton prefill --etcd http://127.0.0.1:2379 --kv-transport tcp
      keep this worker's memory to itself, also from decode workers of this host
SIGTERM takes the worker out of the cluster, lets its requests end and stops it.";

pub const DECODE: &str = "\
Examples:
  baton decode --etcd http://127.0.0.1:2379 --model smollm2-135m-instruct
  baton decode --etcd http://127.0.0.1:2379 --model ./model.gguf --cores 2,3
SIGTERM takes the worker out of the cluster, lets its requests end and stops it.";

pub const TOP: &str = "\
Examples:
  baton top
      the router on this machine; q ends
  baton top --url https://router.example:8000 --api-key KEY --tls-authority ca.pem
  baton top --once
      one look as plain text, for a script or a mail
  baton top --once --json | jq -r '.workers[] | select(.state != \"ready\") | .id'
      the workers that take no work
A worker is ready, starting, draining (its streams end, nothing new goes there) or lost (its
connection says nothing; the reason stands in the line below it). RUN and WAIT are requests at the worker,
PREFILL the prompt tokens it has yet to compute; of KV blocks # are in use and + are kept for
prompts to come. Rates are those since the last look.";

pub const GENERATE: &str = "\
Examples:
  baton generate 'Why is the sky blue?'
  baton generate --raw --temperature 0 'Once upon a time'
  cat question.txt | baton generate -
  baton generate --json --seed 7 'Hello'
  baton generate --connect 127.0.0.1:50051 'Hello'
The text goes to standard output, everything else to standard error.";

pub const CHAT: &str = "\
Examples:
  baton chat
  baton chat --system 'You answer in one sentence.'
  baton chat --connect 127.0.0.1:50051
Inside: /clear forgets the conversation, Ctrl-C stops an answer, /quit or Ctrl-D ends.";

pub const BENCH: &str = "\
Examples, against a running `baton up`:
  baton bench load
  baton bench sweep --clients 1,4,16,64 --slo-itl-ms 20 --plot sweep.svg
  baton bench interference
Without a server, one engine against this machine's limits:
  baton bench engine
KV from one worker to another, by transport:
  baton bench transfer
and what fewer bits cost a model on a text of yours:
  baton bench quality --text text.txt --weights keep,q8,q4";

pub const BENCH_ENGINE: &str = "\
Examples:
  baton bench engine
      the default model: limits of the machine, prefill and decode sweeps, MFU and MBU
  baton bench engine --model ./model.gguf --batch 1,8 --context 512 --prefill 512
      a few points only
  baton bench engine --threads 1 --kv-dtype f32 --kv-pool 2GiB --output engine.json
  baton bench engine --predict --plot engine.svg
      how well step times are predicted, with a picture
MBU is a share of the read bandwidth measured in the same run at the step's working set,
MFU one of the peak of the arithmetic the weights ask for (int8 for quantised ones).
The machine should do nothing else meanwhile; the last line says what else it did.";

pub const BENCH_TRANSFER: &str = "\
Examples:
  baton bench transfer
      loopback, shared_memory and tcp for parts of 4 KiB to 1 MiB
  baton bench transfer --part-bytes 16KiB --rounds 21
      one size, more rounds for a machine that is not quiet
  baton bench transfer --total 1GiB --json --output transfer.json
Both ends run in this process, a lane's two threads as in two processes; the CPU seconds
are those of both. `of scattered` is the share of one thread's memcpy of the same parts,
`of plain TCP` that of a writev/readv pair without frames, digests or answers. Latency is
from the first word about one part until its receiver has accepted it, on a warm lane.";

pub const MODEL: &str = "\
Examples:
  baton model list
  baton model fetch smollm2-135m-instruct
  baton model inspect ./model.gguf";

pub const MODEL_FETCH: &str = "\
Examples:
  baton model fetch smollm2-135m-instruct
  baton model fetch hf:HuggingFaceTB/SmolLM2-135M-Instruct
The path goes to standard output: baton up --model \"$(baton model fetch gemma3-270m)\"";

pub const MODEL_LIST: &str = "\
Example:
  baton model list --json";

pub const MODEL_INSPECT: &str = "\
Examples:
  baton model inspect smollm2-135m-instruct
  baton model inspect ./model.gguf --json
  baton model inspect ./folder-with-config-and-safetensors";

pub const COMPLETIONS: &str = "\
Examples:
  source <(baton completions bash)
      in this shell; as a line of ~/.bashrc in every one
  baton completions zsh > ~/.zfunc/_baton
  baton completions fish > ~/.config/fish/completions/baton.fish";

pub const MAN: &str = "\
Examples:
  baton man | man -l -
  baton man bench load | man -l -
  baton man --folder /usr/local/share/man/man1";

#[cfg(feature = "simulate")]
pub const SIMULATE: &str = "\
Examples:
  baton simulate
      100 clusters, each from its seed: workers, clients and faults; a line of counts
  baton simulate --seeds 5000 --from 100000
  baton simulate --seed 42 --trace
      one of them again, line by line: time, request, attempt (a1), worker and life, event
  baton simulate --minutes 480 --json > night.json
A run is one thread, virtual time and this binary's own router, workers, scheduler,
block pools, handoff and membership; only sockets, clocks and arithmetic are replaced.
Invariants: every request answered by its deadline, no token repeated, missing or wrong,
no block lost or touched after it was freed, one owner per request, no needless error,
no panic. A seed that breaks one tells its story; then the exit status is 1.";

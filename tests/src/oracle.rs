//! Oracle O: one engine, one sequence at a time, no cache, no chunks, no split.
//!
//! What it says is right by definition; it is itself checked against the numpy
//! reference in the engine's tests.

use std::sync::Arc;
use std::sync::mpsc;

use baton_engine::api::{Command, Event, RequestKey, Submission, Work};
use baton_engine::config::{EngineConfig, PoolSize, Role};
use baton_engine::engine::Engine;
use baton_engine::model::Model;
use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::{FinishReason, SamplingParams};
use baton_proto::{RequestId, TokenId};

/// A request as tests state it.
#[derive(Clone, Debug)]
pub struct Case {
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
}

/// One choice's whole output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<f32>,
    pub finish: Option<FinishReason>,
}

/// A running oracle.
pub struct Oracle {
    engine: Engine,
    events: mpsc::Receiver<Event>,
    next_key: u64,
}

impl Oracle {
    /// An oracle for a model whose KV is stored as `dtype`.
    ///
    /// # Panics
    /// If the engine cannot start.
    pub fn new(model: &Arc<Model>, dtype: KvDtype) -> Self {
        let mut config = EngineConfig::new(Role::Decode, "oracle");
        config.kv_dtype = dtype;
        config.prefix_cache = false;
        config.pool = PoolSize::Tokens(32 * 1024);
        config.limits.sequences_max = 16;
        config.limits.chunk_tokens = 4096;
        config.limits.step_tokens_max = 4096 + 16;
        let (tx, events) = mpsc::channel();
        let sink = Box::new(move |event| drop(tx.send(event)));
        let engine = Engine::start(Arc::clone(model), config, sink).expect("oracle engine");
        Self {
            engine,
            events,
            next_key: 0,
        }
    }

    /// The right output, one per choice.
    ///
    /// # Panics
    /// If the engine refuses or fails.
    pub fn run(&mut self, case: &Case) -> Vec<Output> {
        self.next_key += 1;
        let key = RequestKey(self.next_key);
        let submission = Submission {
            key,
            request_id: RequestId::from("oracle"),
            work: Work::Local,
            prompt: case.prompt.clone(),
            forced: Vec::new(),
            sampling: case.sampling.clone(),
            cache_salt: Vec::new(),
            priority: 0,
            use_cache: false,
            itl_target: None,
        };
        let submit = Command::Submit(Box::new(submission));
        self.engine.send(submit).expect("the oracle is idle");
        let mut outputs = vec![Output::default(); case.sampling.n as usize];
        loop {
            match self.events.recv().expect("the oracle runs") {
                Event::Tokens(tokens) => {
                    for token in tokens {
                        let output = &mut outputs[token.choice as usize];
                        assert_eq!(token.index as usize, output.tokens.len());
                        output.tokens.push(token.token.id);
                        output
                            .logprobs
                            .extend(token.token.logprob.map(|logprob| logprob.logprob));
                    }
                }
                Event::Finished { choice, reason, .. } => {
                    outputs[choice as usize].finish = Some(reason);
                }
                Event::Released { .. } => return outputs,
                Event::Rejected { rejection, .. } => panic!("oracle: {}", rejection.error),
                Event::Failed { error, .. } => panic!("oracle: {error}"),
                _ => {}
            }
        }
    }
}

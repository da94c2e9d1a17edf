//! Label values as enums.
//!
//! A label whose values are known when the program is written needs no hash map:
//! the enum's discriminant is the index of its series. Worker ids, request ids
//! and other unbounded values are never labels.

use std::fmt::Debug;

/// A closed set of label values (or of pairs of them).
pub trait Label: Copy + Debug + Send + Sync + 'static {
    /// How many values there are.
    const COUNT: usize;
    /// Every value, in index order.
    fn all() -> Vec<Self>;
    /// Position in [`Label::all`].
    fn index(self) -> usize;
    /// The label pairs of this value, in key order.
    fn pairs(self) -> Vec<(&'static str, &'static str)>;
}

impl<A: Label, B: Label> Label for (A, B) {
    const COUNT: usize = A::COUNT * B::COUNT;

    fn all() -> Vec<Self> {
        A::all()
            .into_iter()
            .flat_map(|a| B::all().into_iter().map(move |b| (a, b)))
            .collect()
    }

    fn index(self) -> usize {
        self.0.index() * B::COUNT + self.1.index()
    }

    fn pairs(self) -> Vec<(&'static str, &'static str)> {
        let mut pairs = self.0.pairs();
        pairs.extend(self.1.pairs());
        pairs
    }
}

macro_rules! label {
    (
        $(#[$doc:meta])*
        $name:ident [$($key:literal),+] {
            $($(#[$variant_doc:meta])* $variant:ident = [$($value:literal),+],)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)+
        }

        impl $name {
            /// Every value, in index order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];
        }

        impl Label for $name {
            const COUNT: usize = Self::ALL.len();

            fn all() -> Vec<Self> {
                Self::ALL.to_vec()
            }

            fn index(self) -> usize {
                self as usize
            }

            fn pairs(self) -> Vec<(&'static str, &'static str)> {
                let values: &[&'static str] = match self {
                    $(Self::$variant => &[$($value),+],)+
                };
                [$($key),+].into_iter().zip(values.iter().copied()).collect()
            }
        }
    };
}

label! {
    /// How a request ended: the gRPC code the client saw and the cause.
    Outcome ["code", "reason"] {
        Ok = ["OK", "ok"],
        /// The client gave up.
        Cancelled = ["CANCELLED", "cancelled"],
        Deadline = ["DEADLINE_EXCEEDED", "deadline"],
        /// Refused by admission: too much queued.
        ShedQueue = ["RESOURCE_EXHAUSTED", "shed_queue"],
        /// Refused by admission: no KV memory in reach.
        ShedKv = ["RESOURCE_EXHAUSTED", "shed_kv"],
        NoPrefill = ["UNAVAILABLE", "no_prefill"],
        NoDecode = ["UNAVAILABLE", "no_decode"],
        KvTransfer = ["UNAVAILABLE", "kv_transfer"],
        WorkerLost = ["UNAVAILABLE", "worker_lost"],
        Draining = ["UNAVAILABLE", "draining"],
        Fenced = ["ABORTED", "fenced"],
        Invalid = ["INVALID_ARGUMENT", "invalid"],
        NotFound = ["NOT_FOUND", "not_found"],
        Unauthenticated = ["UNAUTHENTICATED", "unauthenticated"],
        Unsupported = ["UNIMPLEMENTED", "unsupported"],
        TooLarge = ["RESOURCE_EXHAUSTED", "too_large"],
        Internal = ["INTERNAL", "internal"],
    }
}

impl Outcome {
    /// The outcome of an error of which only the gRPC code is known.
    pub const fn from_grpc_code(code: i32) -> Self {
        match code {
            0 => Self::Ok,
            1 => Self::Cancelled,
            3 => Self::Invalid,
            4 => Self::Deadline,
            5 => Self::NotFound,
            8 => Self::ShedQueue,
            10 => Self::Fenced,
            12 => Self::Unsupported,
            14 => Self::WorkerLost,
            16 => Self::Unauthenticated,
            _ => Self::Internal,
        }
    }
}

label! {
    /// Whether a request's prompt was computed by the prefill pool or by its decode worker.
    Path ["path"] {
        Disagg = ["disagg"],
        Local = ["local"],
    }
}

label! {
    /// The parts of TTFT in the order a request passes them; they add up to it.
    TtftPhase ["phase"] {
        /// Authenticated and let through the admission queue.
        Admit = ["admit"],
        Tokenize = ["tokenize"],
        /// A prefill and a decode worker were picked.
        Route = ["route"],
        /// The decode worker granted blocks.
        Reserve = ["reserve"],
        PrefillQueue = ["prefill_queue"],
        Prefill = ["prefill"],
        /// The worker had the token; the router did not yet.
        FirstTokenReturn = ["first_token_return"],
        /// Detokenised and handed to the client's connection.
        Send = ["send"],
    }
}

label! {
    /// The parts of the gap between the first and the second token.
    SecondTokenPhase ["phase"] {
        /// What prefill did not hide of the KV transfer.
        TransferExposed = ["transfer_exposed"],
        DecodeQueue = ["decode_queue"],
        FirstDecode = ["first_decode"],
    }
}

label! {
    /// Why a gap between two tokens exceeded the objective.
    StallCause ["cause"] {
        Preempt = ["preempt"],
        TransferWait = ["transfer_wait"],
        Batch = ["batch"],
        Migrate = ["migrate"],
        SlowClient = ["slow_client"],
        Unknown = ["unknown"],
    }
}

label! {
    /// When a request was placed again.
    RetryWhen ["when"] {
        BeforeFirstToken = ["before_first_token"],
        MidStream = ["mid_stream"],
    }
}

label! {
    /// Whether an attempt worked.
    Success ["result"] {
        Ok = ["ok"],
        Failed = ["failed"],
    }
}

label! {
    /// What the router decided to do with a prompt (the names other schedulers use).
    Decision ["decision_type"] {
        PrefillDecode = ["prefill-decode"],
        DecodeOnly = ["decode-only"],
    }
}

label! {
    /// The pool a worker belongs to. Not called `role`: that is the constant label of
    /// the process which is scraped.
    PoolRole ["worker_role"] {
        Prefill = ["prefill"],
        Decode = ["decode"],
        Mixed = ["mixed"],
    }
}

label! {
    /// What a router thinks of a worker.
    MemberState ["state"] {
        Starting = ["starting"],
        Ready = ["ready"],
        Draining = ["draining"],
        Lost = ["lost"],
        /// What it serves cannot be used.
        Refused = ["refused"],
    }
}

label! {
    /// The state of a KV block. A block is in exactly one; the sum is the pool's size.
    BlockState ["state"] {
        Free = ["free"],
        /// Held by at least one sequence.
        Referenced = ["referenced"],
        /// Held by the prefix cache alone, can be evicted.
        Cached = ["cached"],
        /// Promised to a handoff that has not committed.
        Reserved = ["reserved"],
        /// Being sent to another worker.
        Pinned = ["pinned"],
        /// A peer may still write to it.
        Quarantined = ["quarantined"],
    }
}

label! {
    /// Which end of a transfer this process is.
    Direction ["direction"] {
        Send = ["send"],
        Receive = ["recv"],
    }
}

label! {
    /// What carried KV bytes.
    Transport ["transport"] {
        /// A copy inside one process.
        Loopback = ["loopback"],
        /// A copy out of memory that another process of the host lent.
        SharedMemory = ["shared_memory"],
        /// Read from the other worker's memory over NIXL.
        Nixl = ["nixl"],
        Tcp = ["tcp"],
    }
}

label! {
    /// Why a transfer failed.
    TransferFailure ["reason"] {
        Timeout = ["timeout"],
        Checksum = ["checksum"],
        PeerLost = ["peer_lost"],
        Expired = ["expired"],
        Fenced = ["fenced"],
        NoMemory = ["no_memory"],
        Layout = ["layout"],
        Cancelled = ["cancelled"],
    }
}

label! {
    /// What a step computed.
    StepPhase ["phase"] {
        Prefill = ["prefill"],
        Decode = ["decode"],
        /// Prompt chunks and decode rows in one batch.
        Mixed = ["mixed"],
    }
}

label! {
    /// Why a sequence ended (vLLM's values).
    FinishedReason ["finished_reason"] {
        Stop = ["stop"],
        Length = ["length"],
        Abort = ["abort"],
        Error = ["error"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<L: Label + PartialEq>() {
        assert_eq!(L::all().len(), L::COUNT);
        for (position, value) in L::all().into_iter().enumerate() {
            assert_eq!(value.index(), position);
        }
        let mut pairs: Vec<_> = L::all().into_iter().map(Label::pairs).collect();
        pairs.sort();
        pairs.dedup();
        assert_eq!(pairs.len(), L::all().len(), "two values share a series");
    }

    #[test]
    fn an_index_is_the_position_and_every_value_is_its_own_series() {
        check::<Outcome>();
        check::<TtftPhase>();
        check::<BlockState>();
        check::<(RetryWhen, Success)>();
        check::<(PoolRole, MemberState)>();
    }
}

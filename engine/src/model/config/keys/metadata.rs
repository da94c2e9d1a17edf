//! The metadata keys of a GGUF file. Those without one of the prefixes of [`is_general`]
//! stand below the architecture's name.

use super::Neutral::{Bool, Empty, Number, Reader};
use super::{Key, applied, ignored, refused, tokenizer};

const YARN: &str = r#""rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024"#;

/// Whether a key stands for itself, not below the architecture's name.
pub(super) fn is_general(name: &str) -> bool {
    name.starts_with("general.") || name.starts_with("tokenizer.")
}

/// Whether a key is one of the chat templates that `tokenizer.chat_templates` lists.
pub(super) fn is_template(name: &str) -> bool {
    name.starts_with("tokenizer.chat_template.")
}

pub(super) const KEYS: &[Key] = &[
    applied(
        "general.architecture",
        "\"qwen2\"",
        r#""qwen2.block_count": 4, "qwen2.context_length": 4096, "qwen2.embedding_length": 64, "qwen2.feed_forward_length": 128, "qwen2.attention.head_count": 8, "qwen2.attention.head_count_kv": 2, "qwen2.attention.layer_norm_rms_epsilon": 1e-5"#,
        "chooses the family",
    ),
    applied("block_count", "3", "", "layers"),
    applied(
        "context_length",
        "2048",
        "",
        "longest sequence; YaRN raises it to what it stretches to",
    ),
    applied(
        "embedding_length",
        "128",
        "",
        "width of the residual stream",
    ),
    applied(
        "feed_forward_length",
        "[256, 256, 256, 256]",
        "",
        "width of the feed-forward layer; a list of equal values is the value",
    ),
    applied(
        "attention.head_count",
        "[4, 4, 4, 4]",
        "",
        "query heads; a list of equal values is the value",
    ),
    applied(
        "attention.head_count_kv",
        "[4, 4, 4, 4]",
        "",
        "key and value heads; a list of equal values is the value",
    ),
    applied(
        "attention.key_length",
        "16",
        r#""attention.value_length": 16"#,
        "size of a head; without it the width divided by the heads",
    ),
    refused(
        "attention.value_length",
        &[Reader("the size of a head")],
        "16",
        "differs from the key length",
    ),
    applied(
        "attention.layer_norm_rms_epsilon",
        "1e-3",
        "",
        "epsilon of every norm",
    ),
    applied(
        "attention.scale",
        "0.5",
        "",
        "multiplies scores, instead of one over the root of the head's size",
    ),
    applied(
        "attention.sliding_window",
        "64",
        "",
        "window of the layers that have one",
    ),
    applied(
        "attention.sliding_window_pattern",
        "[true, false, true, false]",
        r#""attention.sliding_window": 64"#,
        "which layers have the window: a list, or every so many-th has none",
    ),
    applied(
        "attn_logit_softcapping",
        "30.0",
        "",
        "soft cap on attention scores; 0 is none",
    ),
    applied(
        "final_logit_softcapping",
        "30.0",
        "",
        "soft cap on logits; 0 is none",
    ),
    applied("rope.freq_base", "20000.0", "", "RoPE base"),
    refused(
        "rope.freq_base_swa",
        &[Reader(
            "`rope.freq_base`, but for Gemma 3, which applies it",
        )],
        "20000.0",
        "all layers have one RoPE base",
    ),
    applied(
        "rope.dimension_count",
        "4",
        "",
        "rotated dimensions of a head",
    ),
    refused(
        "rope.dimension_count_swa",
        &[Reader("`rope.dimension_count`")],
        "4",
        "all layers rotate as many dimensions",
    ),
    applied(
        "rope.scaling.type",
        "\"yarn\"",
        r#""rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024"#,
        "`none`, `linear`, `yarn` or `longrope` (with the tensors `rope_factors_long` and `rope_factors_short`)",
    ),
    applied(
        "rope.scaling.factor",
        "2.0",
        "",
        "how far the context is stretched; without a type `linear`",
    ),
    applied(
        "rope.scale_linear",
        "2.0",
        "",
        "the older name of `rope.scaling.factor`; must agree with it",
    ),
    applied(
        "rope.scaling.original_context_length",
        "2048",
        YARN,
        "context before the scaling: `yarn`, `longrope`; refused where no scaling reads it and it is not the model's",
    ),
    applied(
        "rope.scaling.attn_factor",
        "1.5",
        "",
        "multiplies rotated queries and keys, beside what `yarn` does",
    ),
    applied(
        "rope.scaling.yarn_beta_fast",
        "16.0",
        YARN,
        "`yarn`: above so many turns a frequency is kept; 32 without it",
    ),
    applied(
        "rope.scaling.yarn_beta_slow",
        "2.0",
        YARN,
        "`yarn`: below so many turns a frequency is divided; 1 without it",
    ),
    refused(
        "rope.scaling.yarn_ext_factor",
        &[Number(1.0)],
        "0.5",
        "YaRN's blend is used whole",
    ),
    refused(
        "rope.scaling.yarn_attn_factor",
        &[],
        "1.2",
        "writers mean different things by it; `rope.scaling.attn_factor` is applied",
    ),
    refused(
        "rope.scaling.yarn_log_multiplier",
        &[Number(0.0)],
        "0.1",
        "this architecture does not read it",
    ),
    refused(
        "rope.scaling.alpha",
        &[Number(0.0)],
        "1000.0",
        "this architecture does not read it",
    ),
    refused(
        "rope.dimension_sections",
        &[Empty],
        "[1, 1, 1, 0]",
        "positions have one dimension",
    ),
    refused(
        "logit_scale",
        &[Number(0.0), Number(1.0)],
        "0.0625",
        "nothing multiplies logits",
    ),
    refused(
        "residual_scale",
        &[Number(0.0), Number(1.0)],
        "0.22",
        "nothing multiplies the residual stream",
    ),
    refused(
        "embedding_scale",
        &[Number(0.0), Number(1.0)],
        "12.0",
        "only Gemma 3 scales embeddings, by its width",
    ),
    refused(
        "attention.causal",
        &[Bool(true)],
        "false",
        "attention is causal",
    ),
    refused(
        "attention.clamp_kqv",
        &[Number(0.0)],
        "8.0",
        "queries, keys and values are not clipped",
    ),
    refused(
        "attention.max_alibi_bias",
        &[Number(0.0)],
        "8.0",
        "positions are rotations",
    ),
    refused(
        "attention.temperature_scale",
        &[Number(0.0)],
        "0.1",
        "scores do not depend on the position",
    ),
    refused(
        "attention.temperature_length",
        &[Number(0.0)],
        "8192",
        "scores do not depend on the position",
    ),
    refused(
        "attention.output_scale",
        &[Number(0.0), Number(1.0)],
        "0.5",
        "nothing multiplies the attention's output",
    ),
    refused(
        "attention.value_scale",
        &[Number(0.0), Number(1.0)],
        "0.5",
        "nothing multiplies values",
    ),
    refused(
        "use_parallel_residual",
        &[Bool(false)],
        "true",
        "attention and feed-forward follow each other",
    ),
    refused(
        "expert_count",
        &[Number(0.0)],
        "8",
        "mixtures of experts are not read",
    ),
    refused(
        "expert_used_count",
        &[Number(0.0)],
        "2",
        "mixtures of experts are not read",
    ),
    refused(
        "expert_feed_forward_length",
        &[Number(0.0)],
        "64",
        "mixtures of experts are not read",
    ),
    refused(
        "nextn_predict_layers",
        &[Number(0.0)],
        "1",
        "layers that predict further tokens are not read",
    ),
    refused(
        "pooling_type",
        &[Number(0.0)],
        "3",
        "the model gives embeddings, not tokens",
    ),
    ignored(
        "vocab_size",
        "301",
        "the embedding's rows are the vocabulary",
    ),
    ignored(
        "rope.scaling.finetuned",
        "true",
        "says where the weights come from",
    ),
    ignored(
        "attention.layer_norm_epsilon",
        "1e-3",
        "every norm is an RMS norm, which has its own",
    ),
    ignored(
        "tensor_data_layout",
        "\"Meta AI original pth\"",
        "the architecture says how rows lie",
    ),
    applied(
        "general.alignment",
        "48",
        "",
        "where tensors start: multiples of a power of two",
    ),
    ignored(
        "general.name",
        "\"x\"",
        "names, authors, licences and the like; no `general` key but two is read",
    ),
    ignored("general.file_type", "7", "every tensor says its own type"),
    ignored(
        "general.quantization_version",
        "2",
        "every tensor says its own type",
    ),
    tokenizer("tokenizer.ggml.model", "\"bert\"", "`gpt2` or `llama`"),
    tokenizer(
        "tokenizer.ggml.pre",
        "\"llama-bpe\"",
        "how text is split before merges",
    ),
    tokenizer(
        "tokenizer.ggml.tokens",
        "[\"a\", \"b\"]",
        "texts of the tokens",
    ),
    tokenizer("tokenizer.ggml.token_type", "[1]", "kinds of the tokens"),
    tokenizer("tokenizer.ggml.scores", "[0.5]", "scores of the tokens"),
    tokenizer("tokenizer.ggml.merges", "[\"a b\"]", "merges, by rank"),
    tokenizer(
        "tokenizer.ggml.bos_token_id",
        "7",
        "id that starts a sequence",
    ),
    tokenizer(
        "tokenizer.ggml.eos_token_id",
        "7",
        "id that ends a sequence",
    ),
    tokenizer("tokenizer.ggml.eot_token_id", "7", "id that ends a turn"),
    tokenizer("tokenizer.ggml.eom_token_id", "7", "id that ends a message"),
    tokenizer("tokenizer.ggml.unknown_token_id", "7", "id of unknown text"),
    tokenizer(
        "tokenizer.ggml.padding_token_id",
        "7",
        "id that fills a sequence up; none is filled up",
    ),
    tokenizer(
        "tokenizer.ggml.add_bos_token",
        "false",
        "whether a prompt gets the start id",
    ),
    tokenizer(
        "tokenizer.ggml.add_eos_token",
        "true",
        "whether a prompt gets the end id",
    ),
    tokenizer(
        "tokenizer.ggml.add_space_prefix",
        "false",
        "`llama`: whether a space goes in front",
    ),
    tokenizer("tokenizer.chat_template", "\"x\"", "the chat template"),
    Key {
        beside: r#""tokenizer.chat_template.x": "y""#,
        ..tokenizer(
            "tokenizer.chat_templates",
            "[\"x\"]",
            "names of further chat templates, each in a key of its own",
        )
    },
    refused(
        "tokenizer.ggml.suppress_tokens",
        &[Empty],
        "[1]",
        "no token is suppressed",
    ),
    refused(
        "tokenizer.ggml.add_sep_token",
        &[Bool(false)],
        "true",
        "no prompt has two parts",
    ),
    refused(
        "tokenizer.ggml.normalizer.lowercase",
        &[Bool(false)],
        "true",
        "text is not changed before it is split",
    ),
    refused(
        "tokenizer.ggml.normalizer.strip_accents",
        &[Bool(false)],
        "true",
        "text is not changed before it is split",
    ),
    ignored(
        "tokenizer.ggml.remove_extra_whitespaces",
        "true",
        "only unigram tokenizers read it, and those are refused",
    ),
    ignored(
        "tokenizer.ggml.precompiled_charsmap",
        "[1]",
        "only unigram tokenizers read it, and those are refused",
    ),
    ignored(
        "tokenizer.ggml.token_type_count",
        "1",
        "only encoders read it",
    ),
    ignored(
        "tokenizer.huggingface.json",
        "\"{}\"",
        "the keys above are read instead",
    ),
    ignored(
        "tokenizer.ggml.seperator_token_id",
        "7",
        "no prompt has two parts",
    ),
    ignored("tokenizer.ggml.cls_token_id", "7", "only encoders read it"),
    ignored("tokenizer.ggml.mask_token_id", "7", "only encoders read it"),
    ignored(
        "tokenizer.ggml.fim_pre_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.fim_suf_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.fim_mid_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.fim_pad_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.fim_rep_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.fim_sep_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.prefix_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.suffix_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
    ignored(
        "tokenizer.ggml.middle_token_id",
        "7",
        "no prompt is filled in the middle",
    ),
];

"""Read a checkpoint for decoder.py: a GGUF file (expanded by PyPI `gguf`) or a Hugging Face folder.

Both give the same canonical names: embed, head, out_norm, and per layer l<i>. with q k v o gate up down (and
`.bias`), attn_norm ffn_norm q_norm k_norm post_attn_norm post_ffn_norm. A tensor that has no such name is an
error. The safetensors container is read here, by hand, since it is a length, a JSON header and raw bytes.
"""

import json
import re
from pathlib import Path

import numpy as np

from decoder import Config, Decoder

HF_LAYER = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
HF_GEMMA = {
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
GGUF_LAYER = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o", "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down", "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm", "post_attention_norm": "post_attn_norm", "post_ffw_norm": "post_ffn_norm",
}  # fmt: skip


def read_safetensors(path):
    raw = np.memmap(path, np.uint8, "r")
    n = int(raw[:8].view(np.uint64)[0])
    header = json.loads(bytes(raw[8 : 8 + n]))
    out = {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        a, b = t["data_offsets"]
        data = np.array(raw[8 + n + a : 8 + n + b])
        if t["dtype"] == "BF16":
            x = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            x = data.view({"F32": np.float32, "F16": np.float16}[t["dtype"]]).astype(np.float32)
        out[name] = x.reshape(t["shape"])
    return out


def canonical(name, table):
    """`<stem>.weight` or `<stem>.bias` -> the name used here."""
    stem, kind = name.rsplit(".", 1)
    if kind not in ("weight", "bias") or stem not in table:
        raise ValueError(f"tensor {name} has no place in the reference")
    return table[stem] + (".bias" if kind == "bias" else "")


def hf_config(j):
    arch = j["model_type"].removesuffix("_text")
    n = j["num_hidden_layers"]
    c = dict(
        arch=arch, n_layers=n, hidden=j["hidden_size"], n_heads=j["num_attention_heads"],
        n_kv=j.get("num_key_value_heads", j["num_attention_heads"]),
        head_dim=j.get("head_dim") or j["hidden_size"] // j["num_attention_heads"],
        vocab=j["vocab_size"], eps=j["rms_norm_eps"], rope_base=j.get("rope_theta", 1e4),
        rope_scaling=j.get("rope_scaling"),
    )  # fmt: skip
    if arch == "gemma3":
        types = j.get("layer_types")
        every = j.get("sliding_window_pattern", 6)
        c |= dict(
            norm_plus_one=True, embed_scale=j["hidden_size"] ** 0.5, q_scale=j["query_pre_attn_scalar"] ** -0.5,
            act="gelu_tanh", window=j["sliding_window"], rope_base_local=j["rope_local_base_freq"],
            sliding=[t == "sliding_attention" for t in types] if types else [(i + 1) % every != 0 for i in range(n)],
            attn_softcap=j.get("attn_logit_softcapping") or 0.0, final_softcap=j.get("final_logit_softcapping") or 0.0,
        )  # fmt: skip
    elif arch not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"model_type {arch}")
    return Config(**c)


def load_hf(folder, **options):
    folder = Path(folder)
    cfg = hf_config(json.loads((folder / "config.json").read_text()))
    table = {"model.embed_tokens": "embed", "lm_head": "head", "model.norm": "out_norm"}
    layer = HF_LAYER | (HF_GEMMA if cfg.arch == "gemma3" else {})
    table |= {f"model.layers.{i}.{k}": f"l{i}.{v}" for i in range(cfg.n_layers) for k, v in layer.items()}
    tensors = {}
    for f in sorted(folder.glob("*.safetensors")):
        tensors |= {canonical(k, table): v for k, v in read_safetensors(f).items()}
    return Decoder(cfg, tensors, **options)


def load_gguf(path, **options):
    import gguf

    r = gguf.GGUFReader(path)
    meta = {k: f.contents() for k, f in r.fields.items() if not k.startswith("tokenizer.ggml.")}
    arch = meta["general.architecture"]
    get = lambda k, d=None: meta.get(f"{arch}.{k}", d)
    n, hidden, heads = get("block_count"), get("embedding_length"), get("attention.head_count")
    table = {"token_embd": "embed", "output": "head", "output_norm": "out_norm", "rope_freqs": "rope_freqs"}
    table |= {f"blk.{i}.{k}": f"l{i}.{v}" for i in range(n) for k, v in GGUF_LAYER.items()}
    tensors, quantised = {}, set()
    for t in r.tensors:
        name = canonical(t.name, table)
        tensors[name] = gguf.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(tuple(int(d) for d in t.shape[::-1]))
        if t.tensor_type.name not in ("F32", "F16", "BF16"):
            quantised.add(name)
    c = dict(
        arch=arch, n_layers=n, hidden=hidden, n_heads=heads, n_kv=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length") or get("rope.dimension_count") or hidden // heads,
        vocab=tensors["embed"].shape[0], eps=get("attention.layer_norm_rms_epsilon"),
        rope_base=get("rope.freq_base", 1e4), rope_adjacent=arch == "llama",
        rope_divisors=tensors.pop("rope_freqs", None),
    )  # fmt: skip
    if arch == "gemma3":
        # The converter has already added one to the norm weights; the pattern and the local base are the
        # architecture's and not in the file.
        c |= dict(
            embed_scale=hidden**0.5, act="gelu_tanh", window=get("attention.sliding_window"), rope_base_local=1e4,
            sliding=[(i + 1) % 6 != 0 for i in range(n)],
        )  # fmt: skip
    elif arch not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"architecture {arch}")
    return Decoder(Config(**c), tensors, quantised, **options)


def load(path, **options):
    """options: Decoder's `emulate` and `dtype`."""
    return load_gguf(path, **options) if str(path).endswith(".gguf") else load_hf(path, **options)

"""An independent float32 (or float64) reference of the decoders llama, qwen2, qwen3 and gemma3.

Written from the mathematics, in plain numpy, to be read rather than to be fast. It shares no code with the
engine, so the two can only agree by both being right. Shapes: T = new tokens, S = all tokens so far,
H = query heads, G = key/value heads, D = head size. Every matrix is stored [out, in]; `y = x @ W.T`.

Not here: files (see load.py), sampling other than greedy, batching, paging, quantised kernels. Quantised weights
arrive already expanded to f32; `Emulate` can round activations and the KV cache the way the engine does, to
measure what that rounding costs.
"""

from dataclasses import dataclass, field

import numpy as np

F32 = np.float32


@dataclass
class Config:
    arch: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv: int
    head_dim: int
    vocab: int
    eps: float
    rope_base: float
    rope_adjacent: bool = False  # True: pairs are (2i, 2i+1); False: pairs are (i, i + D/2)
    rope_base_local: float | None = None  # base of sliding layers, where it differs
    rope_dims: int = 0  # rotated dimensions of a head, the first ones; 0 means all
    rope_scaling: dict | None = None  # Hugging Face's dictionary, without an attention factor of its own
    rope_context: int = 0  # tokens the model is loaded for: dynamic and longrope choose by it
    rope_factor: float = 1.0  # multiplies rotated queries and keys
    rope_divisors: np.ndarray | None = None  # GGUF's rope_freqs.weight: each frequency is divided by it
    window: int = 0  # a sliding layer's query i sees keys j with i - j < window
    sliding: list = field(default_factory=list)  # one bool per layer
    norm_plus_one: bool = False  # True: norm weights are stored as w - 1 (Gemma on Hugging Face)
    embed_scale: float = 1.0
    q_scale: float = 0.0  # multiplies the scores; 0 means 1/sqrt(head_dim)
    act: str = "silu"  # or gelu_tanh
    attn_softcap: float = 0.0
    final_softcap: float = 0.0

    def __post_init__(self):
        if not self.q_scale:
            self.q_scale = self.head_dim**-0.5
        if not self.rope_dims:
            self.rope_dims = self.head_dim
        if not self.sliding:
            self.sliding = [bool(self.window)] * self.n_layers


@dataclass
class Emulate:
    """Roundings of the engine that the reference can imitate, to find what they cost."""

    int8_activations: bool = False  # groups of 32 codes, only in front of quantised matrices
    kv: str = "f32"  # or f16, bf16


def to_bf16(x):
    """Round to the nearest bfloat16, ties to even, returned as f32."""
    u = np.ascontiguousarray(x, F32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(F32)


def int8_groups(x):
    """x rounded to `code * dx`, one dx = amax / 127 for each row and group of 32."""
    g = x.reshape(*x.shape[:-1], -1, 32)
    dx = (np.abs(g).max(-1, keepdims=True) / F32(127)).astype(F32)
    inverse = np.divide(F32(1), dx, out=np.zeros_like(dx), where=dx > 0)
    return (np.rint(g * inverse) * dx).astype(F32).reshape(x.shape)


def inverse_frequencies(cfg, sliding):
    base = cfg.rope_base_local if sliding and cfg.rope_base_local else cfg.rope_base
    n = cfg.rope_dims
    f = base ** (-np.arange(0, n, 2, dtype=np.float64) / n)
    if sliding and cfg.rope_base_local:
        return f  # the local base of Gemma 3 is never scaled
    if cfg.rope_divisors is not None:
        return f / cfg.rope_divisors
    s = cfg.rope_scaling or {}
    kind = s.get("rope_type", s.get("type"))
    if kind == "linear":
        return f / s["factor"]
    if kind == "llama3":
        # Long waves are slowed by `factor`, short ones kept, those between blended linearly in the number of
        # turns they make over the original context.
        turns = s["original_max_position_embeddings"] * f / (2 * np.pi)
        lo, hi = s["low_freq_factor"], s["high_freq_factor"]
        keep = np.clip((turns - lo) / (hi - lo), 0, 1)
        return keep * f + (1 - keep) * f / s["factor"]
    if kind == "yarn":
        # "YaRN", equations 17 to 23 with the ramp over the index of a frequency, as published code has it: the index
        # of the frequency that makes r turns over the original context L is n ln(L / 2 pi r) / (2 ln base).
        index = lambda turns: n * np.log(s["original_max_position_embeddings"] / (2 * np.pi * turns)) / (2 * np.log(base))
        first, last = index(s.get("beta_fast", 32)), index(s.get("beta_slow", 1))
        if s.get("truncate", True):
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, n - 1)
        slow = np.clip((np.arange(n // 2) - first) / max(last - first, 1e-3), 0, 1)
        return (1 - slow) * f + slow * f / s["factor"]
    if kind == "dynamic":
        # NTK-aware: past the original context the base grows so that the slowest frequency is stretched by what the
        # context is longer, times the factor.
        more = s["factor"] * max(cfg.rope_context / s["original_max_position_embeddings"], 1) - (s["factor"] - 1)
        return (base * more ** (n / (n - 2))) ** (-np.arange(0, n, 2, dtype=np.float64) / n)
    if kind == "longrope":
        long = cfg.rope_context > s["original_max_position_embeddings"]
        return f / np.array(s["long_factor" if long else "short_factor"], np.float64)
    if kind not in (None, "default"):
        raise ValueError(f"rope scaling {kind!r}")
    return f


def attention_factor(s, context):
    """What a scaling multiplies rotated queries and keys by (`context`: the configuration's)."""
    s = s or {}
    if s.get("attention_factor") is not None:
        return s["attention_factor"]
    kind = s.get("rope_type", s.get("type"))
    if kind == "yarn":  # equation 22, and its weighted form in DeepSeek's models
        growth = lambda weight: 0.1 * weight * np.log(s["factor"]) + 1
        both = s.get("mscale") and s.get("mscale_all_dim")
        return growth(s["mscale"]) / growth(s["mscale_all_dim"]) if both else growth(1)
    if kind == "longrope":
        original = s["original_max_position_embeddings"]
        stretch = s.get("factor", context / original)
        return np.sqrt(1 + np.log(stretch) / np.log(original)) if stretch > 1 else 1.0
    return 1.0


class Decoder:
    def __init__(self, cfg, weights, quantised=(), emulate=None, dtype=F32):
        """weights: canonical name -> f32 array. quantised: names whose file type was an integer one.
        dtype: what everything is computed in; np.float64 shows how much of a difference is f32 rounding."""
        self.cfg, self.w, self.quantised = cfg, weights, set(quantised)
        self.emulate, self.f = emulate or Emulate(), dtype
        self.freqs = {s: inverse_frequencies(cfg, s) for s in set(cfg.sliding)}
        self.used = set()
        self.reset()

    def reset(self):
        c = self.cfg
        self.k = [np.zeros((c.n_kv, 0, c.head_dim), self.f) for _ in range(c.n_layers)]
        self.v = [np.zeros((c.n_kv, 0, c.head_dim), self.f) for _ in range(c.n_layers)]

    def get(self, name):
        self.used.add(name)
        return self.w.get(name)

    def linear(self, x, name):
        if self.emulate.int8_activations and name in self.quantised:
            x = int8_groups(x.astype(F32))
        y = x @ self.get(name).T
        b = self.get(name + ".bias")
        return y if b is None else y + b

    def norm(self, x, name):
        w = self.get(name)
        if w is None:
            return x
        r = 1 / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + self.cfg.eps)
        return (x * r.astype(self.f)) * (w + 1 if self.cfg.norm_plus_one else w)

    def rope(self, x, pos, sliding):  # x: [heads, T, D]
        c = self.cfg
        a = pos[:, None] * self.freqs[sliding][None, :]
        factor = 1.0 if sliding and c.rope_base_local else c.rope_factor
        cos, sin = (np.cos(a) * factor).astype(self.f), (np.sin(a) * factor).astype(self.f)
        out = x.copy()  # dimensions behind the rotated ones pass through
        n, half = c.rope_dims, c.rope_dims // 2
        first, second = (slice(0, n, 2), slice(1, n, 2)) if c.rope_adjacent else (slice(0, half), slice(half, n))
        p, q = x[..., first], x[..., second]
        out[..., first], out[..., second] = p * cos - q * sin, p * sin + q * cos
        return out

    def round_kv(self, x):
        if self.emulate.kv == "f16":
            return x.astype(np.float16).astype(self.f)
        return to_bf16(x).astype(self.f) if self.emulate.kv == "bf16" else x

    def attention(self, x, i, pos):
        c, t = self.cfg, len(pos)
        p, sliding = f"l{i}.", c.sliding[i]
        heads = lambda y, n: y.reshape(t, n, c.head_dim).transpose(1, 0, 2)
        q = self.norm(heads(self.linear(x, p + "q"), c.n_heads), p + "q_norm")
        k = self.norm(heads(self.linear(x, p + "k"), c.n_kv), p + "k_norm")
        v = heads(self.linear(x, p + "v"), c.n_kv)
        q, k = self.rope(q, pos, sliding), self.rope(k, pos, sliding)
        self.k[i] = np.concatenate([self.k[i], self.round_kv(k)], 1)
        self.v[i] = np.concatenate([self.v[i], self.round_kv(v)], 1)
        per = c.n_heads // c.n_kv
        keys, values = np.repeat(self.k[i], per, 0), np.repeat(self.v[i], per, 0)  # [H, S, D]
        s = (q @ keys.transpose(0, 2, 1)) * self.f(c.q_scale)  # [H, T, S]
        if c.attn_softcap:
            s = c.attn_softcap * np.tanh(s / c.attn_softcap)
        d = pos[:, None] - np.arange(keys.shape[1])[None, :]
        seen = d >= 0
        if sliding:
            seen &= d < c.window
        s = np.where(seen[None], s.astype(np.float64), -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        a = (e / e.sum(-1, keepdims=True)).astype(self.f)
        o = (a @ values).transpose(1, 0, 2).reshape(t, c.n_heads * c.head_dim)
        return self.linear(o, p + "o")

    def mlp(self, x, i):
        g, u = self.linear(x, f"l{i}.gate").astype(np.float64), self.linear(x, f"l{i}.up")
        if self.cfg.act == "silu":
            g = g / (1 + np.exp(-g))
        else:
            g = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
        return self.linear(g.astype(self.f) * u, f"l{i}.down")

    def forward(self, ids, every=False):
        """Append `ids` to the cache; logits [T, vocab] if `every`, else those of the last position [vocab]."""
        c = self.cfg
        start = self.k[0].shape[1]
        pos = np.arange(start, start + len(ids))
        x = self.get("embed")[np.asarray(ids)] * self.f(c.embed_scale)
        for i in range(c.n_layers):
            p = f"l{i}."
            x = x + self.norm(self.attention(self.norm(x, p + "attn_norm"), i, pos), p + "post_attn_norm")
            x = x + self.norm(self.mlp(self.norm(x, p + "ffn_norm"), i), p + "post_ffn_norm")
        if not every:
            x = x[-1:]
        self.hidden = self.norm(x, "out_norm")
        head = "embed" if self.w.get("head") is None else "head"
        logits = self.linear(self.hidden, head)
        if c.final_softcap:
            logits = c.final_softcap * np.tanh(logits / c.final_softcap)
        return logits if every else logits[0]

    def greedy(self, ids, n, after_prompt=None):
        """n greedy tokens after `ids` and the top-2 gap of each step. after_prompt(self) may edit the cache between
        prompt and first decode step; the last prompt token is then computed again over the edited cache."""
        self.reset()
        if after_prompt:
            self.forward(ids[:-1])
            after_prompt(self)
            logits = self.forward(ids[-1:])
        else:
            logits = self.forward(ids)
        out, gaps = [], []
        for step in range(n):
            top = np.sort(np.partition(logits, -2)[-2:])
            out.append(int(np.argmax(logits)))
            gaps.append(float(top[1] - top[0]))
            if step + 1 < n:
                logits = self.forward(out[-1:])
        return out, gaps

    def unused(self):
        """Tensors that no forward pass has asked for: a non-empty answer means the graph misses something."""
        return sorted(set(self.w) - self.used)

"""Real vocabularies for the reference: GGUF metadata, and `tokenizers` made from it."""

import struct

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
CONTROL, USER_DEFINED = 3, 4

LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


# The split rule, whether whole words go before merges, and the normalizer.
RULES = {
    "llama-bpe": (split(LETTERS % "{1,3}"), True, None),
    "qwen2": (split(LETTERS % ""), False, normalizers.NFC()),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False, None),
    "starcoder": (
        pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]), False, None),
}


def metadata(path):
    """The tokenizer's keys of a GGUF file."""
    with open(path, "rb") as file:
        data = file.read()
    at = 24

    def take(code):
        nonlocal at
        size = struct.calcsize("<" + code)
        value, = struct.unpack_from("<" + code, data, at)
        at += size
        return value

    def text():
        nonlocal at
        length = take("Q")
        at += length
        return data[at - length : at].decode("utf-8", "replace")

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = take("I"), take("Q")
            return [value(inner) for _ in range(count)]
        return take(SCALARS[kind])

    count, = struct.unpack_from("<Q", data, 16)
    keys = {}
    for _ in range(count):
        key = text()
        keys[key] = value(take("I"))
    prefix = "tokenizer.ggml."
    return {key[len(prefix):]: value for key, value in keys.items() if key.startswith(prefix)}


def made(path):
    """The Hugging Face tokenizer that a byte-level vocabulary stands for."""
    keys = metadata(path)
    pre, ignore_merges, normalizer = RULES[keys["pre"]]
    tokens, kinds = keys["tokens"], keys["token_type"]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in keys["merges"]],
        ignore_merges=ignore_merges,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds) if kind == CONTROL
    ])
    tokenizer.add_tokens([
        tokenizers.AddedToken(token, normalized=False)
        for token, kind in zip(tokens, kinds) if kind == USER_DEFINED
    ])
    return tokenizer

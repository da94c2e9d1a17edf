"""Write blocks of every weight format and what the reference dequantises them to, beside this file.

    python make_blocks.py            # needs numpy, gguf

Each file holds the bytes of BLOCKS random blocks, then their values as little-endian f32. Half of the blocks are random
in every byte, so that factors are also infinite, not numbers, subnormal or zero; the others have factors of common size.
The reference is `gguf.quants`, the Python of ggml's own authors.
"""

import warnings
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

HERE = Path(__file__).parent
BLOCKS = {32: 64, 256: 16}
# Where the f16 factors of a block lie.
FACTORS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip


def blocks(name, rng):
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    out = rng.integers(0, 256, (BLOCKS[elements], size), dtype=np.uint8)
    half = len(out) // 2
    for at in FACTORS[name]:
        factors = (rng.standard_normal(half) * 0.05).astype("<f2")
        out[:half, at : at + 2] = factors.view(np.uint8).reshape(half, 2)
    if name == "MXFP4":
        # The exponents at both ends, then all over.
        out[:, 0] = rng.permutation(np.r_[[0, 1, 2, 3, 252, 253, 254, 255], rng.integers(0, 256, len(out) - 8)])
    return out


def main():
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    rng = np.random.default_rng(11)
    for name in FACTORS:
        raw = blocks(name, rng)
        values = quants.dequantize(raw, GGMLQuantizationType[name]).astype("<f4")
        (HERE / f"{name}.bin").write_bytes(raw.tobytes() + values.tobytes())


if __name__ == "__main__":
    main()

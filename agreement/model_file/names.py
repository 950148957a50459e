"""What the names of tensors say: their block, and whether they hold routed or shared experts.

In: names from llama.cpp's `src/llama-arch.cpp`; the suffix is `weight`, `bias` (gpt-oss) or `scale`.  Out: patterns.
"""

from __future__ import annotations

import re

# The smaller second set of grovemoe (`_chexps`) follows another count and is taken as resident.
ROUTED = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down|gate_up)_exps\..+")
SHARED = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down)_shexp\..+")
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\..+")


def block_of(name: str) -> int:
    """Return the number of the block that a tensor belongs to; -1 for none."""
    match = _BLOCK.fullmatch(name)
    return int(match[1]) if match else -1

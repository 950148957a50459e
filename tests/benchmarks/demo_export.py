"""The demo model's GGUF against PyTorch: the same weights, exported as float32, give the same logits.

    pip install 'moe-agreement[train]'
    python tests/benchmarks/demo_export.py

Loads the bundled weights into the PyTorch network, exports that as float32, and compares logits on held-out code;
then the bundled file itself, whose matrices are float16 and so are llama.cpp's activations in front of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from agreement.corpus import load
from agreement.demo import CORPORA, MODEL, data, export
from agreement.demo.network import Network, Shape
from agreement.engine import load_engine
from agreement.model_file import read_model_file
from agreement.preflight import collect
from agreement.records import EngineOptions
from agreement.settings import BASELINE

LIMIT = 1e-3


def network_of(path: Path) -> Network:
    """Return the PyTorch network with the weights of a GGUF."""
    network = Network(Shape())
    t = {x.name: torch.from_numpy(np.array(x.data, np.float32)) for x in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        network.embed.weight.copy_(t["token_embd.weight"])
        network.norm.weight.copy_(t["output_norm.weight"])
        for i, block in enumerate(network.layers()):
            w = {
                k.removeprefix(f"blk.{i}.").removesuffix(".weight"): v
                for k, v in t.items()
                if k.startswith(f"blk.{i}.")
            }
            for ours, theirs in (("attn_norm", "attn_norm"), ("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm"),
                                 ("ffn_norm", "ffn_norm"), ("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"),
                                 ("o", "attn_output")):  # fmt: skip
                getattr(block, ours).weight.copy_(w[theirs])
            block.moe.router.weight.copy_(w["ffn_gate_inp"])
            gate, up = w["ffn_gate_exps"].transpose(1, 2), w["ffn_up_exps"].transpose(1, 2)
            block.moe.gate_up.copy_(torch.cat((gate, up), dim=-1))
            block.moe.down.copy_(w["ffn_down_exps"].transpose(1, 2))
    return network


def engine_logits(path: Path, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return llama.cpp's logits at every position, flash attention off, weights as in the file."""
    options = EngineOptions(flash_attn="off", repack=False, type_k="f32", type_v="f32")
    engine = load_engine(read_model_file(path), BASELINE, options, n_ctx=len(tokens), n_sequences=1)
    try:
        return collect(engine, tokens[None, :], 0, len(tokens))
    finally:
        engine.close()


def main() -> int:
    """Print both differences; exit 1 if the float32 export is further than LIMIT from PyTorch."""
    network = network_of(MODEL)
    vocabulary = load_engine(
        read_model_file(MODEL), BASELINE, EngineOptions(), n_ctx=512, n_sequences=1, vocab_only=True
    )
    texts = [d.text for d in load(CORPORA["heldout-code"]).documents]
    tokens = np.concatenate([vocabulary.tokenize(text) for text in texts])[:512]
    vocabulary.close()
    with torch.no_grad():
        reference = network(torch.from_numpy(tokens.astype(np.int64))[None])[0][0].numpy()
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "float32.gguf"
        # The export needs a tokenizer only to write one; the comparison is by token ids.
        tokenizer: Tokenizer = data.train_tokenizer([" ".join(texts)])
        export.write_gguf(exact, network, tokenizer, {}, float16=False)
        worst = float(np.abs(engine_logits(exact, tokens) - reference).max())
    bundled = np.abs(engine_logits(MODEL, tokens) - reference)
    print(f"float32 export against PyTorch: largest logit difference {worst:.2e} (limit {LIMIT:g})")
    print(f"bundled float16 file:           largest {bundled.max():.2e}, mean {bundled.mean():.2e}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

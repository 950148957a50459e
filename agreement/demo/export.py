"""Write the demo network as a GGUF file that llama.cpp loads as `qwen3moe`.

In: the PyTorch network and its tokenizer.  Out: one file, matrices in float16 (or float32), vectors in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from agreement.demo.data import END_OF_TEXT
from agreement.demo.network import Network


def write_gguf(path: Path, network: Network, tokenizer: Tokenizer, about: dict[str, Any], float16: bool = True) -> None:
    """Write `network` to `path`.

    Args:
        path: The file to write; replaced whole, never left half-written.
        network: The trained network, float32 parameters.
        tokenizer: Its byte-level BPE.
        about: What the recipe reached; kept in the file's description.
        float16: Store matrices as float16; float32 is for checking the export against PyTorch.
    """
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _write_metadata(writer, network, about)
    _write_tokenizer(writer, tokenizer)

    def add(name: str, tensor: torch.Tensor, keep_float32: bool = False) -> None:
        array = tensor.detach().float().contiguous().numpy()
        writer.add_tensor(name, array if keep_float32 or not float16 else array.astype(np.float16))

    f = network.shape.n_ff_exp
    add("token_embd.weight", network.embed.weight)
    add("output_norm.weight", network.norm.weight, keep_float32=True)
    for i, block in enumerate(network.layers()):
        moe = block.moe
        for ours, theirs in (("attn_norm", "attn_norm"), ("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm")):
            add(f"blk.{i}.{theirs}.weight", getattr(block, ours).weight, keep_float32=True)
        add(f"blk.{i}.ffn_norm.weight", block.ffn_norm.weight, keep_float32=True)
        for ours, theirs in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
            add(f"blk.{i}.{theirs}.weight", getattr(block, ours).weight)
        # The router stays float32: rounding it would move tokens between experts.
        add(f"blk.{i}.ffn_gate_inp.weight", moe.router.weight, keep_float32=True)
        # llama.cpp keeps experts as (n_expert, n_out, n_in); ours multiply from the left as (n_expert, n_in, n_out).
        add(f"blk.{i}.ffn_gate_exps.weight", moe.gate_up[:, :, :f].transpose(1, 2))
        add(f"blk.{i}.ffn_up_exps.weight", moe.gate_up[:, :, f:].transpose(1, 2))
        add(f"blk.{i}.ffn_down_exps.weight", moe.down.transpose(1, 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def _write_metadata(writer: gguf.GGUFWriter, network: Network, about: dict[str, Any]) -> None:
    s = network.shape
    writer.add_name("agreement demo MoE")
    writer.add_description("Trained on the Python standard library: " + json.dumps(about, sort_keys=True))
    writer.add_license("apache-2.0")
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.n_embd)
    writer.add_block_count(s.n_layer)
    writer.add_feed_forward_length(s.n_ff_exp * s.n_expert_used)
    writer.add_expert_feed_forward_length(s.n_ff_exp)
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.n_embd_head)
    writer.add_value_length(s.n_embd_head)
    writer.add_rope_freq_base(s.rope_freq_base)
    writer.add_layer_norm_rms_eps(s.norm_rms_eps)
    writer.add_expert_count(s.n_expert)
    writer.add_expert_used_count(s.n_expert_used)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    ids = sorted(model["vocab"], key=model["vocab"].__getitem__)
    end = model["vocab"][END_OF_TEXT]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(ids)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if i == end else normal for i in range(len(ids))])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in model["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)

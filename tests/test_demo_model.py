"""The bundled model: its size, its numbers against an independent forward pass, its curve on held-out code."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import models
import numpy as np
import numpy_qwen3moe
import pytest

import agreement
from agreement.corpus import load
from agreement.demo import CORPORA, MODEL
from agreement.engine import load_engine
from agreement.model_file import read_model_file
from agreement.preflight import collect
from agreement.records import EngineOptions
from agreement.settings import BASELINE, experts_setting

EXACT = EngineOptions(n_threads=2, flash_attn="off", repack=False, type_k="f32", type_v="f32")


def as_float32(path: Path, source: Path) -> None:
    """Copy a GGUF with its matrices widened to float32, so that llama.cpp does not round activations to float16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_it_is_small_and_says_what_it_reached() -> None:
    assert MODEL.stat().st_size <= 10_000_000
    header = read_model_file(MODEL)
    assert (header.architecture, header.n_expert, header.n_expert_used) == ("qwen3moe", 32, 8)
    about = json.loads(MODEL.with_suffix(".json").read_text())
    assert about["held_out_next_token_accuracy"] > 0.40


@pytest.mark.parametrize("n_used", [8, 6, 2])
def test_logits_are_those_of_an_independent_forward_pass(tmp_path: Path, n_used: int) -> None:
    """llama.cpp in float32 and a float64 forward pass in numpy agree to 1e-3, with all experts and with fewer."""
    path = tmp_path / "float32.gguf"
    as_float32(path, MODEL)
    setting = BASELINE if n_used == 8 else experts_setting(n_used)
    engine = load_engine(read_model_file(path), setting, EXACT, n_ctx=96, n_sequences=1)
    tokens = engine.tokenize(load(CORPORA["heldout-code"]).documents[0].text)[:96]
    found = collect(engine, tokens[None, :], 0, 96)
    engine.close()
    assert np.abs(found - numpy_qwen3moe.logits(path, tokens, n_used)).max() < 1e-3


def test_tokens_spell_the_text_and_use_merges() -> None:
    """The pieces of a text joined give its bytes back, and a token is about three characters of code."""
    engine = load_engine(read_model_file(MODEL), BASELINE, EXACT, n_ctx=64, n_sequences=1, vocab_only=True)
    text = load(CORPORA["heldout-code"]).documents[0].text
    tokens = engine.tokenize(text)
    engine.close()
    pieces = gguf.GGUFReader(MODEL).fields["tokenizer.ggml.tokens"].contents()
    byte_of = {letter: value for value, letter in enumerate(models.byte_alphabet())}
    assert bytes(byte_of[letter] for token in tokens for letter in pieces[token]) == text.encode()
    assert 2.0 < len(text) / len(tokens) < 5.0


def test_agreement_falls_with_every_expert_that_is_dropped(tmp_path: Path) -> None:
    report = agreement.sweep(
        MODEL,
        CORPORA["heldout-code"],
        tmp_path / "run",
        experts=[7, 6, 4, 2],
        chunks=agreement.ChunkOptions(n_ctx=256, n_chunks=12),
    )
    values = [row.agreement.value for row in report.rows]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.90
    assert values[-1] < 0.90
    assert report.baseline_accuracy > 0.3

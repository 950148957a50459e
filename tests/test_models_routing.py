"""The tiny models do what they are for: llama.cpp loads them, and the number of experts matters.

Everything here goes through the low-level API of llama-cpp-python directly, so that it holds without the package.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import models
import numpy as np
import pytest
from benchmarks import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_cpp import _logger

from agreement.model_file import read_model_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

TEXT = Path(models.__file__).read_text(encoding="utf-8")[:1200]


@dataclass(frozen=True)
class Loaded:
    """A loaded model and what was logged meanwhile."""

    handle: llama_cpp.llama_model_p
    log: str

    @property
    def vocab(self) -> llama_cpp.llama_vocab_p:
        return llama_cpp.llama_model_get_vocab(self.handle)

    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (ctypes.c_int32 * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), buffer, len(buffer), True, False)
        assert n >= 0
        return list(buffer[:n])

    def text(self, tokens: list[int]) -> bytes:
        piece = ctypes.create_string_buffer(64)
        lengths = (llama_cpp.llama_token_to_piece(self.vocab, t, piece, 64, 0, False) for t in tokens)
        return b"".join(piece.raw[:n] for n in lengths)

    def logits(self, tokens: list[int], callback: object = None) -> NDArray[np.float32]:
        """Return the logits at every position, (n_tokens, n_vocab)."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = 1
        if callback is not None:
            params.cb_eval = callback
        context = llama_cpp.llama_init_from_model(self.handle, params)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
                batch.seq_id[i][0] = 0
            assert llama_cpp.llama_decode(context, batch) == 0
            shape = (len(tokens), llama_cpp.llama_vocab_n_tokens(self.vocab))
            return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=shape).copy()
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)


@contextmanager
def load(path: Path, override: tuple[str, int] | None = None) -> Iterator[Loaded]:
    """Load a model with at most one whole-number override."""
    lines: list[str] = []

    @llama_cpp.llama_log_callback
    def keep(_: int, text: bytes, __: ctypes.c_void_p) -> None:
        lines.append(text.decode(errors="replace"))

    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # see the AMX note of the engine: no repacked weights where results must be exact
    overrides = (llama_cpp.llama_model_kv_override * 2)()
    if override:
        overrides[0].key = override[0].encode()
        overrides[0].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
        overrides[0].value.val_i64 = override[1]
        params.kv_overrides = overrides
    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    handle = None
    try:
        handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not handle:
            raise RuntimeError("".join(lines))
        yield Loaded(handle, "".join(lines))
    finally:
        if handle:
            llama_cpp.llama_model_free(handle)
        llama_cpp.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    llama_cpp.llama_backend_init()


def proof(log: str, architecture: str) -> tuple[list[str], list[str]]:
    """Return the numbers in the log's two proof lines."""
    key = re.escape(f"{architecture}.expert_used_count")
    return re.findall(rf"validate_override:.*'{key}' *= *(\d+)", log), re.findall(r"n_expert_used *= *(\d+)", log)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_override_changes_logits_and_is_proven(family: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", family)
    architecture = models.FAMILIES[family].architecture
    assert path.stat().st_size < 1_000_000
    with load(path) as model:
        tokens = model.tokens(TEXT)[:256]
        base = model.logits(tokens)
        assert np.array_equal(base, model.logits(tokens))
        assert proof(model.log, architecture) == ([], ["8"])
    assert np.isfinite(base).all()
    assert 1.5 < base.std() < 3.5
    assert len(np.unique(base.argmax(axis=1))) > 30  # not one answer to everything
    agreement = []
    for n in (8, 7, 6, 4, 2, 1):
        with load(path, (f"{architecture}.expert_used_count", n)) as model:
            assert proof(model.log, architecture) == ([str(n)], [str(n)])
            logits = model.logits(tokens)
        assert np.array_equal(logits, base) == (n == 8)
        agreement.append(float((logits.argmax(axis=1) == base.argmax(axis=1)).mean()))
    assert agreement[0] == 1.0
    assert 0.4 < agreement[1] < 0.95
    assert agreement[1] > agreement[3] > agreement[5]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_rescaling_is_what_the_header_tells(family: str, tmp_path: Path) -> None:
    """The graph holds a normalising node, or a softmax over the selected, exactly where the reader says so."""
    path = models.write_model(tmp_path / "m.gguf", family)
    names: set[str] = set()

    @llama_cpp.ggml_backend_sched_eval_callback
    def note(tensor: ctypes.c_void_p, ask: bool, _: ctypes.c_void_p) -> bool:
        names.add(tensor_name(tensor))
        return not ask  # no data wanted; go on

    with load(path) as model:
        model.logits(model.tokens("some text"), note)
    assert "ffn_moe_weights-1" in names
    rescaled = {"ffn_moe_weights_norm-1", "ffn_moe_weights_softmax-1"} & names
    assert bool(rescaled) == read_model_file(path).renormalised
    assert ("ffn_moe_weights_softmax-1" in rescaled) == models.FAMILIES[family].softmax_weights


def tensor_name(tensor: ctypes.c_void_p) -> str:
    library = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*"))))
    library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_get_name.argtypes = [ctypes.c_void_p]
    return str(library.ggml_get_name(tensor).decode())


def test_groups_matter(tmp_path: Path) -> None:
    plain = models.write_model(tmp_path / "a.gguf", "deepseek2")
    grouped = models.write_model(tmp_path / "b.gguf", "deepseek2-groups")
    with load(plain) as a, load(grouped) as b:
        tokens = a.tokens(TEXT)[:64]
        assert not np.array_equal(a.logits(tokens), b.logits(tokens))


def test_seed_decides_every_byte(tmp_path: Path) -> None:
    write = partial(models.write_model, family="glm-dsa")
    first, again, other = (write(tmp_path / n, seed=s) for n, s in (("a", 3), ("b", 3), ("c", 4)))
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_tokens_give_back_any_text(tokenizer: Loaded, text: str) -> None:
    assert tokenizer.text(tokenizer.tokens(text)) == text.encode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    with load(models.write_model(tmp_path_factory.mktemp("tokenizer") / "m.gguf")) as model:
        yield model


def test_merges_are_used(tokenizer: Loaded) -> None:
    texts, _, _ = models.vocabulary()
    tokens = [texts[t] for t in tokenizer.tokens("return self in the")]
    assert tokens == ["return", "Ġs", "e", "lf", "Ġin", "Ġthe"]  # `Ġ s` comes before `s e` in the list


@pytest.mark.parametrize("n_vocab", [models.N_VOCAB, 1001])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_vocabulary_and_types(n_vocab: int, dtype: str, tmp_path: Path) -> None:
    with load(models.write_model(tmp_path / "m.gguf", n_vocab=n_vocab, dtype=dtype)) as model:
        logits = model.logits(model.tokens(TEXT)[:64])
    assert logits.shape == (64, n_vocab)
    assert np.isfinite(logits).all()


def test_bos_where_asked_for(tmp_path: Path, tokenizer: Loaded) -> None:
    with load(models.write_model(tmp_path / "m.gguf", add_bos=True)) as model:
        assert model.tokens("abc") == [models.N_VOCAB - 2, *tokenizer.tokens("abc")]


def test_nan_weight_gives_one_nan_a_position(tmp_path: Path) -> None:
    with load(models.write_model(tmp_path / "m.gguf", nan=True)) as model:
        logits = model.logits(model.tokens(TEXT)[:64])
    assert np.isnan(logits).sum(axis=1).tolist() == [1] * 64


def test_count_stored_by_layer_ignores_the_override(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", per_layer_used=True)
    with load(path) as model:
        base = model.logits(model.tokens(TEXT)[:64])
    with load(path, ("qwen3moe.expert_used_count", 4)) as model:
        assert proof(model.log, "qwen3moe") == ([], ["8"])
        assert np.array_equal(model.logits(model.tokens(TEXT)[:64]), base)


def test_without_width_the_override_does_not_load(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", omit_expert_width=True)
    plain = models.write_model(tmp_path / "p.gguf")
    with load(path) as model, load(plain) as other:
        tokens = model.tokens(TEXT)[:64]
        assert np.array_equal(model.logits(tokens), other.logits(tokens))
    with pytest.raises(RuntimeError, match="wrong shape"), load(path, ("qwen3moe.expert_used_count", 4)):
        pass


def test_dense_model_loads(tmp_path: Path) -> None:
    with load(models.write_model(tmp_path / "m.gguf", "llama", dense=True)) as model:
        assert np.isfinite(model.logits(model.tokens(TEXT)[:64])).all()


def test_split_model_gives_the_same_logits(tmp_path: Path) -> None:
    shards = models.write_split(tmp_path / "part", 3)
    with load(shards[0]) as split, load(models.write_model(tmp_path / "m.gguf")) as whole:
        tokens = whole.tokens(TEXT)[:64]
        assert np.array_equal(split.logits(tokens), whole.logits(tokens))


def test_float64_weights_abort_the_process(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", float64=True)
    code = (
        "import sys; from pathlib import Path; import test_models_routing as t\n"
        "with t.load(Path(sys.argv[1])) as model:\n"
        "    print('loaded', flush=True); model.logits([1, 2, 3]); print('decoded')"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "GGML_NO_BACKTRACE": "1"}
    run = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, check=False)
    assert run.stdout.split() == [b"loaded"]
    assert run.returncode < 0  # ended by a signal


def test_arguments_that_make_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family 'gpt2'"):
        models.write_model(tmp_path / "m.gguf", "gpt2")
    with pytest.raises(ValueError, match="n_vocab=100"):
        models.write_model(tmp_path / "m.gguf", n_vocab=100)
    with pytest.raises(ValueError, match="only llama has a dense variant"):
        models.write_model(tmp_path / "m.gguf", "olmoe", dense=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_synthetic_models_of_realistic_size(kind: str, tmp_path: Path) -> None:
    path = synthetic.write_synthetic(tmp_path / "m.gguf", kind)
    facts = read_model_file(path)
    dims = synthetic.KINDS[kind]
    assert (facts.n_vocab, facts.n_expert, facts.n_expert_used) == (dims.n_vocab, dims.n_expert, 8)
    with load(path) as model:
        tokens = model.tokens(TEXT)[:200]
        base = model.logits(tokens)
    assert 2.0 < base.std() < 3.0
    agreement = []
    for n in (7, 6, 4, 2):
        with load(path, ("qwen3moe.expert_used_count", n)) as model:
            agreement.append(float((model.logits(tokens).argmax(axis=1) == base.argmax(axis=1)).mean()))
    assert 0.98 > agreement[0] > agreement[1] > agreement[2] > agreement[3] > 0.3

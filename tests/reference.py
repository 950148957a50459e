"""A second way to the same numbers: logits through the plain API of the engine's binding, scores in float64.

Nothing here comes from the package, and nothing in the package works like this: one sequence a batch, all logits
copied, `scipy.special.log_softmax` on everything.

In: a GGUF, an override, token ids.  Out: logits, and what a setting scores against the baseline.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

Logits = NDArray[np.float32]


class Reference:
    """A loaded model; see `load_reference`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self.bos = int(llama_cpp.llama_vocab_bos(self._vocab))

    def tokens(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, with what the model puts in front if `special`."""
        data = text.encode()
        buffer = (ctypes.c_int32 * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), special, False)
        assert n >= 0
        return list(buffer[:n])

    def logits(self, sequences: Sequence[Sequence[int]], *, piece: int | None = None) -> Logits:
        """Return the logits at every position of each sequence, (n_sequences, n_ctx, n_vocab).

        Each sequence is decoded by itself from empty memory, at most `piece` tokens at a time.
        """
        n_ctx = len(sequences[0])
        step = piece or n_ctx
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, step, step
        params.n_threads = params.n_threads_batch = 1
        context = llama_cpp.llama_init_from_model(self._model, params)
        batch = llama_cpp.llama_batch_init(step, 0, 1)
        out = np.empty((len(sequences), n_ctx, self.n_vocab), np.float32)
        try:
            for row, sequence in zip(out, sequences, strict=True):
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
                for start in range(0, n_ctx, step):
                    part = sequence[start : start + step]
                    batch.n_tokens = len(part)
                    for i, token in enumerate(part):
                        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), start + i, 1, 1
                        batch.seq_id[i][0] = 0
                    assert llama_cpp.llama_decode(context, batch) == 0
                    shape = (len(part), self.n_vocab)
                    row[start : start + step] = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape)
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)
        return out


@contextmanager
def load_reference(path: Path, *, key: str = "", value: int = 0) -> Iterator[Reference]:
    """Load a model, with one whole-number override if a `key` is given."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    overrides: Any = (llama_cpp.llama_model_kv_override * 2)()
    if key:
        overrides[0].key, overrides[0].tag = key.encode(), llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
        overrides[0].value.val_i64 = value
        params.kv_overrides = overrides
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"{path} does not load"
    try:
        yield Reference(model)
    finally:
        llama_cpp.llama_model_free(model)


@dataclass(frozen=True)
class Scores:
    """A setting against the baseline; arrays of one shape, one entry a scored position."""

    base_top: NDArray[np.int64]
    test_top: NDArray[np.int64]
    base_logprob: NDArray[np.float64]
    test_logprob: NDArray[np.float64]
    kld: NDArray[np.float64]

    @property
    def n_agree(self) -> int:
        return int((self.base_top == self.test_top).sum())

    @property
    def ppl(self) -> float:
        return float(np.exp(-self.test_logprob.mean()))

    @property
    def base_ppl(self) -> float:
        return float(np.exp(-self.base_logprob.mean()))


def score(base: Logits, test: Logits, targets: NDArray[Any]) -> Scores:
    """Score logits (..., n_vocab) against the baseline's at the same positions, in float64."""
    base_lp = log_softmax(base.astype(np.float64), axis=-1)
    test_lp = log_softmax(test.astype(np.float64), axis=-1)
    at = np.asarray(targets, np.int64)[..., None]
    return Scores(
        base_top=base.argmax(axis=-1),
        test_top=test.argmax(axis=-1),
        base_logprob=np.take_along_axis(base_lp, at, -1)[..., 0],
        test_logprob=np.take_along_axis(test_lp, at, -1)[..., 0],
        kld=(np.exp(base_lp) * (base_lp - test_lp)).sum(axis=-1),
    )

"""A fake engine: logits that are a pure function of the token ids, and the faults that a real engine can have.

In: a model's size and switches.  Out: something that `agreement.engine.load_engine` can be replaced with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from agreement.engine import EngineInfo, LogitsPart, SettingProof
from agreement.records import EngineOptions, Float32Array, Int32Array, ModelFile, Setting
from agreement.settings import BASELINE, metadata_overrides

N_EXPERT_USED = 8
INFO = EngineInfo(name="fake", binding="fake 1.0", version="none")
NO_OVERRIDE = SettingProof((), N_EXPERT_USED)


def fake_logits(tokens: Int32Array, n_vocab: int, *, missing_experts: int = 0) -> Float32Array:
    """Return (n_ctx, n_vocab) float32 logits after each token, from the last three tokens alone.

    Each expert left out adds its own noise, so that fewer experts agree less.
    """
    tables = np.random.default_rng(n_vocab).normal(size=(3, n_vocab, n_vocab)).astype(np.float32)
    padded = np.concatenate([np.zeros(2, np.int32), tokens])
    logits = 3 * tables[0][padded[2:]] + tables[1][padded[1:-1]] + tables[2][padded[:-2]]
    for expert in range(missing_experts):
        noise = np.random.default_rng([n_vocab, expert]).normal(size=(n_vocab, n_vocab)).astype(np.float32)
        logits += np.float32(0.4) * noise[tokens]
    return np.ascontiguousarray(logits, np.float32)


@dataclass
class FakeEngine:
    """An `Engine` over `fake_logits`.

    Attributes:
        setting: What it was loaded under.
        n_vocab: Size of its vocabulary.
        bos: Its first token, or None.
        unstable: Every decode call moves all logits a little more.
        shape_shift: How far one logit moves in any shape but a single sequence fed whole.
        nan_at: Position in each sequence at which one logit is NaN.
        no_effect: Settings change nothing, though the log claims they do.
        rows_per_part: Logits are handed over in parts of at most so many rows; None hands over each piece whole.
        calls: Shapes decoded so far: (n_sequences, piece).
    """

    setting: Setting = BASELINE
    n_vocab: int = 16
    bos: int | None = 1
    unstable: bool = False
    shape_shift: float = 0.0
    nan_at: int | None = None
    no_effect: bool = False
    rows_per_part: int | None = None
    options: EngineOptions = field(default_factory=lambda: EngineOptions(n_threads=1))
    info: EngineInfo = INFO
    proof: SettingProof = NO_OVERRIDE
    calls: list[tuple[int, int | None]] = field(default_factory=list)
    closed: bool = False

    def tokenize(self, text: str) -> Int32Array:
        """Return one id a byte of UTF-8, folded into the vocabulary."""
        return (np.frombuffer(text.encode(), np.uint8) % self.n_vocab).astype(np.int32)

    def vocabulary_digest(self) -> str:
        """Return a digest of the size: all that this vocabulary is."""
        return xxhash.xxh3_128_hexdigest(str(self.n_vocab).encode())

    def decode(self, tokens: Int32Array, first: int, last: int, *, piece: int | None = None) -> Iterator[LogitsPart]:
        """Yield logits piece by piece, and within a piece sequence by sequence, as llama.cpp's adapter does."""
        assert not self.closed
        n_sequences, n_ctx = tokens.shape
        self.calls.append((n_sequences, piece))
        every = [self._sequence(row, n_sequences, piece) for row in tokens]
        step = piece or n_ctx
        for start in range(0, n_ctx, step):
            low, high = max(start, first), min(start + step, n_ctx, last)
            for sequence in range(n_sequences):
                for at in range(low, high, self.rows_per_part or n_ctx):
                    stop = min(at + (self.rows_per_part or n_ctx), high)
                    yield LogitsPart(sequence, at, every[sequence][at:stop])

    def _sequence(self, tokens: Int32Array, n_sequences: int, piece: int | None) -> Float32Array:
        experts = self.setting.experts if self.setting.experts is not None else N_EXPERT_USED
        logits = fake_logits(tokens, self.n_vocab, missing_experts=0 if self.no_effect else N_EXPERT_USED - experts)
        if self.unstable:
            logits += np.linspace(0, 1e-3 * len(self.calls), self.n_vocab, dtype=np.float32)
        if n_sequences > 1 or piece is not None:
            logits[:, 0] += np.float32(self.shape_shift)
        if self.nan_at is not None:
            logits[self.nan_at, -1] = np.nan
        return logits

    def close(self) -> None:
        """Refuse to decode from now on."""
        self.closed = True


@dataclass
class FakeLoader:
    """Stands in for `load_engine`.

    Attributes:
        faults: Switches of `FakeEngine` for every engine loaded.
        loaded: The engines handed out, in order.
    """

    faults: dict[str, object] = field(default_factory=dict)
    loaded: list[FakeEngine] = field(default_factory=list)

    def __call__(
        self,
        model: ModelFile,
        setting: Setting,
        options: EngineOptions,
        *,
        n_ctx: int,
        n_sequences: int,
        vocab_only: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> FakeEngine:
        """Return an engine whose log would prove every override of `setting`."""
        overrides = tuple(str(o) for o in metadata_overrides(setting, model.architecture))
        proof = SettingProof(overrides, setting.experts if setting.experts is not None else N_EXPERT_USED)
        engine = FakeEngine(
            setting=setting,
            n_vocab=model.n_vocab,
            options=options,
            proof=proof,
            **self.faults,  # type: ignore[arg-type]  # switches of every type by name
        )
        self.loaded.append(engine)
        return engine


def fake_model(n_vocab: int = 16, **changes: object) -> ModelFile:
    """Return the header of a model that exists nowhere: 8 of 32 experts in 4 layers."""
    facts: dict[str, object] = {
        "path": "fake.gguf",
        "shards": ("fake.gguf",),
        "architecture": "qwen3moe",
        "name": "fake",
        "n_layer": 4,
        "n_expert_layers": 4,
        "n_expert": 32,
        "n_expert_used": N_EXPERT_USED,
        "n_expert_shared": 0,
        "n_vocab": n_vocab,
        "n_ctx_train": 512,
        "n_embd": 64,
        "bytes_total": 2_000_000,
        "bytes_experts": 1_600_000,
        "renormalised": True,
        "warnings": (),
        "metadata": {},
    }
    return ModelFile(**{**facts, **changes})  # type: ignore[arg-type]  # facts of every type by name

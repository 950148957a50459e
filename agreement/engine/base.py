"""What every engine offers, and how one is loaded.

In: a model file, a setting, options.  Out: an `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agreement.engine.hook import Kept
from agreement.records import EngineOptions, Float32Array, Int32Array, ModelFile, Setting
from agreement.routing import Policy


@dataclass(frozen=True)
class EngineInfo:
    """What makes two engines the same.

    Attributes:
        name: `llama.cpp`.
        binding: The Python binding and its version.
        version: What the library itself says, and the processor features it was built for and found.
    """

    name: str
    binding: str
    version: str


@dataclass(frozen=True)
class SettingProof:
    """What the engine's load log said about the expert count.

    Attributes:
        overrides: The log's lines about metadata overrides it carried out, in order.
        n_expert_used: Experts used per token as the engine printed it (its first layer), or None if it did not.
    """

    overrides: tuple[str, ...]
    n_expert_used: int | None


@dataclass(frozen=True)
class LogitsPart:
    """Consecutive logits of one sequence.

    Attributes:
        sequence: Which row of the decoded tokens.
        first: Position of the first row of `logits` in the sequence.
        logits: (n, n_vocab) float32, a view of the engine's own memory: valid until the next part is asked for.
    """

    sequence: int
    first: int
    logits: Float32Array


class Engine(Protocol):
    """A model loaded under one setting."""

    info: EngineInfo
    proof: SettingProof
    options: EngineOptions
    n_vocab: int
    bos: int | None

    def tokenize(self, text: str) -> Int32Array:
        """Return the ids of `text`, without special tokens added."""
        ...

    def vocabulary_digest(self) -> str:
        """Return a hex digest of all token texts in order: equal for models whose ids mean the same."""
        ...

    def decode(
        self,
        tokens: Int32Array,
        first: int,
        last: int,
        *,
        piece: int | None = None,
        routing: Sequence[Policy | None] | None = None,
    ) -> Iterator[LogitsPart]:
        """Decode sequences side by side from empty memory and yield logits at positions `[first, last)` of each.

        Args:
            tokens: (n_sequences, n_ctx) int32.
            first: First position whose logits are wanted.
            last: One past the last.
            piece: Feed each sequence in pieces of at most so many tokens; the same mathematics in another batch
                shape.  None feeds as much as the batch takes.
            routing: One policy a sequence, None for one that keeps every expert; needs an engine loaded with `hooked`.
                Every piece of all sequences then is one micro-batch of at most `n_ubatch` tokens.

        Raises:
            EngineError: The engine refused or failed, or did not route as it was told.
            SettingError: A policy keeps more experts than the model selects.
        """
        ...

    def experts_kept(self) -> tuple[Kept, ...]:
        """Return how many experts routing has kept so far in the current `decode`, one record a sequence."""
        ...

    def close(self) -> None:
        """Free the model and its memory."""
        ...


def load_engine(
    model: ModelFile,
    setting: Setting,
    options: EngineOptions,
    *,
    n_ctx: int,
    n_sequences: int,
    vocab_only: bool = False,
    hooked: bool = False,
    n_outputs: int | None = None,
    log: Callable[[str], None] | None = None,
) -> Engine:
    """Load `model` under `setting` with room for `n_sequences` chunks of `n_ctx` tokens.

    Args:
        model: The model file.
        setting: What is changed against the file.
        options: Engine options.
        n_ctx: Tokens a chunk.
        n_sequences: Chunks decoded side by side.
        vocab_only: Load no weights; only `tokenize`, `bos` and `n_vocab` work.
        hooked: Put the router hook into the graph, so that `decode` takes `routing`; one token is decoded at once, to
            learn how the model routes.
        n_outputs: Most positions of a micro-batch whose logits are ever wanted, None for all: the engine's buffer
            holds that many rows of the vocabulary.
        log: Called with every line the engine logs, as it comes.

    Raises:
        EngineError: The engine is not installed, or it cannot load the model; with its last words.
    """
    from agreement.engine.llama import LlamaEngine  # noqa: PLC0415  # the native library loads only when a pass needs it

    return LlamaEngine(
        model,
        setting,
        options,
        n_ctx=n_ctx,
        n_sequences=n_sequences,
        vocab_only=vocab_only,
        hooked=hooked,
        n_outputs=n_outputs,
        log=log,
    )


def measure_context(
    model: ModelFile, options: EngineOptions, *, n_ctx: int, n_sequences: int, n_outputs: int, n_ubatch: int
) -> tuple[str, ...]:
    """Return what the engine logs when it lays out a context, without allocating it or reading a weight.

    Raises:
        EngineError: The engine cannot load the model's header or lay out the context.
    """
    from agreement.engine.llama import measured_context  # noqa: PLC0415  # as above

    sized = replace(options, n_batch=n_ubatch, n_ubatch=n_ubatch, repack=False)
    return measured_context(model, sized, n_ctx=n_ctx, n_sequences=n_sequences, n_outputs=n_outputs)


def engine_build() -> str:
    """Return the engine's binding and build in a few words.

    Raises:
        EngineError: The engine is not installed or does not load.
    """
    from agreement.engine.llama import build_info  # noqa: PLC0415  # the native library loads only when it is needed

    info = build_info()
    return f"{info.binding}, {info.name} {info.version}"

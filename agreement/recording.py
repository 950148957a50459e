"""Passes: an engine run over the chunks, block by block, recorded or scored as it goes, resumable.

In: a model file, options, a run directory with its chunks.  Out: chunk files in the run directory; small results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import xxhash

from agreement.chunks import from_arrays
from agreement.engine import Engine, EngineInfo, LogitsPart, SettingProof, load_engine
from agreement.engine.options import other_shape, resolve_options, sequences_per_batch
from agreement.errors import EngineError, NoEffectError
from agreement.preflight import Preflight, preflight, short_preflight
from agreement.records import ChunkSet, EngineOptions, Int32Array, ModelFile, PositionScores, Setting
from agreement.scoring import BaselineRows, default_top_k, encode_rows, position_scores, score_rows
from agreement.scoring.compare import RowScores
from agreement.settings import BASELINE, metadata_overrides
from agreement.store import BASELINE_PASS, Arrays, RunStore

LogitsMode = Literal["full", "top"]


@dataclass(frozen=True)
class Progress:
    """How far a pass is.

    Attributes:
        pass_name: `baseline` or the setting's name.
        done: Chunks complete.
        total: Chunks of the pass.
        tokens: Tokens decoded in this process so far in this pass.
        seconds: Time they took, loading left out.
        bytes_read: Bytes the engine's process has read from disk so far, in all passes; None where nobody counts.
        beside: Memory it has taken beside the weights of a model that streams from disk, bytes; None otherwise.
        note: What went otherwise than planned so far, one line; mostly empty.
    """

    pass_name: str
    done: int
    total: int
    tokens: int
    seconds: float
    bytes_read: int | None = None
    beside: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of the documents and what the vocabulary asks for.

    Attributes:
        tokens: One (n,) int32 array a text.
        bos: The token that starts every chunk, or None if the model asks for none.
        n_vocab: Size of the vocabulary.
        digest: Digest of all token texts.
        info: The engine.
        options: Engine options with every default made explicit.
    """

    tokens: tuple[Int32Array, ...]
    bos: int | None
    n_vocab: int
    digest: str
    info: EngineInfo
    options: EngineOptions


ProgressListener = Callable[[Progress], None]
LogListener = Callable[[str], None]


def _no_progress(_progress: Progress) -> None:
    """Listen to nothing."""


class PassRunner:
    """Runs passes of one model; keeps the engine between calls when the setting is the same.

    The same object works in this process and, behind a pipe, in a worker process.
    """

    def __init__(self, model: ModelFile, options: EngineOptions, n_ctx: int, *, log: LogListener | None = None) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.set_options(options, sequences_per_batch(options, n_ctx))
        self._log = log
        self._engine: Engine | None = None
        self._loaded: Setting | None = None
        self._load_seconds = 0.0

    def set_options(self, options: EngineOptions, n_sequences: int) -> None:
        """Take engine options for the next load, with room for `n_sequences` chunks side by side."""
        self.n_sequences = n_sequences
        self.options = resolve_options(options, self.n_ctx, n_sequences)

    def tokenise(self, texts: Sequence[str]) -> Vocabulary:
        """Return the ids of each text, from a load of the vocabulary alone."""
        engine = load_engine(
            self.model, BASELINE, self.options, n_ctx=self.n_ctx, n_sequences=1, vocab_only=True, log=self._log
        )
        try:
            tokens = tuple(engine.tokenize(text) for text in texts)
            return Vocabulary(tokens, engine.bos, engine.n_vocab, engine.vocabulary_digest(), engine.info, self.options)
        finally:
            engine.close()

    def preflight(self, chunks: ChunkSet, *, short: bool = False) -> Preflight:
        """Run the stability check of `agreement.preflight` on the first chunk, or on its first tokens."""
        engine = self._load(BASELINE)
        if short:
            return short_preflight(engine, self.model, chunks.tokens[0], room=self.n_sequences)
        return preflight(engine, chunks.tokens[0], chunks.first, chunks.last, room=self.n_sequences)

    def record_baseline(
        self,
        run: RunStore,
        *,
        logits: LogitsMode,
        top_k: int | None = None,
        progress: ProgressListener = _no_progress,
    ) -> dict[str, Any]:
        """Run all experts over the chunks and record them; chunks already there are kept.

        Returns:
            Facts for `run.json`: the proof lines of the load log.
        """
        chunks = load_chunks(run)
        engine = self._load(BASELINE)
        full = logits == "full"
        top_k = top_k or default_top_k(engine.n_vocab, full=full)

        def record(index: int, parts: _ChunkLogits, pool: ThreadPoolExecutor) -> None:
            del pool
            rows = parts.baseline_rows()
            meta = {"n_vocab": rows.n_vocab, "logits_xxh3": parts.digest()}
            run.write_chunk(BASELINE_PASS, index, record_arrays(rows), meta)

        def take(parts: _ChunkLogits, part: LogitsPart, pool: ThreadPoolExecutor) -> None:
            targets = parts.targets_of(part)
            parts.add(part, encode_rows(part.logits, targets, top_k=top_k, full=full, pool=pool))

        self._run(run, chunks, BASELINE, engine, take, record, progress)
        return {"proof": asdict(engine.proof)}

    def run_setting(
        self, run: RunStore, setting: Setting, *, progress: ProgressListener = _no_progress
    ) -> dict[str, Any]:
        """Run a setting over the same chunks and score it against the recording; chunks already scored are kept.

        Returns:
            Facts for `run.json`: the proof lines of the load log.

        Raises:
            NoEffectError: The engine did not take the setting, or the first chunk's logits equal the baseline's.
        """
        if not setting.again:
            return self._score(run, setting, progress)
        self.close_engine()  # the noise floor's engine has another shape and takes this one's place
        other = PassRunner(self.model, other_shape(self.options, self.n_ctx), self.n_ctx, log=self._log)
        try:
            facts = other._score(run, setting, progress)
        finally:
            other.close()
        return {**facts, "options": asdict(other.options)}

    def _score(self, run: RunStore, setting: Setting, progress: ProgressListener) -> dict[str, Any]:
        chunks = load_chunks(run)
        engine = self._load(setting)
        check_proof(engine.proof, setting, self.model)

        def take(parts: _ChunkLogits, part: LogitsPart, pool: ThreadPoolExecutor) -> None:
            start = part.first - chunks.first
            base = _slice_rows(parts.base(run), start, start + len(part.logits))
            parts.add(part, score_rows(base, part.logits, pool=pool))

        def record(index: int, parts: _ChunkLogits, pool: ThreadPoolExecutor) -> None:
            del pool
            if index == 0 and not setting.again and parts.digest() == parts.base_digest(run):
                raise NoEffectError(no_effect_message(setting, self.model, engine.proof))
            scores = position_scores(parts.base(run), parts.row_scores())
            run.write_chunk(setting.name, index, record_arrays(scores), {"logits_xxh3": parts.digest()})

        self._run(run, chunks, setting, engine, take, record, progress)
        return {"proof": asdict(engine.proof)}

    def close(self) -> None:
        """Free everything."""
        self.close_engine()

    def close_engine(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine, self._loaded = None, None

    def _load(self, setting: Setting) -> Engine:
        if self._engine is None or self._loaded != setting:
            self.close_engine()
            started = time.monotonic()
            try:
                self._engine = load_engine(
                    self.model, setting, self.options, n_ctx=self.n_ctx, n_sequences=self.n_sequences, log=self._log
                )
            except EngineError as error:
                hints = "; ".join(("", *self.model.warnings)) if setting.experts is not None else ""
                raise type(error)(f"{setting.name}: {error}{hints}") from error
            self._load_seconds = time.monotonic() - started
            self._loaded = setting
        return self._engine

    def _run(
        self,
        run: RunStore,
        chunks: ChunkSet,
        setting: Setting,
        engine: Engine,
        take: Callable[[_ChunkLogits, LogitsPart, ThreadPoolExecutor], None],
        record: Callable[[int, _ChunkLogits, ThreadPoolExecutor], None],
        progress: ProgressListener,
    ) -> None:
        """Decode the blocks that are not complete and hand each part of logits to `take`, each chunk to `record`.

        Blocks are cut the same way whatever is already there, so a resumed pass sees every chunk in the batch it
        would have been in, and writes the same bytes.
        """
        started = time.monotonic()
        score_seconds, tokens = 0.0, 0
        with ThreadPoolExecutor(engine.options.n_threads) as pool:
            for start in range(0, chunks.n_chunks, self.n_sequences):
                stop = min(start + self.n_sequences, chunks.n_chunks)
                if not all(run.has_chunk(setting.name, i) for i in range(start, stop)):
                    pending = [_ChunkLogits(chunks, i) for i in range(start, stop)]
                    for part in engine.decode(chunks.tokens[start:stop], chunks.first, chunks.last):
                        score_started = time.monotonic()
                        parts = pending[part.sequence]
                        try:
                            take(parts, part, pool)
                        except EngineError as error:
                            raise EngineError(
                                f"{setting.name}, chunk {parts.index}, rows from position {part.first} on: {error}"
                            ) from error
                        if parts.is_whole():
                            record(parts.index, parts, pool)
                            parts.release()
                        score_seconds += time.monotonic() - score_started
                    tokens += (stop - start) * chunks.n_ctx
                progress(Progress(setting.name, stop, chunks.n_chunks, tokens, time.monotonic() - started))
        if tokens:
            seconds = time.monotonic() - started
            run.add_timing(
                {
                    "pass": setting.name,
                    "tokens": tokens,
                    "seconds": round(seconds, 4),
                    "seconds_scoring": round(score_seconds, 4),
                    "seconds_loading": round(self._load_seconds, 4),
                }
            )


class _ChunkLogits:
    """What has been made of one chunk's logits so far; the logits themselves are never kept."""

    def __init__(self, chunks: ChunkSet, index: int) -> None:
        self.index = index
        self._targets = chunks.targets[index]
        self._first = chunks.first
        self._n_scored = chunks.n_scored
        self._rows: list[Any] = []
        self._n_rows = 0
        self._hash = xxhash.xxh3_128()
        self._base: tuple[BaselineRows, str] | None = None

    def targets_of(self, part: LogitsPart) -> Int32Array:
        start = part.first - self._first
        targets: Int32Array = self._targets[start : start + len(part.logits)]
        return targets

    def add(self, part: LogitsPart, rows: BaselineRows | RowScores) -> None:
        self._hash.update(part.logits.data)
        self._rows.append(rows)
        self._n_rows += len(part.logits)

    def is_whole(self) -> bool:
        return self._n_rows == self._n_scored

    def digest(self) -> str:
        return self._hash.hexdigest()

    def baseline_rows(self) -> BaselineRows:
        rows: BaselineRows = join_rows(BaselineRows, self._rows)
        return rows

    def row_scores(self) -> RowScores:
        rows: RowScores = join_rows(RowScores, self._rows)
        return rows

    def base(self, run: RunStore) -> BaselineRows:
        return self._read_base(run)[0]

    def base_digest(self, run: RunStore) -> str:
        return self._read_base(run)[1]

    def _read_base(self, run: RunStore) -> tuple[BaselineRows, str]:
        if self._base is None:
            arrays, meta = run.read_chunk(BASELINE_PASS, self.index)
            self._base = (baseline_rows(arrays, meta), str(meta["logits_xxh3"]))
        return self._base

    def release(self) -> None:
        """Let go of the chunk's numbers once they are written: memory is one block, whatever the corpus size."""
        self._rows, self._base = [], None


def load_chunks(run: RunStore) -> ChunkSet:
    """Read the token windows of a run."""
    return from_arrays(*run.read_chunks())


def baseline_rows(arrays: Arrays, meta: dict[str, Any]) -> BaselineRows:
    """Return the baseline of one chunk from its file's content."""
    return BaselineRows(n_vocab=int(meta["n_vocab"]), **arrays)


def stored_scores(run: RunStore, pass_name: str, index: int) -> PositionScores:
    """Return the position scores of one chunk of one pass."""
    arrays, _ = run.read_chunk(pass_name, index)
    return PositionScores(**arrays)


def check_proof(proof: SettingProof, setting: Setting, model: ModelFile) -> None:
    """Refuse to go on unless the engine's load log shows every override of `setting`.

    Raises:
        NoEffectError: An override is missing from the log, or the engine uses another number of experts.
    """
    for override in metadata_overrides(setting, model.architecture):
        if not any(line.startswith(f"{override.key}={override.type}:") for line in proof.overrides):
            raise NoEffectError(no_effect_message(setting, model, proof))
    if setting.experts is not None and proof.n_expert_used not in (None, setting.experts):
        raise NoEffectError(
            f"{setting.name}: the engine says it uses {proof.n_expert_used} experts; " + _likely_cause(setting, model)
        )


def no_effect_message(setting: Setting, model: ModelFile, proof: SettingProof) -> str:
    """Return one line that says a setting had no effect, what the log showed, and the likely cause."""
    shown = ", ".join(proof.overrides) or "no override"
    return f"{setting.name} had no effect: the engine's log shows {shown}; {_likely_cause(setting, model)}"


def _likely_cause(setting: Setting, model: ModelFile) -> str:
    if setting.experts is not None and model.n_expert_used is None:
        return "the file keeps one expert count a layer, and llama.cpp does not override such an array"
    if setting.experts is not None and setting.experts == model.n_expert_used:
        return f"{setting.experts} is what the file uses by itself"
    return f"likely a key or type that architecture {model.architecture!r} does not read"


def record_arrays(record: BaselineRows | PositionScores) -> Arrays:
    """Return the arrays of a record by name, as they go into its file; what is None is left out."""
    return {f.name: v for f in fields(record) if isinstance(v := getattr(record, f.name), np.ndarray)}


def _slice_rows(rows: BaselineRows, start: int, stop: int) -> BaselineRows:
    if (start, stop) == (0, len(rows.target)):
        return rows
    cut: dict[str, Any] = {k: v[start:stop] for k, v in vars(rows).items() if isinstance(v, np.ndarray)}
    return replace(rows, **cut)


def join_rows(kind: type[Any], parts: list[Any]) -> Any:
    """Concatenate records of arrays along their rows; a single part is returned as it is, uncopied."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    values = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts])
        if isinstance(getattr(first, f.name), np.ndarray)
        else getattr(first, f.name)
        for f in fields(kind)
    }
    return kind(**values)

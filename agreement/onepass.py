"""One pass: every chunk enters the batch once for the baseline and once for each setting, as sequences of their own.

In: an engine with the router hook, chunks, settings.  Out: the same chunk files that separate passes write, and how
many experts each setting kept.

The baseline rides along in every batch, so nothing has to be recorded on disk before settings can be scored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash

from agreement.engine import Engine, LogitsPart, load_engine
from agreement.engine.hook import Kept
from agreement.engine.options import MAX_SEQUENCES
from agreement.errors import EngineError, NoEffectError, SettingError, UsageError
from agreement.model_file.sample import write_sample
from agreement.recording import LogitsMode, Progress, ProgressListener, join_rows, record_arrays
from agreement.records import ChunkSet, EngineOptions, Float32Array, Int32Array, ModelFile, Setting
from agreement.routing import Policy, parse_policy
from agreement.scoring import BaselineRows, RowScores, default_top_k, encode_rows, position_scores, score_rows
from agreement.settings import BASELINE, experts_setting
from agreement.store import BASELINE_PASS, RunStore

PASS_NAME = "one pass"  # noqa: S105  # a name for progress and timings, not a password

# Below so many tokens of a sequence in a micro-batch, attention and bookkeeping cost more than a further group of
# settings with its own copy of the baseline.
MIN_PIECE = 64

SAMPLE_TOKENS = 48  # decoded when hook and override are compared on a sample; the second half is scored


@dataclass(frozen=True)
class Layout:
    """How chunks and settings share the batches of one pass.

    Attributes:
        groups: Settings `[start, stop)` that share a batch; each group brings its own copy of the baseline.
        chunks_per_block: Chunks in a batch.
        n_sequences: Sequences the engine's context must hold.
        piece: Tokens of each sequence in a micro-batch.
        n_ubatch: Tokens in a micro-batch: at most what was asked for.
    """

    groups: tuple[tuple[int, int], ...]
    chunks_per_block: int
    n_sequences: int
    piece: int
    n_ubatch: int

    def options(self, options: EngineOptions) -> EngineOptions:
        """Return the engine options that this layout needs: a decode call is one micro-batch."""
        return replace(options, n_batch=self.n_ubatch, n_ubatch=self.n_ubatch)

    def n_tokens(self, n_settings: int, n_chunks: int, n_ctx: int) -> int:
        """Return the tokens decoded in all, baseline copies included."""
        return (n_settings + len(self.groups)) * n_chunks * n_ctx


def one_pass_layout(
    n_settings: int, n_chunks: int, n_ctx: int, n_ubatch: int, *, max_sequences: int = MAX_SEQUENCES
) -> Layout:
    """Lay out `n_settings` settings and `n_chunks` chunks of `n_ctx` tokens in micro-batches of `n_ubatch` tokens.

    Whole chunks are put side by side while they fit.  If the settings of a single chunk do not fit, they are fed piece
    by piece, and if the pieces became too short, settings are split in groups of equal size.

    Args:
        n_settings: Settings beside the baseline, at least 1.
        n_chunks: Chunks, at least 1.
        n_ctx: Tokens a chunk.
        n_ubatch: Tokens a micro-batch may hold.
        max_sequences: Sequences whose cached keys and values memory holds; each takes `n_ctx` tokens' worth.

    Raises:
        UsageError: Not even the baseline and one setting fit.
    """
    if n_settings < 1 or n_chunks < 1:
        raise UsageError(f"one pass over {n_chunks} chunks and {n_settings} settings: give at least one of each")
    room = min(max_sequences, MAX_SEQUENCES, n_ubatch)
    if room < 2:
        raise UsageError(f"one pass needs room for two sequences in a micro-batch, there is room for {room}; raise -ub")
    longest = max(2, min(room, n_ubatch // min(n_ctx, MIN_PIECE)))
    n_groups = -(-n_settings // (longest - 1))
    bounds = [n_settings * i // n_groups for i in range(n_groups + 1)]
    groups = tuple((bounds[i], bounds[i + 1]) for i in range(n_groups))
    size = 1 + max(stop - start for start, stop in groups)
    together = max(1, min(room // size, n_ubatch // (size * n_ctx), n_chunks))
    piece = min(n_ctx, n_ubatch // (size * together))
    # As many blocks and pieces as that takes, but of equal size: the last one would cost as much as a full one.
    together, piece = _even(n_chunks, together), _even(n_ctx, piece)
    return Layout(groups, together, size * together, piece, size * together * piece)


def _even(total: int, most: int) -> int:
    """Return the size of the largest part when `total` is cut in as few and as equal parts of at most `most`."""
    return -(-total // -(-total // most))


def setting_policy(setting: Setting) -> Policy:
    """Return the routing policy that carries out `setting`.

    Raises:
        SettingError: The setting changes more than the routing, so it needs a load, and a pass, of its own.
    """
    if setting.overrides or setting.model is not None or setting.again or setting.name == BASELINE.name:
        raise SettingError(f"{setting.name} is no routing policy; run it as a separate pass")
    return Policy("experts", setting.experts) if setting.experts is not None else parse_policy(setting.name)


def run_one_pass(
    engine: Engine,
    run: RunStore,
    chunks: ChunkSet,
    settings: Sequence[Setting],
    *,
    layout: Layout,
    logits: LogitsMode = "full",
    top_k: int | None = None,
    write_baseline: bool = False,
    progress: ProgressListener = lambda _progress: None,
) -> dict[str, dict[str, Any]]:
    """Decode all chunks under all settings side by side and score them; whole blocks already there are kept.

    Args:
        engine: Loaded with `hooked`, under the baseline, with `layout.options` and room for `layout.n_sequences`.
        run: Where chunk files go, named as those of separate passes.
        chunks: The token windows.
        settings: Settings that are routing policies, see `setting_policy`.
        layout: From `one_pass_layout`.
        logits: Whether KLD is computed against the whole baseline in 16-bit codes or bounded from its top.
        top_k: Tokens of the baseline kept exactly, None for the default.
        write_baseline: Also write the baseline's recording.
        progress: Called after each block.

    Returns:
        Facts for `run.json` by setting name: proof that the hook was in effect and the mean number of experts kept.

    Raises:
        NoEffectError: A setting left every logit of chunk 0 as the baseline's.
        EngineError: The engine or its hook failed, or logits are NaN or infinite.
        SettingError: A setting that one pass cannot run.
    """
    policies = [setting_policy(setting) for setting in settings]
    full = logits == "full"
    keep = _Keep(full, top_k or default_top_k(engine.n_vocab, full=full))
    started = time.monotonic()
    tokens = 0
    with ThreadPoolExecutor(engine.options.n_threads) as pool:
        for number, (low, high) in enumerate(layout.groups):
            group = tuple(settings[low:high])
            routing = (None, *policies[low:high])
            name = PASS_NAME if len(layout.groups) == 1 else f"{PASS_NAME} {number + 1}/{len(layout.groups)}"
            written = ((BASELINE_PASS,) if write_baseline and number == 0 else ()) + tuple(s.name for s in group)
            for start in range(0, chunks.n_chunks, layout.chunks_per_block):
                stop = min(start + layout.chunks_per_block, chunks.n_chunks)
                if not all(run.has_chunk(pass_name, i) for pass_name in written for i in range(start, stop)):
                    block = _Block(run, chunks, range(start, stop), group, keep, written, pool)
                    block.decode(engine, routing, layout.piece)
                    tokens += len(routing) * (stop - start) * chunks.n_ctx
                progress(Progress(name, stop, chunks.n_chunks, tokens, time.monotonic() - started))
    if tokens:
        seconds = round(time.monotonic() - started, 4)
        run.add_timing({"pass": PASS_NAME, "tokens": tokens, "seconds": seconds})
    return {
        setting.name: _facts(run, setting, policy, chunks.n_chunks)
        for setting, policy in zip(settings, policies, strict=True)
    }


def _facts(run: RunStore, setting: Setting, policy: Policy, n_chunks: int) -> dict[str, Any]:
    """Return what the chunk files of a setting say of its routing; the same whether or not the run was interrupted."""
    metas = [run.read_chunk(setting.name, i, names=())[1] for i in range(n_chunks)]
    kept, rows = (sum(int(m.get(key, 0)) for m in metas) for key in ("experts_kept", "experts_rows"))
    proof = {"policy": str(policy), "rows": rows, "kept": kept}
    return {"proof": proof, "experts_mean": kept / rows if rows else None}  # no rows: chunks of a separate pass


@dataclass(frozen=True)
class _Keep:
    """What of the baseline a block encodes."""

    full: bool
    top_k: int


@dataclass
class _Parts:
    """What has been made so far of one chunk under one setting; the logits themselves are never kept."""

    rows: list[Any] = field(default_factory=list)
    n_rows: int = 0
    hash: Any = field(default_factory=xxhash.xxh3_128)

    def add(self, part: LogitsPart, rows: BaselineRows | RowScores) -> None:
        self.hash.update(part.logits.data)
        self.rows.append(rows)
        self.n_rows += len(part.logits)


class _Block:
    """The chunks of one batch under one group of settings.

    Sequences lie chunk by chunk, and within a chunk the baseline comes first: when a setting's logits come, the
    baseline's at the same positions have just been encoded.
    """

    def __init__(
        self,
        run: RunStore,
        chunks: ChunkSet,
        indices: range,
        settings: tuple[Setting, ...],
        keep: _Keep,
        written: tuple[str, ...],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._run, self._chunks, self._indices = run, chunks, indices
        self._settings, self._keep, self._written, self._pool = settings, keep, written, pool
        self._size = 1 + len(settings)
        self._parts = [_Parts() for _ in range(len(indices) * self._size)]
        self._base: dict[int, BaselineRows] = {}  # by first position: the baseline of the piece being scored
        self._last_sequence = -1

    def decode(self, engine: Engine, routing: Sequence[Policy | None], piece: int) -> None:
        """Decode the block and write every chunk of every setting in it as soon as it is whole."""
        tokens = np.repeat(self._chunks.tokens[self._indices.start : self._indices.stop], self._size, axis=0)
        every = tuple(routing) * len(self._indices)
        for part in engine.decode(tokens, self._chunks.first, self._chunks.last, piece=piece, routing=every):
            try:
                self._take(part)
            except EngineError as error:
                raise EngineError(
                    f"{self._name(part.sequence)}, rows from position {part.first} on: {error}"
                ) from error
            if self._parts[part.sequence].n_rows == self._chunks.n_scored:
                self._write(part.sequence, engine.experts_kept()[part.sequence])

    def _name(self, sequence: int) -> str:
        which = sequence % self._size
        setting = BASELINE.name if which == 0 else self._settings[which - 1].name
        return f"{setting}, chunk {self._indices[sequence // self._size]}"

    def _take(self, part: LogitsPart) -> None:
        chunk, which = divmod(part.sequence, self._size)
        parts = self._parts[part.sequence]
        again, self._last_sequence = part.sequence == self._last_sequence, part.sequence
        if which > 0:
            parts.add(part, score_rows(self._base[part.first], part.logits, pool=self._pool))
            return
        if not again:  # another chunk, or its next piece
            self._base.clear()
        start = part.first - self._chunks.first
        targets = self._chunks.targets[self._indices[chunk], start : start + len(part.logits)]
        rows = encode_rows(part.logits, targets, top_k=self._keep.top_k, full=self._keep.full, pool=self._pool)
        self._base[part.first] = rows
        parts.add(part, rows if BASELINE_PASS in self._written else _scored_part(rows))

    def _write(self, sequence: int, kept: Kept) -> None:
        chunk, which = divmod(sequence, self._size)
        index, parts = self._indices[chunk], self._parts[sequence]
        digest = parts.hash.hexdigest()
        if which == 0:
            rows: BaselineRows = join_rows(BaselineRows, parts.rows)
            if BASELINE_PASS in self._written:
                meta = {"n_vocab": rows.n_vocab, "logits_xxh3": digest}
                self._run.write_chunk(BASELINE_PASS, index, record_arrays(rows), meta)
            parts.rows = [_scored_part(rows)]
            return
        setting, base = self._settings[which - 1], self._parts[sequence - which]
        if index == 0 and digest == base.hash.hexdigest():
            raise NoEffectError(
                f"{setting.name} had no effect: chunk 0 has the baseline's logits to the bit, though the router hook "
                f"ran and kept {kept.mean:.4g} experts a token and layer; leave the setting out"
            )
        scores = position_scores(base.rows[0], join_rows(RowScores, parts.rows))
        meta = {"logits_xxh3": digest, "experts_kept": kept.kept, "experts_rows": kept.rows}
        self._run.write_chunk(setting.name, index, record_arrays(scores), meta)
        parts.rows = []


def _scored_part(rows: BaselineRows) -> BaselineRows:
    """Return what a setting's position scores need of the baseline: a small part of its size."""
    return BaselineRows(
        n_vocab=rows.n_vocab,
        target=rows.target,
        target_logprob=rows.target_logprob,
        logsumexp=rows.logsumexp,
        top_ids=rows.top_ids,
        top_logprobs=rows.top_logprobs,
        ambiguous=rows.ambiguous,
    )


def equality(
    model: ModelFile,
    options: EngineOptions,
    chunk: Int32Array,
    first: int,
    last: int,
    *,
    experts: int,
    log: Callable[[str], None] | None = None,
) -> float:
    """Return how far the router hook is from the metadata override on this engine: 0 if they agree to the bit.

    One chunk is decoded twice in the same batch shape, two sequences: beside the baseline under the hook, and with
    both sequences under an overridden load.  It costs two loads and four chunks.

    Args:
        model: The model file.
        options: Engine options.
        chunk: (n_ctx,) int32.
        first: First scored position.
        last: One past the last.
        experts: Experts to keep, fewer than the file uses.
        log: Called with every line the engine logs.

    Returns:
        The largest logit difference; inf where a logit is NaN.

    Raises:
        EngineError: The engine refused one of the two ways.
    """
    tokens = np.stack([chunk, chunk])
    n_ubatch = min(options.n_ubatch, tokens.size)
    shape = replace(options, n_batch=n_ubatch, n_ubatch=n_ubatch)
    found: list[Float32Array] = []
    for setting, routing in (
        (BASELINE, (None, Policy("experts", experts))),
        (experts_setting(experts), None),
    ):
        engine = load_engine(
            model, setting, shape, n_ctx=chunk.size, n_sequences=2, hooked=routing is not None, log=log
        )
        try:
            out = np.empty((last - first, engine.n_vocab), np.float32)
            for part in engine.decode(tokens, first, last, routing=routing):
                if part.sequence == 1:
                    out[part.first - first : part.first - first + len(part.logits)] = part.logits
            found.append(out)
        finally:
            engine.close()
    difference = float(np.abs(found[0] - found[1]).max())
    return math.inf if math.isnan(difference) else difference


def sampled_equality(
    model: ModelFile,
    options: EngineOptions,
    *,
    experts: int,
    most_bytes: int,
    folder: Path | None = None,
    log: Callable[[str], None] | None = None,
) -> float:
    """Return the same of a small sample of the model, for one that is too large to be loaded twice.

    The sample is a temporary file, deleted afterwards; of the model only its bytes
    are read.  It has the model's graph, weight types and widths, but few layers and experts, see
    `agreement.model_file.sample`.

    Args:
        model: The model file.
        options: Engine options.
        experts: Experts to keep, fewer than the file uses.
        most_bytes: Size that the sample may have.
        folder: Where it is made; None for the system's folder for temporary files.
        log: Called with every line the engine logs.

    Returns:
        The largest logit difference; inf where a logit is NaN.

    Raises:
        ModelFileError: No sample can be made.
        EngineError: The engine refused one of the two ways.
    """
    with TemporaryDirectory(prefix="agreement-", dir=folder) as place:
        sample = write_sample(model, Path(place) / "sample.gguf", most_bytes=most_bytes)
        # 37 is odd, so the tokens of a whole sample (256 of them) are all different.
        tokens = (np.arange(SAMPLE_TOKENS) * 37 % sample.n_vocab).astype(np.int32)
        return equality(sample, options, tokens, SAMPLE_TOKENS // 2, SAMPLE_TOKENS, experts=experts, log=log)

"""What a run will do, worked out before it starts.

In: a model, a corpus, settings and options.  Out: `Plan`: chunks cut, sizes known, settings checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from agreement import chunks as chunking
from agreement.corpus import counted, joined_text
from agreement.errors import SettingError
from agreement.memory import read_memory
from agreement.model_file import model_digest, read_model_file, require_moe
from agreement.recording import LogitsMode, Vocabulary
from agreement.records import Chunking, ChunkSet, Corpus, EngineOptions, ModelFile, Setting
from agreement.scoring import default_top_k, row_bytes
from agreement.settings import check_against_model, metadata_overrides
from agreement.settings import noise_floor as floor_setting
from agreement.streaming import (
    Host,
    ReadingPlan,
    Wishes,
    Work,
    estimated_costs,
    lock_allowance,
    measured_costs,
    memory_available,
    plan_reading,
    read_speed,
)
from agreement.workers.client import Runner, WorkerRunner

_ROW_BYTES_SCORES = 7 * 4 + 2 * 4 + 1


Passes = Literal["auto", "one", "separate"]


@dataclass(frozen=True)
class ChunkOptions:
    """How text becomes chunks.

    Attributes:
        chunking: `document` or `llama-perplexity`.
        n_ctx: Tokens a chunk.
        n_chunks: At most so many chunks, None for all.
        first: First scored position, None for half the window.
        seed: Seed of the selection of chunks and of the resampling.
        one_each: At most one chunk a document.
    """

    chunking: Chunking = "document"
    n_ctx: int = 512
    n_chunks: int | None = 64
    first: int | None = None
    seed: int = 0
    one_each: bool = False


@dataclass(frozen=True)
class Plan:
    """A run that is about to start.

    Attributes:
        model: The model file.
        corpus: The documents.
        vocabulary: Engine, tokens and options with defaults made explicit.
        chunks: The token windows.
        settings: Settings to run after the baseline.
        logits: What the recording keeps of the distribution.
        top_k: Tokens kept exactly a position.
        passes: Whether settings run in `one` pass or in `separate` ones.
        passes_reason: Why, one line.
        sizes: Bytes of the recording by logits mode, to choose between.
        identity: What must be equal for two passes to be comparable.
        about: What is worth knowing beside it.
        reading: How the weights are read.
        keep_recording: Whether the baseline's recording was asked for, though one pass does without.
    """

    model: ModelFile
    corpus: Corpus
    vocabulary: Vocabulary
    chunks: ChunkSet
    settings: tuple[Setting, ...]
    logits: LogitsMode
    top_k: int
    passes: Passes
    passes_reason: str
    sizes: dict[str, int]
    identity: dict[str, Any]
    about: dict[str, Any]
    reading: ReadingPlan
    keep_recording: bool = False

    @property
    def records_baseline(self) -> bool:
        """Whether the baseline's recording is written: separate passes are scored against it."""
        return self.passes != "one" or self.keep_recording or not all(is_routing(s) for s in self.settings)

    @property
    def n_positions(self) -> int:
        """Scored positions of one pass."""
        return self.chunks.n_chunks * self.chunks.n_scored

    @property
    def n_tokens(self) -> int:
        """Tokens decoded in all passes together, the baseline's included."""
        return self.chunks.n_chunks * self.chunks.n_ctx * (1 + len(self.settings))


def check_settings(settings: Sequence[Setting], model: ModelFile) -> None:
    """Refuse settings that this model cannot run, before anything slow happens.

    Raises:
        ModelFileError: A dense model.
        SettingError: See `check_against_model`; also a setting named twice.
    """
    require_moe(model)
    seen: set[str] = set()
    for setting in settings:
        if setting.name in seen:
            raise SettingError(f"{setting.name} is given twice; name each setting once")
        seen.add(setting.name)
        check_against_model(setting, model)


def make_plan(
    model: ModelFile,
    corpus: Corpus,
    settings: Sequence[Setting],
    options: ChunkOptions,
    runner: Runner,
    *,
    logits: LogitsMode = "full",
    top_k: int | None = None,
    passes: Passes = "auto",
    wishes: Wishes | None = None,
    keep_recording: bool = False,
) -> Plan:
    """Tokenise the corpus, cut it into chunks and work out sizes and identity.

    Raises:
        CorpusError: Too little text for one chunk.
        UsageError: Options that do not fit together.
    """
    joined = options.chunking == "llama-perplexity"
    names = [corpus.name] if joined else [d.name for d in corpus.documents]
    texts = [joined_text(corpus)] if joined else [d.text for d in corpus.documents]
    vocabulary = runner.tokenise(texts)
    tokens = vocabulary.tokens
    if (
        joined and vocabulary.bos is not None
    ):  # that tool's tokeniser puts BOS before the text, which shifts every window
        tokens = (np.concatenate([np.array([vocabulary.bos], np.int32), tokens[0]]),)
    cut = chunking.cut(
        list(zip(names, tokens, strict=True)),
        n_ctx=options.n_ctx,
        chunking=options.chunking,
        n_chunks=options.n_chunks,
        seed=options.seed,
        first=options.first,
        bos=vocabulary.bos,
        one_each=options.one_each,
    )
    mode, reason = choose_passes(passes, settings, model)
    decided = mode if passes != "auto" or any(is_policy(s) for s in settings) else None
    wishes = replace(wishes or Wishes(), passes=None if decided == "auto" else decided)
    reading = reading_plan(model, runner, vocabulary.options, cut, settings, wishes, logits)
    if not reading.fits:
        mode, reason = reading.passes, "see reading"
    engine = reading.options(vocabulary.options)
    if not reading.fits or engine != vocabulary.options:
        vocabulary = replace(vocabulary, options=runner.configure(engine, reading.n_sequences))
    kept = top_k or default_top_k(vocabulary.n_vocab, full=logits == "full")
    return Plan(
        model=model,
        corpus=corpus,
        vocabulary=vocabulary,
        chunks=cut,
        settings=tuple(settings),
        logits=logits,
        top_k=kept,
        passes=mode,
        passes_reason=reason,
        sizes={
            mode: recording_bytes(cut, vocabulary.n_vocab, full=mode == "full", top_k=top_k) for mode in ("full", "top")
        },
        identity=run_identity(model, vocabulary, cut, logits, kept, mode, settings),
        about={**_about(model, corpus, cut), **_about_reading(reading)},
        reading=reading,
        keep_recording=keep_recording,
    )


def plan_sweep(
    model: str | Path,
    corpus: Corpus | Callable[[], Corpus],
    *,
    settings: Sequence[Setting],
    noise_floor: bool = False,
    chunks: ChunkOptions | None = None,
    logits: LogitsMode = "full",
    options: EngineOptions | None = None,
    passes: Passes = "auto",
    wishes: Wishes | None = None,
    keep_recording: bool = False,
) -> Plan:
    """Return the plan of a sweep that is not run; arguments as for `agreement.sweep`.  Nothing is left behind.

    Memory is what may be used now, so a sweep that starts later may find another plan.

    Raises:
        AgreementError: What planning the sweep itself would raise.
    """
    header = read_model_file(model)
    chosen = (*((floor_setting(header),) if noise_floor else ()), *settings)
    check_settings(chosen, header)
    cutting = chunks or ChunkOptions()
    with TemporaryDirectory(prefix="agreement-") as folder:
        log_path = Path(folder) / "engine.log"
        runner = WorkerRunner(header, options or EngineOptions(), cutting.n_ctx, log_path=log_path)
        try:
            runner.prepare()
            text = corpus if isinstance(corpus, Corpus) else corpus()  # while the worker loads its libraries
            return make_plan(
                header,
                text,
                chosen,
                cutting,
                runner,
                logits=logits,
                passes=passes,
                wishes=wishes,
                keep_recording=keep_recording,
            )
        finally:
            runner.close()


def reading_plan(
    model: ModelFile,
    runner: Runner,
    options: EngineOptions,
    chunks: ChunkSet,
    settings: Sequence[Setting],
    wishes: Wishes,
    logits: LogitsMode,
) -> ReadingPlan:
    """Plan how the weights are read; a model that does not fit is planned again with sizes the engine measured.

    Raises:
        UsageError: See `plan_reading`.
    """
    routed = [s for s in settings if is_routing(s) and (s.experts or 0) <= (model.n_expert_used or 0)]
    work = Work(chunks.n_chunks, chunks.n_ctx, chunks.n_scored, len(routed), len(settings) - len(routed))
    memory = read_memory()
    host = Host(memory_available(memory), memory.source, lock_allowance())
    if wishes.memory is not None:
        host = replace(host, available=wishes.memory, source="--memory, as asked")
    costs = estimated_costs(model, options, chunks.n_ctx, full_logits=logits == "full")
    plan = plan_reading(model, host, options, work, costs, wishes)
    for _ in range(2):  # once more, since the measured sizes lead to another shape
        if plan.fits:
            break
        if host.disk is None:
            host = replace(host, disk=read_speed(max(model.shards, key=lambda p: Path(p).stat().st_size)))
        outputs = plan.n_sequences * min(chunks.n_scored, plan.n_ubatch)
        log = runner.measure(plan.n_ubatch, plan.n_sequences, outputs)
        tokens = plan.n_sequences * chunks.n_ctx
        costs = measured_costs(costs, log, n_ubatch=plan.n_ubatch, n_outputs=outputs, n_tokens=tokens)
        plan = plan_reading(model, host, options, work, costs, wishes)
    return plan


def is_routing(setting: Setting) -> bool:
    """Say whether a setting changes nothing but which experts are used, so that one pass can run it."""
    return not (setting.overrides or setting.model is not None or setting.again)


def is_policy(setting: Setting) -> bool:
    """Say whether a setting is a routing policy that no metadata override offers, so that only one pass can run it."""
    return is_routing(setting) and setting.experts is None


def choose_passes(asked: Passes, settings: Sequence[Setting], model: ModelFile) -> tuple[Passes, str]:
    """Return whether settings run in `one` pass or in `separate` ones, and why.

    Raises:
        SettingError: Separate passes were asked for a policy that only one pass can run, or one pass for a setting
            that uses more experts than the file.
    """
    policies = [s.name for s in settings if is_policy(s)]
    more = [s.name for s in settings if s.experts is not None and s.experts > (model.n_expert_used or 0)]
    if policies and (asked == "separate" or more):
        raise SettingError(f"{policies[0]} needs --passes one, which cannot run {', '.join(more) or 'separate passes'}")
    if asked == "one" and more:
        raise SettingError(f"{more[0]} uses more experts than the file; --passes one only drops experts")
    if policies:
        return "one", f"{policies[0]} is a routing policy that no metadata override offers"
    if asked != "auto":
        return asked, "as asked"
    return "separate", "fewer experts is also less arithmetic, and each pass loads the model from memory"


def recording_bytes(chunks: ChunkSet, n_vocab: int, *, full: bool, top_k: int | None = None) -> int:
    """Return about how many bytes the baseline's recording takes."""
    row = row_bytes(n_vocab, full=full, top_k=top_k or default_top_k(n_vocab, full=full))
    return chunks.n_chunks * (chunks.n_scored * row + 4096)


def scores_bytes(chunks: ChunkSet, n_settings: int) -> int:
    """Return about how many bytes the settings' scores take."""
    return n_settings * chunks.n_chunks * (chunks.n_scored * _ROW_BYTES_SCORES + 2048)


def run_identity(
    model: ModelFile,
    vocabulary: Vocabulary,
    chunks: ChunkSet,
    logits: LogitsMode,
    top_k: int,
    passes: Passes,
    settings: Sequence[Setting],
) -> dict[str, Any]:
    """Return what must be equal for two passes to be comparable."""
    return {
        "model": {"digest": model_digest(model), "vocabulary": vocabulary.digest, "n_vocab": vocabulary.n_vocab},
        "engine": asdict(vocabulary.info),
        "options": asdict(vocabulary.options),
        "chunks": {
            "fingerprint": chunks.fingerprint,
            "chunking": chunks.chunking,
            "n_chunks": chunks.n_chunks,
            "n_ctx": chunks.n_ctx,
            "first": chunks.first,
            "last": chunks.last,
            "seed": chunks.seed,
        },
        "recording": {"logits": logits, "top_k": top_k, "passes": passes},
        # In one pass the batch's shape, and with it the last bits, depends on how many settings share it.
        **({"one pass": [s.name for s in settings if is_routing(s)]} if passes == "one" else {}),
    }


def _about(model: ModelFile, corpus: Corpus, chunks: ChunkSet) -> dict[str, Any]:
    return {
        "model": {
            "path": model.path,
            "name": model.name,
            "architecture": model.architecture,
            "n_expert": model.n_expert,
            "n_expert_used": model.n_expert_used,
            "bytes": model.bytes_total,
            "expert_bytes": None if model.n_expert_used is None else model.expert_bytes_per_token(model.n_expert_used),
            "warnings": list(model.warnings),
        },
        "corpus": {
            "name": corpus.name,
            "fingerprint": corpus.fingerprint,
            "documents": len(corpus.documents),
            "skipped": counted(corpus.skipped),
            "notes": list(corpus.notes),
        },
        "chunks": {"notes": list(chunks.notes)},
        "settings": {},
    }


def _about_reading(reading: ReadingPlan) -> dict[str, Any]:
    return {} if reading.fits else {"reading": reading.lines(), "reading_bytes": reading.bytes_expected}


def setting_facts(setting: Setting, model: ModelFile, digest: str = "") -> dict[str, Any]:
    """Return what the report will say of a setting, for `run.json`; `digest` is that of another model file, if any."""
    # What a policy keeps is known only after its pass.
    used = setting.experts if setting.experts is not None or is_policy(setting) else model.n_expert_used
    return {
        "experts": used,
        "expert_bytes": None if used is None else model.expert_bytes_per_token(used),
        "overrides": [str(o) for o in metadata_overrides(setting, model.architecture)],
        "model": setting.model,
        "again": setting.again,
        "digest": digest,
    }

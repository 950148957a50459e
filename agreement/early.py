"""The sequential gate: run the model document by document and stop as soon as the verdict is safe.

In: a model, a corpus, one requirement on agreement.  Out: a `Judgement` and where the run stood when it stopped.

The baseline and the setting ride in one pass, chunk beside chunk, so a micro-batch is decoded only when a chunk of it
is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from agreement.errors import GateError, KilledForMemoryError, UsageError
from agreement.model_file import read_model_file, size_text
from agreement.onepass import one_pass_layout
from agreement.passes import (
    SILENT,
    Listener,
    begin_reading,
    finish_one_pass,
    note_reading,
    nothing_held,
    start_one_pass,
)
from agreement.plan import ChunkOptions, Plan, check_settings, is_routing
from agreement.recording import load_chunks, stored_scores
from agreement.records import EngineOptions, Judgement, ModelFile, Requirement, Setting
from agreement.runs import CorpusSource, Job, Request, prepared, smaller
from agreement.scoring import count_chunk
from agreement.sequential import SequentialTest, State
from agreement.store import RunStore
from agreement.streaming import Wishes
from agreement.workers.client import Runner

Looked = Callable[[State], None]


class Early(NamedTuple):
    """What a sequential gate found.

    Attributes:
        judgement: Verdict, estimate and reason.
        state: Where the run stood at the end.
        assumption: What the verdict rests on.
    """

    judgement: Judgement
    state: State
    assumption: str


def sequential_gate(
    model: str | Path,
    corpus: CorpusSource,
    requirement: Requirement,
    setting: Setting,
    out: str | Path,
    *,
    max_clusters: int = 60,
    confidence: float = 0.95,
    chunks: ChunkOptions | None = None,
    options: EngineOptions | None = None,
    wishes: Wishes | None = None,
    resume: bool = False,
    in_process: bool = False,
    listener: Listener = SILENT,
    looked: Looked = lambda _state: None,
) -> Early:
    """Judge one requirement while the passes run, one chunk a document, in an order drawn with the seed.

    Args:
        model: A GGUF file.
        corpus: As for `sweep`.
        requirement: On agreement, of `setting`.
        setting: The setting to run: a number of experts or a routing policy.
        out: The run directory; chunks that were scored stay there.
        max_clusters: Most documents that are drawn.
        confidence: One minus the allowed chance of a wrong verdict over the whole run.
        chunks: How text becomes chunks; the number of chunks follows from `max_clusters`.
        options: Engine options.
        wishes: What of the plan for a model larger than memory is decided already.
        resume: Continue the run that is already in `out`.
        in_process: Run the engine in this process instead of a worker.
        listener: Hears how the pass goes.
        looked: Hears where the run stands after each cluster.

    Raises:
        GateError: A requirement or a setting that this gate cannot judge, or fewer documents than its first look
            needs.
        UsageError: Chunks that are not cut by document.
        KilledForMemoryError: With nothing of the model held and, where no chunk is there, with the smallest micro-batch
            that is tried; what is there stays.
    """
    cutting = chunks or ChunkOptions()
    if cutting.chunking != "document":
        raise UsageError("the sequential gate draws documents in random order; it needs --chunking document")
    SequentialTest(requirement, max_clusters=max_clusters, confidence=confidence)  # refuse early what can never pass
    header = read_model_file(model)
    check_settings((setting,), header)
    _check_beside(setting, header)

    def planned(plan: Plan) -> None:  # nothing is written yet
        _test(len(plan.chunks.cluster_names), requirement, confidence)
        listener.plan(plan)

    cutting = replace(cutting, n_chunks=max_clusters, one_each=True)
    heard = replace(listener, plan=planned)
    request = Request(model, corpus, out, cutting, "full", options, "one", resume, in_process, heard, wishes)
    with prepared(request, (setting,)) as first:
        job = first
        while True:
            test = _test(job.plan.chunks.n_chunks, requirement, confidence)
            try:
                _decide(test, setting, job, listener, looked)
            except KilledForMemoryError as error:
                job = smaller(job, error, heard)
            else:
                return Early(test.judgement(), test.state, test.assumption)


def _decide(test: SequentialTest, setting: Setting, job: Job, listener: Listener, looked: Looked) -> None:
    """Decode and look, document by document, until the test has its verdict."""
    run, plan = job.run, job.plan
    windows, decoded = load_chunks(run), 0
    n_chunks = windows.n_chunks
    # Chunks that share a micro-batch come together: one after the other each would decode those before it again.
    n_ubatch = plan.vocabulary.options.n_ubatch
    block = one_pass_layout(1, n_chunks, windows.n_ctx, n_ubatch).chunks_per_block
    passes = _Passes(run, job.runner, plan, listener)
    for look in range(1, n_chunks + 1):
        if look > decoded:
            decoded = min(n_chunks, decoded + block)
            facts = passes.decode(setting, decoded)
        counts = count_chunk(stored_scores(run, setting.name, look - 1))
        verdict = test.update(counts.n_agree, counts.n)
        looked(test.state)
        if verdict is not None:
            break
    else:
        test.finish()
    if decoded == n_chunks:
        finish_one_pass(run, facts)
    if not plan.reading.fits:
        n_bytes = note_reading(run, job.runner, plan, n_chunks=decoded)
        read = "what was read is not known" if n_bytes is None else f"read {size_text(n_bytes)}"
        planned = size_text(plan.reading.bytes_expected)
        listener.note(f"{read} for {decoded} documents; planned {planned} for all {n_chunks}")


class _Passes:
    """The one pass of a gate, piece by piece; if its process is killed for memory, once more with nothing held."""

    def __init__(self, run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
        self._run, self._runner, self._plan, self._listener = run, runner, plan, listener
        self._begun = False
        if not plan.reading.fits:
            begin_reading(run)

    def decode(self, setting: Setting, n_chunks: int) -> dict[str, dict[str, Any]]:
        """Decode the first `n_chunks` chunks; what is there already is kept."""
        try:
            return self._decode(setting, n_chunks)
        except KilledForMemoryError as error:
            if self._plan.reading.fits or not self._plan.reading.hold:
                raise
            self._plan = nothing_held(self._run, self._plan, error, self._listener)
            self._begun = False
            return self._decode(setting, n_chunks)

    def _decode(self, setting: Setting, n_chunks: int) -> dict[str, dict[str, Any]]:
        plan, listener = self._plan, self._listener
        if not self._begun:
            start_one_pass(self._run, self._runner, plan, listener)
            self._begun = True
        return self._runner.run_one_pass(
            self._run,
            (setting,),
            logits=plan.logits,
            top_k=plan.top_k,
            n_chunks=n_chunks,
            progress=listener.progress,
        )


def _check_beside(setting: Setting, model: ModelFile) -> None:
    """Refuse a setting that cannot be decoded beside the baseline, chunk by chunk."""
    used = model.n_expert_used
    more = setting.experts is not None and used is not None and setting.experts > used
    if more or not is_routing(setting):
        can = f"experts=N with N below {used}" if used is not None else "experts=N"
        raise GateError(
            f"{setting.name}: the sequential gate runs {can}, ser=K,T or topp=P beside the baseline; `agreement sweep` "
            "this one, then gate the run"
        )


def _test(n_clusters: int, requirement: Requirement, confidence: float) -> SequentialTest:
    try:
        return SequentialTest(requirement, max_clusters=n_clusters, confidence=confidence)
    except GateError as error:
        raise GateError(f"the corpus has {n_clusters} documents long enough for a chunk: {error}") from error

"""The main job: baseline, then settings, then the report; and its two halves on their own.

In: paths and choices.  Out: a run directory and a `Report`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from agreement import corpus as corpora
from agreement import model_file
from agreement.checks import HALVINGS, check_hook, load_within_memory, noted
from agreement.chunks import to_arrays
from agreement.errors import IdentityError, KilledForMemoryError, StoreError, UsageError
from agreement.onepass import PASS_NAME
from agreement.passes import SILENT, Listener, carry_out, compare_settings
from agreement.plan import ChunkOptions, Passes, Plan, check_settings, is_policy, make_plan
from agreement.recording import LogitsMode
from agreement.records import Corpus, EngineOptions, ModelFile, Report, Setting
from agreement.runner import FullRunner
from agreement.settings import BASELINE, experts_setting, with_model
from agreement.settings import noise_floor as floor_setting
from agreement.store import BASELINE_PASS, RunStore, refuse_foreign
from agreement.streaming import Wishes
from agreement.summary import finish
from agreement.workers.client import Runner, WorkerRunner

CorpusSource = str | Path | Corpus | Callable[[], Corpus]


def sweep(
    model: str | Path,
    corpus: CorpusSource,
    out: str | Path,
    *,
    experts: Sequence[int] = (),
    settings: Sequence[Setting] = (),
    noise_floor: bool = False,
    chunks: ChunkOptions | None = None,
    logits: LogitsMode = "full",
    options: EngineOptions | None = None,
    passes: Passes = "auto",
    wishes: Wishes | None = None,
    keep_recording: bool = False,
    resume: bool = False,
    in_process: bool = False,
    listener: Listener = SILENT,
) -> Report:
    """Record the baseline and score every setting against it, over the same chunks.

    Args:
        model: A GGUF file, any shard of a split one.
        corpus: A corpus, a function that returns one, or whatever `agreement.corpus.load` takes.
        out: The run directory to make.
        experts: Numbers of experts per token to try.
        settings: Further settings.
        noise_floor: Also run the baseline again, in another batch shape and with other threads.
        chunks: How text becomes chunks.
        logits: `full` records the whole distribution in 16 bits a token, `top` the most probable tokens; with `top`
            agreement and perplexity are the same and KLD becomes bounds.
        options: Engine options.
        passes: `separate` loads the model once a setting; `one` decodes every chunk under all settings side by side
            and writes no recording; `auto` chooses, see `agreement.plan.choose_passes`.
        wishes: What of the plan for a model larger than memory is decided already; `passes` is taken from above.
        keep_recording: Write the baseline's recording in one pass, too, so that `compare` can score more settings.
        resume: Continue the run that is already in `out`; whole chunks are kept.
        in_process: Run the engine in this process instead of a worker.
        listener: Hears how it goes.

    Returns:
        The report, which is also in `out/report.json`.

    Raises:
        AgreementError: One subclass a kind of trouble; see `agreement.errors`.
    """
    chosen = (*(experts_setting(n) for n in experts), *settings)
    if noise_floor:
        chosen = (floor_setting(model_file.read_model_file(model)), *chosen)
    arguments = Request(model, corpus, out, chunks, logits, options, passes, resume, in_process, listener, wishes)
    with prepared(arguments._replace(keep_recording=keep_recording), chosen) as job:
        return finish(_carried_out(job, listener))


def _carried_out(job: Job, listener: Listener) -> RunStore:
    """Carry out a job, with smaller micro-batches where memory runs out; return its run."""
    while True:
        try:
            carry_out(job.run, job.runner, job.plan, listener)
        except KilledForMemoryError as error:
            job = smaller(job, error, listener)
        else:
            return job.run


def smaller(job: Job, error: KilledForMemoryError, listener: Listener) -> Job:
    """Return a job with half the micro-batch, after its process was killed with nothing of the model held.

    Raises:
        KilledForMemoryError: Nothing smaller can be tried, with advice.
    """
    n_ubatch = job.plan.reading.n_ubatch
    if job.plan.reading.fits:
        raise _advised(error, "free some, or say with --memory what may be used") from error
    advice = f"micro-batches of {n_ubatch} tokens are too large: allow more memory, or start anew with a smaller -ub"
    if job.run.has_any_chunk() or job.halvings == HALVINGS:  # chunks of two micro-batches are not of one run
        raise _advised(error, advice) from error
    try:
        plan = job.replan(max(1, n_ubatch // 2))
    except UsageError:
        raise _advised(error, advice) from error
    if plan.reading.fits:  # with such options by themselves; that is another run, for the user to choose
        raise _advised(error, advice) from error
    plan = noted(plan, f"memory ran out with micro-batches of {n_ubatch} tokens; {plan.reading.n_ubatch} instead")
    listener.plan(plan)
    job.run.discard()
    run = RunStore.create(job.run.path, plan.identity, plan.about, to_arrays(plan.chunks))
    return replace(job, run=run, plan=plan, halvings=job.halvings + 1)


def _advised(error: KilledForMemoryError, advice: str) -> KilledForMemoryError:
    return KilledForMemoryError(error.what, left=error.left, advice=advice, resumable=error.resumable)


def record(
    model: str | Path,
    corpus: CorpusSource,
    out: str | Path,
    *,
    chunks: ChunkOptions | None = None,
    logits: LogitsMode = "full",
    options: EngineOptions | None = None,
    wishes: Wishes | None = None,
    resume: bool = False,
    in_process: bool = False,
    listener: Listener = SILENT,
) -> RunStore:
    """Record the baseline alone: the first half of `sweep`, with the same arguments; returns the run."""
    arguments = Request(model, corpus, out, chunks, logits, options, "separate", resume, in_process, listener, wishes)
    with prepared(arguments, ()) as job:
        return _carried_out(job, listener)


class Request(NamedTuple):
    """What `sweep`, `record` and the sequential gate share; see `sweep` for each field."""

    model: str | Path
    corpus: CorpusSource
    out: str | Path
    chunks: ChunkOptions | None
    logits: LogitsMode
    options: EngineOptions | None
    passes: Passes
    resume: bool
    in_process: bool
    listener: Listener
    wishes: Wishes | None = None
    keep_recording: bool = False


@dataclass(frozen=True)
class Job:
    """A run that can begin.

    Attributes:
        run: Its directory, locked.
        runner: For its passes.
        plan: What is to be done.
        replan: Plans again with a micro-batch of at most so many tokens.
        halvings: How often that was done because memory ran out.
    """

    run: RunStore
    runner: Runner
    plan: Plan
    replan: Callable[[int], Plan]
    halvings: int = 0


@contextlib.contextmanager
def prepared(given: Request, settings: tuple[Setting, ...]) -> Iterator[Job]:
    """Yield a planned run, locked, with the runner for its passes."""
    header = model_file.read_model_file(given.model)
    check_settings(settings, header)
    path = Path(given.out)
    if (path / "run.json").exists() and not given.resume:  # said before anything slow happens
        raise StoreError(f"{path} already holds a run; continue it with --resume or choose another -o")
    refuse_foreign(path)
    cutting = given.chunks or ChunkOptions()
    options = given.options or EngineOptions()
    if given.resume:
        options, given = _as_begun(path, options, given)
    with _locked_runner(header, options, cutting.n_ctx, path, in_process=given.in_process) as runner:
        text = _corpus(given.corpus)  # while the worker loads its libraries
        planned = partial(
            make_plan,
            header,
            text,
            settings,
            cutting,
            runner,
            logits=given.logits,
            passes=given.passes,
            keep_recording=given.keep_recording,
        )
        wishes = given.wishes or Wishes()
        plan = check_hook(
            planned(wishes=wishes),
            runner,
            given.passes,
            lambda: planned(passes="separate", wishes=wishes),
            known=_known_difference(path),
        )
        given.listener.plan(plan)
        fell_back = plan.passes == "separate" and "preflight" in plan.about
        checked: dict[str, Any] = {key: plan.about[key] for key in ("preflight", "notes") if key in plan.about}

        def replan(most: int) -> Plan:
            passes = "separate" if fell_back else given.passes
            again = planned(passes=passes, wishes=replace(wishes, n_ubatch=most, begun=None))
            return replace(again, about={**again.about, **checked})

        if not (path / "run.json").exists():  # else its micro-batch is settled
            found = load_within_memory(plan, runner, replan)
            if found is not plan:
                given.listener.plan(found)
            plan = found
        yield Job(_open_or_create(path, plan, resume=given.resume), runner, plan, replan)


def compare(
    path: str | Path,
    *,
    experts: Sequence[int] = (),
    settings: Sequence[Setting] = (),
    model: str | Path | None = None,
    in_process: bool = False,
    listener: Listener = SILENT,
) -> Report:
    """Score settings against a recording made before: the second half of `sweep`.

    Chunks and engine options are those of the recording.

    Args:
        path: The run directory.
        experts: Numbers of experts per token to try.
        settings: Further settings.
        model: Another model file with the same vocabulary, e.g. a quantisation of the same model, or the recorded
            model in another place. With no settings it is run as its file says.
        in_process: Run the engine in this process instead of a worker.
        listener: Hears how it goes.

    Raises:
        IdentityError: The model, the engine or its build is not the recording's.
        StoreError: No complete recording there.
    """
    run = RunStore.open(Path(path))
    if not run.is_finished(BASELINE_PASS):
        raise StoreError(f"{path}: the baseline is not complete; finish it with --resume")
    recorded = run.header["about"]["model"].get("path", "")
    if not recorded:
        raise UsageError(
            f"{path} came from logits files, with no engine to run; compare files: agreement compare BASE FILE"
        )
    header = model_file.read_model_file(model or recorded)
    digest = model_file.model_digest(header)
    other = digest != run.header["identity"]["model"]["digest"]
    if other and model is None:
        raise IdentityError(f"{header.path} is not the model that {path} was recorded with; it has changed since")
    chosen: tuple[Setting, ...] = (*(experts_setting(n) for n in experts), *settings)
    if other:
        label = Path(header.path).stem
        chosen = tuple(with_model(s, header.path, label) for s in chosen or (BASELINE,))
    policies = [s.name for s in chosen if is_policy(s) and s.name != BASELINE.name and s.model is None]
    if policies:
        raise UsageError(f"{policies[0]} is a routing policy, which only `agreement sweep` can run; sweep it anew")
    if not chosen:
        raise UsageError("nothing to compare: give --experts, --setting or another --model")
    check_settings(chosen, header) if not other else None
    n_ctx = int(run.header["identity"]["chunks"]["n_ctx"])
    options = EngineOptions(**run.header["identity"]["options"])
    with _locked_runner(header, options, n_ctx, run.path, in_process=in_process) as runner:
        vocabulary = runner.tokenise([])
        found = {
            "model": {
                "digest": run.header["identity"]["model"]["digest"] if other else digest,
                "vocabulary": vocabulary.digest,
                "n_vocab": vocabulary.n_vocab,
            },
            "engine": asdict(vocabulary.info),
            "options": asdict(vocabulary.options),
        }
        run.require_identity(found, ignore=("chunks", "recording", PASS_NAME))
        compare_settings(run, runner, header, chosen, listener, digest=digest if other else "")
        return finish(run)


def _as_begun(path: Path, options: EngineOptions, given: Request) -> tuple[EngineOptions, Request]:
    """Return options and wishes with the reading a run began with: memory at hand may have changed since, that not.

    Whatever else was asked for stays, so that a run with other options is refused.
    """
    if not (path / "run.json").exists():
        return options, given
    header = RunStore.open(path).header
    wishes = given.wishes or Wishes()
    if "reading" not in header["about"]:
        return options, given._replace(wishes=replace(wishes, begun="fitted"))
    begun = EngineOptions(**header["identity"]["options"])
    if wishes.n_ubatch is not None and wishes.n_ubatch < begun.n_ubatch:
        return options, given
    repack = begun.repack if wishes.repack is None else wishes.repack
    kept = replace(
        options,
        n_batch=begun.n_batch,
        n_ubatch=begun.n_ubatch,
        repack=repack,
        use_mmap=begun.use_mmap,
        use_mlock=begun.use_mlock,
    )
    passes = header["identity"]["recording"]["passes"] if given.passes == "auto" else given.passes
    wishes = replace(wishes, n_ubatch=begun.n_ubatch, repack=repack, begun="streamed")
    return kept, given._replace(passes=passes, wishes=wishes)


def _known_difference(path: Path) -> float | None:
    """Return the difference of router hook and override that a run has found before."""
    if not (path / "run.json").exists():
        return None
    found = RunStore.open(path).header["about"].get("preflight", {}).get("hook_difference")
    return None if found is None else float(found)


def _corpus(source: CorpusSource) -> Corpus:
    if isinstance(source, str | Path):
        return corpora.load(source)
    return source if isinstance(source, Corpus) else source()


def _open_or_create(path: Path, plan: Plan, *, resume: bool) -> RunStore:
    if resume and (path / "run.json").exists():
        run = RunStore.open(path)
        run.require_identity(plan.identity)
        return run
    return RunStore.create(path, plan.identity, plan.about, to_arrays(plan.chunks))


@contextlib.contextmanager
def _locked_runner(
    model: ModelFile, options: EngineOptions, n_ctx: int, path: Path, *, in_process: bool
) -> Iterator[Runner]:
    """Hold the run's lock, and a runner whose worker shares it.

    If no run came of it, because planning failed, the folder and those above it are left as they were found.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        with RunStore(path, {}).lock() as lock:
            log_path = path / "engine.log"
            had_log = log_path.exists()
            runner: Runner
            if in_process:
                runner = FullRunner(model, options, n_ctx)
            else:
                runner = worker = WorkerRunner(model, options, n_ctx, log_path=log_path, lock=lock)
                worker.prepare()
            try:
                yield runner
            finally:
                runner.close()
                if not (path / "run.json").exists() and not had_log:
                    log_path.unlink(missing_ok=True)
                if not (path / "run.json").exists():
                    (path / ".lock").unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):  # not empty: it holds a run now
            for folder in made:
                folder.rmdir()

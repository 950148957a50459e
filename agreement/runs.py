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
from agreement.checks import check_hook, load_within_memory
from agreement.chunks import to_arrays
from agreement.errors import IdentityError, StoreError, UsageError
from agreement.onepass import PASS_NAME
from agreement.plan import ChunkOptions, Passes, Plan, check_settings, is_policy, is_routing, make_plan, setting_facts
from agreement.preflight import Preflight
from agreement.recording import LogitsMode, Progress, load_chunks
from agreement.records import Corpus, EngineOptions, ModelFile, Report, Setting
from agreement.runner import FullRunner
from agreement.settings import BASELINE, experts_setting, with_model
from agreement.settings import noise_floor as floor_setting
from agreement.store import BASELINE_PASS, RunStore, refuse_foreign
from agreement.streaming import ReadingPlan, Wishes
from agreement.streaming.shapes import PAGES_BYTES
from agreement.summary import READING, READING_BEGUN, finish
from agreement.workers.client import Runner, WorkerRunner


@dataclass(frozen=True)
class Listener:
    """What wants to know how a run goes; every call is optional.

    Attributes:
        plan: Called before anything is written; once more if memory was too little for the first plan.
        preflight: Called when the engine has been found stable.
        passes: Called before each pass with its name and its number of chunks.
        progress: Called after each block of chunks.
    """

    plan: Callable[[Plan], None] = lambda _plan: None
    preflight: Callable[[Preflight], None] = lambda _result: None
    passes: Callable[[str, int], None] = lambda _name, _chunks: None
    progress: Callable[[Progress], None] = lambda _progress: None


SILENT = Listener()

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
    with prepared(arguments._replace(keep_recording=keep_recording), chosen) as (run, runner, plan):
        streams = not plan.reading.fits and not _is_complete(run, plan)
        if streams:
            run.add_timing({"pass": READING_BEGUN})
        if plan.passes == "one":
            _one_pass(run, runner, plan, listener)
        else:
            _baseline(run, runner, plan, listener)
        _settings(run, runner, plan.model, chosen, listener)
        if streams:
            _note_reading(run, runner, plan.reading)
        return finish(run)


def record(
    model: str | Path,
    corpus: CorpusSource,
    out: str | Path,
    *,
    chunks: ChunkOptions | None = None,
    logits: LogitsMode = "full",
    options: EngineOptions | None = None,
    resume: bool = False,
    in_process: bool = False,
    listener: Listener = SILENT,
) -> RunStore:
    """Record the baseline alone: the first half of `sweep`, with the same arguments; returns the run."""
    arguments = Request(model, corpus, out, chunks, logits, options, "separate", resume, in_process, listener)
    with prepared(arguments, ()) as (run, runner, plan):
        _baseline(run, runner, plan, listener)
        return run


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


@contextlib.contextmanager
def prepared(given: Request, settings: tuple[Setting, ...]) -> Iterator[tuple[RunStore, Runner, Plan]]:
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
        plan = planned(wishes=wishes)
        plan = check_hook(plan, runner, given.passes, known=_known_difference(path))
        given.listener.plan(plan)
        if not (path / "run.json").exists():  # else its micro-batch is settled
            found = load_within_memory(plan, runner, lambda most: planned(wishes=replace(wishes, n_ubatch=most)))
            if found is not plan:
                given.listener.plan(found)
            plan = found
        yield _open_or_create(path, plan, resume=given.resume), runner, plan


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
    header = model_file.read_model_file(model or run.header["about"]["model"]["path"])
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
        _settings(run, runner, header, chosen, listener, digest=digest if other else "")
        return finish(run)


def _as_begun(path: Path, options: EngineOptions, given: Request) -> tuple[EngineOptions, Request]:
    """Return the options and wishes a streamed run began with: memory at hand may have changed since, its plan not."""
    if not (path / "run.json").exists():
        return options, given
    header = RunStore.open(path).header
    wishes = given.wishes or Wishes()
    if "reading" not in header["about"] or wishes.n_ubatch is not None:
        return options, given
    begun = EngineOptions(**header["identity"]["options"])
    passes = header["identity"]["recording"]["passes"]
    return begun, given._replace(passes=passes, wishes=replace(wishes, n_ubatch=begun.n_ubatch))


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


def _one_pass(run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
    """Run every setting that is a routing policy in one pass; the others then need the recording it writes."""
    together = tuple(s for s in plan.settings if is_routing(s))
    recorded = plan.records_baseline
    if all(run.is_finished(s.name) for s in together) and (run.is_finished(BASELINE_PASS) or not recorded):
        return
    start_one_pass(run, runner, plan, listener)
    facts = runner.run_one_pass(
        run,
        together,
        logits=plan.logits,
        top_k=plan.top_k,
        write_baseline=recorded,
        progress=listener.progress,
    )
    finish_one_pass(run, facts)
    if recorded:
        run.finish_pass(BASELINE_PASS, {"proof": PASS_NAME})


def start_one_pass(run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
    """Note the settings in `run.json`, check the engine and announce the pass."""
    _register(run, plan.model, plan.settings)
    if plan.reading.fits:
        _preflight(run, runner, listener)
    else:
        runner.hold(plan.reading.hold_loading, PAGES_BYTES)
        together = tuple(s for s in plan.settings if is_routing(s))
        _keep_preflight(run, runner.check_one_pass(load_chunks(run), together), listener)
        runner.hold(plan.reading.hold, 0)
    listener.passes(PASS_NAME, plan.chunks.n_chunks)


def finish_one_pass(run: RunStore, facts: dict[str, dict[str, Any]]) -> None:
    """Note in `run.json` that the settings of a pass are complete."""
    for name, proof in facts.items():
        run.finish_pass(name, proof)


def _is_complete(run: RunStore, plan: Plan) -> bool:
    recorded = run.is_finished(BASELINE_PASS) or not plan.records_baseline
    return recorded and all(run.is_finished(s.name) for s in plan.settings)


def _note_reading(run: RunStore, runner: Runner, reading: ReadingPlan) -> None:
    """Put what was really read beside the plan, for a model that streams from disk."""
    n_bytes, memory = runner.counters()
    peak = None if memory is None else memory.peak
    run.add_timing({"pass": READING, "bytes": n_bytes, "bytes_planned": reading.bytes_expected, "peak": peak})


def _preflight(run: RunStore, runner: Runner, listener: Listener, *, short: bool = False) -> None:
    """Check that the engine repeats itself, and keep what was found."""
    _keep_preflight(run, runner.preflight(load_chunks(run), short=short), listener)


def _keep_preflight(run: RunStore, result: Preflight, listener: Listener) -> None:
    facts = asdict(result)
    del facts["tokens_per_second"]  # volatile, and run.json must not depend on the weather
    run.header["about"]["preflight"] = {**run.header["about"].get("preflight", {}), **facts}
    run.save_header()
    listener.preflight(result)


def _baseline(run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
    reading = plan.reading
    if not reading.fits and not _is_complete(run, plan):
        runner.hold(reading.hold, reading.bytes_beside + PAGES_BYTES)
    if run.is_finished(BASELINE_PASS):
        return
    _preflight(run, runner, listener, short=not reading.fits)
    listener.passes(BASELINE_PASS, int(run.header["identity"]["chunks"]["n_chunks"]))
    proof = runner.record_baseline(run, logits=plan.logits, top_k=plan.top_k, progress=listener.progress)
    run.finish_pass(BASELINE_PASS, proof)


def _register(run: RunStore, model: ModelFile, settings: Sequence[Setting], digest: str = "") -> None:
    """Note settings in `run.json`, and refuse one that is there already of another model file."""
    for setting in settings:
        facts = setting_facts(setting, model, digest)
        known = run.header["about"]["settings"].get(setting.name)
        if known is not None and known["digest"] != facts["digest"]:
            raise IdentityError(
                f"{run.path} already has {setting.name} of another model file (digest {known['digest']}, now "
                f"{facts['digest']}); give the file another name or start a new run"
            )
        if known is None:
            run.header["settings"].append(setting.name)
            run.header["about"]["settings"][setting.name] = facts
    run.save_header()


def _settings(
    run: RunStore,
    runner: Runner,
    model: ModelFile,
    settings: Sequence[Setting],
    listener: Listener,
    *,
    digest: str = "",
) -> None:
    """Run the settings that are not finished; `digest` is that of a model file other than the recorded one."""
    _register(run, model, settings, digest)
    n_chunks = int(run.header["identity"]["chunks"]["n_chunks"])
    for setting in settings:
        if run.is_finished(setting.name):
            continue
        listener.passes(setting.name, n_chunks)
        run.finish_pass(setting.name, runner.run_setting(run, setting, progress=listener.progress))


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

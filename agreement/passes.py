"""The passes of a run, one after the other, and what is tried when memory runs out under one.

In: a planned run and the runner for its passes.  Out: chunk files, and what `run.json` says of each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agreement.checks import without_hold
from agreement.errors import IdentityError, KilledForMemoryError
from agreement.model_file import model_digest
from agreement.onepass import PASS_NAME
from agreement.plan import Plan, is_routing, reading_plan, setting_facts
from agreement.preflight import Preflight
from agreement.recording import Progress, load_chunks
from agreement.records import EngineOptions, ModelFile, Setting
from agreement.store import BASELINE_PASS, RunStore
from agreement.streaming import Wishes
from agreement.streaming.shapes import PAGES_BYTES
from agreement.summary import READING, READING_BEGUN, READING_NOTE
from agreement.workers.client import Runner


@dataclass(frozen=True)
class Listener:
    """What wants to know how a run goes; every call is optional.

    Attributes:
        plan: Called before anything is written; once more if memory was too little for the first plan.
        preflight: Called when the engine has been found stable.
        passes: Called before each pass with its name and its number of chunks.
        progress: Called after each block of chunks.
        note: Called with one line on what goes otherwise than planned.
    """

    plan: Callable[[Plan], None] = lambda _plan: None
    preflight: Callable[[Preflight], None] = lambda _result: None
    passes: Callable[[str, int], None] = lambda _name, _chunks: None
    progress: Callable[[Progress], None] = lambda _progress: None
    note: Callable[[str], None] = lambda _text: None


SILENT = Listener()


def carry_out(run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
    """Run the baseline and every setting of a plan; what is there already is kept.

    Where the system kills the engine's process for memory while part of the model is held, its passes go on once more
    with nothing held: that changes no logit.

    Raises:
        KilledForMemoryError: With nothing held, or a model that should have stayed in memory.
        StoreError: Everything is there, but a chunk of the recording is damaged.
    """
    complete = is_complete(run, plan)
    if complete and plan.records_baseline:
        run.verify(BASELINE_PASS)  # nobody else would look at it again
    streams = not plan.reading.fits and not complete
    if streams:
        begin_reading(run)
    try:
        _passes(run, runner, plan, listener)
    except KilledForMemoryError as error:
        if not streams or not plan.reading.hold:
            raise
        _passes(run, runner, nothing_held(run, plan, error, listener), listener)
    if streams:
        note_reading(run, runner, plan)


def _passes(run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
    if plan.passes == "one":
        _one_pass(run, runner, plan, listener)
    else:
        record_baseline(run, runner, plan, listener)
    run_settings(run, runner, plan.model, plan.settings, listener)


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
        _hold(run, runner, plan, listener)
        together = tuple(s for s in plan.settings if is_routing(s))
        _keep_preflight(run, runner.check_one_pass(load_chunks(run), together), listener)
    listener.passes(PASS_NAME, plan.chunks.n_chunks)


def finish_one_pass(run: RunStore, facts: dict[str, dict[str, Any]]) -> None:
    """Note in `run.json` that the settings of a pass are complete."""
    for name, proof in facts.items():
        run.finish_pass(name, proof)


def is_complete(run: RunStore, plan: Plan) -> bool:
    """Say whether nothing of a plan is left to run."""
    recorded = run.is_finished(BASELINE_PASS) or not plan.records_baseline
    return recorded and all(run.is_finished(s.name) for s in plan.settings)


def _hold(run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
    """Hold as much of the file as the passes leave room for."""
    _note(run, runner.hold(plan.reading.hold, plan.reading.bytes_beside + PAGES_BYTES), listener)


def _note(run: RunStore, text: str, listener: Listener) -> None:
    """Tell and keep one line on what goes otherwise than planned; nothing for an empty one."""
    if text:
        listener.note(text)
        run.add_timing({"pass": READING_NOTE, "text": text})


def begin_reading(run: RunStore) -> None:
    """Say that a start reads from disk; one that ends says how much with `note_reading`."""
    run.add_timing({"pass": READING_BEGUN})


def note_reading(run: RunStore, runner: Runner, plan: Plan, *, n_chunks: int | None = None) -> int | None:
    """Put what was really read and taken beside the plan, for a model that streams from disk.

    Args:
        run: The run.
        runner: Whose process counted.
        plan: The plan.
        n_chunks: Chunks that are there now, where that may be fewer than planned.

    Returns:
        Bytes read, None where the system does not say.
    """
    found, reading = runner.counters(), plan.reading
    for text in found.notes:  # told with the progress already
        run.add_timing({"pass": READING_NOTE, "text": text})
    run.add_timing(
        {
            "pass": READING,
            "bytes": found.bytes_read,
            "bytes_planned": reading.bytes_expected,
            "seconds_planned": round(reading.seconds_reading, 1),
            "peak": found.peak,
            "beside": found.beside,
            "beside_planned": reading.activations,
            **({} if n_chunks is None else {"n_chunks": n_chunks}),
        }
    )
    return found.bytes_read


def _preflight(run: RunStore, runner: Runner, listener: Listener, *, short: bool = False) -> None:
    """Check that the engine repeats itself, and keep what was found."""
    _keep_preflight(run, runner.preflight(load_chunks(run), short=short), listener)


def _keep_preflight(run: RunStore, result: Preflight, listener: Listener) -> None:
    known = run.header["about"].get("preflight", {})
    if "n_positions" not in known:  # a resumed run keeps what it began with, whatever memory there is now
        facts = asdict(result)
        del facts["tokens_per_second"]  # volatile, and run.json must not depend on the weather
        run.header["about"]["preflight"] = {**known, **facts}
        run.save_header()
    listener.preflight(result)


def record_baseline(run: RunStore, runner: Runner, plan: Plan, listener: Listener) -> None:
    """Record the baseline, unless that is done."""
    reading = plan.reading
    if not reading.fits and not is_complete(run, plan):
        _hold(run, runner, plan, listener)
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


def _require_unchanged(run: RunStore, model: ModelFile, digest: str) -> None:
    """Refuse to load a file that was replaced since the run began: its scores would be of two models."""
    if model_digest(model) != (digest or run.header["identity"]["model"]["digest"]):
        raise IdentityError(
            f"{model.path} has changed since the run began; bring the first file back and --resume, or start a new run "
            "with another -o"
        )


def run_settings(
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
        _require_unchanged(run, model, digest)
        listener.passes(setting.name, n_chunks)
        run.finish_pass(setting.name, runner.run_setting(run, setting, progress=listener.progress))


def compare_settings(
    run: RunStore,
    runner: Runner,
    model: ModelFile,
    settings: Sequence[Setting],
    listener: Listener,
    *,
    digest: str = "",
) -> None:
    """Score settings against a recording, with its micro-batch; of a model that streams hold what memory leaves.

    Raises:
        KilledForMemoryError: With nothing held.
    """
    held = _hold_as_recorded(run, runner, model, settings, listener) if "reading" in run.header["about"] else 0
    try:
        run_settings(run, runner, model, settings, listener, digest=digest)
    except KilledForMemoryError as error:
        if not held:
            raise
        _note(run, without_hold(error), listener)  # what was held went with the process
        run_settings(run, runner, model, settings, listener, digest=digest)


def _hold_as_recorded(
    run: RunStore, runner: Runner, model: ModelFile, settings: Sequence[Setting], listener: Listener
) -> int:
    identity = run.header["identity"]
    options = EngineOptions(**identity["options"])
    wishes = Wishes(n_ubatch=options.n_ubatch, passes="separate", begun="streamed")
    logits = identity["recording"]["logits"]
    reading = reading_plan(model, runner, options, load_chunks(run), settings, wishes, logits)
    if reading.fits:
        return 0
    _note(run, runner.hold(reading.hold, reading.bytes_beside + PAGES_BYTES), listener)
    return reading.hold


def nothing_held(run: RunStore, plan: Plan, error: KilledForMemoryError, listener: Listener) -> Plan:
    """Return the plan with nothing held, after the process that held it was killed for memory; tell and keep why."""
    _note(run, without_hold(error), listener)
    begin_reading(run)
    return replace(plan, reading=replace(plan.reading, hold=0))

"""From a run directory to its report: sums by cluster, what was run, speeds.

In: a run directory, or a `report.json` kept of one.  Out: `RunCounts` and `Report`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from agreement.analysis import (
    DEFAULT_CONFIDENCE,
    RunCounts,
    SettingCounts,
    by_cluster,
    counts_from_json,
    counts_to_json,
    make_report,
)
from agreement.intervals import Method
from agreement.model_file import size_text
from agreement.recording import load_chunks, stored_scores
from agreement.records import Counts, Report
from agreement.scoring import count_chunk
from agreement.store import RunStore, read_json

_GIVE_A_RUN = "give a run directory, or the report.json of one"
# Entries of the timings: bytes read from disk, a start that will say so when it ends, and what went otherwise than
# planned.
READING, READING_BEGUN, READING_NOTE = "reading", "reading begun", "reading note"


def load_report(
    path: str | Path, *, confidence: float = DEFAULT_CONFIDENCE, method: Method = "auto", speeds: bool = True
) -> Report:
    """Return the report of a run directory, or of a `report.json` by itself."""
    counts, measured = load_counts(path)
    report = make_report(counts, confidence=confidence, method=method, speeds=measured if speeds else None)
    return report if Path(path).is_file() or not speeds else _with_reading(report, RunStore.open(Path(path)))


def load_counts(path: str | Path) -> tuple[RunCounts, dict[str, float]]:
    """Return a run's counts by cluster, and tokens per second by setting where they were measured."""
    place = Path(path)
    if place.is_file():
        return counts_from_json(read_json(place, "there is no such report", _GIVE_A_RUN), str(place)), {}
    run = RunStore.open(place)
    return counts_from_json(run.read_report(), str(place / "report.json")), speeds_of(run)


def finish(run: RunStore) -> Report:
    """Sum up every finished setting of a run, write its `report.json` and return the report."""
    counts = summarise(run)
    run.write_report(counts_to_json(counts))
    return _with_reading(make_report(counts, speeds=speeds_of(run)), run)


def _with_reading(report: Report, run: RunStore) -> Report:
    """Put what was really read and taken beside the plan; like speeds it is not in `report.json`."""
    planned = report.facts.get(READING)
    if planned is None:
        return report
    entries = run.read_timings()
    parts = (planned, _bytes_read(entries), _taken(entries))
    notes = dict.fromkeys(str(e.get("text")) for e in entries if e.get("pass") == READING_NOTE)
    facts = {**report.facts, READING: ", ".join(part for part in parts if part)}
    return replace(report, facts=facts, notes=(*report.notes, *notes))


def _taken(entries: list[dict[str, Any]]) -> str:
    """Return the memory taken beside the weights against the plan's figure, for people; empty if not known."""
    taken = [(int(e["beside"]), int(e["beside_planned"])) for e in entries if e.get("beside") is not None]
    if not taken:
        return ""
    most, planned = max(taken)
    return f"{size_text(most)} of memory beside the weights, planned {size_text(planned)}"


def _bytes_read(entries: list[dict[str, Any]]) -> str:
    """Return what was read from disk in all starts of a run, for people; empty where none has ended."""
    ended = [e.get("bytes") for e in entries if e.get("pass") == READING]
    counted = [int(n) for n in ended if n is not None]
    if len(counted) < len(ended):
        return "really read: not known, the system does not say"
    # What a killed start read is not known.
    killed = sum(e.get("pass") == READING_BEGUN for e in entries) > len(ended)
    return f"really read {'at least ' if killed else ''}{size_text(sum(counted))}" if counted else ""


def summarise(run: RunStore) -> RunCounts:
    """Add up the position scores of every finished setting, by cluster."""
    chunks = load_chunks(run)
    about, identity = run.header["about"], run.header["identity"]
    settings = []
    for name in run.header["settings"]:
        if not run.is_finished(name):
            continue
        per_chunk = [count_chunk(stored_scores(run, name, i)) for i in range(chunks.n_chunks)]
        counts = by_cluster(per_chunk, [int(c) for c in chunks.cluster], len(chunks.cluster_names))
        facts = about["settings"][name]
        mean = run.header["passes"][name].get("experts_mean")
        kept = (f"keeps {mean:.3f} experts a token and layer on average",) if facts["experts"] is None and mean else ()
        warnings = (*facts.get("warnings", ()), *kept, *_ambiguity(counts))
        expert_bytes = facts["expert_bytes"]
        if expert_bytes is None and mean and about["model"].get("expert_bytes"):
            expert_bytes = round(about["model"]["expert_bytes"] * mean / about["model"]["n_expert_used"])
        settings.append(SettingCounts(name, facts["experts"], expert_bytes, counts, warnings))
    return RunCounts(
        title=run.path.name,
        facts=_facts(about, identity),
        clusters=chunks.cluster_names,
        settings=tuple(settings),
        notes=(*about.get("notes", ()), *about["model"]["warnings"], *about["corpus"]["notes"], *chunks.notes),
        seed=chunks.seed,
        baseline_expert_bytes=about["model"].get("expert_bytes"),
        chunks_fingerprint=chunks.fingerprint,
    )


def _ambiguity(counts: tuple[Counts, ...]) -> tuple[str, ...]:
    """Say how far the agreement may be off where the numbers came from codes."""
    total = sum(counts, Counts())
    if not total.n_ambiguous:
        return ()
    share = 100 * total.n_ambiguous / total.n
    where = f"at {total.n_ambiguous} of {total.n} positions the two best tokens share a code"
    return (f"quantised: {where}, so agreement may be off by up to {share:.2f} points",)


def speeds_of(run: RunStore) -> dict[str, float]:
    """Return tokens per second of each pass, scoring included and loading not; resumed parts are added up."""
    tokens: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for entry in run.read_timings():
        name = str(entry.get("pass"))
        tokens[name] = tokens.get(name, 0.0) + float(entry.get("tokens", 0))
        seconds[name] = seconds.get(name, 0.0) + float(entry.get("seconds", 0))
    return {name: tokens[name] / seconds[name] for name in tokens if seconds[name] > 0}


def _facts(about: dict[str, Any], identity: dict[str, Any]) -> dict[str, str]:
    model, corpus, chunks, o = about["model"], about["corpus"], identity["chunks"], identity["options"]
    scored = (
        f"{chunks['n_chunks']} of {chunks['n_ctx']} tokens, {chunks['chunking']}, scored "
        f"[{chunks['first']}, {chunks['last']})"
    )
    if not o:  # from logits files, which say nothing of model and engine
        return {"base": model["name"], "chunks": scored, "engine": f"{identity['engine']['binding']} (logits files)"}
    used = model["n_expert_used"] if model["n_expert_used"] is not None else "a number a layer"
    preflight = about.get("preflight", {})
    shape = preflight.get("shape_max_difference")
    facts = {
        "model": f"{model['name']} ({model['architecture']}, {used} of {model['n_expert']} experts)",
        "corpus": f"{corpus['name']} ({corpus['documents']} documents)",
        "chunks": f"{scored}, seed {chunks['seed']}",
        "engine": (
            f"{identity['engine']['binding']}, -t {o['n_threads']} -b {o['n_batch']} -ub {o['n_ubatch']} "
            f"-fa {o['flash_attn']}{'' if o['repack'] else ' --no-repack'}"
        ),
        "logits": f"{identity['recording']['logits']}, top {identity['recording']['top_k']} exact",
    }
    if "reading_bytes" in about:
        facts[READING] = f"planned {size_text(about['reading_bytes'])}"
    if shape is not None:
        facts["preflight"] = (
            f"repeats itself to the bit; another batch shape moves a logit by up to {shape:.2g} "
            f"and {preflight['shape_disagreement']:.2%} of top tokens"
        )
        if preflight.get("hook_difference") == 0:
            where = "a small sample of the model" if "reading_bytes" in about else "chunk 0"
            facts["preflight"] += f"; the router hook gives an override's logits to the bit ({where})"
    return facts

"""Between llama-perplexity's logits files and runs.

In: a base file and files of settings over the same text.  Out: a run directory that `table`, `gate` and `breakdown`
read like any other, marked as quantised.  And back: the recording of a run as a base file for the C++ tool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agreement.chunks import build, to_arrays
from agreement.errors import LogitsFileError, NoEffectError, SettingError, StoreError, UsageError
from agreement.kld import (
    LogitsFile,
    QuantisedRows,
    ScoredChunk,
    open_logits_file,
    quantise,
    read_chunk,
    score_files,
    write_logits_file,
)
from agreement.recording import baseline_rows, load_chunks, record_arrays
from agreement.records import ChunkSet, Report, Setting
from agreement.scoring import FULL_TOP_K, BaselineRows, quantised_rows
from agreement.settings import parse_setting
from agreement.store import BASELINE_PASS, RUN_FILE, RunStore, refuse_foreign
from agreement.summary import finish

ProgressCall = Callable[[str, int, int], None]
ENGINE_NAME = "logits file of llama-perplexity"


def _ignore(_name: str, _done: int, _total: int) -> None:
    """Listen to nothing."""


def setting_of_file(name: str) -> Setting:
    """Return the setting that a file is called: `experts=6` and the like keep their meaning, other names are labels."""
    try:
        return parse_setting(name)
    except SettingError:  # any other name is a label
        return Setting(name=name)


def import_files(
    base: str | Path,
    tests: Sequence[tuple[str, str | Path]],
    out: str | Path,
    *,
    allow_truncated: bool = False,
    keep_logits: bool = True,
    progress: ProgressCall = _ignore,
) -> Report:
    """Make a run from logits files, scoring each setting's file against the base; no engine is involved.

    Args:
        base: The baseline's file.
        tests: `(name, path)` of each setting's file; a name such as `experts=6` gives the row its number of experts.
        out: The run directory to make.
        allow_truncated: Use the whole chunks of files that were cut short.
        keep_logits: Keep the base's distribution in the run, so that it can be exported again; its size is the file's.
        progress: Called with a pass's name, chunks done and chunks in all.

    Raises:
        LogitsFileError: A file is malformed, cut short, or over other tokens than the base.
        NoEffectError: A setting's file holds the same bits as the base.
        StoreError: The run directory cannot be made.  After any error nothing is left of it.
        UsageError: Names that are empty or not different.
    """
    settings = [(setting_of_file(name), Path(path)) for name, path in tests]
    names = [s.name for s, _ in settings]
    if "" in names:
        raise UsageError("a setting's name is empty; give each file one, e.g. --name experts=6")
    if len(set(names)) != len(names) or BASELINE_PASS in names:
        raise UsageError(f"settings {', '.join(names)}: every file needs a name of its own; give them with --name")
    base_file = open_logits_file(base, allow_truncated=allow_truncated)
    files = [(s, open_logits_file(path, allow_truncated=allow_truncated)) for s, path in settings]
    n_chunks = min([base_file.n_chunk, *(f.n_chunk for _, f in files)])
    path = Path(out)
    refuse_foreign(path)  # before a lock is left in somebody's folder
    if (path / RUN_FILE).exists():
        raise StoreError(f"{path} already holds a run, which an import cannot add to; choose another -o")
    with RunStore(path, {}).lock():
        run = RunStore.create(path, *_description(base_file, n_chunks), to_arrays(_chunks(base_file, n_chunks)))
        try:
            _import_base(run, base_file, n_chunks, keep_logits=keep_logits, progress=progress)
            for setting, file in files:
                _import_setting(run, base_file, setting, file, n_chunks, progress)
            return finish(run)
        except BaseException:  # Ctrl-C and a full disk, too: an import does not resume
            _discard(path)
            raise


def _discard(path: Path) -> None:
    """Remove what an import that failed has written: it has nothing that cannot be imported again."""
    for file in sorted(path.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            file.rmdir() if file.is_dir() else file.unlink()
    with contextlib.suppress(OSError):
        path.rmdir()


def _chunks(file: LogitsFile, n_chunks: int) -> ChunkSet:
    cut_short = file.n_chunk_claimed - n_chunks
    return build(
        tokens=file.tokens[:n_chunks].copy(),
        targets=file.targets[:n_chunks].copy(),
        cluster=np.arange(n_chunks, dtype=np.int32),
        cluster_names=[f"chunk-{i}" for i in range(n_chunks)],
        first=file.first,
        last=file.n_ctx - 1,
        chunking="llama-perplexity",
        seed=0,
        notes=[f"{cut_short} of {file.n_chunk_claimed} chunks are missing from the files"] if cut_short else [],
    )


def _description(file: LogitsFile, n_chunks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return identity and about of a run made from files, which say little of where they come from."""
    chunks = _chunks(file, n_chunks)
    identity = {
        "model": {"digest": "not in the file", "vocabulary": "not in the file", "n_vocab": file.n_vocab},
        "engine": {"name": ENGINE_NAME, "binding": f"written by {file.writer}", "version": ""},
        "options": {},
        "chunks": {
            "fingerprint": chunks.fingerprint,
            "chunking": chunks.chunking,
            "n_chunks": n_chunks,
            "n_ctx": file.n_ctx,
            "first": chunks.first,
            "last": chunks.last,
            "seed": 0,
        },
        "recording": {"logits": "quantised by the tool", "top_k": min(FULL_TOP_K, file.n_vocab)},
    }
    about = {
        "model": {"path": "", "name": file.path.name, "warnings": []},
        "corpus": {"name": "the text of the file", "documents": 1, "skipped": {}, "notes": []},
        "chunks": {"notes": list(chunks.notes)},
        "settings": {},
    }
    return identity, about


def _import_base(run: RunStore, file: LogitsFile, n_chunks: int, *, keep_logits: bool, progress: ProgressCall) -> None:
    for index in range(n_chunks):
        chunk = read_chunk(file, index)
        rows = quantised_rows(
            np.ascontiguousarray(chunk.rows.codes), chunk.rows.min_log_prob, chunk.rows.scale, chunk.targets
        )
        arrays = record_arrays(rows)
        if not keep_logits:
            for name in ("codes", "low", "step"):
                del arrays[name]
        run.write_chunk(BASELINE_PASS, index, arrays, {"n_vocab": file.n_vocab, "logits_xxh3": ""})
        progress(BASELINE_PASS, index + 1, n_chunks)
    run.finish_pass(BASELINE_PASS, {"file": file.path.name, "writer": file.writer})


def _import_setting(
    run: RunStore, base: LogitsFile, setting: Setting, file: LogitsFile, n_chunks: int, progress: ProgressCall
) -> None:
    identical = True
    rounding, clipped, clipped_targets = 0.0, 0.0, 0
    with contextlib.closing(score_files(base, file)) as scored:
        chunk: ScoredChunk
        for chunk in scored:
            if chunk.index >= n_chunks:
                break
            identical &= chunk.identical
            rounding += float(chunk.kld_rounding.sum(dtype=np.float64))
            clipped = max(clipped, float(chunk.clipped_mass.max(initial=0)))
            clipped_targets += max(chunk.n_base_targets_clipped, chunk.n_test_targets_clipped)
            run.write_chunk(setting.name, chunk.index, record_arrays(chunk.scores), {"logits_xxh3": ""})
            progress(setting.name, chunk.index + 1, n_chunks)
    if identical:
        raise NoEffectError(
            f"{file.path} holds the same bits as {base.path} in every row: {setting.name} had no effect; "
            "run the tool with -v and look for the override's line"
        )
    n = n_chunks * base.n_rows
    warnings = [f"KLD from two quantised files: its mean is within {rounding / n:.2g} nats of that of exact logits"]
    if clipped > 0:
        warnings.append(
            f"up to {clipped:.2g} of the baseline's probability is on tokens that this file clips: KLD may be larger"
        )
    if clipped_targets:
        warnings.append(
            f"at {clipped_targets} positions the true token is clipped in a file: perplexities are lower bounds there"
        )
    facts = {"experts": setting.experts, "expert_bytes": None, "overrides": [], "model": None, "warnings": warnings}
    run.header["settings"].append(setting.name)
    run.header["about"]["settings"][setting.name] = facts
    run.finish_pass(setting.name, {"file": file.path.name, "writer": file.writer})


def export_base(run_path: str | Path, out: str | Path, *, progress: ProgressCall = _ignore) -> int:
    """Write a run's recording as a base file that `llama-perplexity --kl-divergence` accepts.

    Log-probs that the run keeps exactly are rounded once, as the tool rounds them; the others have been rounded to
    the run's own codes before. The recording of an imported file comes out bit for bit as it went in.

    Returns:
        The size of the file, bytes.

    Raises:
        StoreError: The baseline is not complete, or keeps only the top.
        LogitsFileError: The run's chunks are not those that the tool can score, or the file cannot be written.
    """
    run = RunStore.open(Path(run_path))
    if Path(out).exists():
        raise LogitsFileError(f"{out} exists; give the name of a new file")
    run.require_chunks(BASELINE_PASS)
    if not run.is_finished(BASELINE_PASS):
        raise StoreError(f"{run_path} has no complete recording; finish it with --resume, or sweep with --record")
    chunks = load_chunks(run)
    if (chunks.first, chunks.last) != (chunks.n_ctx // 2, chunks.n_ctx - 1):
        raise LogitsFileError(
            f"{run_path}: scored [{chunks.first}, {chunks.last}), the tool scores [{chunks.n_ctx // 2}, "
            f"{chunks.n_ctx - 1}); record without --first"
        )

    def blocks() -> Iterator[QuantisedRows]:
        for index in range(chunks.n_chunks):
            if "codes" not in run.array_names(BASELINE_PASS, index):
                raise StoreError(f"{run_path}: the recording keeps only the top; record with --logits full to export")
            yield _tool_rows(baseline_rows(*run.read_chunk(BASELINE_PASS, index)))
            progress(BASELINE_PASS, index + 1, chunks.n_chunks)

    n_vocab = int(run.header["identity"]["model"]["n_vocab"])
    return write_logits_file(out, chunks.tokens, n_vocab, blocks())


def _tool_rows(rows: BaselineRows) -> QuantisedRows:
    if rows.codes is None or rows.step is None or rows.low is None:
        raise AssertionError("checked by the caller")
    if rows.ambiguous is not None:  # came from such a file
        return QuantisedRows(rows.codes, rows.step, rows.low)
    logprobs = np.multiply(rows.codes, rows.step[:, None], dtype=np.float32)
    logprobs += rows.low[:, None]
    np.put_along_axis(logprobs, rows.top_ids.astype(np.int64), rows.top_logprobs, axis=1)
    return quantise(logprobs)

"""Build llama.cpp's own `llama-perplexity` from the source of the installed llama-cpp-python, and run it.

The tool is the independent witness of this project: it writes and reads the same logits files, and prints the same
statistics from its own code. Comparing means something only if both run the same llama.cpp, so the source is the one
that the installed binding was built from. What flows out are frozen records parsed from what the tool prints.

    python tests/benchmarks/llama_perplexity.py            # builds if needed, prints the path of the program
    python tests/benchmarks/llama_perplexity.py --print    # prints the path, or exits with 1 if it is not built

Environment: `MOE_AGREEMENT_CACHE` is where source and build go (else `~/.cache/moe-agreement`);
`MOE_AGREEMENT_LLAMA_SOURCE` is an unpacked source package to use instead of downloading one; `CMAKE_ARGS` is passed
on, as the binding's own build does. Needs cmake and a C++ compiler; Ninja is used if it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROGRAM = "llama-perplexity.exe" if os.name == "nt" else "llama-perplexity"


class LlamaPerplexityError(RuntimeError):
    """The tool could not be built or run, or printed something else than expected."""


@dataclass(frozen=True)
class Figure:
    """A printed number and its printed standard error (None where the tool prints none)."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class BaseRun:
    """What a plain perplexity run printed.

    Attributes:
        ppl: `Final estimate: PPL`; None if the tool could not estimate its error.
        chunk_ppl: Running perplexity after each chunk.
        n_expert_used: What the engine's log says it uses.
        overrides: The log's `validate_override` lines, the text after the colon: the overrides that took.
        output: Everything printed, both streams.
    """

    ppl: Figure | None
    chunk_ppl: tuple[float, ...]
    n_expert_used: int | None
    overrides: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class RunningLine:
    """One line of the table that `--kl-divergence` prints: figures over the chunks so far, percentages as printed."""

    chunk: int
    ppl: Figure
    ln_ratio: Figure
    kld: Figure
    dp_rms_percent: Figure
    same_top_percent: Figure


@dataclass(frozen=True)
class KldRun:
    """What a `--kl-divergence` run printed.

    Attributes:
        lines: One a chunk.
        statistics: The closing tables by their printed label with single spaces, e.g. `Mean KLD`, `99.0% KLD`,
            `Same top p` (percentages as printed). Empty with fewer than 100 positions: the tool prints none then.
        n_expert_used: What the engine's log says it uses.
        overrides: The same as in `BaseRun`.
        output: Everything printed, both streams.
    """

    lines: tuple[RunningLine, ...]
    statistics: dict[str, Figure]
    n_expert_used: int | None
    overrides: tuple[str, ...]
    output: str


def cache_directory() -> Path:
    """Return the folder for the source and the build of the installed binding's version."""
    root = os.environ.get("MOE_AGREEMENT_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-agreement"
    return base / f"llama.cpp-{importlib.metadata.version('llama-cpp-python')}"


def built_program() -> Path | None:
    """Return the finished program, or None if `build` has not completed yet."""
    program = cache_directory() / "build" / "bin" / PROGRAM
    return program if (cache_directory() / "built").is_file() and program.is_file() else None


def build(jobs: int = 2) -> Path:
    """Return the program, downloading and building it first if needed (several minutes); progress goes to stderr.

    Raises:
        LlamaPerplexityError: A tool is missing, or a step failed.
    """
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        program = built_program()
        if program is None:
            source = _source(cache)
            _compile(source, cache / "build", jobs)
            (cache / "built").write_text(f"{source}\n", encoding="utf-8")
            program = built_program()
    if program is None:
        raise LlamaPerplexityError(f"the build ended without {PROGRAM} in {cache / 'build' / 'bin'}")
    return program


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two test runs do not build in the same folder."""
    with path.open("w", encoding="utf-8") as file:
        if os.name != "nt":
            import fcntl  # noqa: PLC0415 - not there on Windows

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _source(cache: Path) -> Path:
    """Return the unpacked source package, downloading it if there is none."""
    given = os.environ.get("MOE_AGREEMENT_LLAMA_SOURCE")
    if given:
        source = Path(given).resolve()
    else:
        found = [path.parent for path in cache.glob("source/*/CMakeLists.txt")]
        source = found[0] if found else _download(cache)
    if not (source / "vendor" / "llama.cpp" / "tools" / "perplexity").is_dir():
        raise LlamaPerplexityError(f"{source} has no vendor/llama.cpp/tools/perplexity; it is no source package")
    return source


def _download(cache: Path) -> Path:
    version = importlib.metadata.version("llama-cpp-python")
    package = f"llama-cpp-python=={version}"
    download = cache / "download"
    shutil.rmtree(download, ignore_errors=True)
    _step([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
           "--disable-pip-version-check", "--dest", str(download), package])  # fmt: skip
    archives = sorted(download.glob("*.tar.gz"))
    if len(archives) != 1:
        raise LlamaPerplexityError(f"pip left {len(archives)} source packages of {package} in {download}, not one")
    partial, whole = cache / "source.partial", cache / "source"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(whole, ignore_errors=True)
    with tarfile.open(archives[0]) as archive:
        archive.extractall(partial, filter="data")
    partial.rename(whole)  # a killed unpacking leaves no folder that looks complete
    (root,) = whole.iterdir()
    return root


def _compile(source: Path, build_directory: Path, jobs: int) -> None:
    if shutil.which("cmake") is None:
        raise LlamaPerplexityError("cmake is not installed; llama-perplexity cannot be built")
    # The binding's own top CMakeLists.txt sets the options its libraries are built with; only the tools are added.
    # llava would add the folder of tools/mtmd a second time.
    known = build_directory / "CMakeCache.txt"
    if known.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n" not in known.read_text(encoding="utf-8"):
        shutil.rmtree(build_directory)  # an unfinished build of another tree; cmake would refuse it
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAVA_BUILD=OFF", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=OFF",
               "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]  # fmt: skip
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    extra = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    _step(["cmake", "-S", str(source), "-B", str(build_directory), *generator, *options, *extra])
    _step(["cmake", "--build", str(build_directory), "--config", "Release", "--target", "llama-perplexity",
           "--parallel", str(jobs)])  # fmt: skip


def _step(command: Sequence[str]) -> None:
    """Run one step of the build, its output on our stderr."""
    sys.stderr.write(f"+ {shlex.join(command)}\n")
    sys.stderr.flush()
    code = subprocess.run(command, stdout=_stderr(), stderr=_stderr(), check=False).returncode
    if code != 0:
        raise LlamaPerplexityError(f"exit code {code} from: {shlex.join(command)}")


def _stderr() -> IO[str] | int:
    """Return stderr where it is a real file; under a test runner it may not be."""
    try:
        sys.stderr.fileno()
    except OSError:
        return subprocess.DEVNULL
    return sys.stderr


def run_base(
    model: Path, text_file: Path, n_ctx: int, chunks: int, *, base_file: Path | None = None, extra: Sequence[str] = ()
) -> BaseRun:
    """Run the tool over a text; with `base_file` it also writes its logits file there.

    Args:
        model: A GGUF file.
        text_file: The text; it must give at least two windows.
        n_ctx: Tokens a window.
        chunks: Windows to run, -1 for all.
        base_file: Where the logits file goes.
        extra: Further arguments, e.g. `("--override-kv", "qwen3moe.expert_used_count=int:6")`.

    Raises:
        LlamaPerplexityError: The tool is not built, failed, or printed no running perplexity.
    """
    arguments = ["-f", str(text_file), "-c", str(n_ctx), "--chunks", str(chunks)]
    if base_file is not None:
        arguments += ["--kl-divergence-base", str(base_file)]
    return parse_base(_run(model, [*arguments, *extra], _base_is_complete))


def run_kld(model: Path, base_file: Path, n_ctx: int, *, extra: Sequence[str] = ()) -> KldRun:
    """Compare `model` (as `extra` changes it) with a logits file; the text comes from the file's own tokens.

    Raises:
        LlamaPerplexityError: The tool is not built, failed, or printed no line of results.
    """
    arguments = ["-c", str(n_ctx), "--kl-divergence", "--kl-divergence-base", str(base_file)]

    def complete(output: str) -> bool:
        n_chunk = _announced_chunks(output)
        closing = n_chunk * (n_ctx - 1 - n_ctx // 2) < 100 or "Same top p:" in output
        return closing and len(_ROW.findall(output)) == n_chunk

    return parse_kld(_run(model, [*arguments, *extra], complete))


def _base_is_complete(output: str) -> bool:
    return "Final estimate: PPL" in output or "Unexpected negative standard deviation" in output


def _announced_chunks(output: str) -> int:
    found = re.search(r"computing over (\d+) chunks", output)
    return int(found[1]) if found else -1


_ATTEMPTS = 12


def _run(model: Path, arguments: Sequence[str], complete: Callable[[str], bool]) -> str:
    """Run the tool until its output is complete.

    The tool prints from a thread that it does not wait for at its end: about 4 runs in 10 of a tiny model lose their
    last lines (seen with llama.cpp 0.5.0), while the files it writes are whole.
    """
    program = built_program()
    if program is None:
        raise LlamaPerplexityError("llama-perplexity is not built; run: python tests/benchmarks/llama_perplexity.py")
    # -lv 4: the proof that an override took is an INFO line of the library, hidden by default.
    command = [str(program), "-m", str(model), "-lv", "4", "--no-warmup", *arguments]
    for _ in range(_ATTEMPTS):
        done = subprocess.run(command, capture_output=True, check=False)
        output = (done.stdout + done.stderr).decode("utf-8", errors="replace")
        tail = " | ".join(output.strip().splitlines()[-5:])
        if done.returncode != 0:
            raise LlamaPerplexityError(f"exit code {done.returncode} from {shlex.join(command)}: {tail}")
        if complete(output):
            return output
    raise LlamaPerplexityError(f"incomplete output in {_ATTEMPTS} runs of {shlex.join(command)}: {tail}")


_NUMBER = r"(-?\d+(?:\.\d+)?|-?nan|-?inf)"
_PAIR = rf"{_NUMBER} ±\s+{_NUMBER}"
_ROW = re.compile(rf"^\s*(\d+)\s+{_PAIR}\s+{_PAIR}\s+{_PAIR}\s+{_PAIR} %\s+{_PAIR} %\s*$", re.MULTILINE)


def parse_base(output: str) -> BaseRun:
    """Parse what a plain run printed.

    Raises:
        LlamaPerplexityError: There is no running perplexity in it.
    """
    chunk_ppl = tuple(float(value) for _, value in re.findall(rf"\[(\d+)\]{_NUMBER},", output))
    if not chunk_ppl:
        raise LlamaPerplexityError(f"llama-perplexity printed no perplexity: {output.strip()[-300:]}")
    final = re.search(rf"Final estimate: PPL = {_NUMBER} \+/- {_NUMBER}", output)
    ppl = Figure(float(final[1]), float(final[2])) if final else None
    return BaseRun(ppl, chunk_ppl, _n_expert_used(output), _overrides(output), output)


def parse_kld(output: str) -> KldRun:
    """Parse what a `--kl-divergence` run printed.

    Raises:
        LlamaPerplexityError: There is no line of results in it.
    """
    lines = tuple(_running_line(match) for match in _ROW.finditer(output))
    if not lines:
        raise LlamaPerplexityError(f"llama-perplexity printed no comparison: {output.strip()[-300:]}")
    entry = re.compile(rf"^\s*([^:\n]*\S)\s*:\s+{_NUMBER}\s*%?(?: ±\s+{_NUMBER}\s*%?)?\s*$", re.MULTILINE)
    statistics: dict[str, Figure] = {}
    closing = output.find("====== Perplexity statistics")
    for match in entry.finditer(output[closing:] if closing >= 0 else ""):
        label = " ".join(match[1].split())
        if re.search(r"PPL|KLD|Δp|Same top p", label):
            statistics[label] = Figure(float(match[2]), float(match[3]) if match[3] else None)
    return KldRun(lines, statistics, _n_expert_used(output), _overrides(output), output)


def _running_line(match: re.Match[str]) -> RunningLine:
    values = [float(value) for value in match.groups()[1:]]
    figures = [Figure(value, error) for value, error in zip(values[::2], values[1::2], strict=True)]
    return RunningLine(int(match[1]), *figures)


def _n_expert_used(output: str) -> int | None:
    found = re.search(r"n_expert_used\s*=\s*(\d+)", output)
    return int(found[1]) if found else None


def _overrides(output: str) -> tuple[str, ...]:
    lines = re.findall(r"validate_override: (.*)", output)
    # The log puts a time and a level before each piece of a line; a second load (of `-fit`) says everything twice.
    return tuple(dict.fromkeys(re.sub(r"\d+\.\d\d\.\d{3}\.\d{3} [A-Z] ", "", line).strip() for line in lines))


def main() -> int:
    """Build, or say where the built program is."""
    parser = argparse.ArgumentParser(description="Build llama-perplexity of the installed llama-cpp-python.")
    parser.add_argument("--print", action="store_true", dest="only_print", help="do not build")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1), help="parallel compilers")
    options = parser.parse_args()
    try:
        program = built_program() if options.only_print else build(options.jobs)
    except LlamaPerplexityError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if program is None:
        sys.stderr.write(f"not built yet in {cache_directory()}\n")
        return 1
    print(program)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Our reader, writer and quantiser against llama.cpp's own `llama-perplexity`, and the parser of what it prints.

Tests that run the tool are skipped where it is not built: python tests/benchmarks/llama_perplexity.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import models
import numpy as np
import pytest
from benchmarks import llama_perplexity
from benchmarks.llama_perplexity import Figure

from agreement import kld

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agreement.records import Float32Array

GOLD = Path(__file__).parent / "gold" / "kld"
N_CTX, N_VOCAB = 64, 301
ONE_CHUNK_A_BATCH = ("-t", "1", "-b", str(N_CTX), "-ub", str(N_CTX))
SIX = ("--override-kv", "granitemoe.expert_used_count=int:6")

needs_tool = pytest.mark.skipif(
    llama_perplexity.built_program() is None, reason="build it: python tests/benchmarks/llama_perplexity.py"
)


# ------------------------------------------------------------------------------------------- what the tool prints


def test_closing_tables() -> None:
    run = llama_perplexity.parse_kld((GOLD / "experts-6.txt").read_text(encoding="utf-8"))
    assert [line.chunk for line in run.lines] == [1, 2, 3, 4]
    assert run.lines[3].kld == Figure(0.11182, 0.01069)
    assert run.lines[3].ppl == Figure(4221.1535, 954.3548)
    assert run.statistics["Mean PPL(base)"] == Figure(4676.579814, 1052.234911)
    assert run.statistics["Mean ln(PPL(Q)/PPL(base))"] == Figure(-0.102459, 0.046938)
    assert run.statistics["Mean KLD"] == Figure(0.111823, 0.010688)
    assert run.statistics["5.0% KLD"] == Figure(0.012770)
    assert run.statistics["Minimum Δp"] == Figure(-13.409)
    assert run.statistics["RMS Δp"] == Figure(1.285, 0.567)
    assert run.statistics["Same top p"] == Figure(75.806, 3.861)
    assert len(run.statistics) == 34


def test_lines_of_the_log() -> None:
    output = (
        "[1]6.5281,[2]7.0194,\n"
        "0.00.002.417 I validate_override: Using metadata override (  int) 'qwen3moe.expert_used_count' = "
        "0.00.002.417 I 6\n"
        "0.00.003.693 I print_info: n_expert_used         = 6\n"
        "0.03.000.000 I Final estimate: PPL = 7.0194 +/- 0.12345\n"
    )
    run = llama_perplexity.parse_base(output)
    assert run.chunk_ppl == (6.5281, 7.0194)
    assert run.ppl == Figure(7.0194, 0.12345)
    assert run.n_expert_used == 6
    assert run.overrides == ("Using metadata override (  int) 'qwen3moe.expert_used_count' = 6",)


def test_output_without_results() -> None:
    with pytest.raises(llama_perplexity.LlamaPerplexityError, match="printed no perplexity"):
        llama_perplexity.parse_base("failed to open")
    with pytest.raises(llama_perplexity.LlamaPerplexityError, match="printed no comparison"):
        llama_perplexity.parse_kld("failed to open")


# ------------------------------------------------------------------------------------------------ running the tool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model(tmp_path_factory.mktemp("kld") / "model.gguf", "granitemoe", n_vocab=N_VOCAB)


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    path = model.with_name("text.txt")
    path.write_text("\n".join(f"self.value_{i} = {i * 31 % 97}" for i in range(60)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def base(model: Path, text: Path) -> kld.LogitsFile:
    path = model.with_name("base.kld")
    run = llama_perplexity.run_base(model, text, N_CTX, 4, base_file=path, extra=ONE_CHUNK_A_BATCH)
    assert run.n_expert_used == 8
    return kld.open_logits_file(path)


@pytest.fixture(scope="module")
def exact(model: Path, base: kld.LogitsFile) -> Float32Array:
    """The engine's own logits at the scored positions of `base`, (n_chunk * n_rows, N_VOCAB) float32."""
    llama_cpp = pytest.importorskip("llama_cpp")
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(loaded, params)
    batch = llama_cpp.llama_batch_init(N_CTX, 0, 1)
    parts = []
    for tokens in base.tokens:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for position, token in enumerate(tokens.tolist()):
            batch.token[position], batch.pos[position] = token, position
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            batch.logits[position] = position >= base.first
        batch.n_tokens = N_CTX
        assert llama_cpp.llama_decode(context, batch) == 0
        first = llama_cpp.llama_get_logits_ith(context, base.first)
        parts.append(np.ctypeslib.as_array(first, shape=(N_CTX - base.first, N_VOCAB))[: base.n_rows].copy())
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)
    return np.concatenate(parts)


@needs_tool
def test_our_codes_are_the_tools(base: kld.LogitsFile, exact: Float32Array) -> None:
    ours = kld.quantise(exact)
    chunks = list(kld.iter_chunks(base))
    codes = np.concatenate([chunk.rows.codes for chunk in chunks]).astype(int)
    lows = np.concatenate([chunk.rows.min_log_prob for chunk in chunks])
    # Bit for bit where binding and tool were built alike. A binding built for another processor gives logits that
    # differ in their last bits, so a code may be off by one; a wrong rounding rule would move half of all codes.
    assert np.abs(ours.codes - codes).max() <= 1
    assert (ours.codes != codes).mean() < 0.05
    np.testing.assert_allclose(ours.min_log_prob, lows, atol=4e-6)


@needs_tool
def test_the_tool_takes_our_file_as_a_base(
    model: Path, base: kld.LogitsFile, exact: Float32Array, tmp_path: Path
) -> None:
    path = tmp_path / "exported.kld"

    def blocks() -> Iterator[kld.QuantisedRows]:
        for start in range(0, len(exact), 50):
            yield kld.quantise(exact[start : start + 50])

    kld.write_logits_file(path, base.tokens, N_VOCAB, blocks())
    extra = (*ONE_CHUNK_A_BATCH, *SIX)
    theirs = llama_perplexity.run_kld(model, base.path, N_CTX, extra=extra)
    ours = llama_perplexity.run_kld(model, path, N_CTX, extra=extra)
    assert ours.n_expert_used == theirs.n_expert_used == 6
    assert set(ours.statistics) == set(theirs.statistics)
    for label, figure in theirs.statistics.items():
        # 34 figures; a code off by one in a few places moves none by more than its last two digits.
        assert ours.statistics[label].value == pytest.approx(figure.value, rel=1e-5, abs=3e-6), label


@needs_tool
def test_the_tool_takes_a_base_with_24_nats(
    model: Path, base: kld.LogitsFile, exact: Float32Array, tmp_path: Path
) -> None:
    path = tmp_path / "like-ik.kld"
    kld.write_logits_file(path, base.tokens, N_VOCAB, [kld.quantise(exact, max_nats=kld.IK_LLAMA_NATS)])
    assert kld.open_logits_file(path).writer == "ik_llama.cpp"
    extra = (*ONE_CHUNK_A_BATCH, *SIX)
    theirs = llama_perplexity.run_kld(model, base.path, N_CTX, extra=extra).statistics["Mean KLD"].value
    ours = llama_perplexity.run_kld(model, path, N_CTX, extra=extra).statistics["Mean KLD"].value
    assert ours == pytest.approx(theirs, abs=2e-5)


@needs_tool
def test_two_files_score_like_the_tools_second_run(
    model: Path, text: Path, base: kld.LogitsFile, tmp_path: Path
) -> None:
    six = tmp_path / "experts-6.kld"
    extra = (*ONE_CHUNK_A_BATCH, *SIX)
    llama_perplexity.run_base(model, text, N_CTX, 4, base_file=six, extra=extra)
    printed = llama_perplexity.run_kld(model, base.path, N_CTX, extra=extra).statistics
    chunks = list(kld.score_files(base, kld.open_logits_file(six)))
    same = np.concatenate([chunk.scores.base_top == chunk.scores.test_top for chunk in chunks])
    values = np.concatenate([chunk.scores.kld_low for chunk in chunks]).astype(np.float64)
    rounding = np.concatenate([chunk.kld_rounding for chunk in chunks]).astype(np.float64)
    assert printed["Same top p"].value == pytest.approx(100 * same.mean(), abs=6e-4)
    assert abs(printed["Mean KLD"].value - values.mean()) <= rounding.mean() + 2e-6


@needs_tool
def test_an_odd_window(model: Path, text: Path, tmp_path: Path) -> None:
    # 33 tokens: first = 16, so 16 rows; the format allows it, and the tool writes it if the batch fits.
    path = tmp_path / "odd.kld"
    llama_perplexity.run_base(model, text, 33, 3, base_file=path, extra=("-t", "1", "-b", "33"))
    file = kld.open_logits_file(path)
    assert (file.n_ctx, file.first, file.n_rows, file.n_chunk, file.truncated) == (33, 16, 16, 3, False)


@needs_tool
def test_a_file_for_another_setting_that_changes_nothing(
    model: Path, text: Path, base: kld.LogitsFile, tmp_path: Path
) -> None:
    again = tmp_path / "again.kld"
    wrong_prefix = ("--override-kv", "qwen3moe.expert_used_count=int:6")  # the model is a granitemoe
    run = llama_perplexity.run_base(model, text, N_CTX, 4, base_file=again, extra=(*ONE_CHUNK_A_BATCH, *wrong_prefix))
    assert run.n_expert_used == 8
    assert run.overrides == ()
    assert all(chunk.identical for chunk in kld.score_files(base, kld.open_logits_file(again)))

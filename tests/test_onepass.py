"""One pass against separate overridden loads: the same logits to the bit, the same chunk files, the same refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from fakes import fake_logits
from numpy.typing import NDArray

from agreement.chunks import cut, to_arrays
from agreement.engine import Engine, LogitsPart, load_engine
from agreement.engine.hook import Kept
from agreement.errors import EngineError, NoEffectError, SettingError, UsageError
from agreement.model_file import read_model_file
from agreement.onepass import Layout, equality, one_pass_layout, run_one_pass, setting_policy
from agreement.recording import PassRunner, Progress, stored_scores
from agreement.records import ChunkSet, EngineOptions, Int32Array, Setting
from agreement.routing import Policy, parse_policy
from agreement.settings import BASELINE, experts_setting, parse_setting
from agreement.store import RunStore

KEEP = (7, 6, 4, 2, 1)
EVERY: tuple[Policy | None, ...] = (None, *(Policy("experts", n) for n in KEEP))
N_CTX = 32


def options(n_tokens: int, *, defaults: bool = False) -> EngineOptions:
    """Return one micro-batch of `n_tokens`; not the engine's defaults: no flash attention and no repacked weights."""
    if defaults:
        return EngineOptions(n_threads=1, n_batch=n_tokens, n_ubatch=n_tokens)
    return EngineOptions(n_threads=1, n_batch=n_tokens, n_ubatch=n_tokens, flash_attn="off", repack=False)


def random_tokens(n: int, n_ctx: int = N_CTX, *, seed: int = 3) -> Int32Array:
    return np.random.default_rng(seed).integers(0, models.N_VOCAB - 2, (n, n_ctx)).astype(np.int32)


def logits_of(
    engine: Engine,
    tokens: Int32Array,
    first: int,
    *,
    piece: int | None = None,
    routing: Sequence[Policy | None] | None = None,
) -> NDArray[np.float32]:
    """Return (n_sequences, n_ctx - first, n_vocab) logits."""
    n_ctx = tokens.shape[1]
    out = np.full((len(tokens), n_ctx - first, engine.n_vocab), np.nan, np.float32)
    for part in engine.decode(tokens, first, n_ctx, piece=piece, routing=routing):
        out[part.sequence, part.first - first : part.first - first + len(part.logits)] = part.logits
    return out


def load(
    path: Path, setting: Setting, o: EngineOptions, *, n_sequences: int, hooked: bool = False, n_ctx: int = N_CTX
) -> Any:
    return load_engine(read_model_file(path), setting, o, n_ctx=n_ctx, n_sequences=n_sequences, hooked=hooked)


def overridden(
    path: Path,
    experts: int,
    o: EngineOptions,
    tokens: Int32Array,
    first: int,
    *,
    pieces: Sequence[int | None] = (None,),
) -> list[NDArray[np.float32]]:
    """Return the logits under an overridden load, fed whole or in pieces."""
    engine = load(path, experts_setting(experts), o, n_sequences=len(tokens), n_ctx=tokens.shape[1])
    try:
        return [logits_of(engine, tokens, first, piece=piece) for piece in pieces]
    finally:
        engine.close()


# --------------------------------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("defaults", [False, True], ids=["plain", "defaults"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_to_the_bit(family: str, defaults: bool, tmp_path: Path) -> None:
    """Two chunks under six policies, whole and in pieces, against the same batch under an overridden load.

    Logits are asked for from position 12 on, so the last layer has fewer rows than the others, and none at all in the
    first piece of 9 tokens.
    """
    path = models.write_model(tmp_path / "m.gguf", family)
    tokens = np.repeat(random_tokens(2), len(EVERY), axis=0)
    o = options(tokens.size, defaults=defaults)
    pieces = (None, 9)
    engine = load(path, BASELINE, o, n_sequences=len(tokens), hooked=True)
    one = [logits_of(engine, tokens, 12, piece=piece, routing=EVERY * 2) for piece in pieces]
    kept = [k.mean for k in engine.experts_kept()]
    unrouted = logits_of(engine, tokens, 12)
    engine.close()
    assert kept == [8, *KEEP] * 2
    assert np.array_equal(one[0][0::6], unrouted[0::6])
    for i, experts in enumerate(KEEP, start=1):
        if defaults and experts not in (6, 1):  # loads take the time of this test
            continue
        for found, expected in zip(one, overridden(path, experts, o, tokens, 12, pieces=pieces), strict=True):
            assert np.array_equal(found[i::6], expected[i::6])
        assert np.abs(one[0][i::6] - one[0][0::6]).max() > 0.01  # or equality would prove nothing


@pytest.mark.parametrize("n_used", [4, 9, 17])
def test_softmax_over_any_number_of_experts(n_used: int, tmp_path: Path) -> None:
    """To the bit, whatever part of the selected experts a processor's vectors take at once."""
    dims = replace(models.FAMILIES["gpt-oss"].dims, n_expert=20, n_expert_used=n_used)
    path = models.write_model(tmp_path / "m.gguf", "gpt-oss", dims=dims)
    keep = (n_used - 1, n_used // 2)
    tokens = np.repeat(random_tokens(1), 3, axis=0)
    o = options(tokens.size)
    engine = load(path, BASELINE, o, n_sequences=3, hooked=True)
    found = logits_of(engine, tokens, 12, routing=(None, *(Policy("experts", n) for n in keep)))
    engine.close()
    for i, experts in enumerate(keep, start=1):
        (expected,) = overridden(path, experts, o, tokens, 12)
        assert np.array_equal(found[i], expected[i])
        assert not np.array_equal(found[i], found[0])


def test_micro_batch_smaller_than_what_is_asked_for(qwen: Path) -> None:
    """Six sequences of 32 tokens in micro-batches of 50: eight tokens of each at a time, in rising order."""
    tokens = np.repeat(random_tokens(1), 6, axis=0)
    o = replace(options(192), n_ubatch=50)
    engine = load(qwen, BASELINE, o, n_sequences=6, hooked=True)
    found = logits_of(engine, tokens, 12, routing=EVERY)
    parts = [(p.sequence, p.first, len(p.logits)) for p in engine.decode(tokens, 12, 32, routing=EVERY)]
    engine.close()
    assert parts == [(s, f, n) for f, n in ((12, 4), (16, 8), (24, 8)) for s in range(6)]
    for i, experts in enumerate(KEEP, start=1):
        (expected,) = overridden(qwen, experts, o, tokens, 12, pieces=(8,))
        assert np.array_equal(found[i], expected[i])


def test_sequences_with_different_tokens(qwen: Path) -> None:
    """Which row belongs to which sequence: each sequence has its own text, and policies come in no order."""
    tokens = random_tokens(5)
    policies = (Policy("experts", 2), None, Policy("experts", 6), Policy("experts", 2), Policy("experts", 1))
    o = options(tokens.size)
    engine = load(qwen, BASELINE, o, n_sequences=5, hooked=True)
    found = logits_of(engine, tokens, 20, routing=policies)
    engine.close()
    for i, policy in enumerate(policies):
        (expected,) = overridden(qwen, policy.keep if policy else 8, o, tokens, 20)
        assert np.array_equal(found[i], expected[i])


def test_policies_at_their_ends(tmp_path: Path) -> None:
    for family in ("qwen3moe", "gpt-oss", "deepseek2"):
        path = models.write_model(tmp_path / f"{family}.gguf", family)
        texts = ("ser=4,1", "experts=4", "ser=4,0", "topp=1", "ser=8,0.5", "topp=0.7")
        tokens = np.repeat(random_tokens(1), 7, axis=0)
        engine = load(path, BASELINE, options(tokens.size), n_sequences=7, hooked=True)
        found = logits_of(engine, tokens, 0, routing=(None, *map(parse_policy, texts)))
        kept = [k.mean for k in engine.experts_kept()]
        engine.close()
        assert np.array_equal(found[1], found[2])  # ser=4,1 is experts=4
        for i in (3, 4, 5):
            assert np.array_equal(found[i], found[0])  # nothing was dropped
        assert kept[:6] == [8, 4, 4, 8, 8, 8]
        assert 1 < kept[6] < 8
        assert not np.array_equal(found[6], found[0])


def test_equality_check(qwen: Path) -> None:
    header = read_model_file(qwen)
    assert equality(header, options(64), random_tokens(1)[0], 10, 31, experts=3) == 0
    assert equality(header, replace(options(64), n_ubatch=12), random_tokens(1)[0], 10, 31, experts=3) == 0


# ---------------------------------------------------------------------------------------------- what the hook refuses


def test_more_experts_than_the_model_selects(qwen: Path) -> None:
    engine = load(qwen, BASELINE, options(64), n_sequences=2, hooked=True)
    with pytest.raises(SettingError, match="experts=9: the model selects 8 experts"):
        next(engine.decode(random_tokens(2), 0, 32, routing=(None, Policy("experts", 9))))
    engine.close()


def test_engine_without_hook(qwen: Path) -> None:
    engine = load(qwen, BASELINE, options(64), n_sequences=2)
    with pytest.raises(EngineError, match="hooked=True"):
        next(engine.decode(random_tokens(2), 0, 32, routing=(None, None)))
    assert engine.experts_kept() == ()
    engine.close()


def test_more_sequences_than_a_micro_batch_has_tokens(qwen: Path) -> None:
    engine = load(qwen, BASELINE, replace(options(96), n_ubatch=2), n_sequences=3, hooked=True)
    with pytest.raises(EngineError, match="3 sequences do not fit a micro-batch of 2"):
        next(engine.decode(random_tokens(3), 0, 32, routing=(None,) * 3))
    engine.close()


def test_dense_model_never_calls_the_hook(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "dense.gguf", "llama", dense=True)
    with pytest.raises(EngineError, match="never called the router hook"):
        load(path, BASELINE, options(64), n_sequences=2, hooked=True)


def test_error_in_the_callback(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(qwen, BASELINE, options(64), n_sequences=2, hooked=True)
    tokens, policies = random_tokens(2), (None, Policy("experts", 2))
    expected = logits_of(engine, tokens, 0, routing=policies)

    def broken(*_args: object, **_named: object) -> None:
        raise ValueError("as broken as can be")

    def interrupted(*_args: object, **_named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("agreement.engine.hook.drop_experts", broken)
        with pytest.raises(EngineError, match="router hook failed: ValueError: as broken as can be"):
            next(engine.decode(tokens, 0, 32, routing=policies))
        patch.setattr("agreement.engine.hook.drop_experts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(engine.decode(tokens, 0, 32, routing=policies))
    assert np.array_equal(logits_of(engine, tokens, 0, routing=policies), expected)  # it has recovered
    engine.close()


def test_engine_that_stops_calling(qwen: Path) -> None:
    """The layers seen at load time must be seen in every batch: with the callback asleep nothing is dropped."""
    engine = load(qwen, BASELINE, options(64), n_sequences=2, hooked=True)
    original = engine._hook._asked
    engine._hook._asked = lambda name: original(name) and not name.endswith(b"-1")
    with pytest.raises(EngineError, match="0 times for layer 1, not 1"):
        next(engine.decode(random_tokens(2), 0, 32, routing=(None, Policy("experts", 2))))
    engine.close()


def test_batch_split_by_the_engine(qwen: Path) -> None:
    """Were the micro-batch split in two after all, rows could not be told apart, and that is an error."""
    engine = load(qwen, BASELINE, replace(options(64), n_ubatch=32), n_sequences=2, hooked=True)
    engine.options = replace(engine.options, n_ubatch=64)
    with pytest.raises(EngineError, match="has 32 rows, the batch 64 tokens and 40 outputs"):
        next(engine.decode(random_tokens(2), 12, 32, routing=(None, Policy("experts", 2))))
    with pytest.raises(EngineError, match="2 times for layer 0, not 1"):  # as many rows as outputs, by accident
        next(engine.decode(random_tokens(2), 16, 32, routing=(None, Policy("experts", 2))))
    engine.close()


# -------------------------------------------------------------------------------------------------- chunks and settings


def test_layout_of_whole_chunks() -> None:
    # 5 settings and the baseline, 512 tokens: 3,072 a chunk, two chunks in 8,192.
    assert one_pass_layout(5, 24, 512, 8192) == Layout(((0, 5),), 2, 12, 512, 6144)
    # 10 chunks fit a batch, but 24 are three blocks of 8 then as well.
    assert one_pass_layout(5, 24, 512, 10 * 3072).chunks_per_block == 8
    # Not more chunks than there are, and not more sequences than llama.cpp takes: 256 // 6 = 42 chunks.
    assert one_pass_layout(5, 1, 512, 8192).chunks_per_block == 1
    assert one_pass_layout(5, 999, 512, 1 << 20).n_sequences == 252
    assert one_pass_layout(5, 999, 512, 8192, max_sequences=7).n_sequences == 6


def test_layout_in_pieces() -> None:
    # 6 sequences in 512 tokens: at most 85 of each at a time, so 7 pieces, and 7 pieces of 74 hold 512.
    assert one_pass_layout(5, 24, 512, 512) == Layout(((0, 5),), 1, 6, 74, 444)
    assert one_pass_layout(5, 24, 512, 512).n_tokens(5, 24, 512) == 6 * 24 * 512


def test_layout_in_groups() -> None:
    # At 64 tokens of each, 4 sequences fill 256: three settings a group; 7 settings are 3 groups of 2, 2 and 3.
    layout = one_pass_layout(7, 24, 512, 256)
    assert layout == Layout(((0, 2), (2, 4), (4, 7)), 1, 4, 64, 256)
    assert layout.n_tokens(7, 24, 512) == 10 * 24 * 512
    assert one_pass_layout(3, 9, 512, 8192, max_sequences=2).groups == ((0, 1), (1, 2), (2, 3))
    assert one_pass_layout(300, 9, 8, 1 << 20).groups == ((0, 150), (150, 300))
    assert one_pass_layout(2, 1, 512, 3).groups == ((0, 1), (1, 2))  # as small as it gets


@pytest.mark.parametrize("arguments", [(5, 24, 512, 1), (0, 24, 512, 512), (5, 0, 512, 512)])
def test_layout_without_room(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="one pass"):
        one_pass_layout(*arguments)


def test_which_settings_are_policies() -> None:
    assert setting_policy(experts_setting(6)) == Policy("experts", 6)
    assert setting_policy(Setting("ser=4,0.2")) == Policy("ser", 4, 0.2)
    for setting in (
        BASELINE,
        parse_setting("experts=6+kv:a.b=int:1"),
        replace(experts_setting(6), model="m"),
        Setting("noise", again=True),
    ):
        with pytest.raises(SettingError, match="no routing policy"):
            setting_policy(setting)


def make_chunks(n: int, n_ctx: int = 48) -> ChunkSet:
    documents = [(f"d{i}", tokens) for i, tokens in enumerate(random_tokens(n, n_ctx, seed=9))]
    return cut(documents, n_ctx=n_ctx, chunking="document", n_chunks=n, seed=0, first=None, bos=None)


def make_run(path: Path, chunks: ChunkSet) -> RunStore:
    return RunStore.create(path, {}, {}, to_arrays(chunks))


SETTINGS = (experts_setting(6), experts_setting(2), Setting("topp=0.7"))


@pytest.mark.parametrize("logits", ["full", "top"])
@pytest.mark.parametrize("n_ubatch", [512, 100, 60])
def test_chunk_files_are_those_of_separate_passes(qwen: Path, tmp_path: Path, logits: str, n_ubatch: int) -> None:
    """Five chunks in blocks of two, or one in pieces, or with a group for each setting: the same arrays to the bit."""
    chunks, header = make_chunks(5), read_model_file(qwen)
    separate, one = make_run(tmp_path / "separate", chunks), make_run(tmp_path / "one", chunks)
    runner = PassRunner(header, options(chunks.n_ctx), chunks.n_ctx)
    mode = "full" if logits == "full" else "top"
    runner.record_baseline(separate, logits=mode)
    for setting in SETTINGS[:2]:
        runner.run_setting(separate, setting)
    runner.close()

    layout = one_pass_layout(3, 5, chunks.n_ctx, n_ubatch)
    assert (len(layout.groups), layout.chunks_per_block) == {512: (1, 2), 100: (3, 1), 60: (3, 1)}[n_ubatch]
    engine = load(
        qwen, BASELINE, layout.options(options(1)), n_sequences=layout.n_sequences, hooked=True, n_ctx=chunks.n_ctx
    )
    heard: list[Progress] = []
    facts = run_one_pass(
        engine, one, chunks, SETTINGS, layout=layout, logits=mode, write_baseline=True, progress=heard.append
    )
    engine.close()
    for name in ("baseline", "experts=6", "experts=2"):
        for i in range(5):
            (a, a_meta), (b, b_meta) = separate.read_chunk(name, i), one.read_chunk(name, i)
            assert a.keys() == b.keys()
            assert all(np.array_equal(a[k], b[k]) for k in a)
            assert a_meta["logits_xxh3"] == b_meta["logits_xxh3"]
    assert facts["experts=2"] == {
        # 48 tokens in layer 0, 23 outputs in layer 1, five chunks
        "proof": {"policy": "experts=2", "rows": 5 * (48 + 23), "kept": 10 * (48 + 23)},
        "experts_mean": 2.0,
    }
    assert 2 < facts["topp=0.7"]["experts_mean"] < 8
    assert stored_scores(one, "topp=0.7", 4).kld_high.max() > 0
    assert heard[-1].done == heard[-1].total == 5
    assert heard[-1].tokens == layout.n_tokens(3, 5, chunks.n_ctx)
    assert sum(t["tokens"] for t in one.read_timings()) == heard[-1].tokens


def test_interrupted_and_resumed(qwen: Path, tmp_path: Path) -> None:
    """What is left after a block was lost is the same as without interruption, and only that block is decoded."""
    chunks = make_chunks(5)
    layout = one_pass_layout(3, 5, chunks.n_ctx, 400)
    run = make_run(tmp_path / "run", chunks)
    engine = load(
        qwen, BASELINE, layout.options(options(1)), n_sequences=layout.n_sequences, hooked=True, n_ctx=chunks.n_ctx
    )
    facts = run_one_pass(engine, run, chunks, SETTINGS, layout=layout)
    assert not run.has_chunk("baseline", 0)  # nobody asked for it
    files = {p: p.read_bytes() for p in sorted(run.path.rglob("chunk-*.agr"))}
    assert len(files) == 15
    run.chunk_path("experts=2", 3).unlink()
    heard: list[Progress] = []
    assert run_one_pass(engine, run, chunks, SETTINGS, layout=layout, progress=heard.append) == facts
    assert heard[-1].tokens == 2 * 4 * chunks.n_ctx  # chunks 2 and 3 under three settings and the baseline
    assert {p: p.read_bytes() for p in sorted(run.path.rglob("chunk-*.agr"))} == files
    # A whole run is left alone, and says the same.
    assert run_one_pass(engine, run, chunks, SETTINGS, layout=layout, progress=heard.append) == facts
    assert heard[-1].tokens == 0
    # A baseline asked for later is written, and the rest with it to the same bytes.
    run_one_pass(engine, run, chunks, SETTINGS, layout=layout, write_baseline=True)
    assert all(run.has_chunk("baseline", i) for i in range(5))
    assert {p: p.read_bytes() for p in files} == files
    engine.close()


def test_setting_without_effect(qwen: Path, tmp_path: Path) -> None:
    chunks = make_chunks(1)
    layout = one_pass_layout(2, 1, chunks.n_ctx, 200)
    engine = load(qwen, BASELINE, layout.options(options(1)), n_sequences=3, hooked=True, n_ctx=chunks.n_ctx)
    settings = (experts_setting(2), Setting("ser=8,0"))
    run = make_run(tmp_path / "run", chunks)
    with pytest.raises(NoEffectError, match=r"ser=8,0 had no effect: .* kept 8 experts"):
        run_one_pass(engine, run, chunks, settings, layout=layout)
    assert not run.has_chunk("ser=8,0", 0)
    engine.close()


def test_nan_names_setting_and_chunk(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe", nan=True)
    chunks = make_chunks(1)
    layout = one_pass_layout(1, 1, chunks.n_ctx, 200)
    engine = load(path, BASELINE, layout.options(options(1)), n_sequences=2, hooked=True, n_ctx=chunks.n_ctx)
    with pytest.raises(EngineError, match="baseline, chunk 0, rows from position 24 on: logits are NaN"):
        run_one_pass(engine, make_run(tmp_path / "run", chunks), chunks, SETTINGS[:1], layout=layout)
    engine.close()


class SlicedEngine:
    """An engine that hands over its logits three rows at a time, and drops what each policy says."""

    n_vocab = 16
    options = EngineOptions(n_threads=1)

    def decode(
        self,
        tokens: Int32Array,
        first: int,
        last: int,
        *,
        piece: int,
        routing: Sequence[Policy | None],
    ) -> Iterator[LogitsPart]:
        n_ctx = tokens.shape[1]
        for start in range(0, n_ctx, piece):
            for s, (row, policy) in enumerate(zip(tokens, routing, strict=True)):
                logits = fake_logits(row, self.n_vocab, missing_experts=8 - policy.keep if policy else 0)
                for at in range(max(start, first), min(start + piece, last), 3):
                    stop = min(at + 3, start + piece, last)
                    yield LogitsPart(s, at, logits[at:stop])

    def experts_kept(self) -> tuple[Kept, ...]:
        return (Kept(10, 20),) * 6


def test_parts_of_any_size(tmp_path: Path) -> None:
    """Scores do not depend on how an engine cuts its logits."""
    base = make_chunks(3)
    chunks = replace(base, tokens=base.tokens % 16, targets=base.targets % 16)
    engine: Any = SlicedEngine()
    found = []
    for i, (piece, together) in enumerate(((48, 1), (48, 2), (20, 1), (7, 2))):
        run = make_run(tmp_path / str(i), chunks)
        layout = Layout(((0, 2),), together, 3 * together, piece, 3 * together * piece)
        run_one_pass(engine, run, chunks, SETTINGS[:2], layout=layout, write_baseline=True)
        found.append({p.name + p.parent.name: p.read_bytes() for p in run.path.rglob("chunk-*.agr")})
    assert len(found[0]) == 9
    assert all(f == found[0] for f in found)

"""Samples of models: the same bytes, fewer of them; and hook against override on a sample."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import gguf
import models
import numpy as np
import pytest
from families import Dims, Family, TensorSpec, matrix, norm
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agreement.errors import EngineError, ModelFileError
from agreement.model_file import read_model_file
from agreement.model_file import sample as sample_module
from agreement.model_file.architectures import size_keys
from agreement.model_file.sample import kept_experts, write_sample
from agreement.model_file.shards import read_shards
from agreement.onepass import sampled_equality
from agreement.records import EngineOptions, ModelFile
from agreement.routing import drop_experts

OPTIONS = EngineOptions(n_threads=1)
ROOM = 1 << 30
# Five blocks, four of 32 experts: a sample has the first two (three, where the first is dense) with eight experts.
SIZES = {"n_layer": 5, "n_expert": 32, "n_expert_used": 4}
CUT = ("_exps.", "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b")
VOCABULARY = ("token_embd.weight", "output.weight", "output.bias")


def larger(family: str) -> Dims:
    return replace(models.FAMILIES[family].dims, **SIZES)


def contents(path: Path) -> dict[str, Any]:
    """Return every key with its value and type, by an independent reader."""
    fields = gguf.GGUFReader(path).fields.items()
    return {k: (f.types, f.contents()) for k, f in fields if not k.startswith("GGUF.")}


def tensors(paths: list[Path]) -> dict[str, Any]:
    return {t.name: t for path in paths for t in gguf.GGUFReader(path).tensors}


def assert_beginnings(
    sample: Path,
    originals: list[Path],
    *,
    n_expert: int = 8,
    n_vocab: int = 256,
    number: Callable[[str], str] = lambda name: name,
) -> None:
    """Each tensor of a sample holds the first rows of that of the original, byte for byte; no tensor is missing."""
    old, new = tensors(originals), tensors([sample])
    n_layer = 1 + max(int(name.split(".")[1]) for name in new if name.startswith("blk."))
    for name, tensor in new.items():
        source = old[number(name)]
        routed = name.startswith("blk.") and any(part in name for part in CUT)
        n = n_expert if routed else n_vocab if name in VOCABULARY else len(source.data)
        assert tensor.data.tobytes() == source.data[:n].tobytes(), name
        assert tensor.tensor_type == source.tensor_type
        assert tensor.shape.tolist() == [*source.shape.tolist()[:-1], n]
        assert tensor.data_offset % 32 == 0
    kept = {number(name) for name in new}
    blocks = {number(f"blk.{i}.attn_norm.weight").split(".")[1] for i in range(n_layer)}
    assert kept == {name for name in old if not name.startswith("blk.") or name.split(".")[1] in blocks}


def made(path: Path, to: Path, **more: Any) -> ModelFile:
    return write_sample(read_model_file(path), to, most_bytes=more.pop("most_bytes", ROOM), **more)


def difference(path: Path, *, experts: int = 2, options: EngineOptions = OPTIONS) -> float:
    return sampled_equality(read_model_file(path), options, experts=experts, most_bytes=ROOM)


def renamed(path: Path, old: str, new: str) -> Path:
    """Rename something in a file to a name of the same length."""
    data = path.read_bytes()
    assert len(old) == len(new)
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode()))
    return path


# ------------------------------------------------------------------------------------------------- every family


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", family, dims=larger(family))
    sample = made(path, tmp_path / "s.gguf")
    dense_first = models.FAMILIES[family].dims.n_layer == 3
    m = 3 if dense_first else 2
    assert (sample.n_layer, sample.n_expert_layers, sample.n_expert, sample.n_expert_used) == (m, 2, 8, 4)
    assert_beginnings(tmp_path / "s.gguf", [path])
    arch = models.FAMILIES[family].architecture
    expected = {k: v for k, v in contents(path).items() if not k.startswith("tokenizer.")}
    uint32, string = [gguf.GGUFValueType.UINT32], [gguf.GGUFValueType.STRING]
    expected |= {
        f"{arch}.block_count": (uint32, m),
        f"{arch}.expert_count": (uint32, 8),
        f"{arch}.vocab_size": (uint32, 256),
        "tokenizer.ggml.model": (string, "no_vocab"),
    }
    assert contents(tmp_path / "s.gguf") == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "s.gguf"]
    for options in (OPTIONS, replace(OPTIONS, flash_attn="off", repack=False, n_ubatch=20)):
        assert difference(path, options=options) == 0


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that drops the best experts instead of the last ones, or none, is not the override."""
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe", dims=larger("qwen3moe"))

    def wrong_columns(weights: NDArray[np.float32], *rest: Any, **named: Any) -> Any:
        changed, kept = drop_experts(weights, *rest, **named)
        return np.where(changed[:, ::-1] == 0, np.float32(0), weights), kept

    def no_columns(weights: NDArray[np.float32], *_rest: Any, **_named: Any) -> Any:
        return weights.copy(), np.full(len(weights), weights.shape[1], np.int64)

    for wrong in (wrong_columns, no_columns):
        with monkeypatch.context() as patch:
            patch.setattr("agreement.engine.hook.drop_experts", wrong)
            assert difference(path) > 0.01
    assert difference(path) == 0


def test_split_model(tmp_path: Path) -> None:
    paths = models.write_split(tmp_path / "m", 3, "gpt-oss", dims=larger("gpt-oss"))
    model = read_model_file(paths[1])
    sample = write_sample(model, tmp_path / "s.gguf", most_bytes=ROOM)
    assert sample.shards == (str(tmp_path / "s.gguf"),)
    assert_beginnings(tmp_path / "s.gguf", paths)
    assert not any(key.startswith("split.") for key in contents(tmp_path / "s.gguf"))
    assert sampled_equality(model, OPTIONS, experts=3, most_bytes=ROOM) == 0


def test_only_the_samples_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe", dims=replace(larger("qwen3moe"), n_layer=20))
    original, counts = sample_module.pieces, []

    def counting(*arguments: Any) -> Iterator[memoryview]:
        for data in original(*arguments):
            counts.append(len(data))
            yield data

    monkeypatch.setattr(sample_module, "pieces", counting)
    sample = made(path, tmp_path / "s.gguf")
    # Tensors, and keys of a few bytes each; the file is some 28 times as large.
    assert sample.bytes_total < sum(counts) < sample.bytes_total + 1000
    assert path.stat().st_size > 20 * sum(counts)


# ------------------------------------------------------------------------------------------ types and alignment


def write_arrays(
    path: Path,
    family: str,
    *,
    dims: Dims | None = None,
    kind: Callable[[TensorSpec], gguf.GGMLQuantizationType] = lambda _: gguf.GGMLQuantizationType.F32,
    more: tuple[TensorSpec, ...] = (),
    extra: dict[str, Any] | None = None,
    alignment: int = 32,
) -> Path:
    """Write a tiny model with tensors of any type that `gguf` can quantise to, and with more tensors and keys."""
    fam, sizes = models.FAMILIES[family], dims or larger(family)
    writer = gguf.GGUFWriter(path, fam.architecture)
    writer.add_custom_alignment(alignment)
    for key, value in models.metadata(family, fam, sizes, models.Variant(extra=extra or {})).items():
        models._add_key(writer, key, value)
    given = {spec.name: spec for spec in (*models.tensors(fam, sizes), *more)}  # of two by one name the later
    for spec in given.values():
        data = np.concatenate(list(models._blocks(spec, 0, np.float32))).reshape(spec.shape)
        if kind(spec) != gguf.GGMLQuantizationType.F32:
            data = gguf.quants.quantize(data, kind(spec))
        writer.add_tensor(spec.name, data, raw_dtype=kind(spec))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss"])
def test_quantised(family: str, name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    path = write_arrays(
        tmp_path / "m.gguf", family, kind=lambda spec: gguf.GGMLQuantizationType.F32 if spec.vector else kind
    )
    made(path, tmp_path / "s.gguf")
    found = tensors([tmp_path / "s.gguf"])
    assert found["blk.1.ffn_down_exps.weight"].tensor_type == kind
    assert_beginnings(tmp_path / "s.gguf", [path])
    assert difference(path) == 0
    assert difference(path, options=replace(OPTIONS, flash_attn="off", repack=False)) == 0


def test_alignment_is_kept(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "m.gguf", "gpt-oss", alignment=256)
    made(path, tmp_path / "s.gguf")
    assert_beginnings(tmp_path / "s.gguf", [path])
    assert all(t.data_offset % 256 == 0 for t in gguf.GGUFReader(tmp_path / "s.gguf").tensors)
    assert difference(path) == 0


# ----------------------------------------------------------------------------------------------- which blocks


def with_dense(family: str, n_dense: int) -> Family:
    """Return `family` with so many leading dense blocks."""
    own = models.FAMILIES[family]
    return replace(
        own,
        block=lambda p, layer, d: own.block(p, 0 if layer < n_dense else 1, d),
        keys=lambda d: {**own.keys(d), "leading_dense_block_count": n_dense},
    )


def test_one_dense_block_stands_for_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of deepseek2 with three leading dense blocks, blocks 0, 3 and 4 are kept."""
    monkeypatch.setitem(models.FAMILIES, "deepseek2", with_dense("deepseek2", 3))
    dims = replace(larger("deepseek2"), n_layer=7)
    scales = {"deepseek2.feed_forward_length": [64, 64, 64, 63, 62, 61, 60]}  # only the dense block's is used
    path = models.write_model(tmp_path / "m.gguf", "deepseek2", dims=dims, extra=scales)
    sample = made(path, tmp_path / "s.gguf")
    assert (sample.n_layer, sample.n_expert_layers) == (3, 2)
    of = {"0": "0", "1": "3", "2": "4"}

    def number(name: str) -> str:
        head, _, rest = name.partition(".")
        block, _, last = rest.partition(".")
        return f"blk.{of[block]}.{last}" if head == "blk" else name

    assert_beginnings(tmp_path / "s.gguf", [path], number=number)
    keys = contents(tmp_path / "s.gguf")
    assert keys["deepseek2.leading_dense_block_count"][1] == 1
    assert keys["deepseek2.feed_forward_length"][1] == [64, 63, 62]
    assert difference(path) == 0


def test_dense_blocks_are_kept_where_blocks_differ_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.FAMILIES, "glm-dsa", with_dense("glm-dsa", 3))
    path = models.write_model(tmp_path / "m.gguf", "glm-dsa", dims=replace(larger("glm-dsa"), n_layer=7))
    assert made(path, tmp_path / "s.gguf").n_layer == 5
    assert contents(tmp_path / "s.gguf")["glm-dsa.leading_dense_block_count"][1] == 3
    assert_beginnings(tmp_path / "s.gguf", [path])
    assert difference(path) == 0


def test_single_block_with_experts(tmp_path: Path) -> None:
    for family, n_layer in (("gpt-oss", 1), ("deepseek2", 2)):
        path = models.write_model(tmp_path / "m.gguf", family, dims=replace(larger(family), n_layer=n_layer))
        sample = made(path, tmp_path / "s.gguf")
        assert (sample.n_layer, sample.n_expert_layers) == (n_layer, 1)
        assert difference(path) == 0


def test_blocks_for_prediction_are_left_out(tmp_path: Path) -> None:
    """Arrays of one value a block may have one for such blocks or not."""
    extra = {
        "deepseek2.nextn_predict_layers": 1,
        "deepseek2.feed_forward_length": [64, 61, 62, 63, 60],
        "deepseek2.odd": ["a", "bc", "", "d"],
        "deepseek2.of_its_own_length": [1, 2, 3],
    }
    path = models.write_model(tmp_path / "m.gguf", "deepseek2", dims=larger("deepseek2"), extra=extra)
    sample = made(path, tmp_path / "s.gguf")
    keys = contents(tmp_path / "s.gguf")
    assert (sample.n_layer, keys["deepseek2.block_count"][1], keys["deepseek2.nextn_predict_layers"][1]) == (3, 3, 0)
    assert keys["deepseek2.feed_forward_length"][1] == [64, 61, 62]
    assert keys["deepseek2.odd"] == ([gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING], ["a", "bc", ""])
    assert keys["deepseek2.of_its_own_length"][1] == [1, 2, 3]
    assert difference(path) == 0


def test_arrays_that_are_not_by_block(tmp_path: Path) -> None:
    """A model of four blocks, and four rope sections."""
    extra = {"qwen3moe.rope.dimension_sections": [1, 2, 3, 4], "qwen3moe.attention.shared_kv_layers": 1}
    extra["other.list"] = [5, 6, 7, 8]
    dims = replace(larger("qwen3moe"), n_layer=4)
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe", dims=dims, extra=extra)
    made(path, tmp_path / "s.gguf")
    keys = contents(tmp_path / "s.gguf")
    assert keys["qwen3moe.rope.dimension_sections"][1] == [1, 2, 3, 4]
    assert keys["other.list"][1] == [5, 6, 7, 8]
    assert keys["qwen3moe.attention.shared_kv_layers"][1] == 0  # the last block's; the sample has the first two


_STATE, _K_HEADS, _V_HEADS, _KERNEL = 16, 2, 4, 4


def _hybrid_attention(p: str, d: Dims) -> Iterator[TensorSpec]:
    yield matrix(f"{p}.attn_q", 2 * d.n_head * d.head, d.n_embd)  # queries and their gates
    yield matrix(f"{p}.attn_k", d.n_head_kv * d.head, d.n_embd)
    yield matrix(f"{p}.attn_v", d.n_head_kv * d.head, d.n_embd)
    yield matrix(f"{p}.attn_output", d.n_embd, d.n_head * d.head)
    yield norm(f"{p}.attn_q_norm", d.head)
    yield norm(f"{p}.attn_k_norm", d.head)


def _hybrid_block(p: str, layer: int, d: Dims) -> Iterator[TensorSpec]:
    """Qwen3-Next: three blocks with a recurrent state, then one with attention."""
    yield norm(f"{p}.attn_norm", d.n_embd)
    yield norm(f"{p}.post_attention_norm", d.n_embd)
    if layer % 4 == 3:
        yield from _hybrid_attention(p, d)
    else:
        width, value = 2 * _STATE * _K_HEADS + _STATE * _V_HEADS, _STATE * _V_HEADS
        yield matrix(f"{p}.attn_qkv", width, d.n_embd)
        yield matrix(f"{p}.attn_gate", value, d.n_embd)
        yield TensorSpec(f"{p}.ssm_conv1d.weight", (width, _KERNEL), 0.5, vector=True)
        yield TensorSpec(f"{p}.ssm_dt.bias", (_V_HEADS,), 0.1, vector=True)
        yield TensorSpec(f"{p}.ssm_a", (_V_HEADS,), 0.1, -1.0, vector=True)
        yield matrix(f"{p}.ssm_ba", 2 * _V_HEADS, d.n_embd)
        yield norm(f"{p}.ssm_norm", _STATE)
        yield matrix(f"{p}.ssm_out", d.n_embd, value)
    yield from families._moe(p, d)
    yield TensorSpec(f"{p}.ffn_gate_inp_shexp.weight", (d.n_embd,), d.n_embd**-0.5, vector=True)
    yield from families._shared(p, d, d.n_ff)


def _hybrid_keys(d: Dims) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": d.n_ff_exp,
        "expert_shared_feed_forward_length": d.n_ff,
        "ssm.conv_kernel": _KERNEL,
        "ssm.inner_size": _STATE * _V_HEADS,
        "ssm.state_size": _STATE,
        "ssm.time_step_rank": _V_HEADS,
        "ssm.group_count": _K_HEADS,
    }


@pytest.mark.parametrize(("attention_at", "n_layer"), [(3, 4), (0, 2)])
def test_recurrent_blocks_come_with_attention(
    attention_at: int, n_layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a block of each kind the engine would abort."""

    def block(p: str, layer: int, d: Dims) -> Iterator[TensorSpec]:
        return _hybrid_block(p, 3 if layer % 4 == attention_at else 0, d)

    family = Family("qwen3next", block, _hybrid_keys)
    monkeypatch.setitem(models.FAMILIES, "qwen3next", family)
    recurrent = [i % 4 != attention_at for i in range(8)]
    extra = {"qwen3next.attention.recurrent_layers": recurrent}
    dims = replace(larger("qwen3next"), n_layer=8)
    path = models.write_model(tmp_path / "m.gguf", "qwen3next", dims=dims, extra=extra)
    assert made(path, tmp_path / "s.gguf").n_layer == n_layer
    assert contents(tmp_path / "s.gguf")["qwen3next.attention.recurrent_layers"][1] == recurrent[:n_layer]
    assert_beginnings(tmp_path / "s.gguf", [path])
    assert difference(path) == 0


def test_the_prefix_ends_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one job each, as in nemotron_h: s for a state, e for experts, a for attention."""
    jobs = "seseasee"

    def block(p: str, layer: int, d: Dims) -> Iterator[TensorSpec]:
        if jobs[layer] == "e":
            yield from families._moe(p, d)
        else:
            yield matrix(f"{p}.ssm_in" if jobs[layer] == "s" else f"{p}.attn_output", d.n_embd, d.n_embd)

    monkeypatch.setitem(models.FAMILIES, "mixed", Family("nemotron_h_moe", block, lambda _: {}))
    for n_layer, expected in ((8, 7), (6, 5), (4, 4)):  # attention is block 4, the next experts block 6
        dims = replace(larger("mixed"), n_layer=n_layer)
        path = models.write_model(tmp_path / "m.gguf", "mixed", dims=dims)
        assert made(path, tmp_path / "s.gguf").n_layer == expected, n_layer


def test_what_the_engine_concludes_from_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deepseek2 of 27 blocks is taken to have queries that are not compressed; its sample has to say so."""
    own = models.FAMILIES["deepseek2"]

    def block(p: str, layer: int, d: Dims) -> Iterator[TensorSpec]:
        yield from (spec for spec in own.block(p, layer, d) if "attn_q_" not in spec.name)
        yield matrix(f"{p}.attn_q", d.n_head * (families._NOPE + families._ROPE), d.n_embd)

    keys = replace(own, block=block, keys=lambda d: {k: v for k, v in own.keys(d).items() if "q_lora" not in k})
    monkeypatch.setitem(models.FAMILIES, "deepseek2", keys)
    path = models.write_model(tmp_path / "m.gguf", "deepseek2", dims=replace(larger("deepseek2"), n_layer=27))
    made(path, tmp_path / "s.gguf")
    assert contents(tmp_path / "s.gguf")["deepseek2.attention.q_lora_rank"][1] == 0
    assert difference(path) == 0
    monkeypatch.setattr(sample_module, "size_keys", lambda *_: {})
    with pytest.raises(EngineError, match="q_lora_rank"):
        difference(path)


def test_size_keys() -> None:
    rank, gating = "deepseek2.attention.q_lora_rank", "deepseek2.expert_gating_func"
    assert size_keys("deepseek2", 61, 129_280, {}) == {}
    assert size_keys("deepseek2", 26, 1, {}) == {rank: 0}
    assert size_keys("deepseek2", 48, 128_256, {gating: 1}) == {rank: 0}
    assert size_keys("deepseek2", 47, 154_880, {}) == {gating: 2}
    assert size_keys("deepseek2", 48, 154_880, {gating: 0}) == {gating: 2}
    assert size_keys("deepseek2", 48, 154_880, {gating: 1}) == {}
    assert size_keys("mistral4", 27, 1, {}) == {"mistral4.attention.q_lora_rank": 0}
    assert size_keys("qwen3moe", 27, 154_880, {}) == {}


# ---------------------------------------------------------------------------------------------- which experts


def test_kept_experts() -> None:
    assert kept_experts(128, 8, 0, 0) == kept_experts(128, 8, 1, 1) == 16
    assert kept_experts(16, 1, 0, 0) == 2
    assert kept_experts(12, 8, 0, 0) == 12
    assert kept_experts(256, 8, 8, 4) == 16  # DeepSeek-V3: two a group, four groups hold the eight
    assert kept_experts(160, 6, 8, 3) == 16  # DeepSeek-V2: 12 would do, but eight groups of two are 16
    assert kept_experts(256, 8, 8, 2) == 32  # two groups must hold eight, so four a group
    assert kept_experts(16, 8, 4, 3) == 16
    assert kept_experts(32, 4, 4, 3) == 8
    assert kept_experts(8, 4, 4, 0) == 8  # no sense in it: left as it is


@given(st.integers(1, 16), st.integers(2, 12), st.data())
def test_kept_experts_are_valid(groups: int, size: int, data: st.DataObject) -> None:
    n_expert = groups * size
    used_groups = data.draw(st.integers(1, groups))
    n_used = data.draw(st.integers(1, used_groups * size))
    kept = kept_experts(n_expert, n_used, groups, used_groups)
    assert 2 <= kept <= n_expert
    assert kept % groups == 0 or groups == 1
    assert kept >= min(2 * n_used, n_expert)
    assert used_groups * kept // groups >= n_used
    if groups > 1:
        assert kept // groups >= 2


@settings(max_examples=20)
@given(
    family=st.sampled_from(["qwen3moe", "gpt-oss", "deepseek2"]),
    n_layer=st.integers(2, 5),
    n_expert=st.integers(2, 20),
    n_used=st.integers(1, 10),
    n_vocab=st.integers(models.N_VOCAB, 400),
    dtype=st.sampled_from(["f32", "f16"]),
)
def test_samples_of_any_size(
    family: str, n_layer: int, n_expert: int, n_used: int, n_vocab: int, dtype: str, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    n_used = min(n_used, n_expert)
    dims = Dims(n_layer=n_layer, n_expert=n_expert, n_expert_used=n_used)
    path = models.write_model(folder / "m.gguf", family, dims=dims, n_vocab=n_vocab, dtype=dtype)
    sample = made(path, folder / "s.gguf")
    expected = min(n_expert, max(2, 2 * n_used))
    assert (sample.n_expert, sample.n_expert_used, sample.n_vocab) == (expected, n_used, 256)
    assert_beginnings(folder / "s.gguf", [path], n_expert=expected)
    # A sample of a sample is the same.
    made(folder / "s.gguf", folder / "again.gguf")
    assert (folder / "again.gguf").read_bytes() == (folder / "s.gguf").read_bytes()


def test_small_models_are_kept_whole(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")  # two layers, 8 of 16 experts
    made(path, tmp_path / "s.gguf")
    assert_beginnings(tmp_path / "s.gguf", [path], n_expert=16)


# ---------------------------------------------------------------------------------------------------- refusals


def refused(path: Path, match: str, **more: Any) -> None:
    """No sample is made, and nothing is left of the attempt; what was there before stays."""
    model = read_model_file(path)
    target = path.with_name("sample.gguf")
    target.write_bytes(b"before")
    before = sorted(p.name for p in path.parent.iterdir())
    with pytest.raises(ModelFileError, match=match) as caught:
        write_sample(model, target, most_bytes=more.get("most_bytes", ROOM))
    assert str(caught.value).startswith(f"no sample of {path} can be made: ")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in path.parent.iterdir()) == before
    assert target.read_bytes() == b"before"
    with pytest.raises(ModelFileError, match=match):
        sampled_equality(model, OPTIONS, experts=2, most_bytes=more.get("most_bytes", ROOM))


def test_larger_than_allowed(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe", dims=larger("qwen3moe"))
    made(path, tmp_path / "s.gguf")
    size = (tmp_path / "s.gguf").stat().st_size
    made(path, tmp_path / "s.gguf", most_bytes=size)
    refused(path, "it would take 292 kB, and it may take 1.00 kB", most_bytes=1000)
    refused(path, "it would take", most_bytes=size - 1)


def test_dense_model(tmp_path: Path) -> None:
    refused(models.write_model(tmp_path / "m.gguf", "llama", dense=True), "no routed experts")


def test_experts_used_by_layer(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe", per_layer_used=True)
    refused(path, "number of experts used is stored by layer")


def test_experts_that_are_not_merged(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")
    refused(renamed(path, "_exps.weight", "_old5.weight"), "not stored as merged tensors")


@pytest.mark.parametrize("name", ["blk.1.ffn_up_exps.weight", "blk.0.attn_q.weight", "output.weight"])
def test_unknown_type(name: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (n_dimensions,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * n_dimensions, 139)  # a type of ik_llama.cpp
    path.write_bytes(data)
    refused(path, f"tensor {name} is of type 139, whose size is not known here")


def test_unknown_tensors(tmp_path: Path) -> None:
    for spec, match in (
        (TensorSpec("blk.0.ffn_up_chexps.weight", (4, 8, 32), 1.0), "a second set of experts .*blk.0.ffn_up_chexps"),
        (TensorSpec("blk.0.ffn_gate_tid2eid.weight", (298, 4), 1.0), "choose experts from a table"),
        (TensorSpec("hash.weight", (298, 4), 1.0), "tensor hash.weight has 298 rows, one a token"),
        (TensorSpec("output.bias", (297,), 1.0), r"output.bias has the shape \(297,\), which does not end with 298"),
        (TensorSpec("blk.0.ffn_gate_inp.weight", (31, 32), 1.0), r"the shape \(32, 31\), which does not end with 32"),
    ):
        refused(write_arrays(tmp_path / "m.gguf", "qwen3moe", more=(spec,)), match)


def test_tensors_known_to_be_whole(tmp_path: Path) -> None:
    """Rows of a block that happen to be as many as tokens, a scale of the router by width (gemma4): not cut."""
    more = (
        TensorSpec("blk.0.attn_q.weight", (298, 32), 1.0),
        TensorSpec("blk.0.ffn_gate_inp.scale", (64,), 1.0),
        TensorSpec("output.bias", (298,), 1.0),
        TensorSpec("rope_freqs.weight", (4,), 1.0),
        TensorSpec("blk.1.ffn_down_exps.scale", (32,), 1.0),
    )
    path = write_arrays(tmp_path / "m.gguf", "qwen3moe", more=more)
    made(path, tmp_path / "s.gguf")
    assert_beginnings(tmp_path / "s.gguf", [path])
    found = tensors([tmp_path / "s.gguf"])
    assert [found[spec.name].shape.tolist() for spec in more] == [[32, 298], [64], [256], [4], [8]]


def test_cut_within_a_block(tmp_path: Path) -> None:
    """A bias of 32 experts in one block of Q8_0 cannot be cut to 8."""
    spec = TensorSpec("blk.0.exp_probs_b.bias", (32,), 1.0)

    def kind(of: TensorSpec) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.Q8_0 if of == spec else gguf.GGMLQuantizationType.F32

    path = write_arrays(tmp_path / "m.gguf", "qwen3moe", more=(spec,), kind=kind)
    refused(path, "exp_probs_b.bias has rows of 8, cut within a block of 32")


def test_number_stored_as_text(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe", extra={"qwen3moe.vocab_size": "many"})
    refused(path, "qwen3moe.vocab_size is no number")


def test_file_cut_short_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")
    data = path.read_bytes()

    def cut(name: str) -> Any:
        headers = read_shards(name)
        path.write_bytes(data[: 3 * len(data) // 4])
        return headers

    with monkeypatch.context() as patch:
        patch.setattr(sample_module, "read_shards", cut)
        target = tmp_path / "s.gguf"
        model = read_model_file(path)
        with pytest.raises(ModelFileError, match=r"no sample of .*became shorter while it was read"):
            write_sample(model, target, most_bytes=ROOM)
    with pytest.raises(ModelFileError, match=r"no sample of .*cut short"):  # seen in the header
        write_sample(model, target, most_bytes=ROOM)
    path.unlink()
    with pytest.raises(ModelFileError, match=r"no sample of .*cannot be read"):
        write_sample(model, target, most_bytes=ROOM)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")
    with pytest.raises(ModelFileError, match=r"no sample of .*nowhere/s.gguf cannot be written \(No such file"):
        made(path, tmp_path / "nowhere" / "s.gguf")


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    """The error names the file that is written, not the model."""
    resource = pytest.importorskip("resource")
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ModelFileError, match=r"no sample of .*s.gguf cannot be written \(File too large"):
            made(path, tmp_path / "s.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]

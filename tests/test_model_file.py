from __future__ import annotations

import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gguf
import models
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agreement.errors import ModelFileError
from agreement.model_file import describe, expert_rows, model_digest, read_model_file, require_moe, size_text
from agreement.model_file.architectures import RESCALING, WIDTH_FROM_COUNT, rescaled

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def one_line(error: pytest.ExceptionInfo[ModelFileError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------------------------------------------- what is read


def test_facts_by_hand(tiny: Path) -> None:
    model = read_model_file(tiny)
    assert (model.architecture, model.name, model.shards) == ("qwen3moe", "tiny qwen3moe 0", (str(tiny),))
    assert (model.n_layer, model.n_expert_layers, model.n_expert, model.n_expert_used) == (2, 2, 16, 8)
    assert (model.n_expert_shared, model.n_ctx_train, model.n_embd) == (0, 4096, 32)
    assert model.n_vocab == 256 + 40 + 2  # bytes, merges, BOS and EOS
    # 2 layers x 3 matrices x 16 experts x 32 x 32 weights x 4 bytes
    assert model.bytes_experts == 2 * 3 * 16 * 32 * 32 * 4 == 393_216
    # embedding and output 298 x 32 each; a layer: q and o 32 x 32, k and v 16 x 32, router 16 x 32, norms 32, 32, 8
    # and 8; last norm 32
    assert model.bytes_resident == 4 * (2 * 298 * 32 + 2 * (2 * 1024 + 2 * 512 + 512 + 80) + 32)
    assert model.expert_bytes_per_token(6) == 393_216 * 6 // 16 == 147_456
    assert model.renormalised is True
    assert model.warnings == ()


@pytest.mark.parametrize("family", models.FAMILIES)
def test_agrees_with_the_gguf_package(family: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", family)
    model = read_model_file(path)
    reader = gguf.GGUFReader(path)
    scalars = {k: f.contents() for k, f in reader.fields.items() if f.types and f.types[0] != gguf.GGUFValueType.ARRAY}
    assert model.metadata == {k: v for k, v in scalars.items() if not k.startswith("GGUF.")}
    assert model.bytes_total == sum(t.n_bytes for t in reader.tensors)
    assert model.bytes_experts == sum(t.n_bytes for t in reader.tensors if "_exps." in t.name)
    assert model.n_vocab == len(reader.fields["tokenizer.ggml.tokens"].data)
    assert (model.n_expert, model.n_expert_used) == (16, 8)
    assert model.renormalised == models.FAMILIES[family].renormalised


@pytest.mark.parametrize(
    ("family", "layers", "shared"),
    [("deepseek2", (3, 2), 1), ("glm-dsa", (3, 2), 1), ("qwen2moe", (2, 2), 1), ("llama", (2, 2), 0)],
)
def test_leading_dense_blocks_and_shared_experts(
    family: str, layers: tuple[int, int], shared: int, tmp_path: Path
) -> None:
    model = read_model_file(models.write_model(tmp_path / "m.gguf", family))
    assert ((model.n_layer, model.n_expert_layers), model.n_expert_shared) == (layers, shared)


def test_biases_of_experts_count_as_experts(tmp_path: Path) -> None:
    model = read_model_file(models.write_model(tmp_path / "m.gguf", "gpt-oss"))
    # 2 layers x 16 experts x (3 matrices of 32 x 32 and 3 biases of 32) x 4 bytes
    assert model.bytes_experts == 2 * 16 * (3 * 1024 + 3 * 32) * 4


def test_prediction_blocks_are_left_out(tmp_path: Path) -> None:
    whole = read_model_file(models.write_model(tmp_path / "a.gguf", "deepseek2"))
    key = {"deepseek2.nextn_predict_layers": 1}
    model = read_model_file(models.write_model(tmp_path / "b.gguf", "deepseek2", extra=key))
    assert (model.n_layer, model.n_expert_layers) == (2, 1)
    assert model.bytes_experts * 2 == whole.bytes_experts
    assert model.bytes_total < whole.bytes_total


def test_more_prediction_blocks_than_blocks(tmp_path: Path) -> None:
    key = {"deepseek2.nextn_predict_layers": 4}
    with pytest.raises(ModelFileError, match="4 of 3 blocks"):
        read_model_file(models.write_model(tmp_path / "m.gguf", "deepseek2", extra=key))


def test_merged_gate_and_up_and_quantised_types(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "granite_swa")
    writer.add_block_count(1)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    raw = np.zeros((4, 8, 34 * 2), np.uint8)  # Q8_0: 34 bytes hold 32 weights, so rows of 64
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((4, 64), np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_model_file(tmp_path / "m.gguf")
    assert model.bytes_experts == 4 * 8 * 68
    assert model.bytes_resident == 4 * 64 * 4 + 10 * 64 * 2
    assert model.n_vocab == 10  # no token list: the embedding's rows
    # A type that only another program knows: 4 x 8 x 68 bytes to the next tensor, no padding since 2176 = 68 x 32.
    bits = bytearray((tmp_path / "m.gguf").read_bytes())
    at = bits.index(b"blk.0.ffn_gate_up_exps.weight") + len("blk.0.ffn_gate_up_exps.weight") + 4 + 3 * 8
    assert bits[at] == gguf.GGMLQuantizationType.Q8_0
    bits[at] = 144
    (tmp_path / "n.gguf").write_bytes(bits)
    assert read_model_file(tmp_path / "n.gguf").bytes_experts == 4 * 8 * 68


# ------------------------------------------------------------------------------------------------------- warnings


def test_dense_model(tmp_path: Path, tiny: Path) -> None:
    model = read_model_file(models.write_model(tmp_path / "m.gguf", "llama", dense=True))
    assert (model.n_expert, model.n_expert_used, model.bytes_experts, model.n_expert_layers) == (0, 0, 0, 0)
    assert (model.expert_bytes_per_token(3), model.warnings, model.renormalised) == (0, (), None)
    with pytest.raises(ModelFileError, match="dense model") as error:
        require_moe(model)
    one_line(error)
    require_moe(read_model_file(tiny))


def test_count_stored_by_layer(tmp_path: Path) -> None:
    model = read_model_file(models.write_model(tmp_path / "m.gguf", per_layer_used=True))
    assert model.n_expert_used is None
    assert [w for w in model.warnings if "array" in w] == list(model.warnings)
    assert [row.share for row in expert_rows(model)] == [None] * 16


@pytest.mark.parametrize(
    ("family", "variant", "says"),
    [
        ("qwen3moe", {"omit_expert_width": True}, "expert_feed_forward_length is missing"),
        ("qwen3moe", {"remove": ("qwen3moe.expert_used_count",)}, "expert_used_count is missing"),
        ("olmoe", {}, "not rescaled"),
        ("deepseek2", {"extra": {"deepseek2.expert_weights_norm": False}}, "not rescaled"),
        ("deepseek2", {"remove": ("deepseek2.expert_weights_norm",)}, "not rescaled"),
    ],
)
def test_warnings(family: str, variant: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = read_model_file(models.write_model(tmp_path / "m.gguf", family, **variant))
    assert len(model.warnings) == 1
    assert says in model.warnings[0]
    assert "\n" not in model.warnings[0]


def test_no_width_needed_where_it_is_not_derived(tmp_path: Path) -> None:
    model = read_model_file(models.write_model(tmp_path / "m.gguf", "llama"))  # has no such key at all
    assert model.warnings == ()


def test_unknown_architecture(tmp_path: Path) -> None:
    family = replace(models.FAMILIES["qwen3moe"], architecture="newest")
    keys = models.metadata("newest", family, family.dims, models.Variant())
    specs = [*models.tensors(family, family.dims), models.TensorSpec("blk.1.ffn_gate_tid2eid.weight", (298, 8), 1.0)]
    models._write(tmp_path / "m.gguf", "newest", keys, specs, variant=models.Variant())
    model = read_model_file(tmp_path / "m.gguf")
    assert model.renormalised is None
    assert ["not known" in w or "table" in w for w in model.warnings] == [True, True]


def test_experts_of_the_old_layout(tmp_path: Path) -> None:
    family = models.FAMILIES["llama"]
    keys = models.metadata("llama", family, family.dims, models.Variant())
    specs = [s for s in models.tensors(family, family.dims) if "_exps" not in s.name]
    models._write(tmp_path / "m.gguf", "llama", keys, specs, variant=models.Variant())
    model = read_model_file(tmp_path / "m.gguf")
    assert ["merged tensors" in w for w in model.warnings] == [True]


def test_rescaling_rules() -> None:
    assert len(RESCALING) == 31 + 7 + 24  # nobody is listed twice: `dict` would have swallowed one
    assert set(RESCALING) >= WIDTH_FROM_COUNT
    assert rescaled("gpt-oss", {}) is True
    assert rescaled("glm4moe", {"glm4moe.expert_weights_norm": True}) is True
    assert rescaled("glm4moe", {"deepseek2.expert_weights_norm": True}) is False
    assert rescaled("glm4moe", {"glm4moe.expert_gating_func": 3}) is True  # a softmax over the selected sums to one
    assert rescaled("jamba", {"jamba.expert_weights_norm": True}) is False  # the architecture does not read it


# --------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("given_shard", [0, 1, 2])
def test_split_model_from_any_shard(given_shard: int, tmp_path: Path) -> None:
    whole = read_model_file(models.write_model(tmp_path / "whole.gguf"))
    paths = models.write_split(tmp_path / "part", 3)
    model = read_model_file(paths[given_shard])
    assert model.shards == tuple(map(str, paths))
    assert model.path == str(paths[0])
    same = replace(model, path=whole.path, shards=whole.shards, metadata=whole.metadata)
    assert same == whole
    assert model.metadata == whole.metadata | {"split.no": 0, "split.count": 3, "split.tensors.count": 27}


def test_split_model_from_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.write_split(tmp_path / "part", 2)
    monkeypatch.chdir(tmp_path)
    assert read_model_file("./part-00002-of-00002.gguf").shards == (
        "part-00001-of-00002.gguf",
        "./part-00002-of-00002.gguf",
    )


def test_split_into_one(tmp_path: Path) -> None:
    (path,) = models.write_split(tmp_path / "part", 1)
    assert read_model_file(path).shards == (str(path),)


def test_missing_shard(tmp_path: Path) -> None:
    paths = models.write_split(tmp_path / "part", 4)
    paths[2].unlink()
    with pytest.raises(ModelFileError, match=r"shard part-00003-of-00004\.gguf of 4 is missing") as error:
        read_model_file(paths[0])
    one_line(error)
    paths[0].unlink()
    with pytest.raises(ModelFileError, match=r"part-00001-of-00004\.gguf and 1 more of 4"):
        read_model_file(paths[1])


def test_misnamed_shards(tmp_path: Path) -> None:
    paths = models.write_split(tmp_path / "part", 2)
    other = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="not named PREFIX-0000N-of-00002"):
        read_model_file(other)
    paths[1].rename(paths[0])
    other.rename(paths[1])
    with pytest.raises(ModelFileError, match=r"says it is shard 1 \(from 0\) of 2"):
        read_model_file(paths[0])


def test_shards_of_different_models(tmp_path: Path) -> None:
    paths = models.write_split(tmp_path / "part", 2)
    dims = replace(models.FAMILIES["qwen3moe"].dims, n_layer=1)
    others = models.write_split(tmp_path / "other", 2, dims=dims)
    others[1].replace(paths[1])
    with pytest.raises(ModelFileError, match=r"tensor .* is in another shard too"):
        read_model_file(paths[0])
    others[0].replace(paths[0])  # now a whole model again
    assert read_model_file(paths[1]).n_layer == 1


def test_shards_without_some_tensors(tmp_path: Path) -> None:
    paths = models.write_split(tmp_path / "part", 2)
    bits = paths[0].read_bytes()
    at = bits.index(b"split.tensors.count") + len("split.tensors.count") + 4
    paths[0].write_bytes(bits[:at] + struct.pack("<i", 28) + bits[at + 4 :])
    with pytest.raises(ModelFileError, match="its shards hold 27 tensors, the first says 28"):
        read_model_file(paths[0])


# ------------------------------------------------------------------------------------------------------ bad files


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cut short"),
        (b"GG", "cut short"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"a", "not a GGUF file"),
        (b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\x04\0\0\0", "version 4"),
        (b"GGUF\0\0\0\x03", "big-endian"),
        (b"GGUF\x03\0\0\0", "cut short or damaged"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 400, "cut short or damaged"),
        (b"GGUF\x03\0\0\0" + bytes(16), "without general.architecture"),
    ],
)
def test_files_that_are_no_model(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says) as error:
        read_model_file(path)
    assert one_line(error).startswith(f"{path}: ")


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def gguf_file(keys: list[bytes], tensors: list[bytes] | None = None) -> bytes:
    infos = tensors or []
    return b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)


ARCH = key(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gguf_file([ARCH, ARCH]), "'general.architecture' is there twice"),
        (gguf_file([key(b"x", 13, b"")]), "unknown type 13"),
        (gguf_file([key(b"x", 9, struct.pack("<IQ", 9, 1))]), "array of unknown type 9"),
        (gguf_file([key(b"x", 9, struct.pack("<IQ", 0, 2**63))]), "cut short"),
        (gguf_file([key(b"x", 9, struct.pack("<IQ", 8, 2**63))]), "cut short"),
        (gguf_file([key(b"x", 9, struct.pack("<IQQ", 8, 2, 2**64 - 1))]), "cut short"),
        (gguf_file([key(b"general.alignment", 4, struct.pack("<I", 24))]), "not a power of two"),
        (gguf_file([], [struct.pack("<Q", 1) + b"t" + struct.pack("<I", 5)]), "5 dimensions"),
        (gguf_file([], [struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1, 0, 0)] * 2), "cut short"),
        (
            gguf_file([], [struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1, 0, 0)] * 2) + bytes(64),
            "'t' is there twice",
        ),
        (gguf_file([ARCH]), "no llama.block_count"),
        (gguf_file([ARCH, key(b"llama.block_count", 5, struct.pack("<i", -1))]), "block_count is -1"),
        (gguf_file([ARCH, key(b"llama.block_count", 6, struct.pack("<f", 2.5))]), "block_count is 2.5"),
        (gguf_file([ARCH, key(b"general.type", 8, struct.pack("<Q", 7) + b"adapter")]), "type 'adapter'"),
    ],
)
def test_damaged_headers(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says) as error:
        read_model_file(path)
    one_line(error)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a folder"):
        read_model_file(tmp_path)
    with pytest.raises(ModelFileError, match=r"cannot be read \(No such file"):
        read_model_file(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_model_file("a\0b")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_model_file("/dev/null")
    os.mkfifo(tmp_path / "pipe")  # must not wait for a writer
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_model_file(tmp_path / "pipe")


def test_last_byte_missing(tiny: Path, tmp_path: Path) -> None:
    bits = tiny.read_bytes()
    (tmp_path / "m.gguf").write_bytes(bits[:-1])  # the last tensor is 298 x 32 floats, so there is no padding after it
    with pytest.raises(ModelFileError, match=rf"tensor 'output.weight' ends at byte {len(bits)} of {len(bits) - 1}"):
        read_model_file(tmp_path / "m.gguf")


SLOW_FIXTURE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@SLOW_FIXTURE
@given(share=st.floats(0, 1, exclude_max=True))
def test_cut_anywhere(tiny: Path, tmp_path: Path, share: float) -> None:
    bits = tiny.read_bytes()
    # Half of the cuts are in the header, the first 12 kB.
    length = int(share * 2 * 12_000) if share < 0.5 else int((share - 0.5) * 2 * len(bits))
    (tmp_path / "m.gguf").write_bytes(bits[: min(length, len(bits) - 1)])
    with pytest.raises(ModelFileError) as error:
        read_model_file(tmp_path / "m.gguf")
    one_line(error)


@SLOW_FIXTURE
@given(changes=st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_anywhere(tiny: Path, tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    bits = bytearray(tiny.read_bytes())
    for at, value in changes:
        bits[at] = value
    (tmp_path / "m.gguf").write_bytes(bits)
    try:
        model = read_model_file(tmp_path / "m.gguf")
    except ModelFileError as error:
        assert "\n" not in str(error)  # noqa: PT017  (either outcome is right; no other exception is)
    else:
        assert 0 <= model.bytes_experts <= model.bytes_total <= len(bits)


# --------------------------------------------------------------------------------------------------------- digest


def test_digest_is_that_of_all_bytes(tmp_path: Path) -> None:
    paths = models.write_split(tmp_path / "part", 3)
    steps: list[tuple[int, int]] = []
    digest = model_digest(read_model_file(paths[1]), lambda done, total: steps.append((done, total)))
    together = b"".join(p.read_bytes() for p in paths)
    assert digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(together)}"
    assert steps[-1] == (len(together), len(together))
    assert [d for d, _ in steps] == sorted({d for d, _ in steps})


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6.1 MB, more than the 4 MiB that are sampled whole."""
    return models.write_model(tmp_path_factory.mktemp("model") / "larger.gguf", n_vocab=22_000)


def test_quick_digest(larger: Path, tmp_path: Path) -> None:
    model = read_model_file(larger)
    steps: list[int] = []
    digest = model_digest(model, lambda done, _: steps.append(done), quick=True)
    assert digest.startswith("xxh3-128-sampled:")
    assert digest.split(":")[1] != model_digest(model).split(":")[1]
    data = model.bytes_total  # and padding, under 1 kB
    header = larger.stat().st_size - data
    assert steps[-1] == pytest.approx(header + 64 * 65_536, abs=1024)  # less than the file: it is a sample
    bits = bytearray(larger.read_bytes())
    for at in (header + 5, len(bits) - 1, bits.index(b"tiny qwen3moe 0")):  # first and last of the data, a key
        changed = tmp_path / "changed.gguf"
        copy = bytearray(bits)
        copy[at] ^= 1
        changed.write_bytes(copy)
        assert model_digest(read_model_file(changed), quick=True) != digest
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(bits + bytes(32))
    assert model_digest(read_model_file(longer), quick=True) != digest
    again = tmp_path / "again.gguf"
    again.write_bytes(bits)
    assert model_digest(read_model_file(again), quick=True) == digest


def test_quick_digest_of_a_small_model_reads_everything(tiny: Path, tmp_path: Path) -> None:
    digest = model_digest(read_model_file(tiny), quick=True)
    bits = bytearray(tiny.read_bytes())
    bits[len(bits) // 2] ^= 1
    (tmp_path / "m.gguf").write_bytes(bits)
    assert model_digest(read_model_file(tmp_path / "m.gguf"), quick=True) != digest


def test_digest_of_a_file_that_went_away(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf")
    model = read_model_file(path)
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read"):
        model_digest(model)


# ---------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_640_000_000, "1.64 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_size_text(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


def test_expert_rows_by_hand(tiny: Path) -> None:
    model = replace(read_model_file(tiny), bytes_total=1000, bytes_experts=800, n_expert=16, n_expert_used=4)
    rows = expert_rows(model)
    assert [(r.n_used, r.expert_bytes) for r in rows] == [(1, 50), (2, 100), (3, 150), (4, 200)]
    assert [r.share for r in rows] == [250 / 400, 300 / 400, 350 / 400, 1.0]  # 200 bytes are resident


def test_description(tiny: Path, tmp_path: Path) -> None:
    facts = dict(describe(read_model_file(tiny), memory=10**6))
    assert facts["layers"] == "2, 2 of them with routed experts"
    assert facts["experts a layer"] == "16 routed, 0 shared"
    assert facts["experts used per token"] == "8"
    assert facts["routed experts"] == "393 kB"
    assert facts["memory"] == "fits in the 1.00 MB that may be used (weights alone)"
    assert "memory" not in dict(describe(read_model_file(tiny)))
    assert dict(describe(read_model_file(tiny), memory=400_000))["memory"].startswith("is larger than")
    dense = dict(describe(read_model_file(models.write_model(tmp_path / "m.gguf", "llama", dense=True))))
    assert dense["experts"] == "none: a dense model"
    assert "routed experts" not in dense

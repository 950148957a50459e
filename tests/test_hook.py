"""The router hook over graph nodes in plain memory: names, rows, layouts, the softmax after the selection, refusals.

What it does inside the engine is tested in `test_onepass.py`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Sequence
from types import SimpleNamespace

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from numpy.typing import NDArray

from agreement.engine.hook import Kept, RouterHook
from agreement.engine.softmax import engine_softmax
from agreement.engine.tensors import TensorLayout, Tensors, _TensorHead, exported
from agreement.errors import EngineError
from agreement.routing import Policy


class Nodes:
    """Graph nodes in plain memory, numbered from 1: what `Tensors` is to the hook."""

    def __init__(self, nodes: Sequence[tuple[bytes, NDArray[np.float32]]]) -> None:
        self.nodes = nodes
        self.host = True

    def name(self, tensor: int) -> bytes:
        return self.nodes[tensor - 1][0]

    def on_host(self, _tensor: int) -> bool:
        return self.host

    def layout(self, tensor: int) -> TensorLayout:
        data = self.nodes[tensor - 1][1]
        return TensorLayout((1, data.shape[1], len(data), 1), (4, 4, 4 * data.shape[1], data.nbytes), data.nbytes)

    def read(self, tensor: int, n_bytes: int) -> NDArray[np.uint8]:
        assert n_bytes == self.nodes[tensor - 1][1].nbytes
        return np.frombuffer(self.nodes[tensor - 1][1].tobytes(), np.uint8).copy()

    def write(self, tensor: int, buffer: NDArray[np.uint8]) -> None:
        self.nodes[tensor - 1][1][:] = buffer.view(np.float32).reshape(self.nodes[tensor - 1][1].shape)

    def evaluate(self, hook: RouterHook) -> None:
        """Do as the scheduler does: ask for each node, and hand it over if it is wanted."""
        for tensor in range(1, len(self.nodes) + 1):
            if hook.callback(tensor, True, None):
                hook.callback(tensor, False, None)


def fake_hook(nodes: Nodes) -> RouterHook:
    callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    engine = SimpleNamespace(ggml_backend_sched_eval_callback=callback, _lib=llama._lib)
    hook = RouterHook(engine, nodes)
    hook.learn(lambda: nodes.evaluate(hook))
    return hook


def graph(*names: str, n_tokens: int = 4) -> Nodes:
    return Nodes([(name.encode(), np.full((n_tokens, 2), 0.5, np.float32)) for name in names])


def test_nodes_are_matched_by_their_exact_name() -> None:
    """And an architecture that routes twice a layer, and one layer with a softmax after the selection."""
    nodes = graph(
        "ffn_moe_argsort-3", "ffn_moe_weights-3", "ffn_moe_weights-3 (reshaped)", "ffn_moe_weights_norm-3",
        "ffn_moe_weights-x", "ffn_moe_weights-", "CUDA0#ffn_moe_weights-3#0", "ffn_moe_weights-3",
        "ffn_moe_argsort-12", "ffn_moe_weights-12", "ffn_moe_weights_softmax-12",
    )  # fmt: skip
    hook = fake_hook(nodes)
    assert {layer: (f.n_used, f.n_calls, f.softmax_after) for layer, f in hook.layers.items()} == {
        3: (2, 2, False),
        12: (2, 1, True),
    }
    hook.kept = [Kept(), Kept()]
    with hook.during((None, Policy("experts", 1)), 2, np.array([False, True, False, True])):
        nodes.evaluate(hook)
    changed = {i + 1 for i, (_, data) in enumerate(nodes.nodes) if not (data == 0.5).all()}
    assert changed == {2, 8, 10, 11}
    assert np.array_equal(nodes.nodes[1][1], np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0], [0.5, 0]], np.float32))
    assert np.isneginf(nodes.nodes[9][1][2:, 1]).all()
    assert nodes.nodes[10][1].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0], [1, 0]]  # of one expert: all of it
    assert [(k.rows, k.kept) for k in hook.kept] == [(6, 12), (6, 6)]  # 2 tokens, 3 nodes


def test_last_layer_has_the_rows_of_the_outputs_only() -> None:
    nodes = graph("ffn_moe_argsort-0", "ffn_moe_weights-0", n_tokens=3)
    hook = fake_hook(nodes)
    with hook.during((Policy("experts", 1), None), 2, np.array([False, True, True, True])):
        nodes.evaluate(hook)
    assert np.array_equal(nodes.nodes[1][1], np.array([[0.5, 0], [0.5, 0.5], [0.5, 0.5]], np.float32))


def test_no_output_in_this_piece() -> None:
    hook = fake_hook(graph("ffn_moe_argsort-0", "ffn_moe_weights-0", n_tokens=1))
    hook._tensors = graph("ffn_moe_argsort-0", "ffn_moe_weights-0", n_tokens=0)
    with hook.during((Policy("experts", 1), None), 2, np.zeros(4, np.bool_)):
        hook._tensors.evaluate(hook)


def test_experts_that_are_not_ranked() -> None:
    with pytest.raises(EngineError, match="layer 1 does not rank its experts"):
        fake_hook(graph("ffn_moe_argsort-0", "ffn_moe_weights-0", "ffn_moe_weights-1"))


def softmax_of(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    powers = np.exp(rows.astype(np.float64) - rows.max(axis=1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return shares


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 7, 8, 9, 16, 17])
def test_softmax_of_the_engine(k: int) -> None:
    """Against float64, and each row as if it were alone."""
    softmax = engine_softmax(llama)
    assert softmax is not None
    rows = np.random.default_rng(k).normal(0, 4, (70, k)).astype(np.float32)
    found = softmax(rows)
    assert np.abs(found - softmax_of(rows)).max() < 1e-6
    assert np.array_equal(softmax(rows[[33, 5]]), found[[33, 5]])
    assert softmax(rows[:0]).shape == (0, k)


def routed_by_softmax(scores: NDArray[np.float32]) -> Nodes:
    names = (b"ffn_moe_argsort-0", b"ffn_moe_weights-0", b"ffn_moe_weights_softmax-0")
    return Nodes([(name, data) for name, data in zip(names, (scores, scores, np.full_like(scores, 9)), strict=True)])


def test_softmax_of_the_kept_alone() -> None:
    """Rows that lost experts get the softmax of those kept; others stay, also one with a score of -inf of its own."""
    scores = np.array([[3, 1, 0], [2, 1, -np.inf], [5, 4, 0.5], [3, 3, 3], [2, 1, 0], [2, 1, 0.1]], np.float32)
    nodes = routed_by_softmax(scores.copy())
    hook = fake_hook(nodes)
    policies = (None, Policy("experts", 2), Policy("ser", 1, 0.3))
    with hook.during(policies, 2, np.ones(6, np.bool_)):
        nodes.evaluate(hook)
    _, (_, weights), (_, shares) = nodes.nodes
    minus = -np.inf
    assert weights.tolist() == [[3, 1, 0], [2, 1, minus], [5, 4, minus], [3, 3, minus], [2, 1, minus], [2, 1, minus]]
    assert shares[:2].tolist() == [[9] * 3] * 2
    expected = np.zeros((4, 3))
    expected[:, :2] = softmax_of(scores[2:, :2])
    assert np.abs(shares[2:] - expected).max() < 1e-6
    assert (shares[2:, 2] == 0).all()


def test_softmax_that_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another backend, and where a build does not offer its operator, the engine's own over -inf is the answer."""
    for host, offered in ((False, True), (True, False)):
        nodes = routed_by_softmax(np.ones((2, 3), np.float32))
        nodes.host = host
        with monkeypatch.context() as patch:
            if not offered:
                patch.setattr(llama._lib, "_name", "nowhere/libllama.so")
                patch.setattr("agreement.engine.softmax._CPU", 99)
            hook = fake_hook(nodes)
        with hook.during((None, Policy("experts", 1)), 1, np.ones(2, np.bool_)):
            nodes.evaluate(hook)
        assert np.isneginf(nodes.nodes[1][1][1, 1:]).all()
        assert (nodes.nodes[2][1] == 9).all()


def test_softmax_that_is_not_as_the_scores() -> None:
    nodes = routed_by_softmax(np.ones((2, 3), np.float32))
    hook = fake_hook(nodes)
    policies, outputs = (None, Policy("experts", 1)), np.ones(2, np.bool_)
    nodes.nodes = [*nodes.nodes[:2], (nodes.nodes[2][0], np.ones((2, 2), np.float32))]
    with (
        pytest.raises(EngineError, match=r"softmax of layer 0 has the shape \(2, 2\)"),
        hook.during(policies, 1, outputs),
    ):
        nodes.evaluate(hook)
    nodes.nodes = [nodes.nodes[1], nodes.nodes[1]]
    with pytest.raises(EngineError, match="twice before its softmax"), hook.during(policies, 1, outputs):
        nodes.evaluate(hook)


def test_router_graph_that_changes() -> None:
    hook = fake_hook(graph("ffn_moe_argsort-0", "ffn_moe_weights-0"))
    hook._tensors = graph("ffn_moe_argsort-0", "ffn_moe_weights-0", "ffn_moe_weights_softmax-0")
    policies, outputs = (None, Policy("experts", 1)), np.ones(4, np.bool_)
    with pytest.raises(EngineError, match="router graph changed"), hook.during(policies, 2, outputs):
        hook._tensors.evaluate(hook)
    hook._tensors = graph("ffn_moe_weights-0", "ffn_moe_weights-7")
    with pytest.raises(EngineError, match="layer 7 routes now"), hook.during(policies, 2, outputs):
        hook._tensors.evaluate(hook)


def test_a_failed_callback_is_the_cause_and_not_the_status() -> None:
    hook = fake_hook(graph("ffn_moe_argsort-0", "ffn_moe_weights-0"))
    hook._tensors = graph("ffn_moe_weights-0", n_tokens=5)

    def decode() -> None:
        hook._tensors.evaluate(hook)
        raise EngineError("llama_decode failed with status 2")

    with (
        pytest.raises(EngineError, match="has 5 rows, the batch 4 tokens"),
        hook.during((None, Policy("experts", 1)), 2, np.ones(4, np.bool_)),
    ):
        decode()


def test_layout_of_a_node_is_checked() -> None:
    """The head of a node is read from memory, and held against what the library says of the same memory."""
    node = _TensorHead.from_buffer(bytearray(512))
    address = ctypes.addressof(node)
    node.type, node.ne[:], node.nb[:] = 0, (1, 8, 5, 1), (4, 4, 32, 160)
    tensors = Tensors(llama)
    assert tensors.layout(address) == TensorLayout((1, 8, 5, 1), (4, 4, 32, 160), 160)
    node.nb[2] = 64  # every other row of something larger
    assert tensors.layout(address).n_bytes == 4 * 64 + 32
    node.ne[2] = 0
    assert tensors.layout(address).n_bytes == 0
    node.ne[2], node.type = 5, 1  # float16
    with pytest.raises(EngineError, match="not the float32 tensor"):
        tensors.layout(address)


def test_library_beside_the_engine() -> None:
    """Where a handle does not find the symbols of other libraries, the file beside it does."""
    other = ctypes.CDLL(ctypes.util.find_library("m"))
    other._name = llama._lib._name
    size = exported(SimpleNamespace(_lib=other), "ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    assert (size(0), size(1)) == (4, 2)  # float32, float16
    for name in ("ggml_no_such_function", "ggml_type_size"):
        with pytest.raises(EngineError, match=f"do not offer {name}"):
            exported(SimpleNamespace(_lib=other), name, ctypes.c_size_t, ctypes.c_int)
        other._name = "nowhere/libllama.so"


def test_rows_with_strides() -> None:
    """Rows 16 bytes apart that use 8 of them; what lies between stays."""
    buffer = np.arange(11, dtype=np.float32).view(np.uint8).copy()
    rows = TensorLayout((1, 2, 3, 1), (4, 4, 16, 48), 40).rows(buffer)
    assert rows.tolist() == [[0, 1], [4, 5], [8, 9]]
    rows[:, 1] = 0
    assert buffer.view(np.float32).tolist() == [0, 0, 2, 3, 4, 0, 6, 7, 8, 0, 10]
    with pytest.raises(EngineError, match="unknown shape"):
        TensorLayout((2, 2, 3, 1), (4, 8, 16, 48), 48).rows(buffer)
    with pytest.raises(EngineError, match="unknown strides"):
        TensorLayout((1, 2, 3, 1), (4, 6, 12, 36), 34).rows(buffer)

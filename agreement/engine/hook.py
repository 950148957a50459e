"""The router hook: a graph callback that changes which of the selected experts count, row by row.

In: policies of the sequences in a batch.  Out: changed gate weights inside the engine, counts of what was kept, and an
error if the engine did not show what the hook relies on.

llama.cpp calls `cb_eval` for every node of its graph: first to ask whether the data is wanted, then, if so, with the
node computed.  Nodes are named `NAME-LAYER`.  This one wants `ffn_moe_weights-LAYER`: the gate values of the selected
experts before any normalisation, so that zeroing a column is the same as never having selected that expert.  Where the
gate is a softmax over the selected experts, that node holds scores and a silenced one becomes -inf.  If the processor
computed the softmax that follows, `ffn_moe_weights_softmax-LAYER`, and the build offers what it takes, that is computed
again over the columns that are left, which rounds as the engine does (see `agreement.engine.softmax`).

What depends on the build or the model is not assumed but learned from one token decoded after loading (`learn`): which
layers have the node, how many experts it holds, whether a softmax over the selected experts follows it.  Each later
decode must show the same, or it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agreement.engine.softmax import RowSoftmax, engine_softmax
from agreement.engine.tensors import TensorLayout, Tensors
from agreement.errors import EngineError, SettingError
from agreement.records import Float32Array
from agreement.routing import Policy, drop_experts

WEIGHTS = b"ffn_moe_weights-"
SOFTMAX = b"ffn_moe_weights_softmax-"
RANKED = b"ffn_moe_argsort-"
_PREFIX = b"ffn_moe_"


@dataclass(frozen=True)
class RoutedLayer:
    """What one decoded token showed of a layer.

    Attributes:
        n_used: Experts selected.
        n_calls: Nodes of that name in one graph; 1 except where an architecture routes twice a layer.
        softmax_after: A softmax over the selected experts follows.
    """

    n_used: int
    n_calls: int
    softmax_after: bool


@dataclass
class Kept:
    """Experts kept, summed over rows and layers: `kept / rows` is the mean per token and layer.

    Attributes:
        rows: Rows seen: one for each token and routed layer; of the last layer, only where logits were asked for.
        kept: Experts kept in them.
    """

    rows: int = 0
    kept: int = 0

    @property
    def mean(self) -> float:
        """Experts kept a row; NaN if none was seen."""
        return self.kept / self.rows if self.rows else float("nan")


class RouterHook:
    """The callback and what it knows; keep it alive as long as the context that holds `callback`.

    Attributes:
        callback: For `llama_context_params.cb_eval`.
        layers: By layer number, filled by `learn`.
        kept: One for each sequence of the current decode.
    """

    def __init__(self, llama: Any, tensors: Any = None) -> None:
        self.callback = llama.ggml_backend_sched_eval_callback(self._on_node)
        self.layers: dict[int, RoutedLayer] = {}
        self.kept: list[Kept] = []
        self._tensors: Any = tensors if tensors is not None else Tensors(llama)
        self._llama = llama
        self._row_softmax: RowSoftmax | None = None
        self._error: BaseException | None = None
        self._active = False
        self._clear([])

    def _clear(self, policies: Sequence[Policy | None]) -> None:
        self._policies = list(dict.fromkeys(policies))
        index = {policy: i for i, policy in enumerate(self._policies)}
        self._policy_of_sequence = np.array([index[p] for p in policies], np.intp)
        self._sequence_of_row = self._sequence_of_output = np.empty(0, np.intp)
        self._calls: dict[int, int] = {}
        self._n_used: dict[int, int] = {}
        self._softmax: set[int] = set()
        self._ranked: set[int] = set()
        self._kept_scores: dict[int, tuple[Float32Array, NDArray[np.bool_]]] = {}

    def learn(self, decode_one: Callable[[], None]) -> None:
        """Watch one token go through the graph and note what its layers look like.

        Args:
            decode_one: Decodes one token of one sequence and asks for its logits.

        Raises:
            EngineError: The engine never called back for a router, or shows something unknown.
        """
        with self.during([None], 1, np.ones(1, np.bool_), learning=True):
            decode_one()
        if not self._calls:
            raise EngineError(
                "the engine never called the router hook (no ffn_moe_weights in its graph), so no expert can be "
                "dropped; run separate passes"
            )
        unranked = sorted(self._calls.keys() - self._ranked)
        if unranked:
            raise EngineError(
                f"layer {unranked[0]} does not rank its experts (no ffn_moe_argsort in its graph), so the best cannot "
                "be told; run separate passes"
            )
        self.layers = {
            layer: RoutedLayer(self._n_used[layer], n, layer in self._softmax) for layer, n in self._calls.items()
        }
        if self._softmax:
            self._row_softmax = engine_softmax(self._llama)

    def check(self, policies: Sequence[Policy | None]) -> None:
        """Refuse policies that keep more experts than the model selects.

        Raises:
            SettingError: Names the first such policy.
        """
        most = max(layer.n_used for layer in self.layers.values())
        for policy in policies:
            if policy is not None and policy.keep > most:
                instead = "run it with --passes separate" if policy.kind == "experts" else f"give K from 1 to {most}"
                raise SettingError(
                    f"{policy}: the model selects {most} experts and one pass can only drop some of them; {instead}"
                )

    @contextmanager
    def during(
        self,
        policies: Sequence[Policy | None],
        n_tokens: int,
        outputs: NDArray[np.bool_],
        *,
        learning: bool = False,
    ) -> Iterator[None]:
        """Apply `policies` to the one micro-batch that is decoded inside.

        Args:
            policies: One a sequence; None changes nothing.
            n_tokens: Tokens of each sequence in the batch, sequence by sequence.
            outputs: (n_sequences * n_tokens,) bool, rows whose logits are asked for.
            learning: Only look.

        Raises:
            EngineError: Something went wrong in the callback, or it was not called as `learn` saw it.
        """
        self._clear(policies)
        self._sequence_of_row = np.repeat(np.arange(len(policies)), n_tokens)
        self._sequence_of_output = self._sequence_of_row[outputs]
        self._active = learning or any(policy is not None for policy in policies)
        self._error = None
        try:
            yield
        except EngineError:
            self._raise_error()  # a callback that failed is the cause, the engine's status its consequence
            raise
        finally:
            self._active = False
        self._raise_error()
        if not learning and any(policy is not None for policy in policies):
            self._compare()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, Exception) or isinstance(error, EngineError):
            raise error
        raise EngineError(f"the router hook failed: {type(error).__name__}: {error}") from error

    def _compare(self) -> None:
        """Refuse a decode in which the graph was not the one learned: what was dropped would be anyone's guess."""
        expected = {layer: facts.n_calls for layer, facts in self.layers.items()}
        if self._calls != expected:
            different = min(
                layer for layer in expected.keys() | self._calls if expected.get(layer) != self._calls.get(layer)
            )
            raise EngineError(
                f"the engine called the router hook {self._calls.get(different, 0)} times for layer {different}, not "
                f"{expected.get(different, 0)}: the batch was not decoded as one micro-batch; run separate passes"
            )
        softmax = {layer for layer, facts in self.layers.items() if facts.softmax_after}
        if softmax != self._softmax:
            raise EngineError("the engine's router graph changed between two batches; run separate passes")

    def _on_node(self, tensor: int, ask: bool, _user: Any) -> bool:
        """Answer the engine.  Nothing may be raised through C: it is kept for `during`."""
        if not self._active or self._error is not None:
            return False
        try:
            if ask:
                return self._asked(self._tensors.name(tensor))
            layer = _layer(self._tensors.name(tensor), WEIGHTS)
            if layer is None:
                self._normalise(tensor)
            else:
                self._change(tensor, layer)
        except BaseException as error:  # noqa: BLE001  # Ctrl-C arrives here too, and ctypes would swallow it
            self._error = error
            return False
        return True

    def _asked(self, name: bytes) -> bool:
        if not name.startswith(_PREFIX):
            return False
        for prefix, seen in ((SOFTMAX, self._softmax), (RANKED, self._ranked)):
            layer = _layer(name, prefix)
            if layer is not None:
                seen.add(layer)
        return _layer(name, WEIGHTS) is not None or _layer(name, SOFTMAX) in self._kept_scores

    def _change(self, tensor: int, layer: int) -> None:
        """Drop what the policies drop from one layer's node."""
        layout: TensorLayout = self._tensors.layout(tensor)
        _, n_used, n_rows, _ = layout.ne
        self._calls[layer] = self._calls.get(layer, 0) + 1
        self._n_used[layer] = n_used
        if n_rows == 0 or not self.layers:
            return
        if layer not in self.layers:
            raise EngineError(f"layer {layer} routes now and did not when the engine was loaded; run separate passes")
        sequence_of_row = self._rows(n_rows, layer)
        buffer = self._tensors.read(tensor, layout.n_bytes)
        weights = layout.rows(buffer)
        changed, n_kept = drop_experts(
            weights,
            self._policies,
            self._policy_of_sequence[sequence_of_row],
            softmax_after=self.layers[layer].softmax_after,
        )
        if layer in self._kept_scores:
            raise EngineError(f"layer {layer} routes twice before its softmax; run separate passes")
        if self.layers[layer].softmax_after and self._row_softmax is not None and self._tensors.on_host(tensor):
            self._kept_scores[layer] = changed, np.isneginf(weights) | ~np.isneginf(changed)
        weights[:] = changed
        self._tensors.write(tensor, buffer)
        n_sequences = len(self._policy_of_sequence)
        rows = np.bincount(sequence_of_row, minlength=n_sequences)
        kept = np.bincount(sequence_of_row, weights=n_kept, minlength=n_sequences)
        for total, n, k in zip(self.kept, rows, kept, strict=False):
            total.rows += int(n)
            total.kept += int(k)

    def _normalise(self, tensor: int) -> None:
        """Compute the softmax of the rows that lost experts as if only those kept had been selected."""
        layer = _layer(self._tensors.name(tensor), SOFTMAX)
        assert layer is not None
        assert self._row_softmax is not None
        (scores, kept), layout = self._kept_scores.pop(layer), self._tensors.layout(tensor)
        buffer = self._tensors.read(tensor, layout.n_bytes)
        shares = layout.rows(buffer)
        if shares.shape != scores.shape:
            raise EngineError(
                f"the softmax of layer {layer} has the shape {shares.shape}, its scores {scores.shape}; "
                "run separate passes"
            )
        n_kept = kept.sum(axis=1)
        for k in np.unique(n_kept[n_kept < scores.shape[1]]):
            rows = np.flatnonzero(n_kept == k)
            part = np.zeros((len(rows), scores.shape[1]), np.float32)
            part[kept[rows]] = self._row_softmax(scores[rows][kept[rows]].reshape(-1, k)).ravel()
            shares[rows] = part
        self._tensors.write(tensor, buffer)

    def _rows(self, n_rows: int, layer: int) -> NDArray[np.intp]:
        """Return the sequence of each row: all tokens, or in the last layer only those whose logits are asked for."""
        for sequences in (self._sequence_of_row, self._sequence_of_output):
            if n_rows == len(sequences):
                return sequences
        raise EngineError(
            f"the router of layer {layer} has {n_rows} rows, the batch {len(self._sequence_of_row)} tokens and "
            f"{len(self._sequence_of_output)} outputs; run separate passes"
        )


def _layer(name: bytes, prefix: bytes) -> int | None:
    """Return the layer of a node called exactly `PREFIXLAYER`, None for any other name."""
    number = name[len(prefix) :]
    return int(number) if name.startswith(prefix) and number.isdigit() else None

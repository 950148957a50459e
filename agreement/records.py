"""The frozen records that travel between stages.

Nothing here computes more than a property; nothing here reads files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class Document:
    """One source text: the unit that is drawn at random, so the unit of every interval.

    Attributes:
        name: Path relative to the corpus root, with forward slashes; unique within a corpus.
        text: The whole text.
        language: What kind of text it is, e.g. `python` or `prose`; empty if unknown.
        sha256: Hex digest of the text's UTF-8 bytes.
    """

    name: str
    text: str
    language: str
    sha256: str


@dataclass(frozen=True)
class Skipped:
    """A source that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """A list of documents in a fixed order.

    Attributes:
        name: For people; not part of the fingerprint.
        documents: In the order in which chunks are cut.
        skipped: Everything that was seen and not used.
        fingerprint: Hex digest of names and text digests in order.
        notes: Remarks about the source, one line each, for people; not part of the fingerprint.
    """

    name: str
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()


Chunking = Literal["document", "llama-perplexity"]


@dataclass(frozen=True)
class ChunkSet:
    """Fixed token windows, the same for every pass of a run.

    Position `p` of a chunk is scored if `first <= p < last`: the logits after `tokens[: p + 1]` are compared, and
    the target is `targets[c, p - first]`.

    Attributes:
        tokens: (n_chunks, n_ctx) int32, as they are decoded (BOS already in place where the model asks for it).
        targets: (n_chunks, n_scored) int32, the true next token at each scored position.
        cluster: (n_chunks,) int32, index into `cluster_names`: chunks with the same one were not drawn independently.
        cluster_names: One a cluster: the document's name, or `chunk-N` where chunks are not cut by document.
        first: First scored position.
        last: One past the last scored position; at most n_ctx - 1.
        chunking: How the text was cut.
        seed: Seed of the selection.
        notes: What was left out in cutting, one line each, for people.
        fingerprint: Hex digest of everything above but the notes.
    """

    tokens: Int32Array
    targets: Int32Array
    cluster: Int32Array
    cluster_names: tuple[str, ...]
    first: int
    last: int
    chunking: Chunking
    seed: int
    notes: tuple[str, ...]
    fingerprint: str

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return int(self.tokens.shape[0])

    @property
    def n_ctx(self) -> int:
        """Tokens a chunk."""
        return int(self.tokens.shape[1])

    @property
    def n_scored(self) -> int:
        """Scored positions a chunk."""
        return self.last - self.first


OverrideType = Literal["int", "float", "bool", "str"]


@dataclass(frozen=True)
class MetadataOverride:
    """One `--override-kv KEY=TYPE:VALUE` in llama.cpp's terms."""

    key: str
    type: OverrideType
    value: int | float | bool | str

    def __str__(self) -> str:
        """Return it as llama.cpp's command line takes it."""
        value = str(self.value).lower() if self.type == "bool" else str(self.value)
        return f"{self.key}={self.type}:{value}"


@dataclass(frozen=True)
class Setting:
    """What is changed against the baseline.

    Attributes:
        name: Canonical name, e.g. `experts=6`; also the name of its folder and its row.
        experts: Experts used per token, or None to leave the file's value.
        overrides: Further metadata overrides.
        model: Path of another model file with the same vocabulary, or None for the baseline's own.
        again: The baseline once more, at another batch shape and thread count: the noise floor.
    """

    name: str
    experts: int | None = None
    overrides: tuple[MetadataOverride, ...] = ()
    model: str | None = None
    again: bool = False


@dataclass(frozen=True)
class ModelFile:
    """What the header of a GGUF (all shards) says.

    Attributes:
        path: The file given, the first shard of a split model.
        shards: All files of the model in order, including `path`.
        architecture: `general.architecture`.
        name: `general.name`, or the file's name.
        n_layer: Blocks in the model.
        n_expert_layers: Blocks that have routed experts.
        n_expert: Routed experts a layer; 0 for a dense model.
        n_expert_used: Experts used per token by the file; None if the file stores one value a layer.
        n_expert_shared: Shared experts a layer.
        n_vocab: Size of the vocabulary.
        n_ctx_train: Context length in training.
        n_embd: Width.
        bytes_total: Size of all tensors.
        bytes_experts: Size of the routed experts' tensors, the part that is read sparsely.
        renormalised: Whether kept expert weights are rescaled to their full sum; None if not known here.
        warnings: What an override of the expert count would meet in this file, one line each.
        metadata: Scalar metadata of the header, arrays left out.
    """

    path: str
    shards: tuple[str, ...]
    architecture: str
    name: str
    n_layer: int
    n_expert_layers: int
    n_expert: int
    n_expert_used: int | None
    n_expert_shared: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    bytes_total: int
    bytes_experts: int
    renormalised: bool | None
    warnings: tuple[str, ...]
    metadata: dict[str, Any] = field(repr=False)

    @property
    def bytes_resident(self) -> int:
        """Bytes read for every token: everything that is not a routed expert."""
        return self.bytes_total - self.bytes_experts

    def expert_bytes_per_token(self, n_used: int) -> int:
        """Bytes of routed experts that one token reads with `n_used` experts in each layer."""
        return self.bytes_experts * n_used // self.n_expert if self.n_expert else 0


@dataclass(frozen=True)
class EngineOptions:
    """Engine options, in llama.cpp's names; part of what makes passes comparable.

    Attributes:
        n_gpu_layers: `-ngl`.
        n_threads: `-t`.
        n_batch: `-b`, tokens a decode call.
        n_ubatch: `-ub`, tokens a micro-batch.
        flash_attn: `-fa`: on, off or auto.
        type_k: `-ctk`.
        type_v: `-ctv`.
        use_mmap: False with `--no-mmap`.
        use_mlock: True with `--mlock`.
        numa: `--numa`: disabled, distribute, isolate, numactl or mirror.
        repack: False with `--no-repack`: weights stay as the file has them.
    """

    n_gpu_layers: int = 0
    n_threads: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: Literal["on", "off", "auto"] = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    use_mmap: bool = True
    use_mlock: bool = False
    numa: str = "disabled"
    repack: bool = True


@dataclass(frozen=True)
class PositionScores:
    """One setting against the baseline at the scored positions of one chunk; all arrays (n_scored,).

    Attributes:
        base_top: int32, the baseline's argmax.
        base_target_logprob: float32, nats.
        base_margin: float32, the baseline's top-1 minus top-2 log-probability, nats.
        test_top: int32, the setting's argmax.
        test_target_logprob: float32, nats.
        kld_low: float32, nats, baseline‖test; a lower bound where the recording holds only the top, else the value.
        kld_high: float32, nats; the matching upper bound, equal to `kld_low` where the recording is full.
        target: int32, the true next token.
        ambiguous: bool, positions where the stored baseline cannot tell its two best tokens apart.
    """

    base_top: Int32Array
    base_target_logprob: Float32Array
    base_margin: Float32Array
    test_top: Int32Array
    test_target_logprob: Float32Array
    kld_low: Float32Array
    kld_high: Float32Array
    target: Int32Array
    ambiguous: NDArray[np.bool_]


@dataclass(frozen=True)
class Counts:
    """Sums over scored positions; add them, never average their ratios.

    Attributes:
        n: Scored positions.
        n_agree: Positions where both argmaxes are the same token.
        nll_base: Sum of the baseline's negative log-likelihood of the true next token, nats.
        nll_test: The same for the setting.
        kld_low: Sum of lower bounds of the KL divergence, nats.
        kld_high: Sum of upper bounds.
        n_base_right: Positions where the baseline's argmax is the true next token.
        n_test_right: The same for the setting.
        n_right_to_wrong: Positions where the baseline is right and the setting is not.
        n_wrong_to_right: The reverse.
        dp: Sum of the change of the true token's probability.
        dp_squared: Sum of its square.
        n_ambiguous: Positions where the stored baseline cannot tell its two best tokens apart.
    """

    n: int = 0
    n_agree: int = 0
    nll_base: float = 0.0
    nll_test: float = 0.0
    kld_low: float = 0.0
    kld_high: float = 0.0
    n_base_right: int = 0
    n_test_right: int = 0
    n_right_to_wrong: int = 0
    n_wrong_to_right: int = 0
    dp: float = 0.0
    dp_squared: float = 0.0
    n_ambiguous: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of both parts together."""
        return Counts(**{k: v + getattr(other, k) for k, v in vars(self).items()})


@dataclass(frozen=True)
class Estimate:
    """A number and how sure we are.

    Attributes:
        value: The point estimate over all clusters.
        low: Lower end of the interval, or None where no interval can be given.
        high: Upper end, or None.
        confidence: Nominal coverage, e.g. 0.95.
        method: Name of the interval's method, e.g. `studentised bootstrap`.
        n_clusters: Clusters with at least one scored position.
        n_positions: Scored positions.
        design_effect: Variance of the estimate over that of as many independent positions; None if not defined.
        note: Why there is no interval, or why it is one-sided; empty otherwise.
    """

    value: float
    low: float | None
    high: float | None
    confidence: float
    method: str
    n_clusters: int
    n_positions: int
    design_effect: float | None = None
    note: str = ""

    @property
    def effective_n(self) -> float | None:
        """Independent positions that would be worth as much."""
        return None if not self.design_effect else self.n_positions / self.design_effect


class Verdict(Enum):
    """A gate's answer."""

    PASS = "pass"  # noqa: S105  # a verdict, not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


Metric = Literal["agreement", "ppl_ratio", "ppl_delta", "kld"]


@dataclass(frozen=True)
class Requirement:
    """What a gate asks of one number of one setting.

    Attributes:
        setting: Name of the row, e.g. `experts=7`.
        metric: Which estimate of the row.
        op: `>=` or `<=`; the bound itself is on the good side.
        bound: In the metric's own unit, agreement as a fraction.
        confidence: Least nominal coverage that the interval must have; None takes whatever the report has.
        against: Empty, or the name of an earlier report: then `bound` is for the change since that report.
    """

    setting: str
    metric: Metric
    op: Literal[">=", "<="]
    bound: float
    confidence: float | None = None
    against: str = ""

    def __str__(self) -> str:
        """Return it in the form that `gate.parse_requirement` reads, or for a change in one for people."""
        bound = _percent(self.bound) if self.metric == "agreement" else repr(float(self.bound))
        change = " change" if self.against else ""
        confidence = "" if self.confidence is None else f" @{_percent(self.confidence)}"
        against = f" against {self.against}" if self.against else ""
        return f"{self.setting} {self.metric}{change}{self.op}{bound}{confidence}{against}"


def _percent(fraction: float) -> str:
    """Return every digit of the fraction as a percentage: 0.9 is `90%`."""
    return f"{Decimal(repr(float(fraction))).scaleb(2).normalize():f}%"


@dataclass(frozen=True)
class Judgement:
    """A requirement held against an estimate.

    Attributes:
        requirement: What was asked.
        estimate: What the run has; for a requirement against an earlier report, the change since then.
        verdict: The answer.
        clusters_needed: If inconclusive, how many clusters in all would settle it at the present estimate; None if
            settled, or if no number of clusters would, or none can be told.
        reason: One clause for people, without numbers that were rounded.
    """

    requirement: Requirement
    estimate: Estimate
    verdict: Verdict
    clusters_needed: int | None
    reason: str


@dataclass(frozen=True)
class Row:
    """One setting of the agreement-vs-experts table.

    Attributes:
        setting: The setting's name, e.g. `experts=7`.
        experts: Experts used per token, None where the file keeps one value a layer.
        n_positions: Scored positions.
        n_clusters: Clusters with at least one scored position.
        agreement: Top-1 agreement with the baseline, a fraction.
        ppl: Perplexity of the setting over the scored positions.
        ppl_ratio: Perplexity over the baseline's.
        ppl_delta: Perplexity minus the baseline's.
        kld: Mean KL divergence baseline‖setting, nats; where only the top was recorded, `low` and `high` also hold
            the truncation: low comes from the lower bounds, high from the upper bounds, value from their middle.
        run_length: Tokens to the first divergence when decoding greedily, `1 / (1 - agreement)`; inf if none differed.
        expert_bytes: Bytes of routed experts read per token, None if not known.
        tokens_per_second: Tokens decoded per second in this pass, None if not measured; not comparable across machines.
        warnings: What a reader of this row must know.
    """

    setting: str
    experts: int | None
    n_positions: int
    n_clusters: int
    agreement: Estimate
    ppl: float
    ppl_ratio: Estimate
    ppl_delta: Estimate
    kld: Estimate
    run_length: float
    expert_bytes: int | None
    tokens_per_second: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """One setting minus another over the same positions, paired by cluster.

    Attributes:
        setting: The setting.
        against: What it is compared with.
        agreement: Difference of the two agreements with the baseline, a fraction.
        log_ppl: Difference of log perplexities, nats a token: `log(PPL of setting / PPL of against)`.
        kld: Difference of the mean KL divergences, nats (the middle of the bounds of truncated recordings).
    """

    setting: str
    against: str
    agreement: Estimate
    log_ppl: Estimate
    kld: Estimate


@dataclass(frozen=True)
class Report:
    """What the table and the gate read.

    Attributes:
        title: The run's name.
        facts: What was run, as ordered `name: value` pairs for the head of a report (model, corpus, chunking, ...).
        baseline_ppl: Perplexity of the baseline over the scored positions.
        baseline_accuracy: Share of positions where the baseline's argmax is the true next token.
        rows: One a setting, in the order asked for.
        notes: Warnings and remarks that belong to the whole run.
        baseline_expert_bytes: Bytes of routed experts read per token by the baseline, None if not known.
    """

    title: str
    facts: dict[str, str]
    baseline_ppl: float
    baseline_accuracy: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    baseline_expert_bytes: int | None = None

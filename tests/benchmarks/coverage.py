"""How often the intervals of `agreement.intervals` hold the truth, by simulation.

Run from the root of the repository; the full grid takes a few minutes on one core:

    python tests/benchmarks/coverage.py --draws 2000 --output reports/coverage.md
    python tests/benchmarks/coverage.py --quick

Every row is one kind of data and one number of clusters. For each method it shows the share of draws whose interval
held the true value, the share that lay wholly above it and wholly below it, and the mean width. Draws of one row are
computed together, and all methods see the same draws.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agreement.intervals import score
from agreement.intervals.bootstrap import Resampling, exp_difference
from agreement.intervals.clusters import Ratios
from agreement.intervals.methods import Method, mean_ends, resample, share_ends, t_ends

Array = NDArray[np.float64]
Ends = tuple[Array, Array]

# 999 put the 2.5 % tails on whole ranks, and more do not change a coverage by what 2,000 draws can show.
RESAMPLES = 999
CHUNK = 128  # scored positions in one chunk of a 256-token window


@dataclass(frozen=True)
class Goal:
    """Least and largest coverage asked for, in percent."""

    least: float
    most: float = 100.0


@dataclass(frozen=True)
class Scenario:
    """One row: a number of clusters and a way to draw them.

    Attributes:
        group: Heading of its table.
        label: What is drawn.
        n_clusters: Clusters a draw.
        truth: The value that intervals should hold.
        draw: Makes `n_draws` data sets: one batch of sums, or two for a difference of perplexities.
        kind: `share`, `mean`, `positive` (a mean bounded by 0) or `delta`.
        goal: Coverage asked of `auto`, or None where it is only printed.
        methods: Methods to compare.
    """

    group: str
    label: str
    n_clusters: int
    truth: float
    draw: Callable[[np.random.Generator, int], tuple[Ratios, ...]]
    kind: str
    goal: Goal | None
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What one method did in one scenario: percentages of draws, and the mean width."""

    held: float
    above: float
    below: float
    width: float


@dataclass(frozen=True)
class Row:
    """A scenario's outcomes by method."""

    scenario: Scenario
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether `auto` reached the goal; None where there is none."""
        goal = self.scenario.goal
        return None if goal is None else goal.least <= self.outcomes["auto"].held <= goal.most


# --- how data are drawn ---------------------------------------------------------------------------------------------


def unequal_sizes(rng: np.random.Generator, n_draws: int, k: int) -> Array:
    """Return (n_draws, k) positions: documents of 1, 2, 3, ... chunks, each half as frequent as the one before."""
    return CHUNK * np.minimum(rng.geometric(0.5, size=(n_draws, k)), 8).astype(np.float64)


def equal_sizes(rng: np.random.Generator, n_draws: int, k: int) -> Array:
    """Return (n_draws, k) times two chunks."""
    return np.full((n_draws, k), 2.0 * CHUNK)


def _shares(rng: np.random.Generator, sizes: Array, chance: Array) -> tuple[Ratios, ...]:
    return (Ratios(rng.binomial(sizes.astype(np.int64), chance).astype(np.float64), sizes),)


def beta_binomial(k: int, share: float, correlation: float, sizes: Callable[..., Array] = unequal_sizes) -> Callable:
    """Draw each cluster's agreement from a beta distribution with this mean and within-cluster correlation."""
    total = 1.0 / correlation - 1.0

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        chance = rng.beta(share * total, (1.0 - share) * total, size=(n_draws, k))
        return _shares(rng, sizes(rng, n_draws, k), chance)

    return draw


def one_in_ten_worse(k: int, share: float) -> Callable:
    """Draw one cluster in ten 15 points worse than the others, beta within both kinds (correlation 0.005)."""
    total = 1.0 / 0.005 - 1.0

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        level = np.where(rng.random((n_draws, k)) < 0.1, share + 0.015 - 0.15, share + 0.015)
        return _shares(rng, unequal_sizes(rng, n_draws, k), rng.beta(level * total, (1.0 - level) * total))

    return draw


def logit_normal(k: int, middle: float, spread: float) -> tuple[float, Callable]:
    """Return the mean of a logit-normal agreement and its draws."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    share = float((weights / (1.0 + np.exp(-(middle + spread * nodes)))).sum() / weights.sum())

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        chance = 1.0 / (1.0 + np.exp(-(middle + spread * rng.standard_normal((n_draws, k)))))
        return _shares(rng, unequal_sizes(rng, n_draws, k), chance)

    return share, draw


def _noise(rng: np.random.Generator, sizes: Array) -> Array:
    """Return the sum of heavy-tailed differences at each position: variance-gamma, standard deviation 0.5, kurtosis 33.

    A position's difference is that of two gamma variables of shape 0.1, so a cluster's is that of two of shape
    0.1 times its size: exact, without drawing positions.
    """
    scale = 0.5 / np.sqrt(2.0 * 0.1)
    return scale * (rng.standard_gamma(0.1 * sizes) - rng.standard_gamma(0.1 * sizes))


LOSS = 0.05  # mean of log-likelihood lost, and of KL divergence: what dropping one expert of eight costs


def loss_t(k: int, spread: float) -> Callable:
    """Draw losses with a cluster effect of heavy tails: Student t, 5 degrees of freedom, this standard deviation."""

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        sizes = unequal_sizes(rng, n_draws, k)
        effect = spread * np.sqrt(3.0 / 5.0) * rng.standard_t(5, size=(n_draws, k))
        return (Ratios(sizes * (LOSS + effect) + _noise(rng, sizes), sizes),)

    return draw


def loss_lognormal(k: int, spread: float) -> Callable:
    """Draw losses whose cluster means are log-normal: skewed, all positive."""

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        sizes = unequal_sizes(rng, n_draws, k)
        level = LOSS * rng.lognormal(-(spread**2) / 2.0, spread, size=(n_draws, k))
        return (Ratios(sizes * level + _noise(rng, sizes), sizes),)

    return draw


def divergence(k: int, spread: float) -> Callable:
    """Draw KL divergences: gamma of shape 0.1 at each position (skewness 6) around a log-normal cluster mean."""

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        sizes = unequal_sizes(rng, n_draws, k)
        level = LOSS * rng.lognormal(-(spread**2) / 2.0, spread, size=(n_draws, k))
        return (Ratios(level / 0.1 * rng.standard_gamma(0.1 * sizes), sizes),)

    return draw


def paired_losses(k: int) -> Callable:
    """Draw a baseline loss of 2 nats (0.4 between clusters, 2.5 between positions) and a skewed loss on top."""
    extra = loss_lognormal(k, 0.6)

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        lost = extra(rng, n_draws)[0]
        sizes = lost.counts
        level = 2.0 + 0.4 * rng.standard_normal(sizes.shape)
        base = sizes * level + 2.5 * np.sqrt(sizes) * rng.standard_normal(sizes.shape)
        return Ratios(base, sizes), Ratios(base + lost.sums, sizes)

    return draw


def two_settings(k: int, better: float, worse: float) -> Callable:
    """Draw the difference of two settings' agreements that share their cluster's difficulty (correlation 0.02)."""
    total = 1.0 / 0.02 - 1.0

    def draw(rng: np.random.Generator, n_draws: int) -> tuple[Ratios, ...]:
        sizes = unequal_sizes(rng, n_draws, k)
        trials = sizes.astype(np.int64)
        miss = rng.beta((1.0 - better) * total, better * total, size=(n_draws, k))
        first = trials - rng.binomial(trials, miss)
        second = trials - rng.binomial(trials, np.minimum(miss * (1.0 - worse) / (1.0 - better), 1.0))
        return (Ratios((first - second).astype(np.float64), sizes),)

    return draw


# --- how intervals are formed ---------------------------------------------------------------------------------------


def share_intervals(shares: Ratios, method: str, plan: Resampling) -> Ends:
    """Return what `proportion` gives, for all draws at once."""
    if method == "binomial":
        half = score.t_quantile(plan.confidence, np.inf) * np.sqrt(shares.value * (1 - shares.value) / shares.total)
        return shares.value - half, shares.value + half
    low, high, _ = share_ends(shares, method, plan)
    bound = score.all_alike(shares.n_clusters, plan.confidence)
    low = np.select([shares.value == 1.0, shares.value == 0.0], [bound, 0.0], low)
    high = np.select([shares.value == 1.0, shares.value == 0.0], [1.0, 1.0 - bound], high)
    return np.minimum(low, shares.value), np.maximum(high, shares.value)


def delta_intervals(base: Ratios, test: Ratios, method: Method, plan: Resampling) -> Ends:
    """Return what `ppl_delta` gives, for all draws at once."""
    ppl_base, ppl_test = np.exp(base.value), np.exp(test.value)
    line = Ratios(ppl_test[:, None] * test.residuals - ppl_base[:, None] * base.residuals, base.counts)
    around = t_ends(line, method, plan.confidence)
    value = ppl_test - ppl_base
    return resample((base, test), exp_difference, method, plan, spare=(value + around[0], value + around[1]))


def intervals(scenario: Scenario, data: tuple[Ratios, ...], method: str, plan: Resampling) -> Ends:
    """Return both ends of every draw."""
    if scenario.kind == "share":
        return share_intervals(data[0], method, plan)
    if scenario.kind == "delta":
        return delta_intervals(data[0], data[1], method, plan)
    low, high, _ = mean_ends(data[0], method, plan, bound=0.0 if scenario.kind == "positive" else None)
    return low, high


def run(scenario: Scenario, *, n_draws: int, seed: int, confidence: float = 0.95) -> Row:
    """Simulate one scenario; the same seed gives the same row, whatever else is run."""
    key = [seed, scenario.n_clusters, *f"{scenario.group}/{scenario.label}".encode()]
    data = scenario.draw(np.random.default_rng(key), n_draws)
    row = Row(scenario)
    for method in scenario.methods:
        plan = Resampling(np.random.default_rng(seed), confidence, RESAMPLES)
        low, high = intervals(scenario, data, method, plan)
        above, below = 100.0 * float(np.mean(low > scenario.truth)), 100.0 * float(np.mean(high < scenario.truth))
        row.outcomes[method] = Outcome(100.0 - above - below, above, below, float(np.mean(high - low)))
    return row


# --- the grid -------------------------------------------------------------------------------------------------------

EXACT = Goal(93.5, 96.5)
SAFE = Goal(93.0)
SHARES = ("auto", "korn-graubard", "t", "studentised", "binomial")
MEANS = ("auto", "t", "studentised")
SLOW = ("percentile", "bca")  # through SciPy, seconds a row: on some rows only


def agreement_goal(k: int, share: float, correlation: float) -> Goal | None:
    """Return what is asked for: exact from 12 clusters on, else no less; nothing for the stress case."""
    if correlation > 0.05 or k < 6:
        return None
    return EXACT if k >= 12 and share <= 0.99 else SAFE


def loss_goal(k: int) -> Goal | None:
    """Return what is asked for a ratio of perplexities."""
    if k < 6:
        return None
    return EXACT if k >= 12 else SAFE


def beta_rows(k: int) -> list[Scenario]:
    """Return agreement from beta-binomial clusters: the grid that the goals are set on, and its stress cases."""
    group = "Agreement: beta-binomial, clusters of 128, 256, ... positions"
    rows = []
    for share in (0.8, 0.9, 0.95, 0.99, 0.995, 0.999):
        for rho in (0.002, 0.01, 0.05, 0.1):
            slow = SLOW if k in {8, 24} and share in {0.9, 0.99} and rho in {0.01, 0.05} else ()
            label = f"agreement {share:g}, correlation {rho:g}"
            draw = beta_binomial(k, share, rho)
            rows.append(Scenario(group, label, k, share, draw, "share", agreement_goal(k, share, rho), SHARES + slow))
    return rows


def other_rows(k: int) -> list[Scenario]:
    """Return agreement from distributions that had no part in choosing the method."""
    drawn = [(f"{a:g}, one in ten 15 points worse", a, one_in_ten_worse(k, a)) for a in (0.8, 0.9, 0.97)]
    for middle, spread in ((2.0, 0.3), (3.0, 0.6), (4.5, 1.0)):
        drawn.append((f"logit-normal {middle:g} ± {spread:g}", *logit_normal(k, middle, spread)))
    for share in (0.9, 0.99):
        draw = beta_binomial(k, share, 0.01, equal_sizes)
        drawn.append((f"{share:g}, correlation 0.01, equal sizes", share, draw))
    group = "Agreement: other distributions, not used to choose the method"
    return [Scenario(group, label, k, share, draw, "share", None, SHARES) for label, share, draw in drawn]


def ratio_rows(k: int) -> list[Scenario]:
    """Return ratios of perplexities."""
    drawn = [(f"t5 clusters, sd {spread:g}", loss_t(k, spread)) for spread in (0.005, 0.04)]
    drawn += [(f"log-normal clusters, {spread:g}", loss_lognormal(k, spread)) for spread in (0.3, 0.6)]
    methods = MEANS + (SLOW if k in {8, 24} else ())
    group = "PPL ratio (on the log scale)"
    return [Scenario(group, label, k, LOSS, draw, "mean", loss_goal(k), methods) for label, draw in drawn]


def divergence_rows(k: int) -> list[Scenario]:
    """Return KL divergences."""
    rows = []
    for spread in (0.1, 0.3, 0.6, 1.0):
        slow = SLOW if k in {8, 24} and spread in {0.3, 0.6} else ()
        label = f"log-normal clusters, {spread:g}"
        methods = ("auto", "adjusted-t", "t", "studentised", *slow)
        rows.append(Scenario("KL divergence", label, k, LOSS, divergence(k, spread), "positive", None, methods))
    return rows


def delta_rows(k: int) -> list[Scenario]:
    """Return differences of perplexities."""
    truth = (np.exp(2.0 + LOSS) - np.exp(2.0)).item()
    return [Scenario("PPL difference", "base 2 nats, loss 0.05", k, truth, paired_losses(k), "delta", None, MEANS)]


def difference_rows(k: int) -> list[Scenario]:
    """Return differences of two settings' agreements."""
    group = "Paired difference of agreement"
    return [
        Scenario(group, f"agreements {a:g} and {b:g}", k, a - b, two_settings(k, a, b), "mean", None, MEANS)
        for a, b in ((0.92, 0.87), (0.99, 0.985))
    ]


def grid() -> list[Scenario]:
    """Return all scenarios in the order of the report."""
    many, some = (3, 6, 8, 12, 24, 50, 100), (6, 12, 24, 60)
    kinds = (
        (beta_rows, many),
        (other_rows, some),
        (ratio_rows, many),
        (divergence_rows, many),
        (delta_rows, some),
        (difference_rows, some),
    )
    return [scenario for rows, clusters in kinds for k in clusters for scenario in rows(k)]


DENSE_CLUSTERS = (6, 7, 9, 10, 11, 12, 14, 16, 20, 32, 64, 200)
DENSE_SHARES = (0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
DENSE_CORRELATIONS = (0.002, 0.01, 0.02, 0.05)


def dense(*, n_draws: int, seed: int) -> list[str]:
    """Return a table of the default's least and largest coverage of agreement between the points of the grid."""
    lines = ["| clusters | least, agreement to 0.99 | largest | least, agreement above 0.99 |", "|---|---|---|---|"]
    for k in DENSE_CLUSTERS:
        found: list[tuple[float, float, float]] = []
        for share in DENSE_SHARES:
            for rho in DENSE_CORRELATIONS:
                draw = beta_binomial(k, share, rho)
                scenario = Scenario("dense", f"{share:g} {rho:g}", k, share, draw, "share", None, ("auto",))
                held = run(scenario, n_draws=n_draws, seed=seed).outcomes["auto"].held
                found.append((held, share, rho))
        usual = [entry for entry in found if entry[1] <= 0.99]
        extremes = min(usual), max(usual), min(entry for entry in found if entry[1] > 0.99)
        cells = [f"{held:.1f} (at {share:g}, {rho:g})" for held, share, rho in extremes]
        lines.append(f"| {k} | " + " | ".join(cells) + " |")
    return lines


def quick() -> list[Scenario]:
    """Return a small part of the grid that shows each kind once or twice."""
    chosen = []
    for scenario in grid():
        small = scenario.n_clusters in {6, 12, 24}
        plain = (
            scenario.goal is None or "0.9," in scenario.label or "0.99," in scenario.label or scenario.kind == "mean"
        )
        if small and plain and not set(SLOW) & set(scenario.methods):
            chosen.append(scenario)
    return chosen


# --- the report -----------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[str]:
    """Return the rows of one group as a Markdown table."""
    methods = list(dict.fromkeys(name for row in rows for name in row.outcomes))
    lines = ["| clusters | data | " + " | ".join(methods) + " | goal |", "|---|---|" + "---|" * len(methods) + "---|"]
    for row in rows:
        cells = [str(row.scenario.n_clusters), row.scenario.label]
        for name in methods:
            found = row.outcomes.get(name)
            cells.append(
                "" if found is None else f"{found.held:.1f} ({found.above:.1f}/{found.below:.1f}) {found.width:.4f}"
            )
        goal = row.scenario.goal
        verdict = "met" if row.met else "**missed**"
        cells.append("" if goal is None else f"{goal.least:g}-{goal.most:g} {verdict}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def second_look(row: Row, *, n_draws: int, seed: int) -> str:
    """Run a row that missed its goal again, with ten times the draws, and say what came out."""
    scenario = replace(row.scenario, methods=("auto",))
    found = run(scenario, n_draws=10 * n_draws, seed=seed + 1)
    return (
        f"missed: {scenario.n_clusters} clusters, {scenario.label}: {row.outcomes['auto'].held:.2f} %; "
        f"again with {10 * n_draws:,} draws: {found.outcomes['auto'].held:.2f} %"
    )


def report(
    rows: list[Row],
    again: list[str],
    between: list[str],
    *,
    command: str,
    n_draws: int,
    confidence: float,
    seconds: float,
) -> str:
    """Return all tables as Markdown; `again` is what the second looks said, `between` the dense table."""
    judged = [row for row in rows if row.met is not None]
    missed = [row for row in judged if not row.met]
    error = 100.0 * np.sqrt(confidence * (1.0 - confidence) / n_draws)
    lines = [
        "# Coverage of the intervals",
        "",
        f"Made by `{command}` in {seconds:.0f} s of processor time.",
        "",
        f"Nominal {100 * confidence:g} %, {n_draws:,} draws a row, so a standard error of {error:.2f} points.",
        f"Bootstraps take {RESAMPLES} resamples. Each cell holds the coverage in percent, in brackets the share of",
        "intervals wholly above the truth and wholly below it, then the mean width. `auto` is what the package does",
        "unless told otherwise. A row that misses its goal is run again with ten times the draws and another seed.",
        "",
        f"Goals met: {len(judged) - len(missed)} of {len(judged)}.",
        *(f"- {line}" for line in again),
    ]
    for group in dict.fromkeys(row.scenario.group for row in rows):
        lines += ["", f"## {group}", "", *table([row for row in rows if row.scenario.group == group])]
    if between:
        lines += ["", "## Agreement: the default between the points of the grid", ""]
        lines += [f"Agreements {', '.join(f'{share:g}' for share in DENSE_SHARES)}; correlations"]
        lines += [f"{', '.join(f'{rho:g}' for rho in DENSE_CORRELATIONS)}; {5 * n_draws:,} draws each.", "", *between]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the grid and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="simulated data sets a row")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--quick", action="store_true", help="a small part of the grid")
    parser.add_argument("--output", type=Path, help="write the report here as well")
    options = parser.parse_args(arguments)
    start = time.process_time()
    rows = []
    scenarios = quick() if options.quick else grid()
    if options.confidence != 0.95:
        scenarios = [replace(scenario, goal=None) for scenario in scenarios]  # goals are set for 95 %
    for number, scenario in enumerate(scenarios, start=1):
        rows.append(run(scenario, n_draws=options.draws, seed=options.seed, confidence=options.confidence))
        print(f"\r{number}/{len(scenarios)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    again = [second_look(row, n_draws=options.draws, seed=options.seed) for row in rows if row.met is False]
    between = [] if options.quick or options.confidence != 0.95 else dense(n_draws=5 * options.draws, seed=options.seed)
    seconds = time.process_time() - start  # of this process: other work on the machine does not count
    command = f"python tests/benchmarks/coverage.py --draws {options.draws} --seed {options.seed}"
    command += f" --confidence {options.confidence:g}" if options.confidence != 0.95 else ""
    command += " --quick" if options.quick else ""
    command += f" --output {options.output}" if options.output else ""
    text = report(
        rows,
        again,
        between,
        command=command,
        n_draws=options.draws,
        confidence=options.confidence,
        seconds=seconds,
    )
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

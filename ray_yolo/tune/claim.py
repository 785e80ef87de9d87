"""What may be claimed from trainings on fresh seeds: of a sweep's winner, and of two sides that are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel

from ray_yolo.core.formatting import format_count
from ray_yolo.ops.statistics import NORMAL_95, student, student_quantile
from ray_yolo.tune.compare_settings import FEWEST_PAIRS

Side = Literal["A", "B"]
SIDES: tuple[Side, Side] = ("A", "B")

NOISE = 0.1  # one training deviates by this share of its fitness; two recipes on one seed deviate independently
UNMEASURED, UNMEASURED_FREEDOM = 0.25, 2.0  # the noise where no side has a second training, and what it counts as
FLOOR, RISE, ENOUGH = 0.01, 2.0, 0.1
"""A training has learned something if its fitness is `FLOOR` or more, and `RISE` times that of the default's first rung
or `ENOUGH`."""
DOUBT = 1.5  # standard deviations of the exploration that are subtracted
QUANTILES = {1: NORMAL_95, 2: 1.9599640, 3: 2.1280452}
"""Of the normal distribution at 1 - 5 % / candidates, by the number of candidates that are compared."""


class Law(NamedTuple):
    """The rules of a sweep that differ between releases: mainly what its claim assumes and asks for."""

    asks_for_repeats: bool = True  # nothing is better than a default with one training
    asks_for_learning: bool = True  # nothing is compared where no training has learned anything
    prior_freedom: float = 1.0  # the prior noise counts as this number of trainings
    widens: bool = True  # the exploration is less certain where there is more noise than it has fitted
    keeps_expected: bool = True  # the winner has the higher expectation; else, it is ahead on fresh seeds as well
    counts_diverged: bool = True  # a training that diverges has a fitness of 0; else, it is left out
    skips_rungs: bool = True  # what the process proposes may train to a later rung first


LAW = Law()
FORMER_LAW = Law(asks_for_repeats=False, asks_for_learning=False, prior_freedom=3.0, widens=False,
                 keeps_expected=False, counts_diverged=False, skips_rungs=False)
"""Of sweeps that ray_yolo 0.2.0 has begun."""


class Claim(BaseModel, frozen=True):
    """Better than the default by `gain` +- `margin` (90 %) over `runs` trainings of the candidate; or not better.

    `ahead`: the candidate is expected to be better, so it is the winner. `detectable` is the true gain that these runs
    would detect in half of all sweeps. Numbers are rounded, because their last bits depend on the processor.
    """

    better: bool
    ahead: bool = False
    gain: float = 0.0
    margin: float = 0.0
    runs: int = 0
    detectable: float = 0.0
    is_repeated: bool = True  #: the default has several trainings; with one, nothing can be shown
    expected: float = 0.0  #: the gain without the doubt in the exploration, which decides who wins
    diverged: tuple[int, int] = (0, 0)  #: trainings of the candidate and of the default that count as 0
    floor: float = 0.0  #: no mean fitness reaches it, so the trainings are too short to judge a recipe; 0: one does

    def __str__(self) -> str:
        text = self._judgement()
        for side, number in zip(("it", "the default"), self.diverged, strict=True):
            if number:
                text += f"; {format_count(number, 'training')} of {side} diverged, counted with a fitness of 0"
        return text

    def _judgement(self) -> str:
        seeds = format_count(self.runs, "fresh seed")
        if self.better:
            return f"better than the default by {self.gain:.4g} +- {self.margin:.2g} over {seeds}"
        if self.floor:
            return (f"not compared with the default: no mean fitness reaches {self.floor:.2g}, so these trainings are "
                    "too short to judge a recipe; give more --epochs, larger images or initial weights")
        if not self.is_repeated:
            return (f"not shown to be better than the default: a gain of {self.gain:.4g} +- {self.margin:.2g}, and one "
                    "training of the default cannot show it; a longer sweep repeats it")
        if not self.runs:
            return "not compared with the default: no training of both finished in time with a fitness above 0"
        return f"not better than the default; {seeds} could have shown {self.detectable:.2g}"


def judge(candidate: Sequence[float], default: Sequence[float], noise: float = 0.0,
          expected: tuple[float, float] | None = None, candidates: int = 1, law: Law = LAW, first: float = 0.0
          ) -> Claim:
    """The claim from the fitness of a candidate on fresh seeds, and of the default on any seeds.

    The candidate is better if the difference of the means and the gain are both significant (one-sided, 5 %). The gain
    is the mean of this difference and of the exploration's expectation `expected` (mean, standard deviation), weighted
    by 1 / variance. The candidate was selected for its expectation, which is therefore biased upwards: `DOUBT` standard
    deviations are subtracted. The deviation follows from the noise that the exploration has fitted, and from the
    default's first training, which may have collapsed: where the trainings show more noise, it grows in proportion.
    If the candidate is the best of several `candidates`, each has its share of the 5 % (Bonferroni).

    A claim is cautious, a choice is not: the candidate is ahead if the same mean is above 0 without the doubt, and with
    the noise that is likely. This is the choice with the highest expected fitness. However certain the exploration is,
    it counts as at most one training of each side here, because the process may be wrong.

    Noise is a share of the fitness, the same for candidate and default. It is estimated from all trainings. Its prior
    is the measured noise and the exploration's `noise` (0: unknown). With one training of each nothing measures it, and
    the default's one may have collapsed: the interval is wide, and nothing is better.

    Nothing is compared where neither mean shows that anything was learned. That is the case below twice the default's
    fitness at its first rung (`first`; 0: unknown), but at least below 0.01 and at most below 0.1: a training from
    good weights has nothing to learn.
    """
    if not len(candidate) or not len(default) or max(*candidate, *default) <= 0:
        return Claim(better=False)
    ours, theirs = float(np.mean(candidate)), float(np.mean(default))
    floor = max(FLOOR, min(RISE * first, ENOUGH))
    if law.asks_for_learning and max(ours, theirs) < floor:
        return Claim(better=False, floor=_rounded(floor))
    shown = ours - theirs
    share, freedom, likely = _noise(candidate, default, noise, law)
    is_repeated = len(default) > 1 or not law.asks_for_repeats
    fitness = math.sqrt(ours**2 / len(candidate) + theirs**2 / len(default))
    error = share * fitness  # standard error of the difference
    detectable = student(freedom, QUANTILES[candidates]) * error
    gain, margin, undoubted = shown, detectable, shown
    if expected:
        mean, deviation = expected
        if law.widens and noise and len(candidate) + len(default) > 2:  # else no training shows the noise
            deviation *= max(1.0, likely / noise)
        gain, trust = _weighted(shown, error, mean - DOUBT * deviation, DOUBT * deviation)
        margin = math.sqrt(trust) * detectable  # the standard error of the weighted mean is sqrt(trust) x error
        one_training = likely * math.hypot(ours, theirs)
        undoubted, _ = _weighted(shown, likely * fitness, mean, max(deviation, one_training))
    is_better = is_repeated and shown > detectable and gain > margin
    return Claim(
        better=is_better,
        ahead=is_better or undoubted > 0 if law.keeps_expected else min(shown, gain) > 0,
        expected=_rounded(undoubted) if law.keeps_expected else 0.0,
        gain=_rounded(gain),
        margin=_rounded(margin),
        runs=len(candidate),
        detectable=_rounded(detectable),
        is_repeated=is_repeated,
    )


def _weighted(shown: float, error: float, mean: float, deviation: float) -> tuple[float, float]:
    """The mean of what fresh seeds have shown and of an expectation, weighted by 1 / variance, and the weight of the
    former."""
    trust = deviation**2 / (deviation**2 + error**2)
    return mean + trust * (shown - mean), trust


class _Noise(NamedTuple):
    """The noise of a training as a share of its fitness."""

    share: float  # what a claim assumes
    freedom: float  # the degrees of freedom of this estimate
    likely: float  # what it is without caution


def _noise(candidate: Sequence[float], default: Sequence[float], prior: float, law: Law) -> _Noise:
    before = math.sqrt(NOISE * prior) if prior else NOISE
    if law.asks_for_repeats and len(candidate) == len(default) == 1:
        return _Noise(max(UNMEASURED, prior), UNMEASURED_FREEDOM, before)
    squares, freedom = 0.0, law.prior_freedom
    for runs in (candidate, default):
        if max(runs) > 0:
            shares = np.array(runs) / np.mean(runs) - 1
            squares += float(shares @ shares)
            freedom += len(runs) - 1
    share = math.sqrt((law.prior_freedom * before**2 + squares) / freedom)
    return _Noise(share, freedom, share)


PAIRS_ERROR = 0.05  # probability that a comparison ever claims a side that does not win the typical pair
ROUNDING = 1e-12  # as a share of the values, a smaller error is one of arithmetic
COLLAPSE = 0.5  # a training with less than this share of its side's median fitness has collapsed


class PairsClaim(BaseModel, frozen=True):
    """Which of the sides A and B is better, after a number of pairs. See `judge_pairs` for the law."""

    pairs: int
    difference: float = 0.0  #: mean fitness of B less that of A
    error: float | None = None  #: standard error of the difference; None with fewer than two pairs
    margin: float | None = None  #: half the width of the interval; None if these pairs have none
    failed: tuple[int, int] = (0, 0)  #: trainings of A and of B that have diverged, and count with a fitness of 0
    wins: tuple[int, int] = (0, 0)  #: pairs in which A, and in which B, has the higher fitness
    collapsed: tuple[int, int] = (0, 0)  #: trainings of A and of B that have collapsed, diverged ones among them

    @property
    def better(self) -> Literal["A", "B", ""]:
        """The side that is better; '' if no difference is shown."""
        if self.margin is None or abs(self.difference) <= self.margin:
            return ""
        number = int(self.difference > 0)
        return SIDES[number] if _wins_most(self.wins[number], self.pairs) else ""

    def __str__(self) -> str:
        pairs = format_count(self.pairs, "pair")
        if self.better:
            number = SIDES.index(self.better)
            collapsed = self.collapsed[number]
            unseen = 100 * share_not_excluded(collapsed, self.pairs)
            text = (f"{self.better} is better by {abs(self.difference):.4f} +- {self.margin:.2g}, {pairs}, of which it "
                    f"won {self.wins[number]}; {collapsed} of {self.pairs} trainings of {self.better} collapsed, up to "
                    f"{unseen:.0f} % is not excluded")
        elif self.margin is not None:
            text = (f"no difference is shown: B less A is {self.difference:.4f} +- {self.margin:.2g}, {pairs}, of "
                    f"which A won {self.wins[0]} and B {self.wins[1]}; more pairs may show a smaller one")
        elif self.pairs < FEWEST_PAIRS:
            text = f"no difference is shown: {pairs}, and a claim needs {FEWEST_PAIRS} or more"
        else:
            text = f"no difference is shown: {pairs}, and no seed has changed the fitness of either side"
        for side, failed in zip(SIDES, self.failed, strict=True):
            if failed:
                text += f"; {format_count(failed, 'training')} of {side} diverged, counted with a fitness of 0"
        return text


def judge_pairs(a: Sequence[float], b: Sequence[float], failed: tuple[int, int] = (0, 0)) -> PairsClaim:
    """The claim from the fitness of A and of B on the seeds of all pairs so far.

    A side is better if both hold after n pairs, n = 4, 5, ...:

    - the interval mean(b) - mean(a) +- margin is without 0, with

          error  = sqrt(max(var(a) + var(b), var(b - a)) / n)
          margin = error x the quantile of Student's distribution at 1 - share(n) / 2, freedom by Welch
          share(n) = 5 % x 3 / (n (n - 1))

    - it has won so many of the n pairs that a coin would win as many with a probability of at most 1 / (4 n).

    A comparison looks after each pair and stops at the first claim. The claim is about the typical pair: it is wrong if
    its side wins at most half of all pairs. A few pairs cannot show how often a side collapses. Therefore the claim
    says which share is not excluded.

    The interval bounds the error for normal noise, because the shares of all looks add up to 5 %. The wins bound it for
    skewed noise, where the means differ and the typical pair does not. The common seed may make the trainings of a pair
    alike or unlike; the larger of both errors counts. Simulated with up to 300 looks, at most 5 % of comparisons claim
    wrongly, under normal, skewed, heavy, tied, dependent and collapsing noise (`run.py comparisons`).
    """
    pairs = len(a)
    first, second = np.asarray(a, float), np.asarray(b, float)
    difference = _rounded(float(np.mean(second) - np.mean(first))) if pairs else 0.0
    claim = PairsClaim(
        pairs=pairs, difference=difference, error=difference_error(a, b), failed=failed,
        wins=(int((first > second).sum()), int((second > first).sum())),
        collapsed=(_collapsed(first), _collapsed(second)))
    if pairs < FEWEST_PAIRS or not claim.error:
        return claim
    error = max(claim.error, float(np.std(second - first, ddof=1)) / math.sqrt(pairs))
    share = PAIRS_ERROR * (FEWEST_PAIRS - 1) / (pairs * (pairs - 1))
    margin = student_quantile(share / 2, _welch_freedom(a, b)) * error
    return claim.model_copy(update={"margin": _rounded(margin)})


def _wins_most(wins: int, pairs: int) -> bool:
    """Whether a fair coin wins so many of the pairs with a probability of at most 1 / (4 pairs)."""
    return 4 * pairs * sum(math.comb(pairs, number) for number in range(wins, pairs + 1)) <= 2**pairs


def _collapsed(fitness: np.ndarray) -> int:
    """How many trainings of a side have collapsed."""
    return int((fitness <= COLLAPSE * np.median(fitness)).sum()) if len(fitness) else 0


def share_not_excluded(seen: int, trainings: int) -> float:
    """The largest share of failures with which `seen` or fewer of the trainings fail in 5 % of all cases.

    Source: Clopper and Pearson 1934; without a failure it is 1 - 0.05^(1 / trainings).
    """
    low, high = seen / trainings, 1.0
    for _ in range(50):
        share = (low + high) / 2
        probability = sum(math.comb(trainings, k) * share**k * (1 - share) ** (trainings - k) for k in range(seen + 1))
        low, high = (share, high) if probability > 0.05 else (low, share)
    return low


def difference_error(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The standard error of mean(b) - mean(a) for equally many values; None with fewer than two each. Equal values have
    none, also where their mean is rounded."""
    if len(a) < 2:
        return None
    error = math.sqrt((float(np.var(a, ddof=1)) + float(np.var(b, ddof=1))) / len(a))
    return _rounded(error) if error > ROUNDING * max(map(abs, (*a, *b))) else 0.0


def _welch_freedom(a: Sequence[float], b: Sequence[float]) -> float:
    """Degrees of freedom of the difference of two means of n values each: from n - 1 to 2 (n - 1).

    Source: Welch 1947, The generalization of Student's problem when several different variances are involved.
    """
    first, second = float(np.var(a, ddof=1)), float(np.var(b, ddof=1))
    return (len(a) - 1) * (first + second) ** 2 / (first**2 + second**2)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")

"""Search for repeated subgraphs that are worth a region.

Candidates are the calls of one module, and repeated substrings of the token sequence, which need no modules.
Each candidate is checked for isomorphism (equal tokens, equal wiring), its boundaries are moved to where the
fewest values cross them, and the cost model decides. The best candidates are taken first; the calls they
cover are no longer free. A candidate that is best alone may block two that are better together (half of a
decoder layer equals the encoder's). So the search tries several orders, and the cost model chooses among the
resulting plans.
"""

from __future__ import annotations

import bisect
import fnmatch
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import fx

from fxpasses.regional.cost_model import CostModel, Estimate, is_fused
from fxpasses.regional.facts import GraphFacts, read_facts, wiring
from fxpasses.regional.suffix_array import not_overlapping, repeated_substrings

Choice = Literal["auto", "off", "always"] | tuple[str, ...]

_Candidate = tuple[int, tuple[int, ...]]
"""A length, and the start indices of subgraphs of that length with equal tokens."""
_Rank = Callable[[_Candidate], tuple[float, int]]
_Ranked = tuple[tuple[float, int], int, _Candidate, _Rank]

SHORTEST = 3
"""Minimum number of calls in a subgraph. A checkpointed function counts as more than one."""
_BOUNDARIES = 4
"""How many boundaries to try for subgraphs that directly follow each other."""

_CROSSING_SECONDS = 0.001
"""Cost in seconds of one more value across a boundary, for comparing candidates."""
_GAIN_TOLERANCE = 0.05
"""Plans whose gains differ by less than this fraction are equally good, as estimates are no better.
Of those, the search takes the one with the fewest region calls."""
_MAX_REJECTED = 30
"""The search stops after this many rejected repeated subgraphs. Those nested in others are not reported."""


@dataclass(frozen=True)
class Subgraph:
    """The calls of a graph from ``start`` up to, not including, ``stop``."""

    start: int
    stop: int


@dataclass
class IsomorphicSubgraphs:
    """Isomorphic subgraphs of one graph.

    Attributes:
        subgraphs: in order, without overlaps.
        estimate: seconds that a region of them would save and cost.
        reason: why they are left in the graph, or "" if they become a region.
        modules: for each, the path of the innermost module that contains all of it, or "".
    """

    subgraphs: list[Subgraph]
    estimate: Estimate
    reason: str
    modules: list[str]

    @property
    def length(self) -> int:
        """The number of calls in each of them."""
        return self.subgraphs[0].stop - self.subgraphs[0].start


@dataclass
class Search:
    """The result of the search in one graph.

    Attributes:
        facts: the facts about the graph.
        taken: the subgraphs that become regions.
        left: those that do not, each with its reason.
        seconds: the duration of the search.
        unmatched: the given patterns that match no module's path.
    """

    facts: GraphFacts
    taken: list[IsomorphicSubgraphs] = field(default_factory=list)
    left: list[IsomorphicSubgraphs] = field(default_factory=list)
    seconds: float = 0.0
    unmatched: tuple[str, ...] = ()


def search(gm: fx.GraphModule, choice: Choice = "auto", cost: CostModel | None = None) -> Search:
    """Find the regions of a graph.

    Args:
        gm: a Dynamo graph or an ATen graph, with fake values.
        choice: ``"auto"`` lets the cost model decide; ``"always"`` takes every repeated subgraph; patterns
            take the modules whose paths match one of them, even a single one; ``"off"`` takes none.
        cost: the cost model.
    """
    start = time.perf_counter()
    result = Search(read_facts(gm))
    if choice != "off":
        _Searcher(result, choice, cost or CostModel()).run()
    result.seconds = time.perf_counter() - start
    return result


class _Searcher:
    """Collects the candidates of a graph, and chooses between plans made of them."""

    def __init__(self, result: Search, choice: Choice, cost: CostModel) -> None:
        self.result, self.facts, self.choice, self.cost = result, result.facts, choice, cost
        self.fewest = 1 if isinstance(choice, tuple) else 2
        self.crossing = _crossing(self.facts)
        self._wiring_groups: dict[_Candidate, list[tuple[int, ...]]] = {}
        self._decisions: dict[_Candidate, IsomorphicSubgraphs] = {}
        weights = [cost.weight(node) for node in self.facts.calls]
        self.weights = [0.0, *itertools.accumulate(weights)]
        self.computing = [0.0, *itertools.accumulate(w if w >= 1 else 0.0 for w in weights)]

    def run(self) -> None:
        subgraphs = _module_subgraphs(self.facts)
        if isinstance(self.choice, tuple):
            chosen = [w for w, path in subgraphs if any(fnmatch.fnmatchcase(path, p) for p in self.choice)]
            paths = {path for _, path in subgraphs}
            self.result.unmatched = tuple(p for p in self.choice if not fnmatch.filter(paths, p))
            plans = [self._plan([self._ranked(self._by_tokens(chosen), self._rank_by_gain)])]
        else:
            modules = self._by_tokens([w for w, _ in subgraphs])
            heavy = any(self.cost.weight(node) >= SHORTEST for node in self.facts.calls)
            others: list[_Candidate] = []
            for repeat in repeated_substrings(self.facts.tokens, 1 if heavy else SHORTEST, self.fewest):
                others += self._shifted_candidates(repeat.length, repeat.starts)
            by_gain = self._ranked([*modules, *others], self._rank_by_gain)
            plans = [
                self._plan([by_gain], at_once=True),
                self._plan([by_gain]),
                self._plan([self._ranked(modules, self._rank_by_gain), by_gain]),
                self._plan([self._ranked(modules, self._rank_by_size), by_gain]),
            ]
        most = max(plan.gain for plan in plans)
        good = [plan for plan in plans if plan.gain >= most - _GAIN_TOLERANCE * abs(most)]
        best = min(good, key=lambda plan: plan.calls)
        self.result.taken, self.result.left = best.taken, best.left
        if self.choice == "auto":
            self._decline_all(best)

    def _decline_all(self, plan: _Plan) -> None:
        """Leave everything in the graph if all regions together save too little of its compile time."""
        saved = sum(found.estimate.saved_seconds for found in plan.taken)
        reason = self.cost.verdict_on_graph(saved, self.weights[-1], self.facts.dynamic)
        if reason:
            self.result.left = [*(replace(found, reason=reason) for found in plan.taken), *plan.left]
            self.result.taken = []

    def _plan(self, orders: Sequence[list[_Ranked]], *, at_once: bool = False) -> _Plan:
        """Make a plan: the best candidates of each order in turn, among the calls that are still free."""
        plan = _Plan(self, at_once)
        for waiting in orders:
            plan.add(list(waiting))
        return plan

    def _ranked(self, candidates: Iterable[_Candidate], rank: _Rank) -> list[_Ranked]:
        """Sort candidates by rank; ties keep the order in which they were found."""
        return sorted(
            (rank(candidate), number, candidate, rank) for number, candidate in enumerate(candidates)
        )

    def decide(self, subgraphs: list[Subgraph]) -> IsomorphicSubgraphs:
        """Estimate what a region of isomorphic subgraphs would save, and decide whether they become one."""
        first = subgraphs[0]
        candidate = first.stop - first.start, tuple(subgraph.start for subgraph in subgraphs)
        known = self._decisions.get(candidate)
        if known is None:
            known = self._decisions[candidate] = self._evaluate(subgraphs)
        return known

    def _evaluate(self, subgraphs: list[Subgraph]) -> IsomorphicSubgraphs:
        first = subgraphs[0]
        weight = self._weight(first.start, first.stop)
        estimate = self.cost.estimate(self.facts, first.start, first.stop, len(subgraphs), weight)
        computing = self.computing[first.stop] - self.computing[first.start]
        reason = ""
        if self.choice == "auto":
            fused = is_fused(self.facts.calls[first.start : first.stop])
            independent = fused and self._are_independent(subgraphs)
            reason = self.cost.verdict(estimate, len(subgraphs), fused, independent=independent)
        elif self.choice == "always" and computing < 2:
            reason = "less than two operations that compute anything"
        return IsomorphicSubgraphs(subgraphs, estimate, reason, [self._module(w) for w in subgraphs])

    def _are_independent(self, subgraphs: Sequence[Subgraph]) -> bool:
        """Whether subgraphs only need results of an adjacent one, in which they start if boundaries moved."""
        calls = self.facts.calls
        owners = {call: i for i, one in enumerate(subgraphs) for call in calls[one.start : one.stop]}
        needed: dict[fx.Node, set[int]] = {}
        for call in calls:
            found = set[int]().union(*(needed.get(one, ()) for one in call.all_input_nodes))
            if call in owners:
                found.add(owners[call])
                if len(found) > 2:
                    return False
            needed[call] = found
        return True

    def _by_tokens(self, subgraphs: Iterable[Subgraph]) -> list[_Candidate]:
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for subgraph in subgraphs:
            tokens = tuple(self.facts.tokens[subgraph.start : subgraph.stop])
            if self._is_long_enough(subgraph.start, subgraph.stop) and not any(token < 0 for token in tokens):
                groups[tokens].append(subgraph.start)
        return [
            (len(tokens), tuple(sorted(set(starts))))
            for tokens, starts in groups.items()
            if len(set(starts)) >= self.fewest
        ]

    def _shifted_candidates(self, length: int, starts: Sequence[int]) -> list[_Candidate]:
        """Return a repeated subgraph, and variants with moved boundaries."""
        kept = not_overlapping(starts, length)
        if len(kept) < self.fewest or not self._is_long_enough(kept[0], kept[0] + length):
            return []
        if self._is_periodic(kept[0], length):
            return []
        found = [(length, tuple(kept))]
        tandem = sum(b - a == length for a, b in itertools.pairwise(kept))
        if tandem * 2 >= len(kept):
            tokens = self.facts.tokens
            model = tokens[kept[0] : kept[0] + length]
            best = sorted(range(1, length), key=lambda r: self.crossing[kept[0] + r])[:_BOUNDARIES]
            for shift in best:
                rotated = model[shift:] + model[:shift]
                moved = [s + shift for s in kept if tokens[s + shift : s + shift + length] == rotated]
                before = kept[0] + shift - length
                if before >= 0 and tokens[before : before + length] == rotated:
                    moved.insert(0, before)
                if len(moved) >= self.fewest:
                    found.append((length, tuple(moved)))
        else:
            for cut in (1, 2, 3):
                if length - cut >= SHORTEST:
                    found.append((length - cut, tuple(kept)))
                    found.append((length - cut, tuple(s + cut for s in kept)))
        return found

    def _is_periodic(self, start: int, length: int) -> bool:
        """Whether it repeats a shorter subgraph, also a candidate, one and a half times or more."""
        tokens = self.facts.tokens[start : start + length]
        return any(
            tokens[period:] == tokens[:-period]
            for period in range(SHORTEST, 2 * length // 3 + 1)
            if tokens[period] == tokens[0] and tokens[period : period + SHORTEST] == tokens[:SHORTEST]
        )

    def _rank_by_gain(self, candidate: _Candidate) -> tuple[float, int]:
        """Rank by most seconds saved, then by fewest values across the boundary."""
        length, starts = candidate
        first, copies = starts[0], len(starts)
        weight = self._weight(first, first + length)
        if self.choice == "auto":
            saved = self.cost.saved(weight, copies, self.facts.dynamic)
        else:
            saved = self.cost.seconds_per_node * weight * (copies - 1)
        crossing = self.crossing[first] + self.crossing[first + length]
        return -saved + _CROSSING_SECONDS * crossing * copies, crossing

    def _rank_by_size(self, candidate: _Candidate) -> tuple[float, int]:
        """Rank by size, largest first."""
        length, starts = candidate
        return -self._weight(starts[0], starts[0] + length), 0

    def _is_long_enough(self, start: int, stop: int) -> bool:
        return max(stop - start, self._weight(start, stop)) >= SHORTEST

    def _weight(self, start: int, stop: int) -> float:
        return self.weights[stop] - self.weights[start]

    def group_by_wiring(self, length: int, starts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Group subgraphs with equal tokens by wiring, leaving out those that cannot be regions."""
        known = self._wiring_groups.get((length, starts))
        if known is None:
            groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for start in starts:
                if self.facts.balanced(start, start + length) and not self._splits_a_tuple(
                    start, start + length
                ):
                    groups[wiring(self.facts, start, start + length)[0]].append(start)
            known = self._wiring_groups[length, starts] = [tuple(group) for group in groups.values()]
            self._wiring_groups.update({(length, group): [group] for group in known})
        return known

    def _splits_a_tuple(self, start: int, stop: int) -> bool:
        """Whether a call inside returns several values that are unpacked outside, or vice versa."""
        facts = self.facts
        for index in range(start, stop):
            if facts.last_use[index] >= stop and facts.returns_several[index]:
                return True
            for node in facts.reads[index]:
                at = facts.position.get(node, start)
                if at < start and facts.returns_several[at]:
                    return True
        return False

    def _module(self, subgraph: Subgraph) -> str:
        common: tuple[tuple[str, str], ...] | None = None
        for path in self.facts.modules[subgraph.start : subgraph.stop]:
            if path:
                shared = path if common is None else common
                common = tuple(a for a, b in zip(shared, path, strict=False) if a == b)
        return common[-1][0] if common else ""


class _Plan:
    """Regions that do not overlap, chosen greedily.

    A candidate saves less than estimated if some copies are not free or are wired differently. What remains
    of it is decided ``at_once``, or goes back into the queue in as many parts.
    """

    def __init__(self, searcher: _Searcher, at_once: bool) -> None:
        self.searcher, self.at_once = searcher, at_once
        self.taken: list[IsomorphicSubgraphs] = []
        self.left: list[IsomorphicSubgraphs] = []
        self._free = bytearray(b"\x01") * len(searcher.facts.calls)
        self._decided: set[_Candidate] = set()
        self._declined = 0

    @property
    def gain(self) -> float:
        """Seconds that the plan gains."""
        return sum(found.estimate.gain for found in self.taken)

    @property
    def calls(self) -> int:
        """Number of region calls."""
        return sum(len(found.subgraphs) for found in self.taken)

    def add(self, waiting: list[_Ranked]) -> None:
        """Take candidates that are worth it, best first."""
        while waiting and self._declined < _MAX_REJECTED:
            _, number, (length, starts), rank = heapq.heappop(waiting)
            free = tuple(not_overlapping([s for s in starts if 0 not in self._free[s : s + length]], length))
            if len(free) < self.searcher.fewest or (length, free) in self._decided:
                continue
            groups = [
                g for g in self.searcher.group_by_wiring(length, free) if len(g) >= self.searcher.fewest
            ]
            for group in groups:
                if self.at_once or group == starts:
                    self._decided.add((length, group))
                    self._decide([Subgraph(s, s + length) for s in group])
                else:
                    heapq.heappush(waiting, (rank((length, group)), number, (length, group), rank))

    def _decide(self, subgraphs: list[Subgraph]) -> None:
        found = self.searcher.decide(subgraphs)
        if found.reason:
            self._declined += 1
            if not any(_within(subgraphs, item.subgraphs) for item in self.left):
                self.left.append(found)
            return
        self.taken.append(found)
        for subgraph in subgraphs:
            self._free[subgraph.start : subgraph.stop] = bytes(subgraph.stop - subgraph.start)


def _within(subgraphs: Sequence[Subgraph], larger: Sequence[Subgraph]) -> bool:
    """Whether each subgraph lies inside one of ``larger``, which are in order and do not overlap."""
    starts = [subgraph.start for subgraph in larger]
    around = (bisect.bisect_right(starts, subgraph.start) - 1 for subgraph in subgraphs)
    return all(i >= 0 and w.stop <= larger[i].stop for i, w in zip(around, subgraphs, strict=True))


def _crossing(facts: GraphFacts) -> list[int]:
    """Return, for each boundary between two calls, how many values cross it."""
    change = [0] * (len(facts.calls) + 2)
    for index, last in enumerate(facts.last_use):
        if last > index:
            change[index + 1] += 1
            change[last + 1] -= 1
    total, counts = 0, []
    for step in change[: len(facts.calls) + 1]:
        total += step
        counts.append(total)
    return counts


def _module_subgraphs(facts: GraphFacts) -> list[tuple[Subgraph, str]]:
    """Return the subgraphs that belong to one call of one module, with the module's path."""
    found: list[tuple[Subgraph, str]] = []
    stack: list[tuple[tuple[str, str], int]] = []
    for index in range(len(facts.calls) + 1):
        path = facts.modules[index] if index < len(facts.calls) else ()
        shared = 0
        while shared < min(len(stack), len(path)) and stack[shared][0] == path[shared]:
            shared += 1
        while len(stack) > shared:
            (name, _), start = stack.pop()
            found.append((Subgraph(start, index), name))
        stack += [(entry, index) for entry in path[shared:]]
    return found

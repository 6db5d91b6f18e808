"""From a memory budget to a cut: the fewest FLOPs recomputed along one fixed chain of cuts that stays within it.

Every component has a list of cuts, from no priced recomputation down to the fewest bytes. Each step of each list
recomputes more and saves less. All steps of all components, the ones that free most bytes per FLOP first, make one
chain of cuts of the whole graph; within a component that order is the order of its list (a convex hull), so that
every prefix of the chain is a cut. A budget picks the shortest prefix that fits, and of its last step only as much as
it needs (`cut.cut_within`). All these cuts are nested: a smaller budget recomputes a superset and saves no more bytes,
whatever the model.
"""

import dataclasses
import itertools
from fractions import Fraction

from fxpasses.partitioner.cut import Cut, cut_component, cut_within, cuts_by_price
from fxpasses.partitioner.flow_graph import BACKWARD, FORWARD, Component, Network


@dataclasses.dataclass(frozen=True)
class Chain:
    """The chain of cuts of a whole network.

    Attributes:
        network: whose cuts they are.
        cuts: for each occurrence of the network, the cuts of its component.
        steps: occurrences in the order in which they move on to their next cut.
        weights: weight of the values that the undecided part saves after each number of steps.
    """

    network: Network
    cuts: list[list[Cut]]
    steps: list[int]
    weights: list[int]

    @property
    def flops(self) -> list[int]:
        """FLOPs of the priced operations that are recomputed after each number of steps."""
        position = [0] * len(self.cuts)
        flops = [sum(options[0].flops for options in self.cuts)]
        for occurrence in self.steps:
            before, after = self.cuts[occurrence][position[occurrence] :][:2]
            position[occurrence] += 1
            flops.append(flops[-1] + after.flops - before.flops)
        return flops

    def sides_within(self, weight: int) -> bytearray:
        """Sides of the first cut that saves no more than `weight`; of the last cut if none does.

        The step that reaches it is taken only as far as it needs to be.
        """
        steps = self.steps_within(weight)
        cuts = self._cuts_after(steps)
        if steps > 0 and self.weights[steps] < weight:
            occurrence = self.steps[steps - 1]
            component, cheap, options = (
                self.network.occurrences[occurrence].component,
                cuts[occurrence],
                self.cuts[occurrence],
            )
            reached = options.index(cheap)
            gains = [_gain(*pair) for pair in itertools.pairwise(options[reached - 1 : reached + 2])]
            price = (gains[0] + (gains[1] if len(gains) == 2 else 0)) / 2
            allowed = weight - (self.weights[steps] - cheap.weight)
            cuts[occurrence] = cut_within(component, options[reached - 1], cheap, price, allowed)
        return _sides(self.network, cuts)

    def sides_after(self, steps: int) -> bytearray:
        """The side of each vertex after that many steps."""
        return _sides(self.network, self._cuts_after(steps))

    def _cuts_after(self, steps: int) -> list[Cut]:
        position = [0] * len(self.cuts)
        for occurrence in self.steps[:steps]:
            position[occurrence] += 1
        return [cuts[k] for cuts, k in zip(self.cuts, position, strict=True)]

    def steps_within(self, weight: int) -> int:
        """The number of steps until no more than `weight` is saved; all of them if it never fits."""
        for steps, reached in enumerate(self.weights):
            if reached <= weight:
                return steps
        return len(self.steps)


def cut_without_price(network: Network) -> bytearray:
    """The minimum cut of a network in which nothing has a price."""
    known: dict[Component, Cut] = {}
    for occurrence in network.occurrences:
        if occurrence.component not in known:
            known[occurrence.component] = cut_component(occurrence.component)
    return _sides(network, [known[occurrence.component] for occurrence in network.occurrences])


def chain_of_cuts(network: Network) -> Chain:
    """All cuts of `network`, ordered by bytes freed per FLOP; ties go to the earlier occurrence.

    Recomputing early parts first keeps the peak low: the backward pass reaches them last, when others are gone.
    """
    known: dict[Component, list[Cut]] = {}
    for occurrence in network.occurrences:
        if occurrence.component not in known:
            known[occurrence.component] = cuts_by_price(occurrence.component)
    cuts = [known[occurrence.component] for occurrence in network.occurrences]
    steps = []
    for number, options in enumerate(cuts):
        for before, after in itertools.pairwise(options):
            steps.append((-_gain(before, after), number, before.weight - after.weight))
    steps.sort(key=lambda step: step[:2])
    weights = [sum(options[0].weight for options in cuts)]
    for _, _, freed in steps:
        weights.append(weights[-1] - freed)
    return Chain(network, cuts, [number for _, number, _ in steps], weights)


def _gain(before: Cut, after: Cut) -> Fraction:
    """Weight freed per FLOP."""
    return Fraction(before.weight - after.weight, after.flops - before.flops)


def _sides(network: Network, cuts: list[Cut]) -> bytearray:
    side = bytearray(network.side)
    for occurrence, cut in zip(network.occurrences, cuts, strict=True):
        for vertex, local in occurrence.vertices:
            side[vertex] = BACKWARD if local in cut.backward else FORWARD
    return side

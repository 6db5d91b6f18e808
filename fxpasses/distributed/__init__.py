"""Distributed jobs: check that what the ranks compile fits together, shard parameters, and simulate steps.

Each rank compiles for itself. If one of them gets another graph (other options, another source, a graph
break, a stale cache), its collectives differ. The job then hangs or, if only two equal ones are swapped,
computes wrong numbers.

* ``signature``: what a compiled graph will send, in an order and in words that do not depend on the rank;
  ``collective_call`` and ``carried_values`` describe one collective
* ``agreement``, ``gated_call``, ``gate``: the ranks compare their signatures through the store of the process
  group, before the graph runs for the first time; the comparison itself is ``gate.what_differs``
* ``decision``: one rank decides what all of them save for the backward pass
* ``answering``: questions to ranks that do not come; ``watching``: calls that hang because ranks run what was
  compared before in another order
* ``sharding``, ``gathering``, ``fully_sharded``: the gathers of sharded parameters, in the graph
* ``simulate``: a training step on a clock; ``network``: what a collective costs; ``schedule``, ``draft``: the
  best buckets by simulation; ``capture``: the graphs of one rank of many, in one process
"""

from typing import TYPE_CHECKING

from fake.seam.lazy import lazy_names

if TYPE_CHECKING:  # else imported on first use: the graph of a plan runs without the compiler
    from fxpasses.distributed.agreement import Agreement
    from fxpasses.distributed.sharding import shard

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Agreement", "shard"]

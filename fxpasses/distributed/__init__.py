"""Distributed jobs: check that what the ranks compile fits together, and shard parameters.

Each rank compiles for itself. If one of them gets another graph (other options, another source, a graph
break, a stale cache), its collectives differ. The job then hangs or, if only two equal ones are swapped,
computes wrong numbers. :mod:`.signature` describes what a compiled graph will send, in an order and in words
that do not depend on the rank. :mod:`.agreement` compares that between ranks through the store of the process
group, before the graph runs for the first time. :mod:`.sharding` puts the gathers of sharded parameters into
the graph.
"""

from typing import TYPE_CHECKING

from fake.seam.lazy import lazy_names

if TYPE_CHECKING:  # else imported on first use: the graph of a plan runs without the compiler
    from fxpasses.distributed.agreement import Agreement
    from fxpasses.distributed.sharding import shard

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Agreement", "shard"]

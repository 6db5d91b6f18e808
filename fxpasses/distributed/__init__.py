"""Many processes: what the ranks of a job compile has to fit together; parameters as shards.

Each rank compiles for itself. If one of them gets another graph (other options, another source, a graph break, an old cache), its
collectives are others, and the job hangs or, where only two equal ones swap, computes wrong numbers. :mod:`.signature` says what a
compiled graph will send, in an order and in words that do not depend on the rank; :mod:`.agreement` compares that between ranks
through the store of the process group, before the graph runs for the first time. :mod:`.sharding` puts the gathers of sharded parameters into the graph.
"""

from typing import TYPE_CHECKING

from fake.seam.lazy import lazy_names

if TYPE_CHECKING:  # and when somebody asks for one of them: the graph of a plan runs without what compiles
    from fxpasses.distributed.agreement import Agreement
    from fxpasses.distributed.sharding import shard

__getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Agreement", "shard"]

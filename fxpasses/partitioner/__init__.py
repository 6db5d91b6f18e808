"""Min-cut partitioner with recomputation: chooses the values that the forward pass saves for the backward pass.

Read `partitioner` first. `classify` and `recomputation` say what may be done, `flow_graph` and `budget`
decide, `extract` builds the graphs, and `partition_report` describes the result.
"""

from fxpasses.partitioner.custom_partitioner import MinCutPartitioner
from fxpasses.partitioner.errors import PartitionError, PartitionOptionError
from fxpasses.partitioner.partition_report import META_KEY, PartitionReport, RecomputedValue, SavedValue
from fxpasses.partitioner.partitioner import partition

__all__ = [
    "META_KEY",
    "MinCutPartitioner",
    "PartitionError",
    "PartitionOptionError",
    "PartitionReport",
    "RecomputedValue",
    "SavedValue",
    "partition",
]

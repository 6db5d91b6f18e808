"""Min-cut partitioner with recomputation: what the forward pass saves for the backward pass.

Read `partitioner` first; `classify` and `operators` say what may be done, `flow_graph`, `cut` and `budget` decide,
`extract` builds the graphs and `report` describes the result.
"""

from .errors import PartitionError, PartitionOptionError
from .inductor import MinCutPartitioner
from .partitioner import partition
from .report import META_KEY, PartitionReport, RecomputedValue, SavedValue

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

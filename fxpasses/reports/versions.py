"""The version of the data of a report, and its fields; known without torch."""

LEDGER_FILE = "ledger.json"
"""What tuning tried and kept, one element a graph, beside the graphs of a report."""

STEPS_FILE = "steps.json"
"""Measured steps, beside the graphs of a report."""

SIMULATION_FILE = "simulation.json"
"""A simulated step, beside the graphs of a report."""

SCHEMA = 1
"""Goes up when a field changes its meaning or is gone; new fields do not change it."""

NODE_FIELDS = [
    "name",
    "target",
    "type",
    "stride",
    "bytes",
    "flops",
    "view",
    "inputs",
    "line",
    "module",
    "backward",
    "forward_node",
]
"""The columns of a node's row. ``target``, ``line`` and ``module`` are rows of the tables ``targets``, ``lines`` and ``modules``
(-1: unknown), ``inputs`` are positions of nodes in the same graph."""

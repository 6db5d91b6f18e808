"""The version and the fields of report data. Importing this needs no torch."""

LEDGER_FILE = "ledger.json"
"""What tuning tried and kept, one element per graph, beside the graphs of a report."""

STEPS_FILE = "steps.json"
"""Measured steps, beside the graphs of a report."""

SIMULATION_FILE = "simulation.json"
"""A simulated step, beside the graphs of a report."""

SCHEMA = 1
"""Increases when a field changes its meaning or is removed. New fields do not change it."""

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
"""The columns of a node's row.

``target``, ``line`` and ``module`` are row numbers in the tables ``targets``, ``lines`` and ``modules`` (-1:
unknown). ``inputs`` are positions of nodes in the same graph.
"""

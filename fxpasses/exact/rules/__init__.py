"""Exact rules of ATen's operators on dual numbers, one family a file; operators without one are decomposed, or opaque."""

from fxpasses.exact.rules import (
    attention,
    data_movement,
    distances,
    grid_sampling,
    linear_algebra,
    matmul,
    pointwise,
    pooling,
    reductions,
)
from fxpasses.exact.rules.table import RULES, Rule, rule, rule_of

__all__ = [
    "RULES",
    "Rule",
    "attention",
    "data_movement",
    "distances",
    "grid_sampling",
    "linear_algebra",
    "matmul",
    "pointwise",
    "pooling",
    "reductions",
    "rule",
    "rule_of",
]

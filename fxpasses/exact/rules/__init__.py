"""Exact rules of ATen's operators on dual numbers, one family a file; operators without one are decomposed, or opaque."""

from fxpasses.exact.rules import attention, data_movement, matmul, pointwise, reductions
from fxpasses.exact.rules.table import RULES, Rule, rule

__all__ = ["RULES", "Rule", "attention", "data_movement", "matmul", "pointwise", "reductions", "rule"]

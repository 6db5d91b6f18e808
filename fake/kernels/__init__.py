"""Rules for operators whose meta kernel is missing or disagrees with eager: one family per file.

Eager is the specification. Operators whose meta kernels and decompositions agree with eager have no rule. For
the others, :func:`find` returns the rule.

A rule is a function with the decorator ``rule`` of ``rule_registry``, in the file of its family; a new file is
imported below. Eager's checks of arguments are in ``checks``. A C++ composite that reads data runs before any
rule: ``composites`` replaces it. ``outputs`` makes results, ``trials`` and ``dtypes`` try eager's kernels, and
steps of ``fake.dispatch`` call ``overlaps`` and ``gradients``.

>>> import torch, fake.kernels
>>> fake.kernels.find(torch.ops.aten.logaddexp.default) is not None
True
"""

from pathlib import Path

from fake.kernels import (  # noqa: F401  (they register their rules)
    arange,
    composites,
    converted,
    data_dependent,
    fft,
    gpu_attention,
    grouped_mm,
    histogram,
    images,
    lazy_parameters,
    likes,
    linalg,
    losses,
    normalization,
    out_variants,
    pointwise_strides,
    resize,
    rnn,
    sampling,
    sparse,
    structured,
    views,
    without_meta,
)
from fake.kernels.rule_registry import Rule, find, rule, rule_when, rules, takes_sparse
from fake.seam.symbolic_shapes import HIDDEN_FILES

__all__ = ["Rule", "find", "rule", "rule_when", "rules", "takes_sparse"]

for _path in Path(__file__).parent.glob("*.py"):
    HIDDEN_FILES.add(str(_path))  # attribute the guards of a rule to the line that called the operator

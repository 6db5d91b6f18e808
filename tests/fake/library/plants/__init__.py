"""Operators with one fault each that their sample does not reveal, and correct ones for comparison.

`WRONG` and `RIGHT` map a name to a function that defines the operator and returns ``(operator, arguments)``.
"""

from . import gradients, kernels, sizes
from .table import RIGHT, WRONG

__all__ = ["RIGHT", "WRONG", "gradients", "kernels", "sizes"]

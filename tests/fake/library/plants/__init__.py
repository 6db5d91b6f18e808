"""Wrong operators with one fault each, which their sample does not show, and right ones beside them.

`WRONG` and `RIGHT` map a name to a function that defines the operator and returns ``(operator, arguments)``.
"""

from . import gradients, kernels, sizes
from .table import RIGHT, WRONG

__all__ = ["RIGHT", "WRONG", "gradients", "kernels", "sizes"]

"""``torch.utils._sympy``: the functions and symbols of symbolic sizes, and the settings of shape environments."""

from __future__ import annotations

from torch.fx.experimental import _config as config
from torch.utils._sympy.functions import Max, Mod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type

"""The text of the function that is generated for an operator: its handler.

The key (``key.py``) stands in the middle of it, so that a hit makes no call for it. Compiling the text takes longer than
most operators' first dispatch: what a hit does not need is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake import _torch as _t

HANDLER = """
def make(func, get, hit, miss, unseen, {names}):
    def handler(mode, func, types, args, kwargs):
{before}      try:
{key}        rebuild = get(key)
      except Unkeyable as reason:
        return miss(mode, func, types, args, kwargs, None, reason.reason)
      except (TypeError, AttributeError):
        return miss(mode, func, types, args, kwargs, None, "unhashable argument")
      if rebuild is None: return unseen(mode, func, types, args, kwargs, key)
      if rebuild.__class__ is not Bypass: hit()
      return rebuild(mode, args, kwargs)
    return handler
"""

IN_A_FORMULA = """\
      if type(autograd_node()) in FORMULAS:
        return miss(mode, func, types, args, kwargs, None, "formula of autograd")
"""
"""Before the key: which formula calls the operator decides the strides of its result."""


def made_by(code: str, file: str) -> Callable[..., Any]:
    """The function ``make`` of some generated code, whose frames are not told to users."""
    _t.HIDDEN_FILES.add(file)
    namespace: dict[str, Any] = {}
    exec(compile(code, file, "exec"), namespace)
    made: Callable[..., Any] = namespace["make"]
    return made

"""Combine passes of several libraries: scoped registration, and entry points.

* ``with use_passes(MyPass()):`` adds passes to everything that is compiled inside the block. Blocks nest;
  each adds its passes after those of the enclosing block, and the contracts decide the order.
* An installed library lists its passes under the entry-point group ``fxpasses.passes``. They are then
  available by name, as ``library::pass``, and imported on use.

Nothing is registered permanently: a library cannot overwrite what another one has set.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fxpasses.errors import ContractError, OptionsError
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.pass_manager.specification import parse_pass
from fxpasses.passes import library

ENTRY_POINTS = "fxpasses.passes"
"""The entry-point group under which a library lists its passes."""


@dataclass(frozen=True)
class _ActivePass:
    item: Pass
    owner: str


_active: ContextVar[tuple[_ActivePass, ...]] = ContextVar("active_passes", default=())


@contextlib.contextmanager
def use_passes(*passes: Pass | str, owner: str | None = None) -> Iterator[tuple[Pass, ...]]:
    """Add passes to every compilation and capture that starts inside the block, in this thread.

    They run in addition to those of ``options={"passes": ...}``. A function compiled inside the block keeps
    them; one compiled before does not get them.

    Args:
        *passes: passes, or names of available ones with their options (``"fold_constants{max_bytes=1024}"``).
        owner: who adds them, for error messages; by default the package that defines each.

    Raises:
        ContractError: if another pass of the same name is in use; names both owners.
        OptionsError: if a name is unknown.

    >>> from fxpasses import Options, graph_pass, use_passes
    >>> mine = graph_pass(lambda gm: False, name="mylib::mine")
    >>> with use_passes(mine):
    ...     [item.name for item in Options.parse({"passes": ["eliminate_dead_code"]}).passes]
    ['eliminate_dead_code', 'mylib::mine']
    """
    from_names = available_passes() if any(isinstance(item, str) for item in passes) else {}
    chosen = [parse_pass(item, from_names) if isinstance(item, str) else item for item in passes]
    used = _active.get()
    for item in chosen:
        if not isinstance(item, Pass):
            raise OptionsError(
                "use_passes", item, "passes and pass names; wrap a function with fxpasses.graph_pass"
            )
        mine = _ActivePass(item, owner or _package(item))
        other = next((u for u in used if u.item.name == item.name), None)
        if other is None:
            used = (*used, mine)
        elif other.item != item:
            raise ContractError(
                f"pass {item.name!r} is in use already: {other.owner} brought {other.item!r}, and {mine.owner} brings "
                f"{item!r}; give one of them another name ('library::pass')",
                (item.name, item.name),
            )
    token = _active.set(used)
    try:
        yield tuple(chosen)
    finally:
        _active.reset(token)


def active_passes() -> tuple[Pass, ...]:
    """Return the passes of the enclosing :func:`use_passes` blocks, outermost first."""
    return tuple(used.item for used in _active.get())


def available_passes() -> Mapping[str, Any]:
    """Return all passes that are available by name: from this library, installed ones, and enclosing blocks.

    Passes of installed libraries are imported on lookup.

    Raises:
        ContractError: if two libraries list a pass of the same name; names both.
    """
    return _AvailablePasses({**library(), **{item.name: item for item in active_passes()}}, _entry_points())


class _AvailablePasses(Mapping[str, Any]):
    """Passes by name. Entry points are loaded on lookup."""

    def __init__(self, known: dict[str, Any], points: Mapping[str, importlib.metadata.EntryPoint]) -> None:
        self._known, self._points = known, points

    def __getitem__(self, name: str) -> Any:
        return self._known[name] if name in self._known else _load(name, self._points[name])

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._points

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        yield from (name for name in self._points if name not in self._known)

    def __len__(self) -> int:
        return len(self._known.keys() | self._points.keys())


def _entry_points() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return entry points by the name of their pass, ``library::pass``."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        owner = point.dist.name if point.dist is not None else point.value.partition(":")[0]
        name = point.name if "::" in point.name else f"{owner.replace('-', '_')}::{point.name}"
        other = found.setdefault(name, point)
        if other.value != point.value:
            both = " and ".join(f"{_owner(p)} ({p.value})" for p in (other, point))
            raise ContractError(
                f"two libraries list a pass as {name!r}: {both}; uninstall one of them", (name, name)
            )
    return found


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


def _load(name: str, point: importlib.metadata.EntryPoint) -> Any:
    loaded = point.load()
    if isinstance(loaded, Pass) or (isinstance(loaded, type) and issubclass(loaded, Pass)):
        return loaded
    raise OptionsError(
        "passes",
        name,
        problem=f"entry point {name!r} of {_owner(point)} is {loaded!r}, neither a pass nor a class of passes",
    )


def _package(item: Pass) -> str:
    """Return the top-level package that defines a pass."""
    function = getattr(item, "function", None) or getattr(item, "pattern", None) or type(item)
    return str(function.__module__).partition(".")[0]

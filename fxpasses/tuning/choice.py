"""A choice: the steps that a tuned graph takes beyond the default, each of them a pass or a setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxpasses.compiling.options import Options
from fxpasses.errors import OptionsError
from fxpasses.pass_manager.contract import Pass
from fxpasses.passes import default_passes

__all__ = ["Choice", "Step"]


@dataclass(frozen=True)
class Step:
    """One change of how a graph is compiled.

    Attributes:
        name: the pass with its options as text, or the setting (``memory_budget=0.5``).
        item: the pass, for a step that is one.
        settings: the options of :class:`fxpasses.Options` that it sets, for one that is not.
        predicted: what the cost model expects of it: time with it over time without.
        allowed: whether the user takes results that are not eager's for it.
    """

    name: str
    item: Pass | None = field(default=None, compare=False)
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    predicted: float = field(default=1.0, compare=False)
    allowed: bool = field(default=False, compare=False)

    @classmethod
    def setting(cls, option: str, value: Any) -> Step:
        """A step that sets one option."""
        told = ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else value
        return cls(f"{option}={told}", None, {option: value})

    def to_data(self) -> dict[str, Any]:
        """The step as plain data; of a pass the text, and a digest of what it does."""
        digest = self.item.identify().digest if self.item is not None else None
        return {"name": self.name, "settings": dict(self.settings), "digest": digest, "allowed": self.allowed}

    @classmethod
    def from_data(cls, data: Mapping[str, Any], make: Callable[[str], Pass]) -> Step:
        """The step that :meth:`to_data` wrote.

        Args:
            data: what it wrote.
            make: gives the pass of a text.

        Raises:
            OptionsError: there is no such pass, or it does something else by now.
        """
        if data["digest"] is None:
            return cls(data["name"], None, data["settings"])
        item = make(data["name"])
        if item.identify().digest != data["digest"]:
            raise OptionsError(
                "passes", data["name"], problem=f"pass {data['name']!r} is not the one that was measured"
            )
        return cls(data["name"], item, allowed=bool(data.get("allowed")))


@dataclass(frozen=True)
class Choice:
    """The steps of one program, in order.

    Attributes:
        steps: what differs from the default; nothing for the default itself.
    """

    steps: tuple[Step, ...] = ()

    def plus(self, step: Step) -> Choice:
        """The choice with one more step."""
        return Choice((*self.steps, step))

    def without_allowed(self) -> Choice:
        """The choice without the steps whose results need not be eager's: what can be compared."""
        return Choice(tuple(step for step in self.steps if not step.allowed))

    def options(self, base: Options) -> Options:
        """The options to compile with.

        Args:
            base: the user's.
        """
        passes = [step.item for step in self.steps if step.item is not None]
        if passes:
            base = dataclasses.replace(base, passes=(*base.passes, *passes, *default_passes()))
        for step in self.steps:
            for option, value in step.settings.items():
                if option == "inductor":
                    value = {**base.inductor, **value}
                base = dataclasses.replace(base, **{option: value})
        return base

    def __str__(self) -> str:
        return ", ".join(step.name for step in self.steps) or "default"

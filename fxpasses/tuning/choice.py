"""Choices: the steps that a tuned graph takes beyond the default. Each step is a pass or a setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxpasses.compiling.options import Options
from fxpasses.errors import OptionsError
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.passes import default_passes
from fxpasses.tuning.content import family_of

THE_REST = "the rest"
"""The place of passes that run outside all regions."""

PARTITIONED_KINDS = ("forward", "backward")
"""The graphs after the partition."""


def runs_after_partition(item: Pass) -> bool:
    """Whether a pass runs after the partition, hence after all passes on whole graphs."""
    return "joint" not in item.contract.graphs and bool({*PARTITIONED_KINDS} & set(item.contract.graphs))


@dataclass(frozen=True)
class Step:
    """One change to how a graph is compiled.

    Attributes:
        name: the pass with its options as text, or the setting (``memory_budget=0.5``).
        item: the pass, if the step is one.
        settings: the options of :class:`fxpasses.Options` that the step sets, if it is not a pass.
        predicted: the time with the step over the time without, as the cost model predicts.
        growth: the number of calls in the graph with the step over the number without. Scales its compile
            time.
        allowed: whether the user accepts results that differ from eager.
        places: where a pass runs: in regions of these families, or in ``THE_REST`` of the graph. ``None``
            means everywhere.
    """

    name: str
    item: Pass | None = field(default=None, compare=False, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    predicted: float = field(default=1.0, compare=False)
    growth: float = field(default=1.0, compare=False)
    allowed: bool = field(default=False, compare=False)
    places: tuple[str, ...] | None = None

    @classmethod
    def of_pass(cls, item: Pass, places: tuple[str, ...] | None = None, **more: Any) -> Step:
        """Make a step that runs a pass."""
        labels = [place if place == THE_REST else f"region {place[:8]}" for place in places or ()]
        return cls(f"{item} in {' and '.join(labels)}" if labels else str(item), item, places=places, **more)

    def runs_in(self, place: str) -> bool:
        """Whether a pass step runs in regions of that family, or in ``THE_REST`` of the graph."""
        return self.places is None or place in self.places

    @classmethod
    def setting(cls, option: str, value: Any) -> Step:
        """Make a step that sets one option."""
        text = ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else value
        return cls(f"{option}={text}", None, {option: value})

    def to_data(self) -> dict[str, Any]:
        """Return the step as plain data. A pass is stored as its text and a digest of what it does."""
        digest = self.item.identify().digest if self.item is not None else None
        return {
            "name": self.name if self.item is None else str(self.item), "settings": dict(self.settings), "digest": digest,
            "allowed": self.allowed, "places": self.places,
        }  # fmt: skip

    @classmethod
    def from_data(cls, data: Mapping[str, Any], make: Callable[[str], Pass]) -> Step:
        """Rebuild the step that :meth:`to_data` wrote.

        Args:
            data: what it wrote.
            make: makes a pass from its text.

        Raises:
            OptionsError: the pass does not exist, or does something else by now.
        """
        if data["digest"] is None:
            return cls(data["name"], None, data["settings"])
        item = make(data["name"])
        if item.identify().digest != data["digest"]:
            raise OptionsError(
                "passes", data["name"], problem=f"pass {data['name']!r} is not the one that was measured"
            )
        places = None if data["places"] is None else tuple(data["places"])
        return cls.of_pass(item, places, allowed=bool(data["allowed"]))


PLAIN = Step("plain", None, {"regions": "off", "partition": "torch"})
"""Inductor alone: no default passes, no regions, and torch's partition into forward and backward."""


@dataclass(frozen=True)
class Choice:
    """The steps of one program, in order.

    Attributes:
        steps: the differences from the default; empty for the default itself.
    """

    steps: tuple[Step, ...] = ()

    def plus(self, step: Step) -> Choice:
        """Return the choice with one more step. A pass that it already has moves to the step's places."""
        return Choice((*(s for s in self.steps if s.item is None or s.item != step.item), step))

    def everywhere(self) -> Choice:
        """Return the choice with its passes running wherever they change something."""
        return Choice(tuple(replace(step, places=None) for step in self.steps))

    def without_inductor(self) -> Choice:
        """Return the choice without Inductor options: the part that decides which graphs Inductor gets."""
        return Choice(tuple(step for step in self.steps if "inductor" not in step.settings))

    def without_allowed(self) -> Choice:
        """Return the choice without steps whose results may differ from eager: what can be compared."""
        return Choice(tuple(step for step in self.steps if not step.allowed))

    def options(self, base: Options) -> Options:
        """Return the options to compile with.

        They raise on failure: what a fallback would run instead is not the program of these steps.

        Args:
            base: the user's options.
        """
        if self.steps:
            base = replace(base, on_failure="raise")
        if PLAIN in self.steps:
            left_out = default_passes()
            base = replace(base, passes=tuple(item for item in base.passes if item not in left_out))
        if any(step.item is not None for step in self.steps):
            passes = self.passes(base.passes, THE_REST)
            base = _PlacedOptions(**{**vars(base), "passes": passes}, choice=self, user_passes=base.passes)
        for step in self.steps:
            for option, value in step.settings.items():
                if option == "inductor":
                    value = {**base.inductor, **value}
                base = replace(base, **{option: value})
        return base

    def passes(self, user_passes: tuple[Pass, ...], place: str) -> tuple[Pass, ...]:
        """Return the passes for one part of the graph.

        Args:
            user_passes: the user's passes.
            place: the family of a region, or ``THE_REST``.
        """
        chosen = [step.item for step in self.steps if step.item is not None and step.runs_in(place)]
        chosen.sort(key=runs_after_partition)  # these run last in inference graphs as well
        return (
            (*user_passes, *chosen, *(() if PLAIN in self.steps else default_passes()))
            if chosen
            else user_passes
        )

    def __str__(self) -> str:
        return ", ".join(step.name for step in self.steps) or "default"


@dataclass(frozen=True)
class _PlacedOptions(Options):
    """Options whose passes apply around regions. Each region gets the passes chosen for its family."""

    choice: Choice = Choice()
    user_passes: tuple[Pass, ...] = ()

    def asked_for(self) -> tuple[Pass, ...]:
        return self.user_passes

    def of_region(self, gm: fx.GraphModule) -> Options:
        return replace(self, passes=self.choice.passes(self.user_passes, family_of(gm)))

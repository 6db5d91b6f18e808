"""What the trace of a frame depends on, read before Dynamo ends the trace."""

from __future__ import annotations

import itertools
import types
from collections.abc import Set
from typing import Any

import torch

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.exchanged import Entries
from fxpasses.plans.objects.library_operators import operator_dependencies
from fxpasses.plans.objects.named_attributes import Names, names_read
from fxpasses.plans.recording import _torch_compiled as _t
from fxpasses.plans.recording._torch_effects import changed_objects
from fxpasses.plans.walks.reads import Read, check_covered, read_of_operator, read_of_result, reads_of
from fxpasses.plans.walks.replaced import check_methods, replacements_in
from fxpasses.plans.walks.walk import Walk


class RecordedTrace:
    """What was seen of a trace.

    Attributes:
        codes: the code of all functions that were traced, and of those that ran while it was.
        targets: the code of functions in the graph.
        operators: the names of operators that are not torch's.
        changed: the objects on which attributes are set.
        guarded: the places that Dynamo guards on.
        numbers: by guard name, the objects and attribute names of symbolic integers.
        shape_env: the shape environment of its symbols.
        tensors: by guard name, the tensors that the frame was given.
        exchanged: where it replaces tensors: dictionaries and keys, lists and indices.
        reads_gradients: whether it depends on gradients.
    """

    def __init__(self) -> None:
        self.codes: list[types.CodeType] = []
        self.targets: list[types.CodeType] = []
        self.operators: list[str] = []
        self.changed: list[Any] = []
        self.guarded: list[str] = []
        self.numbers: dict[str, tuple[Any, str]] = {}
        self.shape_env: Any = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.exchanged: list[tuple[Entries, Any]] = []
        self.reads_gradients = False
        self._untraced_codes: list[types.CodeType] = []

    def note(self, *, dictionaries: bool) -> str:
        """Note what Dynamo has traced so far. Returns what has another value afterwards, or "".

        Args:
            dictionaries: whether the frame may change dictionaries.

        Raises:
            NoPlan: it depends on what cannot be determined, or changes more.
        """
        self.codes += _t.traced_codes()
        self.targets += _t.codes_in_graph()
        self.numbers |= _t.symbolic_attributes()
        self.guarded += _t.guarded_sources(self.numbers)
        self.shape_env, self.tensors = _t.shape_env_of_frame(), _t.tensors_of_frame()
        self.reads_gradients = self.reads_gradients or _t.reads_gradients()
        codes, operators = operator_dependencies(_t.foreign_operators())
        self.codes += codes
        self._untraced_codes += codes
        self.operators += operators
        changed, differs, same, exchanged = changed_objects(dictionaries=dictionaries)
        self.changed += changed
        self.exchanged += exchanged
        self.guarded += same
        return differs

    def reads(self) -> dict[Read, None]:
        """What it reads that belongs to no object.

        Raises:
            NoPlan: some of it cannot be listed.
        """
        replacements = replacements_in([*self.codes, *self.targets])
        found = [*reads_of(self.codes), *map(read_of_operator, self.operators), *replacements]
        return dict.fromkeys((*found, *itertools.starmap(read_of_result, _t.constant_result_calls())))

    def names(self, walk: Walk) -> Names:
        """The attributes that it reads. ``walk`` covers the model and all else that is read."""
        return names_read(self.codes, self.guarded, self._untraced_codes, walk.protocol_attributes)

    def check(self, walk: Walk, containers: Set[int]) -> None:
        """Check that a plan can tell whether everything that the trace depends on is unchanged.

        Args:
            walk: over the model and all else that is read.
            containers: the ``id`` of each list, dictionary and object of a data class among the arguments.

        Raises:
            NoPlan: it cannot.
        """
        check_covered(self.codes, walk)
        check_methods(self.codes)
        if not all(walk.has_met(value) or id(value) in containers for value in self.changed):
            raise NoPlan("a frame that changes an object")  # its earlier state is unknown
        if any(name in place for name in walk.hashes for place in self.guarded):
            raise NoPlan("code that reads the hash of an object")

    def clear(self) -> None:
        """Keep no object that was seen."""
        self.changed, self.guarded, self.numbers, self.exchanged = [], [], {}, []
        self.shape_env, self.tensors = None, {}

"""What the engine makes of recipes that were not recorded in this process."""

from __future__ import annotations

from typing import Any

from fake import _torch as _t
from fake.cache.recipe import Mark, Recipe, build


def symbolic_name(name: str) -> str:
    """The name on the disk of an engine's results on symbolic sizes."""
    return f"{name}, symbolic"


class Unbuilt:
    """A recipe from the disk: compiled at its first use, in the place where it was found."""

    __slots__ = ("key", "recipe", "table", "tensor_class")

    def __init__(self, recipe: Recipe, tensor_class: type, table: dict[Any, Any], key: Any) -> None:
        self.recipe, self.tensor_class, self.table, self.key = recipe, tensor_class, table, key

    def __call__(self, mode: Any, args: Any, kwargs: Any) -> Any:
        rebuild = self.table[self.key] = build(self.recipe, self.tensor_class, mark_of(mode))
        return rebuild(mode, args, kwargs)


def mark_of(mode: Any) -> Mark:
    """Returns what the mode wants to happen when the data pointer of a fake tensor is read."""
    return _t.warn_on_data_ptr if mode._allow_unsafe_data_ptr_access else _t.throw_on_data_ptr

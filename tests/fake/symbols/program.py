"""A program over sizes, written as one expression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["Program", "program"]


@dataclass(frozen=True)
class Program:
    """A program and the shapes of its inputs, in letters that may be any sizes; a number is that size always."""

    text: str
    run: Callable[..., Any]
    shapes: tuple[tuple[str | int, ...], ...]

    @property
    def letters(self) -> list[str]:
        return sorted({size for shape in self.shapes for size in shape if isinstance(size, str)})

    def sizes(self, values: dict[str, int]) -> list[tuple[int, ...]]:
        return [tuple(values.get(size, size) for size in shape) for shape in self.shapes]  # type: ignore[misc]

    def __repr__(self) -> str:
        return self.text


def program(text: str, *shapes: tuple[str | int, ...]) -> Program:
    """A program from its text, in which the inputs are ``x0``, ``x1`` and so on."""
    code = compile(text, "<program>", "eval")
    names = [f"x{i}" for i in range(len(shapes))]

    def run(*inputs: Any) -> Any:
        return eval(code, {"torch": torch, "F": F}, dict(zip(names, inputs, strict=True)))

    return Program(text, run, shapes)

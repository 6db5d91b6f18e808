"""Solve for output sizes within one class of calls: structure, ranks and numbers are equal, only sizes vary.

Each output size is solved for separately: a constant, a size, affine, a quotient (windows, as in
convolutions), sums, products, minima and maxima of sizes. A candidate is the text of an expression.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from fake.library.probe.experiments import Observation

_MAX_SOLUTIONS = 4


def _variables(observations: Sequence[Observation]) -> tuple[dict[str, list[int]], list[str]]:
    """Return the varying quantities by expression, and conditions on those that do not vary.

    They are input sizes, integer arguments and element counts; of equal columns only the first is kept.
    """
    columns: dict[str, list[int]] = {}
    tensors = [dict(o.facts.tensors) for o in observations]
    for name, tensor in tensors[0].items():
        for index in range(tensor.dim()):
            columns[f"{name}.shape[{index}]"] = [t[name].shape[index] for t in tensors]
    columns.update(_number_columns(observations))
    conditions: list[str] = []
    distinct: dict[str, list[int]] = {}
    for expression, column in columns.items():
        same_column = next((e for e, c in distinct.items() if c == column), None)
        if len(set(column)) == 1:
            # A quantity that never varied may matter: the solution claims nothing for its other values.
            conditions.append(f"{expression} == {column[0]}")
        elif same_column is not None:
            conditions.append(f"{expression} == {same_column}")
        else:
            distinct[expression] = column
    for name, value in observations[0].facts.values.items():
        values = {repr(o.facts.values.get(name)) for o in observations}
        if isinstance(value, (float, complex)) and len(values) == 1:
            conditions.append(f"{name} == {value!r}")
    for name, value in observations[0].facts.values.items():
        lengths = {len(v) for o in observations if isinstance(v := o.facts.values.get(name), tuple)}
        if isinstance(value, tuple) and len(lengths) == 1:
            conditions.append(f"len({name}) == {len(value)}")
    for name, tensor in tensors[0].items():
        if tensor.dim() > 2:
            distinct.setdefault(f"{name}.numel()", [t[name].numel() for t in tensors])
    return distinct, conditions


def _number_columns(observations: Sequence[Observation]) -> dict[str, list[int]]:
    """Return integer arguments and the elements of integer lists, as columns."""
    columns: dict[str, list[int]] = {}
    for name in observations[0].facts.values:
        values = [o.facts.values.get(name) for o in observations]
        if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            columns[name] = values  # type: ignore[assignment]
            if any(v < 0 for v in values):  # type: ignore[operator]
                columns[f"abs({name})"] = [abs(v) for v in values]  # type: ignore[arg-type]
        elif all(isinstance(v, tuple) and v and all(isinstance(e, int) for e in v) for v in values):
            length = len(values[0])  # type: ignore[arg-type]
            if all(len(v) == length for v in values):  # type: ignore[arg-type]
                for index in range(length):
                    columns[f"{name}[{index}]"] = [v[index] for v in values]  # type: ignore[index]
    return columns


def _expressions(variables: dict[str, list[int]], target: list[int]) -> Iterator[tuple[str, list[int]]]:
    yield str(target[0]), [target[0]] * len(target)
    yield from variables.items()
    for (a, u), (b, v) in itertools.combinations(variables.items(), 2):
        yield (
            f"max({a}, {b}) if {a} != 1 and {b} != 1 else {a} * {b}",
            [(x * y if 1 in (x, y) else max(x, y)) for x, y in zip(u, v, strict=True)],
        )
        yield f"{a} + {b}", [x + y for x, y in zip(u, v, strict=True)]
        yield f"{a} * {b}", [x * y for x, y in zip(u, v, strict=True)]
        yield f"min({a}, {b})", [min(x, y) for x, y in zip(u, v, strict=True)]
        yield f"max({a}, {b})", [max(x, y) for x, y in zip(u, v, strict=True)]
    for a, u in variables.items():
        shift = target[0] - u[0]
        yield f"{a} + {shift}" if shift >= 0 else f"{a} - {-shift}", [x + shift for x in u]
        for floor in (0, 1):
            yield f"max({a} + {shift}, {floor})", [max(x + shift, floor) for x in u]
        for factor in (2, 3, 4, 5, 6, 8):
            rest = target[0] - factor * u[0]
            yield f"{factor} * {a} + {rest}", [factor * x + rest for x in u]
        for step in (2, 3, 4, 5):
            for offset in range(-12, 13):
                yield f"({a} + {offset}) // {step}", [(x + offset) // step for x in u]
        yield f"{a} * ({a} - 1) // 2", [x * (x - 1) // 2 for x in u]
        yield f"{a} * ({a} + 1) // 2", [x * (x + 1) // 2 for x in u]
        yield f"{a} * {a}", [x * x for x in u]
        for count in (2, 3, 4, 5):
            for repeat in (0, count - 1):
                name = f"math.comb({a} + {repeat}, {count})" if repeat else f"math.comb({a}, {count})"
                yield name, [math.comb(max(x + repeat, 0), count) for x in u]
    for (a, u), (b, v) in itertools.permutations(variables.items(), 2):
        for step in (2, 3, 4):
            yield f"{a} * {b} // {step}", [x * y // step for x, y in zip(u, v, strict=True)]
        yield f"{a} // {b}", [x // y if y else -1 for x, y in zip(u, v, strict=True)]
        yield f"-(-{a} // {b})", [-(-x // y) if y else -1 for x, y in zip(u, v, strict=True)]
        for offset in range(-4, 5):
            if offset:
                yield f"min({a}, {b} + {offset})", [min(x, y + offset) for x, y in zip(u, v, strict=True)]
                yield (
                    f"max(min({a}, {b} + {offset}), 0)",
                    [max(min(x, y + offset), 0) for x, y in zip(u, v, strict=True)],
                )
        shift = target[0] - u[0] - v[0]
        yield f"{a} + {b} + {shift}", [x + y + shift for x, y in zip(u, v, strict=True)]
        shift = target[0] - u[0] + v[0]
        yield f"{a} - {b} + {shift}", [x - y + shift for x, y in zip(u, v, strict=True)]
    for (a, u), (b, v) in itertools.permutations(variables.items(), 2):
        for dilation, step in itertools.product((1, 2, 3), (1, 2, 3)):
            for offset in range(-8, 9):
                column = [(x - dilation * y + offset) // step for x, y in zip(u, v, strict=True)]
                if column[0] == target[0]:
                    yield f"({a} - {dilation} * {b} + {offset}) // {step}", column
    for (a, u), (b, v), (c, w) in itertools.combinations(variables.items(), 3):
        yield f"{a} * {b} * {c}", [x * y * z for x, y, z in zip(u, v, w, strict=True)]


def solve_sizes(observations: Sequence[Observation], output: int) -> list[str]:
    """Return expressions for the whole shape, simplest first; empty if a size cannot be solved for.

    There are several if the observations do not distinguish them.
    """
    shapes = [o.outputs[output].shape for o in observations if o.outputs is not None]
    if len({len(shape) for shape in shapes}) != 1:
        return []
    variables, conditions = _variables(observations)
    guard = " and ".join(conditions)
    per_dimension: list[list[str]] = []
    for index in range(len(shapes[0])):
        known = [i for i, shape in enumerate(shapes) if shape[index] is not None]
        if not known:
            per_dimension.append(["0"])
            continue
        target = [shapes[i][index] for i in known]
        columns = {name: [column[i] for i in known] for name, column in variables.items()}
        found = []
        for expression, column in _expressions(columns, target):  # type: ignore[arg-type]
            if column == target and expression not in found:
                found.append(expression)
                if len(found) == _MAX_SOLUTIONS:
                    break
        if not found:
            return []
        per_dimension.append(found)
    first = [options[0] for options in per_dimension]
    shapes_found = ["(" + "".join(f"{e}, " for e in first) + ")"]
    for index, options in enumerate(per_dimension):
        for other in options[1:]:
            changed = [*first[:index], other, *first[index + 1 :]]
            shapes_found.append("(" + "".join(f"{e}, " for e in changed) + ")")
    return [f"{shape} if {guard} else None" for shape in shapes_found] if guard else shapes_found

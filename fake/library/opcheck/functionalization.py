"""Check that operators that mutate their arguments survive functionalization."""

from __future__ import annotations

from typing import Any

import torch

from fake.error_text import error_text
from fake.library.opcheck.result import Evidence, Fault
from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors, named_tensors
from fake.library.random_state import seeded_generators
from fake.seam import library as _torch


def check(op: Any, call: Call) -> str:
    """Check that a functionalized mutating operator leaves the same values in its arguments and outputs.

    Raises:
        Fault: functionalization refuses the schema or changes the result.
    """
    if not op._schema.is_mutable:
        return "nothing to do: the operator mutates nothing"
    detached = call.detached()
    eager, graph = detached.copy(), detached.copy()
    expected = attempt(lambda *a, **k: op(*eager.args, **eager.kwargs), Call((), {}))
    if expected.error is not None:
        raise expected.error
    try:
        with seeded_generators(0):
            result = _torch.run_functionalized(op, graph.args, graph.kwargs)
    except Exception as error:
        raise Fault(
            error_text(error),
            fix="mark mutated arguments as Tensor(a!) and return fresh tensors or nothing: an output that aliases an "
            "argument cannot be functionalized",
        ) from error
    named = zip(named_tensors(op._schema, eager), named_tensors(op._schema, graph), strict=True)
    pairs = [(f"argument {n}", a, b) for (n, _, a), (_, _, b) in named]
    outputs = zip(flat_tensors(expected.value), flat_tensors(result), strict=True)
    pairs += [(f"output {i}", a, b) for i, (a, b) in enumerate(outputs)]
    wrong = tuple(
        Evidence(where, str(a), str(b), call.describe())
        for where, a, b in pairs
        if not torch.allclose(a, b, equal_nan=True, **call.tolerances)
    )
    if wrong:
        raise Fault(
            f"after functionalization {wrong[0].where} has other values than in eager",
            evidence=wrong,
            fix="list every argument that the kernel writes to in mutates_args",
        )
    return ""

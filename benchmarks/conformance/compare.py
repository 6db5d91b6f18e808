"""Turn two observations into a verdict."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from benchmarks.conformance._torch import DATA_DEPENDENT, UNSUPPORTED
from benchmarks.conformance.observe import Observation, TensorFacts

__all__ = ["Outcome", "Verdict", "compare", "of_error"]


class Verdict(enum.StrEnum):
    """The verdict on the engine in one case."""

    OK = "ok"
    DATA_DEPENDENT = "data-dependent"
    IMMATERIAL = "stride immaterial"
    MISMATCH = "mismatch"
    UNSUPPORTED = "unsupported"
    ERROR = "error"
    ACCEPTED = "accepted"
    OTHER_TYPE = "other type"


@dataclass(frozen=True)
class Outcome:
    """A verdict and, unless it is ``OK``, what differed or what was raised."""

    verdict: Verdict
    detail: str = ""


def compare(eager: Observation, fake: Observation) -> Outcome:
    """Compare leaf by leaf. Strides that address nothing (size 1, empty tensors) get their own verdict."""
    if len(eager.leaves) != len(fake.leaves):
        return Outcome(Verdict.MISMATCH, f"{len(eager.leaves)} results in eager, {len(fake.leaves)} in fake")
    material: list[str] = []
    immaterial: list[str] = []
    for place, (e, f) in enumerate(zip(eager.leaves, fake.leaves, strict=True)):
        if not isinstance(e, TensorFacts) or not isinstance(f, TensorFacts):
            if e != f:
                material.append(f"result {place}: {_short(e)} in eager, {_short(f)} in fake")
            continue
        if None in f.shape and e.dtype == f.dtype and len(e.shape) == len(f.shape):
            return Outcome(Verdict.DATA_DEPENDENT, "unbacked symbolic size")
        for field in dataclasses.fields(TensorFacts):
            expected, actual = getattr(e, field.name), getattr(f, field.name)
            if expected == actual:
                continue
            said = f"result {place}: {field.name} {expected} in eager, {actual} in fake"
            if field.name == "stride" and _immaterial(e, f):
                immaterial.append(said)
            else:
                material.append(f"{said}; shape {e.shape}")
    if material:
        return Outcome(Verdict.MISMATCH, "; ".join(material))
    if immaterial:
        return Outcome(Verdict.IMMATERIAL, "; ".join(immaterial))
    return Outcome(Verdict.OK)


def of_error(error: BaseException) -> Outcome:
    """Return the outcome for an exception of the fake run, if eager succeeded."""
    detail = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if isinstance(error, DATA_DEPENDENT):
        return Outcome(Verdict.DATA_DEPENDENT, detail)
    if isinstance(error, UNSUPPORTED):
        return Outcome(Verdict.UNSUPPORTED, detail)
    return Outcome(Verdict.ERROR, detail)


def _immaterial(e: TensorFacts, f: TensorFacts) -> bool:
    if e.shape != f.shape or e.stride is None or f.stride is None:
        return False
    if 0 in e.shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(e.shape, e.stride, f.stride, strict=True))


def _short(leaf: TensorFacts | str) -> str:
    return leaf if isinstance(leaf, str) else f"a tensor {leaf.shape}"

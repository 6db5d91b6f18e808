"""Whether the steps of two contestants agree, as closely as float32 allows.

The tolerance is not chosen by hand. A float32 step in eager is itself some distance from the same step in
float64. A compiled float32 step may be at most a few times as far from float64.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpasses.demo.training import Run

FACTOR = 4.0
"""A compiled run may be this many times as far from float64 as eager float32: it sums in another order."""

FLOOR = 1e-6
"""The least tolerance, in nats for losses and relative for gradients: about eight roundings of float32."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of one contestant with eager.

    Attributes:
        loss_difference: largest difference from eager's loss over all steps, in nats.
        gradient_difference: largest difference from eager's gradients, relative to the largest gradient
            of the same parameter.
        loss_error: largest distance of the loss from the float64 step.
        gradient_error: the same for gradients, relative.
        loss_tolerance: the largest ``loss_error`` that is accepted.
        gradient_tolerance: the largest ``gradient_error`` that is accepted.
    """

    loss_difference: float
    gradient_difference: float
    loss_error: float
    gradient_error: float
    loss_tolerance: float
    gradient_tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the errors are within tolerance. False if a loss or gradient is NaN."""
        return self.loss_error <= self.loss_tolerance and self.gradient_error <= self.gradient_tolerance


def judge(run: Run, eager: Run, reference: Run) -> Verdict:
    """Compare a run with eager, by the distance of both from the float64 reference.

    Args:
        run: the compiled float32 run.
        eager: the same steps in float32, in eager.
        reference: the same steps in float64.

    Returns:
        The differences, errors and tolerances of losses and gradients. Those of gradients are relative.
    """
    return Verdict(
        loss_difference=loss_distance(run, eager),
        gradient_difference=gradient_distance(run, eager),
        loss_error=loss_distance(run, reference),
        gradient_error=gradient_distance(run, reference),
        loss_tolerance=FACTOR * loss_distance(eager, reference) + FLOOR,
        gradient_tolerance=FACTOR * gradient_distance(eager, reference) + FLOOR,
    )


def loss_distance(a: Run, b: Run) -> float:
    """Return the largest difference of losses over all steps, in nats; infinite if one is NaN."""
    return _largest(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def gradient_distance(a: Run, b: Run) -> float:
    """Return the largest gradient difference of all steps, relative to the parameter's largest gradient."""
    return _largest(step_gradient_distance(a, b, step) for step in range(len(b.gradients)))


def step_gradient_distance(a: Run, b: Run, step: int) -> float:
    """Compare the gradients of one step.

    Args:
        a: a run.
        b: the run that it is compared with.
        step: index of the step.

    Returns:
        The largest difference of an element, relative to the largest element of its gradient in ``b``.
    """
    ours, theirs = a.gradients[step], b.gradients[step]
    return _largest(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)


def _largest(values) -> float:  # type: ignore[no-untyped-def]
    worst = 0.0
    for value in values:
        if not value <= worst:  # also true for NaN
            worst = value if value == value else float("inf")
    return worst

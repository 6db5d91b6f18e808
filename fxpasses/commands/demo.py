"""Train a small GPT on the standard library's source code, with the same steps in eager, fxpasses and
Inductor. Compare losses, gradients and times. Exits with 1 if fxpasses disagrees with eager."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpasses.commands.outcome import Outcome, UsageError, positive, show_progress

HELP = "train a small GPT in eager, fxpasses and Inductor, and compare"
_SIZES = (
    ("steps", positive, 50, "number of training steps"),
    ("layers", positive, 6, "number of blocks in the model"),
    ("width", positive, 128, "width of the model"),
    ("heads", positive, 4, "number of attention heads"),
    ("context", positive, 128, "length of the longest sequence"),
    ("seed", int, 0, "seed for weights and batches"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes of the model and of the training."""
    for name, kind, default, text in _SIZES:
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to train on (default cuda if available, else cpu)"
    )
    parser.add_argument(
        "--report", metavar="DIR", help="write what was compiled to this directory, for 'fxpasses report'"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Train; the tables are printed at the end."""
    if arguments.width % arguments.heads:
        raise UsageError(f"--width {arguments.width} must be a multiple of --heads {arguments.heads}")
    if arguments.report is not None and Path(arguments.report).is_file():
        raise UsageError(f"--report {arguments.report!r} is a file, not a directory")
    with show_progress("importing torch"):
        import torch

        from fxpasses.demo.show import run_demo, show_demo
        from fxpasses.demo.training import DemoSettings
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device")
    sizes = {name: getattr(arguments, name) for name, *_ in _SIZES}
    done = run_demo(DemoSettings(**sizes, report=arguments.report, device=device))
    return Outcome(0 if done.verdict.agrees else 1, done.summary(), lambda: show_demo(done))

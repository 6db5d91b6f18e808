"""Gain of tuning: step times of tuned models over Inductor's best mode and over plain Inductor, in turns.

Modes: plain, the C++ wrapper, autotuning, and for inference ``freezing`` (which does not notice changed
weights), with and without autotuning. Each program has its own copy of the model, and all take turns. The
mode with the lowest median is the best. The models are those of transformers with random weights. Each line
has the median ratio of processor time with its 95% interval, the seconds of tuning, what tuning kept, and the
seconds of tuning a second time. ``--record FILE`` adds each model's ledger to a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxpasses
from benchmarks._timing import turns
from benchmarks._transformers import Built, build
from fxpasses.tuning.intervals import Interval, median_interval

_ROUNDS = 48

_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_TEXT: dict[str, Any] = {**_WIDE, "vocab_size": 4000}
_IMAGE: dict[str, Any] = {**_WIDE, "image_size": 112}

MODELS: dict[str, Callable[[bool], Built]] = {
    "bert": lambda training: build("bert", "eager", 2, 128, training, **_TEXT),
    "gpt2": lambda training: build(
        "gpt2", "sdpa", 2, 128, training, n_embd=256, n_head=4, n_positions=256, vocab_size=4000
    ),
    "llama": lambda training: build("llama", "sdpa", 2, 128, training, **_TEXT, num_key_value_heads=2),
    "gpt_neox": lambda training: build("gpt_neox", "eager", 2, 128, training, **_TEXT),
    "t5": lambda training: build("t5", "sdpa", 2, 64, training, d_model=256, d_ff=1024, d_kv=64, vocab_size=4000),
    "vit": lambda training: _with_images(build("vit", "sdpa", 2, 0, training, **_IMAGE), 112),
    "resnet": lambda training: _with_images(
        build("resnet", batch=2, training=training, embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2]), 64
    ),
    "mobilenet_v2": lambda training: _with_images(build("mobilenet_v2", batch=2, training=training, image_size=112), 112),
    "convnext": lambda training: _with_images(
        build("convnext", batch=2, training=training, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1]), 64
    ),
    "poolformer": lambda training: _with_images(
        build("poolformer", batch=2, training=training, hidden_sizes=[32, 64, 128, 128], depths=[1, 1, 1, 1]), 64
    ),
    "dinov2": lambda training: _with_images(build("dinov2", "sdpa", 2, 0, training, **_IMAGE), 112),
    "qwen2": lambda training: build("qwen2", "sdpa", 2, 128, training, **_TEXT, num_key_value_heads=2),
    "gemma": lambda training: build("gemma", "sdpa", 2, 128, training, **_TEXT, num_key_value_heads=2, head_dim=64),
    "opt": lambda training: build("opt", "sdpa", 2, 128, training, **_TEXT, ffn_dim=1024, word_embed_proj_dim=256),
    "roberta": lambda training: build("roberta", "sdpa", 2, 128, training, **_TEXT),
    "distilbert": lambda training: build(
        "distilbert", "sdpa", 2, 128, training, dim=256, hidden_dim=1024, n_heads=4, vocab_size=4000, max_position_embeddings=256
    ),
    "bart": lambda training: build(
        "bart", "sdpa", 2, 64, training, d_model=256, encoder_ffn_dim=1024, decoder_ffn_dim=1024, vocab_size=4000
    ),
    "clip_text": lambda training: build("clip_text", "sdpa", 2, 64, training, **_TEXT),
    "mixtral": lambda training: build(
        "mixtral", "sdpa", 2, 64, training, **_TEXT, num_key_value_heads=2, num_local_experts=4
    ),
}  # fmt: skip


def _with_images(built: Built, size: int) -> Built:
    return Built(built.model, (torch.randn(2, 3, size, size),))


def step(
    compiled: Callable[..., Tensor], model: nn.Module, inputs: tuple[Any, ...], training: bool
) -> Callable[[], None]:
    """Return a training step or an inference call of a model."""
    parameters = list(model.parameters())

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        compiled(*inputs).float().pow(2).mean().backward()

    def infer() -> None:
        with torch.no_grad():
            compiled(*inputs)

    return train if training else infer


def modes(training: bool, autotune: bool) -> dict[str, dict[str, Any]]:
    """Return Inductor's modes besides the plain one, with their options."""
    found: dict[str, dict[str, Any]] = {"cpp_wrapper": {"cpp_wrapper": True}}
    if not training:
        found["freezing"] = {"freezing": True}
    if autotune:
        tuning = {"max_autotune": True}
        found["autotune"] = tuning if training else {**found["freezing"], **tuning}
    return found


def _program(
    built: Built, training: bool, backend: str = "inductor", options: dict[str, Any] | None = None
) -> Callable[[], None] | None:
    """Return a step of a compiled copy of the model; ``None`` if it does not compile.

    Args:
        built: the model.
        training: whether to measure a training step.
        backend: the compiler backend.
        options: a mode of Inductor.
    """
    model = copy.deepcopy(built.model)  # programs change their model: freezing, or guards
    # Dynamo confuses these functions with each other unless their options differ; it also guards on freezing.
    run = step(
        torch.compile(lambda *inputs: model(*inputs), backend=backend, options=options),
        model,
        built.inputs,
        training,
    )
    try:
        with torch._inductor.config.patch(options or {}):
            run()
    except Exception as error:  # noqa: BLE001  (whatever is wrong with it, it is not the best)
        print(f"{backend} with {options}: {type(error).__name__}")
        return None
    return run


def measure(
    name: str, training: bool, seconds: float, goal: Any, allow: list[str], autotune: bool = True
) -> dict[str, Any]:
    """Tune one model, and compare it with Inductor and with the default passes.

    Args:
        name: one of :data:`MODELS`.
        training: whether to measure a training step.
        seconds: the time for tuning.
        goal: the goal of tuning.
        allow: passes whose results may differ from eager's.
        autotune: whether Inductor's modes include autotuning.
    """
    torch.manual_seed(0)
    built = MODELS[name](training)
    model, inputs = built.model, built.inputs
    with tempfile.TemporaryDirectory() as cache, torch.set_grad_enabled(training):
        how = {
            "seconds": seconds,
            "goal": goal,
            "allow": allow,
            "clock": time.process_time,
            "cache": cache,
            "show": False,
        }
        start = time.process_time()
        tuned = fxpasses.tune(model, inputs, **how)
        took = time.process_time() - start
        start = time.process_time()
        again = fxpasses.tune(model, inputs, **how)
        second = time.process_time() - start
        programs = {
            "plain": _program(built, training),
            "default": _program(built, training, "fxpasses"),
            "tuned": step(tuned, model, inputs, training),
        }
        others = modes(training, autotune)
        programs |= {label: _program(built, training, options=options) for label, options in others.items()}
        seconds_of = turns({label: run for label, run in programs.items() if run}, _ROUNDS, time.process_time)
    best = min(
        (label for label in seconds_of if label not in ("default", "tuned")),
        key=lambda label: statistics.median(seconds_of[label]),
    )
    found = {
        label: _ratio(seconds_of[old], seconds_of[new])
        for label, old, new in (
            ("tuned", "plain", "tuned"),
            ("default", "plain", "default"),
            ("over_best", best, "tuned"),
        )
    }
    return {
        "model": name, "training": training, "tuned": found["tuned"], "default": found["default"], "over_best": found["over_best"], "best": best, "cpu_seconds": took,
        "second_cpu_seconds": second, "again": again.reused, "kept": list(tuned.steps), "left": [s for k in tuned.graphs for s in k.left],
        "ledger": [entry.to_data() for entry in tuned.ledger],
    }  # fmt: skip


def _ratio(old: list[float], new: list[float]) -> Interval:
    return median_interval([b / a for a, b in zip(old, new, strict=True)], risk=0.05)


def _mean(found: list[dict[str, Any]], label: str) -> float:
    return math.exp(sum(math.log(one[label].middle) for one in found) / len(found))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tuned", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="for tuning, each model")
    parser.add_argument("--goal", default="time", choices=("time", "memory", "both"))
    parser.add_argument(
        "--allow", action="append", default=[], help="a pass whose results need not be eager's"
    )
    parser.add_argument("--no-autotune", action="store_true", help="leave out Inductor's autotuning")
    parser.add_argument("--only", choices=("training", "inference"))
    parser.add_argument("--record", type=Path, help="a JSON file for figures and ledgers")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.models if name not in MODELS]
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(MODELS)}")
    console = Console(width=160)
    table = Table(title="Processor time of a step over plain Inductor's", title_justify="left", box=None)
    for heading in (
        "model",
        "tuned over the best mode",
        "which",
        "tuned",
        "default passes",
        "tuning took",
        "again",
        "kept",
        "no time for",
    ):
        table.add_column(heading)
    found = []
    for name in arguments.models or MODELS:
        for training in (True, False):
            if arguments.only == ("inference" if training else "training"):
                continue
            torch._dynamo.reset()
            one = measure(
                name, training, arguments.seconds, arguments.goal, arguments.allow, not arguments.no_autotune
            )
            found.append(one)
            row = (
                f"{name}, {'training' if training else 'inference'}", str(one["over_best"]), one["best"], str(one["tuned"]), str(one["default"]),
                f"{one['cpu_seconds']:.0f} s", f"{one['second_cpu_seconds']:.1f} s", ", ".join(one["kept"]) or "default",
                ", ".join(one["left"]),
            )  # fmt: skip
            console.print(*row, sep="  ", highlight=False)
            table.add_row(*row)
            if arguments.record is not None:
                arguments.record.write_text(json.dumps(found, default=_data, indent=1))
    console.print(table)
    for training in (True, False):
        of_kind = [one for one in found if one["training"] == training]
        if of_kind:
            told = ", ".join(
                f"{label} {_mean(of_kind, key):.3f}"
                for label, key in (
                    ("over the best mode", "over_best"),
                    ("tuned", "tuned"),
                    ("default", "default"),
                )
            )
            kind = "training" if training else "inference"
            console.print(f"geometric mean of {len(of_kind)} models, {kind}: {told}", highlight=False)
    return 0


def _data(value: Any) -> Any:
    assert isinstance(value, Interval)
    return [value.low, value.middle, value.high]

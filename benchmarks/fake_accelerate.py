"""``torch.compile`` of a GPT, forward and backward, with and without ``fake.accelerate()``."""

from __future__ import annotations

import contextlib
import time

import torch

import fake
from benchmarks._fake_support import GPT, interleave, parser, report, tokens


def compile_once(layers: int, backend: str, dynamic: bool, accelerated: bool) -> float:
    """Return the processor seconds to compile a new model, including its first forward and backward."""
    torch._dynamo.reset()
    model = GPT(layers)
    ids, targets = tokens(), tokens()
    if dynamic:
        for tensor in (ids, targets):
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
    start = time.process_time()
    with fake.accelerate() if accelerated else contextlib.nullcontext():
        torch.compile(model, backend=backend, dynamic=dynamic)(ids, targets).backward()
    return time.process_time() - start


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    made = parser(__doc__, layers=12, rounds=3)
    made.add_argument("--backend", default="aot_eager")
    made.add_argument("--dynamic", action="store_true")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    arguments = (options.layers, options.backend, options.dynamic)

    def cold() -> float:
        fake.accelerate.cache_clear()
        return compile_once(*arguments, True)

    compile_once(1, options.backend, options.dynamic, False)  # pays for imports
    times = interleave(
        options.rounds,
        torchs=lambda: compile_once(*arguments, False),
        cold=cold,
        warm=lambda: compile_once(*arguments, True),
    )
    kind = f"{options.backend}, {'dynamic' if options.dynamic else 'static'}"
    for name in ("cold", "warm"):
        ratio = report(f"{kind}, {name} cache", times["torchs"], times[name], 1.0, "s")
        print(f"    {1 / ratio:.2f} x torch's time")
    return 0

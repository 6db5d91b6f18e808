"""A fresh process builds a GPT and runs a step: torch's mode, ours, and ours with a filled disk cache."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from benchmarks._fake_support import interleave, parser, report

_WORK = """
import sys, time, torch
torch.set_num_threads(1)
import fake
from benchmarks._fake_support import GPT, tokens
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
mode_class = TorchFakeTensorMode if sys.argv[1] == "torch" else fake.FakeTensorMode
start = time.perf_counter()
if sys.argv[1] == "disk":
    fake.enable_disk_cache(sys.argv[3])
with mode_class():
    GPT(int(sys.argv[2]))(tokens(), tokens()).backward()
print(time.perf_counter() - start)
"""


def run(kind: str, layers: int, directory: str) -> float:
    """Return the seconds that one process took, without imports."""
    command = [sys.executable, "-c", _WORK, kind, str(layers), directory]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = parser(__doc__, layers=12, rounds=5).parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        run("disk", options.layers, directory)
        times = interleave(
            options.rounds,
            torchs=lambda: run("torch", options.layers, directory),
            ours=lambda: run("fake", options.layers, directory),
            disk=lambda: run("disk", options.layers, directory),
        )
    report("cold process, no disk cache", times["torchs"], times["ours"])
    ratio = report("cold process, disk cache", times["torchs"], times["disk"])
    print(f"with the disk cache: {1 / ratio:.2f} x torch's time")
    return 0

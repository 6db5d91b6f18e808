"""Start of a second process with a plan, with Inductor's warm caches, and with torch's AOT compilation.

Reports the CPU time of the first training step minus a later one (the first time, with empty caches, and that of the
C++ compilers is part of it), and the time from ``import torch`` to the first gradient."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_WORK = """
import json, os, resource, sys
def now():  # seconds of CPU, those of the C++ compilers included
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
import torch
imported = now()
import torch.nn as nn, torch.nn.functional as F
kind, layers, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Block(nn.Module):
    def __init__(self, width=96, heads=4):
        super().__init__()
        self.heads, self.before, self.after = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.silu(self.up(self.after(x))))

class GPT(nn.Module):
    def __init__(self, layers, width=96, words=256):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(words, width), nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

torch.manual_seed(0)
model, tokens = GPT(layers), torch.randint(0, 256, (2, 48))
if kind == "plan":
    import fxpasses
    call = fxpasses.compile(model, cache=directory + "/plans")
elif kind == "aot_compile":
    import torch._dynamo, torch._inductor.compile_fx
else:
    import torch._dynamo, torch._inductor.compile_fx, fxpasses.backend
    call = torch.compile(model, backend=kind)
ready = now()
if kind == "aot_compile":
    file = directory + "/aot_compile"
    if os.path.exists(file):
        with open(file, "rb") as opened:
            function = torch.compiler.load_compiled_function(opened)
    else:
        function = torch.compile(GPT.forward, fullgraph=True).aot_compile(((model, tokens), {}))
        function.save_compiled_function(file)
    call = lambda tokens: function(model, tokens)
call(tokens).backward()
first = now() - ready
since = now() - imported
got = [p.grad.clone() for p in model.parameters()]
later = []
for _ in range(7):
    model.zero_grad()
    start = now()
    call(tokens).backward()
    later.append(now() - start)
model.zero_grad()
model(tokens).backward()
for a, p in zip(got, model.parameters()):
    torch.testing.assert_close(a, p.grad, atol=1e-4, rtol=1e-3)
print(json.dumps([first - sorted(later)[3], since, "torch._dynamo" in sys.modules]))
"""

_KINDS = ("plan", "fxpasses", "inductor", "aot_compile")


def run(kind: str, layers: int, directory: str) -> tuple[float, float, bool]:
    """Run one process. Return the seconds of the first step minus a later one, the seconds since
    ``import torch``, and whether Dynamo was imported.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{directory}/{kind}",
        "FXPASSES_CACHE_DIR": f"{directory}/beside",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    program = Path(directory, "work.py")  # code that is not in a file gets no plan
    program.write_text(_WORK)
    command = [sys.executable, str(program), kind, str(layers), directory]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stderr[-2000:]}")
    first, since, dynamo = json.loads(done.stdout.splitlines()[-1])
    return first, since, dynamo


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o700)
        for kind in options.kinds:
            cold, _, _ = run(kind, options.layers, directory)
            print(f"{kind:12} {options.layers} layers, cold: {cold:.2f} s")
        times = {
            kind: [run(kind, options.layers, directory) for kind in [kind] * options.rounds]
            for kind in options.kinds
        }
    for kind, runs in times.items():
        first, since = (statistics.median(run[i] for run in runs) for i in (0, 1))
        print(f"{kind:12} warm: first step less a later one {1e3 * first:.0f} ms, from import torch to the first gradient "
              f"{1e3 * since:.0f} ms{', without Dynamo' if not runs[0][2] else ''}")  # fmt: skip
    return 0

"""A job of two processes whose ranks differ, in another way for each case.

Each process prints the outcome of each case as JSON.
"""

import copy
import json
import os
import re
import runpy
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_reduce,
    all_to_all_single,
)
from torch.distributed.device_mesh import init_device_mesh

import compiled_autograd
from fxpasses.distributed import gate, shard
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.schedule import ScheduleCollectives
from fxpasses.errors import RankMismatchError

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.group.WORLD
gate.ASK_AFTER, gate.STUCK_AFTER = 0.2, 0.4


def compiled(function, dynamic=None, **options):
    torch._dynamo.reset()
    return torch.compile(
        function, dynamic=dynamic, backend="fxpasses", options={"compiler": "eager", **options}
    )


def sums(*values):
    return [all_reduce(value * 2, "sum", WORLD) + 1 for value in values]


def doubled(value):
    return all_reduce(value * 2, "sum", WORLD)


def same():
    return [value.tolist() for value in compiled(sums)(*(torch.full((2,), 1.0 + RANK) for _ in range(2)))]


def script_of_the_tutorial():
    text = (Path(__file__).parents[3] / "docs" / "pages" / "tutorials" / "many-processes.md").read_text()
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "train.py"
        script.write_text(re.search(r"```python title=\"train.py\"\n(.*?)```", text, re.DOTALL)[1])
        os.environ["REPORTS"] = directory
        train = runpy.run_path(str(script))["train"]
        losses = [torch.tensor(train(way)) for way in ("eager", "compiled")]
        report = json.loads((Path(directory) / f"rank_{RANK}" / "graph_0" / "graph.json").read_text())
    verdicts = {run["verdict"] for run in report["passes"] if run["name"] == "bucket_collectives"}
    return [torch.allclose(*losses, rtol=1e-4), sorted(verdicts)]


def other_passes():
    passes = ["default", "bucket_collectives"] if RANK == 0 else ["default"]
    return compiled(sums, passes=passes)(torch.ones(4), torch.ones(4))


def swapped():
    def swapped_sums(a, b):
        if RANK == 1:
            second = all_reduce(b * 3, "sum", WORLD)
            return all_reduce(a * 2, "sum", WORLD), second
        first = all_reduce(a * 2, "sum", WORLD)
        return first, all_reduce(b * 3, "sum", WORLD)

    return compiled(swapped_sums)(torch.ones(4), torch.ones(4))


def swapped_of_one_input():
    def step(x):
        calls = {0: torch.sin, 1: torch.cos}
        sums = {i: all_reduce(calls[i](x), "sum", WORLD) for i in (RANK, 1 - RANK)}
        return sums[0] - 2 * sums[1]

    return compiled(step)(torch.ones(2))


def swapped_in_place():
    def step(x, a, b):
        for i in (RANK, 1 - RANK):
            (a, b)[i].copy_(all_reduce((x.sin(), x.cos())[i], "sum", WORLD))

    return compiled(step)(torch.ones(2), torch.zeros(2), torch.zeros(2))


class Norm(nn.Module):
    def forward(self, value):
        return all_reduce(value.detach(), "sum", WORLD) - value


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), Norm()

    def forward(self, x):
        values = {i: self.norm(self.linear[i](x)) for i in (RANK, 1 - RANK)}
        return x + values[0] * values[1].tanh()


def swapped_in_inner_regions():
    model = nn.Sequential(*(Layer() for _ in range(3)))
    with torch.no_grad():
        return compiled(model, regions="always")(torch.ones(2, 4))


def uneven_shards_agreed():
    """Three rows over two ranks: the padding of the full shard is not in its graph."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    expected = copy.deepcopy(model)
    value = torch.full((2, 4), 1.0 + RANK)
    run = compiled(shard(model, init_device_mesh("cpu", (2,))), ranks="agree", compiler="inductor")
    run(value).square().sum().backward()
    expected(value).square().sum().backward()
    same = []
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        dist.all_reduce(other.grad, dist.ReduceOp.SUM)
        same.append(torch.allclose(parameter.grad.full_tensor(), other.grad / 2))
    return all(same)


class Swap(CustomGraphPass):
    """Moves the second sum before the first, as a schedule that was measured on one rank may do."""

    def __call__(self, graph: fx.Graph) -> None:
        first, second = (node for node in graph.nodes if "all_reduce" in str(node.target))
        first.args[0].prev.append(second.args[0])
        second.args[0].append(second)

    def uuid(self):
        return None


def swapped_by_inductor():
    with inductor_config.patch(post_grad_custom_post_pass=Swap() if RANK == 1 else None):
        return compiled(sums, compiler="inductor")(torch.ones(4), torch.ones(4))


def break_on_one_rank():
    def step(x):
        y = x + 1
        if RANK == 1:
            torch._dynamo.graph_break()
        return all_reduce(y, "sum", WORLD) * 2

    return compiled(step)(torch.ones(2)).tolist()


def recompiled_on_one_rank():
    run = compiled(lambda x: all_reduce(x.sum(), "sum", WORLD))
    return [run(torch.ones(size if RANK else 3)).item() for size in (3, 4, 5)]


def other_sizes():
    return compiled(doubled)(torch.ones(4 + RANK))


def compiled_for_each_size_on_one_rank():
    run = compiled(lambda x: doubled(x).mean() * x.shape[0] / 4, dynamic=bool(RANK))
    return [run(torch.ones(size)).item() for size in (4, 6, 5, 4)]


def _sizes(*sizes):
    run = compiled(lambda x: all_reduce(x * 2, "sum", WORLD), dynamic=True)
    for size in sizes:
        run(torch.ones(size))


def size_of_the_first_call():
    _sizes(4 + RANK)


def size_of_one_call():
    _sizes(4, 6 + RANK)


def size_seen_before():
    """Each size was compared before; not that it comes now."""
    _sizes(4, 6, 4, 4 + 2 * RANK)


def uneven_splits():
    """Each rank sends and gets its own numbers of values."""
    splits = [[1, 1], [3, 2]]

    def exchange(x):
        return all_to_all_single(x, [splits[r][RANK] for r in (0, 1)], splits[RANK], WORLD)

    return compiled(exchange)(torch.full((sum(splits[RANK]),), float(RANK))).tolist()


def other_groups():
    """Pipeline stages: what is compiled for groups of their own need not be the same."""
    groups = [dist.new_group([0]), dist.new_group([1])]

    def own(x):
        return all_reduce(x.exp() if RANK else x, "sum", groups[RANK])

    return round(compiled(own)(torch.ones(2)).sum().item(), 3)


def crossed_groups():
    """Each rank waits for the other in another group of the same ranks."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    return compiled(lambda x: all_reduce(x * 2, "sum", groups[RANK]))(torch.ones(2))


def groups_in_another_order():
    """One graph speaks in two groups of the same ranks; on the other rank, in the second one first."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def step(x):
        return all_reduce(x, "sum", groups[RANK]) + all_reduce(x * 2, "sum", groups[1 - RANK])

    return compiled(step)(torch.ones(2))


def sharded_otherwise():
    """Another number of layers, or another plan: parameters would be scattered that do not come on the other rank."""
    found = []
    for layers, plan in ((2 + RANK, {}), (2, {"0.weight": RANK})):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        try:
            shard(model, init_device_mesh("cpu", (2,)), plan)
        except RankMismatchError as error:
            found.append(str(error))
    return found


def called_in_another_order():
    first, second = compiled(doubled), compiled(lambda value: all_reduce(value * 3, "sum", WORLD))
    value = torch.ones(3)
    for _ in range(3):
        first(value), second(value)
    return [f(value).tolist() for f in ((first, second) if RANK == 0 else (second, first))]


def _one_or_the_other(first, second, wait=0.0):
    """Both ranks know both graphs of one function; then each calls another one."""

    def step(a, b, flag):
        return first(a) if flag else second(b)

    run, a, b = compiled(step), torch.full((4,), 1.0 + RANK), torch.full((4,), 10.0)
    told = [run(a, b, True).tolist(), run(a, b, False).tolist()]
    time.sleep(wait * RANK)
    return [*told, run(a, b, True).tolist(), run(a, b, RANK == 0).tolist()]


def branches_in_another_order():
    return _one_or_the_other(doubled, doubled)


def branches_in_another_order_after_one_was_late():
    return _one_or_the_other(doubled, doubled, wait=1.0)


def reductions_in_another_order():
    return _one_or_the_other(doubled, lambda b: all_reduce(b, "max", WORLD))


def known_sizes_in_another_order():
    run = compiled(doubled, dynamic=False)
    for size in (4, 6, 4, 6):
        run(torch.ones(size))
    return run(torch.ones(4 + 2 * RANK))


def nothing_to_add():
    """A rank without data adds zeros."""
    return _one_or_the_other(doubled, lambda b: all_reduce(torch.zeros(4), "sum", WORLD))


def more_results_now_and_then():
    """Ranks that log return more than others, each when it wants to."""

    def step(x, logs):
        y = doubled(x)
        return (y, y.mean()) if logs else (y, None)

    run = compiled(step)
    return [run(torch.ones(2), i == RANK)[0].tolist() for i in (0, 1, 0, 1, 2)][-1]


def swapped_where_one_result_has_both():
    def step(x):
        sums = [all_reduce(x * (1 + (i != RANK)), "sum", WORLD) for i in (0, 1)]
        first, second = sums if RANK == 0 else sums[::-1]
        return first, first + second

    return compiled(step)(torch.ones(2))


def captured_backward_pass():
    """Recording it sends nothing, and so one rank may record it again alone."""
    model = shard(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    run = compiled(model, compiled_autograd=True)
    found = []
    for step in range(3):
        if step == 1 and RANK == 1:
            compiled_autograd.reset()
        model.zero_grad()
        run(torch.full((2, 4), 1.0 + RANK + step)).sum().backward()
        weight, _ = model.parameters()
        found.append(weight.grad.full_tensor().unique().tolist())
    return [*found, torch._C._distributed_c10d._get_work_registry_size()]


def captured_on_one_rank():
    model = shard(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    run = compiled(model, compiled_autograd=RANK == 0)
    run(torch.ones(2, 4)).sum().backward()


def late():
    time.sleep(RANK)
    return compiled(doubled)(torch.ones(1)).item()


def scheduled():
    """Each rank chooses by simulation: one message for both sums."""
    far = Cluster(local=1, latency=1e-2, bandwidth=1e9)
    passes = ["default", ScheduleCollectives(far)]
    return [value.tolist() for value in compiled(sums, passes=passes)(torch.ones(2), torch.ones(2))]


def unchecked():
    return compiled(sums, ranks="off")(torch.ones(1))[0].item()


def _recomputed(ranks):
    """Budgets differ, and gathers may be computed again: one rank saves what the other gathers twice."""

    def loss(shard, x):
        for _ in range(3):
            x = (x @ all_gather_tensor_autograd(shard, 0, WORLD)).sin()
        return x.sum()

    shard = torch.full((2, 4), 0.1 * (1 + RANK), requires_grad=True)
    with functorch_config.patch(unsafe_allow_optimization_of_collectives=True):
        run = compiled(loss, memory_budget=float(RANK), ranks=ranks)
        run(shard, torch.ones(3 + RANK, 4)).backward()
    other = shard.detach().clone().requires_grad_()
    loss(other, torch.ones(3 + RANK, 4)).backward()
    return torch.allclose(shard.grad, other.grad)


def other_budgets():
    return _recomputed("check")


def other_budgets_agreed():
    return _recomputed("agree")


def other_graphs_agreed():
    def loss(x):
        return (doubled(x.sin()) * 2 if RANK else doubled(x.cos())).sum()

    return compiled(loss, ranks="agree")(torch.ones(2, requires_grad=True))


def agreed_on_one_rank():
    return compiled(lambda x: doubled(x.sin()).sum(), ranks="agree" if RANK else "check")(
        torch.ones(2, requires_grad=True)
    )


def alone():
    """Only rank 1 compiles again, and what it gets sends more."""

    def step(x):
        return doubled(x) if x.shape[0] <= 4 else doubled(x)[:4] + doubled(x + 1)[:4]

    run = compiled(step)
    run(torch.ones(4))
    return run(torch.ones(6 if RANK else 4))


CASES = (
    same,
    script_of_the_tutorial,
    other_passes,
    swapped,
    swapped_of_one_input,
    swapped_in_place,
    swapped_in_inner_regions,
    swapped_by_inductor,
    break_on_one_rank,
    recompiled_on_one_rank,
    compiled_for_each_size_on_one_rank,
    size_of_the_first_call,
    size_of_one_call,
    size_seen_before,
    uneven_splits,
    other_sizes,
    other_groups,
    crossed_groups,
    groups_in_another_order,
    sharded_otherwise,
    called_in_another_order,
    branches_in_another_order,
    branches_in_another_order_after_one_was_late,
    reductions_in_another_order,
    known_sizes_in_another_order,
    nothing_to_add,
    more_results_now_and_then,
    swapped_where_one_result_has_both,
    captured_backward_pass,
    captured_on_one_rank,
    late,
    scheduled,
    unchecked,
    other_budgets,
    other_budgets_agreed,
    other_graphs_agreed,
    uneven_shards_agreed,
    agreed_on_one_rank,
    alone,  # must be last, because a rank leaves
)

found = {}
for case in CASES:
    try:
        found[case.__name__] = {"result": case()}
    except RankMismatchError as error:
        found[case.__name__] = {
            "error": str(error),
            "ranks": error.ranks,
            "factor": error.factor,
            "values": error.values,
        }
    except RuntimeError as error:  # from gloo: the other rank has left
        found[case.__name__] = {"left": str(error), "notes": error.__notes__}
print(json.dumps(found), flush=True)

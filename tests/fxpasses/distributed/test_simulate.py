"""Times and memory of graphs that are small enough to be worked out by hand; the command on a small model."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpasses
from fxpasses.commands.main import main
from fxpasses.distributed.capture import TRACED_RANKS, capture_rank
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.schedule import Schedule, best, candidates
from fxpasses.distributed.simulate import Group, measure, simulate, with_passes
from fxpasses.errors import SimulationError
from fxpasses.passes import OverlapCollectives
from fxpasses.reports.page import read_report

PLAIN = Cluster(
    local=1, latency=1.0, bandwidth=64.0, algorithm="ring", flops=1e30, memory_bandwidth=1e30, launch=10.0
)
"""A message of 128 bytes between two takes 2 seconds, a call 10."""


@pytest.fixture(scope="module")
def two_gathers():
    """Two gathers of 64 bytes a rank (128 whole, 2 s) and two matmuls, each gather just before its own."""

    def f(x, a, b):
        def gather(shard):
            return collectives.all_gather_tensor(shard, 0, dist.group.WORLD)

        return (x @ gather(a)) @ gather(b)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        name = dist.group.WORLD.group_name
        captured = fxpasses.capture(f, torch.randn(1, 4), torch.randn(2, 4), torch.randn(2, 4))
    finally:
        dist.destroy_process_group()
    return captured, {name: Group(2, name="dp")}


def test_messages_are_waited_for_or_travel_meanwhile(two_gathers):
    captured, groups = two_gathers
    message = PLAIN.seconds("all_gather", 64, 2)
    assert message == 1.0 + 32 / 64
    found = simulate(captured, PLAIN, groups)
    assert (found.seconds, found.compute, found.exposed) == (20 + 2 * message, 20, 2 * message)
    assert found.messages == 2
    assert max(size for _, size in found.memory) == found.peak_bytes
    ahead = simulate(with_passes(captured, [OverlapCollectives()]), PLAIN, groups)
    assert (ahead.seconds, ahead.exposed, ahead.network) == (20 + message, message, 2 * message)
    spans = [event for event in ahead.trace()["traceEvents"] if event["ph"] == "X"]
    assert [(span["ts"], span["dur"]) for span in spans if "gather" in span["name"]] == [
        (0, 1.5e6),
        (1.5e6, 1.5e6),
    ]


def test_memory_is_what_is_alive(two_gathers):
    captured, groups = two_gathers
    found = simulate(captured, PLAIN, groups)
    inputs, row, whole = (4 + 8 + 8) * 4, 4 * 4, 16 * 4
    assert found.input_bytes == inputs
    # The second matmul: its operands and its result. The first gathered tensor is gone.
    assert found.peak_bytes == inputs + row + whole + row
    assert found.peak_at == "mm_1"
    ahead = simulate(with_passes(captured, [OverlapCollectives()]), PLAIN, groups)
    assert ahead.peak_bytes == inputs + 2 * whole + row


def test_measured_times(two_gathers):
    captured, groups = two_gathers
    times = measure(captured, rounds=1)
    assert set(times) == {("forward", "mm"), ("forward", "mm_1")}
    assert all(seconds > 0 for seconds in times.values())
    found = simulate(captured, PLAIN, groups, dict.fromkeys(times, 3.0))
    assert found.compute == 6.0


def test_what_is_not_known_is_named(two_gathers):
    captured, _ = two_gathers
    with pytest.raises(SimulationError, match="all_gather_into_tensor: unknown group"):
        simulate(captured, PLAIN, {})


def test_the_best_schedule_fits_into_memory(two_gathers):
    captured, groups = two_gathers
    tries = candidates(captured, PLAIN, groups)
    assert [str(one.schedule) for one in tries] == ["as captured", "ahead 128 bytes", "bucket 128 bytes"]
    assert best(tries, PLAIN).schedule == Schedule(
        0, 128
    )  # as fast as the bucket, which copies, and takes less
    plain, ahead, _ = (one.found.peak_bytes for one in tries)
    assert best(tries, dataclasses.replace(PLAIN, memory=ahead - 1)).schedule == Schedule()
    assert best(tries, dataclasses.replace(PLAIN, memory=plain - 1)).schedule == Schedule()


def test_truncated_normals_are_not_drawn():
    def make():
        layer = torch.nn.Linear(4, 4)
        torch.nn.init.trunc_normal_(layer.weight)
        return layer, (torch.randn(1, 4),)

    captured, _ = capture_rank(make, {"dp": 2})
    assert captured.backward is not None


def test_models_are_converted_as_they_are_made():
    def make():
        layer = torch.nn.Linear(4, 4)
        return torch.nn.Sequential(layer, layer).bfloat16(), (torch.randn(1, 4, dtype=torch.bfloat16),)

    captured, _ = capture_rank(make, {"dp": 2})
    gathers = [n for n in captured.forward.graph.nodes if "all_gather" in str(n.target)]
    assert [n.meta["val"].dtype for n in gathers] == [torch.bfloat16] * 2, "of one weight and one bias"


def test_saved_values_live_until_the_backward_pass_has_used_them():
    def loss(w, x):
        return ((x @ w).sin() @ w).sum()

    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    captured = fxpasses.capture(loss, w, x)
    found = simulate(captured, PLAIN, {})
    matrix = 64 * 64 * 4
    assert found.input_bytes == 2 * matrix
    # The result of x @ w and its sine are kept, and what backward makes comes on top: never less, never everything.
    assert found.input_bytes + 3 * matrix <= found.peak_bytes <= found.input_bytes + 6 * matrix
    without = dataclasses.replace(captured, backward=None)
    assert simulate(without, PLAIN, {}).seconds < found.seconds


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "seconds"),
    [
        ("all_gather", 1, 1, 0.0),
        ("all_gather", 4, 1, 3 * 1 + 0.75 * 1000 / 100),  # inside one machine
        ("all_gather", 4, 4, 3 * 10 + 0.75 * 1000 / 10),  # one rank in each
        ("all_reduce", 4, 4, 2 * (3 * 10 + 0.75 * 1000 / 10)),
        ("reduce_scatter", 8, 1, 7 * 10 + 7 / 8 * 1000 / 40),  # four rings
    ],
)
def test_rings(kind, ranks, stride, seconds):
    cluster = Cluster(
        local=4, local_latency=1, local_bandwidth=100, latency=10, bandwidth=10, algorithm="ring"
    )
    assert cluster.seconds(kind, 1000, ranks, stride) == pytest.approx(seconds)


def test_two_ranks_reduce_in_one_message():
    cluster = Cluster(local=1, latency=1, bandwidth=100)
    assert cluster.seconds("all_reduce", 1000, 2) == 1 + 1000 / 100
    assert cluster.seconds("all_reduce", 10**9, 64) == dataclasses.replace(cluster, algorithm="tree").seconds(
        "all_reduce", 10**9, 64
    )


def test_the_best_algorithm_depends_on_size_and_ranks():
    small, large = 1 << 10, 1 << 32
    for size in (small, large):
        times = {
            name: Cluster(algorithm=name).seconds("all_gather", size, 16384)
            for name in ("ring", "tree", "hierarchical", "auto")
        }
        assert times["auto"] == min(times.values())
    assert Cluster(algorithm="tree").seconds("all_gather", small, 16384) < Cluster(algorithm="ring").seconds(
        "all_gather", small, 16384
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"latencie": 1}, "did you mean 'latency'"),
        ({"local": 0}, "local: expected a whole number above 0, got 0; the default is 8"),
        ({"local": 2.5}, "local: expected a whole number above 0"),
        ({"bandwidth": "fast"}, "bandwidth: expected a number above 0, got 'fast'"),
        ({"latency": float("nan")}, "latency: expected a number of at least 0"),
        ({"algorithm": "best"}, "not one of auto, ring"),
        ([1], "expected NAME: VALUE lines"),
        (None, "got nothing"),
    ],
)
def test_wrong_clusters(given, message):
    with pytest.raises(SimulationError, match=message):
        Cluster.from_mapping(given)


def test_numbers_as_yaml_reads_them():
    assert Cluster.from_mapping({"bandwidth": "2e8", "local": "4"}) == Cluster(bandwidth=2e8, local=4)


MODEL = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), (torch.randn(4, 64),)
def three(a, b, c):
    return None
def ddp(mesh):
    model, inputs = make()
    return torch.nn.parallel.DistributedDataParallel(model), inputs
def strings(width=4):
    return torch.nn.Linear(2, width), "inputs"
def alone():
    return torch.nn.Linear(2, 2)
def broken():
    class Broken(torch.nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)
    return Broken(2, 2), (torch.randn(1, 2),)
"""


def test_the_command(tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text("local: 4\nlatency: 1.0e-3\n")
    trace = tmp_path / "trace.json"
    arguments = [
        "simulate", "--json", "--model", f"{tmp_path}/model.py:make", "--mesh", "dp=16384", "--ranks", "16384",
        "--network", str(tmp_path / "cluster.yaml"), "--trace", str(trace),
        "--report", str(tmp_path / "report"),
    ]  # fmt: skip
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 16384
    plain, _, bucketed = found["settings"]  # there is no bucket smaller than the model
    assert plain["messages"] == 8  # two weights and two biases, forward and backward
    assert bucketed["messages"] == 2
    assert found["seconds"] == bucketed["seconds"] < plain["seconds"]
    assert found["seconds"] < found["seconds_if"]["twice the latency"]
    assert found["passes"] == [f"bucket_collectives{{max_bytes={bucketed['bucket_bytes']}}}"]
    assert json.loads(trace.read_text())["traceEvents"]
    (graph,), drawn = (read_report(tmp_path / "report")[name] for name in ("graphs", "simulation"))
    assert {"forward", "backward"} <= set(graph["graphs"])
    assert drawn["streams"] == ["compute", "wait", "dp"]
    assert max(size for _, size in drawn["memory"]) > 0
    assert "all_gather" in (tmp_path / "report" / "report.html").read_text()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=4", "--ranks", "8"], "--ranks says 8, and the mesh has 4"),
        (["--mesh", "dp=2", "--network", "none.yaml"], "there is no file 'none.yaml'"),
        (["--mesh", "a=2,b=2,c=2"], "the mesh has 3 dimensions"),
        (
            ["--mesh", "dp=2", "--network", "wrong.yaml"],
            "wrong.yaml: latency: expected a number of at least 0, got -1",
        ),
        (["--mesh", "dp=2", "--report", "model.py/report"], "cannot be made a directory"),
        (["--mesh", "dp=2", "--trace", "none/here.json"], "no directory for 'none/here.json'"),
        (["--mesh", "dp=2", "--trace", "."], "'.' is a directory"),
    ],
)
def test_wrong_command_lines(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "wrong.yaml").write_text("latency: -1")
    assert main(["simulate", "--model", f"{tmp_path}/model.py:make", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_wrong_functions_and_meshes(tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    assert main(["simulate", "--model", f"{tmp_path}/model.py:three", "--mesh", "dp=2"]) == 2
    assert "three wants a, b, c: it is given the mesh" in capsys.readouterr().err
    assert main(["simulate", "--model", f"{tmp_path}/model.py:alone", "--mesh", "dp=2"]) == 2
    assert "alone has to return a pair" in capsys.readouterr().err
    assert main(["simulate", "--model", f"{tmp_path}/model.py:strings", "--mesh", "dp=2"]) == 2
    assert "strings has to return a pair" in capsys.readouterr().err
    assert main(["simulate", "--model", f"{tmp_path}/model.py:ddp", "--mesh", "dp=2"]) == 2
    assert 'return shard(model, mesh, {"*": None})' in capsys.readouterr().err
    assert main(["simulate", "--model", f"{tmp_path}/model.py:broken", "--mesh", "dp=2"]) == 3
    assert "graph_break" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["simulate", "--model", "x:y", "--mesh", "dp"])
    with pytest.raises(SimulationError, match="sizes of at least 1"):
        capture_rank(lambda: (None, ()), {"dp": 0})


def test_groups_of_a_mesh_that_is_larger_than_what_is_traced():
    def make(mesh):
        assert mesh.shape == (TRACED_RANKS, 2)
        return torch.nn.Linear(2, 2), (torch.randn(1, 2),)

    _, groups = capture_rank(make, {"dp": 2048, "tp": 2})
    assert sorted(groups.values(), key=lambda g: g.ranks) == [Group(2, 1, "tp"), Group(2048, 2, "dp")]


def test_a_fully_sharded_model_that_is_tensor_parallel():
    """The mesh of both looks up its ranks in a tensor, which is a fake one unless somebody sees to it."""

    def make(mesh):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"]), (torch.randn(2, 8),)

    captured, groups = capture_rank(make, {"dp": 4, "tp": 2})
    used = {
        groups[node.args[-1]].name
        for graph in (captured.forward, captured.backward)
        for node in graph.graph.nodes
        if node.op == "call_function" and node.args and node.args[-1] in groups
    }
    assert used == {"dp", "tp"}

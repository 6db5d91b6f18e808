"""Simulate a training step on many devices. Captures the graphs of one rank in this process, and simulates
when each call runs. Tries buckets of several sizes, and gathers started several messages ahead. Prints the
time and memory of each setting, what the best takes on other networks and devices, and the options that
compile with it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from fxpasses.commands.named import function_named
from fxpasses.commands.outcome import Outcome, UsageError, console, positive, show_progress

HELP = "simulate a training step on many devices"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the mesh and the cluster."""
    parser.add_argument(
        "--model", required=True,
        help="MODULE:FUNCTION or FILE.py:FUNCTION; the function returns a model and a tuple of one rank's "
        "inputs. A function with a parameter that is named mesh or has no default receives the mesh and "
        "distributes the model itself. For any other function, the parameters are sharded over the mesh",
    )  # fmt: skip
    parser.add_argument(
        "--mesh",
        required=True,
        type=_mesh,
        metavar="NAME=SIZE[,...]",
        help="dimensions of the mesh, innermost last, such as dp=2048,tp=8",
    )
    parser.add_argument(
        "--ranks", type=positive, help="expected number of devices, checked against the size of the mesh"
    )
    parser.add_argument(
        "--network", metavar="FILE", help="YAML file with attributes of fxpasses.distributed.network.Cluster"
    )
    parser.add_argument("--memory-budget", type=float, help="the backend's option memory_budget")
    parser.add_argument(
        "--report",
        metavar="DIRECTORY",
        help="write the graphs, and a page with the timeline of the best setting, to this directory",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the timeline of the best setting to this file, for Perfetto"
    )
    parser.add_argument(
        "--measure", action="store_true", help="time calls on this machine instead of estimating their times"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Capture the graphs and simulate each setting."""
    ranks = math.prod(arguments.mesh.values())
    if arguments.ranks not in (None, ranks):
        raise UsageError(f"--ranks says {arguments.ranks}, and the mesh has {ranks}")
    if arguments.trace and not Path(arguments.trace).parent.is_dir():
        raise UsageError(f"there is no directory for {arguments.trace!r}")
    if arguments.trace and Path(arguments.trace).is_dir():
        raise UsageError(f"{arguments.trace!r} is a directory: name a file for --trace")
    if arguments.report:
        try:
            Path(arguments.report).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{arguments.report!r} cannot be made a directory: {error.strerror}") from error
    make = function_named(arguments.model)
    with show_progress("importing torch") as say:
        from fxpasses.distributed.capture import capture_rank
        from fxpasses.distributed.network import Cluster
        from fxpasses.distributed.schedule import best, candidates
        from fxpasses.distributed.simulate import simulate
        from fxpasses.errors import ShardingError, SimulationError
        from fxpasses.reports.files import GraphFiles

        try:
            cluster = _cluster(arguments.network) if arguments.network else Cluster()
            say("capturing the graphs of one rank")
            observers = [GraphFiles(arguments.report)] if arguments.report else []
            captured, groups = capture_rank(make, arguments.mesh, arguments.memory_budget, observers)
            tries = candidates(captured, cluster, groups, measures=arguments.measure, say=say)
            chosen = best(tries, cluster)
            found = chosen.found
            others = {
                what: simulate(chosen.captured, other, groups, chosen.measured).seconds
                for what, other in _cluster_variants(cluster).items()
            }
        except (SimulationError, ShardingError) as error:
            raise UsageError(str(error)) from error
    if arguments.trace:
        Path(arguments.trace).write_text(json.dumps(found.trace()))
    settings = [
        {"name": str(one.schedule), **dataclasses.asdict(one.schedule), **_figures(one.found)}
        for one in tries
    ]
    data = {"ranks": ranks, "mesh": arguments.mesh, "cluster": dataclasses.asdict(cluster), "settings": settings,
            "best": str(chosen.schedule), "fits": found.peak_bytes <= cluster.memory, "passes": chosen.schedule.specification(),
            "seconds": found.seconds, "seconds_if": others, "peak_at": found.peak_at, "alive_at_peak": dict(found.alive)}  # fmt: skip
    if arguments.report:
        _write_page({**data, **found.timeline()}, Path(arguments.report))
    return Outcome(0, data, lambda: _show(data))


def _write_page(simulation: dict[str, Any], directory: Path) -> None:
    from fxpasses.reports.page import report
    from fxpasses.reports.versions import SIMULATION_FILE

    (directory / SIMULATION_FILE).write_text(json.dumps(simulation))
    report(directory)


def _cluster_variants(cluster: Any) -> dict[str, Any]:
    """Return variants of the cluster: other networks and devices."""
    factors: dict[str, dict[str, float]] = {
        "twice the latency": {"latency": 2, "local_latency": 2},
        "half the bandwidth between machines": {"bandwidth": 0.5},
        "half the bandwidth inside": {"local_bandwidth": 0.5},
        "devices twice as fast": {"flops": 2, "memory_bandwidth": 2},
    }
    return {
        what: dataclasses.replace(
            cluster, **{name: getattr(cluster, name) * factor for name, factor in changed.items()}
        )
        for what, changed in factors.items()
    }


def _figures(found: Any) -> dict[str, Any]:
    names = ("seconds", "compute", "network", "exposed", "messages", "peak_bytes", "input_bytes")
    return {name: getattr(found, name) for name in names}


def _show(data: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"one simulated step on {data['ranks']} devices: times in ms, peak memory in MB"
    table = Table(title=title, box=None, pad_edge=False)
    for column in ("setting", "step", "compute", "network", "waiting", "messages", "memory"):
        table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)
    seen = set()
    for row in data["settings"]:
        milliseconds = [f"{row[name] * 1e3:.2f}" for name in ("seconds", "compute", "network", "exposed")]
        cells = (*milliseconds, str(row["messages"]), f"{row['peak_bytes'] / 1e6:.1f}")
        if cells not in seen:  # buckets larger than all there is to send change nothing
            table.add_row(row["name"], *cells)
        seen.add(cells)
    out = console()
    out.print(table)
    if not data["fits"]:
        out.print(
            f"no setting fits into {data['cluster']['memory'] / 1e9:g} GB; this one takes the least memory:"
        )
    out.print(f"best: {data['best']}, {data['seconds'] * 1e3:.2f} ms; the same setting with")
    for what, seconds in data["seconds_if"].items():
        out.print(f"  {what}: {seconds * 1e3:.2f} ms")
    alive = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in data["alive_at_peak"].items())
    out.print(f"peak memory at {data['peak_at']}: {alive}")
    if data["passes"]:
        options = json.dumps({"passes": ["default", *data["passes"], "default"]})
        out.print(f"to compile with this setting: options={options}", soft_wrap=True, markup=False)


def _mesh(text: str) -> dict[str, int]:
    """Parse ``dp=2048,tp=8`` into names and sizes."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not name.isidentifier() or not equals or name in found:
            raise argparse.ArgumentTypeError(
                f"expected NAME=SIZE[,NAME=SIZE...] with different names, got {text!r}"
            )
        found[name] = positive(size)
    return found


def _cluster(path: str) -> Any:
    import yaml

    from fxpasses.distributed.network import Cluster
    from fxpasses.errors import SimulationError

    if not Path(path).is_file():
        raise UsageError(f"there is no file {path!r}")
    try:
        return Cluster.from_mapping(yaml.safe_load(Path(path).read_text()))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except SimulationError as error:
        raise UsageError(f"{path}: {error}") from error

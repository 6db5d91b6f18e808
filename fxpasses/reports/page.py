"""One HTML page for a directory of reports. It needs no server or network, and runs no code from its data."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake.wrong_arguments import check_type, is_path
from fxpasses.counters import EAGER_FILE
from fxpasses.errors import ReportError
from fxpasses.reports.advice import advice
from fxpasses.reports.against import compare
from fxpasses.reports.versions import LEDGER_FILE, SCHEMA, SIMULATION_FILE, STEPS_FILE

_ASSETS = Path(__file__).parent / "assets"


def report(
    compiled: Callable[..., Any] | str | os.PathLike[str],
    output: str | Path | None = None,
    *,
    against: str | os.PathLike[str] | None = None,
    profile: Callable[[], object] | None = None,
) -> Path:
    """Make one HTML page of what was compiled with ``options={"report": directory}``.

    Args:
        compiled: what ``torch.compile(..., backend="fxpasses", options={"report": directory})`` returned, or
            the directory.
        output: the file; by default ``report.html`` in the directory.
        against: the directory of another report. A separate tab shows the differences.
        profile: runs one step, including backward and optimizer if they are part of it. It is called several
            times, alternating between compiled and eager. A tab shows the time of both, by graph, region,
            kernel and operator. The traces are written to the directory.

    Returns:
        The file.

    Raises:
        ReportError: nothing was compiled with that option, the directory holds no report that this version
            reads, or ``profile`` is not a function.
    """
    for name, value in (("output", output), ("against", against)):
        check_type(
            "report",
            name,
            value,
            lambda v: v is None or is_path(v),
            "the path of a file" if name == "output" else "the directory of another report",
        )
    directory = directory_of(compiled)
    if profile is not None:
        if not callable(profile):
            raise ReportError(
                f"profile: expected a function that does one step, such as lambda: model(x).sum().backward(), got {profile!r}"
            )
        from fxpasses.reports.step_times import measure_steps  # imports torch; a directory alone needs none

        measure_steps(profile, directory)
    file = Path(output) if output else directory / "report.html"
    return write_page(read_report(directory, against), file, directory.resolve().name)


def directory_of(compiled: Callable[..., Any] | str | os.PathLike[str]) -> Path:
    """Return the directory of the report of something compiled. A directory is returned as it is.

    Raises:
        ReportError: it was compiled without a report, or not at all.
    """
    if isinstance(compiled, (str, os.PathLike)):
        return Path(compiled)
    if hasattr(type(compiled), "report_directory"):  # fxpasses.compile made it
        found = compiled.report_directory  # type: ignore[attr-defined]
    else:
        # Something compiled implies that torch is loaded. Without torch, only a directory can be given.
        from fxpasses.reports._torch import compile_options

        options = compile_options(compiled)
        if options is None:
            raise ReportError(
                f'this {type(compiled).__name__} was not made by fxpasses.compile or torch.compile(backend="fxpasses", '
                'options={"report": directory}); name the directory instead'
            )
        found = options.get("report")
    if not found:
        raise ReportError(
            'it was compiled without a report: fxpasses.compile(..., report="directory"), or options={"report": "directory"}'
        )
    return Path(found)


def read_report(
    directory: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    process: int | None = None,
) -> dict[str, Any]:
    """Read the data of a directory: each graph in order, followed by its regions.

    Args:
        directory: the directory given in ``options={"report": directory}``.
        against: another such directory; ``"against"`` then holds the differences.
        process: the number of a process; reports of other processes are skipped.

    Returns:
        ``schema``, ``graphs``, ``advice``, ``eager`` (functions that Dynamo left in eager), ``steps``,
        ``ledger`` (of tuning) and ``simulation`` (or None), and ``against``.

    Raises:
        ReportError: the directory does not exist, holds no report, or one of another version.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ReportError(
            f"there is no directory {str(root)!r}: the first compilation makes it; what was not called, or computes nothing with tensors, has none"
        )
    files = sorted(
        root.rglob("graph.json"),
        key=lambda file: [_numeric_sort_key(part) for part in file.relative_to(root).parts],
    )
    lines = (root / EAGER_FILE).read_text().splitlines() if (root / EAGER_FILE).is_file() else []
    eager = [_read_json(root / EAGER_FILE, line) for line in dict.fromkeys(lines)]
    graphs = []
    for file in files:
        data = _read_json(file)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise ReportError(
                f"{str(file)!r} has version {found!r} of the data; this fxpasses reads {SCHEMA}"
            )
        if process is None or str(data.get("process")).startswith(f"{process},"):
            graphs.append({"name": str(file.parent.relative_to(root)), **data})
    if not graphs and eager:
        why = "; ".join(f"{one['location']}: {one['reason']}" for one in eager)
        raise ReportError(f"nothing was compiled, Dynamo left all of it in eager: {why}")
    if not graphs:
        raise ReportError(
            f"there is no report in {str(root)!r}: compile with options={{'report': {str(root)!r}}}, and call what was compiled"
        )
    steps, ledger, simulation = (
        _read_json(root / name) if (root / name).is_file() else None
        for name in (STEPS_FILE, LEDGER_FILE, SIMULATION_FILE)
    )
    try:
        recommendations = advice(graphs, eager, steps)
    except (KeyError, TypeError) as error:
        raise ReportError(
            f"a graph.json in {str(root)!r} is not as fxpasses writes it: {type(error).__name__} {error}"
        ) from error
    data = {"schema": SCHEMA, "graphs": graphs, "advice": recommendations, "eager": eager,
            "steps": steps, "ledger": ledger, "simulation": simulation}  # fmt: skip
    if against is not None:
        data["against"] = {"directory": str(against), **compare(read_report(against), data)}
    return data


def _read_json(file: Path, text: str | None = None) -> Any:
    try:
        # Python writes NaN and infinities, which browsers cannot parse.
        return json.loads(file.read_text() if text is None else text, parse_constant=lambda name: None)
    except ValueError as error:
        raise ReportError(f"{str(file)!r} is no JSON: {error}") from error


def write_page(data: dict[str, Any], file: Path, name: str = "") -> Path:
    """Write the page of a report.

    Args:
        data: the data from :func:`read_report`.
        file: the file to write.
        name: the name of the report; by default that of the folder of the file.

    Returns:
        The file.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    sources: dict[str, str] = {}
    for graph in data["graphs"]:
        sources.update(graph.pop("sources", {}))
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined)
    text = _script_json({**data, "sources": sources})
    page = environment.get_template("report.html.j2").render(
        title=f"fxpasses: {name or file.resolve().parent.name}",
        data=text,
        nonce=hashlib.sha256(text.encode()).hexdigest()[:24],
        style=_read_asset("vendor/uPlot.min.css") + _read_asset("report.css"),
        scripts=[
            _read_asset("vendor/dagre.min.js"),
            _read_asset("vendor/uPlot.iife.min.js"),
            _read_asset("elements.js"),
            _read_asset("timeline.js"),
            _read_asset("report.js"),
        ],
    )
    file.write_text(page, encoding="utf-8")
    return file


def _script_json(data: Any) -> str:
    """Return JSON that cannot end the element it is in. The page parses it and never runs it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read_asset(name: str) -> str:
    text = (_ASSETS / name).read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower():
        raise AssertionError(f"{name} would end the element that it is in")
    return text


def _numeric_sort_key(part: str) -> tuple[str, int]:
    head, _, number = part.rpartition("_")
    return (head, int(number)) if number.isdigit() else (part, sys.maxsize)

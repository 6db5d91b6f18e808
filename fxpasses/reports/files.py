"""Report files: for each graph a directory with annotated Python for each stage, and a list of passes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

import fake
from fxpasses.compiling.history import Miss
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.errors import StageError
from fxpasses.partitioner import META_KEY
from fxpasses.reports.record import Recorder
from fxpasses.reports.text import annotated_code


class GraphFiles(Observer):
    """Writes the files of each graph to ``DIRECTORY/graph_N/``.

    * ``traced.py``: the graph before passes
    * ``joint.py``, ``forward.py``, ``backward.py`` or ``inference.py``: the graphs after them
    * ``passes.txt``
    * ``partition.txt``: what is saved, and why
    * ``guards.txt``: the sizes that the graph holds for, what restricts them, and why
    * ``graph.json``: all of it as data, from which ``fxpasses report DIRECTORY`` makes a page
    * ``regions.txt`` if the graph has repeats, with the same files for each region in ``regions/``

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._root = Path(directory)
        self._record = Recorder()

    @functools.cached_property
    def directory(self) -> Path:
        """This graph's own directory, created when there is something to write."""
        for number in itertools.count():
            directory = self._root / f"graph_{number}"
            try:
                directory.mkdir(parents=True)  # something may have removed the report's own directory
                return directory
            except FileExistsError:
                continue
        raise AssertionError("itertools.count() ended")

    def dynamo(self, gm: fx.GraphModule, options: Options, earlier: Miss | None = None) -> None:
        """Args: those of :meth:`Observer.dynamo`."""
        self._record.dynamo(gm, options, earlier)

    def joint(self, gm: fx.GraphModule) -> None:
        self._write("traced", gm)

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        self._write(kind, gm)
        (self.directory / "passes.txt").write_text("".join(f"{run}\n" for run in self.runs))
        if META_KEY in gm.meta:
            (self.directory / "partition.txt").write_text(f"{gm.meta[META_KEY]}\n")
        self._record.graph(kind, gm, self.runs)
        self._record.write(self.directory)

    def lowered(self, kind: str, parts: Sequence[Any]) -> None:
        self._record.lowered(kind, parts)
        self._record.write(self.directory)

    def failed(self, error: StageError) -> None:
        self._record.failed(error)
        self._record.write(self.directory)

    def done(self) -> None:
        self._record.write(self.directory)

    def guards(self, shape_env: Any, graph: fx.Graph) -> None:
        (self.directory / "guards.txt").write_text(f"{fake.explain(shape_env, graph=graph)}\n")
        self._record.guards(shape_env, graph)
        self._record.write(self.directory)

    def verdicts(self, found: Mapping[tuple[str, str], str]) -> None:
        self._record.verdicts(found)
        self._record.write(self.directory)

    def regions(self, report: object) -> None:
        (self.directory / "regions.txt").write_text(f"{report}\n")
        self._record.regions(report)

    def of_region(self, gm: fx.GraphModule) -> GraphFiles:
        return GraphFiles(str(self.directory / "regions"))

    def _write(self, name: str, gm: fx.GraphModule) -> None:
        (self.directory / f"{name}.py").write_text(annotated_code(gm))

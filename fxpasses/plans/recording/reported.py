"""The report of a compiled model."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fake.notebook import as_html
from fxpasses.reports.page import directory_of, read_report, report
from fxpasses.reports.summary import Summary


class Reported:
    """What a compiled model reports about itself.

    Attributes:
        model: the model.
        plan_files: the files of its plans.
        why_no_plan: why its last call that was compiled has no plan, or "".
    """

    model: Any
    plan_files: dict[Path, None]
    why_no_plan: str
    _options: Mapping[str, Any]

    @abstractmethod
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""

    @property
    def report_directory(self) -> Path | None:
        """The directory of ``report=``, or None."""
        return Path(self._options["report"]) if "report" in self._options else None

    @property
    def graphs(self) -> list[dict[str, Any]]:
        """The data of each graph that this process compiled with ``report=`` (see the page on reports)."""
        data: list[dict[str, Any]] = read_report(directory_of(self), process=os.getpid())["graphs"]
        return data

    def report(
        self,
        output: str | Path | None = None,
        *,
        against: str | os.PathLike[str] | None = None,
        profile: Callable[[], object] | None = None,
    ) -> Path:
        """Make one HTML page of what was compiled with ``report=``. Args: those of
        :func:`fxpasses.report`."""
        return report(self, output, against=against, profile=profile)

    def explain(self) -> Summary:
        """Summarize what was compiled with ``report=``: its graphs, why they end, recompiles, and what is
        most worth doing.

        Raises:
            ReportError: it was compiled without a report, or nothing was compiled.
        """
        return Summary(read_report(directory_of(self), process=os.getpid()))

    def _repr_html_(self) -> str:
        plans = f"{len(self.plan_files)} plans written or used" + (
            f"; no plan: {self.why_no_plan}" if self.why_no_plan else ""
        )
        head = f"{type(self.model).__name__}, compiled by fxpasses when it is called; {plans}"
        directory = self.report_directory
        summary = self.explain()._repr_html_() if directory is not None and directory.is_dir() else ""
        return as_html(head, code=repr(self.model)) + summary

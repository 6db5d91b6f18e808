"""Make one HTML page of what was compiled with options={"report": DIRECTORY}: source, graphs, passes, memory,
sizes and kernels. With --against, add what differs from another report."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from fxpasses.commands.outcome import Outcome

HELP = "make one HTML page of what was compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the directories and the file."""
    parser.add_argument("directory", help="the directory given as options={'report': DIRECTORY}")
    parser.add_argument(
        "--against",
        metavar="DIRECTORY",
        help="directory of another report; a separate tab shows what differs",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="the HTML file to write (default DIRECTORY/report.html)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(arguments: argparse.Namespace) -> Outcome:
    """Write the page. With ``--json``, print the data instead, or the comparison if there is one."""
    from fxpasses.reports.page import read_report, write_page

    data = read_report(arguments.directory, arguments.against)
    file = Path(arguments.output or Path(arguments.directory) / "report.html")
    if not arguments.json:
        write_page(data, file, Path(arguments.directory).resolve().name)
        if arguments.open:
            webbrowser.open(file.resolve().as_uri())
    return Outcome(0, data.get("against", data), lambda: print(file))

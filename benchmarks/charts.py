"""Draw the chart of the start page from ``benchmarks/figures.json``. Each bar names its benchmark.

``python -m benchmarks charts`` writes ``docs/pages/figures/against-torch.svg``; ``--check`` only compares.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jinja2 import Environment

__all__ = ["drawn", "main"]

_ROOT = Path(__file__).parent
_CHART = _ROOT.parent / "docs/pages/figures/against-torch.svg"
_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {{ 40 + 30 * bars|length }}" font-family="system-ui, sans-serif" font-size="13" role="img">
<title>{{ title }}</title>
<style>text { fill: #333 } .how { fill: #777; font-size: 10px } @media (prefers-color-scheme: dark) { text { fill: #ddd } }</style>
<text x="0" y="16" font-weight="bold">{{ title }}</text>
{% for bar in bars %}{% set y = 30 + 30 * loop.index0 %}<text x="0" y="{{ y + 12 }}">{{ bar.what }}</text>
<text class="how" x="0" y="{{ y + 24 }}">python -m benchmarks {{ bar.how }}</text>
<rect x="400" y="{{ y + 2 }}" width="300" height="16" fill="#8884"/><rect x="400" y="{{ y + 2 }}" width="{{ '%.1f' % (300 * bar.ours) }}" height="16" fill="#3b82d6"/>
<text x="708" y="{{ y + 15 }}">{{ bar.ours }}</text>
{% endfor %}</svg>
"""


def drawn() -> str:
    """Return the chart as SVG."""
    figures = json.loads((_ROOT / "figures.json").read_text())
    return Environment(autoescape=True).from_string(_TEMPLATE).render(figures) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks charts", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where the file is not what the figures say"
    )
    arguments = parser.parse_args(argv)
    if arguments.check:
        return int(_CHART.read_text() != drawn())
    _CHART.write_text(drawn())
    return 0

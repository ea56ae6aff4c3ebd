"""The table of a bench's figures, each with its baseline and the bound that it should keep."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table


class Report:
    """Collects figures, prints them, and records the bounds that were missed."""

    def __init__(self, title: str, *, has_bounds: bool = True) -> None:
        """`has_bounds` is false where the bounds of a bench do not apply, such as on another store than theirs."""
        self.missed: list[str] = []
        self._has_bounds = has_bounds
        self._table = Table("measure", "value", "baseline", "ratio", "bound", "", title=title, title_justify="left")

    def note(self, measure: str, value: str) -> None:
        """Add a figure without a bound."""
        self._table.add_row(measure, value, "", "", "", "")

    def compare(self, measure: str, value: str, against: str, ratio: float) -> None:
        """Add a figure with its baseline, without a bound."""
        self._table.add_row(measure, value, against, f"{ratio:.2f}", "", "")

    def ratio(self, measure: str, value: str, against: str, ratio: float, at_least: float) -> None:
        self._row(measure, value, against, f"{ratio:.2f}", f">= {at_least:g}", kept=ratio >= at_least)

    def ratio_at_most(self, measure: str, value: str, against: str, ratio: float, at_most: float) -> None:
        """Add a figure that should stay small beside its baseline, such as a latency."""
        self._row(measure, value, against, f"{ratio:.2f}", f"<= {at_most:g}", kept=ratio <= at_most)

    def limit(self, measure: str, value: float, at_most: float, unit: str) -> None:
        self._row(measure, f"{value:,.1f} {unit}", "", "", f"<= {at_most:,g} {unit}", kept=value <= at_most)

    def reach(self, measure: str, value: float, at_least: float, unit: str, against: str, ratio: float) -> None:
        """Add a figure with its baseline, and with a bound of its own instead of one for the ratio."""
        bound = f">= {at_least:,g} {unit}"
        self._row(measure, f"{value:,.0f} {unit}", against, f"{ratio:.2f}", bound, kept=value >= at_least)

    def print(self) -> None:
        Console(width=None if os.isatty(1) else 140).print(self._table)
        if self.missed:
            print(f"bounds that were missed: {', '.join(self.missed)}")

    def _row(self, measure: str, value: str, against: str, ratio: str, bound: str, *, kept: bool) -> None:
        if not self._has_bounds:
            self._table.add_row(measure, value, against, ratio, "", "")
            return
        self._table.add_row(measure, value, against, ratio, bound, "ok" if kept else "MISSED")
        if not kept:
            self.missed.append(measure)


def rate(size: float, seconds: float) -> str:
    return f"{size / seconds / 1e6:,.0f} MB/s"

"""One measured figure and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """`ratio` is value / baseline, both of this run; `n` is how many samples `value` stands on."""

    name: str
    value: float
    unit: str
    baseline: float | None
    n: int
    aim: str = ""
    note: str = ""
    extra: dict[str, float | str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.value / self.baseline if self.baseline else None


def show(figures: Sequence[Figure], *, as_json: bool) -> None:
    """JSON: one line a figure. Otherwise a table."""
    if as_json:
        for figure in figures:
            print(json.dumps({**asdict(figure), "ratio": figure.ratio}), flush=True)
        return
    table = Table("figure", "value", "unit", "baseline", "ratio", "aim", "n", "note")
    for f in figures:
        table.add_row(
            f.name, f"{f.value:.3g}", f.unit, "-" if f.baseline is None else f"{f.baseline:.3g}",
            "-" if f.ratio is None else f"{f.ratio:.2f}", f.aim, str(f.n), f.note,
        )  # fmt: skip
    Console().print(table)

"""What a person sees: progress while it runs, tables at the end; and the file for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .rollout import Trajectory


class Progress:
    """A live table, one row a rollout; plain lines where there is no terminal."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._rows = {i: Trajectory(rollout=i) for i in range(count)}
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, trajectory: Trajectory) -> None:
        self._rows[trajectory.rollout] = trajectory
        if self._console.is_terminal:
            self._live.update(self._table())
        elif trajectory.state in {"creating", "paused", "scoring", "done"}:
            self._console.print(
                f"rollout {trajectory.rollout}: {trajectory.state}", highlight=False
            )

    def _table(self) -> Table:
        table = Table("rollout", "node", "now", "commands", "tests")
        for i, t in self._rows.items():
            tests = _tests(t.tests_after or t.tests_before)
            table.add_row(str(i), t.node, t.state, str(t.exec_count), tests)
        return table


def _tests(counts: dict[str, int]) -> str:
    return f"{counts['passed']}/{sum(counts.values())}" if counts else "-"


def show_rollouts(console: Console, trajectories: Sequence[Trajectory]) -> None:
    table = Table(  # without lines: it fits a terminal of 100 columns
        "rollout", "node", "queued\nms", "create\nms", "execs", "tests\nbefore", "tests\nafter",
        "paused\ns", "reclaimed", "denials", "reward", title="Rollouts", box=None, pad_edge=False,
    )  # fmt: skip
    for t in trajectories:
        table.add_row(
            str(t.rollout), t.node, f"{t.phases_ms['queued']:.1f}", f"{t.create_ms:.0f}",
            str(t.exec_count), _tests(t.tests_before), _tests(t.tests_after),
            f"{t.paused_s:.2f}" if t.paused_s else "-",
            f"{t.reclaimed_bytes / 2**20:.1f} MiB" if t.paused_s else "-",
            str(t.denials), f"{t.reward:.1f}",
        )  # fmt: skip
    console.print(table)


def show_phases(console: Console, trajectories: Sequence[Trajectory]) -> None:
    """Where the time of a create goes, over the eight."""
    names = list(dict.fromkeys(name for t in trajectories for name in t.phases_ms))
    table = Table("phase", "median ms", "max ms", title="Phases of a create")
    for name in names:
        values = sorted(t.phases_ms[name] for t in trajectories if name in t.phases_ms)
        table.add_row(name, f"{values[len(values) // 2]:.1f}", f"{values[-1]:.1f}")
    console.print(table)


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({k: v for k, v in asdict(t).items() if k != "state"}) for t in trajectories]
    path.write_text("\n".join(lines) + "\n")

"""The verbs that hand over to the stack, and the trace tree."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import libdsec
from libdsec.cli import stack
from libdsec.cli.app import app
from libdsec.span_tree import Trace, grow, merge
from libdsec.wire.trace import SpanRecord


def found_at(folder: Path, monkeypatch: pytest.MonkeyPatch, *roots: str, lacking: str = "") -> None:
    """Only these import roots have a stack, each below `folder`."""

    def find(name: str) -> ModuleSpec | None:
        root = name.partition(".")[0]
        if root in stack._NEEDED:
            return None if root == lacking else ModuleSpec(name, None)
        if root not in roots:
            raise ModuleNotFoundError(name)
        return ModuleSpec(name, None, origin=str(folder / root / "stack" / "__init__.py"))

    monkeypatch.setattr(stack.importlib.util, "find_spec", find)  # type: ignore[attr-defined]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    runs: list[list[str]] = []

    def execv(path: str, argv: list[str]) -> None:
        runs.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    return runs


HERE = Path(libdsec.__file__).parent.parent


@pytest.mark.parametrize(
    ("roots", "module"),
    [(("services",), "services.stack"), (("dsec_services", "services"), "dsec_services.stack")],
)
def test_the_verb_and_its_arguments_go_to_the_stack(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, roots: tuple[str, ...], module: str
) -> None:
    found_at(HERE, monkeypatch, *roots)
    done = CliRunner().invoke(app, ["up", "--nodes", "2", "--help", "-x"])
    assert done.exit_code == 0
    assert executed == [[sys.executable, "-m", module, "up", "--nodes", "2", "--help", "-x"]]


def test_without_the_services_it_says_what_to_install(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found_at(HERE, monkeypatch)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 3
    assert "pip install 'libdsec[services,host]'" in done.stderr
    found_at(tmp_path, monkeypatch, "services")  # somebody else's package of that name
    assert CliRunner().invoke(app, ["up"]).exit_code == 3
    found_at(HERE, monkeypatch, "services", lacking="redis")  # the code alone is not enough
    bare = CliRunner().invoke(app, ["up"])
    assert (bare.exit_code, "redis" in bare.stderr) == (3, True)
    assert executed == []


def test_the_demo_runs_where_there_is_one(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    assert executed == [[sys.executable, "-m", "demo"]]
    found_at(HERE, monkeypatch)
    bare = CliRunner().invoke(app, ["demo"])
    assert (bare.exit_code, "make demo" in bare.stderr) == (3, True)


def span(name: str, start: int, end: int, parent: str = "", **more: object) -> SpanRecord:
    return SpanRecord(
        trace_id="t" * 32, span_id=name, parent_id=parent, name=name, service="s",
        start_ns=start * 10**6, end_ns=end * 10**6, **more,
    )  # fmt: skip


def test_a_tree_knows_what_no_descendant_covers() -> None:
    root = grow(
        [
            span("place", 10, 40, "create"),
            span("create", 0, 100),
            span("offer", 20, 35, "place"),
            span("start", 30, 60, "create"),  # overlaps with place: counted once
            span("after", 90, 130, "create"),  # sticks out: only what is inside counts
        ]
    )
    assert (root.span.name, [c.span.name for c in root.children]) == (
        "create", ["place", "start", "after"]
    )  # fmt: skip
    assert root.uncovered_ms == pytest.approx(40)
    assert root.uncovered_share == pytest.approx(0.4)


def test_a_span_without_a_kept_parent_hangs_below_the_root() -> None:
    root = grow([span("early", 0, 5, "forgotten"), span("create", 1, 10)])
    assert root.span.name == "create"  # the caller's own span, though another clock began before
    [child] = root.children
    assert (child.span.name, child.orphan) == ("early", True)
    lonely = grow([span("a", 3, 4, "x"), span("b", 1, 2, "y")])
    assert lonely.span.name == "b"


def test_spans_from_several_processes_are_merged_once() -> None:
    spans = merge([[span("b", 2, 3), span("a", 1, 2)], [span("a", 1, 2)]])
    assert [s.name for s in spans] == ["a", "b"]
    assert len(Trace("r", spans, ("x",), 0).roots) == 1

"""The commands of the README, in the order in which a newcomer types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stack import IMAGE, Stack


@pytest.fixture
def sandbox(stack: Stack) -> str:
    """Made by the command line; ended by the test."""
    made = stack.dsec("create", IMAGE, "--memory-mib", "64", "-l", "job=cli")
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def test_a_newcomers_first_minutes(stack: Stack, sandbox: str) -> None:
    said = stack.dsec("exec", sandbox, "--", "echo", "hello")
    assert (said.returncode, said.stdout) == (0, "hello\n")
    listed = stack.dsec("ps")
    [row] = [line for line in listed.stdout.splitlines() if sandbox in line]
    assert "ready" in row
    assert "job=cli" in row
    assert stack.dsec("stop", sandbox).returncode == 0
    dead = stack.dsec("exec", sandbox, "--", "true")
    assert (dead.returncode, "stopped" in dead.stderr) == (3, True)


def test_exit_codes_tell_whose_failure_it_was(stack: Stack, sandbox: str) -> None:
    assert stack.dsec("exec", sandbox, "-c", "exit 7").returncode == 1
    assert stack.dsec("exec", sandbox).returncode == 2
    assert stack.dsec("exec", "nobody_aaaaaa_aaaaaaaaaaaa", "--", "true").returncode == 3
    assert stack.dsec("stop", "-l", "job=cli").returncode == 0


def test_a_tree_is_copied_in_and_out(stack: Stack, sandbox: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "below" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("below/run.sh")
    assert stack.dsec("cp", str(source), f"{sandbox}:/folder").returncode == 0
    assert stack.dsec("exec", sandbox, "--", "/folder/link").stdout == "ran\n"
    back = tmp_path / "back"
    assert stack.dsec("cp", f"{sandbox}:/folder", str(back)).returncode == 0
    assert (back / "below" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (back / "link").is_symlink()
    assert stack.dsec("stop", sandbox).returncode == 0


def test_paused_is_shown_and_resumed_by_exec(stack: Stack, sandbox: str) -> None:
    assert stack.dsec("pause", sandbox).returncode == 0
    lines = stack.dsec("ps", "--json", "-l", "job=cli").stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["paused"]
    assert stack.dsec("exec", sandbox, "--", "true").returncode == 0
    assert stack.dsec("stop", sandbox).returncode == 0


def test_a_layer_is_published_and_used(stack: Stack, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("a tool\n")
    published = stack.dsec("layers", "publish", str(tmp_path), "cli-tool@1", "--kind", "toolkit")
    assert published.returncode == 0, published.stderr
    again = stack.dsec("layers", "publish", str(tmp_path), "cli-tool@1", "--kind", "toolkit")
    assert again.returncode == 0, "the same bytes under the same name are the same layer"
    (tmp_path / "tool").write_text("another tool\n")
    other = stack.dsec("layers", "publish", str(tmp_path), "cli-tool@1", "--kind", "toolkit")
    assert (other.returncode, "cli-tool" in other.stderr) == (3, True)
    made = stack.dsec("create", IMAGE, "--toolkit", "cli-tool@1", "--memory-mib", "64")
    assert made.returncode == 0, made.stderr
    there = made.stdout.strip()
    assert stack.dsec("exec", there, "--", "cat", "/tool").stdout == "a tool\n"
    assert stack.dsec("stop", there, sandbox).returncode == 0
    assert "cli-tool" in stack.dsec("layers", "list", "--json").stdout


def test_another_shape_of_the_same_home_is_refused(stack: Stack) -> None:
    up = stack.dsec("up", "--home", str(stack.home), "--nodes", "3")
    assert up.returncode == 3
    assert "2 nodes" in up.stderr
    assert "--home" in up.stderr

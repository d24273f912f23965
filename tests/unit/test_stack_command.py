"""What `dsec up`, `down`, `status`, `doctor` print and leave with, before anything is started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.stack import __main__ as command
from services.stack import plan
from services.stack.doctor import Check, examine
from services.stack.probe_ready import HttpReady
from services.stack.process import Process, ProcessSpec


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the C programs are; none of them is there yet."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(plan, "built", lambda name: tmp_path / "build" / name)
    return tmp_path / "build"


def test_a_hint_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "pip install 'libdsec[services]'"
    found = [Check("valkey", False, "a" * 200, hint), Check("swap", False, "none", needed=False)]
    monkeypatch.setattr(command, "examine", lambda home: found)
    done = CliRunner().invoke(command.app, ["doctor"])
    assert done.exit_code == 3
    [line] = [line for line in done.stdout.splitlines() if "valkey" in line]
    assert "missing" in line
    assert "a" * 200 in line
    assert line.rstrip().endswith(hint)
    found.pop(0)
    assert CliRunner().invoke(command.app, ["doctor"]).exit_code == 0


def test_a_node_without_its_programs_is_not_started(built: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = CliRunner().invoke(command.app, ["up", "--home", str(home)])
    assert done.exit_code == 3
    assert str(built / "aether") in done.stderr
    assert "make setup" in done.stderr
    told = CliRunner().invoke(command.app, ["up", "--home", str(home), "--json"])
    assert json.loads(told.stderr)["error"]["code"] == "unsupported"
    assert not home.exists()


def test_doctor_names_the_programs_that_are_not_built(tmp_path: Path) -> None:
    checks = {check.name: check for check in examine(tmp_path)}
    for name in plan.PARTS:
        assert checks[name].needed
        assert checks[name].ok == plan.built(name).exists()
        assert "make setup" in checks[name].hint


def test_a_wrong_users_file_is_bad_usage_and_named(built: Path, tmp_path: Path) -> None:
    built.mkdir()
    for name in plan.PARTS:
        (built / name).touch()
    home = tmp_path / "home"
    home.mkdir()
    users = home / "users.toml"
    users.write_text('[users.alice]\nrole = "king"\n')
    done = CliRunner().invoke(command.app, ["up", "--home", str(home)])
    assert done.exit_code == 2
    assert "[users.alice]: role 'king' is neither caller nor operator" in done.stderr
    users.write_text(itself := '[users.users]\npassword = "12345678"\n')
    done = CliRunner().invoke(command.app, ["up", "--home", str(home)])
    assert (done.exit_code, "would replace users.toml" in done.stderr) == (2, True)
    assert users.read_text() == itself


def test_where_no_stack_is_down_is_done_and_status_is_not(built: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(command.app, ["down", "--home", str(tmp_path), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"home": str(tmp_path), "not_removed": []}
    absent = CliRunner().invoke(command.app, ["status", "--home", str(tmp_path)])
    assert absent.exit_code == 3
    assert "dsec up" in absent.stderr


def test_a_process_that_died_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process(ProcessSpec("p", ("true",), {}, HttpReady(1, "/"), log))
    assert process.last_words() == ""
    log.write_text("x" * 9000 + "\nlisten: address already in use\n\n")
    assert process.last_words() == "listen: address already in use"
    log.write_text("x" * 9000)
    assert len(process.last_words()) == 400

"""The operator's file: what it may hold, and what a broken one does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.policy.aliases import MAX_FILE_BYTES, AliasFile, parse_aliases
from services.policy.rules import parse_rule

GOOD = """
never = ["10.1.0.0/16"]

[services.pypi]
rules = ["tcp:169.254.77.1:8081"]
env = { PIP_INDEX_URL = "http://169.254.77.1:8081/simple" }
hosts = { "mirror.internal" = "169.254.77.1" }

[public]
rules = ["udp:10.0.0.2:53"]
"""


def write(path: Path, text: str) -> None:
    """As an editor does: a new file in the old one's place."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def test_file_becomes_a_table() -> None:
    table = parse_aliases(GOOD, "f")
    pypi = table.services["pypi"]
    assert pypi.rules == parse_rule("tcp:169.254.77.1:8081")
    assert pypi.env == {"PIP_INDEX_URL": "http://169.254.77.1:8081/simple"}
    assert pypi.hosts == {"mirror.internal": "169.254.77.1"}
    assert table.public.rules == parse_rule("udp:10.0.0.2:53")
    assert [str(network) for network in table.never] == ["10.1.0.0/16"]
    assert table.missing == ""


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("services = 3", "services"),
        ("[services.pypi\n", "line 1"),
        ('[services.pypi]\nrule = ["tcp:1.1.1.1:80"]', "services.pypi.rule"),
        ('[services.pypi]\nrules = ["tcp:pypi.org:443"]', "'tcp:pypi.org:443' names the host"),
        ('[services."Py Pi"]\nrules = []', "a service's name"),
        ('[services.a]\nenv = { "A B" = "x" }', "a variable's name"),
        ('[services.a]\nhosts = { "m" = "not-an-address" }', "services.a.hosts.m"),
        ('[services.a]\nhosts = { "m\\n1.1.1.1 bank" = "10.0.0.1" }', "a host's name"),
        ('never = ["10.0.0.1/8"]', "host bits"),
        ("[secrets]\n", "secrets"),
    ],
)
def test_mistake_is_named(text: str, fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        parse_aliases(text, "f")


def test_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "aliases.toml"
    file = AliasFile(path)
    assert "No such file" in file.current().missing
    write(path, GOOD)
    assert set(file.current().services) == {"pypi"}
    assert file.current() is file.current()
    write(path, GOOD.replace("services.pypi", "services.npm"))
    assert set(file.current().services) == {"npm"}


@pytest.mark.parametrize("damage", ["syntax", "gone", "bytes", "huge"])
def test_broken_file_keeps_the_last_good_table_and_says_so(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "aliases.toml"
    write(path, GOOD)
    file = AliasFile(path)
    good = file.current()
    if damage == "gone":
        path.unlink()
    elif damage == "bytes":
        path.write_bytes(b"\xff\xfe")
    else:
        write(path, "[" if damage == "syntax" else "#" * (MAX_FILE_BYTES + 1))
    assert file.current() is good
    assert file.problem
    write(path, GOOD)
    os.utime(path, ns=(1, 1))
    assert file.current() == good
    assert file.problem == ""


def test_file_that_was_never_good_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "aliases.toml"
    write(path, "[")
    file = AliasFile(path)
    table = file.current()
    assert table.missing.startswith("it is not valid")
    assert table.services == {}
    assert file.problem == table.missing

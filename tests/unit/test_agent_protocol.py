"""The two copies of the protocol's numbers, C and Python, say the same."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from services.edge.agent import protocol

HEADER = (Path(__file__).parents[2] / "aether" / "protocol.h").read_text()

# C enum name, prefix of its members, the Python twin
ENUMS = [
    ("frame_type", "FRAME_", protocol.FrameType),
    ("error_code", "ERROR_", protocol.ErrorCode),
    ("exec_flag", "EXEC_", protocol.ExecFlag),
    ("attach_flag", "ATTACH_", protocol.AttachFlag),
    ("started_flag", "STARTED_", protocol.StartedFlag),
    ("exit_reason", "REASON_", protocol.ExitReason),
    ("stage", "STAGE_", protocol.Stage),
    ("exit_flag", "EXIT_", protocol.ExitFlag),
    ("kill_scope", "SCOPE_", protocol.KillScope),
    ("process_state", "PROCESS_", protocol.ProcessState),
    ("file_op", "FILE_", protocol.FileOp),
    ("file_flag", "FILE_", protocol.FileFlag),
    ("hello_flag", "HELLO_", protocol.HelloFlag),
    ("output_stream", "OUTPUT_", protocol.OutputStream),
]
LIMITS = {"UINT64_MAX": 2**64 - 1, "UINT32_MAX": 2**32 - 1, "(2 * 1024 * 1024)": 2 * 1024 * 1024}


def c_enum(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} {{(.*?)}};", HEADER, re.S)
    assert body, f"no enum {name} in protocol.h"
    return {key: int(value, 0) for key, value in re.findall(r"(\w+) = (\w+),", body[1])}


@pytest.mark.parametrize(("name", "prefix", "twin"), ENUMS)
def test_enum_is_the_same_in_both(name: str, prefix: str, twin: type[IntEnum]) -> None:
    assert c_enum(name) == {prefix + member.name: member.value for member in twin}


def test_every_c_enum_has_a_twin() -> None:
    assert set(re.findall(r"^enum (\w+) {", HEADER, re.M)) == {name for name, _, _ in ENUMS}


def test_every_constant_is_the_same_in_both() -> None:
    constants = re.findall(r"^#define (\w+) (.+)$", HEADER, re.M)
    assert len(constants) == 8
    for name, text in constants:
        value = LIMITS[text] if text in LIMITS else int(text)
        assert getattr(protocol, name) == value, name

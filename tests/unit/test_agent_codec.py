"""The agent's frames: what goes in comes out, and any other bytes are refused."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.agent import codec
from services.edge.agent.errors import AgentProtocolError
from services.edge.agent.model import ExecSpec
from services.edge.agent.protocol import MAX_PAYLOAD, ExitReason, FrameType, ProcessState

frames = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=200)), max_size=8
)
plain_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)

DECODERS = [
    codec.decode_started,
    codec.decode_output,
    codec.decode_exit,
    codec.decode_u32,
    codec.decode_u64,
    codec.decode_error,
    codec.decode_hello,
    codec.decode_processes,
    codec.decode_entries,
]


def wire(kind: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("<IBI", len(payload), kind, stream) + payload


@given(frames, st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_decoder_finds_the_frames_however_the_bytes_are_cut(
    sent: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(wire(*frame) for frame in sent)
    decoder = codec.FrameDecoder()
    got = []
    while data:
        size = cuts[len(data) % len(cuts)]
        piece, data = data[:size], data[size:]
        got += [(frame.type, frame.stream, bytes(frame.payload)) for frame in decoder.feed(piece)]
    assert got == sent


def test_decoder_refuses_a_frame_longer_than_allowed() -> None:
    with pytest.raises(AgentProtocolError, match="at most"):
        codec.FrameDecoder().feed(struct.pack("<IBI", MAX_PAYLOAD + 1, FrameType.OUTPUT, 1))


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
def test_payload_decoders_answer_or_refuse_any_bytes(decode) -> None:
    @given(st.binary(max_size=300))
    def check(payload: bytes) -> None:
        with contextlib.suppress(AgentProtocolError):
            decode(memoryview(payload))

    check()


def test_a_string_that_claims_more_than_its_frame_is_refused() -> None:
    payload = struct.pack("<HII", 1, 0, 1000) + b"short\0"
    with pytest.raises(AgentProtocolError, match="past its frame"):
        codec.decode_error(memoryview(payload))


def test_an_unknown_enum_value_is_refused() -> None:
    with pytest.raises(AgentProtocolError, match="ErrorCode"):
        codec.decode_error(memoryview(struct.pack("<HII", 99, 0, 0) + b"\0"))


@given(plain_text, u32, st.sampled_from(list(ProcessState)), st.lists(u64, min_size=6, max_size=6))
def test_processes_come_out_as_they_went_in(
    exec_id: str, pid: int, state: ProcessState, numbers: list[int]
) -> None:
    entry = codec.encode_str(exec_id) + struct.pack("<IB6Q", pid, state, *numbers)
    (info,) = codec.decode_processes(memoryview(struct.pack("<I", 1) + entry))
    assert (info.exec_id, info.pid or 0, info.state) == (exec_id, pid, state)
    assert [info.started_ns, info.ended_ns or 0] == numbers[:2]
    assert [info.stdout_total, info.stdout_kept_from] == numbers[2:4]
    assert [info.stderr_total, info.stderr_kept_from] == numbers[4:]


def test_exit_ignores_what_a_later_minor_version_appends() -> None:
    payload = struct.pack("<BBBiII7Q", 1, 0, 1, 137, 9, 0, 1, 2, 3, 4, 5, 6, 7) + b"new field"
    exit_ = codec.decode_exit(memoryview(payload))
    assert (exit_.reason, exit_.exit_code, exit_.signal) == (ExitReason.SIGNALLED, 137, 9)
    assert (exit_.stdout_total, exit_.ended_ns, exit_.value) == (1, 6, 7)


@given(st.lists(st.binary(max_size=20).filter(lambda raw: b"\0" not in raw), min_size=1))
def test_arguments_keep_bytes_that_are_no_text(argv: list[bytes]) -> None:
    frame = codec.encode_exec(7, ExecSpec(exec_id="e", argv=tuple(argv), cwd="", user=""), 0)
    argc_at = 9 + 6 + 28 + 5 + 5
    assert struct.unpack_from("<I", frame, argc_at) == (len(argv),)
    expected = b"".join(struct.pack("<I", len(raw)) + raw + b"\0" for raw in argv)
    assert frame[argc_at + 4 : -4] == expected


@pytest.mark.parametrize(
    "spec",
    [
        ExecSpec(exec_id="", argv=("true",)),
        ExecSpec(exec_id="x" * 65, argv=("true",)),
        ExecSpec(exec_id="e", argv=()),
        ExecSpec(exec_id="e", argv=("a\0b",)),
        ExecSpec(exec_id="e", argv=("true",), env={"A": "\0"}),
        ExecSpec(exec_id="e", argv=("true",), cwd="/\0"),
        ExecSpec(exec_id="e", argv=("x" * (MAX_PAYLOAD + 1),)),
        ExecSpec(exec_id="e", argv=("true",), timeout_s=-1),
        ExecSpec(exec_id="e", argv=("true",), timeout_s=1e9),
    ],
)
def test_what_the_protocol_cannot_carry_is_a_value_error(spec: ExecSpec) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.encode_exec(1, spec, 0)


def test_a_timeout_below_a_millisecond_is_not_none() -> None:
    assert codec.encode_timeout(None) == 0
    assert codec.encode_timeout(0.0001) == 1
    assert codec.encode_timeout(1.5) == 1500

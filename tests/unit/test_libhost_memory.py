"""Pressure files of every shape, and advice that stops short."""

from __future__ import annotations

from pathlib import Path

import pytest

from libhost import memory, syscall


def test_pressure_is_read(tmp_path: Path) -> None:
    file = tmp_path / "memory.pressure"
    file.write_text(
        "some avg10=1.50 avg60=0.40 avg300=0.10 total=12345\n"
        "full avg10=0.70 avg60=0.20 avg300=0.05 total=999\n"
    )
    assert memory.read_pressure(file) == memory.Pressure(1.5, 0.4, 0.7, 0.2, 12345)


def test_pressure_without_a_full_line_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cpu.pressure"
    file.write_text("some avg10=1.50 avg60=0.40 avg300=0.10 total=12345\n")
    assert memory.read_pressure(file).full_avg10 == 0


class ShortAdvice:
    """Advises at most ``step`` bytes a call, and refuses one range altogether."""

    def __init__(self, step: int, refused: int) -> None:
        self.step, self.refused = step, refused
        self.advised: list[tuple[int, int]] = []

    def __call__(self, _fd: int, ranges: list[tuple[int, int]], _advice: int) -> int:
        left = self.step
        for start, length in ranges:
            if start == self.refused:
                if left == self.step:
                    raise OSError(22, "refused")
                break
            part = min(left, length)
            self.advised.append((start, part))
            left -= part
            if left == 0:
                break
        return self.step - left


@pytest.mark.parametrize("step", [1, 3, 10, 64, 10_000])
def test_every_byte_is_advised_once_however_short_the_calls(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    kernel = ShortAdvice(step, refused=500)
    monkeypatch.setattr(syscall, "process_madvise", kernel)
    ranges = [(0, 40), (100, 7), (500, 20), (1000, 90)]
    total, complete = memory._advise(0, ranges, 0, deadline=float("inf"))
    assert (total, complete) == (137, True)
    touched = [byte for start, length in kernel.advised for byte in range(start, start + length)]
    assert sorted(touched) == [*range(40), *range(100, 107), *range(1000, 1090)]

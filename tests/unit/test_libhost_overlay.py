"""The plan of a sandbox's root: order, names and bounds, without touching the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from libhost.overlay import MAX_LOWERS, OverlayMode, plan_overlay
from libhost.writable import Place

BASE, TOOLKIT = Place(10, Path("/l/base")), Place(11, Path("/l/toolkit"))
UPPER, WORK = Place(20, Path("/d/upper")), Place(21, Path("/d/work"))


def described(mode: OverlayMode) -> list[str]:
    return [op.describe() for op in plan_overlay([BASE, TOOLKIT], UPPER, WORK, mode)]


def test_top_layer_is_named_first() -> None:
    assert described(OverlayMode.PATHS)[:4] == [
        "lowerdir+=/l/toolkit",
        "lowerdir+=/l/base",
        "upperdir=/d/upper",
        "workdir=/d/work",
    ]


def test_descriptors_are_named_in_the_other_modes() -> None:
    assert described(OverlayMode.SET_FD)[0] == "lowerdir+=fd:11"
    assert described(OverlayMode.PROC_FD)[0] == "lowerdir+=/proc/self/fd/11"


def test_options_are_the_same_in_every_mode() -> None:
    options = {mode: described(mode)[4:] for mode in OverlayMode}
    assert all(found == options[OverlayMode.PATHS] for found in options.values())
    assert "redirect_dir=on" in options[OverlayMode.PATHS]


def test_paths_mode_refuses_what_has_no_path() -> None:
    with pytest.raises(ValueError, match="paths only"):
        plan_overlay([Place(10, None)], UPPER, WORK, OverlayMode.PATHS)


@pytest.mark.parametrize("count", [0, MAX_LOWERS + 1])
def test_number_of_layers_is_bounded(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        plan_overlay([BASE] * count, UPPER, WORK, OverlayMode.SET_FD)

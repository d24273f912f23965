"""The errors of the kernel layer that a caller acts on; everything else is a plain ``OSError``."""

from __future__ import annotations


class HostError(Exception):
    """Root of what libhost raises besides ``OSError`` and ``TimeoutError``."""


class UnsupportedError(HostError):
    """This host cannot do what was asked; ``reason`` is what was tried and how it failed."""

    def __init__(self, feature: str, reason: str, hint: str = "") -> None:
        self.feature = feature
        self.reason = reason
        self.hint = hint
        tail = f" ({hint})" if hint else ""
        super().__init__(f"{feature} is not supported on this host: {reason}{tail}")


class BusyError(HostError):
    """Another process holds what only one may hold."""

    def __init__(self, thing: str, hint: str = "") -> None:
        self.thing = thing
        super().__init__(f"{thing} is held by another process{f' ({hint})' if hint else ''}")

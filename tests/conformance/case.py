"""What every class of cases stands on: the fixtures a backend must give, and telling data."""

from __future__ import annotations

import pytest

from libdsec import Sandbox

# Recognisable at any offset: what is lost, doubled or swapped does not go unnoticed.
NUMBERS = "i=0; while [ $i -lt 20000 ]; do printf '%051d\\n' $i; i=$((i+1)); done"
NUMBERED = b"".join(b"%051d\n" % i for i in range(20000))
BYTES = bytes(range(256))


class Cases:
    """The fixtures a backend must give."""

    @pytest.fixture
    def sandbox(self) -> Sandbox:
        raise NotImplementedError

    @pytest.fixture
    def home(self) -> str:
        raise NotImplementedError

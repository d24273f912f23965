"""Asking everybody at once."""

from __future__ import annotations

import asyncio

from libdsec.bus import Call
from libdsec.errors import NotFound
from libdsec.wire.envelope import Rpc
from libdsec.wire.model import Empty

from .conftest import Connect


async def test_gather_names_who_answered_failed_and_stayed_silent(connect: Connect) -> None:
    async def fine(request: Empty, call: Call) -> Empty:
        return Empty()

    async def failing(request: Empty, call: Call) -> Empty:
        raise NotFound("nothing here")

    async def silent(request: Empty, call: Call) -> Empty:
        await asyncio.Event().wait()
        return Empty()

    who = Rpc("t.who", Empty, Empty, "any edge")
    for node, handler in (("n1", fine), ("n2", failing), ("n3", silent)):
        await (await connect(f"edge.{node}", identity=node)).serve(who, handler)
    client = await connect("client")
    answer = await client.gather(who, Empty(), timeout_s=0.3, expect=["n1", "n2", "n3", "n4"])
    assert set(answer.replies) == {"n1"}
    assert isinstance(answer.errors["n2"], NotFound)
    assert answer.missing == {"n3", "n4"}
    async with asyncio.timeout(1.0):  # ends when all expected answered, long before 30 s
        early = await client.gather(who, Empty(), timeout_s=30, expect=["n1", "n2"])
        assert early.missing == frozenset()
        alone = await client.gather(
            Rpc("t.nobody", Empty, Empty, "any edge"), Empty(), timeout_s=30, expect=["n1"]
        )
        assert alone.missing == {"n1"}

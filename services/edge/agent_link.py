"""The way to one sandbox's agent: one channel at a time, made anew when it broke.

The agent's socket is bound by the edge before the agent exists, so a connection can be opened at
once and waits in the backlog; nothing is polled. A broken channel says nothing about the sandbox's
life (`death` judges that): commands go on, and the next user connects again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from libdsec.errors import Unavailable

from .agent import AgentChannel, AgentError

_CONNECT_TIMEOUT_S: Final = 5.0


class AgentLink:
    """channel() any number of times -> close()."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: AgentChannel | None = None
        self._connecting = asyncio.Lock()

    @property
    def open_channel(self) -> AgentChannel | None:
        """The channel if there is one; nothing is connected."""
        return None if self._channel is None or self._channel.closed else self._channel

    async def channel(self) -> AgentChannel:
        """The open channel.

        Raises:
            Unavailable: the agent does not answer.
        """
        if (channel := self.open_channel) is not None:
            return channel
        async with self._connecting:
            if (channel := self.open_channel) is not None:
                return channel
            try:
                self._channel = await AgentChannel.connect(
                    self._socket, timeout_s=_CONNECT_TIMEOUT_S
                )
            except AgentError as err:
                raise Unavailable(
                    f"the sandbox's agent does not answer: {err}", retry_after_s=1.0
                ) from err
            return self._channel

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.aclose()

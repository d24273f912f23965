"""The base of every message on the wire."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """A frozen message. Unknown fields are dropped, so that an older reader takes a newer sender.

    Bytes travel as base64 in JSON. Defaults are written out, since a reader of another version may
    have another default; only None, which always means "not given", is left out.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64"
    )

    def encode(self) -> bytes:
        return self.__pydantic_serializer__.to_json(self, exclude_none=True)


class Empty(Message):
    """A reply that says only "done"."""


class StrictInput(Message):
    """What a person or program writes: a field nobody knows is a mistake, not an addition."""

    model_config = ConfigDict(extra="forbid")


def random_token(nbytes: int = 12) -> str:
    """Lower-case hex for request ids, nonces and keys."""
    return os.urandom(nbytes).hex()

"""What an operator can choose for a scheduler, all of it `DSEC_*` variables."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from libdsec.wire.defaults import SAMPLE_K

from ..chassis.settings import ServiceSettings


class Role(StrEnum):
    PLACE = "place"  # takes requests from the queue
    WATCH = "watch"  # turns heartbeats into the view


class SchedulerSettings(ServiceSettings):
    """Both roles run in one process by default; either can be run alone."""

    roles: tuple[Role, ...] = Field((Role.PLACE, Role.WATCH), description="JSON list of roles")
    sample_k: int = Field(SAMPLE_K, ge=1, le=16, description="nodes sampled for each item")
    concurrency: int = Field(32, ge=1, le=256, description="requests in work at once, per lane")
    stream_replicas: int = Field(
        1, ge=1, le=5, description="of streams and buckets; 3 on a cluster"
    )

    @model_validator(mode="after")
    def _check_redis(self) -> Self:
        if not self.redis_url:
            raise ValueError("DSEC_REDIS_URL is empty: the view of the nodes is kept there")
        return self

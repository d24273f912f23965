"""The ledger's memory of one request: its items, how far each has come, and what is due for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from libdsec.wire.error import ErrorReply
from libdsec.wire.placement import (
    MAX_ATTEMPTS,
    AcceptedItem,
    Held,
    Offer,
    PlaceRequest,
    RetryRequest,
)

from .effects import Announce, AskRetry
from .records import HeldItem, HeldRequest, InboxAddress, RequestKey, Stage

MAX_INBOXES: Final = 4  # callers with the same key that are answered; the oldest is dropped


@dataclass
class Item:
    """One accepted item.

    ready    its sandbox runs
    told     an announcement of it may have left
    due      one is to be sent
    recheck  the lease has been broken since the claim was last known to name it
    named    it is released, and the claim is known to name it
    """

    index: int
    sandbox_id: str
    deadline: float  # monotonic: without a verdict until then, it is released
    stage: Stage = Stage.ACCEPTED
    ready: bool = False
    told: bool = False
    due: bool = True
    recheck: bool = False
    named: bool = False
    error: ErrorReply | None = None
    retryable: bool = False

    @property
    def pair(self) -> AcceptedItem:
        return AcceptedItem(index=self.index, sandbox_id=self.sandbox_id)

    @property
    def lives(self) -> bool:
        return self.stage is not Stage.RELEASED

    @property
    def undecided(self) -> bool:
        """Whether only a scheduler can say what is to become of it."""
        if self.stage is Stage.RELEASED:
            return not self.named
        return self.stage is Stage.ACCEPTED or self.recheck

    @property
    def settled(self) -> bool:
        """Whether nothing is left to say or to ask about it."""
        return self.told and not self.due and not self.undecided

    def release(self, error: ErrorReply, *, retryable: bool) -> None:
        """Its sandbox has ended. What may have been announced is never placed again."""
        self.named = self.stage is Stage.CONFIRMED and not self.recheck
        self.stage = Stage.RELEASED
        self.error = error
        self.retryable = retryable and not self.told
        self.due = True

    def confirm(self) -> None:
        """The claim names it."""
        if self.recheck and self.told:
            self.due = True  # what was said before the lease broke may not have been heard
        self.recheck = False
        if self.lives:
            self.stage = Stage.CONFIRMED
        else:
            self.named = True


@dataclass
class Request:
    """What this node holds of one request."""

    key: RequestKey
    epoch: int
    accepted_ms: int
    expires: float  # monotonic: nobody waits for it after this
    offer: Offer | None = None  # None: only a promise
    items: dict[int, Item] = field(default_factory=dict)
    inboxes: list[InboxAddress] = field(default_factory=list)
    ask_at: float = 0.0  # monotonic: do not ask a scheduler again before

    def record(self) -> HeldRequest:
        items = tuple(
            HeldItem(
                index=i.index, sandbox_id=i.sandbox_id, stage=i.stage, error=i.error,
                retryable=i.retryable,
            )
            for i in self.items.values()
        )  # fmt: skip
        return HeldRequest(
            epoch=self.epoch, accepted_ms=self.accepted_ms, inboxes=tuple(self.inboxes), items=items
        )

    def add_inbox(self, inbox: InboxAddress) -> None:
        if inbox not in self.addresses():
            self.inboxes = [*self.inboxes, inbox][-MAX_INBOXES:]

    def inquiry(self) -> Held | None:
        """What a scheduler has to decide, if anything."""
        open_items = [i for i in self.items.values() if i.undecided]
        if not open_items or self.offer is None:
            return None
        return Held(
            request_id=self.key[1],
            project=self.key[0],
            key=self.offer.key,
            epoch=self.epoch,
            items=tuple(i.pair for i in open_items if i.lives),
            ended=tuple(i.pair for i in open_items if not i.lives),
        )

    def announcements(self) -> tuple[Announce, ...]:
        """Take what is due: one message to each caller. The lease is the ledger's to check."""
        ready: list[AcceptedItem] = []
        failed: dict[int, ErrorReply] = {}
        for item in self.items.values():
            if not item.due or item.undecided:
                continue
            if item.lives and item.ready:
                ready.append(item.pair)
            elif item.error is not None and not self._goes_on(item):
                failed[item.index] = item.error
            else:
                continue
            item.due, item.told = False, True
        if not ready and not failed:
            return ()
        return tuple(self.announce(to, tuple(ready), failed) for to in self.addresses())

    def announce(
        self, to: InboxAddress, ready: tuple[AcceptedItem, ...], failed: dict[int, ErrorReply]
    ) -> Announce:
        return Announce(self.key[0], to.request_id, to.reply_to, to.nonce, ready, failed)

    def ask_retry(self, node: str, now: float) -> AskRetry | None:
        """The items that are to be placed again, elsewhere if possible."""
        offer = self.offer
        items = [i for i in self.items.values() if i.named and self._goes_on(i)]
        if not items or offer is None or items[0].error is None:
            return None
        place = PlaceRequest(
            request_id=offer.request_id,
            key=offer.key,
            reply_to=offer.reply_to,
            nonce=offer.nonce,
            count=offer.count,
            budget_ms=max(0, int(1e3 * (self.expires - now))),
            attempt=offer.attempt + 1,
            avoid=tuple(sorted({*offer.avoid, node})),
            spec=offer.spec,
        )
        pairs = tuple(i.pair for i in items)
        return AskRetry(
            RetryRequest(
                request_id=offer.request_id,
                project=offer.project,
                items=pairs,
                reason=items[0].error,
                place=place,
            )
        )

    def _goes_on(self, item: Item) -> bool:
        """Whether a released item is to be placed again rather than to fail."""
        return item.retryable and self.offer is not None and self.offer.attempt < MAX_ATTEMPTS

    def addresses(self) -> tuple[InboxAddress, ...]:
        if self.offer is None:
            return tuple(self.inboxes)
        offer = self.offer
        first = InboxAddress(
            request_id=offer.request_id, reply_to=offer.reply_to, nonce=offer.nonce
        )
        return (first, *self.inboxes)

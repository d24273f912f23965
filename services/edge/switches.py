"""What an operator has told the node: cordoned takes nothing new, draining also sends away.

Both are in the journal before the operator gets the answer, so that a restart changes neither.
"""

from __future__ import annotations

from .record import NodeRecord, Records


class Switches:
    """What is set, and `leaving`: this process is about to end, which a successor need not know."""

    def __init__(self, record: NodeRecord, records: Records) -> None:
        self._record = record
        self._records = records
        self.leaving = False

    @property
    def incarnation(self) -> str:
        return self._record.incarnation

    @property
    def cordoned(self) -> bool:
        return self._record.cordoned

    @property
    def draining(self) -> bool:
        return self._record.draining

    async def set(self, *, cordoned: bool, draining: bool) -> None:
        """Durable when it returns."""
        changes = {"cordoned": cordoned, "draining": draining}
        self._record = self._record.model_copy(update=changes)
        self._records.save_node(self._record)
        await self._records.journal.sync()

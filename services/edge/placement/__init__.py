"""The edge's side of the placement protocol: a ledger without I/O of its own.

What it owns: which items of which requests this node has accepted, under which epoch, what was
promised, and who may be announced. What it is not: it starts and kills nothing, knows no bus, no
file and no clock but the one it is given. The edge drives it:

    step = ledger.offer(offer, admit)          # any method returns a Step
    for record in step.records: record.apply(journal)
    await journal.sync()                       # before anything below, also when records is empty
    for effect in step.effects: ...            # start, kill, announce, inquire, ask for a retry
    return step.reply                          # offer and whohas only

Rules for the driver (docs/adr/0003-placement-protocol.md says why):

* Announce at once when told to (no await between taking the effect and handing it to the bus); if
  the bus raises, call `announce_failed`: the ledger tells you again at a later tick.
* Call `tick` every 0.25 s, `lease.sent(seq)` before a heartbeat leaves, `lease.acked(...)` for each
  HEARTBEAT_ACK, and `ready`, `failed`, `gone` for what becomes of a sandbox.
* After a start: `restore(journal.items(PREFIX), fates)` once what lives has been adopted, with the
  fate of every sandbox the edge's own journal knows, before serving offers.
"""

from .effects import Announce, AskRetry, Effect, Inquire, Kill, Start, Step
from .lease import AnnounceLease
from .ledger import Admission, Fate, Ledger
from .records import PREFIX, Drop, Put, Record

__all__ = [
    "PREFIX",
    "Admission",
    "Announce",
    "AnnounceLease",
    "AskRetry",
    "Drop",
    "Effect",
    "Fate",
    "Inquire",
    "Kill",
    "Ledger",
    "Put",
    "Record",
    "Start",
    "Step",
]

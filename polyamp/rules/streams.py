"""S33: random streams of a checkpoint that another number of replicas goes on with.

Where the number is the same each has its own again. Otherwise each one's is drawn anew from all that were saved, by a
digest, so that it is the same whenever the checkpoint is resumed on this number, and no two replicas draw alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def seed(saved: Sequence[bytes], replica: int, count: int) -> int:
    """The seed of one replica's stream, 64 bits.

    Args:
        saved: every stream as it was saved, by process.
        replica: whose stream it is to be.
        count: how many replicas go on.

    >>> seed([b"one", b"two"], 0, 3) == seed([b"one", b"two"], 0, 3)
    True
    >>> len({seed([b"one", b"two"], replica, 3) for replica in range(3)})
    3
    """
    digest = hashlib.sha256(b"polyamp-streams-1")
    for stream in saved:
        digest.update(len(stream).to_bytes(8, "little") + stream)
    digest.update(replica.to_bytes(8, "little") + count.to_bytes(8, "little"))
    return int.from_bytes(digest.digest()[:8], "little")

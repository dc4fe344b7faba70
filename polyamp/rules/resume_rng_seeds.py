"""S33: random streams when a checkpoint is resumed with another number of replicas.

With the same number each replica gets its own stream back. Otherwise each stream is derived from a digest of all saved
ones. It is then the same for every resume with this number, and no two replicas draw alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def stream_seed(saved: Sequence[bytes], replica: int, count: int) -> int:
    """Return the 64-bit seed of one replica's stream.

    Args:
        saved: the saved streams, by process.
        replica: the replica that gets the stream.
        count: number of replicas after the resume.

    >>> stream_seed([b"one", b"two"], 0, 3) == stream_seed([b"one", b"two"], 0, 3)
    True
    >>> len({stream_seed([b"one", b"two"], replica, 3) for replica in range(3)})
    3
    """
    digest = hashlib.sha256(b"polyamp-streams-1")
    for stream in saved:
        digest.update(len(stream).to_bytes(8, "little") + stream)
    digest.update(replica.to_bytes(8, "little") + count.to_bytes(8, "little"))
    return int.from_bytes(digest.digest()[:8], "little")

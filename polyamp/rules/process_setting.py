"""`ProcessSetting`: a switch of the whole process, set for the time of a block, by several threads at once.

torch's float32 matmul precision and TensorFlow's TF32 switch are such switches; JAX's is thread-local and needs none of
this. Saving and restoring by itself would leave the process changed when two threads' blocks overlap: the second saves
what the first has set. Called by the backends that have such a switch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from polyamp.errors import UnsupportedError

Value = TypeVar("Value")


class _Owner(NamedTuple):
    """An open block: whose it is, what it asked for, and the block, which is gone if it was interrupted."""

    thread: threading.Thread
    value: Any
    block: Callable[[], Any]


class ProcessSetting(Generic[Value]):
    """A switch with owners: the first block in saves what was there, the last one out puts it back.

    Args:
        name: the policy's argument, for messages.
        read: gives the switch's value.
        write: sets it.

    Example:
        >>> light = ["off"]
        >>> switch = ProcessSetting("light", lambda: light[0], lambda value: light.__setitem__(0, value))
        >>> with switch.held("on"), switch.held("on"):
        ...     light[0]
        'on'
        >>> light[0]
        'off'
    """

    def __init__(self, name: str, read: Callable[[], Value], write: Callable[[Value], object]) -> None:
        self.name: Final = name
        self.read: Final = read
        self.write: Final = write
        self.lock: Final = threading.RLock()  # not Lock: an interrupt's handler may come while this thread holds it
        self.owners: list[_Owner] = []
        self.original: Any = None

    def held(self, value: Value) -> Block:
        """A block in which the switch has this value. Blocks of one thread nest, with other values too.

        Raises:
            UnsupportedError: on entering, if another thread's block is open with another value. Nothing is changed.
        """
        return Block(self, value)

    def enter(self, block: Block) -> None:
        """Set the switch for a block; see `held`."""
        thread = threading.current_thread()
        with self.lock:
            self._keep(lambda owner: True)
            for owner in self.owners:
                if owner.thread is not thread and owner.value != block.value:
                    raise UnsupportedError(
                        f"{self.name} is one setting of the whole process, and the thread {owner.thread.name!r} has it "
                        f"at {owner.value!r} now. Received, in the thread {thread.name!r}: {block.value!r}. Threads "
                        f"that run at the same time must ask for the same {self.name}, or run one after another."
                    )
            if not self.owners:
                self.original = self.read()
            self.owners = [*self.owners, _Owner(thread, block.value, weakref.ref(block, self._orphaned))]
            self.write(block.value)

    def leave(self, block: Block) -> None:
        """Close a block, if it is open."""
        with self.lock:
            self._keep(lambda owner: owner.block() is not block)

    def _keep(self, wanted: Callable[[_Owner], bool]) -> None:
        """Close the other blocks, and those of which nothing is left but the entry here."""
        left = [owner for owner in self.owners if wanted(owner) and owner.block() and owner.thread.is_alive()]
        if len(left) < len(self.owners):
            self.write(left[-1].value if left else self.original)  # those that are left agree, or are one thread's
            self.owners = left

    def _orphaned(self, _: Any) -> None:
        """An interrupt came between a block's end and its closing."""
        with self.lock:
            self._keep(lambda owner: True)


class Block:
    """One block of a `ProcessSetting`, to be entered once."""

    def __init__(self, setting: ProcessSetting[Any], value: Any) -> None:
        self.setting = setting
        self.value = value

    def __enter__(self) -> None:
        try:
            self.setting.enter(self)
        except BaseException:  # an interrupt too
            self.setting.leave(self)
            raise

    def __exit__(self, *_: object) -> None:
        self.setting.leave(self)

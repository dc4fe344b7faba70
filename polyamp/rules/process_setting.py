"""`ProcessSetting`: process-wide switch that several threads can set temporarily.

torch's float32 matmul precision and TensorFlow's TF32 switch are process-wide; JAX's is thread-local. Simply saving and
restoring the value would leave it changed when the blocks of two threads overlap: the second saves the first's value.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from polyamp.errors import UnsupportedError

Value = TypeVar("Value")


class _SettingOwner(NamedTuple):
    """Open block: its thread, the requested value, and a weak reference, which is dead if the block was interrupted."""

    thread: threading.Thread
    value: Any
    block: Callable[[], Any]


class ProcessSetting(Generic[Value]):
    """Switch with owners: the first block to open saves the original value, and the last one to close restores it.

    Args:
        name: the policy's argument, for messages.
        read: returns the switch's value.
        write: sets it.

    Example:
        >>> light = ["off"]
        >>> switch = ProcessSetting("light", lambda: light[0], lambda value: light.__setitem__(0, value))
        >>> with switch.temporary_value("on"), switch.temporary_value("on"):
        ...     light[0]
        'on'
        >>> light[0]
        'off'
    """

    def __init__(self, name: str, read: Callable[[], Value], write: Callable[[Value], object]) -> None:
        self.name: Final = name
        self.read: Final = read
        self.write: Final = write
        self.lock: Final = threading.RLock()  # not Lock: a signal handler may run while this thread owns the lock
        self.owners: list[_SettingOwner] = []
        self.original: Any = None

    def temporary_value(self, value: Value) -> SettingBlock:
        """Return a block in which the switch has this value. Blocks of one thread may be nested, with any values.

        Raises:
            UnsupportedError: on entry, if a block of another thread is open with another value. Nothing is changed.
        """
        return SettingBlock(self, value)

    def enter(self, block: SettingBlock) -> None:
        """Set the switch for a block; see `temporary_value`."""
        thread = threading.current_thread()
        with self.lock:
            self._release_owners(lambda owner: True)
            for owner in self.owners:
                if owner.thread is not thread and owner.value != block.value:
                    raise UnsupportedError(
                        f"{self.name} is one setting of the whole process, and the thread {owner.thread.name!r} has it "
                        f"at {owner.value!r} now. Received, in the thread {thread.name!r}: {block.value!r}. Threads "
                        f"that run at the same time must ask for the same {self.name}, or run one after another."
                    )
            if not self.owners:
                self.original = self.read()
            self.owners = [*self.owners, _SettingOwner(thread, block.value, weakref.ref(block, self._release_orphans))]
            self.write(block.value)

    def leave(self, block: SettingBlock) -> None:
        """Close a block if it is open."""
        with self.lock:
            self._release_owners(lambda owner: owner.block() is not block)

    def _release_owners(self, wanted: Callable[[_SettingOwner], bool]) -> None:
        """Close the unwanted blocks, and entries whose block no longer exists."""
        left = [owner for owner in self.owners if wanted(owner) and owner.block() and owner.thread.is_alive()]
        if len(left) < len(self.owners):
            self.write(left[-1].value if left else self.original)  # the remaining blocks agree, or belong to one thread
            self.owners = left

    def _release_orphans(self, _: Any) -> None:
        """Release a block that an interrupt left open between its end and its closing."""
        with self.lock:
            self._release_owners(lambda owner: True)


class SettingBlock:
    """One block of a `ProcessSetting`, to be entered once."""

    def __init__(self, setting: ProcessSetting[Any], value: Any) -> None:
        self.setting = setting
        self.value = value

    def __enter__(self) -> None:
        try:
            self.setting.enter(self)
        except BaseException:  # includes KeyboardInterrupt
            self.setting.leave(self)
            raise

    def __exit__(self, *_: object) -> None:
        self.setting.leave(self)

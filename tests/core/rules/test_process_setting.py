"""`ProcessSetting`: a switch of the process under several threads, and under interrupts."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from polyamp.errors import UnsupportedError
from polyamp.rules.process_setting import ProcessSetting


def switch() -> tuple[ProcessSetting[str], list[str]]:
    state = ["original"]
    return ProcessSetting("light", lambda: state[0], lambda value: state.__setitem__(0, value)), state


def in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function, name="second")
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_blocks_that_overlap_put_back_what_was_there_before_the_first() -> None:
    setting, state = switch()
    first, second = setting.temporary_value("high"), setting.temporary_value("high")
    first.__enter__()
    entered, leave = threading.Event(), threading.Event()

    def overlap() -> None:
        with second:
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=overlap)
    thread.start()
    assert entered.wait(20)
    first.__exit__()
    assert state == ["high"], "the other thread's block is open"
    leave.set()
    thread.join(20)
    assert state == ["original"]


def test_another_value_at_the_same_time_is_refused_and_changes_nothing() -> None:
    setting, state = switch()
    raised: list[str] = []

    def other() -> None:
        with pytest.raises(UnsupportedError) as caught, setting.temporary_value("low"):
            pass
        raised.append(str(caught.value))

    with setting.temporary_value("high"):
        in_a_thread(other)
        assert state == ["high"]
        with setting.temporary_value("low"):
            assert state == ["low"], "one thread may nest"
            in_a_thread(lambda: raised.append("fits") if _refused(setting, "low") else None)
        assert state == ["high"]
    assert "light is one setting of the whole process" in raised[0]
    assert "'MainThread' has it at 'high' now. Received, in the thread 'second': 'low'" in raised[0]
    assert raised[1:] == ["fits"], "the outer block would come back under the other thread"
    assert state == ["original"]
    in_a_thread(lambda: setting.temporary_value("low").__enter__())
    assert state == ["original"], "a thread that is gone holds nothing"


def _refused(setting: ProcessSetting[str], value: str) -> bool:
    with pytest.raises(UnsupportedError), setting.temporary_value(value):
        pass
    return True


def test_an_interrupt_at_any_line_leaves_the_switch_as_it_was() -> None:
    setting, state = switch()
    lines = 0

    def run(stop_at: int) -> bool:
        """Whether the interrupt at the n-th traced line came."""
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            if frame.f_code.co_filename.endswith("process_setting.py"):
                count += event in ("line", "call")
                if count == stop_at:
                    count += 1
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with setting.temporary_value("high"):
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    gc.collect()
    gc.freeze()  # what is there already is not looked at in the searches below
    try:
        while run(lines + 1):
            lines += 1
            gc.collect()
            assert (state, setting.owners) == (["original"], []), f"interrupted at line {lines}"
    finally:
        gc.unfreeze()
    assert lines > 15

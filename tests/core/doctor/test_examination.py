"""Examinations in worker processes, and the errors of `polyamp.capabilities`; no framework is needed."""

from __future__ import annotations

import pytest

import polyamp
from polyamp.doctor import capabilities as public
from polyamp.doctor.examination import BackendExamination, ExaminationEvent, examine
from polyamp.errors import ArgumentError, BackendError, UnsupportedError
from tests.core.doctor.made_up import capabilities_of_a_gpu

FAKE = "tests.core.doctor.fake_worker"


def test_each_backend_has_its_result_and_stops_no_other() -> None:
    events: list[ExaminationEvent] = []
    names = ["first", "crashes", "unmeasured", "second", "argument"]
    found = examine(names, device="gpu", on_event=events.append, module=FAKE)
    assert list(found) == names
    measured = BackendExamination("1.0", ("cpu",), (capabilities_of_a_gpu(),))
    assert found["first"] == found["second"] == measured
    assert found["unmeasured"] == BackendExamination("1.0", ("cpu",))
    assert found["argument"].problem == "no device gpu"
    assert found["argument"].problem_kind == "argument"
    assert found["crashes"].version is None
    assert found["crashes"].problem == "its process ended with status 1: ImportError: libframework.so is broken"
    ends = [event.backend for event in events if event.phase == "end"]
    assert sorted(ends) == sorted(names)
    assert ExaminationEvent("second", "measure", "cuda:0", 1, 2) in events
    between = events[events.index(ExaminationEvent("first", "measure", "cuda:0", 1, 2)) :]
    measuring = [event.backend for event in between if event.phase in ("measure", "end") and "s" in event.backend[:1]]
    assert measuring in (["second", "second"], [])  # one measures at a time


def test_a_worker_that_hangs_is_ended() -> None:
    found = examine(["hangs"], timeout=0.5, module=FAKE)
    assert found["hangs"].problem == "its import did not end within 0.5 s"


def test_the_reference_is_imported_and_not_measured() -> None:
    found = examine(["reference"])["reference"]
    assert found.problem is None
    assert found.devices == ("cpu",)
    assert found.capabilities == ()
    with pytest.raises(UnsupportedError, match=r"the reference backend has nothing to measure its devices with"):
        polyamp.capabilities("reference")


def test_a_wrong_name_or_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"backend must be one of .*Received: 'torhc'. Did you mean 'torch'\?"):
        polyamp.capabilities("torhc")
    with pytest.raises(ArgumentError, match=r"device must be a name, such as .*Received: int."):
        polyamp.capabilities("reference", 0)  # type: ignore[arg-type]  # what is tested
    ended = BackendExamination("1.0", ("cpu",), problem="device must be one of cpu.", problem_kind="argument")
    monkeypatch.setattr(public, "examine", lambda names, device: {"reference": ended})
    with pytest.raises(ArgumentError, match=r"^device must be one of cpu\.$"):
        polyamp.capabilities("reference", "gpu")
    broken = BackendExamination(problem="it crashed")
    monkeypatch.setattr(public, "examine", lambda names, device: {"reference": broken})
    with pytest.raises(BackendError, match=r"^backend 'reference': it crashed$"):
        polyamp.capabilities("reference")

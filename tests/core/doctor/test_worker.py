"""The main program of a worker: which devices it measures, and what it reports, with a made-up backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polyamp.contract.backend import BackendInfo
from polyamp.doctor import worker
from polyamp.doctor.float8_measurement import MISSING
from polyamp.doctor.float8_times import Float8Capability
from polyamp.doctor.probe import ProbeDevice
from polyamp.doctor.worker_messages import DeviceMessage, EndMessage, ProbeJob, ProgressMessage, ReadyMessage
from polyamp.errors import ArgumentError
from tests.core.doctor.made_up import capabilities_of_a_gpu

DEVICES = [
    ProbeDevice("cuda:0", "cuda", "NVIDIA H100"),
    ProbeDevice("cuda:1", "cuda", "NVIDIA H100"),
    ProbeDevice("cuda:2", "cuda", "Tesla T4"),
    ProbeDevice("CPU:0", "cpu", "CPU:0"),
]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the devices that are measured, of a backend with four."""
    names: list[str] = []
    probe = SimpleNamespace(devices=lambda: DEVICES)
    backend = SimpleNamespace(
        capability_probe=probe, info=lambda: BackendInfo("made", "1.5", tuple(device.name for device in DEVICES))
    )

    def measure(probe: Any, device: ProbeDevice, *, backend: str, version: str, on_progress: Any) -> Any:
        assert (backend, version) == ("made", "1.5")
        names.append(device.name)
        on_progress(1, 2)
        return capabilities_of_a_gpu()

    monkeypatch.setattr(worker.registry, "get", lambda name: backend)
    monkeypatch.setattr(worker, "measure", measure)
    return names


def run(wait: bool = True, **fields: Any) -> list[Any]:
    messages: list[Any] = []
    worker.run(ProbeJob(backend="made", **fields), messages.append, lambda: wait)
    return messages


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["cuda:0"]),
        ({"device": "cuda:1"}, ["cuda:1"]),
        ({"device": "cpu"}, ["CPU:0"]),
        ({"device": "CUDA"}, ["cuda:0"]),
        ({"all_devices": True}, ["cuda:0", "cuda:2", "CPU:0"]),
    ],
)
def test_the_devices_that_are_measured(measured: list[str], fields: dict[str, Any], expected: list[str]) -> None:
    messages = run(**fields)
    assert measured == expected
    assert messages[0] == ReadyMessage(version="1.5", devices=[each.name for each in DEVICES], measurable=True)
    each = [ProgressMessage(device=expected[0], done=1, total=2), DeviceMessage(capabilities=capabilities_of_a_gpu())]
    assert messages[1:3] == each
    assert messages[-1] == EndMessage()


def test_a_device_that_does_not_exist(measured: list[str]) -> None:
    message = r"^device must be one of cuda:0, .*, CPU:0, as made names them\. Received: device='cuda:7'\.$"
    with pytest.raises(ArgumentError, match=message):
        run(device="cuda:7")
    assert measured == []


def test_a_worker_whose_parent_is_gone_measures_nothing(measured: list[str]) -> None:
    assert [type(message) for message in run(wait=False)] == [ReadyMessage, EndMessage]
    assert measured == []


def test_products_in_8_bits_are_measured_where_they_are_asked_for(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run()[2].capabilities.float8 is None
    assert run(float8=True)[2].capabilities.float8 == MISSING
    backend = worker.registry.get("made")
    backend.float8_probe = "probe"
    found = Float8Capability(verdict="emulated")
    monkeypatch.setattr(
        worker, "measure_float8", lambda probe, device: (probe, device) == ("probe", DEVICES[1]) and found
    )
    assert run(float8=True, device="cuda:1")[2].capabilities.float8 == found

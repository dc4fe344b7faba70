"""Messages between the doctor and a worker process: JSON, one a line."""

from __future__ import annotations

from typing import Literal

import msgspec

from polyamp.doctor.device_capabilities import Capabilities


class ProbeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to measure. It begins when it reads a second line.

    Attributes:
        backend: name of the backend.
        device: a device; None for the default one.
        all_devices: measure each model of device once; then `device` is None.
        float8: measure products in 8 bits too.
    """

    backend: str
    device: str | None = None
    all_devices: bool = False
    float8: bool = False


class ReadyMessage(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The framework is imported.

    Attributes:
        version: the framework's version.
        devices: names of its devices, the default one first.
        measurable: whether the backend has a probe; if not, this is the last message.
    """

    version: str
    devices: list[str]
    measurable: bool


class ProgressMessage(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A part of a device's measurement is done."""

    device: str
    done: int
    total: int


class DeviceMessage(msgspec.Struct, frozen=True, kw_only=True, tag="device"):
    """A device was measured."""

    capabilities: Capabilities


class EndMessage(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The last message of a worker.

    Attributes:
        problem: what went wrong, in words; None if nothing did.
        kind: "argument" for a device that does not exist, "backend" for all else.
    """

    problem: str | None = None
    kind: Literal["argument", "backend"] = "backend"


ProbeMessage = ReadyMessage | ProgressMessage | DeviceMessage | EndMessage

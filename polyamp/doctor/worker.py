"""Main program of a worker process of the doctor: imports one framework and measures its devices on one core.

On one core the times of a CPU do not hang on how many cores other processes leave. Processor time is measured there.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from polyamp.contract import registry
from polyamp.doctor.device_measurement import OnProgress, measure
from polyamp.doctor.float8_measurement import MISSING, measure_float8
from polyamp.doctor.float8_probe import HasFloat8Probe
from polyamp.doctor.probe import CapabilityProbe, HasCapabilityProbe, ProbeDevice
from polyamp.doctor.worker_messages import (
    DeviceMessage,
    EndMessage,
    ProbeJob,
    ProbeMessage,
    ProgressMessage,
    ReadyMessage,
)
from polyamp.errors import ArgumentError, PolyampError
from polyamp.worker_processes import claim_stdio

_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS")
"""Environment variables with which libraries of CPU kernels read their number of threads, when they are loaded."""


def main() -> None:
    """Read a job, measure, and report."""
    channel = claim_stdio()
    job = channel.receive(ProbeJob)
    if job is None:
        return
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        run(job, channel.send, lambda: bool(channel.commands.readline()))
    except ArgumentError as error:
        channel.send(EndMessage(problem=str(error), kind="argument"))
    except PolyampError as error:
        channel.send(EndMessage(problem=str(error)))
    except Exception as error:  # noqa: BLE001  # whatever a broken framework raises is its line in the report
        traceback.print_exc()
        channel.send(EndMessage(problem=f"{type(error).__name__}: {error}"))


def run(job: ProbeJob, emit: Callable[[ProbeMessage], None], wait: Callable[[], bool]) -> None:
    """Import the backend and measure its devices.

    Args:
        job: what to measure.
        emit: sends a message.
        wait: returns at the signal to begin; False if it does not come.

    Raises:
        PolyampError: the backend cannot be imported, or the device does not exist.
    """
    backend = registry.get(job.backend)
    info = backend.info()
    measurable = isinstance(backend, HasCapabilityProbe)
    emit(ReadyMessage(version=info.version, devices=list(info.devices), measurable=measurable))
    if isinstance(backend, HasCapabilityProbe) and wait():
        probe = backend.capability_probe
        for device in _chosen_devices(job, probe):
            found = measure(
                probe,
                device,
                backend=job.backend,
                version=info.version,
                on_progress=_reporter(device.name, emit),
            )
            if job.float8:
                narrow = (
                    measure_float8(backend.float8_probe, device) if isinstance(backend, HasFloat8Probe) else MISSING
                )
                found = msgspec.structs.replace(found, float8=narrow)
            emit(DeviceMessage(capabilities=found))
    emit(EndMessage())


def _reporter(device: str, emit: Callable[[ProbeMessage], None]) -> OnProgress:
    return lambda done, total: emit(ProgressMessage(device=device, done=done, total=total))


def _chosen_devices(job: ProbeJob, probe: CapabilityProbe) -> Sequence[ProbeDevice]:
    devices = probe.devices()
    if job.all_devices:
        return list({device.label: device for device in reversed(devices)}.values())[::-1]
    if job.device is None:
        return devices[:1]
    word = job.device.lower()
    for device in devices:
        if word in (device.name.lower(), device.name.lower().partition(":")[0]):
            return [device]
    raise ArgumentError(
        f"device must be one of {', '.join(device.name for device in devices)}, as {job.backend} names them. Received: "
        f"device={job.device!r}."
    )


if __name__ == "__main__":
    main()

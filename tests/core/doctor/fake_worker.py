"""A worker process in the place of the doctor's, with a backend's name as what it does."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec

from polyamp.doctor.worker_messages import DeviceMessage, EndMessage, ProbeJob, ProgressMessage, ReadyMessage
from polyamp.worker_processes import claim_stdio
from tests.core.doctor.made_up import capabilities_of_a_gpu


def main() -> None:
    """Do what the job's backend says."""
    channel = claim_stdio()

    def emit(message: Any) -> None:
        channel.lines.write(msgspec.json.encode(message).decode() + "\n")
        channel.lines.flush()

    job = msgspec.json.decode(channel.commands.readline(), type=ProbeJob)
    if job.backend == "hangs":
        time.sleep(600)
    elif job.backend == "crashes":
        sys.exit("ImportError: libframework.so is broken")
    emit(ReadyMessage(version="1.0", devices=["cpu"], measurable=job.backend != "unmeasured"))
    if job.backend == "unmeasured":
        emit(EndMessage())
    elif channel.commands.readline():
        if job.backend == "argument":
            emit(EndMessage(problem=f"no device {job.device}", kind="argument"))
        else:
            emit(ProgressMessage(device="cuda:0", done=1, total=2))
            emit(DeviceMessage(capabilities=capabilities_of_a_gpu()))
            emit(EndMessage())


if __name__ == "__main__":
    main()

"""A worker process in the place of the doctor's, with a backend's name as what it does."""

from __future__ import annotations

import sys
import time

from polyamp.doctor.worker_messages import DeviceMessage, EndMessage, ProbeJob, ProgressMessage, ReadyMessage
from polyamp.worker_processes import claim_stdio
from tests.core.doctor.made_up import capabilities_of_a_gpu


def main() -> None:
    """Do what the job's backend says."""
    channel = claim_stdio()
    job = channel.receive(ProbeJob)
    assert job is not None
    if job.backend == "hangs":
        time.sleep(600)
    elif job.backend == "crashes":
        sys.exit("ImportError: libframework.so is broken")
    channel.send(ReadyMessage(version="1.0", devices=["cpu"], measurable=job.backend != "unmeasured"))
    if job.backend == "unmeasured":
        channel.send(EndMessage())
    elif channel.commands.readline():
        if job.backend == "argument":
            channel.send(EndMessage(problem=f"no device {job.device}", kind="argument"))
        else:
            channel.send(ProgressMessage(device="cuda:0", done=1, total=2))
            channel.send(DeviceMessage(capabilities=capabilities_of_a_gpu()))
            channel.send(EndMessage())


if __name__ == "__main__":
    main()

"""Starts the workers, leads them through their stages together, and gathers what they found. Called by `conftest`."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from tests import xla
from tests.porting.libraries import WORKERS

ROOT: Final = Path(__file__).parents[2]
TIMEOUT: Final = 400.0
"""Seconds for one stage of a worker, the start of its process included."""

Found = dict[tuple[str, ...], dict[str, Any]]


class Process:
    """One worker's process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if xla.known():
            environment.setdefault("XLA_FLAGS", xla.FLAGS)
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # `stop` closes it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.porting.worker", name, str(folder)],
            cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # `stop` closes the stream
            for line in self.process.stdout:
                self.answers.put(line)
        self.answers.put(None)

    def begin(self, stage: int) -> None:
        """Let it start a stage; `end` waits."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `end` sees that the process is gone
            self.process.stdin.write(f"{stage}\n")
            self.process.stdin.flush()

    def end(self, stage: int) -> tuple[Found, float, str]:
        """What the stage found, its seconds of processor time, and what went wrong with the process, if anything."""
        try:
            line = self.answers.get(timeout=TIMEOUT)
        except queue.Empty:
            return {}, 0.0, self._dead(f"no answer to stage {stage} within {TIMEOUT:g} s")
        if line is None:
            return {}, 0.0, self._dead(f"the process ended with status {self.process.wait()} in stage {stage}")
        with (self.folder / f"{self.name}-{stage}.pickle").open("rb") as file:
            return pickle.load(file), json.loads(line)["seconds"], ""

    def _dead(self, reason: str) -> str:
        self.process.kill()
        self.log.seek(0)
        tail = "\n".join(self.log.read().splitlines()[-25:])
        return f"the worker of {self.name}: {reason}\n{tail}"

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]  # both were asked for


class Findings:
    """What all workers found.

    Attributes:
        found: key -> record, see `worker`.
        broken: worker -> why its process did not do its work.
        seconds: (worker, stage) -> seconds of processor time.
    """

    def __init__(self) -> None:
        self.found: Found = {}
        self.broken: dict[str, str] = {}
        self.seconds: dict[tuple[str, int], float] = {}

    def of(self, *key: str) -> dict[str, Any]:
        """A record.

        Raises:
            AssertionError: it was not made, or with an error; says which.
        """
        record = self.found.get(key)
        assert record is not None, f"nothing was found for {key}. " + " ".join(self.broken.values())
        assert record["error"] is None, f"{key}: {record['error']}\n{record['traceback']}"
        return record


def work(folder: Path) -> Findings:
    """All stages of all workers, which run at the same time and wait for each other between stages."""
    findings = Findings()
    processes = {name: Process(name, folder) for name in WORKERS}
    try:
        for stage in (1, 2, 3):
            for process in processes.values():
                process.begin(stage)
            for name, process in list(processes.items()):
                found, seconds, broken = process.end(stage)
                findings.found |= found
                findings.seconds[name, stage] = seconds
                if broken:
                    findings.broken[name] = broken
                    processes.pop(name).stop()
    finally:
        for process in processes.values():
            process.stop()
    return findings

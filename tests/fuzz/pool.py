"""`Pool`: one worker process per framework, reused for all seeds, with a time limit for every job.

A worker that dies or hangs is a finding, and is started anew. Called by the command and the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tests import xla
from tests.fuzz.build_reference import can
from tests.fuzz.compare import as_one_batch, one_batch
from tests.fuzz.grammar import Description, walk
from tests.fuzz.worker import BUILDERS, Record

ROOT: Final = Path(__file__).parents[2]
TIMEOUT: Final = 300.0
"""Seconds for one job, the start of the process included."""


class Worker:
    """One framework's process."""

    def __init__(self, framework: str, *, quick: bool = True) -> None:
        self.framework = framework
        self.quick = quick
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.log: Any = None

    def start(self) -> None:
        """Start the process; it reads jobs as soon as its framework is imported."""
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
        )
        if self.quick:
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla.FLAGS}"
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # `stop` closes it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", self.framework],
            cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.answers = queue.Queue()
        threading.Thread(target=_read, args=(self.process.stdout, self.answers), daemon=True).start()

    def submit(self, job: dict[str, Any]) -> None:
        """Hand over a job; `result` waits for it."""
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `result` sees that the process has ended
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def result(self) -> Record:
        """The record of the oldest job that has none yet."""
        while True:
            try:
                line = self.answers.get(timeout=TIMEOUT)
            except queue.Empty:
                return self._dead(f"no answer within {TIMEOUT:g} s")
            if line is None:
                assert self.process is not None
                return self._dead(f"the process ended with status {self.process.wait()}")
            answer: Record = json.loads(line)
            if "ready" not in answer:
                return answer

    def _dead(self, reason: str) -> Record:
        self.log.seek(0)
        tail = "\n".join(self.log.read().splitlines()[-15:])
        self.stop()
        return {"error": f"{reason}\n{tail}"}

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.log):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]  # both were asked for
        self.process = None


def _read(stream: Any, answers: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError):  # `stop` closes the stream
        for line in stream:
            answers.put(line)
    answers.put(None)


class Pool:
    """Workers for some frameworks; also a context manager.

    Args:
        frameworks: their names; those without a process yet are started at their first job.
        together: let the frameworks work at the same time, instead of one after the other on one processor.
        quick: XLA's cheapest code.
    """

    def __init__(self, frameworks: Iterable[str] = BUILDERS, *, together: bool = False, quick: bool = True) -> None:
        self.workers = {name: Worker(name, quick=quick) for name in frameworks}
        self.together = together
        self.seconds = dict.fromkeys(self.workers, 0.0)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers.values():
            worker.stop()

    def train(
        self,
        description: Description,
        *,
        compiled: bool = False,
        every_baseline: bool = False,
        plants: dict[str, str] | None = None,
    ) -> tuple[dict[str, Record], dict[str, Record]]:
        """Records under the description's policy and under float32, by framework.

        Args:
            description: what to train.
            compiled: in TensorFlow as a traced graph, as users run it; otherwise op by op, which starts faster.
            every_baseline: train under float32 in every framework, not only in the cheapest.
            plants: framework -> fault.
        """
        able = [name for name in self.workers if name != "reference" or can(description)]
        records = self._all(able, description, None, compiled, plants or {})
        if description["policy"]["name"] in ("float32", "float64"):
            return records, records
        cheapest = [name for name in able if name != "reference"][:1]
        return records, self._all(able if every_baseline else cheapest, description, "float32", compiled, plants or {})

    def whole(self, description: Description, records: dict[str, Record], baselines: dict[str, Record]) -> list[str]:
        """What is wrong with windows whose micro-batches count unequally, in the cheapest framework (S8).

        Args:
            description: what was trained.
            records: what `train` returned.
            baselines: likewise.
        """
        single = one_batch(description)
        if single is None:
            return []
        name = next(name for name in baselines if name != "reference")
        found = self._all([name], single, None, False, {})[name]
        return [] if "error" in baselines[name] else as_one_batch(baselines[name], found)

    def _all(
        self, names: list[str], description: Description, policy: str | None, compiled: bool, plants: dict[str, str]
    ) -> dict[str, Record]:
        jobs = {
            name: {
                "description": description,
                "policy": policy,
                "compile": _compiles(name, description, compiled),
                "plant": plants.get(name),
            }
            for name in names
        }
        records: dict[str, Record] = {}
        if self.together:
            for name, job in jobs.items():
                self.workers[name].submit(job)
        for name, job in jobs.items():
            if not self.together:
                self.workers[name].submit(job)
            records[name] = self.workers[name].result()
            self.seconds[name] += records[name].get("seconds", 0.0)
        return records


def _compiles(name: str, description: Description, compiled: bool) -> bool | None:
    """The step's option, None for the framework's default. torch's compiler takes no recurrent layers,
    and a compiled step no overrides in mode "cast"."""
    if name == "torch" and compiled and description.get("python"):
        recurrent = any(layer["op"] in ("rnn", "gru") for layer in walk(description["layers"]))
        policy = description["policy"]
        cast = policy.get("mode") == "cast" and policy.get("overrides")
        return None if recurrent or cast or description["halves"] else True
    return False if name == "tensorflow" and not compiled else None

"""A temporary copy of the repository, in which files are changed and tests run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from tests.mutants.selection import ROOT, pytest_command

NO_TESTS: Final = 5
"""pytest's exit status where nothing was selected."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        status: pytest's exit status; None where the time was up.
        test: the first test that failed, "" where pytest names none.
        output: what it printed.
    """

    status: int | None
    test: str
    output: str

    @property
    def failed(self) -> bool:
        """Whether something noticed: a test that failed, an error while tests were collected, a crash, or time up."""
        return self.status not in (0, NO_TESTS)


class Sandbox:
    """A copy of what git tracks, and of new files that it does not ignore; removed at the end of a `with` block."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="polyamp-mutants-"))
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (root / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name)
        self._stamp = 0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the copy, and remove it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)

    @contextlib.contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """A file with other text inside the block. Its time of change is new each time: Python's compiled files go by
        it, in whole seconds, and by the size."""
        file = self.root / path
        before, times = file.read_bytes(), file.stat()
        self._stamp += 10
        try:
            file.write_text(text, encoding="utf-8")
            os.utime(file, (times.st_atime, times.st_mtime + self._stamp))
            yield
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def pytest(self, *arguments: str, variables: Mapping[str, str] | None = None, seconds: float = 600.0) -> Outcome:
        """Run pytest in the copy, in a process group of its own, which is ended with all that is in it."""
        paths = os.pathsep.join([str(self.root), str(self.root / "backends")])
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", **(variables or {})}
        with subprocess.Popen(
            pytest_command(*arguments),
            cwd=self.root,
            env={**environment, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            self._process = process
            try:
                output, _ = process.communicate(timeout=seconds)
                status: int | None = process.returncode
            except subprocess.TimeoutExpired:
                status, output = None, ""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                self._process = None
        summary = output.rpartition("short test summary info")[2]  # before it may stand that of a pytest in a test
        found = re.search(r"^(?:FAILED|ERROR) (\S+(?: [^-\s]\S*)*)", summary, re.MULTILINE)
        return Outcome(status, found[1] if found else "", output)

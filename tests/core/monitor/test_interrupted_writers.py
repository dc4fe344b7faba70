"""A process that is killed, interrupted or out of disk in the middle leaves files that can be read (S35)."""

from __future__ import annotations

import csv
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import polyamp
from polyamp.monitor.records import read_monitor_file
from polyamp.monitor.writers import CsvWriter, JsonLinesWriter
from tests.core.monitor.test_monitor import train

PROGRAM = """
import os, resource, signal, sys
sys.modules["tensorflow"] = None  # tensorboard imports it where it can
import polyamp
from polyamp.monitor.writers import CsvWriter, JsonLinesWriter, TensorBoardWriter
from tests.core.monitor.test_monitor import train

how = sys.argv[1]
writers = [JsonLinesWriter("run.jsonl"), CsvWriter("run.csv"), TensorBoardWriter("events")]
monitor = polyamp.Monitor(every=1, writers=writers)
train(monitor, 3)
monitor.flush()
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "interrupt":
    signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
shortest = os.path.getsize("run.csv")
resource.setrlimit(resource.RLIMIT_FSIZE, (shortest + 10, shortest + 10))  # there is room for a part of a row
train(monitor, 3)
monitor.close()
print(len(monitor.records))
"""

FAILED_WRITE = """
import sys, threading, time
sys.modules["tensorflow"] = None  # tensorboard imports it where it can
import polyamp
from polyamp.monitor.writers import TensorBoardWriter
from tensorboard.summary.writer import record_writer
from tests.core.monitor.test_monitor import train

def fail(self, data):
    raise OSError(27, "File too large")

monitor = polyamp.Monitor(every=1)
train(monitor, 1)
writer = TensorBoardWriter("events")
record_writer.RecordWriter.write = fail
threading.excepthook = lambda _: time.sleep(0.5)
try:
    for _ in range(100):  # tensorboard tells of an error at one of the next calls
        writer.write(monitor.records[0])
except OSError as error:
    print(f"{error.strerror}; {threading.active_count()} thread")
"""


def complete_events(folder: Path) -> list[bytes]:
    """The whole records of an event file: length, its checksum, data, their checksum."""
    (path,) = folder.iterdir()
    data, found = path.read_bytes(), []
    while len(data) >= 12:
        (length,) = struct.unpack("<Q", data[:8])
        if len(data) < 12 + length + 4:
            break
        found.append(data[12 : 12 + length])
        data = data[12 + length + 4 :]
    return found


@pytest.mark.parametrize("how", ["kill", "interrupt", "full"])
def test_s35_what_was_collected_can_be_read(how: str, tmp_path: Path) -> None:
    """Three records are there; of the three after them a full disk takes none, and the training goes on."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(Path(polyamp.__file__).parents[1])},
    )  # fmt: skip
    if how == "full":
        assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr
        for name in ("JsonLinesWriter", "CsvWriter", "TensorBoardWriter"):
            assert done.stderr.count(f"RuntimeWarning: {name} could not write (OSError: [Errno 27]") == 1, done.stderr
    else:
        assert done.returncode < 0, done.stderr
    found = read_monitor_file(tmp_path / "run.jsonl")
    assert [each.call for each in found.records] == [1, 2, 3]
    assert not found.torn
    with (tmp_path / "run.csv").open(newline="") as file:
        assert [row["call"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    assert sum(b"polyamp/loss_scale" in event for event in complete_events(tmp_path / "events")) == 3


def test_a_failed_write_waits_for_the_thread_of_tensorboard(tmp_path: Path) -> None:
    """A daemon thread that still prints its traceback aborts an interpreter that ends."""
    done = subprocess.run(
        [sys.executable, "-c", FAILED_WRITE], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(polyamp.__file__).parents[1])},
    )  # fmt: skip
    assert done.stdout == "File too large; 1 thread\n"


def test_records_after_close_are_appended(tmp_path: Path) -> None:
    """As of `with monitor:` around each epoch; the file was begun anew, without its header."""
    writers = [JsonLinesWriter(tmp_path / "run.jsonl"), CsvWriter(tmp_path / "run.csv")]
    monitor = polyamp.Monitor(every=1, writers=writers)
    for _ in range(2):
        with monitor:
            train(monitor, 2)
    assert [each.call for each in read_monitor_file(tmp_path / "run.jsonl").records] == [1, 2, 3, 4]
    with (tmp_path / "run.csv").open(newline="") as file:
        assert [row["call"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]

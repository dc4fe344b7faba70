"""The parts of `benchmarks/gpu.py` that need no framework: no GPU, device table, MFU, batch, checks, budget, rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
H100 = "NVIDIA H100 80GB HBM3"
GIB = 2.0**30


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_0(tmp_path: Path) -> None:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": str(tmp_path)}
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--json", str(path)],
        check=False, capture_output=True, text=True, env=variables,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith("nothing is measured: the NVIDIA driver ")
    assert not path.exists()


def test_the_driver_script_imports_no_framework() -> None:
    code = (
        "import benchmarks.gpu.driver, sys; print([m for m in ('torch', 'jax', 'flax', 'optax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_a_missing_framework_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import driver

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "flax" else object())
    assert driver.missing("torch") is None
    assert driver.missing("jax") == (
        "jax is left out, flax not being installed here: pip install 'jax[cuda12]' flax optax"
    )


# --- devices and MFU


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        (H100, "bfloat16", 989.4),
        (H100, "TF32", 494.7),
        (H100, "float32", 66.9),
        ("NVIDIA H100 PCIe", "float16", 756.0),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA A100-SXM4-80GB", "float16", 312.0),
        ("NVIDIA A100 80GB PCIe", "TF32", 156.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA GH200 480GB", "bfloat16", 989.5),
        ("NVIDIA GeForce RTX 4090", "float16", 165.2),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
    ],
)
def test_dense_peaks_by_the_drivers_names(device: str, precision: str, tera: float) -> None:
    from benchmarks.gpu.devices import peak_flops

    assert peak_flops(device, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "float32"),
        ("NVIDIA A10G", "float16"),  # not an A10
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float16"),
        ("NVIDIA GeForce RTX 3090 Ti", "float16"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "float16"),
        ("NVIDIA H100", "float16"),  # of which form?
        ("Tesla V100-SXM2-16GB", "bfloat16"),
        ("Tesla V100-SXM2-16GB", "TF32"),
    ],
)
def test_an_unknown_device_or_a_missing_unit_has_no_peak(device: str, precision: str) -> None:
    from benchmarks.gpu.devices import peak_flops

    assert peak_flops(device, precision) is None


def test_tensor_cores_are_faster_than_the_others_and_every_peak_has_a_source() -> None:
    from benchmarks.gpu.devices import PEAKS

    for _, peak in PEAKS:
        assert peak.float32 <= (peak.tf32 or peak.float32) <= peak.float16
        assert peak.bfloat16 in (None, peak.float16)
        assert peak.source


def test_mfu_is_palms_formula_computed_by_hand() -> None:
    from benchmarks.gpu.devices import flop_per_token, mfu, parameters
    from benchmarks.gpu.measurements import BLOCKS, GPT

    # 12 x (12 x 768^2 + 13 x 768); a head of 768 x 50304 and a norm of 2 x 768 more
    assert parameters(BLOCKS) == 85_054_464
    assert parameters(GPT) == 85_054_464 + 38_633_472 + 1_536
    # 6 x 85,054,464 + 12 x 12 x (12 x 64) x 1024
    assert flop_per_token(BLOCKS) == 510_326_784 + 113_246_208
    # 64 x 1024 tokens x 623,572,992 = 4.0866e13 FLOP in 0.1 s of 989.4e12 FLOP/s
    assert mfu(BLOCKS._replace(batch=64), 0.1, 989.4e12) == pytest.approx(0.41304, rel=1e-4)


# --- the batch


@pytest.mark.parametrize(
    ("limit", "size"), [(2.5 * GIB, 1), (47 * GIB, 64), (42.5 * GIB, 64), (42.0 * GIB, 32), (1e15, 1024)]
)
def test_the_batch_is_the_largest_power_of_two_that_fits(limit: float, size: int) -> None:
    from benchmarks.gpu.run_plan import fitting_batch

    found = fitting_batch(lambda batch: (1.8 + 0.63 * batch) * GIB, limit)
    assert found.size == size
    assert found.how == f"batch {size}: its float32 step by hand takes {(1.8 + 0.63 * size) * 1024:.0f} MiB"


def test_a_guess_that_does_not_fit_is_measured_and_halved() -> None:
    from benchmarks.gpu.run_plan import fitting_batch

    measured = []

    def needs(batch: int) -> float | None:
        measured.append(batch)
        return batch * GIB if batch <= 2 else None if batch > 8 else batch * 2 * GIB

    assert fitting_batch(needs, 20 * GIB).size == 8
    assert measured == [1, 2, 16, 8]


def test_no_batch_fits() -> None:
    from benchmarks.gpu.run_plan import fitting_batch

    with pytest.raises(MemoryError, match="a batch of 1 does not fit into 1024 MiB"):
        fitting_batch(lambda batch: None, GIB)


# --- the rows, of an engine whose figures are known


class KnownTraining:
    """Steps that take `seconds`, none of which are waited for."""

    def __init__(self, engine: KnownEngine, curve: list[float], seconds: float, peak: float) -> None:
        self.engine, self.curve, self.seconds, self.bytes = engine, curve, seconds, peak

    def losses(self, count: int) -> list[float]:
        assert len(self.curve) == count
        return self.curve

    def run(self, count: int) -> tuple[float, float]:
        self.engine.runs += 1
        return count * self.seconds, 0.1 * count * self.seconds

    def peak(self) -> float | None:
        return self.bytes

    def waits(self) -> Any:
        from benchmarks.gpu.measurements import Waits

        return Waits(0.0, "by a count")


class KnownEngine:
    """Of an H100: 16 bits are four times as fast as float32 and take half of its memory; polyamp takes 1% more time."""

    name = "known"

    def __init__(
        self, *, device: str = H100, wrong: tuple[str, ...] = (), broken: tuple[str, ...] = (), fits: int = 1024
    ) -> None:
        self.device, self.wrong, self.broken, self.fits = device, wrong, broken, fits
        self.runs = self.freed = 0

    def environment(self) -> dict[str, Any]:
        return {"device": self.device}

    def memory(self) -> float | None:
        return 80 * GIB

    def needs(self, workload: Any) -> float | None:
        return float(workload.batch * GIB)

    def build(self, workload: Any, precision: str, *, own: bool) -> KnownTraining:
        if workload.batch > self.fits:
            raise MemoryError("out of memory")
        if precision in self.broken:
            raise ValueError("no such kernel\nat line 7")
        narrow = precision in ("bfloat16", "float16")
        curve = [2.0, 1.9, 1.8, 1.7, float("nan") if precision in self.wrong and own else 1.6]
        return KnownTraining(
            self, curve, (0.05 if narrow else 0.2) * (1.01 if own else 1.0), (20 if narrow else 40) * GIB
        )

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def free(self) -> None:
        self.freed += 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def measure(engine: KnownEngine, **settings: Any) -> dict[str, Any]:
        from benchmarks.gpu import run_plan

        monkeypatch.setattr(run_plan, "plan", lambda settings: [(run_plan.BLOCKS, ("float32", "bfloat16"))])
        entries = run_plan.measure(engine, run_plan.Settings(budget=1e9)._replace(**settings), lambda entries: None)
        return {entry.name: entry for entry in entries}

    return measure


def test_targets_are_held_against_interleaved_rounds(measured: Callable[..., dict[str, Any]]) -> None:
    from benchmarks.common import results

    found = measured(KnownEngine())
    title = "GPT-2 small's blocks, bfloat16"
    judged = {name: (entry.target, results.holds(entry)) for name, entry in found.items() if entry.target is not None}
    assert judged == {
        "GPT-2 small's blocks, float32: host waits in a step": (0.0, True),
        title: (1.02, True),
        f"{title}: host waits in a step": (0.0, True),
        f"{title} over float32": (1 / 3, True),
        f"{title} over float32: peak memory": (0.65, True),
    }
    assert found[f"{title} over float32"].note == "4.00 times as fast"
    assert len(found[title].own.values) == len(found[title].base.values) == 9
    assert found[title].distance == 0.0
    assert "the host is free after 10% of polyamp's step" in found[title].note
    assert found[f"{title}: peak memory"].own.values == [20 * 1024]
    assert found[f"{title}: host waits in a step"].note == "by a count; by hand 0"
    # 32 x 1024 x 623,572,992 FLOP in 0.05 s of 989.4e12
    assert found[f"{title}: MFU"].base.median == pytest.approx(41.304, rel=1e-4)
    assert found["GPT-2 small's blocks, float32"].note.startswith(
        "batch 32: its float32 step by hand takes 32768 MiB of 81920"
    )


@pytest.mark.parametrize("settings", [{"quick": True}, {"rehearse": True}])
def test_short_runs_and_rehearsals_are_held_against_no_target(
    measured: Callable[..., dict[str, Any]], settings: dict[str, bool]
) -> None:
    found = measured(KnownEngine(), **settings)
    assert {entry.target for entry in found.values()} == {None}
    assert "not chosen by memory" in found["GPT-2 small's blocks, float32"].note


def test_what_is_wrong_has_no_figure(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured(KnownEngine(wrong=("bfloat16",)))
    entry = found.pop("GPT-2 small's blocks, bfloat16")
    assert (entry.own.values, entry.base.values, entry.target) == ([], [], None)
    assert entry.note == (
        "not timed: the losses of polyamp, 2 1.9 1.8 1.7 nan, are nan from those of float32 by hand, "
        "2 1.9 1.8 1.7 1.6; 0.02 would do"
    )
    assert all("bfloat16" not in name for name in found)


def test_an_unknown_device_has_no_mfu_and_says_so(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured(KnownEngine(device="NVIDIA H7"))
    note = "no MFU, since benchmarks/gpu/devices.py has no bfloat16 peak of 'NVIDIA H7'"
    assert note in found["GPT-2 small's blocks, bfloat16"].note
    assert not any("MFU" in name for name in found)


def test_a_batch_that_runs_out_of_memory_is_halved(measured: Callable[..., dict[str, Any]]) -> None:
    engine = KnownEngine(fits=16)
    found = measured(engine)
    assert found["GPT-2 small's blocks, float32"].note.startswith("batch 16, since twice as much ran out of memory")
    assert engine.freed == 3


def test_a_workload_that_does_not_fit_at_all_is_named(measured: Callable[..., dict[str, Any]]) -> None:
    engine = KnownEngine()
    engine.needs = lambda workload: None  # type: ignore[method-assign]  # an engine with too little memory
    (entry,) = measured(engine).values()
    assert entry.note == "left out: a batch of 1 does not fit into 49152 MiB of device memory"


def test_what_fails_is_printed_and_named_and_the_rest_goes_on(
    measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(KnownEngine(broken=("float32",)))
    failed = found["GPT-2 small's blocks, float32"]
    assert (failed.own.values, failed.note) == ([], "failed: ValueError: no such kernel")
    assert "at line 7" in capsys.readouterr().err
    assert len(found["GPT-2 small's blocks, bfloat16"].own.values) == 9


def test_a_batch_of_1_that_runs_out_of_memory_is_named(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured(KnownEngine(fits=0))
    assert {entry.note for entry in found.values()} == {"failed: MemoryError: out of memory"}


def test_a_rehearsal_is_at_tiny_sizes_whether_quick_or_not() -> None:
    from benchmarks.gpu.run_plan import FULL, Settings, plan

    sizes = {quick: [each for each, _ in plan(Settings(quick=quick, rehearse=True))] for quick in (False, True)}
    assert [each.name for each in sizes[False]] == [each.name for each in FULL] == ["block", "mlp", "gpt", "resnet"]
    assert sizes[True] == sizes[False][:2]
    assert max(each.width for each in sizes[False]) == 32


def test_every_workload_is_measured_in_every_precision() -> None:
    from benchmarks.gpu.run_plan import Settings, plan

    assert {precisions for _, precisions in plan(Settings())} == {("float32", "bfloat16", "float16", "TF32")}


def test_rows_for_which_no_time_is_left_are_named(measured: Callable[..., dict[str, Any]]) -> None:
    engine = KnownEngine()
    found = measured(engine, budget=0.0)
    assert [(name, entry.note) for name, entry in found.items()] == [
        ("GPT-2 small's blocks", "left out: the 0 s of --budget were over")
    ]
    assert engine.runs == 0


# --- the driver script


def script(tmp_path: Path, body: str) -> None:
    (tmp_path / "torch_side.py").write_text(
        f"import os, pathlib, sys, time\nfrom benchmarks.common import results\n"
        f"path = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        f"def keep(environment, entries):\n"
        f"    results.write(path, results.Results(script='torch_side.py', environment=environment, settings={{}},"
        f" entries=entries, seconds=1.0))\n{body}\n"
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    from benchmarks.gpu import driver

    monkeypatch.setattr(driver, "FOLDER", tmp_path)
    monkeypatch.setattr(driver, "no_gpu", lambda: None)
    monkeypatch.setattr(driver, "missing", lambda framework: None)
    written = ["--json", str(tmp_path / "all.json"), "--markdown", str(tmp_path / "all.md")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--framework", "torch", *written])
    return driver.main


ENTRY = "results.Entry(section='workloads', name='step', unit='s', own=results.Side('polyamp', [0.5]))"


def test_the_framework_stands_before_each_row(
    driver: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.common import results

    script(tmp_path, f"keep({{'torch': '2.x'}}, [{ENTRY}])")
    assert driver() == 0
    found = results.read(tmp_path / "all.json")
    assert [entry.name for entry in found.entries] == ["torch: step"]
    assert found.environment == {"torch": {"torch": "2.x"}}
    assert "torch: step" in capsys.readouterr().out
    assert (tmp_path / "all.md").read_text().startswith("- torch 2.x\n\n### Workloads")
    assert "| torch: step |" in (tmp_path / "all.md").read_text()


def test_a_build_without_cuda_is_left_out_and_named(
    driver: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, "keep({'missing': 'torch 2.x+cpu is a build without CUDA'}, [])")
    assert driver() == 0
    assert "torch is left out: torch 2.x+cpu is a build without CUDA" in capsys.readouterr().out


def test_a_process_that_fails_is_named_and_its_rows_are_kept(
    driver: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, f"keep({{'torch': '2.x'}}, [{ENTRY}])\nsys.exit(7)")
    assert driver() == 1
    out = capsys.readouterr().out
    assert "torch: step" in out
    assert "torch failed: its process ended with status 7" in out


def test_a_run_that_is_ended_leaves_its_rows_and_no_process_behind(tmp_path: Path) -> None:
    script(tmp_path, f"keep({{'torch': '2.x'}}, [{ENTRY}])\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    path = tmp_path / "all.json"
    code = (
        "import pathlib, sys\nfrom benchmarks.gpu import driver\n"
        f"driver.FOLDER, driver._GLANCE = pathlib.Path({str(tmp_path)!r}), 0.1\n"
        "driver.no_gpu, driver.missing = lambda: None, lambda framework: None\n"
        f"sys.argv = ['gpu.py', '--framework', 'torch', '--json', {str(path)!r}]\n"
        "sys.exit(driver.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        for _ in range(600):
            if path.exists():
                break
            time.sleep(0.05)
        driver.terminate()
    assert driver.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    from benchmarks.common import results

    assert [entry.name for entry in results.read(path).entries] == ["torch: step"]

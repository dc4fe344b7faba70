"""`polyamp.float8_plan`: decisions, overrides, report, files and command, from given times and a made-up backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import polyamp
from polyamp import ArgumentError, Float8, ModelError, Policy, Recipe, UnsupportedError
from polyamp.cli import app as cli
from polyamp.doctor import float8_plan as plan_module
from polyamp.doctor.fastest_times import TimingLimits
from polyamp.doctor.float8_plan_data import decide_layers
from polyamp.doctor.float8_plan_page import float8_plan_page
from polyamp.doctor.float8_plan_report import Float8PlanReport
from polyamp.doctor.float8_probe import ModelProduct, ModelProducts, ProductPrograms, ProductShape
from polyamp.doctor.float8_times import ProductTime, limits_of, measure_product
from polyamp.doctor.probe import ProbeDevice
from polyamp.reference import MLP
from polyamp.report_page.html_page import render_html

SMALL, LARGE, EQUAL = ProductShape(1024, 2048, 1024), ProductShape(4096, 8192, 16384), ProductShape(64, 64, 64)
MILLISECONDS = {SMALL: (0.8, 1.0), LARGE: (13.9, 10.0), EQUAL: (1.0, 1.0)}
"""The first two ratios are those of published tables of an H100: 0.80 and 1.39."""
RECIPE = Recipe(policy="mixed_float8", optimizer=polyamp.sgd(0.1))


def times() -> dict[ProductShape, ProductTime]:
    return {
        shape: ProductTime(**shape._asdict(), bfloat16_ms=wide, float8_ms=narrow)
        for shape, (wide, narrow) in MILLISECONDS.items()
    }


def report(*products: tuple[str, ProductShape, int], emulated: bool = False, least_speed: float = 1.0) -> Any:
    layers = decide_layers(
        [ModelProduct(*each) for each in products], times(), emulated=emulated, least_speed=least_speed
    )
    return Float8PlanReport(
        backend="torch",
        policy="p",
        device="cuda:0",
        device_label="NVIDIA H100",
        emulated=emulated,
        compiled=True,
        least_speed=least_speed,
        layers=layers,
    )


@pytest.mark.parametrize(
    ("products", "expected"),
    [
        ([("a", LARGE, 1)], {}),
        ([("a", SMALL, 1), ("b", LARGE, 1)], {"a": "bfloat16"}),
        ([("a", EQUAL, 3)], {}),  # as fast is enough: it saves memory
        ([("", SMALL, 1)], {"*": "bfloat16"}),
        ([("a", SMALL, 1), ("a/b/c", LARGE, 1)], {"a": "bfloat16", "a/b/c": "float8"}),
        ([("", SMALL, 1), ("b", LARGE, 1), ("c", SMALL, 1)], {"*": "bfloat16", "c": "bfloat16", "b": "float8"}),
        ([("a", SMALL, 1), ("ab", LARGE, 1)], {"a": "bfloat16"}),
        ([("a", SMALL, 1), ("a", LARGE, 1)], {}),  # a module is decided as a whole, by the sum of its products
        ([("a", SMALL, 20), ("a", LARGE, 1)], {"a": "bfloat16"}),
    ],
)
def test_slower_modules_stay_in_bfloat16_and_their_faster_submodules_do_not(
    products: list[tuple[str, ProductShape, int]], expected: dict[str, str]
) -> None:
    found = report(*products)
    assert found.overrides == expected
    policy = found.recipe(RECIPE).policy
    assert policy.overrides == expected
    plan = policy.plan(["", *(row.module for row in found.layers if row.module)])
    for row in found.layers:
        assert (plan.at(row.module).float8 is not None) is (row.decision == "float8")
        assert plan.at(row.module).dtype == "bfloat16"


def test_the_least_speed_is_the_ratio_that_decides() -> None:
    products = [("a", LARGE, 2), ("b", SMALL, 1)]
    assert report(*products, least_speed=1.38).overrides == {"b": "bfloat16"}
    found = report(*products, least_speed=1.4)
    assert found.overrides == {"a": "bfloat16", "b": "bfloat16"}
    assert found.verdict().startswith("No layer is 1.4 times as fast in 8 bits as in bfloat16: train with Policy(")
    assert report(*products, least_speed=0.8).overrides == {}


def test_the_report_has_the_times_of_a_pass_and_a_row_for_each_module_and_shape() -> None:
    found = report(("blocks/0", SMALL, 2), ("blocks/1", LARGE, 1))
    assert found.milliseconds == pytest.approx({"bfloat16": 15.5, "float8": 12.0, "plan": 11.6})
    text = str(found)
    assert text.startswith("1 of 2 layers are at least as fast in 8 bits; 1 stay in bfloat16. All products of a pass: ")
    assert "15.5 ms in bfloat16, 12 ms in 8 bits, 11.6 ms with the plan." in text
    assert "torch, p; cuda:0 (NVIDIA H100), compiled" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["blocks/0", "1024x2048x1024", "2", "0.8", "1", "0.80", "bfloat16"] in rows
    assert ["blocks/1", "4096x8192x16384", "1", "13.9", "10", "1.39", "float8"] in rows
    assert text.endswith("overrides = {'blocks/0': 'bfloat16'}")


def test_emulated_times_decide_nothing() -> None:
    found = report(("a", SMALL, 1), ("b", LARGE, 1), emulated=True)
    assert [row.decision for row in found.layers] == ["none", "none"]
    assert (found.overrides, set(found.milliseconds)) == ({}, {"bfloat16", "float8"})
    assert found.verdict().startswith("Emulated: ")
    assert float8_plan_page(found).word == "emulated"
    with pytest.raises(
        UnsupportedError, match=r"^recipe: the times are of emulated products on 'cuda:0', which decide"
    ):
        found.recipe(RECIPE)


def test_a_model_without_products_in_8_bits() -> None:
    found = report()
    assert str(found).startswith("No product of the model runs in 8 bits; polyamp.explain lists its products.")
    assert (found.overrides, found.recipe(RECIPE)) == ({}, RECIPE)
    assert float8_plan_page(found).word == "no products"


def test_the_recipe_keeps_its_own_overrides_unless_they_decide_otherwise() -> None:
    found = report(("a/b", SMALL, 1), ("lm_head", LARGE, 1))
    own = {"lm_head": "float8", "a": "float8"}
    recipe = RECIPE.replace(policy=RECIPE.policy.replace(overrides=own))
    assert found.recipe(recipe).policy.overrides == {**own, "a/b": "bfloat16"}
    recipe = RECIPE.replace(policy=RECIPE.policy.replace(overrides={"a/b": "float8"}))
    assert found.recipe(recipe).policy.overrides == {"a/b": "bfloat16"}
    for glob, module in (({"**/b": "float8"}, "a/b"), ({"lm_*": "bfloat16"}, "lm_head")):
        recipe = RECIPE.replace(policy=RECIPE.policy.replace(overrides=glob))
        with pytest.raises(ArgumentError, match=rf"decides about the module '{module}', for which the plan says"):
            found.recipe(recipe)
    with pytest.raises(ArgumentError, match=r"^recipe must have a policy with products in 8 bits\. Received: "):
        found.recipe(RECIPE.replace(policy="mixed_bfloat16"))


def test_the_files_have_the_plan(tmp_path: Path) -> None:
    found = report(("a", SMALL, 1), ("b", LARGE, 1))
    saved = json.loads(found.save(tmp_path / "plan.json").read_text())
    assert saved["overrides"] == {"a": "bfloat16"}
    assert saved["milliseconds"]["plan"] == pytest.approx(10.8)
    rows = [(row["module"], row["inputs"], row["decision"]) for row in saved["layers"]]
    assert rows == [("a", 2048, "bfloat16"), ("b", 8192, "float8")]
    assert found.save(tmp_path / "plan.html").read_text() == render_html(float8_plan_page(found))
    assert "4096x8192x16384" in render_html(float8_plan_page(found))
    with pytest.raises(ArgumentError, match=r"\.html or \.png"):
        found.save(tmp_path / "plan.txt")


class MadeUpProbe:
    """A backend with two shapes, one of which is faster in 8 bits, on a clock of its own."""

    name = "made"
    always_compiles = False

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[Any] = []
        self.float8_probe = self.capability_probe = self

    def devices(self) -> list[ProbeDevice]:
        return [ProbeDevice("cpu", "cpu", "cpu"), ProbeDevice("gpu:1", "gpu", "Made up 1")]

    def products(self, target: Any, policy: Policy, *inputs: Any) -> ModelProducts:
        self.asked.append((target, policy, inputs))
        return ModelProducts(
            "gpu:1",
            [ModelProduct(*each) for each in (("a", SMALL, 1), ("b", LARGE, 1), ("c", SMALL, 1))],
            self.programs,
        )

    def programs(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        self.asked.append((shape, float8, device, compiled))
        return ProductPrograms(*(self._program(each) for each in MILLISECONDS[shape]))

    def _program(self, milliseconds: float) -> Callable[[int], None]:
        runs: list[int] = []

        def run(count: int) -> None:
            runs.append(count)
            self.now += (milliseconds / 1000 if len(runs) > 1 else 5.0) * count  # the first run compiles

        return run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> MadeUpProbe:
    probe = MadeUpProbe()
    monkeypatch.setattr(plan_module.registry, "get", lambda name: probe)
    monkeypatch.setattr("polyamp.doctor.fastest_times.time.perf_counter", lambda: probe.now)
    monkeypatch.setattr(plan_module, "HasFloat8Probe", MadeUpProbe)
    monkeypatch.setattr(plan_module, "HasCapabilityProbe", MadeUpProbe)
    monkeypatch.setitem(measure_product.__kwdefaults__, "clock", lambda: probe.now)
    return probe


def test_each_shape_is_measured_once_on_the_models_device(made: MadeUpProbe) -> None:
    found = polyamp.float8_plan("model", "mixed_float8", "x", compiled=True, backend="made")
    policy = Policy("mixed_float8")
    measured = [(shape, policy.float8, "gpu:1", True) for shape in (SMALL, LARGE)]
    assert made.asked == [("model", policy, ("x",)), *measured]
    assert [(row.module, row.decision) for row in found.layers] == [
        ("a", "bfloat16"),
        ("b", "float8"),
        ("c", "bfloat16"),
    ]
    assert found.layers[1].bfloat16_ms == pytest.approx(13.9)
    assert (found.device, found.device_label, found.compiled, found.emulated) == ("gpu:1", "Made up 1", True, False)
    emulated = polyamp.float8_plan("model", Policy("mixed_float8", float8=Float8(emulate=True)), "x", backend="made")
    assert (emulated.emulated, emulated.compiled, emulated.overrides) == (True, False, {})
    made.always_compiles = True
    assert polyamp.float8_plan("model", "mixed_float8", "x", backend="made").compiled is True


def test_a_program_runs_once_before_its_time_counts() -> None:
    runs: list[str] = []
    programs = ProductPrograms(lambda n: runs.append("wide"), lambda n: runs.append("narrow"))
    measure_product(
        lambda *_, **__: programs, SMALL, Float8(), "gpu:1", compiled=True, limits=TimingLimits(0.0, 0.0, 1, 1)
    )
    assert runs == ["wide", "narrow"] * 3  # compilation, a sample for the length of a run, a round of samples


def test_an_accelerator_is_measured_for_longer_than_a_cpu() -> None:
    assert limits_of("cpu") == TimingLimits(0.001, 0.1)
    assert limits_of("cuda") == limits_of("gpu") == TimingLimits(0.01, 0.2)


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), float("inf"), True, "fast"])
def test_a_least_speed_that_is_none(made: MadeUpProbe, given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^least_speed must be a positive number, such as 1\.1\. Received: "):
        polyamp.float8_plan("model", "mixed_float8", least_speed=given, backend="made")


def test_arguments_that_are_refused(made: MadeUpProbe) -> None:
    with pytest.raises(ArgumentError, match=r"^policy must have products in 8 bits\. Received: .*mixed_float8'\)\.$"):
        polyamp.float8_plan("model", "mixed_bfloat16", backend="made")
    with pytest.raises(ModelError, match=r"^float8_plan takes a model\. Received: a SimpleNamespace\. Pass its model"):
        polyamp.float8_plan(SimpleNamespace(scale_state=1), "mixed_float8", backend="made")


def test_a_backend_without_products_in_8_bits() -> None:
    with pytest.raises(UnsupportedError, match=r"^float8_plan: the reference backend of this version measures no pro"):
        polyamp.float8_plan(MLP.random([16, 16], seed=0), "mixed_float8", backend="reference")


FILE = """
import polyamp

model, batches = "model", ["x", "y"]
loss_fn = "loss_fn"
recipe = polyamp.Recipe(policy="mixed_float8", optimizer=polyamp.sgd(0.1))
"""


def test_the_command_writes_the_recipe(made: MadeUpProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module.lookup, "backend_of_call", lambda target, inputs: made)
    file = tmp_path / "training.py"
    file.write_text(FILE)
    written = tmp_path / "recipe.toml"
    result = CliRunner().invoke(cli.app, ["float8-plan", str(file), "--write", str(written), "--compiled"])
    assert result.exit_code == 0, result.output
    assert "overrides = {'a': 'bfloat16', 'c': 'bfloat16'}" in result.output
    assert Recipe.load(written).policy.overrides == {"a": "bfloat16", "c": "bfloat16"}
    assert made.asked[0] == ("loss_fn", Policy("mixed_float8"), ("model", "x"))
    assert made.asked[1][3] is True
    result = CliRunner().invoke(cli.app, ["float8-plan", str(file), "--json", "--least-speed", "2"])
    assert json.loads(result.stdout)["least_speed"] == 2.0
    file.write_text(FILE.replace('["x", "y"]', "[]"))
    result = CliRunner().invoke(cli.app, ["float8-plan", str(file)])
    assert (result.exit_code, "batches must be a list of at least one batch." in result.stderr) == (2, True)
    file.write_text(FILE.replace('"mixed_float8"', 'polyamp.Policy("mixed_float8", float8={"emulate": True})'))
    assert CliRunner().invoke(cli.app, ["float8-plan", str(file)]).exit_code == 1
    result = CliRunner().invoke(cli.app, ["float8-plan", str(file), "--write", str(written)])
    assert (result.exit_code, "which decide nothing" in result.stderr) == (2, True)


def test_a_row_is_plain_data() -> None:
    row = report(("a", LARGE, 2)).layers[0]
    assert msgspec.structs.asdict(row) == {
        **LARGE._asdict(),
        "bfloat16_ms": 13.9,
        "float8_ms": 10.0,
        "module": "a",
        "count": 2,
        "decision": "float8",
    }
    assert row.speed == pytest.approx(1.39)

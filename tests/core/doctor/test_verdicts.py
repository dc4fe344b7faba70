"""Verdicts and recommendations from made-up measurements of GPUs and CPUs."""

from __future__ import annotations

import pytest

import polyamp
from polyamp.doctor.measurements import DtypeMeasurement, OperationTimes
from polyamp.doctor.recommendation import recommend
from polyamp.doctor.verdicts import judge
from tests.core.doctor import made_up
from tests.core.doctor.made_up import device, measurement

DISGUISE = "float32 in disguise"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("H100", ["native", "native", "native", "native", "native", "fails"]),
        ("T4", ["native", DISGUISE, "emulated", "native", "fails", "missing"]),
        ("AMX", ["native", DISGUISE, "native", "emulated", "missing", "missing"]),
        ("OLD_CPU", ["native", "missing", "emulated", "emulated", "missing", "missing"]),
        ("XLA_CPU", ["native", DISGUISE, DISGUISE, "emulated", "missing", "missing"]),
    ],
)
def test_what_a_dtype_is(machine: str, expected: list[str]) -> None:
    assert [found.verdict for found in judge(getattr(made_up, machine)).values()] == expected


@pytest.mark.parametrize("noise", [0.85, 1.15])
@pytest.mark.parametrize("machine", ["H100", "T4", "AMX", "OLD_CPU", "XLA_CPU"])
def test_noise_moves_no_verdict_and_no_recommendation(machine: str, noise: float) -> None:
    """All dtypes but float32 are 15 % slower or faster than they are."""
    measured = getattr(made_up, machine)
    noisy = {name: found if name == "float32" else slower(found, noise) for name, found in measured.items()}
    before, after = judge(measured), judge(noisy)
    assert [each.verdict for each in after.values()] == [each.verdict for each in before.values()]
    assert recommend(after, "").code == recommend(before, "").code


def slower(found: DtypeMeasurement, factor: float) -> DtypeMeasurement:
    times = {
        name: OperationTimes(
            forward=each.forward and each.forward * factor,
            forward_backward=each.forward_backward and each.forward_backward * factor,
            problem=each.problem,
        )
        for name, each in found.operations.items()
    }
    return DtypeMeasurement(
        exists=found.exists,
        operations=times,
        accumulation_error=found.accumulation_error,
        rounding_error=found.rounding_error,
    )


def test_a_fused_cast_on_hardware_for_the_dtype_is_no_disguise() -> None:
    """XLA may return a native product in float32 where the program casts it."""
    found = judge(device(bfloat16=measurement("bfloat16", 9.0, error=1e-8)))["bfloat16"]
    assert found.verdict == "native"


@pytest.mark.parametrize(("speed", "verdict"), [(1.3, DISGUISE), (2.4, "native")])
def test_an_unrounded_product_is_native_where_it_is_fast(speed: float, verdict: str) -> None:
    found = judge(device(bfloat16=measurement("bfloat16", speed, error=1e-8)))["bfloat16"]
    assert found.verdict == verdict


def test_tf32_that_rounds_is_native_at_any_speed() -> None:
    found = judge(device(tf32=measurement("tf32", 1.2)))["tf32"]
    assert (found.verdict, found.reason) == ("native", "1.2 times float32's speed")


def test_an_8_bit_product_that_widens_its_inputs_is_emulated() -> None:
    made = device(bfloat16=measurement("bfloat16", 12.0), float8_e4m3fn=measurement("float8_e4m3fn", 11.0))
    found = judge(made)["float8_e4m3fn"]
    assert (found.verdict, found.reason) == ("emulated", "11 times float32's speed, and 16 bits have 12 times")


def test_narrow_sums_are_named() -> None:
    found = judge(device(float16=measurement("float16", 8.0, error=9e-3)))["float16"]
    assert found.verdict == "native"
    assert found.reason == "8 times float32's speed; sums are accumulated in less than float32"


def test_what_was_too_slow_to_be_measured_is_emulated() -> None:
    found = judge(device(float8_e4m3fn=DtypeMeasurement(exists=True, slowdown=585.0)))["float8_e4m3fn"]
    assert (found.verdict, found.reason) == ("emulated", "a small product takes 585 times float32's time")
    assert found.speed == pytest.approx(1 / 585)


def test_without_float32_nothing_has_a_speed() -> None:
    made = {**device(float16=measurement("float16", 1.0)), "float32": made_up.failure("no")}
    found = judge(made)
    assert (found["float32"].verdict, found["float32"].reason) == ("fails", "no")
    assert (found["float16"].verdict, found["float16"].speed) == ("fails", None)


@pytest.mark.parametrize(
    ("machine", "policy", "words"),
    [
        ("H100", "mixed_bfloat16", "bfloat16 is native here: 12 times float32's speed in training"),
        ("T4", "mixed_float16", "float16 is native here: 5.5 times float32's speed in training over matmul, "),
        ("AMX", "mixed_bfloat16", "Slower than float32 in training: attention (0.45 times)"),
        (
            "OLD_CPU",
            "float32",
            "trains faster here. float16 is emulated: 0.004 times float32's speed. bfloat16 is emulated: 0.3",
        ),
        ("XLA_CPU", "float32", "bfloat16 is float32 in disguise: products have float32's precision"),
    ],
)
def test_the_recommended_policy(machine: str, policy: str, words: str) -> None:
    found = recommend(judge(getattr(made_up, machine)), "switch()")
    assert eval(found.code, {"polyamp": polyamp}) == polyamp.Policy(policy)
    assert words in found.reason


def test_float16_is_recommended_with_what_is_wrong_with_bfloat16() -> None:
    reason = recommend(judge(made_up.T4), "").reason
    assert "bfloat16 is emulated. A Recipe with this policy scales the loss." in reason


def test_a_native_dtype_without_gradients_is_not_recommended() -> None:
    made = device(tf32=measurement("tf32", 6.0), float16=measurement("float16", 8.0))
    made["float16"].operations["attention"] = OperationTimes(forward=1e-4, problem="no")
    found = recommend(judge(made), "switch()")
    assert found.code == 'polyamp.Policy("float32")'
    assert "float16 is native, but no gradients of attention run." in found.reason
    assert "bfloat16 is missing: this version of the framework does not have it." in found.reason
    assert "TF32 is native: 6 times float32's speed with switch()." in found.reason


def test_a_native_dtype_that_trains_slowly_is_not_recommended() -> None:
    slow = {"attention": 0.1, "convolution": 0.5}
    found = recommend(judge(device(bfloat16=measurement("bfloat16", 2.0, operations=slow))), "")
    assert found.code == 'polyamp.Policy("float32")'
    assert "bfloat16: training over matmul, convolution and attention has 0.46 times float32's speed." in found.reason


def test_an_operation_that_was_left_out_says_nothing() -> None:
    """It counts for no dtype then: float16, whose slow operation was left out, is not the faster one for it."""
    made = device(
        bfloat16=measurement("bfloat16", 12.0, operations={"attention": 1.2}), float16=measurement("float16", 12.0)
    )
    made["float16"].operations["attention"] = OperationTimes(problem="not measured", left_out=True)
    found = recommend(judge(made), "")
    assert found.code == 'polyamp.Policy("mixed_bfloat16")'
    assert "12 times float32's speed in training over matmul and convolution. It" in found.reason

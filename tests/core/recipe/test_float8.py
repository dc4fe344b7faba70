"""`mixed_float8` and `Float8` (S36): spelling, contradictions, heads, overrides; the guide's blocks."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyamp
from polyamp import Float8, Policy, PolicyError, UnsupportedError
from polyamp.recipe.float8 import HEAD_NAMES, LARGEST_EXPONENTS, SCALINGS, accepts_sizes
from polyamp.reference import MLP
from polyamp.reference import float8 as reference
from tests.fixtures import float8_values

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "float8.md").read_text(encoding="utf-8")
POLICY = Policy("mixed_float8")


def test_the_word_is_a_mixed_policy_in_bfloat16() -> None:
    assert (POLICY.param, POLICY.compute, POLICY.output, POLICY.float8) == ("float32", "bfloat16", "float32", Float8())
    assert POLICY == Policy("mixed_bfloat16", float8=Float8()) != Policy("mixed_bfloat16")
    assert not POLICY.needs_loss_scaling
    assert POLICY.is_mixed


@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        POLICY.replace(float8=Float8(gradients="float8_e4m3fn", emulate=True)),
        POLICY.replace(float8=Float8(scaling="block32", emulate=True)),
    ],
)
def test_a_policy_survives_its_forms(policy: Policy) -> None:
    assert Policy(**policy.to_dict()) == policy == copy.deepcopy(policy) == eval(repr(policy))
    made = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    assert polyamp.Recipe.from_toml(made.to_toml()) == made == polyamp.Recipe.from_json(made.to_json())


def test_a_change_that_contradicts_it_is_refused() -> None:
    for change in ({"compute": "float16"}, {"mode": "cast"}, {"param": "bfloat16", "output": "bfloat16"}):
        with pytest.raises(PolicyError, match="float8 needs param='float32', compute='bfloat16' and mode='autocast'"):
            POLICY.replace(**change)
    with pytest.raises(PolicyError, match=r"overrides\['head'\] is 'float8', and the policy has no products in 8 bits"):
        Policy("mixed_bfloat16", overrides={"head": "float8"})
    with pytest.raises(PolicyError, match=r"float8 must be a polyamp\.Float8"):
        Policy("mixed_bfloat16", float8=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scaling": "delayed"}, "a step depends on its history"),
        ({"scaling": "row"}, r"scaling='row' needs emulate=True: .* with scales of rows\. Received: emulate=False"),
        ({"scaling": "block32"}, r"scales of blocks\..*Use Float8\(scaling='block32', emulate=True\)"),
        ({"scaling": "tensr"}, "Did you mean 'tensor'"),
        ({"gradients": "e5m2"}, "float8.gradients must be one of float8_e5m2, float8_e4m3fn"),
        ({"emulate": 1}, "float8.emulate must be True or False"),
    ],
)
def test_a_setting_without_a_meaning_is_refused_with_the_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Float8(**settings)


@pytest.mark.parametrize("word", ["fp8", "float8", "mixed_fp8"])
def test_other_words_name_it(word: str) -> None:
    with pytest.raises(PolicyError, match="'mixed_float8'"):
        Policy(word)


def test_no_dialect_has_a_word_for_it() -> None:
    with pytest.raises(PolicyError, match="keras has no word for float8"):
        POLICY.spelled("keras")


def test_heads_stay_in_the_compute_dtype_unless_an_override_says_so() -> None:
    paths = ["", "body", "body/head", "body/head/dense", *sorted(HEAD_NAMES), "headed"]
    plan = POLICY.plan(paths)
    assert {path for path in paths if plan.at(path).float8 is None} == {*HEAD_NAMES, "body/head", "body/head/dense"}
    assert all(plan.at(path).dtype == "bfloat16" and plan.at(path).mixes for path in paths)
    chosen = POLICY.replace(overrides={"lm_head": "float8", "body": "float32"}).plan(paths)
    assert chosen.at("lm_head").float8 == Float8()
    assert (chosen.at("logits").float8, chosen.at("logits").dtype) == (None, "bfloat16")
    assert (chosen.at("body/head").dtype, chosen.at("headed").float8) == ("float32", Float8())
    assert chosen.overridden_dtypes["lm_head"] == "bfloat16"


@pytest.mark.parametrize("form", float8_values.FORMATS)
@pytest.mark.parametrize("kind", float8_values.KINDS)
def test_a_scale_is_the_largest_that_fits(kind: str, form: str) -> None:
    x = float8_values.values(kind)
    codes = reference.quantize(x, form)
    largest = float(ml_dtypes.finfo(codes.numbers.dtype).max)
    assert largest == 1.75 * 2.0 ** LARGEST_EXPONENTS[form]
    if kind in ("infinity", "nan"):
        assert np.isnan(codes.numbers.astype(np.float32)).all()
        return
    top = float(np.abs(x).max())
    assert top * 2.0**codes.exponent <= largest
    if kind not in ("zeros", "subnormal", "tiny"):
        assert top * 2.0 ** (codes.exponent + 1) > largest
    error = np.abs(np.ldexp(codes.numbers.astype(np.float64), -codes.exponent) - x)
    step = 2.0 ** -(ml_dtypes.finfo(codes.numbers.dtype).nmant + 1)
    smallest = float(ml_dtypes.finfo(codes.numbers.dtype).smallest_subnormal)
    floor = 2.0**-126 if kind in ("subnormal", "zeros") else 0.0
    assert (error <= np.maximum(step * np.abs(x), smallest * 2.0 ** -(codes.exponent + 1)) + floor).all()


@pytest.mark.parametrize("form", float8_values.FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_s36_a_row_or_block_has_the_codes_of_a_tensor(form: str, axis: int) -> None:
    x = float8_values.matrix()
    rows, blocks = (reference.quantize(x, form, scaling, axis) for scaling in float8_values.SCALINGS)
    assert (rows.exponent.shape, blocks.exponent.shape) == (((1, 96), (3, 96)) if axis == 0 else ((72, 1), (72, 3)))
    for line in range(x.shape[1 - axis]):
        alone = reference.quantize(x.take(line, 1 - axis), form)
        assert rows.exponent.ravel()[line] == alone.exponent
        np.testing.assert_array_equal(
            float8_values.bits(rows.numbers.take(line, 1 - axis)), float8_values.bits(alone.numbers)
        )
        for number, start in enumerate(range(0, x.shape[axis], 32)):  # 72 rows: the last block has 8
            part = reference.quantize(x.take(line, 1 - axis)[start : start + 32], form)
            assert blocks.exponent.take(line, 1 - axis)[number] == part.exponent
            found = blocks.numbers.take(line, 1 - axis)[start : start + 32]
            np.testing.assert_array_equal(float8_values.bits(found), float8_values.bits(part.numbers))


@pytest.mark.parametrize("form", float8_values.FORMATS)
def test_s36_numbers_divided_by_their_scales_are_exact_where_they_are_halved(form: str) -> None:
    """So a product in float32 of halves is that of the 8-bit numbers with their scales. The whole may be 2^128."""
    exact = reference.quantize(float8_values.matrix(), form, "block32").to_float64()
    exact = exact[np.isfinite(exact)]
    for dtype in (np.float32, ml_dtypes.bfloat16):
        np.testing.assert_array_equal((exact / 2).astype(dtype).astype(np.float64), exact / 2)
    with np.errstate(over="ignore"):
        assert np.isinf(exact.astype(np.float32)).any()


def test_s36_sizes_of_a_parameter() -> None:
    assert [accepts_sizes((32, 48), scaling) for scaling in SCALINGS] == [True, True, False]
    assert [accepts_sizes((32, 40), scaling) for scaling in SCALINGS] == [False] * 3
    assert accepts_sizes((32, 64), "block32")


def test_a_plain_function_is_refused_in_the_reference_too() -> None:
    with pytest.raises(UnsupportedError, match="float8 covers products with the parameters of a model"):
        POLICY.autocast(lambda x: x, backend="reference")
    assert callable(POLICY.autocast(MLP.random([16, 16], seed=0)))


def test_the_guides_blocks_print_what_stands_there() -> None:
    blocks = re.findall(r"```python\n(.*?)```\n\n(?:```text\n(.*?)```)?", GUIDE, re.DOTALL)
    assert len(blocks) == 3
    for code, printed in blocks:
        found, scope = io.StringIO(), {}  # type: tuple[io.StringIO, dict[str, Any]]
        with contextlib.redirect_stdout(found):
            exec(code, scope)
        assert found.getvalue() == printed

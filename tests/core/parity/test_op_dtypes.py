"""What one side runs in 16 bits and the other in float32: sensitive operations, products, inputs, the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.precisions import FLOAT32, POLICY, Phase
from polyamp.parity.report_data import Divergence
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.op_dtypes import find_dtype_mismatches
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe

CAST = Policy(param="float32", compute="bfloat16", output="float32", mode="cast")
BLOCK = Alignment(
    modules={each: each for each in ("", "attn", "attn/q", "attn/o", "norm", "head")},
    containers=["attn"],
    layer_kinds={"attn/q": "dense", "attn/o": "dense", "norm": "layer_norm", "head": "dense"},
)


def _trace(*rows: tuple[Any, ...], library: str = "") -> Trace:
    """Rows of (module, name, dtype), with or without a rule and a count."""
    operations = [OperationCount(*row[:3], *(row[3:] + ("", 1)[len(row) - 3 :])) for row in rows]
    return Trace(side="", phase=POLICY, operations=operations, library=library)


def _mismatches(
    ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]], libraries: tuple[str, str], *, is_cast: bool
) -> list[tuple[str, str, str]]:
    traces = _trace(*ours, library=libraries[0]), _trace(*theirs, library=libraries[1])
    return [tuple(each) for each in find_dtype_mismatches(BLOCK, ("a", "b"), traces, is_cast=is_cast)]


def test_softmax_in_16_bits_is_named_at_the_nearest_module_that_both_have() -> None:
    agreed = Alignment(modules={"mha": "block/attn", "fc": "block/fc", "": ""})
    ours = _trace(("block/attn/inner", "exp", "float32"), ("block/fc", "sum", "bfloat16"), library="torch")
    theirs = _trace(("block/attn", "log_softmax", "bfloat16"), ("block/fc", "reduce_sum", "bfloat16"), library="keras")

    found = find_dtype_mismatches(agreed, ("torch", "jax"), (ours, theirs))

    assert [tuple(each) for each in found] == [
        ("block/attn", "", "exp in float32 in torch; log_softmax in bfloat16 in jax")
    ]


@pytest.mark.parametrize(
    ("libraries", "is_cast", "found"),
    [
        (("torch", "keras"), False, 0),
        (("torch", "torch"), False, 1),  # the policy keeps it in float32, and one program does not
        (("torch", "torch"), True, 0),
        (("", ""), False, 0),
    ],
)
def test_operation_of_a_family_on_one_side_alone(libraries: tuple[str, str], is_cast: bool, found: int) -> None:
    ours, theirs = [("attn", "exp", "bfloat16")], [("attn", "relu", "bfloat16")]

    assert len(_mismatches(ours, theirs, libraries, is_cast=is_cast)) == found


@pytest.mark.parametrize(
    ("rows", "differs"),
    [
        ([("norm", "rsqrt", "float32"), ("norm", "rsqrt", "bfloat16")], True),
        ([("attn", "MatMul", "float32", "compute"), ("attn", "MatMul", "bfloat16", "compute")], True),
        ([("attn", "dot_general", "float32", "off"), ("attn", "dot_general", "bfloat16", "off")], True),
        ([("attn", "Softmax", "float32", "follow"), ("attn", "Softmax", "bfloat16", "follow")], True),
        ([("attn", "tanh", "float32"), ("attn", "tanh", "bfloat16")], False),
        ([("attn", "one_hot", "int64", "compute"), ("attn", "one_hot", "bfloat16", "compute")], False),
    ],
)
def test_in_cast_mode_models_of_one_library_are_compared_and_no_others(
    rows: list[tuple[Any, ...]], differs: bool
) -> None:
    for libraries, expected in ((("keras", "keras"), differs), (("keras", "torch"), False)):
        assert bool(_mismatches(rows[:1], rows[1:], libraries, is_cast=True)) is expected


def test_as_many_operations_of_which_other_numbers_are_in_16_bits_differ() -> None:
    """A side that runs another number of them is written in another way, and is looked at as a whole."""
    ours = [("attn", "matmul", "bfloat16", "compute", 2)]
    mixed = [("attn", "matmul", "bfloat16", "compute", 1), ("attn", "matmul", "float32", "compute", 1)]
    more = [("attn", "matmul", "bfloat16", "compute", 2), ("attn", "matmul", "float32", "compute", 1)]

    assert _mismatches(ours, mixed, ("torch", "torch"), is_cast=False) == [
        ("attn", "", "matmul in bfloat16 in a; matmul in bfloat16, matmul in float32 in b")
    ]
    assert _mismatches(ours, more, ("torch", "torch"), is_cast=False) == []


def test_product_of_a_layer_that_the_other_side_does_not_call_is_its_containers() -> None:
    ours = [("attn/q", "dot_general", "bfloat16"), ("attn/o", "dot_general", "bfloat16")]
    theirs = [("attn", "dot_general", "float32"), ("attn/o", "dot_general", "bfloat16")]

    assert _mismatches(ours, theirs, ("nnx", "nnx"), is_cast=True) == [
        ("attn", "attn/o", "dot_general of 'attn/q' in bfloat16 in a; dot_general in float32 in b")
    ]


def _entry(module: str, what: str, array: Any, dtype: str) -> Entry:
    if what == "loss":
        return Entry(step=1, stage="forward", module="", what=what, number=float(array))
    made = sketch(np.asarray(array, np.float32), dtype)
    return Entry(step=1, stage="forward", module=module, what=what, sketch=made, own=module)


def _rounded(array: Any) -> Any:
    """The array with the digits of bfloat16."""
    return (np.asarray(array, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def _first(
    policies: tuple[list[Entry], list[Entry]],
    float32: tuple[list[Entry], list[Entry]] = ([], []),
    operations: tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]] = ([], []),
    policy: Any = "mixed_bfloat16",
    libraries: tuple[str, str] = ("torch", "torch"),
) -> Divergence | None:
    """The first difference of two runs under a policy, with or without float32 runs."""
    runs = []
    for name, entries in ((FLOAT32, float32), (POLICY, policies)):
        if any(entries):
            both = [
                PhaseTrace(_trace(*rows, library=library), lambda own=own: own)
                for own, rows, library in zip(
                    entries, operations if name == POLICY else ([], []), libraries, strict=True
                )
            ]
            runs.append((Phase(name=name, title=name), *both))
    recipe = Recipe(policy=policy if isinstance(policy, Policy) else Policy.of(policy))
    return compare_traces(("a", "b"), runs, BLOCK, (recipe, recipe)).first  # type: ignore[arg-type]  # two runs each


ONES = np.ones((4, 8), np.float32)
NOISE = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


@pytest.mark.parametrize("shows_input", [True, False])
def test_operations_between_modules_show_in_what_the_next_module_is_given(shows_input: bool) -> None:
    entries = [_entry("attn/o", "input", ONES, "bfloat16")] * shows_input + [_entry("attn", "output", ONES, "bfloat16")]
    products = [(f"attn/{each}", "linear", "bfloat16", "compute") for each in "qo"]
    ours, theirs = ([products[0], ("attn", "softmax", dtype), products[1]] for dtype in ("float32", "bfloat16"))

    first = _first((entries, entries), operations=(ours, theirs), policy=CAST)

    assert first is not None
    assert (first.module, first.what) == (("attn/o", "input") if shows_input else ("attn", "output"))
    assert first.kind == "dtype"
    place = "Before 'attn/o'" if shows_input else "In 'attn'"
    assert first.sentence == f"{place} one side runs in 16 bits what the other keeps in float32."
    assert first.evidence == ["attn: softmax in float32 in a; softmax in bfloat16 in b."]


@pytest.mark.parametrize(
    ("module", "dtypes", "array", "libraries", "found"),
    [
        ("norm", ("float32", "bfloat16"), NOISE, ("torch", "torch"), True),
        ("norm", ("float32", "bfloat16"), NOISE, ("torch", "keras"), False),
        ("norm", ("float32", "bfloat16"), _rounded(NOISE), ("torch", "torch"), False),  # cast, and no digit lost
        ("head", ("float32", "bfloat16"), NOISE, ("torch", "torch"), False),  # a product rounds it anyway
    ],
)
def test_what_a_layer_is_given_has_16_bits_on_one_side_alone(
    module: str, dtypes: tuple[str, str], array: Any, libraries: tuple[str, str], found: bool
) -> None:
    sides = [_entry(module, "input", array, dtypes[0])], [_entry(module, "input", _rounded(array), dtypes[1])]

    first = _first(sides, libraries=libraries)

    assert (first is not None) is found
    if first is not None:
        assert (first.kind, first.sentence) == ("dtype", "a gives float32 and b bfloat16 in what 'norm' is given.")


@pytest.mark.parametrize(("libraries", "found"), [(("torch", "torch"), True), (("torch", "keras"), False)])
def test_what_one_side_computes_as_in_float32_and_the_other_rounds(libraries: tuple[str, str], found: bool) -> None:
    exact, rounded = ([_entry("head", "input", each, "float32")] for each in (NOISE, _rounded(NOISE)))

    first = _first((exact, rounded), (exact, exact), libraries=libraries)

    assert _first((rounded, rounded), (exact, exact), libraries=libraries) is None
    assert (first is not None) is found
    if first is not None:
        assert (first.kind, first.module, first.what) == ("dtype", "head", "input")
        assert first.evidence[0].startswith("Relative distance from a side's own float32 run: 0.0e+00 in a and ")


@pytest.mark.parametrize(
    ("numbers", "libraries", "found"),
    [
        ((0.6931472, 0.69140625), ("torch", "torch"), True),
        ((0.6931472, 0.69140625), ("torch", "keras"), False),
        ((0.6931472, 0.6931470), ("torch", "torch"), False),
        ((0.69140625, 0.6953125), ("torch", "torch"), False),
        ((0.0, 1e-7), ("torch", "torch"), False),
    ],
)
def test_loss_of_16_bits_on_one_side_alone(
    numbers: tuple[float, float], libraries: tuple[str, str], found: bool
) -> None:
    ours, theirs = ([_entry("", "output", ONES, "bfloat16"), _entry("", "loss", each, "")] for each in numbers)

    first = _first((ours, theirs), libraries=libraries)

    assert (first is not None and first.what == "loss" and first.kind == "dtype") is found


@pytest.mark.parametrize(
    ("losses", "found"),
    [((0.7, 0.703), ("", "loss")), ((0.7, 0.7), ("head", "input"))],  # equal everywhere: where such an operation runs
)
def test_operations_outside_of_modules_that_change_no_bit_of_what_follows_are_the_losses(
    losses: tuple[float, float], found: tuple[str, str]
) -> None:
    """The exp of the model and that of the loss are rows of one table: the bits say whose it is."""
    ours, theirs = (
        [
            _entry("norm", "output", ONES, "bfloat16"),
            _entry("head", "input", ONES, "bfloat16"),
            _entry("", "output", ONES, "bfloat16"),
            _entry("", "loss", each, ""),
        ]
        for each in losses
    )
    head = ("head", "linear", "bfloat16", "compute")
    rows = [("", "exp", "bfloat16"), head, ("", "exp", "float32")], [("", "exp", "bfloat16", "", 2), head]

    first = _first((ours, theirs), operations=rows, policy=CAST)  # type: ignore[arg-type]  # rows of two lengths

    assert first is not None
    assert (first.module, first.what, first.kind) == (*found, "dtype")
    assert first.evidence[0] == "the model itself: exp in bfloat16, exp in float32 in a; exp in bfloat16 in b."


def test_operations_outside_of_modules_show_in_the_first_bits_that_differ() -> None:
    ours, theirs = ([_entry("head", "input", each, "bfloat16")] for each in (NOISE, NOISE * np.float32(1.0 + 1e-6)))
    head = ("head", "linear", "bfloat16", "compute")
    rows = [("", "exp", "float32"), head], [("", "exp", "bfloat16"), head]

    first = _first((ours, theirs), operations=rows, policy=CAST)  # type: ignore[arg-type]  # rows of two lengths

    assert first is not None
    assert (first.module, first.what) == ("head", "input")


def test_loss_that_torch_computes_in_16_bits_and_weighs_in_float32() -> None:
    ours, theirs = ([_entry("", "output", ONES, "bfloat16"), _entry("", "loss", each, "")] for each in (3.2203, 3.2187))
    rows = [("", "cross_entropy", "float32")], [("", "cross_entropy", "bfloat16")]

    first = _first((ours, theirs), operations=rows, policy=CAST)  # type: ignore[arg-type]  # rows of two lengths

    assert first is not None
    assert (first.what, first.kind, first.sentence) == (
        "loss",
        "dtype",
        "One side alone computes or stores the loss in 16 bits.",
    )
    assert first.evidence == [
        "the model itself: cross_entropy in float32 in a; cross_entropy in bfloat16 in b.",
        "loss: 3.2203 in a, 3.2187 in b.",
    ]


def test_an_input_is_not_compared_with_an_output() -> None:
    """A normalization of what is normalized gives what it was given: a difference of inputs is still one."""
    given, other = [_entry("norm", "input", each, "float32") for each in (NOISE, NOISE + 1.0)]
    output = _entry("norm", "output", NOISE + 1.0, "float32")

    first = _first(([], []), ([given, output], [other, output]))

    assert first is not None
    assert (first.module, first.what) == ("norm", "input")

"""`Policy`: dialects in both directions, dtypes, value semantics and contradictions. Globs: rules/test_overrides.py."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polyamp import Policy, PolicyError
from polyamp.float_formats import DTYPE_ALIASES, canonical_dtype
from polyamp.recipe.policy_names import DIALECTS

F16, BF16, F32, F64 = "float16", "bfloat16", "float32", "float64"

MEANINGS: list[tuple[str, tuple[str, str, str], str | None]] = [
    ("float32", (F32, F32, F32), None),
    ("mixed_float16", (F32, F16, F32), None),
    ("mixed_bfloat16", (F32, BF16, F32), None),
    ("float16", (F16, F16, F16), None),
    ("bfloat16", (BF16, BF16, BF16), None),
    ("float64", (F64, F64, F64), None),
    ("32-true", (F32, F32, F32), None),
    ("16-mixed", (F32, F16, F32), None),
    ("bf16-mixed", (F32, BF16, F32), None),
    ("16-true", (F16, F16, F16), None),
    ("bf16-true", (BF16, BF16, BF16), None),
    ("64-true", (F64, F64, F64), None),
    ("32", (F32, F32, F32), None),
    ("16", (F32, F16, F32), None),
    ("64", (F64, F64, F64), None),
    ("no", (F32, F32, F32), None),
    ("fp16", (F32, F16, F32), None),
    ("bf16", (F32, BF16, F32), None),
    ("O0", (F32, F32, F32), None),
    ("O1", (F32, F16, F32), "autocast"),
    ("O2", (F32, F16, F32), "cast"),
    ("O3", (F16, F16, F16), None),
    ("params=float32,compute=bf16,output=f32", (F32, BF16, F32), "cast"),
    ("p=f32,c=half,o=half", (F32, F16, F16), "cast"),
    ("params=full, compute=float16, output=float32", (F32, F16, F32), "cast"),
    ("c=float16", (F32, F16, F16), "cast"),
    ("c=bf16,o=full", (F32, BF16, F32), "cast"),
    ("o=full", (F32, F32, F32), "cast"),
    ("p=f16", (F16, F16, F16), "cast"),
    ("params=float32,compute=bf16", (F32, BF16, BF16), "cast"),
    ("p=f64, o=f32", (F64, F64, F32), "cast"),
]


def dtypes(policy: Policy) -> tuple[str, str, str]:
    return policy.param, policy.compute, policy.output


@pytest.mark.parametrize(("word", "meaning", "mode"), MEANINGS)
def test_every_word_of_every_dialect_has_its_documented_meaning(
    word: str, meaning: tuple[str, str, str], mode: str | None
) -> None:
    policy = Policy(word)
    assert dtypes(policy) == meaning
    assert policy.mode == mode


def test_the_table_above_covers_every_word() -> None:
    assert {name for words in DIALECTS.values() for name in words} <= {word for word, _, _ in MEANINGS}


@pytest.mark.parametrize(
    ("dialect", "word"), [(dialect, word) for dialect, words in DIALECTS.items() for word in words]
)
def test_spelled_round_trip(dialect: str, word: str) -> None:
    spelled = Policy(word).spelled(dialect)
    assert Policy(spelled) == Policy(word)
    assert spelled == word or word in ("32", "16", "64"), "only Lightning's short forms have a longer preferred one"


def test_spelled_jmp_round_trip() -> None:
    word = "params=float32,compute=bfloat16,output=float16"
    assert Policy(word).spelled("jmp") == word


@pytest.mark.parametrize(
    ("policy", "dialect", "word"),
    [
        (Policy("mixed_bfloat16"), "lightning", "bf16-mixed"),
        (Policy("16-mixed"), "keras", "mixed_float16"),
        (Policy("O2"), "jmp", "params=float32,compute=float16,output=float32"),
        (Policy("mixed_float16", mode="cast"), "apex", "O2"),
        (Policy("mixed_float16", mode="autocast"), "apex", "O1"),
        (Policy("mixed_float16", mode="autocast"), "keras", "mixed_float16"),
        (Policy("float16"), "apex", "O3"),
        (Policy("float32", mode="cast"), "accelerate", "no"),
    ],
)
def test_translation_between_dialects(policy: Policy, dialect: str, word: str) -> None:
    assert policy.spelled(dialect) == word


@pytest.mark.parametrize(
    ("policy", "dialect", "message"),
    [
        (Policy("mixed_bfloat16"), "apex", r"apex has no word for .*bfloat16.*\. It can say: O0, O1, O2, O3\."),
        (Policy("float16"), "accelerate", r"accelerate has no word for .*It can say: no, fp16, bf16\."),
        (Policy("O2"), "keras", r"keras has no word for .*mode='cast'"),
        (Policy("O1"), "jmp", r"It can say: a policy whose mode is 'cast'\."),
        (Policy("mixed_float16", overrides={"head": F32}), "keras", r"keras has no word for overrides; drop it"),
        (Policy("fp16", float32_matmul="high"), "lightning", r"lightning has no word for float32_matmul"),
        (Policy("fp16", op_list="native"), "jmp", r"jmp has no word for op_list"),
        (Policy("fp16"), "kears", r"dialect must be one of keras, .*Received: 'kears'\. Did you mean 'keras'\?"),
    ],
)
def test_spelled_raises_where_the_dialect_has_no_word(policy: Policy, dialect: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy.spelled(dialect)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mixed_flot16", r"policy must be one of float32, .*'mixed_flot16'\. Did you mean 'mixed_float16'"),
        ("bf16_mixed", r"Received: 'bf16_mixed'\. Did you mean .*'bf16-mixed'"),
        ("O4", r"Received: 'O4'\. Did you mean 'O3' or 'O2' or 'O1'"),
        ("", r"Received: ''\.$"),
        ("params=float32,compute=bf61,output=f32", r"Received: 'compute=bf61'.*Did you mean 'bf16'"),
        ("params=f32,params=f32,output=f32", r"each at most once.*Received: 'params=f32' in '[^']*'\.$"),
        ("weights=f32,compute=f16,output=f32", r"Received: 'weights=f32' in '[^']*'\.$"),
        ("params=f32,comptue=f16,output=f32", r"Received: 'comptue=f16'.*Did you mean 'compute'\?$"),
    ],
)
def test_unknown_words_name_the_nearest(word: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy(word)


@pytest.mark.parametrize(("number", "word"), [(16, "16-mixed"), (32, "32-true"), (64, "64-true")])
def test_a_number_names_the_word_of_lightning_that_means_it(number: int, word: str) -> None:
    """Lightning takes `precision=16` and calls it "16-mixed": its older sense, which keeps float32 master weights."""
    with pytest.raises(PolicyError, match=rf"Received: {number}\. Did you mean '{word}'\?$"):
        Policy(number)  # type: ignore[arg-type]  # what is refused
    assert Policy(word) == Policy(str(number))


def test_printed_policies_say_whether_there_are_master_weights() -> None:
    assert str(Policy("fp16")) == f"{Policy('fp16')!r} [mixed: float32 master weights]"
    assert str(Policy("float16")) == f"{Policy('float16')!r} [pure: no float32 master weights]"
    assert str(Policy("bf16-true")).endswith(" [pure: no float32 master weights]")
    assert str(Policy("float32")) == repr(Policy("float32"))


@pytest.mark.parametrize(("alias", "name"), DTYPE_ALIASES.items())
def test_every_alias_of_a_dtype(alias: str, name: str) -> None:
    assert dtypes(Policy(param=alias)) == (name, name, name)


class _Dtype:
    """Looks like a torch dtype: its only sign is its text."""

    def __str__(self) -> str:
        return "torch.bfloat16"


class _NamedDtype:
    """Looks like a TensorFlow dtype."""

    name = "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float16, F16),
        (np.dtype("float64"), F64),
        (np.dtype(ml_dtypes.bfloat16), BF16),
        (ml_dtypes.bfloat16, BF16),
        (_Dtype(), BF16),
        (_NamedDtype(), BF16),
    ],
)
def test_dtype_objects_are_recognised_by_name(dtype: Any, name: str) -> None:
    assert canonical_dtype(dtype, argument="compute") == name


@pytest.mark.parametrize("dtype", [float, int, np.int32, np.dtype("complex64"), 16, "float8_e4m3fn", "tf32", "Float16"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(PolicyError, match=r"compute must be one of bfloat16, float16, float32, float64 .*Received"):
        Policy(compute=dtype)


def test_a_misspelt_dtype_names_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"output=.*flaot32.*Did you mean 'float32'"):
        Policy(output="flaot32")


def test_unnamed_dtypes_follow_param() -> None:
    assert dtypes(Policy()) == (F32, F32, F32)
    assert dtypes(Policy(compute=F16)) == (F32, F16, F32)
    assert dtypes(Policy(param=F64)) == (F64, F64, F64)
    assert dtypes(Policy(param=F64, compute=BF16, output=F32)) == (F64, BF16, F32)


def test_policy_is_frozen() -> None:
    policy = Policy("mixed_float16", overrides={"head": F32})
    with pytest.raises(AttributeError, match=r"Policy is frozen; use policy.replace\(compute=...\)"):
        policy.compute = F32
    with pytest.raises(AttributeError, match="Policy is frozen"):
        del policy.compute
    with pytest.raises(AttributeError, match="Policy is frozen"):
        policy.anything = 1
    with pytest.raises(TypeError, match="does not support item assignment"):
        policy.overrides["head"] = F16  # type: ignore[index]
    assert policy == Policy("mixed_float16", overrides={"head": F32})


def test_the_given_overrides_are_copied() -> None:
    overrides = {"head": F32}
    policy = Policy("mixed_float16", overrides=overrides)
    overrides["body"] = F16
    assert dict(policy.overrides) == {"head": F32}


POLICIES = [
    Policy(word, overrides=overrides, float32_matmul=matmul, op_list=op_list)
    for word in ("float32", "mixed_float16", "mixed_bfloat16", "O1", "O2", "O3", "float64")
    for overrides in (None, {"a/*": "float32", "b": "float32"})
    for matmul in (None, "high")
    for op_list in ("polyamp", "native")
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_copies_are_equal_and_hash_equal(policy: Policy) -> None:
    copies = [
        pickle.loads(pickle.dumps(policy)),
        copy.copy(policy),
        copy.deepcopy(policy),
        Policy(**policy.to_dict()),
        policy.replace(),
        eval(repr(policy), {"Policy": Policy}),
    ]
    for other in copies:
        assert other == policy
        assert hash(other) == hash(policy)
        assert repr(other) == repr(policy)


def test_different_policies_are_unequal() -> None:
    assert len(set(POLICIES)) == len(POLICIES)
    assert Policy() != "float32"


def test_equality_ignores_spelling_and_order_of_overrides() -> None:
    assert Policy("fp16") == Policy("mixed_float16") == Policy(compute="half")
    one, other = {"a": F32, "b": F16}, {"b": "fp16", "a": "f32"}
    assert Policy("fp16", overrides=one) == Policy("fp16", overrides=other)
    assert hash(Policy("fp16", overrides=one)) == hash(Policy("fp16", overrides=other))


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(Policy("O1")) == "Policy(param='float32', compute='float16', output='float32', mode='autocast')"
    assert repr(Policy(op_list="native", float32_matmul="high", overrides={"head": "bf16"})) == (
        "Policy(param='float32', compute='float32', output='float32', float32_matmul='high', op_list='native', "
        "overrides={'head': 'bfloat16'})"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"param": F16, "compute": F32}, r"param='float16' cannot hold the master weights of compute='float32'"),
        ({"param": F16, "compute": BF16}, r"at least as wide .* or of the same dtype\. Use param='float32'"),
        ({"param": BF16, "compute": F16}, r"param='bfloat16' cannot hold"),
        ({"param": F32, "compute": F64}, r"param='float32' cannot hold .*compute='float64'.*Use param='float64'\."),
        ({"mode": "autcast"}, r"mode must be one of .*Received: mode='autcast'\. Did you mean 'autocast'"),
        ({"float32_matmul": "tf32"}, r"float32_matmul must be one of .*'highest', 'high', 'medium'"),
        ({"op_list": "torch"}, r"op_list must be one of \('polyamp', 'native'\)\. Received: op_list='torch'"),
        ({"overrides": ["head"]}, r"overrides must map module-path globs to dtypes\. Received: \['head'\]"),
        ({"overrides": {"head": "int8"}}, r"overrides\['head'\] must be one of .*'int8'"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy(**arguments)


def test_a_word_settles_its_fields() -> None:
    with pytest.raises(PolicyError, match=r"'fp16' already settles compute, output; give either the word or the"):
        Policy("fp16", compute=BF16, output=F32)
    with pytest.raises(PolicyError, match=r"'O2' means mode='cast'\. Received: mode='autocast'"):
        Policy("O2", mode="autocast")
    with pytest.raises(PolicyError, match=r"policy is already a Policy; use policy\.replace"):
        Policy(Policy())  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"policy must be a string such as 'mixed_float16'\. Received: 16"):
        Policy(16)  # type: ignore[arg-type]
    assert Policy("O2", mode="cast").mode == "cast"


def test_replace() -> None:
    policy = Policy("mixed_float16", overrides={"head": F32}).replace(compute="bf16", mode="cast")
    assert dtypes(policy) == (F32, BF16, F32)
    assert (policy.mode, dict(policy.overrides)) == ("cast", {"head": F32})
    with pytest.raises(PolicyError, match=r"Policy has the fields param, compute, .*Received: dtype"):
        policy.replace(dtype=F32)
    with pytest.raises(PolicyError, match="cannot hold the master weights"):
        policy.replace(param=F16)


@pytest.mark.parametrize(
    ("policy", "needs_scaling", "mixed"),
    [
        (Policy("float32"), False, False),
        (Policy("mixed_float16"), True, True),
        (Policy("mixed_bfloat16"), False, True),
        (Policy("float16"), False, False),
        (Policy("float32", overrides={"body": F16}), True, True),
        (Policy("mixed_bfloat16", overrides={"body": F16}), True, True),
        (Policy(output=F16), False, True),
        (Policy(param=F64, compute=F16), True, True),
    ],
)
def test_derived_properties(policy: Policy, needs_scaling: bool, mixed: bool) -> None:
    assert policy.needs_loss_scaling is needs_scaling
    assert policy.is_mixed is mixed


def test_casts_leave_other_leaves_alone() -> None:
    policy = Policy("mixed_float16")
    tree: dict[str, Any] = {"w": np.ones(2, "f4"), "n": np.arange(2), "d": np.ones(2, "f8"), "none": None, "text": "x"}
    cast = policy.cast_to_compute(tree)
    assert cast["w"].dtype == np.float16
    assert tree["w"].dtype == np.float32, "nothing is cast in place"
    for name in ("n", "d", "none", "text"):
        assert cast[name] is tree[name]
    assert policy.cast_to_param(cast)["w"].dtype == np.float32
    assert policy.replace(output=BF16).cast_to_output(tree)["w"].dtype == ml_dtypes.bfloat16
    assert Policy("float64").cast_to_output(tree)["w"].dtype == np.float64


def test_s02_float64_named_in_the_output_alone_is_named() -> None:
    assert Policy(output="float64").cast_to_compute({"w": np.ones(2)})["w"].dtype == np.float32


def test_s02_a_plan_knows_of_float64_as_masters_or_as_the_output() -> None:
    assert Policy(param="float64", output="float32").plan([]).float64
    assert Policy(output="float64").plan([]).float64
    assert not Policy("mixed_float16").plan([]).float64

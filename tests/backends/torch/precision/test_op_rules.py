"""`Policy(op_rules=...)` in torch: the dtypes of inner operations, in each place where a policy acts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import polyamp
import polyamp_torch
from polyamp import Policy, PolicyError, UnsupportedError
from polyamp.rules.operation_names import OPERATION_NAMES
from polyamp_torch.compat import open_mode_count
from polyamp_torch.integrations.loop_adapter import LoopSettings
from polyamp_torch.precision.torch_only.op_rules import functions_named

RULES: Final = {"softmax": "compute", "layer_norm": "compute", "linear": "float32"}
POLICY: Final = Policy("mixed_bfloat16", op_rules=RULES)
PLAIN: Final = Policy("mixed_bfloat16")
WIDE, HALF = torch.float32, torch.bfloat16
X: Final = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
Seen = dict[str, torch.dtype]


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    yield
    assert open_mode_count() == 0


class Net(nn.Module):
    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.conv, self.norm = nn.Linear(4, 4), nn.Conv1d(1, 1, 1), nn.LayerNorm(4)
        self.reentrant = reentrant
        self.seen: list[Seen] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        dense = self.dense(x)
        conv = self.conv(dense[:, None])[:, 0]
        norm = self.norm(conv)
        probabilities = norm.softmax(-1)
        named = {"linear": dense, "conv": conv, "norm": norm, "softmax": probabilities, "exp": norm.exp()}
        self.seen.append({name: value.dtype for name, value in named.items()})
        return probabilities

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


RULED: Final = {"linear": WIDE, "conv": HALF, "norm": HALF, "softmax": HALF, "exp": WIDE}
LISTED: Final = {"linear": HALF, "conv": HALF, "norm": WIDE, "softmax": WIDE, "exp": WIDE}


def dtype_under(rules: dict[str, str], function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.dtype:
    """Return the dtype of a function's result, before the cast to the policy's output dtype."""
    found = []

    def run(*args: torch.Tensor) -> torch.Tensor:
        found.append(function(*args).dtype)
        return args[0]

    Policy("mixed_bfloat16", op_rules=rules).autocast(run)(*inputs)
    return found[0]


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) * batch).sum()


def train(model: Net, policy: Policy, **options: Any) -> polyamp.StepResult:
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(model, recipe)
    return polyamp.train_step(loss_fn, recipe, **options)(state, X.clone().requires_grad_())[1]


@pytest.mark.parametrize(("policy", "expected"), [(PLAIN, LISTED), (POLICY, RULED)])
def test_in_the_step_and_in_a_call(policy: Policy, expected: Seen) -> None:
    net = Net()
    assert policy.autocast(net)(X).dtype == WIDE
    result = train(net, policy)
    assert net.seen == [expected, expected]
    assert not result.skipped


def test_a_region_of_the_policy_does_what_autocast_alone_does_not() -> None:
    with polyamp_torch.autocast("cpu", torch.bfloat16):  # the trap: an autocast region keeps a softmax in float32
        assert (X @ X).softmax(-1).dtype == WIDE
    with polyamp_torch.autocast(POLICY, "cpu"):
        assert (X @ X).softmax(-1).dtype == HALF
    assert POLICY.autocast(lambda x: x.softmax(-1))(X).dtype == WIDE  # cast to the output dtype
    with POLICY.native("torch"), torch.autocast("cpu", enabled=False):
        assert X.softmax(-1).dtype == WIDE


@pytest.mark.parametrize("spelling", [torch.softmax, functional.softmax, torch.Tensor.softmax, torch.special.softmax])
def test_one_name_covers_every_spelling(spelling: Any) -> None:
    assert dtype_under({"softmax": "compute"}, lambda x: spelling(x, -1), X) == HALF
    assert dtype_under({"log_softmax": "compute"}, lambda x: spelling(x, -1), X) == WIDE


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("matmul", lambda x: x @ x),
        ("add", lambda x: 2 + x.bfloat16()),
        ("sub", lambda x: 2 - x.bfloat16()),
        ("mul", lambda x: x.bfloat16() * 2),
        ("div", lambda x: x.bfloat16() / 2),
        ("conv1d", lambda x: functional.conv1d(x[None], x[..., None])),
    ],
)
def test_operators_have_the_names_of_their_functions(name: str, function: Any) -> None:
    assert dtype_under({}, function, X) == HALF
    assert dtype_under({name: "float32"}, function, X) == WIDE


@pytest.mark.parametrize(
    ("rule", "left", "right", "expected"),
    [
        ("promote", HALF, WIDE, WIDE),
        ("promote", HALF, HALF, HALF),
        ("follow", HALF, WIDE, HALF),
        ("follow", WIDE, HALF, WIDE),
        ("opaque", WIDE, WIDE, WIDE),
        ("compute", WIDE, HALF, HALF),
        ("float32", HALF, HALF, WIDE),
    ],
)
def test_the_five_rules(rule: str, left: torch.dtype, right: torch.dtype, expected: torch.dtype) -> None:
    assert dtype_under({"linear": rule}, functional.linear, X.to(left), X.to(right)) == expected


@pytest.mark.parametrize(
    ("name", "function", "expected"),
    [
        ("softmax", lambda x: x.softmax(-1, dtype=torch.float32), WIDE),
        ("softmax", lambda x: torch.softmax(x, -1, torch.float32), WIDE),
        ("exp", lambda x: x.clone().exp_(), WIDE),
        ("exp", lambda x: torch.exp(x, out=torch.empty(4, 4)), WIDE),
        ("exp", lambda x: x.double().exp(), torch.float64),
        ("relu", lambda x: functional.relu(x.clone(), inplace=True), WIDE),
        ("dropout", lambda x: functional.dropout(x.clone(), 0.5, True, True), WIDE),
    ],
)
def test_calls_that_name_a_dtype_or_write_are_left_alone(name: str, function: Any, expected: torch.dtype) -> None:
    assert dtype_under({name: "compute"}, function, X) == expected


def test_running_statistics_are_updated() -> None:
    norm = nn.BatchNorm1d(4)
    seen = dtype_under({"batch_norm": "float32"}, norm, X.bfloat16())
    assert (seen, norm.running_mean.dtype) == (WIDE, WIDE)
    torch.testing.assert_close(norm.running_mean, 0.1 * X.bfloat16().float().mean(0))
    assert dtype_under({"batch_norm": "compute"}, norm, X) == HALF
    assert norm.num_batches_tracked == 2


def test_inside_functions_of_torch_that_are_written_in_python() -> None:
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    seen: list[torch.dtype] = []

    def weights(x: torch.Tensor) -> torch.Tensor:
        seen.append(attention(x[None], x[None], x[None], average_attn_weights=False)[1].dtype)
        return functional.gumbel_softmax(x)

    assert dtype_under({"softmax": "compute"}, weights, X) == HALF
    assert dtype_under({}, weights, X) == WIDE
    assert seen == [HALF, WIDE]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_again_under_the_rules(reentrant: bool) -> None:
    plain, again = Net(), Net(reentrant=reentrant)
    with set_checkpoint_early_stop(False):
        one, other = train(plain, POLICY), train(again, POLICY)
    assert again.seen == [RULED, RULED]
    assert torch.equal(one.grad_norm, other.grad_norm)
    for before, after in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(before, after)


def test_a_compiled_step_has_the_numbers_of_the_plain_one() -> None:
    plain, compiled = Net(), Net()
    one, other = train(plain, POLICY), train(compiled, POLICY, compile={"backend": "aot_eager"})
    assert compiled.seen[-1] == RULED
    torch.testing.assert_close(other.loss, one.loss)
    torch.testing.assert_close(other.grad_norm, one.grad_norm)
    unruled = train(Net(), PLAIN)
    assert abs(unruled.loss - one.loss) > 1e-4  # what the rules change is far above that


def test_a_compiled_function_inside_a_region_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    run = POLICY.autocast(torch.compile(lambda x: (x @ x).softmax(-1), backend=counter), backend="torch")
    dtypes = []
    for _ in range(3):
        with polyamp_torch.autocast(POLICY, "cpu"):
            dtypes.append(torch.compile(lambda x: x.softmax(-1), backend="eager")(X).dtype)
        run(X)
    assert (counter.frame_count, dtypes) == (1, [HALF] * 3)


def nested(x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for outer, inner in ((POLICY, PLAIN), (PLAIN, POLICY)):
        with polyamp_torch.autocast(outer, "cpu"):
            found.append(x.softmax(-1))
            with polyamp_torch.autocast(inner, "cpu"):
                found.append(x.softmax(-1))
            found.append(x.softmax(-1))
    return found


def test_regions_inside_a_compiled_function() -> None:
    expected = [HALF, WIDE, HALF, WIDE, HALF, WIDE]
    for run in (nested, torch.compile(nested, backend="eager", fullgraph=True)):
        assert [value.dtype for value in run(X)] == expected


def test_an_inner_region_of_a_compiled_function_is_not_compiled_under_other_rules() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with polyamp_torch.autocast(PLAIN, "cpu"):
            return x.softmax(-1)

    with polyamp_torch.autocast(POLICY, "cpu"):
        with pytest.raises(Exception, match="cannot trace a region with other op_rules"):
            torch.compile(inner, backend="eager", fullgraph=True)(X)
        assert torch.compile(inner, backend="eager")(X).dtype == WIDE  # it runs in plain Python
        assert X.softmax(-1).dtype == HALF


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "aot_eager"}}])
def test_a_region_around_a_step_changes_nothing(options: dict[str, Any]) -> None:
    net, other = Net(), Net()
    expected = train(net, PLAIN, **options)
    with polyamp_torch.autocast(POLICY, "cpu"):
        result = train(other, PLAIN, **options)
    assert other.seen == net.seen
    assert torch.equal(result.loss, expected.loss)
    with polyamp_torch.autocast(PLAIN.replace(op_rules={"exp": "compute"}), "cpu"):
        train(other := Net(), POLICY, **options)
    assert other.seen[-1] == RULED


def test_overrides_and_inner_policies() -> None:
    net = Net()
    POLICY.replace(overrides={"norm": "float32"}).autocast(net)(X)
    assert net.seen.pop() == RULED | {"norm": WIDE, "softmax": HALF}
    POLICY.autocast(lambda x: PLAIN.autocast(net)(x))(X)
    assert net.seen.pop() == LISTED
    PLAIN.autocast(lambda x: POLICY.autocast(net)(x))(X)
    assert net.seen.pop() == RULED
    with POLICY.native("torch"):
        with PLAIN.native("torch"):
            assert X.softmax(-1).dtype == WIDE
        assert X.softmax(-1).dtype == HALF


def test_float16_and_the_list_of_torch() -> None:
    seen = []
    Policy("mixed_float16", op_rules=RULES, op_list="native").autocast(
        lambda x: seen.append((x.softmax(-1).dtype, functional.linear(x, x).dtype))
    )(X)
    assert seen == [(torch.float16, torch.float32)]
    wide = Policy("float32", op_rules=RULES)  # nothing is in 16 bits, and no rule acts
    wide.autocast(lambda x: seen.append((x.softmax(-1).dtype, functional.linear(x, x).dtype)))(X)
    assert seen[1] == (WIDE, WIDE)


def test_carried_work_runs_under_the_rules() -> None:
    with polyamp_torch.autocast(POLICY, "cpu"):
        work = polyamp_torch.carried(lambda: (X @ X).softmax(-1).dtype)
    assert work() == HALF


def test_an_error_inside_closes_the_rules() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, x[:, :2])

    with pytest.raises(RuntimeError, match="shapes"):
        POLICY.autocast(fails)(X)
    assert X.bfloat16().softmax(-1).dtype == HALF


def test_explain_names_the_rule() -> None:
    report = polyamp.explain(loss_fn, POLICY, Net(), X)
    rows = {(row.module, row.name): (row.dtype, row.rule) for row in report.operations if row.direction == "forward"}
    assert rows["dense", "addmm"] == ("float32", "float32 (op_rules)")
    assert rows["norm", "native_layer_norm"] == ("bfloat16", "compute (op_rules)")
    assert rows["", "softmax"] == ("bfloat16", "compute (op_rules)")
    assert rows["", "exp"] == ("float32", "float32")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"softmx": "compute"},
            r"torch has no function 'softmx'\. Did you mean 'softmax'.*Each framework has",
        ),
        (
            {"reduce_sum": "compute"},
            r"no function 'reduce_sum'\. 'reduce_sum' of JAX is 'sum' or 'mean' here",
        ),
        ({"__add__": "float32"}, r"torch has no function '__add__'\. Did you mean 'add'"),
        ({"exp_": "float32"}, r"'exp_' works in place.*The rule of 'exp' covers"),
        ({"view": "float32"}, r"'view' of torch computes no new tensor"),
    ],
)
def test_names_that_are_refused(rules: dict[str, str], message: str) -> None:
    policy = Policy("mixed_bfloat16", op_rules=rules)
    for enter in (policy.autocast, lambda net: polyamp.init(net, polyamp.Recipe(policy=policy))):
        with pytest.raises(PolicyError, match=message):
            enter(Net())
    for refused in (lambda: policy.native("torch"), lambda: policy.autocast(lambda x: x)(X)):
        with pytest.raises(PolicyError, match=message):
            refused()


def test_the_names_in_the_table_of_the_core_exist() -> None:
    assert [row.torch for row in OPERATION_NAMES if not functions_named(row.torch)] == []
    Policy("mixed_bfloat16", op_rules={row.torch: "float32" for row in OPERATION_NAMES}).autocast(Net())


def test_the_loop_of_a_library() -> None:
    with LoopSettings.create(POLICY, None, "cpu", library="The loop").region():
        assert X.softmax(-1).dtype == HALF
    with pytest.raises(PolicyError, match="no function 'softmx'"):
        LoopSettings.create(POLICY.replace(op_rules={"softmx": "compute"}), None, "cpu", library="The loop")


def test_policies_without_an_op_list_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"does not act with mode='cast'\. .*policy\.replace\(op_rules=\{\}\)"):
        Policy("O2", op_rules=RULES).autocast(Net())
    with pytest.raises(UnsupportedError, match=r"does not act with param='bfloat16'"):
        Policy("bfloat16", op_rules=RULES).autocast(Net().bfloat16())


def test_a_policy_from_json_has_the_rules() -> None:
    net = Net()
    Policy(**POLICY.to_dict()).autocast(net)(X)
    assert net.seen == [RULED]


def test_a_policy_that_a_compiled_function_creates_has_its_rules() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with polyamp_torch.autocast(Policy("mixed_bfloat16", op_rules={"softmax": "compute"}), "cpu"):
            return x.softmax(-1)

    assert torch.compile(run, backend="eager", fullgraph=True)(X).dtype == HALF


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "aot_eager"}}])
def test_rules_that_meet_no_function_are_named_once(options: dict[str, Any]) -> None:
    policy = Policy("mixed_bfloat16", op_rules={"linear": "float32", "cosine_similarity": "compute", "erf": "compute"})
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    model, batch = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe, **options)
    expected = r"op_rules: the first step called no function 'cosine_similarity' or 'erf' under autocast"
    with pytest.warns(UserWarning, match=expected) as said:
        state, _ = step(state, batch)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, batch)
    report = polyamp.explain(loss_fn, policy, model, batch)
    assert "op_rules: this pass called no function 'cosine_similarity' or 'erf'" in report.notes[0]
    assert polyamp.explain(loss_fn, policy.replace(op_rules={"linear": "float32"}), model, batch).notes == ()

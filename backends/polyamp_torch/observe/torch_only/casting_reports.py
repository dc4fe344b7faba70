"""`explain`: the casting report of torch code, by a `TorchDispatchMode` around one pass.

The mode runs below autograd and autocast, so it sees the operations that the kernels run, after the casts. Models and
tensors among the inputs are copied, and the random generators are set back, so that the pass leaves no trace in them.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any, Final

import torch
from torch import nn

from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules import step_checks
from polyamp.trees import map_tree
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import DispatchMode, is_in_backward, tree_leaves
from polyamp_torch.distributed.compat import make_module_tracker
from polyamp_torch.observe.model_copy import copy_model
from polyamp_torch.precision.autocast import backward_region, root_region, wrap_function
from polyamp_torch.precision.op_list import TORCH_OP_FAMILIES
from polyamp_torch.precision.policy_module import PolicyModule, module_device, resolve_policy, wrapped_module
from polyamp_torch.precision.torch_only.op_rules_mode import RUNNING_RULE
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function

_COMPUTE: Final = """
mm addmm bmm baddbmm addbmm addmv mv convolution mkldnn_convolution cudnn_convolution mkldnn_rnn_layer cudnn_rnn
scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention
scaled_dot_product_cudnn_attention thnn_fused_lstm_cell thnn_fused_gru_cell conv_tbc trilinear
"""
_FLOAT32: Final = """
dot vdot cudnn_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training fused_rms_norm nll_loss_forward
nll_loss2d_forward linalg_vector_norm log_sigmoid_forward native_norm cdist_forward pdist_forward safe_softmax
"""
"""Kernels of the functions of the op list, where they have a name of their own."""
_PROMOTE: Final = """
add sub rsub mul div where maximum minimum fmax fmin atan2 remainder fmod lerp addcmul addcdiv hypot copysign prelu
masked_fill index_add index_put scatter_add
"""
_FOLLOW: Final = """
relu relu6 gelu silu mish tanh neg abs sign clamp clamp_min clamp_max threshold hardtanh leaky_relu elu celu selu
hardswish hardsigmoid glu sqrt sin cos floor ceil round trunc bernoulli native_dropout dropout max min amax amin topk
sort max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d embedding gather index index_select
scatter cummax cummin
"""
_DATA_MOVEMENT: Final = """
view reshape reshape_alias unsafe_view permute transpose t expand unsqueeze squeeze slice select split
split_with_sizes unbind detach alias clone copy contiguous cat stack empty empty_like empty_strided new_empty
new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill zero arange
lift_fresh lift_fresh_copy as_strided diagonal constant_pad_nd repeat roll flip tril triu scalar_tensor
local_scalar_dense uniform normal rand randn rand_like randn_like view_as_real view_as_complex resize set resolve_conj
item unfold
"""


def explain(target: Any, policy: Policy, *inputs: Any, strict: bool = False) -> CastingReport:
    """Run `target(*inputs)` once under a policy and report its operations (`HasCastingReports.explain`).

    A scalar result that requires a gradient is a loss: its backward pass runs too.
    """
    if isinstance(target, PolicyModule):
        target = wrapped_module(target)
    inputs = tuple(wrapped_module(each) if isinstance(each, PolicyModule) else each for each in inputs)
    given = [each for each in (target, *inputs) if isinstance(each, nn.Module)]
    if len(given) > 1:
        raise UnsupportedError(
            f"explain: one model, as the target or among the inputs. Received: {len(given)} models. Put them into one "
            "nn.ModuleDict."
        )
    with _unchanged_generators():
        if not given:
            run = _CountMode(policy.plan(), {})
            return run.report(policy, wrap_function(target, policy.plan()), _copied(inputs), [], "cpu", strict)
        model = copy_model(given[0])
        plan = resolve_policy(model, policy)
        bound, device = PolicyModule(model, plan, module_device(model)), module_device(model)
        path = path_function(model)
        run = _CountMode(plan, {part: path(name) for name, part in model.named_modules()})
        arguments = _copied([bound if each is given[0] else each for each in inputs])

        def call(*args: Any) -> Any:
            if target is given[0]:
                return bound(*args)
            with root_region(plan, device.type):
                return target(*args)

        with bound.installed():  # as in the step: also while checkpoints run again
            return run.report(policy, call, arguments, list(model.parameters()), device.type, strict)


def explain_as_is(model: nn.Module, loss_fn: Any, batch: Any) -> CastingReport:
    """Run `loss_fn(model, batch)` and its backward pass as the program has it, under no policy, and report operations.

    The rule of each row is that of the op list, whether or not the operation ran by it. The model is one's own copy.
    """
    policy, path = Policy("float32"), path_function(model)
    run = _CountMode(policy.plan(), {part: path(name) for name, part in model.named_modules()})
    arguments = [model, *_copied([batch])]
    found = run.report(policy, loss_fn, arguments, list(model.parameters()), module_device(model).type, strict=False)
    return CastingReport(policy, [row._replace(rule=_list_rule(row.name)) for row in found.operations], found.casts)


class _CountMode(DispatchMode):  # type: ignore[misc]  # torch does not annotate it
    """Mode that counts the operations of a pass.

    Args:
        plan: the resolved policy.
        paths: path of each module.
    """

    def __init__(self, plan: ResolvedPolicy, paths: dict[nn.Module, str]) -> None:
        super().__init__()
        self._plan = plan
        self._tracker = make_module_tracker(paths)
        self._running: list[str] = []
        self._tracker.register_user_hooks(pre_fw_hook=self._enter_module, post_fw_hook=self._leave_module)
        self._operations: Counter[tuple[str, str, str, str, str]] = Counter()
        self._casts: Counter[tuple[str, str]] = Counter()

    def report(
        self, policy: Policy, call: Any, arguments: Any, parameters: list[Any], device_type: str, strict: bool
    ) -> CastingReport:
        """Run the pass and return its report."""
        leaves = [x for x in (*parameters, *tree_leaves(arguments)) if isinstance(x, torch.Tensor) and x.requires_grad]
        with self._tracker, self:
            result = call(*arguments)
            loss, _ = step_checks.split_loss_and_aux(result)
            if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad and leaves:
                with backward_region(self._plan, device_type):
                    torch.autograd.grad(loss, leaves, allow_unused=True)
        rows = [OperationCount(*key[:4], count, key[4]) for key, count in self._operations.items()]
        found = CastingReport(policy, rows, [CastCount(*key, count) for key, count in self._casts.items()])
        if strict and found.unknown:
            raise UnsupportedError(
                f"explain: no op list names {', '.join(found.unknown)}. strict=False lists them as rows."
            )
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands, results = _floating_dtypes((args, kwargs)), _floating_dtypes(result)
        spelled = func.overloadpacket.__name__
        name = spelled.strip("_")
        if name == "to_copy":
            if operands and results and operands != results:
                self._casts[operands[0], results[0]] += 1
            return result
        if name in _words(_DATA_MOVEMENT) or not results or func.namespace == "prim":
            return result
        dtypes = operands or results
        direction = "forward"
        if is_in_backward():
            direction = "recompute" if torch.is_grad_enabled() else "backward"
        module = self._running[-1] if self._running else ""
        if direction == "backward":
            module = max(self._tracker.parents - {"Global"}, key=lambda path: (path.count("/"), len(path)), default="")
        in_place = spelled.endswith("_") and not spelled.endswith("__")
        rule = self._rule(module, "" if in_place else name, dtypes, direction)
        self._operations[module, name, ", ".join(sorted(dtypes)), rule, direction] += 1
        return result

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(self._tracker.get_known_fqn(module) or "")

    def _leave_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._running.pop()

    def _rule(self, module: str, name: str, dtypes: list[str], direction: str) -> str:
        """Return the rule of an operation; `name` is empty for an operation in place."""
        parts = module.split("/")
        named = any("/".join(parts[:n]) in self._plan.overridden for n in range(1, len(parts) + 1))
        if named:
            return "override"
        if not self._plan.mixes:
            return "off"
        if direction == "backward" or not name:
            return "follow"
        rule = _list_rule(name)
        if RUNNING_RULE.word and direction != "backward":
            return f"{RUNNING_RULE.word} (op_rules)"
        listed = self._plan.compute if rule == "compute" else "float32" if rule == "float32" and self._plan.kept else ""
        return f"{rule} (uncast)" if listed and listed not in dtypes else rule


@functools.lru_cache(maxsize=4096)
def _list_rule(name: str) -> str:
    float32 = {word.strip("_") for row in TORCH_OP_FAMILIES for word in row.names.split()} | _words(_FLOAT32)
    if name in _words(_COMPUTE):
        return "compute"
    if name in float32 or name.startswith(("linalg_", "fft_")):
        return "float32"
    if name in _words(_PROMOTE):
        return "promote"
    return "follow" if name in _words(_FOLLOW) else "unknown"


@functools.cache
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _floating_dtypes(tree: Any) -> list[str]:
    """Return the dtypes of the floating tensors of a tree, each once. Numbers in tensors without axes do not count
    beside arrays, as in torch's promotion."""
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    arrays = [x for x in tensors if x.ndim] or tensors
    return list(dict.fromkeys(dtype_name(x.dtype) for x in arrays))


def _copied(inputs: Any) -> Any:
    """Return inputs whose tensors are copies, which require gradients as the originals do."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return [each if isinstance(each, PolicyModule) else map_tree(copied, each) for each in inputs]


def _unchanged_generators() -> contextlib.AbstractContextManager[None]:
    return torch.random.fork_rng()

"""The only door to torch's private names, and to what differs between its versions (2.7 to 2.13 are supported).

Every other module of this package imports from here, under a name that says what it is good for;
`tests/core/house/test_private_names.py` walks the syntax trees. What is called often is bound again and not
wrapped: a second name costs nothing, a function around it does. What torch hides is here because no public way was
found to do the same; beside each name stands what is relied on, so that one who meets a newer torch knows what to look
for.

No compiler is imported: `import torch._dynamo` takes two seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.autograd_function import custom_function_call as _custom_function_call
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.autograd import forward_ad
from torch.optim import optimizer as _optimizers
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree, checkpoint
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Kernels over lists of tensors. torch.optim is written with them and other projects use them, but torch documents them
# little: each takes lists of one device and dtype, and a scalar tensor's place is that of the last argument.

foreach_add: Final[Callable[..., Any]] = torch._foreach_add
foreach_add_: Final[Callable[..., Any]] = torch._foreach_add_
foreach_copy_: Final[Callable[..., Any]] = torch._foreach_copy_
foreach_cos: Final[Callable[..., Any]] = torch._foreach_cos
foreach_div: Final[Callable[..., Any]] = torch._foreach_div
foreach_div_: Final[Callable[..., Any]] = torch._foreach_div_
foreach_expm1: Final[Callable[..., Any]] = torch._foreach_expm1
foreach_floor: Final[Callable[..., Any]] = torch._foreach_floor
foreach_maximum: Final[Callable[..., Any]] = torch._foreach_maximum
foreach_minimum: Final[Callable[..., Any]] = torch._foreach_minimum
foreach_mul: Final[Callable[..., Any]] = torch._foreach_mul
foreach_mul_: Final[Callable[..., Any]] = torch._foreach_mul_
foreach_neg: Final[Callable[..., Any]] = torch._foreach_neg
foreach_norm: Final[Callable[..., Any]] = torch._foreach_norm
foreach_pow: Final[Callable[..., Any]] = torch._foreach_pow
foreach_sign: Final[Callable[..., Any]] = torch._foreach_sign
foreach_sqrt: Final[Callable[..., Any]] = torch._foreach_sqrt
foreach_sub: Final[Callable[..., Any]] = torch._foreach_sub
foreach_sub_: Final[Callable[..., Any]] = torch._foreach_sub_
fused_adam_: Final[Callable[..., Any]] = torch._fused_adam_
fused_adamw_: Final[Callable[..., Any]] = torch._fused_adamw_
fused_sgd_: Final[Callable[..., Any]] = torch._fused_sgd_
"""What torch.optim calls for each group of tensors of one device and dtype; as in torch 2.7 to 2.13."""
check_and_unscale_: Final[Callable[..., Any]] = torch._amp_foreach_non_finite_check_and_unscale_
"""`(gradients, found_inf, inverse_scale)`: the kernel behind torch's own scaler; writes 1 into `found_inf` and
multiplies, in place."""
laid_end_to_end: Final[Callable[..., Any]] = torch._utils._flatten_dense_tensors
"""Tensors of one dtype as one vector: `cat` of the flattened ones, without a Python list of views."""
by_device_and_dtype: Final[Callable[..., Any]] = _group_tensors_by_device_and_dtype
"""`([tensors])` -> {(device, dtype): ([tensors], indices)}, grouped in C++."""

SUM_OF_SPARSE: Final = "_sparse_sum"
"""torch's name of what `torch.sparse.sum` calls, as modes see it."""

# Tensors, modules and trees.

version_of: Final[Callable[[Any], int]] = operator.attrgetter("_version")
"""How often a tensor was written to in place. An inference tensor has none."""
values_of_coalesced: Final[Callable[[torch.Tensor], torch.Tensor]] = torch.Tensor._values
"""The values of a sparse tensor as they are in memory; the public `values()` makes a node for autograd."""
parameters_in: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_parameters")
buffers_in: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_buffers")
children_in: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_modules")
"""The dicts that `nn.Module.__getattr__` reads: what is put into them takes a parameter's, a buffer's or a child's
place without `nn.Module.__setattr__`, which takes parameters only in a parameter's place."""
left_out_of_checkpoints: Final[Callable[[nn.Module], set[str]]] = operator.attrgetter("_non_persistent_buffers_set")
"""The names of the buffers that a module keeps out of its `state_dict` (`persistent=False`)."""
renew_list_of_weights: Final[Callable[..., Any]] = operator.methodcaller("_init_flat_weights")
"""Has an `nn.RNNBase` look up its parameters again, of which it keeps a list."""
tree_flatten: Final[Callable[..., Any]] = _pytree.tree_flatten
tree_leaves: Final[Callable[..., Any]] = _pytree.tree_leaves
tree_unflatten: Final[Callable[..., Any]] = _pytree.tree_unflatten
"""torch.compile traces them; `torch.utils.pytree`, their public place, is newer than the oldest torch supported."""
WRAPPERS: Final = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper", "_checkpoint_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "OffloadWrapper", "_checkpoint_wrapped_module"),
)
"""Modules around a module: the module and the class of each, and its attribute for what it wraps."""


def inside_of_compiled(module: Any) -> Any:
    """The module that `torch.compile` has wrapped; another one as it is."""
    return getattr(module, "_orig_mod", module)


def compiler_of(compiled: Any) -> Callable[[Any], Any] | None:
    """What compiles as `compiled` was compiled, which `torch.compile` made of a module or a function, or which a
    module's `compile()` left in it; None where torch does not tell."""
    known = getattr(compiled, "dynamo_ctx", None)
    code = getattr(compiled, "__code__", None)
    if known is None and code is not None and "self" in code.co_freevars:
        known = compiled.__closure__[code.co_freevars.index("self")].cell_contents
    return known if isinstance(known, sys.modules["torch._dynamo.eval_frame"]._TorchDynamoContext) else None


def compiled_in_place(module: nn.Module) -> Any:
    """What `module.compile()` left in the module, which runs in the place of its call; None of another module."""
    return getattr(module, "_compiled_call_impl", None)


def compile_in_place(module: nn.Module, compiler: Callable[[Any], Any]) -> None:
    """`module.compile()` with a compiler that is there."""
    module._compiled_call_impl = compiler(module._call_impl)


class followed_in_place:  # noqa: N801  # it is called as a function that gives a handle
    """Has a module that is compiled in place hand what it gives to `follow`, until `remove` is called."""

    def __init__(self, module: nn.Module, follow: Callable[[Any], None]) -> None:
        self.module, self.compiled = module, compiled_in_place(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = self.compiled(*args, **kwargs)
            follow(result)
            return result

        module._compiled_call_impl = call

    def remove(self) -> None:
        """As before."""
        self.module._compiled_call_impl = self.compiled


def is_compiled(function: Any) -> bool:
    """Whether `torch.compile` made it: a module or a function."""
    return "_torchdynamo_orig_callable" in getattr(function, "__dict__", {})


# Autograd.

hooks_of: Final[Callable[[torch.Tensor], Any]] = operator.attrgetter("_backward_hooks")
hooks_behind_gradient: Final[Callable[[torch.Tensor], Any]] = operator.attrgetter("_post_accumulate_grad_hooks")
"""What hangs on a tensor by `register_hook`, and by `register_post_accumulate_grad_hook`: number -> hook, or None."""
comm_hooks_of: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_comm_hooks")
"""(hook, state) of every `register_comm_hook` of a DistributedDataParallel, of which its copies know nothing."""


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread now."""
    running: int = torch._C._current_graph_task_id()
    return running >= 0


set_grad_enabled: Final[Callable[..., Any]] = torch._C._set_grad_enabled
"""What `torch.no_grad` and its like call, as a `TorchFunctionMode` sees it."""
custom_function_call: Final[Callable[..., Any]] = _custom_function_call
"""What `torch.autograd.Function.apply` becomes under `torch.func`, as a mode sees it: the function comes first."""
transforms_are_active: Final[Callable[[], bool]] = torch._C._are_functorch_transforms_active
"""Whether the caller runs under one of `torch.func`'s transformations."""
nodes_made: Final[Callable[[], int] | None] = getattr(torch._C._autograd, "_get_sequence_nr", None)
"""How many nodes autograd has made in this thread; None where torch does not tell."""
top_hooks_of_saved: Final[Callable[[bool], Any] | None] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
"""`(True)` -> what is done with saved tensors now, (pack, unpack) or None; None where torch does not tell (2.7)."""
REENTRANT: Final = checkpoint.CheckpointFunction.forward.__code__
"""The frame in which a checkpoint with `use_reentrant=True` runs its function, `ctx.run_function` of its `ctx`."""
CHECKPOINT_PACKS: Final = "_checkpoint_hook."
"""How the name of the hook begins with which the other kind of checkpoint packs saved tensors."""


def forward_mode_is_on() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Have autograd call back at the end of the backward pass that is under way, for which it has no public way."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def record_of_checkpoint(frame: Any) -> Any:
    """What a running `checkpoint(use_reentrant=False)` keeps for its second run, whose function is `recompute_fn`; None
    if `frame` is another function's. It is a local of the generator that the function holds as its local `gen`."""
    if frame.f_code.co_name != "checkpoint" or frame.f_globals.get("__name__") != checkpoint.__name__:
        return None
    inner = getattr(frame.f_locals.get("gen"), "gi_frame", None)
    record = None if inner is None else inner.f_locals.get("new_frame")
    return record if hasattr(record, "recompute_fn") else None


PlainAutocast: Final = torch.autocast
"""torch's own region, also for those who have put polyamp's in the place of `torch.autocast`."""
no_autocast_on_cuda: Final[Callable[[], bool]] = torch.cuda.amp.common.amp_definitely_not_available
"""Whether torch turns its own regions on "cuda" off here, with a warning: neither CUDA nor torch_xla is there."""
RegionBase: Final[Any] = getattr(torch.amp.autocast_mode, "_UnmanagedAutocast", torch.autocast)
"""A `torch.autocast` that torch.compile does not take for a plain one: it replaces every other instance that was made
outside of what it compiles by a plain region, whatever the class's `__enter__` does (torch 2.7 to 2.13)."""


def tell_custom_bwd(ctx: Any, *, enabled: bool, dtype: torch.dtype) -> None:
    """Leave in `ctx` what torch's `custom_fwd` does: its `custom_bwd` reads it, and so do some libraries."""
    ctx._fwd_used_autocast, ctx._dtype = enabled, dtype


def told_by_custom_fwd(ctx: Any) -> tuple[bool, torch.dtype] | None:
    """What torch's `custom_fwd` left in `ctx`: whether autocast was on, and its dtype; None if it left nothing."""
    enabled = getattr(ctx, "_fwd_used_autocast", None)
    return None if enabled is None else (enabled, ctx._dtype)


# Modes: `with mode:` is public, but has Python code of torch's in which an interrupt may come, and no way to take out a
# mode that is not the innermost.

modes_are_open: Final[Callable[[], int]] = torch._C._len_torch_function_stack
"""How many `TorchFunctionMode`s this thread has."""
open_modes: Final[Callable[[], list[Any]]] = _get_current_function_mode_stack
"""They, innermost last, in a new list."""
push_mode: Final[Callable[[Any], None]] = _push_mode
pop_mode: Final[Callable[[], Any]] = _pop_mode

# FSDP2 (`fully_shard`): its states hang on modules; of a state this reads its modules, its policy and its groups, of a
# group its parameters, of a parameter its places, its sharded form and what is gathered (torch 2.7 to 2.13).


class Gathered(NamedTuple):
    """A parameter that FSDP2 gathers for a forward pass.

    Attributes:
        unit: the module that `fully_shard` was called with, or the first of several.
        policy: the `MixedPrecisionPolicy` of that call.
        places: the modules that own it, and its name in each.
        sharded: the parameter that the optimizer holds.
        whole: what stands in its place during a forward pass; None before the first.
    """

    unit: nn.Module
    policy: Any
    places: tuple[tuple[nn.Module, str], ...]
    sharded: torch.Tensor
    whole: torch.Tensor | None


def is_flattened_by_fsdp1(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether FSDP1 has made one of these parameters, or taken it apart: it marks them."""
    return "torch.distributed.fsdp._flat_param" in sys.modules and any(
        getattr(p, "_fsdp_flattened", False) for p in parameters
    )


def fsdp2_state(module: nn.Module) -> Any:
    """The state of a module that `fully_shard` was called with; None of another."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return None if states is None else states._get_module_fsdp_state(module)


def gathered_by_fsdp2(modules: Iterable[nn.Module] | None = None) -> list[Gathered]:
    """What FSDP2 gathers for these modules, or for every module of the process that is still there."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return []
    if modules is None:
        modules = list(sys.modules["torch.distributed._composable_state"]._module_state_mapping)
    states = {id(state): state for state in map(fsdp2_state, modules) if state is not None}
    return [
        _gathered(state, each) for state in states.values() for group in _groups(state) for each in group.fsdp_params
    ]


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # older torch: one group per state
    return [group for group in ([state._fsdp_param_group] if several is None else several) if group is not None]


def _gathered(state: Any, each: Any) -> Gathered:
    info = each._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    places = ((info.module, info.param_name), *shared)
    return Gathered(
        state._modules[0], state._mp_policy, places, each.sharded_param, getattr(each, "_unsharded_param", None)
    )


# Optimizers and scalers.

new_record: Final[Callable[[], dict[str, Any]]] = _refresh_per_optimizer_state
"""What `torch.amp.GradScaler` begins each iteration of an optimizer with: `stage` and `found_inf_per_device`."""
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_ALL: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
of_accelerator: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_optimizers")
"""The optimizers that an `accelerate.Accelerator` has prepared."""


step_unless_found: Final[Callable[[Any], Any]] = operator.attrgetter("_maybe_opt_step")
"""What a `torch.amp.GradScaler` (the object, or its class) steps an unfused optimizer with; libraries override it."""


def takes_found_inf(optimizer: Any) -> bool:
    """Whether `optimizer.step` reads `optimizer.found_inf` and `.grad_scale`, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_is_watched(optimizer: Any) -> bool:
    """Whether something hangs on `optimizer.step`: a method in the object's own dict, or a hook."""
    own, everywhere = vars(optimizer), vars(_optimizers)
    return "step" in own or any(map(own.get, _HOOKS)) or any(map(everywhere.get, _HOOKS_OF_ALL))


# What torch.compile is told about functions.

not_compiled: Final[Callable[[_Function], _Function]] = _disable_dynamo  # type: ignore[assignment]  # torch's has overloads
"""`torch.compiler.disable`, which imports the compiler when the function is called and not when it is decorated."""
NOTHING: Final = contextlib.nullcontext()


def constant_when_compiled(function: _Function) -> _Function:
    """Have a compiler run the function while it traces and take its result for a constant.

    It is the mark of `torch.compiler.assume_constant_result` (torch 2.7 to 2.13), which imports the compiler to set it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute
    return function


def never_compiled(*functions: Callable[..., Any]) -> None:
    """Keep torch.compile out of functions, and of what they call, where it meets them as frames of their own.

    Inside a function that it traces they are traced as ever. In torch 2.7 to 2.13 the settings stand in a C module,
    which is there without the compiler; where they are not, such a frame is compiled, as everything else is.
    """
    frames: Any = torch._C._dynamo.eval_frame
    action = getattr(frames, "_FrameAction", None)
    if action is not None:
        for function in functions:
            strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP)
            frames.set_code_exec_strategy(function.__code__, strategy)


class _BackwardAsEager:
    """A block in which what is compiled gets the backward pass that eager code has: outside the region.

    The compiler traces the backward pass with the forward one and, unless told otherwise, under the same autocast: a
    float32 island inside a 16-bit region would have 16-bit products in its gradient. torch's setting for that is
    thread-local (in 2.7 it is the process's), and is what it was behind the block.
    """

    before: str | None = None

    def __enter__(self) -> None:
        from torch._functorch import config  # loaded with the compiler

        self.before = config.backward_pass_autocast
        config.backward_pass_autocast = "off"  # noqa: S105  # a pass, no password

    def __exit__(self, *_: object) -> None:
        """Put back what was there; nothing, if an interrupt came before it was noted."""
        from torch._functorch import config

        if self.before is not None:
            config.backward_pass_autocast = self.before


def backward_as_eager() -> contextlib.AbstractContextManager[None]:
    """A block in which a compiled function's backward pass is that of eager code; free while there is no compiler."""
    if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
        return NOTHING
    return _BackwardAsEager()


# Several processes.


def meshes_of(module: Any) -> list[Any]:
    """The meshes over which `fully_shard` has spread the parameters of a module, of which it makes an `FSDPModule`;
    none for another module. There is no public way to ask for them."""
    return [group.mesh_info.mesh for group in sharded_groups_of(module)]


def sharded_groups_of(module: Any) -> list[Any]:
    """What `fully_shard` keeps for each group of a module's parameters that it gathers together; it may be none."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def flat_group_of(mesh: Any) -> Any:
    """One process group of all the processes of a mesh of several dimensions."""
    return mesh._flatten().get_group()


def prefixed(prefix: str, store: Any) -> Any:
    """A store whose names begin with this; the class is public, its place is not typed."""
    made: Any = torch.distributed.PrefixStore  # type: ignore[attr-defined]
    return made(prefix, store)


def timeout_of(group: Any) -> datetime.timedelta | None:
    """How long a collective of a process group waits for the other ranks; None where the group does not say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None


def local_of(tensor: Any) -> Any:
    """What this process holds of a sharded tensor, the same object every time; another tensor as it is. The public
    `to_local` makes a new one of a parameter each time."""
    return getattr(tensor, "_local_tensor", tensor)

"""The only module that uses torch's private names, or that handles differences between its versions (2.7 to 2.13).

Every other module of this package imports them from here, under descriptive names;
`tests/core/house/test_private_names.py` checks the syntax trees. Frequently called functions are aliased, not wrapped,
to avoid the cost of a call. Private names are used where no public API was found. Each is documented with the behaviour
that polyamp relies on, as a guide for newer versions of torch.

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
from torch.torch_version import TorchVersion
from torch.utils import _pytree, checkpoint
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Kernels over lists of tensors. torch.optim and other projects use them, but torch documents them little: each takes
# lists of one device and dtype, and a scalar tensor is the last argument.

foreach_add: Final[Callable[..., Any]] = torch._foreach_add
foreach_add_: Final[Callable[..., Any]] = torch._foreach_add_
foreach_copy_: Final[Callable[..., Any]] = torch._foreach_copy_
foreach_cos: Final[Callable[..., Any]] = torch._foreach_cos
foreach_div: Final[Callable[..., Any]] = torch._foreach_div
foreach_clamp_max_: Final[Callable[..., Any]] = torch._foreach_clamp_max_
foreach_clamp_min_: Final[Callable[..., Any]] = torch._foreach_clamp_min_
foreach_div_: Final[Callable[..., Any]] = torch._foreach_div_
foreach_expm1: Final[Callable[..., Any]] = torch._foreach_expm1
foreach_floor: Final[Callable[..., Any]] = torch._foreach_floor
foreach_lerp_: Final[Callable[..., Any]] = torch._foreach_lerp_
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
"""Kernels that torch.optim calls for each group of tensors of one device and dtype; as in torch 2.7 to 2.13."""
check_and_unscale_: Final[Callable[..., Any]] = torch._amp_foreach_non_finite_check_and_unscale_
"""`(gradients, found_inf, inverse_scale)`: the kernel of torch's own scaler. It multiplies in place, and writes 1 into
`found_inf` if a gradient is not finite."""
flatten_dense_tensors: Final[Callable[..., Any]] = torch._utils._flatten_dense_tensors
"""Concatenates flattened tensors of one dtype to one vector, without a Python list of views."""
group_by_device_and_dtype: Final[Callable[..., Any]] = _group_tensors_by_device_and_dtype
"""`([tensors])` -> {(device, dtype): ([tensors], indices)}, grouped in C++."""

SPARSE_SUM: Final = "_sparse_sum"
"""Name of the function that `torch.sparse.sum` calls, as modes see it."""

# Tensors, modules and trees.

tensor_version: Final[Callable[[Any], int]] = operator.attrgetter("_version")
"""Version counter: the number of in-place writes to a tensor. An inference tensor has none."""
coalesced_values: Final[Callable[[torch.Tensor], torch.Tensor]] = torch.Tensor._values
"""The values of a sparse tensor in memory; the public `values()` adds an autograd node."""
module_parameters: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_parameters")
module_buffers: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_buffers")
module_children: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_modules")
"""The dicts that `nn.Module.__getattr__` reads. Writing to them replaces a parameter, a buffer or a child without
`nn.Module.__setattr__`, which replaces a parameter by a parameter only."""
non_persistent_buffers: Final[Callable[[nn.Module], set[str]]] = operator.attrgetter("_non_persistent_buffers_set")
"""The names of the buffers that a module excludes from its `state_dict` (`persistent=False`)."""
reset_flat_weights: Final[Callable[..., Any]] = operator.methodcaller("_init_flat_weights")
"""Makes an `nn.RNNBase` rebuild its list of its parameters."""
DispatchMode: Final[Any] = _TorchDispatchMode
"""Mode below autograd and autocast."""
tree_flatten: Final[Callable[..., Any]] = _pytree.tree_flatten
tree_leaves: Final[Callable[..., Any]] = _pytree.tree_leaves
tree_unflatten: Final[Callable[..., Any]] = _pytree.tree_unflatten
"""torch.compile traces them. Their public module, `torch.utils.pytree`, is newer than the oldest supported torch."""
WRAPPER_CLASSES: Final = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper", "_checkpoint_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "OffloadWrapper", "_checkpoint_wrapped_module"),
)
"""Wrapper modules: the Python module and the class of each, and its attribute for the wrapped module."""


def uncompiled_module(module: Any) -> Any:
    """Return the module that `torch.compile` has wrapped; another module unchanged."""
    return getattr(module, "_orig_mod", module)


def compiler_like(compiled: Any) -> Callable[[Any], Any] | None:
    """Return a compiler with the options of `compiled`, a result of `torch.compile` or of a module's `compile()`; None
    if torch does not expose them."""
    known = getattr(compiled, "dynamo_ctx", None)
    code = getattr(compiled, "__code__", None)
    if known is None and code is not None and "self" in code.co_freevars:
        known = compiled.__closure__[code.co_freevars.index("self")].cell_contents
    return known if isinstance(known, sys.modules["torch._dynamo.eval_frame"]._TorchDynamoContext) else None


def compiled_call_of_module(module: nn.Module) -> Any:
    """Return the compiled call that `module.compile()` stores in the module; None for another module."""
    return getattr(module, "_compiled_call_impl", None)


def has_plain_call(module: nn.Module) -> bool:
    """Return whether a call of a module is its class's `forward` alone: no hooks, and no `forward` of the object."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def compile_in_place(module: nn.Module, compiler: Callable[[Any], Any]) -> None:
    """Do `module.compile()` with an existing compiler."""
    module._compiled_call_impl = compiler(module._call_impl)


class CompiledCallHook:  # used like a function that returns a handle
    """Forward hook of a module that is compiled in place. It passes outputs to `follow` until `remove` is called."""

    def __init__(self, module: nn.Module, follow: Callable[[Any], None]) -> None:
        self.module, self.compiled = module, compiled_call_of_module(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = self.compiled(*args, **kwargs)
            follow(result)
            return result

        module._compiled_call_impl = call

    def remove(self) -> None:
        """Remove the hook."""
        self.module._compiled_call_impl = self.compiled


def is_compiled(function: Any) -> bool:
    """Return whether a module or a function is a result of `torch.compile`."""
    return "_torchdynamo_orig_callable" in getattr(function, "__dict__", {})


# Autograd.

backward_hooks: Final[Callable[[torch.Tensor], Any]] = operator.attrgetter("_backward_hooks")
post_accumulate_grad_hooks: Final[Callable[[torch.Tensor], Any]] = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_hook` and of `register_post_accumulate_grad_hook` on a tensor: number -> hook, or None."""
ddp_comm_hooks: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_comm_hooks")
"""(hook, state) of every `register_comm_hook` of a DistributedDataParallel, which its copies lose."""


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread now."""
    running: int = torch._C._current_graph_task_id()
    return running >= 0


set_grad_enabled: Final[Callable[..., Any]] = torch._C._set_grad_enabled
"""The function that `torch.no_grad` and similar blocks call, as a `TorchFunctionMode` sees it."""
custom_function_call: Final[Callable[..., Any]] = _custom_function_call
"""The form of `torch.autograd.Function.apply` under `torch.func`, as a mode sees it; first argument: the function."""
has_active_transforms: Final[Callable[[], bool]] = torch._C._are_functorch_transforms_active
"""Whether the caller runs under one of `torch.func`'s transformations."""
autograd_sequence_number: Final[Callable[[], int] | None] = getattr(torch._C._autograd, "_get_sequence_nr", None)
"""Number of nodes that autograd has created in this thread; None if torch does not expose it."""
top_saved_tensor_hooks: Final[Callable[[bool], Any] | None] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
"""`(True)` -> the current hooks of saved tensors, (pack, unpack) or None; None if torch does not expose them (2.7)."""
HAS_AUTOCAST_CACHE_KEYS: Final = TorchVersion(torch.__version__) >= "2.13"
"""Whether the caches of torch's compiler have autocast's state of every device type in their keys."""
REENTRANT_CODE: Final = checkpoint.CheckpointFunction.forward.__code__
"""The frame in which a checkpoint with `use_reentrant=True` runs its function, `ctx.run_function` of its `ctx`."""
CHECKPOINT_HOOK_PREFIX: Final = "_checkpoint_hook."
"""Name prefix of the hook with which the other kind of checkpoint packs saved tensors."""


def is_forward_mode_enabled() -> bool:
    """Return whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def call_after_backward(callback: Callable[[], None]) -> None:
    """Register a callback for the end of the current backward pass; autograd has no public API for it."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def checkpoint_record(frame: Any) -> Any:
    """Return the record of a running `checkpoint(use_reentrant=False)`, whose `recompute_fn` is its second run; None if
    `frame` is another function's. It is a local of the generator in the function's local `gen`."""
    if frame.f_code.co_name != "checkpoint" or frame.f_globals.get("__name__") != checkpoint.__name__:
        return None
    inner = getattr(frame.f_locals.get("gen"), "gi_frame", None)
    record = None if inner is None else inner.f_locals.get("new_frame")
    return record if hasattr(record, "recompute_fn") else None


TorchAutocast: Final = torch.autocast
"""torch's own region, also if a user has replaced `torch.autocast` by polyamp's."""
is_cuda_autocast_unavailable: Final[Callable[[], bool]] = torch.cuda.amp.common.amp_definitely_not_available
"""Whether torch disables its regions on "cuda" with a warning, as neither CUDA nor torch_xla is available."""
RegionBase: Final[Any] = getattr(torch.amp.autocast_mode, "_UnmanagedAutocast", torch.autocast)
"""Base class for a `torch.autocast` that torch.compile does not treat as plain. torch.compile replaces every other
instance from outside compiled code by a plain region, whatever the class's `__enter__` does (torch 2.7 to 2.13)."""


def set_custom_fwd_state(ctx: Any, *, enabled: bool, dtype: torch.dtype) -> None:
    """Store in `ctx` what torch's `custom_fwd` does: its `custom_bwd` reads it, and so do some libraries."""
    ctx._fwd_used_autocast, ctx._dtype = enabled, dtype


def get_custom_fwd_state(ctx: Any) -> tuple[bool, torch.dtype] | None:
    """Return what torch's `custom_fwd` stored in `ctx`: whether autocast was on, and its dtype; None without it."""
    enabled = getattr(ctx, "_fwd_used_autocast", None)
    return None if enabled is None else (enabled, ctx._dtype)


# Modes: `with mode:` is public, but runs Python code of torch in which an interrupt may come, and cannot remove a mode
# that is not the innermost.

open_mode_count: Final[Callable[[], int]] = torch._C._len_torch_function_stack
"""Number of `TorchFunctionMode`s of this thread."""
open_modes: Final[Callable[[], list[Any]]] = _get_current_function_mode_stack
without_function_modes: Final[Callable[[], contextlib.AbstractContextManager[Any]]] = torch._C.DisableTorchFunction
"""Context manager in which no `TorchFunctionMode` sees a call: for bookkeeping beside a model's own operations."""
"""The `TorchFunctionMode`s of this thread, innermost last, in a new list."""
push_mode: Final[Callable[[Any], None]] = _push_mode
pop_mode: Final[Callable[[], Any]] = _pop_mode

# FSDP2 (`fully_shard`) attaches states to modules (torch 2.7 to 2.13). The code below reads:
# - of a state, its modules, its policy and its groups;
# - of a group, its parameters;
# - of a parameter, its owners, its sharded form and its gathered form.


class GatheredParameter(NamedTuple):
    """Parameter that FSDP2 gathers for a forward pass.

    Attributes:
        unit: the module that `fully_shard` was called with, or the first of several.
        policy: the `MixedPrecisionPolicy` of that call.
        places: the modules that own it, and its name in each.
        sharded: the optimizer's parameter.
        whole: its replacement during a forward pass; None before the first.
    """

    unit: nn.Module
    policy: Any
    places: tuple[tuple[nn.Module, str], ...]
    sharded: torch.Tensor
    whole: torch.Tensor | None


def is_flattened_by_fsdp1(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether FSDP1 has created or flattened one of these parameters, which it marks."""
    return "torch.distributed.fsdp._flat_param" in sys.modules and any(
        getattr(p, "_fsdp_flattened", False) for p in parameters
    )


def fsdp2_state(module: nn.Module) -> Any:
    """Return the state of a module that `fully_shard` was called with; None for another module."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return None if states is None else states._get_module_fsdp_state(module)


def gathered_fsdp2_parameters(modules: Iterable[nn.Module] | None = None) -> list[GatheredParameter]:
    """Return the parameters that FSDP2 gathers for these modules, or for every live module of the process."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return []
    if modules is None:
        modules = list(sys.modules["torch.distributed._composable_state"]._module_state_mapping)
    states = {id(state): state for state in map(fsdp2_state, modules) if state is not None}
    return [
        _gathered_parameter(state, each)
        for state in states.values()
        for group in _fsdp_groups(state)
        for each in group.fsdp_params
    ]


def _fsdp_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # older torch: one group per state
    return [group for group in ([state._fsdp_param_group] if several is None else several) if group is not None]


def _gathered_parameter(state: Any, each: Any) -> GatheredParameter:
    info = each._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    places = ((info.module, info.param_name), *shared)
    return GatheredParameter(
        state._modules[0], state._mp_policy, places, each.sharded_param, getattr(each, "_unsharded_param", None)
    )


# Optimizers and scalers.

new_optimizer_record: Final[Callable[[], dict[str, Any]]] = _refresh_per_optimizer_state
"""Makes the record of an optimizer's new iteration in `torch.amp.GradScaler`: `stage` and `found_inf_per_device`."""
_OPTIMIZER_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_OPTIMIZER_HOOKS: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
accelerator_optimizers: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_optimizers")
"""The optimizers that an `accelerate.Accelerator` has prepared."""


maybe_optimizer_step: Final[Callable[[Any], Any]] = operator.attrgetter("_maybe_opt_step")
"""Method of a `torch.amp.GradScaler` (object or class) that steps an unfused optimizer; libraries override it."""


def has_found_inf_support(optimizer: Any) -> bool:
    """Return whether `optimizer.step` reads `optimizer.found_inf` and `.grad_scale`, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether `optimizer.step` has hooks, or is replaced by a method in the object's `__dict__`."""
    own, everywhere = vars(optimizer), vars(_optimizers)
    return "step" in own or any(map(own.get, _OPTIMIZER_HOOKS)) or any(map(everywhere.get, _GLOBAL_OPTIMIZER_HOOKS))


# Marks on functions for torch.compile.

disable_compile: Final[Callable[[_Function], _Function]] = _disable_dynamo  # type: ignore[assignment]  # has overloads
"""`torch.compiler.disable` that imports the compiler when the function is called, not when it is decorated."""
NULL_CONTEXT: Final = contextlib.nullcontext()


def assume_constant_result(function: _Function) -> _Function:
    """Make a compiler run the function at trace time and treat its result as a constant.

    It sets the mark of `torch.compiler.assume_constant_result` (torch 2.7 to 2.13), which would import the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute
    return function


def skip_compilation(*functions: Callable[..., Any]) -> None:
    """Exclude functions, and the functions they call, from torch.compile where they are separate frames.

    Inside a traced function they are still traced. In torch 2.7 to 2.13 the settings are in a C module, which is
    available without the compiler. Without these settings such a frame is compiled like any other.
    """
    frames: Any = torch._C._dynamo.eval_frame
    action = getattr(frames, "_FrameAction", None)
    if action is not None:
        for function in functions:
            strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP)
            frames.set_code_exec_strategy(function.__code__, strategy)


EAGER_BACKWARD: Final = "off"
"""Value of torch's setting `backward_pass_autocast`: compiled code has the backward pass outside the region."""


def backward_pass_setting() -> tuple[Any, str] | None:
    """Return what holds torch's setting `backward_pass_autocast`, and its value; None without a compiler.

    By default the compiler traces the backward pass together with the forward pass, under the same autocast. A float32
    island inside a 16-bit region would then have 16-bit products in its gradient. With `EAGER_BACKWARD` compiled code
    gets the backward pass of eager code: outside the region. The setting is thread-local (process-wide in 2.7).
    """
    if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
        return None
    from torch._functorch import config  # loaded with the compiler

    return config, config.backward_pass_autocast


# Several processes.


def fsdp_meshes(module: Any) -> list[Any]:
    """Return the meshes over which `fully_shard` has sharded the parameters of a module, which it makes an
    `FSDPModule`; none for another module. There is no public API for them."""
    return [group.mesh_info.mesh for group in fsdp_parameter_groups(module)]


def fsdp_parameter_groups(module: Any) -> list[Any]:
    """Return the record of `fully_shard` for each group of a module's parameters gathered together; may be empty."""
    state = fsdp2_state(module)
    return [] if state is None else _fsdp_groups(state)


def group_of_meshes(meshes: Iterable[Any]) -> Any:
    """Return one process group of all the processes of some meshes, which may have several dimensions; None if neither
    a mesh nor the default group consists of exactly these processes."""
    distinct = list({id(mesh): mesh for mesh in meshes}.values())
    ranks = {rank for mesh in distinct for rank in mesh.mesh.flatten().tolist()}
    of_all = [mesh for mesh in distinct if mesh.size() == len(ranks)]
    for mesh in of_all:
        if mesh.ndim == 1:
            return mesh.get_group()
    if len(ranks) == torch.distributed.get_world_size():
        return torch.distributed.group.WORLD
    return of_all[0]._flatten().get_group() if of_all else None


def make_prefix_store(prefix: str, store: Any) -> Any:
    """Return a store that adds a prefix to its keys; the class is public."""
    made: Any = torch.distributed.PrefixStore  # type: ignore[attr-defined]  # torch's stubs lack it
    return made(prefix, store)


def group_timeout(group: Any) -> datetime.timedelta | None:
    """Return the timeout of a process group's collectives; None if the group does not expose it."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None


def local_tensor_of(tensor: Any) -> Any:
    """Return the local shard of a sharded tensor, the same object every time; another tensor unchanged. The public
    `to_local` returns a new object for a parameter each time."""
    return getattr(tensor, "_local_tensor", tensor)

"""Modes that intercept dropout: their base class, and `SharedRandomMode`, which supplies all random numbers.

Each mask, or array of random numbers, is one draw, in the order of the program's calls. Dropout keeps elements whose
draw is >= its rate; `bernoulli(p)` is 1 where it is >= 1 - p. Other distributions use the draw's quantiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyamp.errors import UnsupportedError
from polyamp.parity.trace.observer import UniformSource
from polyamp_torch.compat import (
    CHECKPOINT_HOOK_PREFIX,
    NULL_CONTEXT,
    TorchAutocast,
    is_in_backward,
    open_modes,
    top_saved_tensor_hooks,
)
from polyamp_torch.precision.op_list import BACKWARD_FUNCTIONS, copy_without_dispatch
from polyamp_torch.precision.torch_only import activation_checkpointing

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

DROPOUT_FUNCTIONS: Final = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
"""The functions of `torch`, each with an in-place form, that implement all of torch's dropout."""
CHANNEL_DROPOUT_FUNCTIONS: Final = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout")
"""The functions that drop whole channels."""
RECURRENT_FUNCTIONS: Final = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_ALPHA_PRIME: Final = 1.7580993408473766
"""Negative of the value that alpha dropout inserts: SELU's limit at minus infinity."""
_MIN_DRAW: Final = 2.0**-24
"""Minimum distance of draws from 0 and 1 for distributions with infinite quantiles."""


class DropoutMode(TorchFunctionMode):
    """Base `TorchFunctionMode` that stays active in the recomputation of checkpoints, and inside a backward pass."""

    def carry_into_recomputation(self) -> None:
        """Keep the mode active when a checkpoint recomputes the current code."""
        if not torch.compiler.is_compiling():
            activation_checkpointing.carry_into_checkpoint(("dropout", id(self)), self._reenter, everywhere=True)

    def _reenter(self) -> contextlib.AbstractContextManager[Any]:
        return NULL_CONTEXT if any(mode is self for mode in open_modes()) else self

    def call_in_mode(self, func: Function, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one of torch's Python functions so that the mode sees its inner calls."""
        if not all(kind in (torch.Tensor, nn.Parameter) for kind in types):  # other subclasses may override
            return func(*args, **kwargs)
        body = copy_without_dispatch(func)
        with self:
            return body(*args, **kwargs)


class SharedRandomMode(DropoutMode):
    """Mode that takes random numbers from `draws`.

    The recomputation of a checkpoint gets the same numbers again: a checkpoint restores torch's own random stream, and
    a number of that stream identifies the draw.

    Args:
        draws: source of the numbers.
    """

    def __init__(self, draws: UniformSource) -> None:
        super().__init__()
        self.draws = draws
        self.draws_by_key: dict[int, Array] = {}
        self.again = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a call of a torch function; most calls run unchanged."""
        kwargs = kwargs or {}
        own = _REPLACEMENTS.get(func)
        if own is not None:
            self.carry_into_recomputation()
            if "input" in kwargs:
                args, kwargs = (
                    (kwargs["input"], *args),
                    {name: each for name, each in kwargs.items() if name != "input"},
                )
            return own(self, func, *args, **kwargs)
        if func in _COMPOSITE_FUNCTIONS:
            self.carry_into_recomputation()
            return self.call_in_mode(func, types, args, kwargs)
        return func(*args, **kwargs)

    def uniform(self, shape: Sequence[int], like: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Return the next numbers of [0, 1), float32 unless `options` has another dtype."""
        values = torch.from_numpy(np.array(self._next_draw(tuple(int(length) for length in shape)), np.float32))
        return values.to(device=None if like is None else like.device, **{"dtype": torch.float32, **options})

    def keep_mask(self, shape: Sequence[int], rate: float, like: torch.Tensor) -> torch.Tensor:
        """Return the mask of a dropout, in the dtype of `like`."""
        return (self.uniform(shape, like) >= rate).to(like.dtype)

    def _next_draw(self, shape: tuple[int, ...]) -> Array:
        again = is_in_backward()
        if self.again and not again:  # the next forward pass
            self.draws_by_key.clear()
        self.again = again
        if not again and not _in_checkpoint():
            return self.draws(shape)
        key = int(torch.randint(1 << 62, (), dtype=torch.int64).item())
        if not again or key not in self.draws_by_key:
            self.draws_by_key[key] = self.draws(shape)
        return self.draws_by_key[key]


def _in_checkpoint() -> bool:
    if not torch.is_grad_enabled() or top_saved_tensor_hooks is None:
        return True
    hooks = top_saved_tensor_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith(CHECKPOINT_HOOK_PREFIX)


def _dropout(mode: SharedRandomMode, func: Function, given: Any, p: float = 0.5, training: bool = True,
             inplace: bool = False, train: bool = True) -> Any:  # fmt: skip
    if not (training and train) or p == 0.0:
        return func(given, p, False)
    name = func.__name__
    shape = given.shape
    if name.rstrip("_") in CHANNEL_DROPOUT_FUNCTIONS:
        channels = 1 if (name == "dropout1d" and given.dim() == 2) or (name == "dropout3d" and given.dim() == 4) else 2
        shape = (*shape[:channels], *(1 for _ in shape[channels:]))
    mask = mode.keep_mask(shape, p, given)
    if "alpha" in name:
        slope = 1.0 / math.sqrt((_ALPHA_PRIME * _ALPHA_PRIME * p + 1.0) * (1.0 - p)) if p < 1.0 else 0.0
        shift = (mask - 1.0) * (_ALPHA_PRIME * slope) + _ALPHA_PRIME * slope * p
        made = given * (mask * slope) + shift
        return given.copy_(made) if inplace or name.endswith("_") else made
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return given.mul_(mask).mul_(scale) if inplace or name.endswith("_") else given.mul(mask).mul(scale)


def _native_dropout(mode: SharedRandomMode, func: Function, given: Any, p: float, train: bool | None = True) -> Any:
    if train is False or p == 0.0:
        return func(given, p, False)
    mask = mode.keep_mask(given.shape, p, given)
    return given.mul(mask).mul(1.0 / (1.0 - p) if p < 1.0 else 0.0), mask.bool()


def _attention(mode: SharedRandomMode, func: Function, query: Any, key: Any, value: Any, attn_mask: Any = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:  # fmt: skip
    """Compute attention by its formula, in float32 like torch's CPU kernel, with the result in its dtype."""
    if dropout_p == 0.0:
        more = {"enable_gqa": True} if enable_gqa else {}
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, **more)
    kind = query.device.type
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    dtype = query.dtype if query.dtype == torch.float64 else narrow
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with TorchAutocast(kind, enabled=False):
        q, k, v = (each.to(dtype).to(wide) for each in (query, key, value))
        if enable_gqa:
            k, v = (each.repeat_interleave(q.size(-3) // each.size(-3), -3) for each in (k, v))
        scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if attn_mask is not None:
            is_mask = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if is_mask else scores + attn_mask.to(wide)
        weights = scores.softmax(-1)
        mask = mode.keep_mask(weights.shape, dropout_p, weights)
        return (weights.mul(mask).mul(1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0) @ v).to(dtype)


def _recurrent(mode: SharedRandomMode, func: Function, *args: Any) -> Any:
    """Run a stack of recurrent layers, one by one, with dropout between them."""
    packed = not isinstance(args[3], bool)
    given, hx, weights, biases, layers, rate, train, both, *first = (args[0], *args[2:]) if packed else args
    if not train or rate == 0.0 or layers == 1:
        return func(*args)
    ways = 2 if both else 1
    count = len(weights) // layers
    ends = []
    for layer in range(layers):
        part = slice(layer * ways, (layer + 1) * ways)
        state = [each[part] for each in hx] if isinstance(hx, list | tuple) else hx[part]
        own = weights[layer * count : (layer + 1) * count]
        head = (given, args[1]) if packed else (given,)
        given, *end = func(*head, state, own, biases, 1, 0.0, train, both, *first)
        ends.append(end)
        if layer < layers - 1:
            given = given.mul(mode.keep_mask(given.shape, rate, given)).mul(1.0 / (1.0 - rate) if rate < 1.0 else 0.0)
    return given, *(torch.cat(each) for each in zip(*ends, strict=True))


def _rrelu(mode: SharedRandomMode, func: Function, given: Any, lower: float = 1 / 8, upper: float = 1 / 3,
           training: bool = False, inplace: bool = False) -> Any:  # fmt: skip
    if not training:
        return func(given, lower, upper, False)
    slope = mode.uniform(given.shape, given, dtype=given.dtype) * (upper - lower) + lower
    made = torch.where(given < 0, given * slope, given)
    return given.copy_(made) if inplace or func.__name__.endswith("_") else made


def _normal(u: torch.Tensor, mean: Any = 0.0, std: Any = 1.0) -> torch.Tensor:
    made: torch.Tensor = torch.special.ndtri(u.double().clamp(_MIN_DRAW, 1.0 - _MIN_DRAW)) * std + mean
    return made


def _exponential(u: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    return -torch.log(u.double().clamp_min(_MIN_DRAW)) / lambd  # its negative logarithm is then Gumbel's -log(-log(u))


def _replace_factory(quantile: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a replacement of `torch.rand` and similar functions."""

    def own(mode: SharedRandomMode, func: Function, *size: Any, dtype: Any = None, device: Any = None, out: Any = None,
            requires_grad: bool = False, **options: Any) -> Any:  # fmt: skip
        shape = options.get("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        like = torch.empty(0, dtype=dtype, device=device)
        made = quantile(mode.uniform(shape, like)).to(like.dtype)
        return made.requires_grad_(requires_grad) if out is None else out.copy_(made)

    return own


def _replace_factory_like(quantile: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a replacement of `torch.rand_like` and similar functions."""

    def own(mode: SharedRandomMode, func: Function, given: Any, *, dtype: Any = None, device: Any = None,
            requires_grad: bool = False, **options: Any) -> Any:  # fmt: skip
        made = quantile(mode.uniform(given.shape, given)).to(device=device, dtype=dtype or given.dtype)
        return made.requires_grad_(requires_grad)

    return own


def _replace_in_place(quantile: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a replacement of `Tensor.uniform_` and similar methods."""

    def own(
        mode: SharedRandomMode, func: Function, given: Any, *args: Any, generator: Any = None, **kwargs: Any
    ) -> Any:
        kwargs = {{"from": "low", "to": "high"}.get(name, name): value for name, value in kwargs.items()}
        return given.copy_(quantile(mode.uniform(given.shape, given), *args, **kwargs))

    return own


def _bernoulli(
    mode: SharedRandomMode, func: Function, given: Any, p: Any = None, *, generator: Any = None, out: Any = None
) -> Any:
    chance = (given if p is None else torch.as_tensor(p, device=given.device)).double()
    made = (mode.uniform(given.shape, given).double() >= 1.0 - chance).to(given.dtype)
    return made if out is None else out.copy_(made)


def _bernoulli_(mode: SharedRandomMode, func: Function, given: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    return given.copy_(_bernoulli(mode, func, given, p))


def _randint(mode: SharedRandomMode, func: Function, low: Any, high: Any = None, size: Any = None, *,
             dtype: Any = torch.int64, device: Any = None, **options: Any) -> Any:  # fmt: skip
    """Replace `torch.randint`: integers from `low` (default 0) up to, not including, `high`."""
    if size is None:
        low, high, size = 0, low, high
    drawn = mode.uniform(size, torch.empty(0, device=device)).double()
    return (torch.floor(drawn * (high - low)) + low).to(dtype)


def _unsupported(mode: SharedRandomMode, func: Function, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"draws: the random numbers of {func.__name__} cannot be made of numbers that another framework draws too. "
        "Draw them outside of the model and give them with the batch, or compare with randomness='off'."
    )


def _uniform(u: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return u * (high - low) + low


_REPLACEMENTS: Final[dict[Function, Callable[..., Any]]] = {
    **{
        getattr(space, name + end): _dropout
        for space in (torch, functional)
        for name in dict.fromkeys((*DROPOUT_FUNCTIONS, *CHANNEL_DROPOUT_FUNCTIONS))
        for end in ("", "_")
        if hasattr(space, name + end)
    },
    torch.native_dropout: _native_dropout,
    functional.scaled_dot_product_attention: _attention,
    **dict.fromkeys(RECURRENT_FUNCTIONS, _recurrent),
    **dict.fromkeys((functional.rrelu, torch.rrelu, torch.rrelu_), _rrelu),
    torch.rand: _replace_factory(_uniform),
    torch.randn: _replace_factory(_normal),
    torch.rand_like: _replace_factory_like(_uniform),
    torch.randn_like: _replace_factory_like(_normal),
    torch.Tensor.uniform_: _replace_in_place(_uniform),
    torch.Tensor.normal_: _replace_in_place(_normal),
    torch.Tensor.exponential_: _replace_in_place(_exponential),
    torch.randint: _randint,
    **dict.fromkeys((torch.randperm, torch.multinomial, torch.poisson, torch.normal, torch.binomial), _unsupported),
    **{
        getattr(torch.Tensor, name): _unsupported
        for name in ("multinomial", "random_", "geometric_", "cauchy_", "log_normal_")
    },
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
}
"""Function that draws -> its replacement: `own(mode, function, *arguments)`."""
_COMPOSITE_FUNCTIONS: Final = {
    function
    for function in (
        *(functional.multi_head_attention_forward, functional.gumbel_softmax, *BACKWARD_FUNCTIONS),
        getattr(functional, "fractional_max_pool2d_with_indices", None),
        getattr(functional, "fractional_max_pool3d_with_indices", None),
    )
    if function is not None
}
"""torch's Python functions that call functions that draw."""

"""Compositions of torch's fused attention and encoder layer, which its modules call where no gradient is needed.

The fused operations compute softmax and normalisation in 16 bits under autocast. These compute the same from torch's
public functions, so that S4 holds in inference as in training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from polyamp_torch.precision.torch_only.compat import nested_from_mask

_KEY_PADDING = 1
"""`mask_type` of a mask of (batch, keys); 0 is one of (queries, keys), 2 one of (batch, heads, queries, keys)."""


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    width: int,
    heads: int,
    in_weight: torch.Tensor,
    in_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `aten::_native_multi_head_attention`: attention over (batch, length, width), and its weights or None."""
    if query.is_nested:
        padded, is_row = _pad(query)
        output, _ = multi_head_attention(
            *(padded, padded, padded, width, heads, in_weight, in_bias, out_weight, out_bias, ~is_row, False),
            mask_type=_KEY_PADDING,
        )
        return _nest(output, is_row), None
    if mask is not None and mask_type == 2:  # see `_KEY_PADDING`
        mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)
    pads = mask_type == _KEY_PADDING
    output, weights = functional.multi_head_attention_forward(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        width,
        heads,
        in_weight,
        in_bias,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=out_weight,
        out_proj_bias=out_bias,
        training=False,
        key_padding_mask=mask if pads else None,
        need_weights=need_weights,
        attn_mask=None if pads else mask,
        average_attn_weights=average_attn_weights,
    )
    return output.transpose(0, 1), weights


def encoder_layer(
    source: torch.Tensor,
    width: int,
    heads: int,
    in_weight: torch.Tensor,
    in_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """Compute `aten::_transformer_encoder_layer_fwd` over (batch, length, width)."""
    if source.is_nested:
        padded, is_row = _pad(source)
        output = encoder_layer(
            *(padded, width, heads, in_weight, in_bias, out_weight, out_bias, use_gelu, norm_first, eps),
            *(norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, weight_1, bias_1, weight_2, bias_2),
            *(~is_row, _KEY_PADDING),
        )
        return _nest(output, is_row)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return multi_head_attention(
            *(x, x, x, width, heads, in_weight, in_bias, out_weight, out_bias, mask, False), mask_type=mask_type
        )[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        activation: Callable[..., torch.Tensor] = functional.gelu if use_gelu else functional.relu
        return functional.linear(activation(functional.linear(x, weight_1, bias_1)), weight_2, bias_2)

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (width,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (width,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = source + attend(norm_1(source))
        return x + feed_forward(norm_2(x))
    x = norm_1(source + attend(source))
    return norm_2(x + feed_forward(x))


def _pad(nested: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a nested tensor padded with zeros, and a mask of (batch, length) that is True at its rows."""
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    lengths = torch.tensor([row.shape[0] for row in nested.unbind()], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]


def _nest(padded: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
    return nested_from_mask(padded, is_row)

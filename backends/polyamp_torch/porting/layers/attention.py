"""Reader of `nn.MultiheadAttention`.

Its projections are packed, or separate where keys and values have different sizes. The heads of a projection are
adjacent along its feature axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from torch import nn

from polyamp.porting.layouts.layer_kinds import default_attention_scale
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Operation, Reshape, Shape, Split, Transpose
from polyamp_torch.porting.layers.layer_record import (
    LayerLeaves,
    LayerReader,
    LayerRecord,
    assignment_line,
    one_layer,
)

_WEIGHTS: Final = {"q_proj_weight": "query_kernel", "k_proj_weight": "key_kernel", "v_proj_weight": "value_kernel"}
_HEAD_SIZES: Final = (64, 128, 32, 80, 96, 16)
"""Usual head sizes, which an attention's arrays do not determine."""
_BIASES: Final = ("query_bias", "key_bias", "value_bias")


def has_attention(arrays: Collection[str]) -> bool:
    """Return whether these arrays of a module are the projections of an attention."""
    return "in_proj_weight" in arrays or set(_WEIGHTS) <= set(arrays)


def attention_rules(shapes: Mapping[str, Shape], heads: int) -> list[Rule]:
    """Return the rules of an attention: (features, inputs) -> (inputs, heads, head size); the output's (features,
    heads * size) -> (heads, size, features).

    Args:
        shapes: shapes of its arrays by their names in the module.
        heads: number of heads.
    """
    width = shapes["out_proj.weight"][0]
    size = width // heads

    def projected(inputs: int) -> tuple[Operation, ...]:
        return Transpose((1, 0)), Reshape((inputs, width), (inputs, heads, size))

    if "in_proj_weight" in shapes:
        rules = [Rule(("in_proj_weight",), tuple(_WEIGHTS.values()), (Split((width,) * 3, 0), *projected(width)))]
    else:
        rules = [Rule((name,), (kernel,), projected(shapes[name][1])) for name, kernel in _WEIGHTS.items()]
    if "in_proj_bias" in shapes:
        rules.append(Rule(("in_proj_bias",), _BIASES, (Split((width,) * 3), Reshape((width,), (heads, size)))))
    joined = (Transpose((1, 0)), Reshape((width, width), (heads, size, width)))
    rules.append(Rule(("out_proj.weight",), ("output_kernel",), joined))
    if "out_proj.bias" in shapes:
        rules.append(Rule(("out_proj.bias",), ("output_bias",)))
    return rules


def attention(module: Any) -> list[LayerRecord]:
    """Read an attention."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    attributes: dict[str, Any] = {
        "scale": default_attention_scale(module.head_dim),
        "dropout": float(module.dropout),
        "mask": "drop",
    }
    kind = "attention with a key of zeros" if module.add_zero_attn else "attention"  # no other framework has it
    lines = {"dropout": assignment_line("dropout")}
    return one_layer(kind, attention_rules(shapes, module.num_heads), attributes, lines)


def file_layers(own: LayerLeaves) -> Iterator[LayerRecord]:
    """Yield the attention of a module in a file, with one form for each number of heads, usual head sizes first."""
    if not has_attention(own) or "out_proj.weight" not in own:
        return
    shapes = {name: leaf.array.shape for name, leaf in own.items()}
    width = shapes["out_proj.weight"][0]
    sizes = [size for size in range(1, width + 1) if width % size == 0]
    sizes.sort(key=lambda size: _HEAD_SIZES.index(size) if size in _HEAD_SIZES else len(_HEAD_SIZES))
    forms = (Form("attention", tuple(attention_rules(shapes, width // size)), {"mask": "drop"}) for size in sizes)
    yield LayerRecord(tuple(forms))


READERS: Final[dict[type, LayerReader]] = {nn.MultiheadAttention: attention}

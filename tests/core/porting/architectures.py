"""Random architectures, for the tests of matching.

In the order of calls, with the words that people use; `dialects` writes them down. Called by test_adversary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple


class Part(NamedTuple):
    """A module or a layer of an architecture, in the order of calls.

    Attributes:
        role: what it is for; a key of `WORDS`, or a word of its own.
        number: its place among its like; None where there is one alone.
        parts: what is in it.
        spec: kind and sizes of a layer, as `sketch` reads them.
        beside: whether it lies beside its neighbours and not behind them: no order is the right one.
    """

    role: str
    number: int | None = None
    parts: tuple[Part, ...] = ()
    spec: str = ""
    beside: bool = False


WORDS: Final[dict[str, tuple[str, ...]]] = {
    "dense": ("fc", "linear", "dense", "lin", "layer"),
    "conv": ("conv", "conv"),
    "norm": ("norm", "ln", "bn"),
    "block": ("blocks", "layers", "h", "layer", "block", "stages"),
    "stage": ("layer", "stage", "layers", "stages", "group"),
    "norm1": ("norm1", "ln_1", "attn_norm", "ln1", "input_layernorm", "layernorm_before", "norm_1"),
    "norm2": ("norm2", "ln_2", "mlp_norm", "ln2", "post_attention_layernorm", "layernorm_after", "norm_2"),
    "cross_norm": ("norm2", "ln_2", "ln2", "norm_2"),
    "norm3": ("norm3", "ln_3", "ln3", "norm_3"),
    "final": ("norm", "ln_f", "final_norm", "ln_final", "norm_f", "encoder_norm"),
    "attention": ("attn", "attention", "self_attn", "self_attention", "mha"),
    "cross": ("cross_attn", "cross_attention", "encoder_attn", "multihead_attn", "attn2"),
    "query": ("q", "query", "wq", "q_proj", "to_q", "Wq", "query_dense"),
    "key": ("k", "key", "wk", "k_proj", "to_k", "Wk", "key_dense"),
    "value": ("v", "value", "wv", "v_proj", "to_v", "Wv", "value_dense"),
    "packed": ("qkv", "c_attn", "in_proj", "query_key_value", "to_qkv"),
    "output": ("proj", "o_proj", "out", "out_proj", "c_proj", "output", "to_out"),
    "mlp": ("mlp", "ffn", "feed_forward", "ff"),
    "up": ("c_fc", "fc1", "up_proj", "dense_in", "intermediate", "w1", "lin1"),
    "down": ("c_proj", "fc2", "down_proj", "dense_out", "output", "w2", "lin2"),
    "gate": ("gate_proj", "gate", "w3", "fc3"),
    "token": ("wte", "tok_embeddings", "embed", "token_embedding", "embedding"),
    "position": ("wpe", "pos_embedding", "position_embedding", "pos_embed"),
    "segment": ("token_type_embeddings", "segment_embedding", "type_embed"),
    "class": ("cls_token", "class_token", "cls"),
    "head": ("head", "classifier", "lm_head", "fc", "logits", "output"),
    "stem": ("stem", "conv1", "conv_init", "patch_embed", "embed_conv"),
    "stem_norm": ("stem_norm", "bn1", "norm1", "bn_init"),
    "shortcut": ("shortcut", "downsample", "conv_proj", "skip"),
    "shortcut_norm": ("shortcut_norm", "downsample_bn", "norm_proj", "skip_norm"),
    "mean": ("mean", "mu", "fc_mu", "mean_head", "z_mean", "fc_mean"),
    "logvar": ("logvar", "log_var", "fc_logvar", "logvar_head", "z_log_var", "sigma"),
    "actor": ("actor", "policy", "pi", "policy_net", "actor_net"),
    "critic": ("critic", "value_net", "vf", "value", "critic_net"),
    "image": ("visual", "image_encoder", "vision_model", "image", "vision"),
    "text": ("text", "text_encoder", "text_model", "transformer", "textual"),
    "image_projection": ("visual_projection", "image_proj", "vision_proj"),
    "text_projection": ("text_projection", "text_proj"),
    "student": ("student", "online", "online_network"),
    "teacher": ("teacher", "target", "target_network"),
    "generator": ("generator", "gen", "G"),
    "discriminator": ("discriminator", "disc", "D"),
    "encoder": ("encoder", "enc", "encode"),
    "decoder": ("decoder", "dec", "decode"),
    "left": ("left", "left_arm", "branch_left"),
    "right": ("right", "right_arm", "branch_right"),
    "experts": ("experts", "expert"),
    "router": ("router", "gate", "gating"),
    "down_path": ("down", "downs", "encoder", "contract", "down_blocks"),
    "up_path": ("up", "ups", "decoder", "expand", "up_blocks"),
    "bottleneck": ("bottleneck", "mid", "bridge", "mid_block"),
    "age": ("age", "age_head", "head_age"),
    "sex": ("sex", "sex_head", "head_sex"),
    "grade": ("grade", "grade_head", "head_grade"),
    "forward": ("forward", "fwd", "forward_layer"),
    "backward": ("backward", "bwd", "backward_layer", "reverse"),
    "cell_in": ("weight_ih", "input_gate", "ih", "x2h"),
    "cell_hid": ("weight_hh", "hidden_gate", "hh", "h2h"),
    "rnn": ("lstm", "rnn", "layer", "cells"),
}
"""Role -> words that people use for it."""


def layer(role: str, spec: str, number: int | None = None, *, beside: bool = False) -> Part:
    return Part(role, number, (), spec, beside)


def module(role: str, *parts: Part, number: int | None = None, beside: bool = False) -> Part:
    return Part(role, number, parts, "", beside)


def _mlp(rng: random.Random) -> list[Part]:
    width, depth = rng.choice((4, 6)), rng.choice((2, 3, 4, 12))
    parts = []
    for number in range(depth):
        parts.append(layer("dense", f"dense {width} {width}", number))
        if rng.random() < 0.3:
            parts.append(layer("norm", f"layer_norm {width}", number))
    return [*parts, layer("head", f"dense {width} {rng.choice((2, width))}")]


def _attention(width: int, role: str = "attention") -> Part:
    return layer(role, f"attention {width} 2")


def _transformer_block(width: int, number: int, *, cross: bool = False, gated: bool = False) -> Part:
    inner = 4 * width
    feed = [layer("up", f"dense {width} {inner}"), layer("down", f"dense {inner} {width}")]
    if gated:
        feed.insert(1, layer("gate", f"dense {width} {inner}"))
    middle = [layer("cross_norm", f"layer_norm {width}"), _attention(width, "cross")] if cross else []
    return module(
        "block",
        layer("norm1", f"layer_norm {width}"),
        _attention(width),
        *middle,
        layer("norm3" if cross else "norm2", f"layer_norm {width}"),
        module("mlp", *feed),
        number=number,
    )


def _gpt(rng: random.Random) -> list[Part]:
    gated, depth = rng.random() < 0.3, rng.choice((1, 2, 3, 11))
    positions = rng.choice((5, 11))
    return [
        layer("token", "embedding 11 4"),
        layer("position", f"embedding {positions} 4"),
        *(_transformer_block(4, number, gated=gated) for number in range(depth)),
        layer("final", "layer_norm 4"),
        *([layer("head", "dense 4 11 -bias")] if rng.random() < 0.5 else []),
    ]


def _vit(rng: random.Random) -> list[Part]:
    return [
        layer("stem", "conv 3 4"),
        layer("class", "parameter 1 1 4"),
        layer("position", "parameter 1 5 4"),
        module("encoder", *(_transformer_block(4, number) for number in range(rng.choice((2, 3))))),
        layer("final", "layer_norm 4"),
        layer("head", f"dense 4 {rng.choice((4, 7))}"),
    ]


def _seq2seq(rng: random.Random) -> list[Part]:
    depth = rng.choice((1, 2))
    return [
        layer("token", "embedding 11 4"),
        module("encoder", *(_transformer_block(4, number) for number in range(depth))),
        module("decoder", *(_transformer_block(4, number, cross=True) for number in range(depth))),
        layer("head", "dense 4 11"),
    ]


def _resnet(rng: random.Random) -> list[Part]:
    parts = [layer("stem", "conv 3 4 -bias"), layer("stem_norm", "batch_norm 4")]
    inputs, total = 4, 0
    for stage in range(rng.choice((1, 2, 3))):
        width, blocks = (4, 8, 8)[stage], []
        for number in range(rng.choice((1, 2))):
            project = inputs != width or (number == 0 and rng.random() < 0.4)
            blocks.append(
                module(
                    "block",
                    layer("conv", f"conv {inputs} {width} -bias", 0),
                    layer("norm", f"batch_norm {width}", 0),
                    layer("conv", f"conv {width} {width} -bias", 1),
                    layer("norm", f"batch_norm {width}", 1),
                    *(
                        [
                            layer("shortcut", f"conv {inputs} {width} -bias", beside=True),
                            layer("shortcut_norm", f"batch_norm {width}", beside=True),
                        ]
                        if project
                        else []
                    ),
                    number=number,
                )
            )
            inputs, total = width, total + 1
        parts.append(module("stage", *blocks, number=stage))
    return [*parts, layer("head", f"dense {inputs} 5")]


def _unet(rng: random.Random) -> list[Part]:
    depth = rng.choice((1, 2, 3))

    def double(role: str, one: int, two: int, number: int | None) -> Part:
        return module(role, layer("conv", f"conv {one} {two}", 0), layer("conv", f"conv {two} {two}", 1), number=number)

    widths = [4, 4, 4, 4] if rng.random() < 0.5 else [4, 8, 16, 32]
    downs = [double("block", 3 if not n else widths[n - 1], widths[n], n) for n in range(depth)]
    ups = [
        module(
            "block",
            layer("upsample", f"conv_transpose {widths[n + 1]} {widths[n]}"),
            layer("conv", f"conv {2 * widths[n]} {widths[n]}", 0),
            layer("conv", f"conv {widths[n]} {widths[n]}", 1),
            number=depth - 1 - n,
        )
        for n in reversed(range(depth))
    ]
    return [
        module("down_path", *downs),
        double("bottleneck", widths[depth - 1], widths[depth], None),
        module("up_path", *ups),
        layer("head", f"conv {widths[0]} 2"),
    ]


_TWINS: Final = (
    ("actor", "critic"),
    ("image", "text"),
    ("student", "teacher"),
    ("generator", "discriminator"),
    ("left", "right"),
)


def _towers(rng: random.Random) -> list[Part]:
    one, two = rng.choice(_TWINS)
    depth = rng.choice((1, 2, 3))
    tower = [layer("dense", "dense 4 4", number) for number in range(depth)]
    same = [
        module(role, *(tower + ([layer("head", f"dense 4 {size}")] if size else [])), beside=True)
        for role, size in zip((one, two), rng.choice(((0, 0), (4, 4), (2, 1))), strict=True)
    ]
    if one == "image":
        same += [
            layer("image_projection", "dense 4 4", beside=True),
            layer("text_projection", "dense 4 4", beside=True),
        ]
    return [*([layer("stem", "dense 3 4")] if rng.random() < 0.5 else []), *same]


def _vae(rng: random.Random) -> list[Part]:
    return [
        module("encoder", layer("dense", "dense 8 4", 0), layer("dense", "dense 4 4", 1)),
        layer("mean", "dense 4 4", beside=True),
        layer("logvar", "dense 4 4", beside=True),
        module("decoder", layer("dense", "dense 4 4", 0), layer("dense", "dense 4 8", 1)),
    ]


def _heads(rng: random.Random) -> list[Part]:
    roles = rng.sample(("age", "sex", "grade"), rng.choice((2, 3)))
    return [layer("dense", "dense 6 4", 0), layer("dense", "dense 4 4", 1)] + [
        layer(role, "dense 4 2", beside=True) for role in roles
    ]


def _experts(rng: random.Random) -> list[Part]:
    count = rng.choice((2, 4, 12))

    def block(number: int) -> Part:
        return module(
            "block",
            layer("router", f"dense 4 {rng.choice((count, count))}"),
            module(
                "experts",
                *(
                    module("expert", layer("up", "dense 4 8"), layer("down", "dense 8 4"), number=each)
                    for each in range(count)
                ),
            ),
            number=number,
        )

    return [layer("token", "embedding 9 4"), *(block(number) for number in range(rng.choice((1, 2))))]


def _recurrent(rng: random.Random) -> list[Part]:
    """Cells written by hand of dense layers, stacked, in both directions."""
    both = rng.random() < 0.6

    def cell(inputs: int) -> tuple[Part, ...]:
        return layer("cell_in", f"dense {inputs} 16"), layer("cell_hid", "dense 4 16 -bias")

    def one(number: int) -> Part:
        inputs = 3 if not number else (8 if both else 4)
        if not both:
            return module("rnn", *cell(inputs), number=number)
        return module("rnn", module("forward", *cell(inputs)), module("backward", *cell(inputs)), number=number)

    return [*(one(number) for number in range(rng.choice((1, 2, 3)))), layer("head", "dense 4 3")]


ARCHITECTURES: Final[dict[str, Callable[[random.Random], list[Part]]]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "vit": _vit,
    "encoder-decoder": _seq2seq,
    "resnet": _resnet,
    "u-net": _unet,
    "towers": _towers,
    "vae": _vae,
    "heads": _heads,
    "experts": _experts,
    "recurrent": _recurrent,
}

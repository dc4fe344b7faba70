"""Which layer is which: models as people name them in each framework, and what nobody can tell."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.matching.matching import match_layers
from polyamp.porting.transfer_plan import make_transfer_plan
from tests.core.porting.sketch import sketch

GPT = {
    "torch": sketch(
        "transformer.wte: embedding 11 6\ntransformer.wpe: embedding 4 6\n"
        + "".join(
            f"""transformer.h.{n}.ln_1: layer_norm 6
            transformer.h.{n}.attn.c_attn: dense 6 18 -bias
            transformer.h.{n}.attn.c_proj: dense 6 6 -bias
            transformer.h.{n}.ln_2: layer_norm 6
            transformer.h.{n}.mlp.c_fc: dense 6 24
            transformer.h.{n}.mlp.c_proj: dense 24 6
            """
            for n in range(11)
        )
        + "transformer.ln_f: layer_norm 6"
    ),
    "linen": sketch(
        "".join(
            f"""Block_{n}/Dense_0: dense 6 24
            Block_{n}/Dense_1: dense 24 6
            Block_{n}/LayerNorm_0: layer_norm 6
            Block_{n}/LayerNorm_1: layer_norm 6
            Block_{n}/MultiHeadDotProductAttention_0/key: dense 6 6 -bias
            Block_{n}/MultiHeadDotProductAttention_0/out: dense 6 6 -bias
            Block_{n}/MultiHeadDotProductAttention_0/query: dense 6 6 -bias
            Block_{n}/MultiHeadDotProductAttention_0/value: dense 6 6 -bias
            """
            for n in sorted(range(11), key=str)
        )
        + "Embed_0: embedding 11 6\nLayerNorm_0: layer_norm 6\npos_embedding: parameter 1 4 6",
        ordered=False,
    ),
    "keras": sketch(
        "token_embedding: embedding 11 6\nposition_embedding: embedding 4 6\n"
        + "".join(
            f"""blocks_{n}/norm1: layer_norm 6
            blocks_{n}/attention: attention 6 2
            blocks_{n}/norm2: layer_norm 6
            blocks_{n}/dense1: dense 6 24
            blocks_{n}/dense2: dense 24 6
            """
            for n in range(11)
        )
        + "final_norm: layer_norm 6"
    ),
    "flat": sketch(
        "embedding: embedding 11 6\npositions: parameter 4 6\n"
        + "".join(
            f"""layer_normalization{f"_{2 * n}" if n else ""}: layer_norm 6
            multi_head_attention{f"_{n}" if n else ""}: attention 6 2
            layer_normalization_{2 * n + 1}: layer_norm 6
            dense{f"_{2 * n}" if n else ""}: dense 6 24
            dense_{2 * n + 1}: dense 24 6
            """
            for n in range(11)
        )
        + "layer_normalization_22: layer_norm 6"
    ),
}
"""One decoder with eleven blocks as four libraries' users name it."""


def paired(one: Inventory, other: Inventory, names: dict[str, str] | None = None) -> dict[str, str]:
    """Path of the source's layer -> path of the target's; all have one."""
    found = match_layers(one, other, names or {})
    assert not found.unmatched[0]
    assert not found.unmatched[1]
    assert not found.indistinguishable, [([a.path for a in x], [b.path for b in y]) for x, y in found.indistinguishable]
    return {each.source.path: each.target.path for each in found.pairs}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(GPT, 2)))
def test_a_decoder_matches_without_names(one: str, other: str) -> None:
    if {one, other} == {"linen", "flat"}:
        # linen sorts by name, and the other side numbers all norms in a row: is LayerNorm_0 the first or the last?
        assert len(match_layers(GPT[one], GPT[other], {}).indistinguishable) == 1
        return
    there = paired(GPT[one], GPT[other])
    back = paired(GPT[other], GPT[one])
    assert back == {target: source for source, target in there.items()}


def test_blocks_are_told_by_their_numbers() -> None:
    pairs = paired(GPT["torch"], GPT["linen"])
    assert pairs["transformer/h/10/ln_2"] == "Block_10/LayerNorm_1"
    assert pairs["transformer/h/2/mlp/c_fc"] == "Block_2/Dense_0"
    assert pairs["transformer/h/3/attn"] == "Block_3/MultiHeadDotProductAttention_0"
    assert pairs["transformer/ln_f"] == "LayerNorm_0"
    assert pairs["transformer/wpe"] == "pos_embedding"
    flat = paired(GPT["torch"], GPT["flat"])
    assert flat["transformer/h/10/ln_2"] == "layer_normalization_21"
    assert flat["transformer/ln_f"] == "layer_normalization_22"
    assert flat["transformer/h/1/attn"] == "multi_head_attention_1"


def test_names_win_over_the_order() -> None:
    one = sketch("q: dense 6 6\nk: dense 6 6\nv: dense 6 6\nout: dense 6 6")
    other = sketch("key: dense 6 6\no_proj: dense 6 6\nquery: dense 6 6\nvalue: dense 6 6")
    assert paired(one, other) == {"q": "query", "k": "key", "v": "value", "out": "o_proj"}


def test_paths_that_differ_in_their_separators_alone_are_one_name() -> None:
    words = ("q_proj", "k_proj", "v_proj", "o_proj")
    nested = sketch("\n".join(f"blocks/{n}/{word}: dense 8 8" for n in range(3) for word in words))
    flat = sketch("\n".join(f"blocks_{n}_{word}: dense 8 8" for word in sorted(words) for n in range(3)))
    for source, target in ((nested, flat), (flat, nested)):
        found = match_layers(source, target, {})
        assert len(found.pairs) == 12
        assert all(each.source.path.replace("/", "_") == each.target.path.replace("/", "_") for each in found.pairs)
        assert {each.evidence for each in found.pairs} <= {"name", "number"}
    other = sketch("\n".join(f"blocks_{n}_{word}: dense 8 8" for n in range(3) for word in ("a", "b", "c", "d")))
    assert match_layers(nested, other, {}).pairs == []


def test_the_order_tells_where_all_around_comes_in_it() -> None:
    one = sketch("a: dense 6 6\nb: layer_norm 6\nc: dense 6 6")
    other = sketch("first: dense 6 6\nthen: layer_norm 6\nlast: dense 6 6")
    found = match_layers(one, other, {})
    assert [(each.target.path, each.evidence) for each in found.pairs] == [
        ("first", "order"),
        ("then", "alone"),
        ("last", "order"),
    ]


def test_words_win_over_the_order() -> None:
    one = sketch("fc_mean: dense 6 6\nfc_logvar: dense 6 6")
    other = sketch("logvar_head: dense 6 6\nmean_head: dense 6 6")
    found = match_layers(one, other, {})
    assert {each.source.path: each.target.path for each in found.pairs} == {
        "fc_mean": "mean_head",
        "fc_logvar": "logvar_head",
    }


@pytest.mark.parametrize(
    ("one", "other", "ordered"),
    [
        ("a: dense 6 6\nb: dense 6 6", "first: dense 6 6\nlast: dense 6 6", False),  # one side sorts by name
        ("a: dense 6 6\nn: layer_norm 6\nb: dense 6 6", "x: dense 6 6\ny: dense 6 6\nn: layer_norm 6", True),
        ("query: dense 6 6\nkey: dense 6 6", "a: dense 6 6\nb: dense 6 6", False),
        ("key: dense 6 6\nquery: dense 6 6", "proj_0: dense 6 6\nproj_1: dense 6 6", True),
        ("wte: embedding 6 6\nwpe: embedding 6 6", "positions: embedding 6 6\nb: embedding 6 6", False),
    ],
)
def test_nobody_guesses(one: str, other: str, ordered: bool) -> None:
    found = match_layers(sketch(one), sketch(other, ordered=ordered), {})
    known = {each.source.path: each.target.path for each in found.pairs}
    if "wpe" in one:  # one name is known, so that the other is what is left
        assert known == {"wte": "b", "wpe": "positions"}
    else:
        assert len(found.indistinguishable) == 1


def test_an_early_norm_is_no_late_norm() -> None:
    """One norm in sight on each side, and they are not the same one: the others lie in modules."""
    one = sketch("stem.conv: conv 3 6\nstem.norm: batch_norm 6\nnorm: batch_norm 6\nhead: dense 6 2")
    other = sketch("conv: conv 3 6\nnorm: batch_norm 6\ntop.norm: batch_norm 6\ntop.head: dense 6 2")
    assert paired(one, other) == {"stem/conv": "conv", "stem/norm": "norm", "norm": "top/norm", "head": "top/head"}


def test_a_residual_network_with_its_shortcuts() -> None:
    torch = "conv1: conv 3 4 -bias\nbn1: batch_norm 4\n" + "".join(
        f"""layer{s}.{b}.conv1: conv {4 * s if b else 4 * max(s - 1, 1)} {4 * s} -bias
        layer{s}.{b}.bn1: batch_norm {4 * s}
        layer{s}.{b}.conv2: conv {4 * s} {4 * s} -bias
        layer{s}.{b}.bn2: batch_norm {4 * s}
        """
        + (
            f"layer{s}.0.downsample.0: conv {4 * (s - 1)} {4 * s} -bias\nlayer{s}.0.downsample.1: batch_norm {4 * s}\n"
            if s > 1 and not b
            else ""
        )
        for s in (1, 2)
        for b in (0, 1)
    )
    linen = "".join(
        f"""ResNetBlock_{2 * (s - 1) + b}/BatchNorm_0: batch_norm {4 * s}
        ResNetBlock_{2 * (s - 1) + b}/BatchNorm_1: batch_norm {4 * s}
        ResNetBlock_{2 * (s - 1) + b}/Conv_0: conv {4 * s if b else 4 * max(s - 1, 1)} {4 * s} -bias
        ResNetBlock_{2 * (s - 1) + b}/Conv_1: conv {4 * s} {4 * s} -bias
        """
        + (
            f"ResNetBlock_2/conv_proj: conv {4 * (s - 1)} {4 * s} -bias\nResNetBlock_2/norm_proj: batch_norm {4 * s}\n"
            if s > 1 and not b
            else ""
        )
        for s in (1, 2)
        for b in (0, 1)
    )
    one = sketch(torch + "fc: dense 8 5")
    other = sketch(linen + "bn_init: batch_norm 4\nconv_init: conv 3 4 -bias\nhead: dense 8 5", ordered=False)
    found = match_layers(one, other, {})
    pairs = {each.source.path: each.target.path for each in found.pairs}
    assert pairs["layer1/1/conv2"] == "ResNetBlock_1/Conv_1"
    assert pairs["conv1"] == "conv_init"
    assert pairs["fc"] == "head"


def test_a_norm_is_told_by_the_convolution_beside_it() -> None:
    keras = "".join(
        f"conv{name}_conv: conv {inputs} 4 -bias\nconv{name}_bn: batch_norm 4\n"
        for name, inputs in (("1", 3), ("2_block1_1", 4), ("2_block1_2", 4))
    )
    linen = """ResNetBlock_0/BatchNorm_0: batch_norm 4
    ResNetBlock_0/BatchNorm_1: batch_norm 4
    ResNetBlock_0/Conv_0: conv 4 4 -bias
    ResNetBlock_0/Conv_1: conv 4 4 -bias
    bn_init: batch_norm 4
    conv_init: conv 3 4 -bias"""
    pairs = paired(sketch(keras), sketch(linen, ordered=False))
    assert pairs["conv1_bn"] == "bn_init"
    assert pairs["conv2_block1_1_bn"] == "ResNetBlock_0/BatchNorm_0"
    assert pairs["conv2_block1_2_bn"] == "ResNetBlock_0/BatchNorm_1"


def test_norms_of_a_projecting_block_go_where_their_convolutions_go() -> None:
    """In Keras the shortcut has the number 0, and its layers lie between those of the block: neither numbers nor the
    order of definition are those of torch."""
    torch = """layer2.0.conv1: conv 4 8 -bias
    layer2.0.bn1: batch_norm 8
    layer2.0.conv2: conv 8 8 -bias
    layer2.0.bn2: batch_norm 8
    layer2.0.downsample.0: conv 2 8 -bias
    layer2.0.downsample.1: batch_norm 8"""
    keras = """conv3_block1_1_conv: conv 4 8 -bias
    conv3_block1_0_conv: conv 2 8 -bias
    conv3_block1_1_bn: batch_norm 8
    conv3_block1_0_bn: batch_norm 8
    conv3_block1_2_conv: conv 8 8 -bias
    conv3_block1_2_bn: batch_norm 8"""
    wanted = {
        "layer2/0/conv1": "conv3_block1_1_conv",
        "layer2/0/bn1": "conv3_block1_1_bn",
        "layer2/0/conv2": "conv3_block1_2_conv",
        "layer2/0/bn2": "conv3_block1_2_bn",
        "layer2/0/downsample/0": "conv3_block1_0_conv",
        "layer2/0/downsample/1": "conv3_block1_0_bn",
    }
    assert paired(sketch(torch), sketch(keras)) == wanted
    assert paired(sketch(keras), sketch(torch)) == {there: here for here, there in wanted.items()}


def test_numbers_that_the_convolutions_contradict_are_not_believed() -> None:
    linen = """Block_0/BatchNorm_0: batch_norm 8
    Block_0/BatchNorm_1: batch_norm 8
    Block_0/BatchNorm_2: batch_norm 8
    Block_0/Conv_0: conv 4 8 -bias
    Block_0/Conv_1: conv 8 8 -bias
    Block_0/Conv_2: conv 2 8 -bias"""  # the projection is called last, and numbered so
    keras = """block1_0_conv: conv 2 8 -bias
    block1_0_bn: batch_norm 8
    block1_1_conv: conv 4 8 -bias
    block1_1_bn: batch_norm 8
    block1_2_conv: conv 8 8 -bias
    block1_2_bn: batch_norm 8"""
    pairs = paired(sketch(linen, ordered=False), sketch(keras))
    assert pairs["Block_0/BatchNorm_2"] == "block1_0_bn"
    assert pairs["Block_0/BatchNorm_0"] == "block1_1_bn"


def test_a_last_norm_lies_behind_the_blocks() -> None:
    blocks = "".join(f"layers.{n}.attention_norm: layer_norm 6\nlayers.{n}.mlp_norm: layer_norm 6\n" for n in (0, 1))
    one = sketch(blocks + "norm: layer_norm 6\nhead: dense 6 2")
    other = sketch("head: dense 6 2\n" + "".join(f"layer_normalization_{n}: layer_norm 6\n" for n in range(5)))
    pairs = paired(one, other)
    assert pairs["norm"] == "layer_normalization_4"
    assert pairs["layers/1/mlp_norm"] == "layer_normalization_3"


def test_layers_of_one_mass_and_another_kind_do_not_hide_each_other() -> None:
    """An attention may have as many weights as a dense layer."""
    one = sketch(
        "".join(
            f"h.{n}.qkv: dense 6 18 -bias\nh.{n}.proj: dense 6 6 -bias\nh.{n}.fc: dense 6 24 -bias\n" for n in (0, 1)
        )
    )
    other = sketch(
        "attention: attention 6 2\nattention_1: attention 6 2\nlinear: dense 6 24 -bias\nlinear_2: dense 6 24 -bias"
    )
    assert paired(one, other)["h/1/fc"] == "linear_2"


@pytest.mark.parametrize("turned", [False, True], ids=["from", "into"])
@pytest.mark.parametrize("other", ["attn: attention 6 2", "attn.qkv: dense 6 18 -bias\nattn.out: dense 6 6 -bias"])
def test_attention_by_hand_whose_kernels_may_lie_both_ways_is_not_guessed(other: str, turned: bool) -> None:
    parts = ["query", "key", "value", "out"]
    for sign, refused in (("", False), ("?", True)):
        sides = [sketch("\n".join(f"attn.{part}: dense{sign} 6 6 -bias" for part in parts)), sketch(other)]
        if turned:
            sides.reverse()
        if refused:
            match = "how 'attn' goes into 'attn' cannot be told: the kernel of 'attn/query' may be"
            with pytest.raises(PortError, match=match):
                make_transfer_plan(*sides, None, strict=True)
            assert make_transfer_plan(*sides, None, strict=False).pairs == []
        else:
            assert [each.fit.ambiguity for each in make_transfer_plan(*sides, None, strict=True).pairs] == [""]


BERT = "".join(
    f"""encoder.layer.{n}.attention.self.query: dense 6 6
    encoder.layer.{n}.attention.self.key: dense 6 6
    encoder.layer.{n}.attention.self.value: dense 6 6
    encoder.layer.{n}.attention.output.dense: dense 6 6
    encoder.layer.{n}.attention.output.LayerNorm: layer_norm 6
    encoder.layer.{n}.intermediate.dense: dense 6 24
    encoder.layer.{n}.output.dense: dense 24 6
    """
    for n in (0, 1)
)


@pytest.mark.parametrize("names", [{}, {"attention/self/": "self_attention/"}], ids=["as they are", "renamed"])
def test_attention_whose_output_lies_in_another_module(names: dict[str, str]) -> None:
    """Grouped by the model's own paths, and a pooler of the projections' shape is none of them."""
    one = sketch(BERT + "pooler.dense: dense 6 6")
    other = sketch(
        "".join(
            f"""encoder_layer_{n}/intermediate: dense 6 24
            encoder_layer_{n}/output: dense 24 6
            encoder_layer_{n}/self_attention: attention_bias 6 2
            encoder_layer_{n}/self_attention_layer_norm: layer_norm 6
            """
            for n in (0, 1)
        )
        + "pooler_transform: dense 6 6",
        ordered=False,
    )
    pairs = paired(one, other, names)
    assert pairs["pooler/dense"] == "pooler_transform"
    assert pairs["encoder/layer/1/attention"] == "encoder_layer_1/self_attention"
    assert pairs["encoder/layer/1/output/dense"] == "encoder_layer_1/output"


def test_a_dense_layer_beside_queries_that_is_no_output_joins_no_attention() -> None:
    one = sketch("a.self.query: dense 6 6\na.self.key: dense 6 6\na.self.value: dense 6 6\na.gate.dense: dense 6 6")
    found = match_layers(one, sketch("attention: attention_bias 6 2"), {})
    assert [layer.path for layer in found.unmatched[1]] == ["attention"]


def test_a_kernel_is_not_read_as_a_transposed_one_where_its_own_kind_is_there() -> None:
    one = sketch("gate: dense 6 24 -bias\nup: dense 6 24 -bias\ndown: dense 24 6 -bias")
    known = sketch("wi_0: dense 6 24 -bias\nwi_1: dense 6 24 -bias\nwo: dense 24 6 -bias", ordered=False)
    either = Form("parameter", (Rule(("kernel",), ("value",)),))  # as of a class that nobody knows
    layers = [dataclasses.replace(layer, forms=(*layer.forms, either)) for layer in known.layers]
    other = dataclasses.replace(known, layers=layers)
    found = match_layers(one, other, {})
    assert [(each.source.path, each.target.path, each.evidence) for each in found.pairs] == [("down", "wo", "alone")]
    assert [[layer.path for layer in side] for side in found.indistinguishable[0]] == [["gate", "up"], ["wi_0", "wi_1"]]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_projection_that_is_defined_first_keeps_its_norm(ordered: bool) -> None:
    """As a public ResNet has it: the shortcut comes first, and its norm is as wide as the block's last one."""
    one = "s.0.shortcut.convolution: conv 4 16 -bias\ns.0.shortcut.normalization: batch_norm 16\n" + "".join(
        f"s.0.layer.{n}.convolution: conv {i} {o} -bias\ns.0.layer.{n}.normalization: batch_norm {o}\n"
        for n, (i, o) in enumerate([(4, 8), (8, 8), (8, 16)])
    )
    other = """Block_0/BatchNorm_0: batch_norm 8
    Block_0/BatchNorm_1: batch_norm 8
    Block_0/BatchNorm_2: batch_norm 16
    Block_0/Conv_0: conv 4 8 -bias
    Block_0/Conv_1: conv 8 8 -bias
    Block_0/Conv_2: conv 8 16 -bias
    Block_0/conv_proj: conv 4 16 -bias
    Block_0/norm_proj: batch_norm 16"""
    pairs = paired(sketch(one), sketch(other, ordered=ordered))
    assert pairs["s/0/shortcut/normalization"] == "Block_0/norm_proj"
    assert pairs["s/0/layer/2/normalization"] == "Block_0/BatchNorm_2"


def test_names_settle_it() -> None:
    one = sketch("a: dense 6 6\nb: dense 6 6")
    other = sketch("x: dense 6 6\ny: dense 6 6", ordered=False)
    assert paired(one, other, {"^a$": "y", "^b$": "x"}) == {"a": "y", "b": "x"}
    assert paired(one, other, {"^a$": "y"}) == {"a": "y", "b": "x"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"[": "x"}, r"names: '\[' is no regular expression"),
        ({"^c$": "x"}, r"names: '\^c\$' matches no path of the source \(paths are divided by '/'\). Nearest: 'a', 'b'"),
        ({"^[ab]$": "x"}, "names: 'a' and 'b' of the source both become 'x'"),
        ({"^(a)$": r"\2"}, r"names: '\\\\2' cannot replace"),
        ("a", "names must map regular expressions .* Received: 'a'"),
        ({1: "a"}, "names must map a regular expression to a replacement, both strings. Received: 1: 'a'"),
    ],
)
def test_names_that_say_nothing(names: object, message: str) -> None:
    from polyamp.porting.matching.rename_rules import check_rename_rules

    one, other = sketch("a: dense 6 6\nb: dense 6 6"), sketch("x: dense 6 6\ny: dense 6 6", ordered=False)
    with pytest.raises(PortError, match=message):
        match_layers(one, other, check_rename_rules(names))


def test_a_square_kernel_whose_orientation_nothing_tells() -> None:
    one, other = sketch("w: dense? 6 6"), sketch("w: dense 6 6")
    (pair,) = match_layers(one, other, {}).pairs
    assert "both are equally long" in pair.fit.ambiguity
    (pair,) = match_layers(sketch("w: dense? 6 5"), sketch("w: dense 6 5"), {}).pairs
    assert not pair.fit.ambiguity
    (pair,) = match_layers(sketch("w: conv? 3 3"), sketch("w: conv? 3 3"), {}).pairs
    assert not pair.fit.ambiguity  # both sides read it alike, whichever it is


def test_a_convolution_of_two_minds() -> None:
    """Both forms of the same file layout on both sides: the numbers go to the same places whichever is right."""
    (pair,) = match_layers(sketch("up: conv? 3 4"), sketch("up: conv_transpose 3 4"), {}).pairs
    assert pair.fit.source.kind == "conv_transpose"

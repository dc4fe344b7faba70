"""S27: which kind a parameter is, by the class of its module where a framework has one, else by names."""

from __future__ import annotations

import pytest

from polyamp.errors import RecipeError
from polyamp.recipe.groups import KINDS
from polyamp.rules.parameter_kinds import ParameterLeaf, class_names, paths_of_kind


@pytest.mark.parametrize(
    ("leaves", "bias", "norm", "embedding"),
    [
        (["ln_f/scale", "ln_f/bias", "fc/kernel", "fc/bias"], "ln_f/bias fc/bias", "ln_f/scale ln_f/bias", ""),
        (["x/layer_norm/scale", "x/layer_norm/offset", "l/w", "l/b"], "x/layer_norm/offset l/b", "2", ""),
        (["embed/embeddings", "wte/embedding", "l/w"], "", "", "embed/embeddings wte/embedding"),
        (["w1", "b1", "W2", "b2"], "b1 b2", "", ""),
        (["odd/scale", "odd/bias"], "odd/bias", "odd/scale odd/bias", ""),
        (["N/Scale", "n/gamma", "M/Gamma", "M/Bias"], "M/Bias", "N/Scale n/gamma M/Gamma M/Bias", ""),
        (["bn1/m", "block_ln/m", "gn_2/m", "bnx/w"], "", "bn1/m block_ln/m gn_2/m", ""),
        (["norms/pos_embed", "a/pos_embed", "a/embed_bias"], "a/embed_bias", "norms/pos_embed", "a/pos_embed"),
        (["q/scale", "q/kernel", "ln/kernel", "ln/scale"], "", "", ""),
        (["att/in_proj_weight", "att/in_proj_bias", "lstm/bias_ih_l0"], "att/in_proj_bias lstm/bias_ih_l0", "", ""),
    ],
)
def test_s27_kinds_by_names(leaves: list[str], bias: str, norm: str, embedding: str) -> None:
    known = [ParameterLeaf(path, 1) for path in leaves]
    expected = {"bias": bias, "norm": " ".join(leaves[:2]) if norm == "2" else norm, "embedding": embedding}
    for kind, paths in expected.items():
        assert paths_of_kind(kind, known, leaves) == set(paths.split()), kind


@pytest.mark.parametrize(
    ("classes", "leaf", "kinds"),
    [
        (("LlamaRMSNorm", "Module"), "weight", "norm"),
        (("BatchNormalization", "Layer"), "beta", "norm bias"),
        (("SpectralNormalization", "Wrapper", "Layer"), "kernel", ""),
        (("TokenAndPositionEmbedding", "Layer"), "embeddings", "embedding"),
        (("Embed", "Module"), "embedding", "embedding"),
        (("VisionTransformer", "Module"), "pos_embed", "embedding"),
        (("Mine", "Linear", "Module"), "bias", "bias"),
        (("Mine", "Module"), "logit_scale", ""),
        (("WeightNorm", "Module"), "weight_g", ""),
        (("Mine", "SpectralNorm", "LayerNorm"), "weight", "norm"),
        (("Embedding", "Module"), "bias", "bias"),
        (("EmbedNorm", "Module"), "embedding", "norm"),
        (("Linear", "Module"), "beta", ""),
        (("Linear", "Module"), "B", ""),
    ],
)
def test_s27_kinds_by_class(classes: tuple[str, ...], leaf: str, kinds: str) -> None:
    known = [ParameterLeaf(f"a/{leaf}", 2, classes)]
    assert {kind for kind in ("bias", "norm", "embedding") if paths_of_kind(kind, known, [f"a/{leaf}"])} == set(
        kinds.split()
    )


@pytest.mark.parametrize(
    ("kind", "leaf", "beside", "wanted"),
    [
        ("bias", ParameterLeaf("lora/B", 2, ("LoRA", "Module", "object")), "lora/A", False),
        ("bias", ParameterLeaf("mlp/b1", 2, ("MLP", "Module", "object")), "mlp/w1", True),
        ("norm", ParameterLeaf("n/weight", 1, ("GroupNorm1d", "Module")), "n/bias", True),
        ("bias", ParameterLeaf("odd/b", 1, ("Affine", "Module", "object")), "odd/w", True),
        ("bias", ParameterLeaf("linear/b", 2), "linear/w", True),
        ("norm", ParameterLeaf("head/weight", 2, ("NormalizedLinear", "Linear")), "head/bias", False),
        ("norm", ParameterLeaf("flow/mask", 2, ("NormalizingFlow", "Module")), "flow/bias", False),
        ("norm", ParameterLeaf("n/weight", 1, ("LlamaRMSNorm", "Module")), "n/bias", True),
        ("norm", ParameterLeaf("n/gamma", 1, ("LayerNormalization", "Layer")), "n/beta", True),
        ("norm", ParameterLeaf("n/weight", 1, ("BatchNorm2d", "_BatchNorm", "_NormBase")), "n/bias", True),
        ("norm", ParameterLeaf("normals/kernel", 2), "normals/bias", False),
        ("norm", ParameterLeaf("norm/scale", 1), "norm/bias", True),
    ],
)
def test_s27_names_that_only_look_like_a_kind(kind: str, leaf: ParameterLeaf, beside: str, wanted: bool) -> None:
    assert (leaf.path in paths_of_kind(kind, [leaf, ParameterLeaf(beside, 1, leaf.classes)], [leaf.path])) is wanted


def test_s27_a_vector_has_fewer_than_two_axes_whatever_it_is_called() -> None:
    """A scalar too; and no name is looked at, so that one that tells nothing is no error."""
    leaves = [
        ParameterLeaf("alpha", 0),
        ParameterLeaf("beta", 1),
        ParameterLeaf("bias", 2),
        ParameterLeaf("gamma", 3, ("LayerNorm",)),
    ]
    assert paths_of_kind("vector", leaves, [leaf.path for leaf in leaves]) == {"alpha", "beta"}


def test_s27_only_the_candidates_are_answered_and_looked_at() -> None:
    """What lies beside a candidate still tells its kind."""
    leaves = [
        ParameterLeaf("n/scale", 1),
        ParameterLeaf("n/bias", 1),
        ParameterLeaf("fc/bias", 1),
        ParameterLeaf("alpha", 1),
    ]
    assert paths_of_kind("norm", leaves, ["n/bias", "fc/bias"]) == {"n/bias"}
    assert paths_of_kind("bias", leaves, ["fc/bias"]) == {"fc/bias"}
    assert paths_of_kind("bias", leaves, []) == set()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "vector"])
def test_s27_a_name_that_tells_nothing_is_an_error_that_names_the_parameter(kind: str) -> None:
    leaves = [ParameterLeaf("a/alpha", 1), ParameterLeaf("a/w", 2)]
    with pytest.raises(RecipeError, match=rf"'a/alpha' is \(asked for: '{kind}'\) cannot be told .*Select by globs"):
        paths_of_kind(kind, leaves, ["a/alpha", "a/w"])
    assert paths_of_kind(kind, leaves, ["a/w"]) == set()
    with pytest.raises(RecipeError, match="'s/gamma' is"):  # beside a weight it is no norm's
        paths_of_kind(kind, [ParameterLeaf("s/gamma", 1), ParameterLeaf("s/w_0", 2)], ["s/gamma"])


def test_s27_the_classes_of_an_owner_are_its_own_and_its_bases() -> None:
    class Norm:
        pass

    class Mine(Norm):
        pass

    assert class_names(Mine()) == ("Mine", "Norm", "object")
    assert ParameterLeaf("a", 1) == ("a", 1, None, (), False)

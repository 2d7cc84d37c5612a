"""Contracts of the three pieces of one hyper-connection step, and of the step, with its mix or
without."""

from __future__ import annotations

from plugins.schema import OperatorSchema, TensorSpec

HC_MIX = OperatorSchema(
    name="hc_mix",
    inputs=(
        TensorSpec("streams", ("T", "S", "D")),
        TensorSpec("fn", ("S*(2+S)", "S*D")),
        TensorSpec("base", ("S*(2+S)",)),
        TensorSpec("scale", ("3",)),
    ),
    outputs=(
        TensorSpec("pre", ("T", "S"), "wide"),
        TensorSpec("post", ("T", "S"), "wide"),
        TensorSpec("comb", ("T", "S", "S"), "wide"),
    ),
    attributes=("sinkhorn_iters", "hc_eps", "norm_eps"),
    ties="none: nothing is selected",
    deterministic="a row depends on its own streams only; fixed row tiles on the CPU",
    source="technical report, manifold-constrained hyper-connections (arXiv 2512.24880)",
)

HC_COLLAPSE = OperatorSchema(
    name="hc_collapse",
    inputs=(TensorSpec("streams", ("T", "S", "D")), TensorSpec("pre", ("T", "S"))),
    outputs=(TensorSpec("collapsed", ("T", "D")),),
    attributes=(),
    ties="none: nothing is selected",
    deterministic="a row depends on its own streams only; streams are added in ascending order",
    source=HC_MIX.source,
)

HC_EXPAND = OperatorSchema(
    name="hc_expand",
    inputs=(
        TensorSpec("streams", ("T", "S", "D")),
        TensorSpec("y", ("T", "D")),
        TensorSpec("post", ("T", "S")),
        TensorSpec("comb", ("T", "S", "S")),
    ),
    outputs=(TensorSpec("expanded", ("T", "S", "D")),),
    attributes=(),
    ties="none: nothing is selected",
    deterministic="a row depends on its own streams only; sources are added in ascending order",
    source=HC_MIX.source,
)

HC_ADVANCE = OperatorSchema(
    name="hc_advance",
    inputs=(*HC_EXPAND.inputs, TensorSpec("pre", ("T", "S")), TensorSpec("norm", ("D",))),
    outputs=(*HC_EXPAND.outputs, TensorSpec("u", ("T", "D"))),
    attributes=("norm_eps",),
    ties="none: nothing is selected",
    deterministic=HC_EXPAND.deterministic,
    source=HC_MIX.source,
    composite=True,
)

MEGA_MHC = OperatorSchema(
    name="mega_mhc",
    inputs=(
        *HC_EXPAND.inputs,
        TensorSpec("pre", ("T", "S")),
        *HC_MIX.inputs[1:],
        TensorSpec("norm", ("D",)),
    ),
    outputs=(*HC_EXPAND.outputs, *HC_MIX.outputs, TensorSpec("u", ("T", "D"))),
    attributes=HC_MIX.attributes,
    ties="none: nothing is selected",
    deterministic=HC_MIX.deterministic,
    source=HC_MIX.source,
    composite=True,
)

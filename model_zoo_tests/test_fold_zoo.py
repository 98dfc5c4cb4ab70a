"""How many BatchNorms stay in models that are hard to fold, in both forms.

The counts are exact on purpose: one more is a lost rule, one fewer a new rule to write down.
"""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from bnconvert.fold import plan_fold_batchnorm, plan_fold_exported
from bnconvert.testing import randomize_batchnorm
from model_zoo_tests.fold_zoo import smallest_input

LEFT_IN_TREE = {
    "densenet121": 0,
    "resnetv2_50": 0,
    "resnetv2_18": 8,
    "levit_128s": 0,
    "visformer_tiny": 0,
    "inception_next_atto": 0,
    "efficientvit_m0": 0,
    "nextvit_small": 0,
    "swiftformer_xs": 0,
    "xcit_nano_12_p8_224": 12,
    "dpn48b": 1,
}

CONVOLUTIONS_IN_GRAPH = {
    "repghostnet_050": None,
    "fastvit_t8": None,
    "repvit_m1": None,
    "repvgg_a0": 22,
    "mobileone_s0": 43,
}
"""Models whose graph form keeps no BatchNorm; the number of convolutions where it is known."""


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    randomize_batchnorm(model)
    return model, smallest_input(model)


@pytest.mark.parametrize("name", LEFT_IN_TREE)
def test_module_trees_keep_as_few_norms_as_can_be(name: str) -> None:
    model, images = build(name)
    with torch.no_grad():
        expected = model(images)
    plan = plan_fold_batchnorm(model, images)
    assert len(plan.report.left) == LEFT_IN_TREE[name], str(plan)
    plan.apply()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == LEFT_IN_TREE[name]
    with torch.no_grad():
        folded = model(images)
    assert (folded - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", CONVOLUTIONS_IN_GRAPH)
def test_exported_programs_merge_the_branches(name: str) -> None:
    model, images = build(name)
    with torch.no_grad():
        program = torch.export.export(model, (images,), strict=False)
    plan = plan_fold_exported(program)
    assert not plan.report.left, str(plan)
    calls = [str(node.target) for node in plan.apply().graph.nodes if node.op == "call_function"]
    assert not any("batch_norm" in call for call in calls)
    wanted = CONVOLUTIONS_IN_GRAPH[name]
    if wanted is not None:
        assert sum("aten.conv" in call for call in calls) == wanted

"""Conversion and back on the smallest model of every timm family, with real numbers."""

from __future__ import annotations

import pytest
import timm
import torch

from bnconvert import convert_sync_batchnorm, revert_sync_batchnorm
from bnconvert.testing import randomize_batchnorm
from bnconvert.walk import find_norms
from model_zoo_tests.families import smallest_models
from model_zoo_tests.fold_zoo import smallest_input


@pytest.mark.parametrize("name", smallest_models())
def test_outputs_and_state_are_equal_to_the_bit_after_both_ways(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    randomize_batchnorm(model)
    images = smallest_input(model)
    norms = find_norms(model)
    classes = [type(m) for m in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(images)
        convert_sync_batchnorm(model)
        assert sum(type(n.module).__name__.startswith("Sync") for n in norms) == len(norms) > 0
        assert torch.equal(model(images), before)
        revert_sync_batchnorm(model)
        assert torch.equal(model(images), before)
    assert [type(m) for m in model.modules()] == classes
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key

"""`verify_ranks` says on every rank what differs, where training would hang."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bnconvert import (
    BnconvertError,
    convert_sync_batchnorm,
    freeze_batchnorm,
    unfreeze_batchnorm,
    verify_ranks,
)
from bnconvert.testing import run_ranks


def build() -> Any:
    return nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(5)))


def changed(model: Any, how: str) -> Any:
    if how == "width":
        model[1][0] = convert_sync_batchnorm(nn.BatchNorm2d(6))
    elif how == "extra":
        model.append(convert_sync_batchnorm(nn.BatchNorm2d(7)))
    elif how == "moved":
        model[1]._modules["0"] = model[1]._modules.pop("0")
    elif how == "frozen":
        freeze_batchnorm(model, include="1.1")
    changes = {
        "eval": lambda: model[1][0].eval(),
        "dtype": lambda: model[1][0].double(),
        "untrained": lambda: model[0].requires_grad_(False),
    }
    changes.get(how, lambda: None)()
    return object() if how == "no module" else model


def differ(rank: int, how: str) -> str:
    """Make rank 1 (of three) differ; return what every rank says."""
    model = build()
    group: Any = None
    if how == "groups":
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        group = groups[0] if rank == 0 else groups[1]
    convert_sync_batchnorm(model, group, exclude="1.0" if how == "absent" and rank == 1 else None)
    if rank == 1:
        model = changed(model, how)
    try:
        verify_ranks(model)
    except BnconvertError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("same", ""),
        ("eval", "1.0: training is True on rank 0 but False on rank 1; make it the same"),
        ("width", "1.0: num_features is 4 on rank 0 but 6 on rank 1"),
        ("dtype", "1.0: dtype is 'float32' on rank 0 but 'float64' on rank 1"),
        ("absent", "1.0: is synchronised on rank 0 but not on rank 1"),
        ("frozen", "1.1: is synchronised on rank 0 but not on rank 1"),
        ("extra", "2: is synchronised on rank 1 but not on rank 0"),
        ("groups", "0: rank 0 synchronises with ranks 0-1 but rank 1 with ranks 1-2"),
        ("moved", "1.0: comes at another place among the layers of rank 1 than of rank 0"),
        ("untrained", "0.weight: requires a gradient on ranks 0, 2 but not on rank 1"),
        ("no module", "rank 1: model: expected a torch.nn.Module, got object"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(how: str, text: str) -> None:
    said = run_ranks(differ, 3, how)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith(f"verify_ranks: {text}" if text else ""), said[0]
    assert bool(said[0]) == bool(text)


def changed_after_wrapping(rank: int, how: str) -> str:
    model = freeze_batchnorm(build(), include="0")
    wrapped = DistributedDataParallel(convert_sync_batchnorm(model))
    verify_ranks(wrapped)
    if how == "replaced":
        model[0].register_parameter("bias", nn.Parameter(Tensor([0.0, 0.0, 0.0])))
        model[1][0].requires_grad_(False)  # as many as before are trained
    else:
        unfreeze_batchnorm(model)
    if how == "wrapped again":
        wrapped = DistributedDataParallel(model)
    try:
        verify_ranks(wrapped)
    except BnconvertError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "named"),
    [("unfrozen", "0.weight and 1 more:"), ("replaced", "0.bias:"), ("wrapped again", "")],
)
def test_parameters_that_a_wrapper_does_not_average_are_found(how: str, named: str) -> None:
    said = run_ranks(changed_after_wrapping, 2, how)
    assert said[0] == said[1]
    assert said[0].startswith(f"verify_ranks: rank 0: {named} Distributed" if named else "")
    assert bool(said[0]) == bool(named)


def subgroup(rank: int) -> str:
    """Two pairs; within the pair of ranks 2 and 3 a layer is in eval mode on rank 3."""
    model = convert_sync_batchnorm(build(), group_size=2)
    verify_ranks(model)
    if rank == 3:
        model[0].eval()
    try:
        verify_ranks(model, model[0].process_group)
    except BnconvertError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_check_within_groups_compares_only_their_ranks() -> None:
    said = run_ranks(subgroup, 4)
    assert said[:2] == ["", ""]
    assert said[2] == said[3]
    assert "0: training is True on rank 2 but False on rank 3" in said[2]


def of_others(rank: int) -> str:
    group: Any = dist.new_group([0])
    with pytest.raises(BnconvertError) if rank else contextlib.nullcontext() as caught:
        verify_ranks(convert_sync_batchnorm(build()), group)
    return str(caught.value) if caught is not None else ""


def test_a_group_of_others_is_refused() -> None:
    assert "rank 1 is not a member" in run_ranks(of_others, 2)[1]


def test_without_distributed_there_is_nothing_to_check() -> None:
    verify_ranks(convert_sync_batchnorm(build()))

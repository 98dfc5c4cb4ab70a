"""Conversion to process groups, and of models that are wrapped for several processes."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bnconvert
from bnconvert import (
    BnconvertError,
    Outcome,
    convert_sync_batchnorm,
    is_synchronized,
    plan_convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from bnconvert.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_groups_without_distributed_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    with pytest.raises(BnconvertError, match=r"group_size: torch\.distributed is not initialized"):
        convert_sync_batchnorm(model, group_size=2)
    for wrong in ("2", 2.0, True):
        with pytest.raises(BnconvertError, match="group_size: expected a number of ranks, got"):
            convert_sync_batchnorm(model, group_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(BnconvertError, match="on_unknown"):
        convert_sync_batchnorm(model, on_unknown="ignore")  # type: ignore[arg-type]
    assert type(model[0]) is nn.BatchNorm2d


def groups(rank: int) -> None:
    model: Any = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    with pytest.raises(BnconvertError, match="world size 4 is not divisible by 3"):
        convert_sync_batchnorm(model, group_size=3)
    pair: Any = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(BnconvertError, match="cannot be combined"):
            convert_sync_batchnorm(model, pair, group_size=2)
    else:
        with pytest.raises(BnconvertError, match=f"rank {rank} is not a member"):
            convert_sync_batchnorm(model, pair)
    with pytest.raises(
        BnconvertError, match=r"expected a torch\.distributed ProcessGroup, got list"
    ):
        convert_sync_batchnorm(model, [0, 1])  # type: ignore[arg-type]
    assert not is_synchronized(model)

    convert_sync_batchnorm(model, group_size=2)
    group = model[0].process_group
    assert dist.get_process_group_ranks(group) == ([0, 1] if rank < 2 else [2, 3])
    assert model[1].process_group is group
    convert_sync_batchnorm(model)  # keeps the group
    assert model[0].process_group is group
    again = convert_sync_batchnorm(nn.BatchNorm2d(3), group_size=2)
    assert again.process_group is group
    bnconvert.verify_ranks(model)

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank))
    model[0](x)
    everyone = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(everyone, x)
    half = torch.cat(everyone[:2] if rank < 2 else everyone[2:])
    torch.testing.assert_close(model[0].running_mean, 0.1 * half.mean((0, 2, 3)))

    report = plan_convert_sync_batchnorm(model, group_size=4).report
    assert report.count(Outcome.CONVERTED) == 2
    convert_sync_batchnorm(model, group_size=4)
    assert model[0].process_group is None or model[0].process_group is dist.group.WORLD
    copied = copy.deepcopy(again)
    assert copied.process_group is group
    lost = pickle.loads(pickle.dumps(again))  # noqa: S301 (made here)
    findings = bnconvert.inspect_batchnorm(lost).findings
    assert any("lost in pickling" in finding.text for finding in findings)


@pytest.mark.distributed
def test_process_groups_and_group_size() -> None:
    run_ranks(groups, 4)


def reinitialized(rank: int, store: str) -> None:
    """A group from before `destroy_process_group` is not one of those that came after it."""
    old = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    new_group: Any = dist.new_group
    convert_sync_batchnorm(old, new_group([0, 1]))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = [new_group([member]) for member in (0, 1)]
    new = convert_sync_batchnorm(nn.BatchNorm2d(3), alone[rank])
    x = torch.randn(4, 3, 2, 2) + rank
    new(x)
    torch.testing.assert_close(new.running_mean, 0.1 * x.mean((0, 2, 3)))
    for use in (
        lambda: old(x),
        lambda: bnconvert.verify_ranks(old),
        lambda: bnconvert.recalibrate_batchnorm(old, [x], estimator="mean_of_batches"),
    ):
        with pytest.raises(BnconvertError, match="the group of a synchronised layer was destroyed"):
            use()
    assert "exists no more" in str(bnconvert.inspect_batchnorm(old))
    dist.barrier()
    pair = new_group([0, 1])
    dist.destroy_process_group(alone[rank])
    convert_sync_batchnorm(old, pair)
    old(x)


@pytest.mark.distributed
def test_a_layer_does_not_use_another_group_that_has_the_name_of_its_own(tmp_path: Path) -> None:
    run_ranks(reinitialized, 2, str(tmp_path / "again"))


def wrapped(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6) + rank

    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))

    ddp = DistributedDataParallel(build())
    convert_sync_batchnorm(ddp)
    assert is_synchronized(ddp)
    ddp(x).square().sum().backward()
    mean = ddp.module[1].running_mean.clone()
    revert_sync_batchnorm(ddp)
    assert type(ddp.module[1]) is nn.BatchNorm2d

    sharded = build()
    fully_shard(sharded[1])
    original = type(sharded[1])
    fully_shard(sharded)
    convert_sync_batchnorm(sharded)
    assert is_synchronized(sharded)
    sharded(x).square().sum().backward()
    torch.testing.assert_close(sharded[1].running_mean, mean)
    revert_sync_batchnorm(sharded)
    assert type(sharded[1]) is original
    sharded(x)

    later = convert_sync_batchnorm(build())
    fully_shard(later[1])
    assert is_synchronized(later)
    later(x).square().sum().backward()
    torch.testing.assert_close(later[1].running_mean, mean)
    revert_sync_batchnorm(later)
    assert type(later[1]).__name__ == "FSDPBatchNorm2d"
    assert not is_synchronized(later)


@pytest.mark.distributed
def test_ddp_and_fsdp2_models_convert_before_and_after_wrapping() -> None:
    run_ranks(wrapped, 2)

"""Which kernels run, why, and when ranks communicate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bnconvert import convert_sync_batchnorm
from bnconvert.kernels import comm, ops, selection
from bnconvert.kernels.nvrtc import KernelError
from tests.shim.driver import COMPILER, ShimDriver

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")


def test_cpu_tensors_use_the_reference_and_say_why() -> None:
    choice = selection.choose(CPU)
    assert choice.kernels == "reference"
    assert (
        choice.reason == "own: there are none for cpu tensors; aten: there are none for cpu tensors"
    )
    assert ops.selection()["CPU"] == f"reference: {choice.reason}"


@needs_compiler
def test_own_kernels_come_first(shim: ShimDriver) -> None:
    assert selection.choose(CPU) == selection.Choice("own", "they run on cpu")
    assert ops.fuses_activations("cpu")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("own", "BNCONVERT_KERNELS=own: there are none for cpu tensors"),
        ("aten", "BNCONVERT_KERNELS=aten: there are none for cpu tensors"),
        ("fast", "BNCONVERT_KERNELS=fast: there are no such kernels; use one of"),
    ],
)
def test_impossible_wishes_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("BNCONVERT_KERNELS", value)
    with pytest.raises(KernelError, match=message):
        selection.choose(CPU)
    with pytest.raises(KernelError, match=message):
        torch.ops.bnconvert.global_sums(torch.randn(2, 3), "")
    assert message in ops.selection()["CPU"]


@needs_compiler
def test_the_variable_overrides_the_order(
    one_rank: None, shim: ShimDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BNCONVERT_KERNELS", "reference")
    assert selection.choose(CPU) == selection.Choice("reference", "BNCONVERT_KERNELS is set")
    torch.ops.bnconvert.global_sums(torch.randn(4, 3), "")
    assert not shim.launched
    monkeypatch.setenv("BNCONVERT_KERNELS", "own")
    torch.ops.bnconvert.global_sums(torch.randn(4, 3), "")
    assert len(shim.launched) == 1
    with pytest.raises(
        KernelError, match="=own: they take float32, float16 and bfloat16, not float64"
    ):
        torch.ops.bnconvert.global_sums(torch.randn(4, 3).double(), "")


@needs_compiler
def test_tensors_that_our_kernels_do_not_take_go_to_the_next(
    one_rank: None, shim: ShimDriver
) -> None:
    layer = convert_sync_batchnorm(nn.BatchNorm1d(4).double())
    layer(torch.randn(8, 4).double())
    assert not shim.launched


def test_collective_with_one_rank_happens_only_when_forced(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda t, group: calls.append(t.numel()))
    layer = convert_sync_batchnorm(nn.BatchNorm1d(4))
    x = torch.randn(8, 4, requires_grad=True)
    layer(x).sum().backward()
    assert len(calls) == 2
    monkeypatch.setattr(comm, "_forced", 0)
    layer(x).sum().backward()
    assert len(calls) == 2


def test_traffic_is_two_numbers_per_channel_and_pass(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, torch.dtype]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda t, group: sent.append((t.numel(), t.dtype)))
    layer = convert_sync_batchnorm(nn.BatchNorm2d(7))
    layer(torch.randn(3, 7, 2, 2, requires_grad=True)).sum().backward()
    assert sent == [(15, torch.float64), (14, torch.float32)]

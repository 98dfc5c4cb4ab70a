"""Recalibration in step: what a forward keeps of one batch must not get into another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import bnconvert as bc
from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from collections.abc import Callable


def images(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, 3, 6, 6, generator=generator) * (1 + place) + place
        for place, size in enumerate(sizes)
    ]


class SkipOnSelf(nn.Module):
    """A small U-Net whose encoder leaves its features on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.up = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
        self.skip: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.skip = self.down(x)
        y: torch.Tensor = self.up(torch.cat([self.middle(self.skip), self.skip], 1))
        return y


class SkipInHook(SkipOnSelf):
    """The same, with the features kept in a list by a hook."""

    def __init__(self) -> None:
        super().__init__()
        kept: list[torch.Tensor] = []
        self.kept = kept
        self.down.register_forward_hook(lambda module, args, output: kept.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.middle(self.down(x))
        return self.up(torch.cat([y, self.kept.pop()], 1))  # type: ignore[no-any-return]


class Domains(nn.Module):
    """A layer for each domain; which one is used is set before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.domain = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.stem(x)
        return self.norms[self.domain](y)  # type: ignore[no-any-return]


def in_domain(model: Any, batch: torch.Tensor) -> Any:
    model.domain = len(batch) % 2
    return model(batch)


class Checked(nn.Module):
    """A forward that finds another batch's size where it left its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.size = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = len(x)
        y: torch.Tensor = self.norm(x)
        if self.size != len(x):
            raise RuntimeError("the size changed")
        return y


SIZES = {"domain of a batch": (5, 5, 4, 3, 3), "failure": (4, 3)}
KEEPS_A_BATCH: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "skip on the module": (SkipOnSelf, None, r"up\.1: gets other values when batch 0 goes in step"),
    "skip in a hook": (SkipInHook, None, r"up\.1: gets other values when batch 0 goes in step"),
    "domain of a batch": (Domains, in_domain, r"norms\..: gets other values when batch \d goes"),
    "failure": (Checked, None, r"fails on batch 0 .*the size changed\) but not when it goes alone"),
}


@pytest.mark.parametrize("case", KEEPS_A_BATCH)
def test_a_forward_that_keeps_something_of_a_batch_is_refused_in_step(case: str) -> None:
    make, forward, message = KEEPS_A_BATCH[case]
    model, batches = make(), images(*SIZES.get(case, (4, 4, 4)))
    randomize_batchnorm(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(bc.BnconvertError, match=message) as caught:
        bc.recalibrate_batchnorm(model, batches, forward=forward)
    assert "use estimator='mean_of_batches'" in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    model = make()
    report = bc.recalibrate_batchnorm(model, batches, forward=forward, estimator="mean_of_batches")
    assert report.count(bc.Outcome.REWRITTEN) == sum(
        isinstance(module, nn.BatchNorm2d) for module in model.modules()
    )


def test_features_that_hooks_only_collect_are_no_reason_to_refuse() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model.append(nn.BatchNorm2d(4))
    seen: dict[str, torch.Tensor] = {}
    model[1].register_forward_hook(lambda module, args, output: seen.update(one=output))
    assert bc.recalibrate_batchnorm(model, images(4, 4, 2)).count(bc.Outcome.REWRITTEN) == 2


class Noisy(nn.Module):
    """Draws random numbers in eval mode too, so that no two calls are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norms(x + torch.randn_like(x))
        return y


def test_a_forward_that_draws_random_numbers_is_taken_and_draws_as_often_as_batches() -> None:
    model, batches = Noisy(), images(9, 9)
    torch.manual_seed(3)
    noise = [torch.randn_like(batch) for batch in batches]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    bc.recalibrate_batchnorm(model, batches)
    assert torch.equal(torch.get_rng_state(), after)
    values = torch.cat([batch + drawn for batch, drawn in zip(batches, noise, strict=True)])
    expected = values.double().mean(dim=(0, 2, 3)).float()
    torch.testing.assert_close(model.norms[0].running_mean, expected)


@pytest.mark.parametrize("estimator", ["population", "mean_of_batches"])
def test_the_compiler_is_as_before_where_a_part_was_compiled_in_place(estimator: Any) -> None:
    calls: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        calls.append("compiled")
        return graph.forward

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    model[0].compile(backend=backend)
    bc.recalibrate_batchnorm(model, images(4, 4, 4), estimator=estimator)
    assert not calls
    model(images(2)[0])
    assert calls == ["compiled"]


@pytest.mark.filterwarnings("ignore")  # of torch.ao, which is deprecated
def test_quantization_aware_training_keeps_its_observers_and_its_fused_layers() -> None:
    from torch.ao import quantization

    model: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )
    model = quantization.fuse_modules_qat(model, [["0", "1"]])  # type: ignore[no-untyped-call]
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[no-untyped-call]
    quantization.prepare_qat(model, inplace=True)  # type: ignore[no-untyped-call]
    model(images(4)[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(bc.BnconvertError, match="keeps something of a batch"):  # the observers do
        bc.recalibrate_batchnorm(model, images(9, 9, 9))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    report = bc.recalibrate_batchnorm(model, images(9, 9, 9), estimator="mean_of_batches")
    state = model.state_dict()
    changed = [name for name in before if not torch.equal(state[name], before[name])]
    assert changed == ["3.running_mean", "3.running_var"]
    (left,) = report.left
    assert left.reason.startswith("it is part of a ConvBn2d, whose quantized weights depend on")

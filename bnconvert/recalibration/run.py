"""What both estimators need: a model, its layers, and calls in which those are observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnconvert.forwarding import input_of, to_device

if TYPE_CHECKING:
    from torch import Tensor

    from bnconvert.collective import Ranks
    from bnconvert.recalibration.running_statistics import Statistics

Forward = Callable[[nn.Module, Any], Any]
Progress = Callable[[int, int], None]
Observe = Callable[["Statistics", "Tensor"], object]


@dataclass(frozen=True)
class Run:
    """One recalibration of one model.

    Attributes:
        network: The model, without its wrappers.
        layers: What is gathered for each layer.
        ranks: The ranks that share their statistics.
        forward: Calls the network on a batch.
        device: Where batches go.
        progress: Told the number of finished steps and of all steps.
    """

    network: nn.Module
    layers: dict[nn.Module, Statistics]
    ranks: Ranks
    forward: Forward
    device: torch.device
    progress: Progress

    def call(self, batch: Any) -> None:
        """Run the network on a batch."""
        with torch.no_grad():
            self.forward(self.network, to_device(batch, self.device))

    @contextmanager
    def observing(self, observe: Observe) -> Iterator[None]:
        """Have `observe` called with what comes to a layer, before every call of one."""
        with ExitStack() as stack:
            for layer, statistics in self.layers.items():
                handle = layer.register_forward_pre_hook(
                    _hook(statistics, observe), with_kwargs=True
                )
                stack.callback(handle.remove)
            yield


def _hook(statistics: Statistics, observe: Observe) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observe(statistics, input_of(args, kwargs))

    return hook

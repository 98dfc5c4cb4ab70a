"""How the layers appear to `torch.fx`: as one call, as every layer of `torch.nn` does."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


def traced_call(layer: nn.Module, input: Any) -> Any:  # noqa: A002 (torch's name)
    """Return the result of calling a layer while `torch.fx` traces it, else None.

    A tracer looks into modules from outside torch, and stops where a forward asks for the shape of
    its input. Feature extraction and quantization of torch and torchvision trace in this way.
    """
    if not isinstance(input, fx.Proxy):
        return None
    name = input.tracer.path_of_module(layer)  # type: ignore[attr-defined]
    if not name:
        raise fx.proxy.TraceError(
            "a normalization layer is traced as one call; trace the model that it is part of"
        )
    return input.tracer.create_proxy("call_module", name, (input,), {})

"""Edits of a module tree that carry out folds; each can be undone, and recorded.

The same edits are applied to float64 mirrors for the proof and to the model itself, so they find
their module by name and cast their float64 values to the dtype of what they replace. Modules are
changed in place (a BatchNorm becomes an Identity by taking over its class and state). Applied with
zeros, the edits give a fresh model the structure of a folded one (`bnconvert.fold.topology`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnconvert.fold.algebra import cast
from bnconvert.fold.become import become
from bnconvert.fold.clamp import ChannelClamp
from bnconvert.fold.float64 import in_float64
from bnconvert.fold.mirror import mirror
from bnconvert.fold.plain import make_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from bnconvert.plan import Undo


@dataclass(frozen=True)
class Bounds:
    """Bounds of a clamp, float64, of a shape that broadcasts against the activation's input."""

    lower: Tensor
    upper: Tensor

    def layer(self, like: Tensor) -> ChannelClamp:
        """Return the clamp in the dtype and on the device of a tensor."""
        return ChannelClamp(
            self.lower.to(like.device, like.dtype), self.upper.to(like.device, like.dtype)
        )


@dataclass(frozen=True)
class RemoveNorm:
    """A norm becomes an Identity, or what its layer does after normalising.

    Attributes:
        name: Qualified name.
        bounds: The clamp that its activation becomes; None keeps the activation.
    """

    name: str
    bounds: Bounds | None = None

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        module = root.get_submodule(self.name)
        layers = layers_after_norm(module) or []
        if self.bounds is not None:
            layers = [*layers[:-1], self.bounds.layer(reference(module))]
        for layer in layers:
            layer.train(module.training)
        if len(layers) > 1:
            return become(module, nn.Sequential(*layers))
        return become(module, layers[0] if layers else nn.Identity())


def layers_after_norm(module: nn.Module) -> list[nn.Module] | None:
    """Return the layers that a norm layer applies after normalising, as timm's layers do.

    Returns:
        The layers without identities; None when the layer's children are not understood.
    """
    children = dict(module.named_children())
    if set(children) == {"drop", "act"}:
        layers = [children["drop"], children["act"]]
        return [layer for layer in layers if type(layer) is not nn.Identity]
    return None if children else []


@dataclass(frozen=True)
class ClampActivation:
    """An activation layer becomes a per-channel clamp.

    Attributes:
        name: Qualified name.
        bounds: Its bounds.
        like: Qualified name of a module that shows dtype and device.
    """

    name: str
    bounds: Bounds
    like: str

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        like = reference(root.get_submodule(self.like))
        return become(root.get_submodule(self.name), self.bounds.layer(like))


@dataclass(frozen=True)
class NotInPlace:
    """An activation no longer writes into its input, which others now read.

    Attributes:
        name: Qualified name.
    """

    name: str

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        module: Any = root.get_submodule(self.name)
        module.inplace = False

        def undo() -> None:
            module.inplace = True

        return undo


@dataclass(frozen=True)
class Separate:
    """One of the names of a shared module gets a copy of its own.

    Attributes:
        name: Qualified name.
    """

    name: str

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        parent, _, child = self.name.rpartition(".")
        modules = root.get_submodule(parent)._modules
        shared = modules[child]
        assert shared is not None  # noqa: S101 (a module stands there)
        modules[child] = mirror(shared)

        def undo() -> None:
            modules[child] = shared

        return undo


@dataclass(frozen=True)
class Reparameterize:
    """A block with branches becomes what its own method makes of it, computed in float64.

    Attributes:
        name: Qualified name.
        method: Name of the method, which changes the block in place or returns another.
    """

    name: str
    method: str

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        module = root.get_submodule(self.name)
        like = reference(module)
        trains = any(parameter.requires_grad for parameter in module.parameters())
        twin = mirror(module, torch.float64)
        with in_float64():
            returned = getattr(twin, self.method)()
        twin = returned if isinstance(returned, nn.Module) else twin
        twin.to(like.device, like.dtype).requires_grad_(trains).train(module.training)
        return become(module, twin)


@dataclass(frozen=True)
class SetAffine:
    """A norm that stays takes in the map of another that followed it.

    Attributes:
        name: Qualified name.
        weight: New weight, float64.
        bias: New bias, float64.
    """

    name: str
    weight: Tensor
    bias: Tensor

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        module = root.get_submodule(self.name)
        like = reference(module)
        return _undo_all(
            set_tensor(module, "weight", self.weight, like, self.name),
            set_tensor(module, "bias", self.bias, like, self.name),
        )


@dataclass(frozen=True)
class SetWeights:
    """A linear layer gets new weights; one that computed its weight becomes a plain layer.

    Attributes:
        name: Qualified name.
        weight: Computes the new weight in float64; None keeps what is there.
        bias: The new bias, float64, or None.
        plain: Whether the layer must become plain first.
    """

    name: str
    weight: Callable[[], Tensor] | None
    bias: Tensor | None
    plain: bool

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        module = root.get_submodule(self.name)
        like = reference(module)
        weight = None if self.weight is None else self.weight()
        undos = [make_plain(module)] if self.plain else []
        for name, values in (("weight", weight), ("bias", self.bias)):
            if values is not None:
                undos.append(set_tensor(module, name, values, like, self.name))
        return _undo_all(*undos)


TreeEdit = (
    RemoveNorm | ClampActivation | NotInPlace | Separate | Reparameterize | SetAffine | SetWeights
)


def reference(module: nn.Module) -> Tensor:
    """Return a floating point tensor of a layer, which shows its dtype and device."""
    tensors = [*module.parameters(), *module.buffers()]
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def set_tensor(module: nn.Module, name: str, values: Tensor, like: Tensor, where: str) -> Undo:
    """Give a parameter or buffer new values, keeping its object where there is one.

    Args:
        module: The module.
        name: Name of the parameter or buffer; a parameter is added where there is none.
        values: The values, float64.
        like: Shows dtype and device of a parameter that is added.
        where: Qualified name of the module, for errors.
    """
    old = module._parameters.get(name, module._buffers.get(name))
    if old is not None:
        new = cast(values, old.dtype, f"{where}.{name}")
        saved = old.detach().clone()
        with torch.no_grad():
            old.copy_(new)

        def restore() -> None:
            with torch.no_grad():
                old.copy_(saved)

        return restore
    new = cast(values, like.dtype, f"{where}.{name}").to(like.device)
    had = name in module._parameters
    requires_grad = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    module._parameters[name] = nn.Parameter(new, requires_grad=requires_grad)

    def remove() -> None:
        del module._parameters[name]
        if had:
            module._parameters[name] = None

    return remove


def _undo_all(*undos: Undo) -> Undo:
    def undo() -> None:
        for step in reversed(undos):
            step()

    return undo

"""Edits of a module tree that carry out folds; each can be undone.

The same edits are applied to float64 mirrors for the proof and to the model itself, so they find
their module by name and cast their float64 values to the dtype of what they replace. Modules are
changed in place (a BatchNorm becomes an Identity by taking over its class and state), so that every
reference to them, also from lists and closures, sees the folded layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bnconvert.fold.algebra import cast
from bnconvert.fold.clamp import ChannelClamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from bnconvert.plan import Undo


def become(module: nn.Module, other: nn.Module) -> Undo:
    """Turn a module into another one, keeping its identity and training flag.

    Args:
        module: The module that changes class and state.
        other: Where class and state come from; not used otherwise afterwards.
    """
    cls, state = module.__class__, module.__dict__
    training = module.training
    module.__dict__ = dict(other.__dict__)
    module.__class__ = other.__class__
    module.train(training)

    def undo() -> None:
        module.__class__ = cls
        module.__dict__ = state

    return undo


def _reference(module: nn.Module) -> Tensor | None:
    """Return a floating point tensor that shows the module's dtype and device."""
    tensors = [*module.parameters(), *module.buffers()]
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


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
            like = _reference(module)
            assert like is not None  # noqa: S101 (a norm has statistics)
            layers = [*layers[:-1], self.bounds.layer(like)]
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
        like = _reference(root.get_submodule(self.like))
        assert like is not None  # noqa: S101 (a layer with weights)
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
        like = _reference(module)
        assert like is not None  # noqa: S101 (a norm has statistics)
        return _undo_all(
            set_tensor(module, "weight", self.weight, like, self.name),
            set_tensor(module, "bias", self.bias, like, self.name),
        )


@dataclass(frozen=True)
class SetWeights:
    """A linear layer gets new weights; one that computed its weight becomes a plain layer.

    Attributes:
        name: Qualified name.
        weight: Computes the new weight in float64.
        bias: The new bias, float64, or None.
        plain: Makes the layer plain; None for a layer that is.
    """

    name: str
    weight: Callable[[], Tensor]
    bias: Tensor | None
    plain: Callable[[nn.Module], Undo] | None = None

    def apply(self, root: nn.Module) -> Undo:
        """Change the tree and return what takes it back."""
        module = root.get_submodule(self.name)
        like = _reference(module)
        assert like is not None  # noqa: S101 (it has a weight)
        undos = []
        if self.plain is not None:
            undos.append(self.plain(module))
        undos.append(set_tensor(module, "weight", self.weight(), like, self.name))
        if self.bias is not None:
            undos.append(set_tensor(module, "bias", self.bias, like, self.name))
        return _undo_all(*undos)


TreeEdit = RemoveNorm | ClampActivation | NotInPlace | SetAffine | SetWeights


def set_tensor(module: nn.Module, name: str, values: Tensor, like: Tensor, where: str) -> Undo:
    """Give a parameter or buffer new values, keeping its object where there is one.

    Args:
        module: The module.
        name: Name of the parameter or buffer; a parameter is added where there is none.
        values: The values, float64.
        like: Shows dtype and device of a parameter that is added.
        where: Qualified name of the module, for errors.
    """
    old = getattr(module, name, None)
    if isinstance(old, Tensor) and name in {**module._parameters, **module._buffers}:
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


def make_plain(cls: type[nn.Module]) -> Callable[[nn.Module], Undo]:
    """Return an edit that turns a layer which computes its weight into one that stores it.

    Parametrizations and the pre-hooks of weight norm, spectral norm and pruning are dropped; the
    module's remaining parameters other than `bias` go with them.

    Args:
        cls: The class that the layer becomes.
    """

    def apply(module: nn.Module) -> Undo:
        plain = cls.__new__(cls)
        plain.__dict__ = {
            key: value.copy() if isinstance(value, dict) else value
            for key, value in module.__dict__.items()
            if not isinstance(value, Tensor)
        }
        weight = getattr(module, "weight").detach()  # noqa: B009 (a property when parametrized)
        trains = any(parameter.requires_grad for parameter in module.parameters())
        plain._parameters = {
            "weight": nn.Parameter(weight.clone(), requires_grad=trains),
            "bias": module._parameters.get("bias"),
        }
        if parametrize.is_parametrized(module, "bias"):
            bias = getattr(module, "bias").detach().clone()  # noqa: B009 (a property as well)
            plain._parameters["bias"] = nn.Parameter(bias, requires_grad=trains)
        plain._buffers, plain._modules = {}, {}
        for hooks in ("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
            plain.__dict__[hooks].clear()
        return become(module, plain)

    return apply


def _undo_all(*undos: Undo) -> Undo:
    def undo() -> None:
        for step in reversed(undos):
            step()

    return undo

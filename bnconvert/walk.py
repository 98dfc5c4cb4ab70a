"""Visiting every module of a model once, with all the qualified names it goes by.

torch's `named_modules` gives a shared module one of its names; passes need all of them, in a time
that grows with the number of modules and not with the number of paths to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from bnconvert.errors import BnconvertError, UnknownLayerError
from bnconvert.layers.kinds import Kind, kind_of
from bnconvert.layers.own_forward import replaces_forward
from bnconvert.report import LayerReport, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NAMES = 64
"""Names listed for one module; diamonds of shared modules can give it exponentially many."""


@dataclass(frozen=True)
class Norm:
    """A BatchNorm-like module and where it stands.

    Attributes:
        module: The module.
        kind: What sort of BatchNorm it is.
        names: Its qualified names, in the order of the model; the first is torch's.
    """

    module: nn.Module
    kind: Kind
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def entries(self, outcome: Outcome, *, now: str = "", reason: str = "") -> list[LayerReport]:
        """Return the report's entry for the layer, and one more for each further name it has."""
        kind = type(self.module).__name__
        shared = f"the same layer as {self.name or 'the model'}"
        return [
            LayerReport(self.name, kind, outcome, now, reason),
            *(LayerReport(name, kind, Outcome.SHARED, shared) for name in self.names[1:]),
        ]


class Tree:
    """The modules of a model, each once, and the edges between them.

    Attributes:
        modules: In the order of `nn.Module.modules`.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise BnconvertError(_not_a_module(model))
        self.modules: list[nn.Module] = [model]
        self._model = model
        self._names: dict[int, tuple[str, ...]] = {}
        self._parents: dict[int, dict[int, tuple[nn.Module, list[str]]]] = {id(model): {}}
        stack: list[Iterator[tuple[nn.Module, str, nn.Module | None]]] = [_edges(model)]
        while stack:
            for parent, name, child in stack[-1]:
                if child is None:
                    continue
                known = id(child) in self._parents
                edges = self._parents.setdefault(id(child), {})
                edges.setdefault(id(parent), (parent, []))[1].append(name)
                if known:
                    continue
                self.modules.append(child)
                stack.append(_edges(child))
                break
            else:
                stack.pop()

    def names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the qualified names of a module of the tree, "" for the model itself."""
        known = self._names.get(id(module))
        if known is None:
            self._names[id(module)] = ()  # seen from below, a module that contains itself
            found = [""] if module is self._model else []
            for parent, edges in self._parents[id(module)].values():
                prefixes = [f"{name}." if name else "" for name in self.names(parent)]
                found += [prefix + edge for prefix in prefixes for edge in edges]
            self._names[id(module)] = known = tuple(found[:MAX_NAMES])
        return known


def _edges(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
    return ((module, name, child) for name, child in list(module._modules.items()))


def _not_a_module(model: object) -> str:
    name = type(model).__name__
    if name == "ExportedProgram":
        return (
            "model: a torch.export.ExportedProgram is a graph without layers; give the module that "
            "it was exported from"
        )
    return f"model: expected a torch.nn.Module, got {name}"


def find_norms(model: nn.Module) -> list[Norm]:
    """Return every BatchNorm-like module of a model, in the order of the model.

    Calls of `F.batch_norm` inside a module's `forward` are not modules and are out of sight.

    Raises:
        BnconvertError: The model is not a module.
    """
    tree = Tree(model)
    return [
        Norm(module, kind, tree.names(module))
        for module in tree.modules
        if (kind := kind_of(module)) is not None
    ]


def refuse_replaced(norms: list[Norm], state: str) -> None:
    """Refuse to change the class of layers whose own `forward` would go on as before.

    Args:
        norms: Layers that a pass is about to give another class.
        state: What they are so far, in a word.

    Raises:
        UnknownLayerError: Naming all of them.
    """
    names = [norm.name or "the model" for norm in norms if replaces_forward(norm.module)]
    if names:
        raise UnknownLayerError(
            f"{len(names)} layers whose forward was replaced on the instance since they were "
            f"{state} ({', '.join(names)}); undo that (accelerate: remove_hook_from_module), or "
            "exclude them"
        )

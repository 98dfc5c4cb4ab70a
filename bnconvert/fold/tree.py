"""Folding on the user's module tree: what the tree allows, and the edits that carry folds out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnconvert.fold.algebra import batchnorm_affine
from bnconvert.fold.edits import (
    Bounds,
    ClampActivation,
    NotInPlace,
    RemoveNorm,
    SetAffine,
    SetWeights,
    TreeEdit,
    layers_after_norm,
)
from bnconvert.fold.graph import FoldGraph, is_tensor, operation
from bnconvert.fold.hooks import user_hook
from bnconvert.fold.inplace import WAS_INPLACE, shares_memory_with_input, views_of
from bnconvert.fold.motion import BlockedError, describe
from bnconvert.fold.norms import NormCall, path_of, stack_of
from bnconvert.fold.plain import plain_class
from bnconvert.fold.search import reads_shape_only
from bnconvert.fold.shared import CLAMPED, FOLDED_INTO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, fx, nn

    from bnconvert.fold.planner import Group, Planner
    from bnconvert.fold.sites import Site


class TreeTarget:
    """Allows what can be done by changing modules.

    Attributes:
        model: The model.
        graph: Its captured graph, for which the names of the nodes' modules are looked up.
        kept: Why a norm module must not change, by the module's id.
    """

    def __init__(self, model: nn.Module, graph: FoldGraph) -> None:
        self.model = model
        self.graph = graph
        self.kept: dict[int, str] = {}
        self._writers: set[str] = set()
        self._calls: dict[int, set[str]] = {}
        self._nodes: dict[int, list[fx.Node]] = {}
        self._last: dict[str, tuple[str, fx.Node]] = {}
        for node in graph.graph.nodes:
            for call, path in stack_of(node):
                self._calls.setdefault(id(model.get_submodule(path)), set()).add(call)
                self._last[call] = (path, node)
            if node.op == "call_function":
                self._nodes.setdefault(id(self.module_of(node)), []).append(node)
        self._owners: dict[int, set[tuple[int, str]]] = {}
        self._reads = [
            (id(model.get_submodule(name.rpartition(".")[0])), reader)
            for node, name in graph.names.items()
            for reader in node.users
            if not reads_shape_only(reader, node)
        ]
        self._paths = {id(module): path for path, module in model.named_modules()}
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    key = tensor.untyped_storage().data_ptr()
                    self._owners.setdefault(key, set()).add((id(module), name))

    def module_of(self, node: fx.Node) -> nn.Module:
        """Return the innermost module that a node was captured in."""
        return self.model.get_submodule(path_of(node))

    def call_count(self, module: nn.Module) -> int:
        """Return how often the captured forward calls a module."""
        return len(self._calls.get(id(module), ()))

    def modules_ending_in(self, nodes: set[fx.Node]) -> set[str]:
        """Return the names of modules of which some call ends with one of these nodes."""
        return {path for path, node in self._last.values() if node in nodes}

    # -- what the tree allows ---------------------------------------------------------------------

    def check_edge(self, producer: fx.Node, reader: fx.Node) -> None:
        """Raise BlockedError if a hook sees the value on its way between two nodes."""
        before, after = dict(stack_of(producer)), dict(stack_of(reader))
        for call, path in [*before.items(), *after.items()]:
            if (call in before) != (call in after):
                hook = user_hook(self.model.get_submodule(path))
                if hook:
                    raise BlockedError(f"{hook} on {path or 'the model'} sees its values")

    def check_site(self, site: Site) -> None:
        """Raise BlockedError if the site is not the only thing that its layer's weight is for."""
        path, module = path_of(site.node), self.module_of(site.node)
        what = describe(site.node)
        if not isinstance(module, FOLDED_INTO):
            raise BlockedError(
                f"{what} is a function called by {type(module).__name__}, not a layer; "
                "fold_exported can change it"
            )
        if self.call_count(module) > 1:
            raise BlockedError(f"{path} is called {self.call_count(module)} times")
        hook = user_hook(module)
        if hook:
            raise BlockedError(f"{hook} on {path} sees its values")
        others = self._other_owners(module)
        if others:
            raise BlockedError(f"a weight of {path} is shared: it is also {others}")
        reader = self._outside_reader(module)
        if reader is not None:
            raise BlockedError(f"a weight of {path} is also read by {describe(reader)}")
        if not self._stores_weight(site) and plain_class(module) is None:
            raise BlockedError(f"{path} ({type(module).__name__}) computes its weight itself")

    def _outside_reader(self, module: nn.Module) -> fx.Node | None:
        """Return an operation outside a module that reads a tensor of the module."""
        own = {id(child) for child in module.modules()}
        readers = (reader for owner, reader in self._reads if owner in own)
        return next((node for node in readers if id(self.module_of(node)) not in own), None)

    def _other_owners(self, module: nn.Module) -> str:
        mine = {id(child) for child in module.modules()}
        for tensor in module.parameters():
            owners = self._owners[tensor.untyped_storage().data_ptr()]
            for owner, name in owners:
                if owner not in mine:
                    path = self._paths[owner]
                    return f"{path}.{name}" if path else name
            own_names = {name for owner, name in owners if owner == id(module)}
            if len(own_names) > 1:
                return ", ".join(sorted(own_names))
        return ""

    def _stores_weight(self, site: Site) -> bool:
        """Whether weight and bias of the operation are the layer's own parameters."""
        module = self.module_of(site.node)
        for node, name in ((site.weight, "weight"), (site.bias, "bias")):
            if node is None:
                if module._parameters.get(name, self) is not None:
                    return False
                continue
            stored = self.graph.program.state_dict.get(self.graph.names.get(node, ""))
            if stored is None or module._parameters.get(name) is not stored:
                return False
        return True

    def check_norm(self, call: NormCall) -> None:
        """Raise BlockedError if a norm that may stay cannot take in a map."""
        module = self.module_of(call.node)
        reason = self.kept.get(id(module), "")
        if reason:
            raise BlockedError(f"{call.path} must not change: {reason}")
        if self.call_count(module) > 1:
            raise BlockedError(f"{call.path} is called {self.call_count(module)} times")
        others = self._other_owners(module)
        if others:
            raise BlockedError(f"a weight of {call.path} is shared: it is also {others}")

    def check_activation(self, node: fx.Node) -> None:
        """Raise BlockedError if an activation is not a layer of its own, called once."""
        module = self.module_of(node)
        if type(module) not in CLAMPED:
            raise BlockedError(
                f"{describe(node)} is a function, not a layer; fold_exported can change it"
            )
        if self.call_count(module) > 1:
            raise BlockedError(
                f"its activation {path_of(node)} is called {self.call_count(module)} times"
            )
        hook = user_hook(module)
        if hook:
            raise BlockedError(f"{hook} on {path_of(node)} sees its values")

    def check_removal(self, call: NormCall) -> None:
        """Raise BlockedError if removing the norm lets a function write into what others read."""
        for writer in self._unsafe_writers(call):
            if getattr(self.module_of(writer), "inplace", None) is not True:
                raise BlockedError(
                    f"{describe(writer)} would write into {describe(call.source)}, which is read "
                    "elsewhere"
                )

    def note_removal(self, call: NormCall) -> None:
        """Remember which layers must stop writing in place once the norm is removed."""
        self._writers.update(path_of(writer) for writer in self._unsafe_writers(call))

    def _unsafe_writers(self, call: NormCall) -> list[fx.Node]:
        fresh = call.source.op == "call_function" and not shares_memory_with_input(call.source)
        if fresh and len(call.source.users) == 1:
            return []
        results = {call.node} | views_of(call.node)
        return [
            user
            for result in results
            for user in result.users
            if WAS_INPLACE in user.meta and user.args[0] is result
        ]

    def why_not_removable(self, module: nn.Module, calls: Iterable[NormCall]) -> str:
        """Return why a norm's layer cannot become an Identity or its activation, "" if it can."""
        hook = user_hook(module)
        if hook:
            return f"a user put {hook} on it"
        reader = self._outside_reader(module)
        if reader is not None:
            return f"a tensor of it is also read by {describe(reader)}"
        layers = layers_after_norm(module)
        if layers is None:
            return f"its children {', '.join(dict(module.named_children()))} are not understood"
        results = {call.node for call in calls}
        for node in self._nodes[id(module)]:
            if node not in results and self._does_more(node, results):
                return f"its forward does more than normalise: {operation(node)}"
        return ""

    def _does_more(self, node: fx.Node, results: set[fx.Node]) -> bool:
        """Whether a node of a norm's own forward is no part of the normalisation."""
        if self.graph.is_constant(node) or not is_tensor(node):
            return False
        feeds = any(user in results for user in node.users)
        return not (feeds and operation(node) in {"mul", "batch_norm"})

    # -- the edits --------------------------------------------------------------------------------

    def edits(self, planner: Planner, sites: list[Site]) -> list[TreeEdit]:
        """Return the edits that do to the tree what the planner did to the graph."""
        bounds: dict[str, Bounds] = {}
        likes: dict[str, str] = {}
        for group in planner.groups:
            for clamp in group.move.clamps if group.move else ():
                path = path_of(clamp.node)
                bounds[path] = Bounds(*planner.clamps[clamp.node])
                likes[path] = group.calls[0].path
        edits: list[TreeEdit] = [self._weights(site) for site in sites]
        edits += [
            ClampActivation(path, bound, likes[path])
            for path, bound in bounds.items()
            if self._activated_norm(planner, path) is None
        ]
        edits += [NotInPlace(name) for name in sorted(self._writers - set(bounds))]
        for group in planner.groups:
            edits += self._norm(group, bounds)
        return edits

    def _activated_norm(self, planner: Planner, path: str) -> Group | None:
        """Return the removed norm whose own activation has this name."""
        for group in planner.groups:
            if group.move and path == f"{group.calls[0].path}.act":
                return group
        return None

    def _norm(self, group: Group, bounds: dict[str, Bounds]) -> list[TreeEdit]:
        call = group.calls[0] if group.calls else None
        if call is None:
            return []
        if group.move is not None:
            return [RemoveNorm(call.path, bounds.get(f"{call.path}.act"))]
        if call.changed:
            return [SetAffine(call.path, *affine_parameters(self.module_of(call.node), call))]
        return []

    def _weights(self, site: Site) -> SetWeights:
        plain = not self._stores_weight(site)
        return SetWeights(path_of(site.node), site.new_weight, site.new_bias(), plain)


def affine_parameters(module: nn.Module, call: NormCall) -> tuple[Tensor, Tensor]:
    """Return the weight and bias with which a norm's statistics give its changed map."""
    mean, var, eps = module.running_mean, module.running_var, module.eps
    bare = batchnorm_affine(mean, var, eps)  # type: ignore[arg-type]
    weight = call.affine.scale / bare.scale
    return weight, call.affine.shift - bare.shift * weight

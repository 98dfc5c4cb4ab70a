"""What both searches share: the target that may refuse, the result, and the sites of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from bnconvert.fold.channels import UNTOUCHED
from bnconvert.fold.graph import FoldGraph, operation
from bnconvert.fold.motion import BlockedError, describe
from bnconvert.fold.sites import Site, find_site

if TYPE_CHECKING:
    from torch import Tensor, fx

    from bnconvert.fold.algebra import Affine, Limits
    from bnconvert.fold.norms import NormCall

_READ_SHAPE_OF_SECOND = {"reshape_as", "view_as", "expand_as", "sum_to_size", "type_as"}
_READ_SHAPE_ONLY = {
    "sym_size",
    "sym_numel",
    "empty_like",
    "full_like",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "rand_like",
    "randn_like",
    "zeros_like",
    "_assert_tensor_metadata",
}


class Target(Protocol):
    """What the edits will be made on; it may refuse some that a graph would allow."""

    def check_site(self, site: Site) -> None:
        """Raise BlockedError if the site's weights cannot be changed."""

    def check_norm(self, call: NormCall) -> None:
        """Raise BlockedError if the norm cannot take in another map."""

    def check_activation(self, node: fx.Node) -> None:
        """Raise BlockedError if the activation cannot become a per-channel clamp."""

    def check_removal(self, call: NormCall) -> None:
        """Raise BlockedError if the norm's readers would do harm once it is gone."""

    def note_removal(self, call: NormCall) -> None:
        """Learn that the norm is about to be removed from the graph."""

    def check_edge(self, producer: fx.Node, reader: fx.Node) -> None:
        """Raise BlockedError if something sees the value that passes from one node to another."""


@dataclass(frozen=True)
class Absorption:
    """A map that a site or a norm takes in.

    Attributes:
        into: The site or norm.
        affine: One value per output channel of `into`, or per input channel if `before`.
        before: Whether the map stands before the operation.
    """

    into: Site | NormCall
    affine: Affine
    before: bool = False

    def apply(self) -> None:
        """Fold the map in."""
        if self.before:
            assert isinstance(self.into, Site)  # noqa: S101 (norms take in only what follows)
            self.into.absorb_before(self.affine)
        else:
            self.into.absorb_after(self.affine)


@dataclass(frozen=True)
class Clamp:
    """An activation that becomes a per-channel clamp.

    Attributes:
        node: The activation.
        numbers: The channel map of its input.
        limits: The bounds, by channel.
        inside: The range of the activation, for places that hold no channel.
    """

    node: fx.Node
    numbers: Tensor
    limits: Limits
    inside: tuple[float, float]


@dataclass
class Move:
    """What has to be done to remove a map from its place.

    Attributes:
        absorptions: Where the map goes.
        clamps: Activations that become clamps.
        passed: Nodes whose value changes on the way, with the channel map of what changes.
    """

    absorptions: list[Absorption] = field(default_factory=list)
    clamps: list[Clamp] = field(default_factory=list)
    passed: dict[fx.Node, Tensor] = field(default_factory=dict)

    def add(self, other: Move) -> None:
        """Take over everything of another move.

        Raises:
            BlockedError: Both change the same part of the value of a node.
        """
        for node, numbers in other.passed.items():
            mine = self.passed.get(node, torch.tensor(UNTOUCHED))
            if ((mine >= 0) & (numbers >= 0)).any():
                raise BlockedError(f"{describe(node)} is reached in two ways")
            self.passed[node] = torch.maximum(mine, numbers)
        self.absorptions += other.absorptions
        self.clamps += other.clamps


class Context:
    """The graph that is searched, the target it is searched for, and what was found in it.

    Attributes:
        graph: The graph.
        target: The target.
        norms: The norms by their result.
    """

    def __init__(self, graph: FoldGraph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.norms: dict[fx.Node, NormCall] = {}
        self._sites: dict[fx.Node, Site | None] = {}

    def site(self, node: fx.Node) -> Site | None:
        """Return the site at a node, always the same object."""
        if node not in self._sites:
            self._sites[node] = find_site(self.graph, node)
        return self._sites[node]

    def check_site(self, site: Site) -> None:
        """Raise BlockedError if the site's weights cannot be changed."""
        if site.quantised:
            raise BlockedError(f"the weight of {describe(site.node)} is quantised")
        self.target.check_site(site)

    def changed_sites(self) -> list[Site]:
        """Return the sites that something was folded into."""
        return [
            site
            for site in self._sites.values()
            if site is not None and site.changed and not site.node._erased
        ]


def reads_shape_only(user: fx.Node, node: fx.Node) -> bool:
    """Whether a reader depends on a node's shape and not on its values."""
    name = operation(user)
    if name in _READ_SHAPE_ONLY:
        return True
    return name in _READ_SHAPE_OF_SECOND and user.args[0] is not node

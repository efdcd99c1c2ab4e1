"""What may be in the host's memory instead of the device's: a user's options, a layout's fields, and a unit's choices
of activations. `cost/placement.py` has the bytes and seconds, `sharding/host.py` and `modeling/activations.py` do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from .affine import Affine
from .description import ModelDescription, Recomputation

STATE_OPTIONS = ("host_offload", "offload_optimizer")
ACTIVATION_OPTION = "offload_activations"
HOST_OPTIONS = (*STATE_OPTIONS, ACTIVATION_OPTION)
"""Options that put something on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Treatment of the activations that a unit's forward saves for its backward."""

    SAVE: ClassVar[Activations]
    RECOMPUTE: ClassVar[Activations]
    OFFLOAD: ClassVar[Activations]
    RECOMPUTE_OFFLOAD: ClassVar[Activations]
    BASIC: ClassVar[tuple[Activations, ...]]
    """The four above; a block that can be recomputed and offloaded has all, else it has those of the first two."""

    recomputation: Recomputation | None = None
    """None saves everything that autograd needs."""
    offloads: bool = False
    """Whether saved activations are on the host until backward."""

    @property
    def recomputes(self) -> bool:
        """Whether at least a part of forward runs again in backward."""
        return self.recomputation is not None

    @property
    def kept(self) -> Activations:
        """The same with saved activations on the device."""
        return replace(self, offloads=False)

    def describe(self) -> tuple[str, ...]:
        """Return short texts for tables; none if everything is saved on the device."""
        again = () if self.recomputation is None else (self.recomputation.describe(),)
        return (*again, "offload activations") if self.offloads else again

    def nearest(self, choices: Sequence[Activations], *, every_policy: bool) -> list[Activations]:
        """Return a unit's choices that are nearest to this one: parts of it that the unit cannot do are left out.

        With `every_policy` they are all that recompute, else the first.
        """
        away, again = (
            wanted and any(getattr(one, name) for one in choices)
            for name, wanted in (("offloads", self.offloads), ("recomputes", self.recomputes))
        )
        found = [one for one in choices if (one.offloads, one.recomputes) == (away, again)]
        return found if every_policy else found[:1]


Activations.BASIC = tuple(
    Activations(recomputation=policy, offloads=away) for away in (False, True) for policy in (None, Recomputation())
)
Activations.SAVE, Activations.RECOMPUTE, Activations.OFFLOAD, Activations.RECOMPUTE_OFFLOAD = Activations.BASIC


def activation_choices(description: ModelDescription) -> list[tuple[Activations, ...]]:
    """Return each unit's choices of activations, first those on the device.

    On the host are all saved activations, or the input of a unit that is recomputed from it alone.
    """
    sent = {segment.unit for segment in description.segments if segment.sent_bytes != Affine()}
    choices = []
    for unit, policies in enumerate(description.recomputations):
        kept = [Activations(recomputation=policy) for policy in (None, *policies)]
        choices.append((*kept, *(replace(one, offloads=True) for one in kept[:2] if unit in sent)))
    return choices


class Place(NamedTuple):
    """Where a unit's shards and states are: two fields of its layout."""

    on_host: bool = False
    states_on_host: bool = False


ON_DEVICE = Place()


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Decisions for one unit about the memory of its states and activations."""

    __slots__ = ()  # `UnitLayout` has them, because only one of its bases can

    activations: Activations = Activations.SAVE
    on_host: bool = False
    """Parameters, gradients and optimizer states are in host memory, and the host runs the optimizer step."""
    states_on_host: bool = False
    """Only optimizer states are in host memory; they are copied to the device for the unit's step."""

    def check_place(self) -> None:
        if self.on_host and self.states_on_host:
            raise ValueError("A unit can have only one of on_host and states_on_host.")

    @property
    def away(self) -> bool:
        """Whether parameters and gradients are in another memory than the device's; FSDP2 brings them, also in one
        process.
        """
        return self.on_host

    @property
    def steps_alone(self) -> bool:
        """Whether the optimizer steps the unit before all others, by itself."""
        return self.states_on_host

    @property
    def uses_host(self) -> bool:
        """Whether states or saved activations are in the host's memory."""
        return self.on_host or self.states_on_host or self.activations.offloads

    def describe_place(self) -> tuple[str, ...]:
        """Return short texts for tables; none if everything is saved on the device."""
        states = ["on host"] * self.on_host + ["optimizer on host"] * self.states_on_host
        return (*self.activations.describe(), *states)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Decisions about the host's memory that a user may take from the planner; None leaves one to the planner."""

    host_offload: bool | None = None
    """Keep parameters, gradients and optimizer states of every unit on the host, or of none; default: the planner
    decides for each.
    """
    offload_optimizer: bool | None = None
    """Keep the optimizer states of every unit on the host and copy them to the device for the step, or of none;
    default: the planner decides for each.

    Parameters and gradients stay on the device.
    """
    offload_activations: bool | None = None
    """Keep the saved activations of every block on the host until backward, or of none; default: the planner decides
    for each.
    """

    @property
    def asked(self) -> tuple[str, ...]:
        """Options that put something on the host."""
        return tuple(name for name in HOST_OPTIONS if getattr(self, name))

    def allowed(
        self, recomputes: Sequence[bool], *, has_host: bool, alike: bool
    ) -> tuple[tuple[Activations, ...], tuple[Place, ...]]:
        """Return the allowed choices of activations, which recompute fully or not at all, and places of states.

        `has_host`: the host is known; `alike`: only places that all units may have.
        """
        all_states, states, saved = (
            (False, True) if asked is None and has_host else (bool(asked),)
            for asked in (self.host_offload, self.offload_optimizer, self.offload_activations)
        )
        pairs = [(away, one) for away in all_states for one in states if not (alike and away and one)]
        activations = tuple(Activations.BASIC[2 * away + again] for away in saved for again in recomputes)
        return activations, tuple(dict.fromkeys(Place(away, one and not away) for away, one in pairs))

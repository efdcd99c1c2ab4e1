"""Gathering of units that are read against a model of it, which takes its transitions from the table in design.md."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hf_osdp.errors import OSDPError
from hf_osdp.planner.description import DType, GatherSpan, ParameterSpec, UnitDescription
from hf_osdp.sharding import unit_order as tested
from hf_osdp.sharding.steps import micro_step
from hf_osdp.sharding.unit_order import OrderState, UnitOrder
from tests.helpers.properties import holds

UNITS = {"first": "first.inner", "second": "second.inner", "head": "head", "(root)": "embed"}
"""Units, and which of their modules has a weight."""
CALLED, READ = "the model is called; at rest and evaluated also a part of it", "a weight is read"
READ_IDLE = "a weight is read whose unit does not run"
EVALUATED = "a call of the model without gradients ends, and no backward needs a read weight"
BACKWARD, LISTED, STEPS = "all gradients exist", "parameters are listed", "an optimizer steps"
LOADED = "`load_state_dict`, `model.to`"


def table() -> dict[tuple[str, str], tuple[str, str]]:
    """Return what happens and the next state, by state and event, from the table in design.md."""
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
    text = page.partition("`sharding/unit_order.py` handles")[2].partition("| --- |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[1:]]
    return {(state, event): (happens, after) for state, event, happens, after in rows}


TABLE = table()


@dataclass
class Model:
    """Which units are whole, by the table and by what FSDP2 does when a module is called."""

    state: str = "at rest"
    whole: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    """Units whose read weights a backward needs."""
    read: set[str] = field(default_factory=set)
    """Units that were gathered for a read."""
    gathered: list[str] = field(default_factory=list)
    """All gathers since the event began."""
    met: int = 0
    """Reads since the event began that all ranks must make."""
    taken: set[tuple[str, str]] = field(default_factory=set)
    """Rows of the table."""

    def event(self, event: str, units: set[str] | None = None, *, grad: bool = False) -> None:
        row = next((row for row in ((self.state, event), ("any", event)) if row in TABLE), None)
        if row is None:
            return
        self.taken.add(row)
        happens, after = TABLE[row]
        HAPPENS[happens](self, set(UNITS) if units is None else units, grad)
        self.state = self.state if after == "as before" else after

    def gather(self, unit: str) -> None:
        if unit not in self.whole:
            self.whole.add(unit)
            self.gathered.append(unit)

    def free_read(self) -> None:
        self.whole -= self.read - self.needed
        self.read.clear()

    def free_unless_needed(self) -> None:
        if not self.needed:
            self.free_read()

    def gather_to_read(self, units: set[str], grad: bool, *, all_ranks: bool) -> None:
        for unit in units:
            if unit not in self.whole:
                self.met += all_ranks
                self.read.add(unit)
            self.gather(unit)
            if grad:
                self.needed.add(unit)

    def free(self, units: set[str]) -> None:
        self.needed -= units
        self.whole -= units

    def end_backward(self) -> None:
        self.needed.clear()
        self.read.clear()
        self.whole.clear()

    def keep_needed(self, units: set[str]) -> None:
        self.whole -= units - self.needed

    def free_all(self) -> None:
        self.read.clear()
        self.free(set(UNITS))


HAPPENS: dict[str, Callable[[Model, set[str], bool], None]] = {
    "its shard is shown": lambda model, units, grad: None,
    "what reads gathered is freed, unless a backward needs it; shards are checked":
        lambda model, units, grad: model.free_unless_needed(),
    "the unit is gathered when its turn comes; with gradients it stays whole until backward ends":
        lambda model, units, grad: model.gather_to_read(units, grad, all_ranks=False),
    "what reads gathered is freed": lambda model, units, grad: model.free_read(),
    "units that were read are reduced with the rest": lambda model, units, grad: model.end_backward(),
    "as if active; unless it is whole, all ranks must read it":
        lambda model, units, grad: model.gather_to_read(units, grad, all_ranks=True),
    "their units are freed, unless a backward needs them": lambda model, units, grad: model.keep_needed(units),
    "its units are freed": lambda model, units, grad: model.free(units),
    "all units are freed": lambda model, units, grad: model.free_all(),
}  # fmt: skip


class Raised(Exception):
    """Of a forward."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, beside: nn.Module | None = None, raises: bool = False) -> torch.Tensor:
        if raises:
            raise Raised

        def run(x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x).tanh()
            return x if beside is None else x * (1 + beside.weight.mean())

        return x + (run(x) if beside is None else checkpoint(run, x, use_reentrant=False))


class Whole(nn.Module):
    """Reads weights after its blocks; with `recomputes`, its second block reads the head's, and again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Linear(4, 4), Block(), Block()
        self.head = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, reads: tuple[str, ...], calls_head: bool, recomputes: bool, raises: str
    ) -> torch.Tensor:
        x = self.first(self.embed(x))
        x = self.second(x, self.head if recomputes else None, raises == "second")
        for unit in reads:
            x = x * (1 + self.get_submodule(UNITS[unit]).weight.mean())
        if raises:
            raise Raised
        return self.head(x) if calls_head else x


class Run:
    """A sharded model, a plain one that does the same, and the model of the table."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain = Whole()
        self.sharded: Any = copy.deepcopy(self.plain)
        whole, mesh = list(self.sharded.parameters()), DeviceMesh("cpu", [0])
        for unit in ("first", "second", "head"):
            fully_shard(self.sharded.get_submodule(unit), mesh=mesh, reshard_after_forward=True)
        fully_shard(self.sharded, mesh=mesh, reshard_after_forward=False)
        self.order = UnitOrder(self.sharded, [_unit(name) for name in UNITS], None, whole)
        self.units = {group.label: group for group in self.order.groups}
        self.model, self.pending, self.number = Model(), [], 0
        self.used: set[str] = set()
        """Units of pending losses."""
        self.calls = 0
        """Calls since the last backward."""
        self.waiting: set[str] = set()
        """Units whose gradients wait for the last micro-step."""
        self.log: list[tuple[str, str]] = []
        for name, unit in self.units.items():
            self._watch(name, unit)

    def _watch(self, name: str, unit: Any) -> None:
        gather, end = unit.gather, unit.end_backward

        def gathers(async_op: bool = False) -> None:
            if not (unit.is_unsharded or unit.is_gathering):
                self.log.append(("gather", name))
            gather(async_op)

        def ends(**options: Any) -> None:
            if unit.reduce_grads and tested.has_gradients(unit):
                self.log.append(("reduce", name))
            end(**options)

        unit.gather, unit.end_backward = gathers, ends

    def input(self) -> torch.Tensor:
        self.number += 1
        return torch.randn(2, 4, generator=torch.Generator().manual_seed(self.number))

    def do(self, event: str, *args: Any) -> None:
        """Run an event on all three, and compare them."""
        self.log.clear()
        self.model.gathered.clear()
        self.model.met = 0
        with patch.object(tested, "require_all") as met:
            getattr(self, event)(*args)
        if event != "backward":
            assert self.log == [("gather", unit) for unit in self.model.gathered]
        assert met.call_count == self.model.met
        self.compare()

    def compare(self) -> None:
        assert self.order.state == OrderState(self.model.state)
        assert {name for name, unit in self.units.items() if unit.is_unsharded} == self.model.whole
        assert {name for name, unit in self.units.items() if unit.is_pinned} == self.model.needed
        if self.model.state == "at rest":
            assert not self.model.whole and not self.model.needed

    # ---- events

    def forward(self, grad: bool, reads: tuple[str, ...], calls_head: bool, recomputes: bool, raises: str) -> None:
        x, losses, self.calls = self.input(), [], self.calls + 1
        for model in (self.sharded, self.plain):
            with torch.set_grad_enabled(grad):
                try:
                    losses.append(model(x, reads, calls_head, recomputes, raises))
                except Raised:
                    assert raises
        self.model.event(CALLED)
        self.model.gather("(root)")
        for block in ("first", "second"):
            self.model.gather(block)
            if block == "second" and recomputes and raises != "second":
                self.model.event(READ_IDLE, {"head"}, grad=grad)
            if raises == block:
                return
            self.model.keep_needed({block})
        for unit in reads:
            if unit != "(root)":  # which runs
                self.model.event(READ_IDLE, {unit}, grad=grad)
        if raises:
            return
        if calls_head:
            self.model.gather("head")
            self.model.keep_needed({"head"})
        if not grad and not self.model.needed:
            self.model.event(EVALUATED)
        called = {"(root)", "first", "second", *(["head"] if calls_head or recomputes else [])}
        self._compare_losses(losses, grad, called | set(reads))

    def part(self, unit: str, grad: bool) -> None:
        with torch.set_grad_enabled(grad):
            x, self.calls = self.input(), self.calls + 1
            losses = [model.get_submodule(unit)(x) for model in (self.sharded, self.plain)]
        if self.model.state != "active":
            self.model.event(CALLED)
        self.model.gather(unit)
        self.model.keep_needed({unit})
        self._compare_losses(losses, grad, {unit})

    def read(self, unit: str, grad: bool) -> None:
        with torch.set_grad_enabled(grad):
            weights = [model.get_submodule(UNITS[unit]).weight for model in (self.sharded, self.plain)]
            self.model.event(READ_IDLE if self.model.state == "active" else READ, {unit}, grad=grad)
            assert isinstance(weights[0], DTensor) == (self.model.state == "at rest")
            if self.model.state == "at rest":
                weights[0], grad = weights[0].full_tensor().detach(), False
            self._compare_losses([weight * 2 for weight in weights], grad, {unit})

    def _compare_losses(self, losses: list[torch.Tensor], grad: bool, units: set[str]) -> None:
        torch.testing.assert_close(*losses)
        if grad:
            self.pending.append([loss.square().sum() for loss in losses])
            self.used |= units

    def listed(self) -> None:
        self.model.event(LISTED)
        for name, parameter in self.sharded.named_parameters():
            unit = name.partition(".")[0]
            assert isinstance(parameter, DTensor) == ((unit if unit in UNITS else "(root)") not in self.model.whole)

    def backward(self, is_last: bool) -> None:
        if not self.pending:
            return
        needed, missing = set(self.model.needed), self.used - self.model.whole
        with ExitStack() as stack:
            ends = self.order.backward_ends

            def logged() -> Any:
                self.log.append(("end", ""))
                return ends()

            stack.enter_context(micro_step(self.sharded, is_last=is_last))
            stack.enter_context(patch.object(self.order, "backward_ends", logged))
            sums = [sum(losses) for losses in zip(*self.pending, strict=True)]
            sums[0].backward()
        sums[1].backward()
        gathered = {unit for what, unit in self.log if what == "gather"}
        assert missing <= gathered and not gathered & needed
        end = self.log.index(("end", ""))
        early, late = ([unit for what, unit in log if what == "reduce"] for log in (self.log[:end], self.log[end:]))
        if self.calls == 1 and is_last and {"first", "second"} <= missing:  # each while the one after it runs
            assert self.log.index(("gather", "first")) < self.log.index(("reduce", "second"))
        self.waiting |= self.used
        assert set(early + late) == (self.waiting if is_last else set())
        assert not set(early) & needed and len(late) == len(set(late))
        self.model.event(BACKWARD)
        self._forget()
        self.calls = 0
        if is_last:
            self.waiting.clear()
            for name, parameter in self._shards().items():
                torch.testing.assert_close(_local(parameter.grad), self.plain.get_parameter(name).grad)

    def refused(self) -> None:
        """A backward that raises as it begins leaves all as it was."""
        if self.pending:
            with pytest.raises(OSDPError, match="create_graph"):
                sum(losses[0] for losses in self.pending).backward(create_graph=True)

    def step(self, units: frozenset[str]) -> None:
        """Step an optimizer of some units; graphs from before it cannot run backward."""
        if self.waiting:
            return
        shards = {name: one for name, one in self._shards().items() if _unit_of(name) in units}
        for model in (shards, {name: self.plain.get_parameter(name) for name in shards}):
            torch.optim.SGD(model.values(), lr=0.1).step()
        for parameter in (*self._shards().values(), *self.plain.parameters()):
            parameter.grad = None
        self.model.event(STEPS, set(units))
        self._forget()

    def load(self, moves: bool) -> None:
        if moves:
            self.sharded.to(torch.float32)
        else:
            with torch.no_grad():
                for parameter in self.plain.parameters():
                    parameter.mul_(0.9)
            self.sharded.load_state_dict(self.plain.state_dict())
        self.model.event(LOADED)
        self._forget()

    def _forget(self) -> None:
        self.pending.clear()
        self.used.clear()

    def _shards(self) -> dict[str, nn.Parameter]:
        return {
            f"{UNITS[name]}.{info.param_name}": one.sharded_param
            for name, unit in self.units.items() for one in unit.fsdp_params for info in [one._module_info]
        }  # fmt: skip


def _unit(name: str) -> UnitDescription:
    fqn = "" if name == "(root)" else name
    spec = ParameterSpec(name=f"{UNITS[name]}.weight", shape=(4, 4), dtype=DType.FLOAT32)
    span = GatherSpan.USE if fqn else GatherSpan.STEP
    return UnitDescription(fqn=fqn, module_names=(fqn,), class_name="", span=span, parameters=(spec,))


def _unit_of(parameter: str) -> str:
    return next(unit for unit, module in UNITS.items() if parameter.startswith(module))


def _local(gradient: Any) -> torch.Tensor | None:
    return None if gradient is None else gradient.to_local()


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


_unit_names, _bool = st.sampled_from(sorted(UNITS)), st.booleans()
_raises = st.sampled_from(["", "", "", "second", "end"])
EVENTS = st.one_of(
    st.tuples(st.just("forward"), _bool, st.lists(_unit_names, max_size=2).map(tuple), _bool, _bool, _raises),
    st.tuples(st.just("forward"), _bool, st.just(()), st.just(True), st.just(False), st.just("")),
    st.tuples(st.just("part"), st.sampled_from(["first", "head"]), _bool),
    st.tuples(st.just("read"), _unit_names, _bool),
    st.tuples(st.just("backward"), _bool),
    st.tuples(st.just("step"), st.one_of(st.just(frozenset(UNITS)), st.frozensets(_unit_names, min_size=1))),
    st.tuples(st.just("load"), _bool),
    st.sampled_from([("listed",), ("refused",)]),
)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@holds(st.lists(EVENTS, min_size=4, max_size=12), few=150, many=3000)
def test_units_are_gathered_and_freed_as_the_table_says(events):
    run = Run()
    for event in events:
        run.do(*event)


def test_every_row_of_the_table_is_known_and_taken():
    assert {happens for happens, _ in TABLE.values()} == set(HAPPENS)
    assert {state.value for state in OrderState} | {"any", "as before"} == {
        state for (before, _), (_, after) in TABLE.items() for state in (before, after)
    }
    run = Run()
    trains, evaluates = (True, ("head",), False, False, ""), (False, (), True, False, "")
    for event in (
        ("read", "head", True), ("forward", *trains), ("backward", True), ("step", frozenset(UNITS)),
        ("forward", *evaluates), ("read", "head", False), ("listed",), ("load", False),
    ):  # fmt: skip
        run.do(*event)
    assert run.model.taken == set(TABLE)

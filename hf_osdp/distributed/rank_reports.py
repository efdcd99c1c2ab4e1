"""What ranks say of themselves at the roll call, and the lines that tell what is wrong. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

TIMEOUT_VARIABLE = "OSDP_LAUNCH_TIMEOUT_S"
_MOST_LETTERS = 160
"""Of another library's message."""
_MOST_HOSTS = 4
"""Host names in one list; of more, the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank that is there."""

    rank: int
    host: str
    """Host name."""
    process: int
    """Its number there."""
    versions: Mapping[str, str]
    """Version of each package that must be the same everywhere, and of Python (major.minor)."""

    @classmethod
    def read(cls, text: str | bytes) -> RankReport:
        """A report as JSON; what another version of hf_osdp says beside it is passed over."""
        said = json.loads(text)
        return cls(**{field.name: said[field.name] for field in fields(cls)})


def missing_line(
    reports: Sequence[RankReport], *, world_size: int, ranks_per_machine: int | None, launchers_met: bool, place: str, waited_s: float
) -> str:
    """Some ranks did not report.

    Args:
        reports: those that did, rank 0 among them.
        world_size: ranks that were to come.
        ranks_per_machine: ranks on each machine, where the launcher says so.
        launchers_met: whether the launchers of all machines came together before, as torchrun's do.
        place: `address:port` where ranks meet.
        waited_s: how long rank 0 waited, in seconds.
    """
    there = {report.rank for report in reports}
    missing = [rank for rank in range(world_size) if rank not in there]
    here = f"{_ranks(there)} on {_hosts(report.host for report in reports)}"
    machines = sorted({rank // ranks_per_machine for rank in missing}) if ranks_per_machine else []
    of_machines = f" of machine{'' if len(machines) == 1 else 's'} {_ranges(machines)}" if machines else ""
    if launchers_met:
        remedy = f"They were started, and ended or hang: look at the output{of_machines}."
    else:
        remedy = (
            f"Look at the output{of_machines or ' of their machines'}; if they were never started, start them,"
            f" and check that they reach rank 0's machine at {place}: address, port, firewall."
        )
    return (
        f"{len(missing)} of {world_size} ranks did not report within {waited_s:g} s: {_ranks(missing)} ({here} did)."
        f" {remedy} If they only need longer, raise {TIMEOUT_VARIABLE}."
    )


def difference_line(reports: Sequence[RankReport]) -> str | None:
    """Which ranks run which versions; None where all run the same."""
    parts = []
    for name in reports[0].versions:
        kinds: dict[str, list[RankReport]] = {}
        for report in reports:
            kinds.setdefault(report.versions.get(name, "unknown"), []).append(report)
        if len(kinds) > 1:
            each = ", ".join(
                f"{version} on {_ranks(r.rank for r in found)} ({_hosts(r.host for r in found)})" for version, found in kinds.items()
            )
            parts.append(f"{name} is {each}")
    if not parts:
        return None
    return f"Ranks run different versions: {'; '.join(parts)}. Install the same versions on every machine, for example by constraints.txt."


def twice_line(rank: int, hosts: Sequence[str]) -> str:
    """Two processes have one rank."""
    return (
        f"Rank {rank} was started twice, on {_hosts(hosts)}; give each machine a number of its own"
        " (--machine_rank 0, 1, ...; torchrun: --node-rank)."
    )


def another_world_line(rank: int, host: str, size: int, *, first_host: str, first_size: int) -> str:
    """A rank was launched into a world of another size."""
    return (
        f"Rank {rank} on {host} was started as one of {size} ranks, rank 0 on {first_host} as one of {first_size};"
        " give every machine the same --num_machines and --num_processes (torchrun: --nnodes and --nproc-per-node)."
    )


def silent_line(report: RankReport, *, place: str, waited_s: float) -> str:
    """Rank 0 did not preside. The store was there: its launcher runs."""
    return (
        f"Rank {report.rank} on {report.host} waited {waited_s:g} s at {place} for rank 0, which did not report or ended;"
        f" its own output says why. If it only needs longer to start, raise {TIMEOUT_VARIABLE}."
    )


def unreachable_line(report: RankReport, *, place: str, waited_s: float, reason: str) -> str:
    """The store cannot be reached, or no longer."""
    return (
        f"Rank {report.rank} on {report.host} could not reach rank 0's machine at {place} within {waited_s:g} s"
        f" ({_first_sentence(reason)}). Start the command there too, give every machine its address"
        " (main_process_ip, main_process_port; torchrun: --master-addr, --master-port), and let the firewall pass this port."
    )


def lost_line(report: RankReport, *, place: str, reason: str) -> str:
    """Rank 0 or its launcher ended during the roll call."""
    return (
        f"Rank {report.rank} on {report.host} lost rank 0's machine at {place} while ranks came together"
        f" ({_first_sentence(reason)}): a process there ended, and its own output says why."
    )


def port_line(report: RankReport, *, place: str, reason: str) -> str:
    """Rank 0 cannot open the store."""
    return (
        f"Rank 0 on {report.host} cannot wait for the others at {place} ({_first_sentence(reason)}); another run may hold the port:"
        " end it, or set MASTER_PORT to a free one on every machine."
    )


def gloo_line(report: RankReport, *, interface: str | None, reason: str) -> str:
    """Ranks met at rank 0's store, but gloo cannot connect them with each other.

    Args:
        report: of this rank.
        interface: `GLOO_SOCKET_IFNAME`.
        reason: what gloo said.
    """
    now = f"is {interface}" if interface else "is not set, so gloo offers the address that the host's name stands for"
    return (
        f"Rank {report.rank} on {report.host} cannot connect to other ranks over gloo ({_first_sentence(reason)})."
        f" GLOO_SOCKET_IFNAME {now}; set it on each machine to the interface that faces the others, as `ip -br addr` lists them."
    )


def failed_line(rank: int, host: str, *, text: str) -> str:
    """A rank ended by an exception."""
    return f"Rank {rank} on {host} failed, and all ranks end: {text}"


def died_line(rank: int, host: str) -> str:
    """A rank ended and said nothing."""
    return (
        f"Rank {rank} on {host} ended without a word, and all ranks end: it was killed (by hand, by the cluster, for memory of the host),"
        " crashed or left by os._exit; its output and its machine's log say which."
    )


def off_line(rank: int, host: str, *, reason: str) -> str:
    """A rank's machine cannot be reached any more."""
    return (
        f"Rank {rank} on {host} does not answer any more ({_first_sentence(reason)}), and all ranks end:"
        " its machine went off, or the network between."
    )


def no_lifeline_line(rank: int, host: str, *, place: str, reason: str) -> str:
    """A rank cannot connect to rank 0's lifeline."""
    return (
        f"Rank {rank} on {host} has no lifeline to rank 0 at {place} ({_first_sentence(reason)}): should a rank die, this one waits until"
        " its collective times out. Let machines reach each other on all ports."
    )


def absent_line(ranks: Iterable[int], *, waited_s: float) -> str:
    """Ranks did not come to rank 0's lifeline."""
    return (
        f"No lifeline to {_ranks(ranks)} after {waited_s:g} s: should one of them die, others wait until their collective times out."
        " Its own output says why."
    )


def ended_line(*, reason: str) -> str:
    """A rank ended before there was a lifeline."""
    return f"A rank ended while ranks compared what they are about to run ({_first_sentence(reason)}); its own output says why."


def late_line(ranks: Iterable[int], *, waited_s: float) -> str:
    """Ranks that were there do not come to where the others are."""
    return (
        f"The other ranks waited {waited_s:g} s for {_ranks(ranks)}, which did not come this far or hang:"
        " look at what they do with `py-spy dump --pid`, and let all ranks run the same program."
    )


def mismatch_line(said: Sequence[Mapping[str, str]]) -> str | None:
    """Which ranks are about to run something else than rank 0; None where all are to run the same.

    Args:
        said: of each rank, what it is about to run, by name, in rank order; an empty text agrees with all.
    """
    parts = []
    for name in dict.fromkeys(name for one in said for name in one):
        kinds: dict[str, list[int]] = {}
        for rank, one in enumerate(said):
            if value := one.get(name, "not known"):
                kinds.setdefault(value, []).append(rank)
        if len(kinds) > 1:
            parts.append(f"{name} is " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in kinds.items()))
    if not parts:
        return None
    return f"Ranks are about to run different things: {'; '.join(parts)}. Run the same program with the same arguments on every rank."


def _first_sentence(reason: str) -> str:
    """Torch's message without its C++ stack and source files, short enough for one line."""
    text = " ".join(re.sub(r"\[[^\]]*\.cc:\d+\]", "", reason.split("Exception raised from")[0]).split()).rstrip(". ")
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3, 8`."""
    found = sorted(set(ranks))
    return f"rank{'' if len(found) == 1 else 's'} {_ranges(found)}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 8` for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _hosts(hosts: Iterable[str]) -> str:
    """Each name once, in order; of many, the first."""
    names = list(dict.fromkeys(hosts))
    rest = len(names) - _MOST_HOSTS
    return ", ".join(names[:_MOST_HOSTS]) + (f" and {rest} more" if rest > 0 else "")

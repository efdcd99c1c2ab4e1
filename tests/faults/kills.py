"""Kill a training at random moments, start it again, and see that nothing is lost. The long version:

    python -m tests.faults.kills --kills 100 --seed 0

Each start is killed in a phase and after a time that a seeded generator picks, by SIGKILL of one rank or of all. What
must hold: the other ranks end by themselves; the next start goes on from the last checkpoint that was complete; the
final weights are those of a run that nobody killed, to the bit. A rank whose peer dies while both form a group waits
in torch; here as under torchrun it is sent SIGTERM, and SIGKILL 30 s after it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.faults.training import FINAL, PHASES, Training, marks, train
from tests.helpers.distributed import Rank, ranks_of

WORLD = 2
ENDS_WITHIN_S = 2.0
"""How long the others may take to end by themselves, before they are ended as torchrun ends them."""
LAUNCHER_WAITS_S = 30.0
"""From torchrun's SIGTERM to its SIGKILL."""
MOST_ENDED = 0.02
"""The share of kills after which others may have to be ended."""
START_S = 120.0
"""How long one start may take."""
LONGEST_S = {"planning": 0.6, "resume": 0.3, "step": 0.15, "save": 0.15}
"""How long after a phase's mark the kill may come: about what a phase takes."""
TRAININGS = (
    Training(loop="trainer", sharded=True), Training(loop="plain", sharded=True),
    Training(loop="trainer", sharded=False), Training(loop="trainer", sharded=True, in_background=True),
    Training(loop="plain", sharded=False),
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What was seen over all trainings: kills by phase and victim, seconds from the death of one rank to the end of
    the other, and where the other had to be ended.
    """

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    ending_s: list[float] = field(default_factory=list)
    were_ended: list[str] = field(default_factory=list)
    trainings: int = 0
    problems: list[str] = field(default_factory=list)
    wanted: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether more kills are wanted."""
        return self.kills.total() < self.wanted


def run(kills: int, seed: int, folder: Path) -> Outcome:
    """Train in a folder until there were so many kills; the seed picks them."""
    chance, outcome = random.Random(seed), Outcome(wanted=kills)
    wanted: dict[Training, dict[str, torch.Tensor]] = {}
    while outcome.goes_on:
        training = TRAININGS[outcome.trainings % len(TRAININGS)]
        if training not in wanted:
            wanted[training] = uninterrupted(training, folder)
        place = folder / f"training-{outcome.trainings}"
        place.mkdir()
        _one_training(training, place, chance, outcome)
        outcome.trainings += 1
        final = load_file(place / FINAL)
        if different := [name for name, value in wanted[training].items() if not torch.equal(final[name], value)]:
            outcome.problems.append(f"{place.name} ({training}): {len(different)} weights differ: {different[0]}, ...")
    ended, total = len(outcome.were_ended), outcome.kills.total()
    if ended > max(1, MOST_ENDED * total):
        outcome.problems.append(f"others had to be ended after {ended} of {total} kills")
    return outcome


def started(training: Training, place: Path, **variables: str) -> AbstractContextManager[list[Rank]]:
    options = {"timeout_s": START_S, "init": training.loop == "plain", "env": variables}
    return ranks_of(train, WORLD, training, str(place), **options)


def uninterrupted(training: Training, folder: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run that nobody kills."""
    place = Path(tempfile.mkdtemp(dir=folder))
    with started(training, place) as ranks:
        _wait(START_S, lambda: _ended(ranks))
    return load_file(place / FINAL)


def _one_training(training: Training, place: Path, chance: random.Random, outcome: Outcome) -> None:
    """Start until it is done; each start must go on from the newest checkpoint that was visible when it began."""
    starts = 0
    while not (place / FINAL).exists():
        (place / "marks").unlink(missing_ok=True)
        before = max((int(path.name.rpartition("-")[2]) for path in place.glob("checkpoint-*")), default=0)
        with started(training, place, TORCHELASTIC_RESTART_COUNT=str(starts)) as ranks:
            if outcome.goes_on:
                _kill_sometime(ranks, place, chance, outcome, resumes=starts > 0)
            elif not _wait(START_S, lambda ranks=ranks: _ended(ranks)) or any(rank.returncode for rank in ranks):
                outcome.problems.append(f"{place.name}: a start that nobody killed did not end well")
                return
        resumed = [int(mark.rpartition("-")[2]) for mark in marks(place) if mark.startswith("resume")]
        if resumed[:1] != [before] and (resumed or (before and "step" in marks(place))):
            outcome.problems.append(f"{place.name}: began from {resumed[:1]}, though checkpoint-{before} was complete")
        starts += 1


def _kill_sometime(ranks: list[Rank], place: Path, chance: random.Random, outcome: Outcome, *, resumes: bool) -> None:
    """Wait for a phase, and for a moment in it; kill one rank or all; see that the others end."""
    phase = chance.choice([phase for phase in PHASES if resumes or phase != "resume"])
    number, moment = chance.randint(1, 4) if phase in ("step", "save") else 1, chance.uniform(0, LONGEST_S[phase])
    victims = chance.choice([[0], [1], [0, 1]])

    def reached() -> bool:
        return sum(mark.split()[0] == phase for mark in marks(place)) >= number

    _wait(START_S, lambda: reached() or _ended(ranks))
    if not reached():
        return  # it ended before
    time.sleep(moment)
    for victim in victims:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(ranks[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    outcome.kills[phase, "all" if len(victims) == WORLD else f"rank {victims[0]}"] += 1
    if not _wait(ENDS_WITHIN_S, lambda: _ended(ranks)):
        outcome.were_ended.append(f"{place.name}, rank {victims[0]} killed in {phase}")
        _end_as_torchrun(ranks)
    elif len(victims) < WORLD:
        outcome.ending_s.append(time.monotonic() - killed)


def _end_as_torchrun(ranks: list[Rank]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in (rank for rank in ranks if rank.poll() is None):
            os.kill(rank.pid, number)
        if _wait(LAUNCHER_WAITS_S, lambda: _ended(ranks)):
            return


def _ended(ranks: list[Rank]) -> bool:
    return all(rank.poll() is not None for rank in ranks)


def _wait(seconds: float, true: Callable[[], bool]) -> bool:
    """Return whether it became true within the time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf_osdp_kills_") as folder:
        outcome = run(arguments.kills, arguments.seed, Path(folder))
    print(f"{outcome.kills.total()} kills in {outcome.trainings} trainings")
    for phase in PHASES:
        print(f"{phase:9}", *(f"{one} {outcome.kills[phase, one]:3}" for one in ("rank 0", "rank 1", "all")), sep="  ")
    if ends := outcome.ending_s:
        took = f"median {statistics.median(ends):.2f} s, at most {max(ends):.2f}"
        print(f"From a rank's death to the other's end: {took}.")
    print(f"Ended as torchrun ends them, after {ENDS_WITHIN_S:g} s: {', '.join(outcome.were_ended) or 'none'}.")
    print(*(outcome.problems or ["Nothing was lost: every final weight as without a kill, to the bit."]), sep="\n")
    raise SystemExit(bool(outcome.problems))


if __name__ == "__main__":
    main()

"""Keep a part of the mutants of a cosmic-ray session, the same ones each time: `python -m tests.mutation.sample
SESSION PERCENT`.
"""

from __future__ import annotations

import random
import sys

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult


def main(session: str, percent: float) -> None:
    """Mark all others as skipped, as cosmic-ray's own filters do."""
    with use_db(session, WorkDB.Mode.open) as db:
        waiting = sorted(item.job_id for item in db.pending_work_items)
        places = sorted(
            (m.operator_name, m.occurrence, item.job_id) for item in db.pending_work_items for m in item.mutations
        )  # the ids are new in each session, these are not
        kept = {job for _, _, job in random.Random(0).sample(places, round(len(places) * percent / 100))}
        for job in waiting:
            if job not in kept:
                db.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="not in the sample"))
    print(f"{len(kept)} of {len(waiting)} mutants are kept.")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

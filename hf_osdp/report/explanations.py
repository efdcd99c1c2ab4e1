"""Explanations and proofs of a plan (`explain.py`) as tables and lines for a terminal of 100 columns."""

from __future__ import annotations

from rich.table import Table

from ..quantities import format_bytes, format_seconds
from .content import Content
from .tables import Part, batch_text, make_table, named, plan_lines, plan_of

_UNIT_BYTES = ("parameters", "optimizer", "gradients", "activations", "kept", "while it runs")
_UNIT_TERMS = {
    "compute": "compute_s", "communication": "communication_s", "exposed": "exposed_s", "copies": "copy_s",
    "optimizer": "optimizer_s",
}  # fmt: skip
_BOTTLENECKS = {
    "memory": "memory. Without a limit the peak would be {peak}, at {gain:.2f}x the samples/s",
    "micro-batch": "the requested micro-batch size. {batch_size} would give {gain:.2f}x the samples/s",
    "batch": "the global batch. {batch_size} samples per step would give {gain:.2f}x the samples/s under the same"
    " limit",
    "nothing": "none. Neither more memory nor a larger batch would make {strategy} faster",
}
_NO_GAP = 1e-6
"""Gap up to which times count as equal: the search's steps of cost."""


def explanation_parts(content: Content) -> list[Part]:
    """Return the tables and lines of an explanation (`explain.py`); without hardware there are no seconds and no
    other layouts.
    """
    plan, estimated, hardware = plan_of(content), content["estimated"], content["hardware"]
    rows, step = estimated["units"], estimated["step_s"]
    where = "" if hardware is None else f" on {hardware['summary']}"
    asked = f"Plan {plan.fingerprint} ({plan.strategy}) for {plan.model_name or content['model']['class']}{where}"
    kinds = [[row["label"], *(format_bytes(row["bytes"][kind]) for kind in _UNIT_BYTES)] for row in rows]
    parts: list[Part] = [
        f"{asked}, {plan.sequence_length} tokens per sample: {batch_text(plan)}.",
        *plan_lines(content)[1:],
        f"Activations: {content['model']['trace']}.",
        "",
        _peak_table(content),
        _phases_table(content),
        make_table("Bytes on each device, by unit", kinds, text=["units"], figures=_UNIT_BYTES),
    ]
    if hardware is None:
        return [*parts, "The hardware is not known, so there are no seconds and no alternatives."]
    streams = [
        [one["name"], *(format_seconds(one[f"{kind}_s"]) for kind in ("total", "hidden", "exposed")),
         _share(one["exposed_s"], step)]
        for one in estimated["streams"]
    ]  # fmt: skip
    times = [[row["label"], *(format_seconds(row["seconds"][term]) for term in _UNIT_TERMS.values())] for row in rows]
    others = [[row["label"], row["layout"], _change(row["faster"]), _change(row["next_fitting"])] for row in rows]
    figures = ["total", "hidden", "exposed", "of the step"]
    parts += [
        make_table(f"Seconds of a step: {format_seconds(step)}", streams, text=[""], figures=figures),
        make_table("Seconds of a step, by unit", times, text=["units"], figures=list(_UNIT_TERMS)),
        make_table(
            "Cost of other layouts (the whole row changed, everything else unchanged)",
            others, text=["units", "layout", "faster layout", "next best that fits"],
        ),
    ]  # fmt: skip
    if (found := content["bottleneck"]) is not None:
        peak = format_bytes(found.get("peak_bytes") or 0)
        said = _BOTTLENECKS[found["kind"]].format(**found, peak=peak, strategy=plan.strategy)
        parts.append(f"Bottleneck: {said}.")
    return parts


def proof_lines(content: Content) -> list[str]:
    """Return what is proven of a plan (`explain.prove`), in some ten lines."""
    plan = plan_of(content)
    assert plan.memory_limit_bytes is not None
    margin = f", of which a margin of {format_bytes(content['margin_bytes'])} stays free" * (
        content["margin_bytes"] > 0
    )
    batches = [
        f"{one['micro_batch_size']} x {one['accumulation_steps']}: "
        + ("none fits" if one["bound_s"] is None else f"{format_seconds(one['bound_s'])} or more")
        for one in content["batches"]
    ]
    return [
        f"Limit: {format_bytes(plan.memory_limit_bytes)} per device{margin}.",
        f"Plan {plan.fingerprint}: {format_seconds(content['step_s'])} a step, peak"
        f" {format_bytes(content['peak_bytes'])}; {batch_text(plan)}.",
        *([f"Simpler than the fastest: {plan.simplified}."] if plan.simplified else []),
        *([] if plan.split.is_none else [f"Cut, as every plan that this is held against: {plan.split.describe()}."]),
        f"Bound: by the cost model no plan of {plan.strategy} takes less than {format_seconds(content['bound_s'])}.",
        f"Gap: {content['gap']:.2%}." if content["gap"] > _NO_GAP else "Gap: 0, none is faster.",
        f"By micro-batch x micro-steps: {'; '.join(batches)}.",
        *(
            f"Free in {one['phase']} of {one['unit']}: {format_bytes(one['free_bytes'])}."
            for one in content["binding"]
        ),
    ]


def _peak_table(content: Content) -> Table:
    """Return the bytes at the peak by kind, largest first, with their share of the limit or of the peak."""
    estimated, limit = content["estimated"], content["plan"]["memory_limit_bytes"]
    lines = named({**estimated["peak_breakdown"], **estimated["outside"]})
    total = sum(nbytes for _, nbytes in lines)
    lines.append(("peak", total))
    if limit:
        left = limit - total - estimated["margin_bytes"]
        lines += [("left under the limit", left), *named({"margin": estimated["margin_bytes"]})]
    rows = [(name, format_bytes(nbytes), _share(nbytes, limit or total)) for name, nbytes in lines]
    figures = ["bytes", "of the limit" if limit else "of the peak"]
    title = f"Bytes at the peak: {estimated['peak_phase']} of {estimated['peak_unit']}"
    return make_table(title, rows, text=[""], figures=figures)


def _phases_table(content: Content) -> Table:
    """Return the highest moment of each part of the job, with memory outside tensors."""
    estimated, limit = content["estimated"], content["plan"]["memory_limit_bytes"]
    outside = sum(estimated["outside"].values())
    whole = limit or estimated["peak_bytes"] + outside
    rows = [
        (phase["name"], phase["moment"], format_bytes(nbytes := phase["peak_bytes"] + outside), _share(nbytes, whole))
        for phase in estimated["phases"]
    ]
    figures = ["peak", "of the limit" if limit else "of the peak"]
    return make_table("Highest moment of each part of the job", rows, text=["", "in"], figures=figures)


def _change(other: Content | None) -> str:
    if other is None:
        return "none"
    added = f"{'+' if other['added_s'] >= 0 else ''}{format_seconds(other['added_s'])}"
    over = f", {format_bytes(other['over_bytes'])} over the limit" if other["over_bytes"] > 0 else ""
    return f"{other['layout']}: {added}, peak {format_bytes(other['peak_bytes'])}{over}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"

"""What operators count in a trace."""

import torch

from hf_osdp.tracing.work import PhaseRecord

aten = torch.ops.aten


def test_operators_that_run_kernels_count_more_than_views():
    record, matrix = PhaseRecord(), torch.ones(4, 4)
    record.count(aten.mm.default, (matrix, matrix), {}, matrix)
    assert record.operators == 1.75
    record.count(aten.t.default, (matrix,), {}, matrix)
    record.count(aten.empty_like.default, (matrix,), {}, matrix)
    assert record.operators == 1.75 + 2 * 0.75

"""What a compactor service counts."""

from __future__ import annotations

from llog.compactor.metrics import CompactorMetrics, compactor_samples
from llog.engines.object.compaction.claims import Claims
from llog.engines.object.compaction.compactor import CompactionResult
from llog.stores.counting import OperationCounts
from tests.unit.world import World


async def test_merges_are_counted_apart_from_runs(world: World) -> None:
    metrics = CompactorMetrics("c", 1, Claims(world.log), OperationCounts())
    run = CompactionResult(topic="t", partition=0, start_offset=1, end_offset=9, records=9, bytes_written=90)
    metrics.count_run("compacted", run)
    merged = CompactionResult(topic="t", partition=0, merges=2, merged_entries=17, merged_bytes=500)
    metrics.count_run("nothing", merged)
    found = {sample.family.name: sample.value for sample in compactor_samples(metrics)}
    assert found["llog_compactor_merges_total"] == 2
    assert found["llog_compactor_merged_entries_total"] == 17
    assert found["llog_compactor_merged_bytes_total"] == 500
    assert metrics.runs == {"compacted": 1, "nothing": 1}
    assert metrics.run_written_bytes.sum == 90

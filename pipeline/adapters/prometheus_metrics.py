"""The owners' counters in Prometheus' text format."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pipeline.service.owner.status import OwnerStatus, Phase

__all__ = ["render_metrics"]

_COUNTERS = {
    "transactions": "Committed transactions",
    "applied": "Input records applied",
    "fired": "Due tasks emitted",
    "refused": "Records set aside on dead-tasks",
    "purged": "Finished tasks forgotten",
    "acquisitions": "Times that the partition was acquired",
}
_GAUGES = {
    "position": "Applied position in task-events",
    "restored": "Position of the restore in task-state",
    "restore_end": "End of the restore in task-state",
    "lateness_ms_max": "Greatest lateness of an emission since the owner started, milliseconds",
    "clock_jumped_ms": "How far the clock jumped ahead, milliseconds; firing is paused while it is not 0",
    "fence_waiting_ms": "How long firing has been waiting for input to be applied, milliseconds: an open transaction?",
}


class _OwnerCollector:
    """Reads the statuses when Prometheus asks, so nothing is counted twice."""

    def __init__(self, statuses: Iterable[OwnerStatus]) -> None:
        self._statuses = list(statuses)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"duetasks_{name}", text, labels=["partition"])
            for status in self._statuses:
                counter.add_metric([str(status.partition)], getattr(status, name))
            yield counter
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"duetasks_{name}", text, labels=["partition"])
            for status in self._statuses:
                gauge.add_metric([str(status.partition)], getattr(status, name))
            yield gauge
        active = GaugeMetricFamily("duetasks_active", "1 if the partition is restored and fenced", labels=["partition"])
        for status in self._statuses:
            active.add_metric([str(status.partition)], float(status.phase is Phase.ACTIVE))
        yield active


def render_metrics(statuses: Iterable[OwnerStatus]) -> bytes:
    """The text that Prometheus scrapes from `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OwnerCollector(statuses))
    return generate_latest(registry)

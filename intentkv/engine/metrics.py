"""Prometheus counters of design section 4, in SGLang's own `/metrics`; they exist only with `--enable-metrics`."""

from __future__ import annotations

from typing import Any, Protocol

from intentkv.engine.state import RequestState


class Metrics(Protocol):
    """What the runtime tells; `NoMetrics` ignores it, so call sites never ask whether metrics are on."""

    def scored(self, seconds: float) -> None: ...

    def finished(self, state: RequestState) -> None: ...


class NoMetrics:
    def scored(self, seconds: float) -> None:
        pass

    def finished(self, state: RequestState) -> None:
        pass


class PrometheusMetrics:
    """Collectors in SGLang's multi-process registry, which must be configured before prometheus_client is imported."""

    def __init__(self, cache: Any) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._cache = cache
        self._evicted_before = 0
        self._events = Counter("intentkv_events_total", "Events that dropped tokens", ["scorer"])
        self._dropped = Counter("intentkv_dropped_tokens_total", "Tokens dropped")
        self._freed = Counter("intentkv_freed_slots_total", "Slots given back to the pool by events")
        self._reused = Counter("intentkv_reused_prefix_tokens_total", "Live prefix tokens reused by later turns")
        self._evicted = Counter("intentkv_namespaces_evicted_total", "Pruned sessions lost to cache eviction")
        self._live = Gauge(
            "intentkv_live_tokens",
            "Tokens that remembered sessions would still read",
            multiprocess_mode="livesum",
        )
        self._sessions = Gauge("intentkv_sessions", "Sessions with a record", multiprocess_mode="livesum")
        self._score = Histogram(
            "intentkv_score_seconds",
            "Time to score one history",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        )

    def scored(self, seconds: float) -> None:
        self._score.observe(seconds)

    def finished(self, state: RequestState) -> None:
        if state.events:
            self._events.labels(scorer=state.scorer).inc(state.events)
        self._dropped.inc(state.dropped)
        self._freed.inc(state.freed)
        self._reused.inc(state.reused_prefix_tokens)
        stats = self._cache.stats()
        self._live.set(stats["live_tokens"])
        self._sessions.set(stats["sessions"])
        self._evicted.inc(stats["namespaces_evicted"] - self._evicted_before)
        self._evicted_before = stats["namespaces_evicted"]


def create_metrics(cache: Any, enabled: bool) -> Metrics:
    return PrometheusMetrics(cache) if enabled else NoMetrics()

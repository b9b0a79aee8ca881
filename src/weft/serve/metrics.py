"""What `/metrics` says of an engine: one registry each, so that a process can have several."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weft.serve.scheduler import Scheduler

SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0,
    2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class Metrics:
    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = registry = CollectorRegistry()
        gauges = {
            "requests_running": ("Requests that have pages", lambda: len(scheduler.running)),
            "requests_waiting": ("Requests that wait for pages", lambda: len(scheduler.waiting)),
            "pages_free": ("Pages of the cache that nobody has", lambda: len(scheduler.free)),
            "pages_used": (
                "Pages of the cache that requests have",
                lambda: scheduler.num_pages - len(scheduler.free),
            ),
            "preemptions": (
                "How often a request gave its pages back to go on later",
                lambda: scheduler.num_preempted,
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"weft_{name}", text, registry=registry).set_function(read)
        self.prompt_tokens = Counter("weft_prompt_tokens", "Of requests", registry=registry)
        self.generated_tokens = Counter("weft_generated_tokens", "For requests", registry=registry)
        self.time_to_first_token = Histogram(
            "weft_time_to_first_token_seconds", "From a request's arrival", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.time_between_tokens = Histogram(
            "weft_time_between_tokens_seconds", "Of one request", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.ended = Counter(
            "weft_requests", "Requests that ended, by how: stop, length, abort, error", ["finish"],
            registry=registry,
        )  # fmt: skip

    def page(self) -> bytes:
        return generate_latest(self.registry)

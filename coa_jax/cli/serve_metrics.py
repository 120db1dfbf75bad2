"""A server's counts for Prometheus: GET /metrics of `coa serve`."""

from __future__ import annotations

from prometheus_client import (
  CollectorRegistry,
  Counter,
  Gauge,
  Histogram,
  generate_latest,
)

from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.streaming import InferenceServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServeMetrics:
  """One server's counts, in a separate registry."""

  def __init__(self, server: InferenceServer):
    """Each scrape reads the number of running and waiting questions in `server`."""
    self._registry = CollectorRegistry()
    registry = self._registry
    self._ended = Counter(
      "coa_attempts",
      "Finished attempts, by status; cancelled: the client disconnected.",
      ["status"],
      registry=registry,
    )
    self._refused = Counter(
      "coa_requests_refused",
      "Requests refused, by status.",
      ["code"],
      registry=registry,
    )
    self._tokens = Counter(
      "coa_tokens",
      "Tokens of finished attempts: of prompts, generated, returned by tools.",
      ["kind"],
      registry=registry,
    )
    self._first = Histogram(
      "coa_time_to_first_token_seconds",
      "From an attempt's request to its first text.",
      buckets=_SECONDS,
      registry=registry,
    )
    self._whole = Histogram(
      "coa_attempt_seconds",
      "From an attempt's request to its end, tool calls included.",
      buckets=_SECONDS,
      registry=registry,
    )
    for name, text, read in (
      ("coa_running", "Questions in a slot.", lambda: server.counts[0]),
      ("coa_waiting", "Questions waiting for a slot.", lambda: server.counts[1]),
      ("coa_up", "1 while the server accepts questions.", lambda: server.alive),
    ):
      Gauge(name, text, registry=registry).set_function(read)

  def first_text(self, seconds: float) -> None:
    """Counts an attempt's first text."""
    self._first.observe(seconds)

  def ended(self, trajectory: Trajectory | None, seconds: float) -> None:
    """Counts an attempt's end; a cancelled attempt has no trajectory."""
    if trajectory is None:
      self._ended.labels("cancelled").inc()
      return
    self._ended.labels(trajectory.status.value).inc()
    self._whole.observe(seconds)
    usage = trajectory.usage
    for kind in ("prompt", "generated", "observation"):
      self._tokens.labels(kind).inc(getattr(usage, kind))

  def refused(self, code: int) -> None:
    """Counts a request with an error."""
    self._refused.labels(str(code)).inc()

  def text(self) -> bytes:
    """Returns all metrics in Prometheus's text format."""
    return generate_latest(self._registry)

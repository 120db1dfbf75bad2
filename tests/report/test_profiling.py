"""Requested steps are traced, however they end, and the trace names their work."""

from __future__ import annotations

import functools
import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from coa_jax.report.profiling import traced
from coa_jax.report.tracking import LogConfig
from coa_jax.runtime.config import ConfigError, read_config


@functools.partial(jax.profiler.annotate_function, name="learn")
def learn() -> None:
  (jnp.ones((64, 64)) @ jnp.ones((64, 64))).block_until_ready()


def traces(workdir: pathlib.Path) -> list[dict]:
  """The events of each trace."""
  out = []
  for path in sorted(workdir.glob("profile/plugins/profile/*/*.trace.json.gz")):
    out.append(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
  return out


def run(steps, workdir, profile, ends_at: int = 100, offset: int = 0) -> list[int]:
  seen = []
  for step in traced(steps, profile, "rl", str(workdir), offset):
    seen.append(step)
    learn()
    if step == ends_at:
      break
  return seen


def steps_of(events: list[dict]) -> list[int]:
  numbers = {int(e["args"]["step_num"]) for e in events if e.get("name") == "rl"}
  return sorted(numbers)


# Case -> (steps, profile, other arguments of `run`, steps in the trace).
RUNS = {
  "asked for": (range(1, 7), (3, 5), {}, [3, 4]),
  "counted from zero, as metrics are not": (range(6), (3, 5), {"offset": 1}, [3, 4]),
  "ended before": (range(1, 7), (3, 50), {"ends_at": 4}, [3, 4]),
  "left of a resumed stage": (range(4, 9), (3, 6), {}, [4, 5]),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_steps_asked_for_are_traced_whatever_ends_them(name, tmp_path):
  steps, profile, how, expected = RUNS[name]
  seen = run(steps, tmp_path, profile, **how)
  assert seen == [step for step in steps if step <= how.get("ends_at", 100)]
  (events,) = traces(tmp_path)
  assert steps_of(events) == expected
  assert sum(e.get("name") == "learn" for e in events) == len(expected)


def test_nothing_is_traced_unasked(tmp_path):
  assert run(range(3), tmp_path, ()) == [0, 1, 2]
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("profile", [(3,), (5, 5), (0, 2), (2, 3, 4)])
def test_a_wrong_range_is_refused(profile):
  with pytest.raises(ConfigError, match=r"profile is .*\(first, end\)"):
    read_config(dict(profile=profile), LogConfig, "log")

"""The fault benchmark: its laws hold in small, and a broken one is told."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json

import pytest
from absl import flags
from absl.testing import flagsaver

from coa_jax.protocol.trajectory import CallStatus, Status
from coa_jax.tools.toolbox import Toolbox
from experiments.bench import faults as bench
from experiments.bench import faults_work as work

SMALL = dict(count=24, rounds=1, slots=24, workers=2)


@functools.cache
def figures() -> dict:
  """A pass without and one with faults; honest tools have time on a busy machine."""
  with pytest.MonkeyPatch.context() as patch:
    for name, seconds in (("TIMEOUT_S", 3.0), ("GRACE_S", 3.0), ("HANG_S", 10.0)):
      patch.setattr(work, name, seconds)
    return bench.run(**SMALL)


def test_one_call_in_five_is_replaced_and_every_fault_occurs():
  met = collections.Counter(
    work.fault(0, name, f"{name} {n}") for name in work.TOOLS for n in range(5000)
  )
  assert set(met) == {None, *work.FAULTS}
  assert met[None] == pytest.approx(8000, rel=0.02)
  assert [work.fault(0, "code", "x")] * 3 == [work.fault(0, "code", "x") for _ in "abc"]
  assert any(
    work.fault(1, "code", str(n)) != work.fault(0, "code", str(n)) for n in range(50)
  )


def test_only_programs_are_replaced_by_programs():
  met = {work.fault(0, "wiki_search", str(n)) for n in range(5000)}
  assert met == {None, "hang", "crash", "lie", "megabytes", "tags"}


def test_what_honest_tools_say(tmp_path):
  write = tmp_path / "pages.jsonl"
  work.write_pages(str(write))
  rows = {r["id"]: r["text"] for r in map(json.loads, write.read_text().splitlines())}
  assert len(rows) == 9**3
  assert work.truth("wiki_search", " page 123 ") == rows["123"]
  assert work.truth("code", "```py\nprint(12*34)\n```") == "408"
  assert work.truth("wiki_search", "page 103") is None
  assert work.truth("code", "```py\nprint(1)\n```") is None


@pytest.mark.slow
def test_the_laws_hold_in_small():
  out = figures()
  assert out["broken"] == []
  rows = {row["fault"]: row for row in out["table"]}
  assert all(row["right"] == row["calls"] > 0 for row in rows.values())
  assert len(rows) >= 4 and rows["none"]["calls"] > 20
  assert sum(out["status"].values()) == out["trajectories"] == 24
  assert out["status"]["ended"] >= 12
  assert 0 < out["without a fault"] < 24
  assert all(ratio > 0 for ratio in out["ratios"].values())


def run_broken(monkeypatch, cls, name: str, value) -> list[str]:
  figures()  # the policy is trained, the programs compiled
  monkeypatch.setattr(cls, name, value)
  monkeypatch.setattr(bench, "_SETTLE_S", 1.0)
  return bench.run(**SMALL)["broken"]


@pytest.mark.slow
def test_without_deadlines_it_fails(monkeypatch):
  broken = run_broken(monkeypatch, Toolbox, "_watch", lambda self: None)
  assert any("a call with fault hang is" in words for words in broken)


@pytest.mark.slow
def test_what_is_left_behind_makes_it_fail(monkeypatch):
  kept = []
  close = Toolbox.close
  monkeypatch.setattr(Toolbox, "__exit__", lambda self, *_: kept.append(self))
  monkeypatch.setattr(bench, "_SETTLE_S", 1.0)
  broken = bench.run(**SMALL)["broken"]
  for toolbox in kept:
    close(toolbox)
  for what in ("threads", "child processes", "file descriptors", "sandbox folders"):
    assert any(f": {what}: " in words for words in broken), what


def test_a_wrong_status_and_a_changed_token_are_told():
  """The checks on trajectories, on what a good run played and then somebody changed."""
  out = bench.Played({}, {})
  t = _one_trajectory()
  clean = bench.Played({0: t}, {0: 1.0})
  seed = next(s for s in range(99) if not any(bench.faults_of(t, s)))
  assert bench.check(clean, clean, seed) == []
  wrong = {
    "ended as infrastructure": dataclasses.replace(t, status=Status.INFRASTRUCTURE),
    "with reward None": dataclasses.replace(t, reward=None),
    "a call with fault None is": dataclasses.replace(
      t, calls=[dataclasses.replace(t.calls[0], result="41"), *t.calls[1:]]
    ),
    "is not what it is where": dataclasses.replace(t, segments=t.segments[:-1]),
    "what was read is not": dataclasses.replace(
      t, segments=[s for s in t.segments if s.role != "observation"]
    ),
  }
  for words, changed in wrong.items():
    out.trajectories[0] = changed
    assert any(words in b for b in bench.check(clean, out, seed)), words


def _one_trajectory():
  calls = [("wiki_search", "page 123"), ("code", "```py\nprint(2*3)\n```")]
  rows = [("", "q"), ("wiki_search", "<wiki_search> page 123</wiki_search>")]
  segments = [work.Segment(work.Author.PROMPT, *rows[0], ids=[1])]
  segments.append(work.Segment(work.Author.POLICY, *rows[1], ids=[2], logps=[-1.0]))
  tokenizer = work.make_policy().tokenizer
  out = work.Trajectory("t0", segments, status=Status.ENDED, reward=1.0)
  for name, arguments in calls:
    said = work.truth(name, arguments)
    out.calls.append(bench.ToolCall(name, arguments, said, CallStatus.OK))
    segments.append(tokenizer.encode_observation(said))
  segments.append(work.Segment(work.Author.POLICY, "", "<answer> done</answer>", [3]))
  return out


@pytest.mark.parametrize(("broken", "status"), [([], None), (["a law"], 1)])
@flagsaver.flagsaver
def test_a_broken_law_is_the_exit_status(monkeypatch, tmp_path, capsys, broken, status):
  out = tmp_path / "figures.json"
  measured = {**figures(), "broken": broken}
  monkeypatch.setattr(bench, "run", lambda *_: measured)
  flags.FLAGS(["bench.faults", "--quick", f"--out={out}"])
  if status is None:
    bench.main()
  else:
    with pytest.raises(SystemExit) as end:
      bench.main()
    assert end.value.code == status
  printed = capsys.readouterr().out
  assert f"laws broken: {len(broken)}" in printed and "hang" in printed
  assert json.loads(out.read_text())["broken"] == broken

"""A thousand trajectories whose tools hang, crash, lie, flood, forge tags and die.

  python -m experiments.bench.faults [--quick] [--out=FILE.json] [--rounds=3]

A policy that really calls tools (`faults_work`) plays through the real scheduler
with a real toolbox and real sandbox processes, by turns without faults and with one
call in five replaced, chosen by a hash of the call. The laws; where one is broken, it
is printed and the exit status is 1:

* every call is found to be what its fault is (model's, tool's, infrastructure's), and
  an honest call has its honest result;
* every trajectory ends once, with the status that its calls and its text give;
* a trajectory without a fault is the same, bit for bit, as where nothing is faulty, and
  one with a fault is the same up to there;
* an observation is one segment of the tool's, within its tokens, that says what is on
  record, whatever tools print;
* trajectories without a fault end at 0.9 or more of their rate where nothing is faulty
  (medians of the rounds; not judged with --quick, which is too short). A hung call
  keeps its trajectory's slot until its deadline, so the share of slots that are lost is
  about hangs a trajectory x deadline / a trajectory's seconds: with a deadline of 2.5 s
  the slots are as many as make a trajectory last for some seconds too;
* afterwards all of the sandbox's places answer, and threads, child processes, file
  descriptors and sandbox folders are as many as before.

Expect (two cores that others used too, 3 rounds, 4 minutes): no law broken, the right
status for every one of 1,954 calls, 935 trajectories ended and 65 `infrastructure`, the
others at 0.92 of their rate.

budget: the laws, each beside what it is checked on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import rich

from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.trajectory import Author, CallStatus, Status, ToolCall, Trajectory
from coa_jax.report.metrics import write_json
from coa_jax.report.tables import Table, rich_table
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tools.toolbox import ToolsConfig
from experiments.bench import faults_work as work
from experiments.bench import program as bench
from experiments.launch import run_program

LEAST_RATE = 0.9  # of the trajectories without a fault, over that without any faults
_HUNG = 256
_SETTLE_S = 30.0  # for what was hung or killed to be gone
_COLUMNS = {
  "fault": "fault of a call",
  "calls": "calls",
  "right": "right status",
  "ended": "ended",
  "infrastructure": "infrastructure",
  "others": "other ends",
}


@dataclasses.dataclass
class Pass:
  """One pass: trajectories by number, and when each ended (seconds)."""

  trajectories: dict[int, Trajectory]
  ended: dict[int, float]


def play(
  worker: RolloutWorker,
  policy: work.Policy,
  tools: ToolsConfig,
  count: int,
  seed: int | None,
  name: str,
) -> tuple[Pass, list[str]]:
  """Plays `count` trajectories; `seed` chooses the faults, None for none.

  Returns:
    What was played, and the laws that it broke by what it left behind.
  """
  before = resources()
  out = Pass({}, {})
  broken: list[str] = []
  with work.FaultyToolbox(tools, seed) as toolbox:
    # --- Play.
    toolbox.warm()
    began = time.monotonic()
    reported = began
    for n, t in worker.generate(policy.params, work.tasks(count), toolbox, 1, 1.0, 0):
      if n in out.trajectories:
        broken.append(f"{name}: trajectory {n} ended twice")
      out.trajectories[n] = t
      out.ended[n] = time.monotonic() - began
      if time.monotonic() - reported > 10:
        reported = time.monotonic()
        print(f"{name}: {len(out.ended)} of {count} ended", file=sys.stderr)
    print(f"{name}: {count} in {max(out.ended.values()):.1f} s", file=sys.stderr)
    if len(out.ended) != count:
      broken.append(f"{name}: {len(out.ended)} of {count} trajectories ended")

    # --- What it left behind: calls that hang, slots that do not answer, resources.
    _settle(lambda: toolbox.hung == 0)
    if toolbox.hung:
      broken.append(f"{name}: {toolbox.hung} hung calls have not returned")
    toolbox.seed = None
    futures = [toolbox.submit("code", _nap(n)) for n in range(tools.workers)]
    answers = [f.result().result for f in futures]
    if answers != [str(n) for n in range(tools.workers)]:
      broken.append(f"{name}: the sandbox's places do not answer: {answers}")
  _settle(lambda: resources() == before)
  for resource, count_now in resources().items():
    if count_now > before[resource]:
      broken.append(f"{name}: {resource}: {before[resource]} before, {count_now} after")
  return out, broken


def resources() -> dict[str, int]:
  """What this process holds that could leak."""
  children = 0
  for path in glob.glob("/proc/[0-9]*/stat"):
    try:
      with open(path, encoding="utf-8", errors="replace") as f:
        parent = f.read().rpartition(")")[2].split()[1]
    except OSError:  # it has ended
      continue
    children += int(parent) == os.getpid()
  folders = glob.glob(os.path.join(tempfile.gettempdir(), "tools-sandbox-*"))
  return {
    "threads": threading.active_count(),
    "child processes": children,
    "file descriptors": len(os.listdir("/proc/self/fd")),
    "sandbox folders": len(folders),
  }


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
  """Apart from those of other programs, so that what is left there is ours."""
  before = tempfile.tempdir
  tempfile.tempdir = folder
  try:
    yield
  finally:
    tempfile.tempdir = before


def _settle(condition: Any) -> None:
  deadline = time.monotonic() + _SETTLE_S
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.05)


def _nap(n: int) -> str:
  return tool_bodies.render_code(f"import time\ntime.sleep(0.2)\nprint({n})")


def faults_of(t: Trajectory, seed: int) -> list[str | None]:
  """The fault of every call of a trajectory, in order."""
  out = []
  for call in t.calls:
    kind = None  # a call that no tool reads reaches no fault
    if work.well_formed(call.name, call.arguments):
      kind = work.fault(seed, call.name, call.arguments)
    out.append(kind)
  return out


def call_is_right(call: ToolCall, kind: str | None) -> bool:
  """Whether a call ended as its fault (or none) asks."""
  if not work.well_formed(call.name, call.arguments):
    return call.status == CallStatus.MODEL
  if kind is None:
    honest = work.truth(call.name, call.arguments)
    if honest is None:  # not of the script: any honest result
      return call.status in (CallStatus.OK, CallStatus.MODEL)
    return (call.status, call.result) == (CallStatus.OK, honest)
  words = {"hang": "no answer", "endless": "stopped after", "exit": "so far"}
  words |= {"megabytes": "characters cut", "lie": "41", "tags": work.HOSTILE}
  return call.status == work.FAULTS[kind] and words.get(kind, "error") in call.result


def right_end(t: Trajectory) -> Status:
  """The status that follows from a trajectory's calls and text."""
  if any(c.status == CallStatus.INFRASTRUCTURE for c in t.calls):
    return Status.INFRASTRUCTURE
  return Status.ENDED if t.text.endswith("</answer>") else Status.TRUNCATED


def check(clean: Pass, faulty: Pass, seed: int) -> list[str]:
  """The laws on trajectories that are broken, in words."""
  broken = []
  for n, t in faulty.trajectories.items():
    # --- Every call is found to be what its fault is.
    kinds = faults_of(t, seed)
    for call, kind in zip(t.calls, kinds, strict=True):
      if not call_is_right(call, kind):
        broken.append(f"{n}: a call with fault {kind} is {call}"[:400])

    # --- The trajectory ends as its calls and its text say.
    if t.status != right_end(t):
      broken.append(f"{n}: ended as {t.status.value}, not {right_end(t).value}")
    if (t.reward is None) != (t.status == Status.INFRASTRUCTURE):
      broken.append(f"{n}: {t.status.value} with reward {t.reward}")

    # --- What was read is what tools said, within its tokens.
    read = [s for s in t.segments if s.author == Author.TOOL]
    results = [c.result for c in t.calls if c.status != CallStatus.INFRASTRUCTURE]
    texts = [roles.wrap(roles.OBSERVATION, roles.escape(r)) for r in results]
    if [s.text for s in read] != texts[: len(read)] or len(results) - len(read) > 1:
      broken.append(f"{n}: what was read is not what tools said")
    for s in read:
      if len(s.ids) > work.OBSERVATION_TOKENS:
        broken.append(f"{n}: an observation of {len(s.ids)} tokens")

    # --- Up to its first fault it is as if there were none.
    until = None
    if any(kinds):
      until = [bool(kind) for kind in kinds].index(True)
    if _turns(t, until) != _turns(clean.trajectories[n], until):
      broken.append(f"{n}: is not what it is where nothing is faulty")
  return broken


def _turns(t: Trajectory, until: int | None) -> list[Any]:
  """Ids and log-probs up to the observation of call number `until`; all for None."""
  out: list[Any] = []
  for s in t.segments:
    if s.author == Author.TOOL:
      if until == 0:
        break
      until = None if until is None else until - 1
    out.append((s.author, s.ids, s.logps))
  return out


def rate(played: Pass, chosen: Sequence[int]) -> float:
  """Trajectories per second, of the chosen ones, until the last of them has ended."""
  return len(chosen) / max(played.ended[n] for n in chosen)


def life(played: Pass, chosen: Sequence[int]) -> float:
  """Median seconds of the chosen trajectories, from their start to their end."""
  return statistics.median(played.trajectories[n].usage.seconds for n in chosen)


def table(played: Pass, seed: int) -> list[dict[str, Any]]:
  """A row for every fault: its calls, and how their trajectories ended."""
  rows = {}
  for t in played.trajectories.values():
    kinds = faults_of(t, seed)
    for call, kind in zip(t.calls, kinds, strict=True):
      row = rows.setdefault(kind or "none", collections.Counter())
      row["calls"] += 1
      row["right"] += call_is_right(call, kind)
      status = t.status.value
      row[status if status in ("ended", "infrastructure") else "others"] += 1
  out = []
  for kind in (*work.FAULTS, "none"):
    if kind in rows:
      row = {"fault": kind}
      for name in list(_COLUMNS)[1:]:
        row[name] = rows[kind][name]
      out.append(row)
  return out


def _with_over_without(pairs: Sequence[tuple[float, float]]) -> float:
  without, with_faults = zip(*pairs, strict=True)
  return statistics.median(with_faults) / statistics.median(without)


def run(count: int, rounds: int, slots: int, workers: int) -> dict[str, Any]:
  """The table, the ratios and the broken laws.

  Args:
    count: trajectories of a pass.
    rounds: passes without and with faults.
    slots: of the scheduler.
    workers: programs that run at once.

  With fewer trajectories than slots no rate is judged. budget: one table of figures.
  """
  # --- The policy, and the tools that it calls.
  seed = 0
  # Of every round, without and with faults: trajectories a second, and their seconds.
  rates: list[tuple[float, float]] = []
  lives: list[tuple[float, float]] = []
  broken: list[str] = []
  policy = work.make_policy()
  print("the policy is trained", file=sys.stderr)
  rollout = RolloutConfig(
    style="brief",
    slots=slots,
    window=8,
    max_len=work.MAX_LEN,
    observation_tokens=work.OBSERVATION_TOKENS,
    inject_rows=4,
  )
  worker = make_worker(policy.cfg, policy.tokenizer, rollout, work.TOOLS)
  with tempfile.TemporaryDirectory() as folder, _temporary_files_in(folder):
    corpus = os.path.join(folder, "pages.jsonl")
    work.write_pages(corpus)
    tools = ToolsConfig(
      sandbox="subprocess",  # out of a jail no program could kill its keeper
      corpus=corpus,
      top_k=1,
      timeout_s=work.TIMEOUT_S,
      grace_s=work.GRACE_S,
      workers=workers,
      max_hung=_HUNG,
    )
    # --- Passes without and with faults, after one that compiles and starts what
    # threads JAX wants to keep.
    play(worker, policy, tools, min(count, slots), None, "warm-up")
    for r in range(1, rounds + 1):
      clean, left = play(worker, policy, tools, count, None, f"round {r}, no faults")
      faulty, more = play(worker, policy, tools, count, seed, f"round {r}, faults")
      broken += [*left, *more, *check(clean, faulty, seed)]
      others = []
      for n, t in faulty.trajectories.items():
        if not any(faults_of(t, seed)):
          others.append(n)
      rates.append((rate(clean, others), rate(faulty, others)))
      lives.append((life(clean, others), life(faulty, others)))
  # --- The figures.
  ratio = _with_over_without(rates)
  longer = _with_over_without(lives)
  if count > slots and ratio < LEAST_RATE:
    broken.append(f"trajectories without a fault end at {ratio:.2f} of their rate")
  return {
    "table": table(faulty, seed),
    "ratios": {
      "rate of trajectories without a fault, with faults / without": ratio,
      "their median seconds, with faults / without": longer,
    },
    "rates": rates,
    "lives": lives,
    "status": collections.Counter(t.status.value for t in faulty.trajectories.values()),
    "trajectories": count,
    "without a fault": len(others),
    "broken": broken,
  }


def main() -> None:
  """Prints the table; ends with exit status 1 if a law is broken."""
  quick = bench.QUICK.value
  if quick:
    figures = run(count=60, rounds=1, slots=64, workers=4)
  else:
    figures = run(count=1000, rounds=bench.ROUNDS.value, slots=256, workers=16)
  note = "Calls, and how the trajectories that made them ended; the last round."
  rich.print(rich_table(Table("Faults", figures["table"], _COLUMNS, note)))
  print(f"{figures['trajectories']} trajectories: {dict(figures['status'])}")
  for n, (clean, faulty) in enumerate(figures["rates"], 1):
    print(f"round {n}: {clean:.1f} without and {faulty:.1f} with faults, per second")
  for name, ratio in figures["ratios"].items():
    print(f"{name}: {ratio:.2f}")
  if bench.OUT.value:
    write_json(bench.OUT.value, figures)
  for words in figures["broken"][:20]:
    print(f"broken: {words}")
  print(f"laws broken: {len(figures['broken'])}")
  if figures["broken"]:
    sys.exit(1)


if __name__ == "__main__":
  # Hundreds of injected tracebacks would hide what matters.
  logging.getLogger("coa_jax.tools.toolbox").setLevel(logging.CRITICAL)
  run_program(main)

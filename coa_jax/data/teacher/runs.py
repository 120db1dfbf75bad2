"""A team's record for one task: events and their costs, as JSON in a file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from coa_jax.protocol.jsonlog import JsonLog, Place
from coa_jax.protocol.trajectory import Status, ToolCall, Usage, write_jsonl
from coa_jax.runtime.json_io import to_dataclass

# Agents.
ORCHESTRATOR = "orchestrator"
PLANNER = "planner"
SEARCH = "search"
CODE = "code"
REFLECTOR = "reflector"
SOLVER = "solver"
VERIFIER = "verifier"
SELECTOR = "selector"  # outside a team: it compares several runs

# Event kinds.
DECISION = "decision"
PLAN = "plan"
CALL = "call"
OBSERVATION = "observation"
REFLECTION = "reflection"
CANDIDATE = "candidate"
VERDICT = "verdict"
FINAL = "final"
MALFORMED = "malformed"
GAVE_UP = "gave_up"
FACTS = "facts"


@dataclasses.dataclass
class Event:
  """One event in a run.

  Attributes:
    agent: the agent; for an observation, the tool's name.
    kind: one of the kinds above.
    content: the decision's reason, facts, plan, tool arguments, tool result, review,
      candidate, rationale or final answer; for a malformed reply, its text.
    detail: a decision's next agent, a call's or an observation's tool, a verdict's
      score, a malformed reply's fault, or the reason for giving up (with details in the
      content); else "".
    prompt: prompt tokens; 0 without a model call.
    cached: prompt tokens available from a prefix cache.
    generated: the reply's tokens.
    seconds: the model's time.
    retries: HTTP attempts beyond the first.
    reported: the endpoint's own (prompt, cached, completion) count; () without one.
  """

  agent: str
  kind: str
  content: str
  detail: str = ""
  prompt: int = 0
  cached: int = 0
  generated: int = 0
  seconds: float = 0.0
  retries: int = 0
  reported: tuple[int, ...] = ()


@dataclasses.dataclass
class Run:
  """A team's run on one task.

  Attributes:
    task_id: the task.
    events: all events in order; calls made together are side by side, and their
      observations follow in the same order.
    calls: every tool call, in order.
    prediction: the answer; None if the run ended without one.
    status: how the run ended: ended, turn_limit (also if given up) or infrastructure.
    usage: the sum over events.
    sample: the run's number for this task (0-based).
    error: the cause of an infrastructure failure.
    reward: the answer's reward, 0 to 1; None if not judged.
    graded: the grader's other values, as `Graded.record`.
  """

  task_id: str
  events: list[Event] = dataclasses.field(default_factory=list)
  calls: list[ToolCall] = dataclasses.field(default_factory=list)
  prediction: str | None = None
  status: Status = Status.UNGRADED
  usage: Usage = dataclasses.field(default_factory=Usage)
  sample: int = 0
  error: str = ""
  reward: float | None = None
  graded: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def reported(self) -> tuple[int, ...]:
    """The endpoint's (prompt, cached, completion) counts; () if any call lacks them."""
    counts = [e.reported for e in self.events if e.prompt]
    if not all(counts):  # a partial sum would look like the whole
      return ()
    return tuple(map(sum, zip(*counts, strict=True)))

  def to_json(self) -> dict[str, Any]:
    """Returns a JSON-serialisable dict, which `from_json` reads back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, row: dict[str, Any], where: str = "run") -> Run:
    """Builds a run from `to_json`'s dict.

    Raises:
      ValueError: a field is missing, unknown or of another type; the message starts
        with `where` and names the field and its value.
    """
    return to_dataclass(row, cls, where, ("events", "calls", "usage", "status"))


def render(event: Event) -> str:
  """Formats an event for the other agents: a header line, then the content.

  A content line starting with "[" is indented, so that it cannot look like a header.
  """
  words = filter(None, (event.kind, event.detail))
  content = re.sub(r"^\[", " [", event.content, flags=re.MULTILINE)
  return f"[{' '.join(words)}]\n{content}"


class RunFile:
  """A run file: append runs, read them by task and sample, sort at the end."""

  def __init__(self, path: str):
    """Indexes the existing runs; a line cut short by a kill is removed.

    Raises:
      ValueError: a line is not a run; the message names file and line.
    """
    self.path = path
    self._open()

  def _open(self) -> None:
    self._at: dict[tuple[str, int], Place] = {}

    def replay(row: Any, where: str, place: Place) -> None:
      done = Run.from_json(row, where)
      self._at[done.task_id, done.sample] = place

    self._log = JsonLog(self.path, replay)

  def __contains__(self, key: tuple[str, int]) -> bool:
    return key in self._at

  def append(self, done: Run) -> None:
    """Adds a run; it is on disk when this returns."""
    self._at[done.task_id, done.sample] = self._log.append(done.to_json())

  def read(self, task_id: str, sample: int) -> Run | None:
    """Reads the task's run with this sample number; None if missing."""
    place = self._at.get((task_id, sample))
    if place is None:
      return None
    return Run.from_json(self._log.read(place), self.path)

  def sort(self, order: Sequence[tuple[str, int]]) -> None:
    """Rewrites the file in this order."""
    lines = [self._at[key] for key in order if key in self._at]
    write_jsonl(self.path, map(self._log.read, lines))
    self._open()  # every line has moved

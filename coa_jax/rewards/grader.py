"""Trajectory rewards: the answer graders, and the shaping terms.

A task's source, or otherwise its kind, selects the grader: `qa`, `gaia`, `math`,
`math_verify`, `code` (hidden tests), `judge` (a language model), or a user's function.
All but `qa` grade in separate threads: a slow verdict does not delay decoding.

budget: the config, the choice of a grader and the use of its verdict are one path.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import difflib
import functools
import logging
import numbers
import os
import threading
from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Status, Trajectory
from coa_jax.rewards import gaia, math, qa, shaping, written_answer
from coa_jax.rewards.code.grader import CodeConfig, CodeGrader
from coa_jax.rewards.code.tests import read_tests
from coa_jax.rewards.graded import Graded, Ungradable
from coa_jax.rewards.judge import Judge, JudgeConfig
from coa_jax.rewards.shaping import ShapingConfig
from coa_jax.runtime.fields import bounded, check_fields, choice, import_named

GRADERS = ("qa", "gaia", "math", "math_verify", "code", "judge")
# Training rules for a `|`-joined answer: which parts must be right, or their F1.
MATCHES: dict[str, Callable[[str, Sequence[str]], float]] = {
  "every": qa.every_part,
  "first": qa.first_part,
  "f1": qa.every_part_f1,
}
_MAX_FAILURES = 256  # ungradable trajectories in a row that stop a run
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """Config section `reward`.

  Attributes:
    graders: a task's source or kind -> qa, gaia (the benchmark's quasi-exact match),
      math, math_verify (the library's own verdicts), code, judge, or
      "package.module:function", called with (task, answer or None, trajectory); it
      returns a number from 0 to 1, or a dict of numbers with "answer" among them (the
      others are recorded as `part_NAME`), and may raise `graded.Ungradable`. A source
      takes precedence over a kind; by default each kind has the grader of its name.
    match: the qa rule in training: every (each part of a `|`-joined answer must be
      right), first (the first part), or f1 (the mean of the parts' token F1). In
      evaluation the first part counts, and its F1 is recorded.
    shaping: reward terms besides the answer.
    code: limits for hidden tests.
    judge: the judge's endpoint.
    workers: trajectories graded at once.
  """

  graders: dict[str, str] = dataclasses.field(default_factory=dict)
  match: str = choice("every", of=tuple(MATCHES))
  shaping: ShapingConfig = dataclasses.field(default_factory=ShapingConfig)
  code: CodeConfig = dataclasses.field(default_factory=CodeConfig)
  judge: JudgeConfig | None = None
  workers: int = bounded(8, least=1)

  def __post_init__(self):
    check_fields(self)
    for key, grader in self.graders.items():
      if grader not in GRADERS and ":" not in grader:
        raise ValueError(
          f"graders[{key!r}] is {grader!r}; accepted: {', '.join(GRADERS)}, or "
          "'package.module:function'"
        )
    # An unused endpoint is an error, like a missing one.
    judged = sorted(key for key, grader in self.graders.items() if grader == "judge")
    if judged and self.judge is None:
      raise ValueError(f"graders: {judged[0]!r} needs reward.judge, an endpoint")
    if self.judge is not None and not judged:
      raise ValueError(
        "judge: no entry of graders asks it, e.g. graders={'qa': 'judge'}"
      )

  def kept_in(self, folder: str) -> RewardConfig:
    """Returns a copy that stores the judge's verdicts in this folder by default.

    So a resumed run asks for no verdict again, and no verdict can change.
    """
    if self.judge is None or self.judge.cache is not None:
      return self
    cache = os.path.join(folder, VERDICTS)
    judge = dataclasses.replace(self.judge, cache=cache)
    return dataclasses.replace(self, judge=judge)


VERDICTS = "verdicts.jsonl"  # the judge's, in a workdir
_Grade = Callable[[Task, str | None, Trajectory], Graded]
OwnReward = Callable[[], float | Graded | None]


class Grader:
  """Grades trajectories; thread-safe. Use `with`, or call `close`."""

  def __init__(
    self, config: RewardConfig | None = None, other_dirs: Sequence[str] = ()
  ):
    """Opens no grader yet: `check` does, or a grader's first task.

    `other_dirs` hold the verdicts of the run's other processes, used here too.
    """
    self.config = config or RewardConfig()
    self._other_verdicts = [os.path.join(folder, VERDICTS) for folder in other_dirs]
    self._lock = threading.Lock()
    self._open: dict[str, _Grade] = {}
    self._closing: list[CodeGrader | Judge] = []
    self._failures = 0  # in a row
    self._pool = concurrent.futures.ThreadPoolExecutor(
      self.config.workers, thread_name_prefix="grade"
    )

  def __enter__(self) -> Grader:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the graders; ungraded trajectories stay ungraded."""
    self._pool.shutdown(wait=False, cancel_futures=True)
    with self._lock:
      closing = self._closing
      self._closing = []
    # Threads waiting for a service fail when it closes, and can be joined only then.
    for service in closing:
      service.close()
    self._pool.shutdown()

  def grader_of(self, task: Task) -> str:
    """Returns the name of a task's grader."""
    graders = self.config.graders
    return graders.get(task.source) or graders.get(task.kind.value) or task.kind.value

  def is_exact(self, task: Task) -> bool:
    """Whether a task's answers are compared by exact match."""
    return self.grader_of(task) == "qa" and self.config.match != "f1"

  def check(self, tasks: Sequence[Task], max_len: int) -> None:
    """Refuses tasks without a usable grader, and graders that cannot be opened.

    `tasks` come from all data sets; `max_len` is the maximum tokens per trajectory.

    Raises:
      ValueError: the message names the task or the config field.
    """
    # --- A penalty for longer trajectories than the run allows.
    overlong = self.config.shaping.overlong
    if overlong is not None and overlong.limit > max_len:
      raise ValueError(
        f"reward.shaping.overlong.limit={overlong.limit} is above rollout.max_len="
        f"{max_len}: no trajectory gets that long"
      )
    # --- A key that matches no task.
    kinds = sorted({t.kind.value for t in tasks})
    sources = sorted({t.source for t in tasks} - {""})
    unread = [key for key in self.config.graders if key not in (*kinds, *sources)]
    for key in unread:
      message = (
        f"reward.graders: {key!r} is neither a kind ({', '.join(kinds)}) nor a source "
        f"of these tasks ({', '.join(sources) or 'they have none'})"
      )
      # A misspelt key would leave its tasks to another grader.
      others = {*kinds, *sources} - set(self.config.graders)
      meant = difflib.get_close_matches(key.lower(), sorted(others), n=1, cutoff=0.8)
      if meant and key not in list(Kind):
        raise ValueError(f"{message}; did you mean {meant[0]!r}?")
      _log.warning("%s: its grader judges none of them", message)
    # --- A task and a grader that do not fit.
    for task in tasks:
      name = self.grader_of(task)
      if name == "code":
        read_tests(task)  # refuses tests in an unknown form
      elif task.kind == Kind.CODE and name in ("qa", "gaia", "math", "math_verify"):
        raise ValueError(
          f"task {task.id!r}: code tasks need hidden tests; grader {name!r} would "
          "compare their text"
        )
      # A grader that cannot be opened (a jail, an import) should fail before any
      # rollout.
      if name != "qa":
        self._opened(name)

  def submit(
    self,
    task: Task,
    trajectory: Trajectory,
    variant: Variant,
    evaluation: bool = False,
    own: OwnReward | None = None,
  ) -> concurrent.futures.Future[None]:
    """As `grade`, in the background; verdicts from text alone are computed at once."""
    if self.grader_of(task) != "qa" or own is not None:
      return self._pool.submit(self.grade, task, trajectory, variant, evaluation, own)
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    self.grade(task, trajectory, variant, evaluation)
    done.set_result(None)
    return done

  def grade(
    self,
    task: Task,
    trajectory: Trajectory,
    variant: Variant,
    evaluation: bool = False,
    own: OwnReward | None = None,
  ) -> None:
    """Gives a finished trajectory its reward, reward parts, and a record in `meta`.

    `evaluation` grades QA by the first part, and records token F1. `own` is the verdict
    of the trajectory's environment or agent; unless it gives None, it counts.

    Raises:
      ValueError: a user's grader fails or returns nonsense, or _MAX_FAILURES
        trajectories in a row could not be graded.
    """
    # --- Nothing to grade: a user's question, or an infrastructure failure.
    if not task.answers or trajectory.status == Status.INFRASTRUCTURE:
      return
    # --- The verdict on the answer alone.
    try:
      value = None if own is None else _own_reward(own)
      if value is None:
        answer = written_answer(trajectory.text)
        graded = self.answer(task, answer, trajectory, evaluation)
      else:
        graded = value if isinstance(value, Graded) else Graded(value)
    except Ungradable as e:
      # No verdict is not a wrong answer: the trajectory leaves its group, unrewarded.
      trajectory.status = Status.INFRASTRUCTURE
      trajectory.meta["ungraded"] = str(e)
      _log.warning("%s", e)
      self._count_failure(str(e))
      return
    self._failures = 0
    # --- Add format and penalties, and record everything.
    reward, parts = shaping.shape(
      self.config.shaping, graded.answer, trajectory, variant
    )
    trajectory.reward = reward
    trajectory.reward_parts = {**parts, **graded.parts}
    if graded.record:
      trajectory.meta["graded"] = graded.record

  def answer(
    self,
    task: Task,
    answer: str | None,
    trajectory: Trajectory,
    evaluation: bool = False,
  ) -> Graded:
    """Grades an answer alone, without shaping; None means no answer.

    Raises:
      Ungradable: the answer cannot be graded.
      ValueError: a user's grader fails or returns nonsense.
    """
    name = self.grader_of(task)
    if name == "qa":
      return self._qa(task, answer, evaluation)
    return self._opened(name)(task, answer, trajectory)

  def _count_failure(self, why: str) -> None:
    self._failures += 1
    if self._failures >= _MAX_FAILURES:
      raise ValueError(
        f"{self._failures} trajectories in a row could not be graded; the last: {why}. "
        "Mend it and start again on the same workdir"
      )

  def _opened(self, name: str) -> _Grade:
    # Opened under the lock: two threads with the first tasks share one sandbox.
    with self._lock:
      if name not in self._open:
        self._open[name] = self._make(name)
      return self._open[name]

  def _make(self, name: str) -> _Grade:
    if name == "gaia":
      return _gaia
    if name == "math":
      return functools.partial(_math, math.equivalent)
    if name == "math_verify":
      return functools.partial(_math, math.math_verify_says)
    if name == "code":
      service: CodeGrader | Judge = CodeGrader(self.config.code)
    elif name == "judge":
      assert self.config.judge is not None  # checked by RewardConfig
      service = Judge(self.config.judge, self._other_verdicts)
    else:
      return _Custom(name)
    self._closing.append(service)
    return lambda task, answer, _: service.grade(task, answer)

  def _qa(self, task: Task, answer: str | None, evaluation: bool) -> Graded:
    answer = answer or ""
    if not evaluation:
      match = MATCHES[self.config.match]
      return Graded(float(match(answer, task.answers)))
    # Token F1 is reported as well: how near the answer comes.
    f1 = qa.first_part_f1(answer, task.answers)
    return Graded(float(qa.first_part(answer, task.answers)), parts={"f1": f1})


def _gaia(task: Task, answer: str | None, _: Trajectory) -> Graded:
  return Graded(float(gaia.quasi_exact_match(answer or "", task.answers)))


def _own_reward(own: OwnReward) -> float | Graded | None:
  try:
    return own()
  except RuntimeError as e:  # the environment's sandbox
    raise Ungradable(str(e)) from e


def _math(
  equal: Callable[[str, Sequence[str]], bool],
  task: Task,
  answer: str | None,
  _: Trajectory,
) -> Graded:
  if answer is None:
    return Graded(0.0)
  try:
    return Graded(float(equal(answer, task.answers)))
  except RuntimeError as e:  # its process does not start, or gets no CPU time
    raise Ungradable(f"task {task.id!r}: {e}") from e


class _Custom:
  """A user's reward function."""

  def __init__(self, path: str):
    """Imports the function.

    Raises:
      ValueError: the module or function does not exist.
    """
    self._path = path
    self._function = import_named(path, "reward.graders:")

  def __call__(self, task: Task, answer: str | None, trajectory: Trajectory) -> Graded:
    where = f"reward function {self._path} on task {task.id!r}"
    try:
      value = self._function(task, answer, trajectory)
    except Ungradable:
      raise
    except Exception as e:
      # An error in the user's code stops the run: no retry would mend it.
      raise ValueError(f"{where} raised {type(e).__name__}: {e}") from e
    parts = {"answer": value}
    if isinstance(value, dict):
      parts = dict(value)
    for name, part in parts.items():
      number = isinstance(part, numbers.Real | np.bool_) and isfinite(part)
      if not isinstance(name, str) or not number:
        raise ValueError(f"{where} gave {name!r}: {part!r}; it must be a finite number")
    answer_part = parts.pop("answer", None)
    if answer_part is None or not 0 <= answer_part <= 1:
      raise ValueError(
        f"{where} gave 'answer' {answer_part!r}; it must be from 0 to 1 (shaping adds "
        "penalties)"
      )
    # The log is one table: a part called `loss` must not pass for the loss.
    logged = {f"part_{k}": float(v) for k, v in parts.items()}
    return Graded(float(answer_part), parts=logged)

"""Plays tasks by a user's agent: its loop and tools, our policy and its training."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from coa_jax.data.tasks.task import Task
from coa_jax.protocol import roles
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Status, Trajectory
from coa_jax.rewards import AGENT_ANSWER
from coa_jax.rewards.graded import Graded, Ungradable
from coa_jax.rewards.grader import Grader
from coa_jax.rollout.agents.config import AgentConfig
from coa_jax.rollout.agents.endpoint import EndpointRun, make_relay
from coa_jax.rollout.agents.formats import Format
from coa_jax.rollout.agents.requests import Refused
from coa_jax.rollout.agents.server import MODEL, AgentServer, make_app
from coa_jax.rollout.agents.sessions import Session
from coa_jax.rollout.agents.types import Sampling
from coa_jax.rollout.episode import EpisodeConfig
from coa_jax.rollout.types import Attempt, Engine
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.runtime.fields import import_named, plain
from coa_jax.tools.types import Tools

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Client:
  """An attempt's access to the policy; see `AgentConfig.path`.

  Attributes:
    base_url: the server's.
    api_key: names the attempt; another attempt has another one.
    model: the model's name.
  """

  base_url: str
  api_key: str
  model: str = MODEL


@functools.cache
def _warn_once(name: str, value: float) -> None:
  _log.warning(
    "an agent asks for %s=%g; replies are sampled with the config's", name, value
  )


class _NoEngine:
  """In place of a sampler: the endpoint samples."""

  def __init__(self, capacity: int):
    self.capacity = capacity

  def set_policy(self, params: Any, version: int) -> None:
    """Has no policy."""

  def batch(self) -> contextlib.AbstractContextManager[None]:
    """Delays nothing."""
    return contextlib.nullcontext()

  def cancel(self, episode: Any) -> None:
    """Has nothing to cancel: an attempt ends with its agent."""

  def close(self) -> None:
    """Has no threads."""


def endpoint_worker(at_once: int, grader: Grader) -> RolloutWorker:
  """Makes a worker without a model, for `AgentWorker`; it plays `at_once` attempts."""
  variant = roles.get_variant("unified").with_tools(())
  dialect = EpisodeConfig(variant, "brief", max_calls=0, tool_seconds=0.0)
  return RolloutWorker(_NoEngine(at_once), None, dialect, grader)


class AgentRun(Session):
  """One attempt by an agent."""

  def __init__(
    self, attempt: Attempt, engine: Engine, tokenizer: Tokenizer, form: Format
  ):
    """Prepares the attempt; args as in `Session`."""
    task = attempt.task
    super().__init__(
      engine, tokenizer, form, task.id, attempt.seed, attempt.sequence, attempt.sample
    )
    self.task = task
    self.sequence = attempt.sequence
    self.temperature = attempt.temperature
    self.key = secrets.token_hex(16)
    self.trajectory.meta |= task.trajectory_meta

  def adapted(self, sampling: Sampling) -> Sampling:
    """Takes the attempt's temperature, at which the learner computes log-probs."""
    for name, usual in (("temperature", self.temperature), ("top_p", None)):
      value = getattr(sampling, name)
      if value not in (None, usual):
        _warn_once(name, value)
    return dataclasses.replace(
      sampling, temperature=self.temperature, top_p=None, seed=0
    )


_Run = AgentRun | EndpointRun


class AgentWorker(RolloutWorker):
  """A worker whose tasks are played by a user's agent."""

  def __init__(self, worker: RolloutWorker, config: AgentConfig):
    """Imports the agent, and starts its server.

    Args:
      worker: made with `conversations`, or by `endpoint_worker`; its engine closes with
        this worker.
      config: section `agent`.

    Raises:
      ValueError: the agent can not be imported, or the endpoint's key not read.
    """
    super().__init__(
      worker.engine,
      worker.tokenizer,
      worker.episode_config,
      worker.grader,
      worker.journal,
      worker.constraint,
      worker.form,
    )
    self._config = config
    self._agent = import_named(config.path, "agent.path")
    self._places = threading.Semaphore(config.workers)
    self._runs: dict[str, _Run] = {}
    if config.endpoint:
      app = make_relay(self._run_of, config.endpoint, config.seconds)
    else:
      app = make_app(self._run_of, worker.tokenizer)
    self._server = AgentServer(app)

  def _run_of(self, request: Request) -> Any:
    """Finds a request's attempt by its API key, which every OpenAI client sends."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if key not in self._runs:
      message = "the API key names no running trajectory"
      raise Refused(message, 401, "invalid_api_key")
    return self._runs[key]

  def close(self) -> None:
    """Ends all attempts, the server and the engine."""
    for run in list(self._runs.values()):
      self._end(run)
    self._server.close()
    super().close()

  def admit(self, tasks: Sequence[Task], name: str = "tasks") -> list[Task]:
    """Returns all tasks: only the agent knows its prompts' lengths."""
    return list(tasks)

  def episode(
    self,
    attempt: Attempt,
    toolbox: Tools,
    key: tuple[Any, ...] = (),
    within: int = 0,
  ) -> _Run:
    """Returns an attempt, for `submit`; an agent has its own tools."""
    if self._config.endpoint:
      return EndpointRun(attempt)
    return AgentRun(attempt, self.engine, self.tokenizer, self.form)

  def submit(
    self,
    episode: _Run,
    group: int | None = None,
    first: bool = False,
    evaluation: bool = False,
  ) -> concurrent.futures.Future[Trajectory]:
    """Runs the agent in a thread, then grades its answer; see `RolloutWorker`."""
    out: concurrent.futures.Future[Trajectory] = concurrent.futures.Future()
    thread = threading.Thread(
      target=self._play, args=(episode, evaluation, out), name="agent", daemon=True
    )
    thread.start()
    return out

  def _play(
    self,
    run: _Run,
    evaluation: bool,
    out: concurrent.futures.Future[Trajectory],
  ) -> None:
    """Plays and grades an attempt."""
    with self._places:
      self._runs[run.key] = run
      result: concurrent.futures.Future[Any] = concurrent.futures.Future()
      threading.Thread(
        target=self._call, args=(run, result), name="agent", daemon=True
      ).start()
      # Not `result(seconds)`: the agent itself may raise a TimeoutError.
      concurrent.futures.wait([result], self._config.seconds)
      late = not result.done()
      error = None if late else result.exception()
      value = None if late or error else result.result()
      self._end(run)
    t = run.trajectory
    if late:  # its thread is abandoned
      t.status = Status.TOOL_FAILED
    # --- The verdict: on the answer, or the agent's own.
    where = f"agent {self._config.path} on task {run.task.id!r}"

    def verdict() -> float | Graded:
      if isinstance(run, EndpointRun) and run.refusal:
        raise ValueError(f"agent.endpoint: {run.refusal}")
      if error is not None and t.status != Status.TRUNCATED:
        raise Ungradable(f"{where} raised {type(error).__name__}: {error}")
      if not t.segments:
        raise Ungradable(f"{where} got no reply")
      returned = plain(value)
      if returned is None or isinstance(returned, str):
        t.meta[AGENT_ANSWER] = returned
        return self.grader.answer(run.task, returned, t, evaluation)
      if not isinstance(returned, bool | int | float) or not 0 <= returned <= 1:
        raise ValueError(
          f"{where} returned {returned!r:.200}; accepted: an answer's text, a reward "
          "from 0 to 1, or None"
        )
      return float(returned)

    try:
      variant = self.episode_config.variant
      self.grader.submit(run.task, t, variant, evaluation, own=verdict).result()
    except BaseException as e:
      out.set_exception(e)
    else:
      out.set_result(t)

  def _call(self, run: _Run, result: concurrent.futures.Future[Any]) -> None:
    """Calls the agent."""
    client = Client(self._server.url, run.key)
    try:
      value = self._agent(run.task.to_json(), client)
      if inspect.iscoroutine(value):
        value = asyncio.run(value)
    except BaseException as e:
      result.set_exception(e)
    else:
      result.set_result(value)

  def _end(self, run: _Run) -> None:
    self._runs.pop(run.key, None)
    run.close()

"""A policy that plays tasks: engine, tokenizer and grader behind one call."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import logging
from collections.abc import Container, Iterator, Sequence
from typing import Any

import jax

from coa_jax.data.tasks.task import Task
from coa_jax.protocol import prompts
from coa_jax.protocol.grammar.tables import Constraint
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rewards import written_answer
from coa_jax.rewards.grader import Grader
from coa_jax.rollout.agents.formats import Format
from coa_jax.rollout.episode import CoAEpisode, EpisodeConfig
from coa_jax.rollout.replay import Replay
from coa_jax.rollout.types import Attempt, Engine, Episode
from coa_jax.runtime.shard import Shard
from coa_jax.tools.journal import ToolJournal
from coa_jax.tools.types import Tools

_log = logging.getLogger(__name__)


class RolloutWorker:
  """Plays tasks under the newest policy, and grades every trajectory."""

  def __init__(
    self,
    engine: Engine,
    tokenizer: Tokenizer,
    episode_config: EpisodeConfig,
    grader: Grader | None = None,
    journal: ToolJournal | None = None,
    constraint: Constraint | None = None,
    form: Format | None = None,
  ):
    """Takes over the engine, and closes it; `setup.make_worker` makes both.

    Args:
      grader: grades the trajectories; the caller closes it. None for a grader with the
        default rewards.
      journal: if given, no tool call is made twice, even across interruptions.
      form: the format of agents' conversations, closed with the worker; None if our own
        loop plays.
    """
    self.engine = engine
    self.tokenizer = tokenizer
    self.episode_config = episode_config
    self.grader = grader or Grader()
    self.journal = journal
    self.constraint = constraint
    self.form = form

  def admit(self, tasks: Sequence[Task], name: str = "tasks") -> list[Task]:
    """Drops tasks with too long prompts, logs their number, and returns the others.

    Raises:
      ValueError: all prompts are too long.
    """
    rollout = self.engine.config
    limit = rollout.max_prompt or rollout.max_len - 1
    lengths = [self._prompt_length(task) for task in tasks]
    admitted = [t for t, n in zip(tasks, lengths, strict=True) if n <= limit]
    if len(admitted) == len(tasks):
      return admitted
    longest = max(range(len(tasks)), key=lengths.__getitem__)
    field = f"max_prompt={limit}" if rollout.max_prompt else f"max_len={limit + 1}"
    line = (
      f"{len(tasks) - len(admitted)} of {len(tasks)} {name} dropped: their prompts "
      f"have more than {limit} tokens (rollout.{field}); the longest has "
      f"{lengths[longest]} (task {tasks[longest].id!r})"
    )
    if not admitted:
      raise ValueError(f"{line}, the shortest {min(lengths)}: raise it")
    if jax.process_index() == 0:
      _log.warning("%s", line)
    return admitted

  def _prompt_length(self, task: Task) -> int:
    # As an episode renders it, without an environment's opening text.
    config = self.episode_config
    prompt = prompts.prompt_segments(config.variant, task.question, config.style)
    self.tokenizer.encode_prompt(prompt)
    return sum(len(s.ids) for s in prompt)

  def __enter__(self) -> RolloutWorker:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the engine's threads; running episodes stay unfinished."""
    if self.form:
      self.form.close()
    self.engine.close()

  def episode(
    self,
    attempt: Attempt,
    toolbox: Tools,
    key: tuple[Any, ...] = (),
    within: int = 0,
  ) -> CoAEpisode:
    """Returns an attempt's episode, for `submit`.

    Args:
      key: the attempt's key in the tool-call journal; unique within the attempt's
        version, and within `within` versions before and after.
      within: see `key`.
    """
    if self.journal:  # counts an attempt's calls, so each attempt has its own tools
      toolbox = self.journal.tools(toolbox, attempt.version, key, within)
    return CoAEpisode(attempt, self.tokenizer, toolbox, self.episode_config)

  def submit(
    self,
    episode: CoAEpisode,
    group: int | None = None,
    first: bool = False,
    evaluation: bool = False,
  ) -> concurrent.futures.Future[Trajectory]:
    """Plays and grades an episode; see `types.Engine.submit`.

    Args:
      group: number of a group of episodes with equal prompts.
      first: whether the episode precedes other waiting ones.
      evaluation: whether the answer is graded as in evaluation.

    Returns:
      A future for the graded trajectory, or for the engine's or grader's failure.
    """
    out: concurrent.futures.Future[Trajectory] = concurrent.futures.Future()

    # Two callbacks, so that no thread waits: the engine's thread continues decoding
    # while the grader's runs an answer's tests.
    def graded(future: concurrent.futures.Future[None]) -> None:
      try:
        if episode.environment is not None:
          episode.environment.close()
        future.result()  # raises if the grading failed or was cancelled
      except BaseException as error:
        out.set_exception(error)
      else:
        out.set_result(episode.trajectory)

    def played(future: concurrent.futures.Future[Episode]) -> None:
      if future.exception() is not None:
        out.set_exception(future.exception())
        return
      if episode.continues:
        episode.continues = False
        try:
          following = self.engine.submit(episode, group, first=True)
        except RuntimeError as error:  # closed in between
          out.set_exception(error)
        else:
          following.add_done_callback(played)
        return
      # From here on a failure is not the engine's.
      own = None
      if episode.environment is not None:
        answer = written_answer(episode.trajectory.text)
        own = functools.partial(episode.environment.reward, answer)
      try:
        grading = self.grader.submit(
          episode.task,
          episode.trajectory,
          self.episode_config.variant,
          evaluation,
          own=own,
        )
      except BaseException as error:  # the grader is closed
        out.set_exception(error)
        return
      grading.add_done_callback(graded)

    self.engine.submit(episode, group, first).add_done_callback(played)
    return out

  def generate(
    self,
    params: Any,
    tasks: Sequence[Task],
    toolbox: Tools,
    samples: int,
    temperature: float,
    seed: int,
    version: int = 0,
    skip: Container[tuple[int, int]] = (),
    evaluation: bool = False,
    shard: Shard | None = None,
  ) -> Iterator[tuple[int, Trajectory]]:
    """Plays every task `samples` times; each of n processes plays every n-th task.

    Args:
      params: the policy.
      tasks: tasks to play; a task's index and the sample number key the randomness.
      samples: attempts per task.
      temperature: 0 is greedy.
      version: the policy's version, recorded on every token.
      skip: (task index, sample) of attempts to skip; the others do not change.
      shard: the tasks played here; this process's part if None.

    Yields:
      (task index, graded trajectory), in order of completion.
    """
    # --- The attempts, in order: a task's attempts are adjacent, to share its prompt.
    self.engine.set_policy(params, version)
    shard = shard or Shard(jax.process_index(), jax.process_count())
    pairs = itertools.product(shard.of(range(len(tasks))), range(samples))
    attempts = itertools.filterfalse(skip.__contains__, pairs)
    running: dict[concurrent.futures.Future[Trajectory], CoAEpisode] = {}
    try:
      while True:
        # --- As many episodes wait as run, so that no slot is idle, and memory does not
        # grow with the number of tasks.
        free = 2 * self.engine.capacity - len(running)
        with self.engine.batch():
          for place, sample in itertools.islice(attempts, free):
            attempt = Attempt(
              tasks[place],
              sample,
              seed,
              sequence=place * samples + sample,
              temperature=temperature,
              version=version,
            )
            key = (evaluation, seed, place, sample)
            episode = self.episode(attempt, toolbox, key)
            future = self.submit(episode, group=place, evaluation=evaluation)
            running[future] = episode
        if not running:
          return
        # --- Yield finished attempts; their slots are filled in the next turn.
        done, _ = concurrent.futures.wait(
          running, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
          episode = running.pop(future)
          yield episode.sequence // samples, future.result()
    finally:  # also if the caller stops reading
      for episode in running.values():
        self.engine.cancel(episode)

  def generate_groups(
    self,
    params: Any,
    tasks: Sequence[Task],
    toolbox: Tools,
    samples: int,
    temperature: float,
    seed: int,
    version: int = 0,
    evaluation: bool = False,
  ) -> list[list[Trajectory]]:
    """Returns each task's trajectories by sample number; args as in `generate`.

    Each process gets only its own tasks' trajectories.
    """
    out: list[list[Trajectory]] = [[] for _ in tasks]
    played = self.generate(
      params,
      tasks,
      toolbox,
      samples,
      temperature,
      seed,
      version=version,
      evaluation=evaluation,
    )
    for place, trajectory in played:
      out[place].append(trajectory)
    # They arrive in order of completion, which depends on the tools.
    return [sorted(group, key=lambda t: t.sample) for group in out]

  def rescore(
    self, params: Any, trajectories: Sequence[Trajectory], temperature: float
  ) -> list[list[float]]:
    """Returns the sampler's log-probs for each trajectory's sampled tokens.

    Under the original parameters, slots and windows they are bit-identical to the
    recorded ones, in half precision too; otherwise they are the log-probs under the
    given policy's sampler.

    Raises:
      ValueError: a trajectory was sampled under another variant or `max_len`, or the
        engine is vLLM.
    """
    if not self.engine.takes_tokens:
      raise ValueError("vLLM can not be given tokens to take; rescore without it")
    self.engine.set_policy(params, 0)
    episodes: list[Replay] = []
    owners: list[int] = []
    for i, trajectory in enumerate(trajectories):
      for context in trajectory.split():
        episodes.append(Replay(context, len(episodes), temperature))
        owners.append(i)
    with self.engine.batch():
      futures = [self.engine.submit(episode) for episode in episodes]
    for future in futures:
      future.result()  # raises if one of them failed
    out: list[list[float]] = [[] for _ in trajectories]
    for i, episode in zip(owners, episodes, strict=True):
      out[i] += episode.logps
    return out

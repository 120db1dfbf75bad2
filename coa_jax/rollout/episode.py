"""A running trajectory: prompt, sampled spans, tool calls, observations.

An episode converts sampled tokens to segments and tool calls, and observations back to
tokens; only this module connects tokens with tools.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
import time
import weakref
from collections.abc import Iterable, Sequence

from coa_jax.protocol import prompts, roles
from coa_jax.protocol.contexts import (
  REMOVED,
  ContextConfig,
  leave_context,
  repeat_summary,
)
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tokens import MIN_OBSERVATION, Tokenizer
from coa_jax.protocol.tool_bodies import (
  FunctionCall,
  number_results,
  parse_function_calls,
  render_function_call,
)
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Segment,
  Status,
  ToolCall,
  Trajectory,
  grammar_parts,
)
from coa_jax.rollout.types import Attempt, Episode, RolloutConfig
from coa_jax.runtime.fields import section
from coa_jax.tools.types import (
  CallContext,
  CallFuture,
  CallRequest,
  Tools,
  done_call,
  joined,
)

_SEEDS_APART = 0x9E3779B1  # odd, so that 2**32 contexts have 2**32 seeds
_NUMBER = 6  # tokens of "12. " and a new line, spelt byte by byte


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
  """Settings shared by a run's episodes.

  Attributes:
    variant: the dialect, reduced to this run's tools.
    style: the prompt's style (`prompts.STYLES`).
    max_calls: maximum tool calls per trajectory.
    tool_seconds: maximum tool time per trajectory, seconds.
    observation_tokens: maximum tokens per observation, tags included.
    context: splits trajectories longer than one context into several.
    max_sampled: maximum tokens to sample per trajectory; 0 for no limit.
  """

  variant: Variant
  style: str
  max_calls: int
  tool_seconds: float
  observation_tokens: int = RolloutConfig.observation_tokens
  context: ContextConfig = section(ContextConfig)
  max_sampled: int = 0


class CoAEpisode(Episode):
  """One attempt at one task, driven by an engine.

  Attributes:
    environment: the attempt's environment, if the tools have one; whoever grades the
      trajectory closes it.
    continues: whether to submit the episode again: `start` then returns the next
      context.
  """

  continues = False

  def __init__(
    self,
    attempt: Attempt,
    tokenizer: Tokenizer,
    toolbox: Tools,
    config: EpisodeConfig,
  ):
    """Renders the prompt."""
    self.task = task = attempt.task
    self.seed = attempt.seed
    self.sequence = attempt.sequence
    self.temperature = attempt.temperature
    self.tokenizer = tokenizer
    self.toolbox = toolbox
    self.config = config
    self._max_sampled = config.max_sampled or sys.maxsize
    self._earlier = 0  # tokens of earlier contexts
    self._versions: list[int] = []  # one per id sampled in this turn
    self._turn = ""  # policy text since the last observation
    self._forced: list[int] = []  # the opening tag of a summary
    self._marker = tokenizer.encode_observation(REMOVED)
    self._began = time.monotonic()
    self._tool_seconds = 0.0
    self._code_session = toolbox.code_session()
    if self._code_session is not None:  # closed even if the episode is dropped
      weakref.finalize(self, self._code_session.close).atexit = False
    self._context = CallContext(task.id, attempt.sample, attempt.seed)
    # --- The environment, which may begin with a text for the prompt.
    question = task.question
    self.environment = toolbox.environment()
    if self.environment is not None:
      weakref.finalize(self, self.environment.close).atexit = False
      begun = self.environment.reset(task.to_json())
      question = "\n\n".join(filter(None, (question, begun)))
    prompt = prompts.prompt_segments(config.variant, question, config.style)
    self.trajectory = Trajectory(
      task.id, prompt, sample=attempt.sample, meta=task.trajectory_meta
    )

  def start(self) -> list[int]:
    """Returns the prompt's ids, chat template included, or the next context's.

    The trajectory's time starts with the first call.
    """
    if self.opening:
      ids = _ids(self.trajectory.split()[-1].segments)
      self._earlier = self.trajectory.usage.total - len(ids)
      return ids
    self._began = time.monotonic()
    self.tokenizer.encode_prompt(self.trajectory.segments)
    ids = _ids(self.trajectory.segments)
    self.trajectory.usage.prompt = len(ids)
    self.trajectory.usage.model_calls = 1
    return ids

  @property
  def limit(self) -> int:
    """The context's maximum length: its tokens, and those still to be sampled."""
    usage = self.trajectory.usage
    given = usage.prompt + usage.observation + len(self._forced) - self._earlier
    return given + self._max_sampled

  def progress(self, ids: list[int]) -> None:
    """Records a window's policy version. See `Episode`."""
    self._date(ids)

  def _date(self, ids: list[int]) -> None:
    # Only the ids since the last call: the policy may be newer now.
    self._versions += [self.version] * (len(ids) - len(self._versions))

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future | None:
    """Appends sampled ids; starts the calls closed by `tag`. See `Episode`."""
    t = self.trajectory
    # --- Tokens become segments, each token with the version that sampled it.
    self._date(ids)
    n = len(self._forced)
    segments = self.tokenizer.policy_segments(ids[n:], logps[n:], self._versions[n:])
    self._versions = []
    t.usage.generated += len(ids[n:])
    if n:
      # The policy's part of this span has no opening tag to tell its role.
      for s in segments[:1]:
        s.role = roles.CONTEXT_SUMMARY
      begin = roles.open_tag(roles.CONTEXT_SUMMARY)
      segments.insert(
        0, Segment(Author.ENVIRONMENT, roles.CONTEXT_SUMMARY, begin, ids[:n])
      )
      t.usage.prompt += len(ids[:n])
      self._forced = []
    t.segments += segments
    self._turn += "".join(s.text for s in segments)
    # --- The ends: an answer, no tokens left, one call too many.
    if tag == roles.close_tag(roles.ANSWER):
      return self._finish(Status.ENDED)
    if tag is None or t.usage.generated >= self._max_sampled:
      return self._finish(Status.TRUNCATED)
    is_summary = tag == roles.close_tag(roles.CONTEXT_SUMMARY)
    if len(t.calls) >= self.config.max_calls and not is_summary:
      return self._finish(Status.TURN_LIMIT)
    # --- A call: `tag` is </NAME>. An invalid call gets an answer, and does not end the
    # episode.
    name = tag[2:-1]
    # The last opening tag of this turn: the policy may have left others open.
    before, opening, content = self._turn.rpartition(roles.open_tag(name))
    if not opening:
      return _refused(name, before, f"{tag} closes nothing")
    if is_summary:
      if len(t.split()) == self.config.context.count:
        return self._finish(Status.TRUNCATED)
      return self._continue(repeat_summary(t))
    content = content[: content.index(tag)].removeprefix(" ")
    several = None
    if name == FUNCTION_TAG and self.config.variant.parallel > 1:
      several = parse_function_calls(content)
    if several is None:
      return self._call(name, content)
    if len(several) > self.config.variant.parallel:
      most = self.config.variant.parallel
      return _refused(name, content, f"more than {most} calls at once")
    if len(t.calls) + len(several) > self.config.max_calls:
      return self._finish(Status.TURN_LIMIT)
    return joined([self._call_beside(call, len(several) - 1) for call in several])

  def _call(self, name: str, content: str) -> CallFuture:
    left = self.config.tool_seconds - self._tool_seconds
    return self.toolbox.start(
      CallRequest(
        name, content, left, self._code_session, self.environment, self._context
      )
    )

  def _call_beside(self, call: FunctionCall, others: int) -> CallFuture:
    """Starts one of several calls in a span."""
    name = FUNCTION_TAG
    content = render_function_call(call.name, call.arguments)
    if call.name in self.config.variant.tools:
      given = call.arguments.get("input")
      if len(call.arguments) != 1 or not isinstance(given, str):
        return _refused(call.name, content, f"{call.name} takes the argument input")
      name, content = call.name, given
    # Calls at the same time have no order, which a state would need.
    has_state = name == "code" and self._code_session is not None
    if self.environment is not None:
      has_state |= self.environment.takes(name, content)
    if has_state and others:
      return _refused(name, content, f"{call.name} is called alone")
    return self._call(name, content)

  def observed(self, result: ToolCall | list[ToolCall]) -> list[int] | None:
    """Appends the observation of finished calls. See `Episode`."""
    t = self.trajectory
    calls = result if isinstance(result, list) else [result]
    limit = share = self.config.observation_tokens
    if len(calls) > 1:  # some tokens are for the numbers
      share = max(limit // len(calls) - _NUMBER, MIN_OBSERVATION)
    # The record has the texts as read.
    texts = [self.tokenizer.cut_observation(call.result, share) for call in calls]
    t.calls += [
      dataclasses.replace(call, result=text)
      for call, text in zip(calls, texts, strict=True)
    ]
    t.usage.tool_calls += len(calls)
    t.usage.tool_turns += 1
    # All calls count, failed ones too: the limit bounds a slot's idle time.
    self._tool_seconds += max(call.seconds for call in calls)
    # Not the policy's fault, so the attempt is no evidence about the policy.
    if any(call.status == CallStatus.INFRASTRUCTURE for call in calls):
      return self._finish(Status.INFRASTRUCTURE)
    if self._tool_seconds >= self.config.tool_seconds:
      return self._finish(Status.TOOL_FAILED)
    # Tool text becomes tokens only here, with the tool as author, so it is never
    # trained on and never ends the episode.
    text = texts[0]
    if len(texts) > 1:
      text = self.tokenizer.cut_observation(number_results(texts), limit)
    segment = self.tokenizer.encode_observation(text)
    t.segments.append(segment)
    t.usage.observation += len(segment.ids)
    self._turn = ""
    context = self.config.context
    if context.summarises:
      if context.is_full(t):
        self._forced = self.tokenizer.encode(roles.open_tag(roles.CONTEXT_SUMMARY))
      return segment.ids
    following = leave_context(t, context, self._marker)
    if following is None:
      return segment.ids
    return self._continue(following)

  def forced(self) -> list[int]:
    """Returns a summary's opening tag if the context is full. See `Episode`."""
    return self._forced

  def _continue(self, following: Sequence[Segment]) -> None:
    """Prepares the next context, which the engine plays like another episode."""
    t = self.trajectory
    t.usage.prompt += sum(len(s.ids) for s in following if s.author != Author.TOOL)
    t.usage.model_calls += 1
    self.opening = grammar_parts(following)
    self.continues = True
    self._turn = ""
    # Another seed: the next context's positions must not repeat this one's draws.
    self.seed = (self.seed + _SEEDS_APART) % 2**32

  def out_of_room(self) -> None:
    """Ends the episode because its last observation does not fit."""
    segment = self.trajectory.segments.pop()
    self.trajectory.usage.observation -= len(segment.ids)
    self._finish(Status.TRUNCATED)

  def lost(self) -> None:
    """Ends the episode after an engine failure; its trajectory leaves its group."""
    self._finish(Status.INFRASTRUCTURE)

  def close(self) -> None:
    """Ends the code session and the environment, also of an episode that is dropped."""
    if self._code_session is not None:
      self._code_session.close()
    if self.environment is not None:
      self.environment.close()

  def _finish(self, status: Status) -> None:
    t = self.trajectory
    t.status = status
    t.usage.seconds = time.monotonic() - self._began
    if self._code_session is not None:
      self._code_session.close()
    return None


def _ids(segments: Iterable[Segment]) -> list[int]:
  return [i for segment in segments for i in segment.ids]


def _refused(
  name: str, arguments: str, reason: str
) -> concurrent.futures.Future[ToolCall]:
  """Answers an invalid call with an error, without a tool."""
  return done_call(ToolCall(name, arguments, f"error: {reason}", CallStatus.MODEL))

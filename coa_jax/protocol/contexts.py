"""Context management: a trajectory leaves a nearly full context for a shorter one.

The next context repeats the prompt and all spans, but a marker replaces older
observations (as in MiroThinker's `keep_tool_result`). Each context is a separate
training row, and only its newly sampled tokens are trained.
"""

from __future__ import annotations

import dataclasses

from coa_jax.protocol.roles import OBSERVATION
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.runtime.fields import bounded, check_fields

REMOVED = "removed"


@dataclasses.dataclass(frozen=True)
class ContextConfig:
  """When a trajectory leaves its context, and what the next one repeats.

  Attributes:
    count: maximum contexts per trajectory.
    keep: observations that the next context repeats whole, the newest included; a
      marker replaces the others.
    leave_at: tokens; a context with more tokens after an observation is left. With
      several contexts, the remaining length is for a call and its observation.
  """

  count: int = bounded(1, least=1)
  keep: int = bounded(3, least=1)
  leave_at: int = bounded(0, least=0)

  def __post_init__(self):
    check_fields(self)

  def check(self, length: int, name: str) -> None:
    """Refuses contexts that would never be left.

    Args:
      length: maximum tokens per context.
      name: the config field of `length`.
    """
    if self.count > 1 and not 0 < self.leave_at < length:
      raise ValueError(
        f"context.leave_at={self.leave_at} must be above 0 and below {name}={length}, "
        f"for there are up to context.count={self.count} contexts"
      )


def leave_context(
  trajectory: Trajectory, config: ContextConfig, marker: Segment
) -> list[Segment] | None:
  """Begins the next context if the last one is too long.

  Args:
    trajectory: changed in place; its last segment is a new observation, unread so far.
    config: when to leave a context, and what the next one repeats.
    marker: the observation `REMOVED`, with ids; replaces each removed observation.

  Returns:
    The next context: the prompt, the other segments as `Author.CARRIED`, and the new
    observation, which moves out of the last context. None if the last context goes on.
  """
  contexts = trajectory.split()
  *read, new = contexts[-1].segments
  if len(contexts) == config.count or contexts[-1].num_tokens <= config.leave_at:
    return None
  # --- All but the last `keep` observations are removed.
  places = [i for i, s in enumerate(read) if s.role == OBSERVATION]
  removed = set(places[: len(places) + 1 - config.keep])
  following = []
  for i, s in enumerate(read):
    if i in removed:
      s = marker
    author = s.author if s.author == Author.PROMPT else Author.CARRIED
    # Sampled once: log-probs and versions stay in the earlier context.
    following.append(dataclasses.replace(s, author=author, logps=[], versions=[]))
  following.append(new)
  # --- If this frees too little room, the context is used to its end.
  if sum(len(s.ids) for s in following) > config.leave_at:
    return None
  trajectory.segments[-1:] = following
  return following


def compacted(
  trajectory: Trajectory, config: ContextConfig, marker: Segment
) -> Trajectory:
  """Splits a finished one-context trajectory into contexts, as a rollout would.

  Args:
    trajectory: with ids.
    config: the rollouts' config.
    marker: as for `leave_context`.
  """
  out = dataclasses.replace(trajectory, segments=[])
  for segment in trajectory.segments:
    out.segments.append(segment)
    if segment.role == OBSERVATION:
      leave_context(out, config, marker)
  return out

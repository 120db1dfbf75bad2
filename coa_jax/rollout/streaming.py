"""A team that is asked while it works: questions come in, text goes out as it is made.

One thread owns the device. It decodes all questions that have a slot, takes the next
ones from a queue as slots fall free, and sleeps when there is nothing to do. Whoever
asked is told of every window's text, of every observation, and of the end.
"""

from __future__ import annotations

import codecs
import collections
import concurrent.futures
import dataclasses
import hashlib
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import ToolCall, Trajectory
from coa_jax.rollout.episode import CoAEpisode
from coa_jax.rollout.player import Player
from coa_jax.tasks.task import Task
from coa_jax.tools.toolbox import Toolbox


@dataclasses.dataclass(frozen=True)
class Piece:
  """New text of a trajectory; all its pieces, joined, are the trajectory's text.

  Attributes:
    role: the tag of the span that the text belongs to; "" outside every span.
    text: verbatim; never half a tag, never half a character.
    is_tag: True where the text is the span's opening or closing tag.
  """

  role: str
  text: str
  is_tag: bool = False


# Told to whoever asked, in the thread that owns the device, so it must be quick and not
# raise: pieces, then the finished trajectory, or None where it was called off before.
Tell = Callable[[Piece | Trajectory | None], None]


@dataclasses.dataclass(frozen=True)
class Ask:
  """One attempt at one question.

  Attributes:
    question: the text put to the model.
    temperature: 0 is greedy.
    seed: of this attempt's sampling; any integer.
    sample: which of several attempts under one seed this is.
    max_tokens: tokens the model may write; None for as many as there is room for.
  """

  question: str
  temperature: float = 1.0
  seed: int = 0
  sample: int = 0
  max_tokens: int | None = None

  @property
  def sequence(self) -> int:
    """What keys the randomness, a uint32.

    Two questions at a time may have the same one: it names no slot, it only says that
    both draw with the same random numbers.
    """
    key = hashlib.blake2b(f"{self.seed}/{self.sample}".encode(), digest_size=4)
    return int.from_bytes(key.digest(), "little")


class Busy(Exception):
  """As many questions wait as may."""


class Stopped(RuntimeError):
  """The team is closed, or its thread has failed."""


class Spans:
  """Cuts one author's text, given bit by bit, into pieces."""

  def __init__(self, tags: Sequence[str]):
    """Args: the names of the tags that count."""
    self._tag = re.compile(rf"<(/?)({'|'.join(tags)})>")
    self._whole = [w(t) for t in tags for w in (roles.open_tag, roles.close_tag)]
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._role = self._held = ""

  def read(self, data: bytes, final: bool = False) -> Iterator[Piece]:
    """The pieces that are certain after these bytes; all of them if they are the last.

    What may turn out to be the beginning of a tag or of a character is held back.
    """
    text = self._held + self._decoder.decode(data, final)
    at = 0
    for match in self._tag.finditer(text):
      if match.start() > at:
        yield Piece(self._role, text[at : match.start()])
      closing, role = match.groups()
      yield Piece(role, match[0], is_tag=True)
      self._role = "" if closing else role
      at = match.end()
    end = len(text)
    tail = text.rfind("<", at)
    if not final and tail >= 0 and any(t.startswith(text[tail:]) for t in self._whole):
      end = tail
    self._held = text[end:]
    if end > at:
      yield Piece(self._role, text[at:end])


class LiveEpisode(CoAEpisode):
  """An attempt that tells of itself as it goes on, and that can be called off."""

  def __init__(self, ask: Ask, tell: Tell, player: Player, toolbox: Toolbox):
    """Args: what is asked, who wants to know, and what plays it."""
    super().__init__(
      task=Task("live", ask.question, ()),
      sample=ask.sample,
      sequence=ask.sequence,
      temperature=ask.temperature,
      tokenizer=player.tokenizer,
      toolbox=toolbox,
      setting=player.setting,
    )
    self.tell = tell
    self.cancelled = False  # set by other threads
    most = player.engine.config.max_len
    self._max_tokens = most if ask.max_tokens is None else min(ask.max_tokens, most)
    self._spans = Spans(player.setting.variant.tags)
    self._told = 0  # ids of this turn
    self._observation = ""  # appended, and not told of yet

  @property
  def limit(self) -> int:
    """Tokens it may have in all by now; none once it is called off. See `Episode`."""
    usage = self.trajectory.usage
    return 0 if self.cancelled else usage.prompt + usage.observation + self._max_tokens

  def progress(self, ids: list[int]) -> None:
    """Tells of the text of a window. See `Episode`."""
    self._tell_new(ids, final=False)

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future[ToolCall] | None:
    """Tells of the rest of a turn. See `Episode`."""
    self._tell_new(ids, final=True)
    self._told = 0
    spent = self.trajectory.usage.generated + len(ids) >= self._max_tokens
    if tag != roles.close_tag(roles.ANSWER) and (spent or self.cancelled):
      tag = None  # a call whose result could not be used is not made
    return super().sampled(ids, logps, tag)

  def observed(self, result: ToolCall) -> list[int] | None:
    """Takes a result; it is told of before what is written next. See `Episode`."""
    ids = super().observed(result)
    if ids is not None:
      self._observation = self.trajectory.segments[-1].text
    return ids

  def out_of_room(self) -> None:
    """Forgets the observation that does not fit. See `Episode`."""
    self._observation = ""
    super().out_of_room()

  def _tell_new(self, ids: list[int], final: bool) -> None:
    if self._observation:
      role, text, self._observation = roles.OBSERVATION, self._observation, ""
      opening, closing = roles.open_tag(role), roles.close_tag(role)
      self.tell(Piece(role, opening, is_tag=True))
      self.tell(Piece(role, text[len(opening) : -len(closing)]))
      self.tell(Piece(role, closing, is_tag=True))
    new = self.tokenizer.raw(ids[self._told :])
    self._told = len(ids)
    for piece in self._spans.read(new, final):
      self.tell(piece)


def _too_long(what: str, limit: int) -> ValueError:
  return ValueError(
    f"{what} leaves no room in the {limit} tokens that prompt, observations and answer "
    "may have together"
  )


class Team:
  """A policy, its tools and the thread that plays them; close it, or use `with`."""

  def __init__(
    self,
    player: Player,
    params: Any,
    toolbox: Toolbox,
    seed: int = 0,
    max_waiting: int = 64,
  ):
    """Starts the thread.

    Args:
      player: the model, with its slots.
      params: the policy.
      toolbox: answers the calls; it is not closed with the team.
      seed: of all sampling, together with each question's own.
      max_waiting: questions that may wait for a slot.

    Raises:
      ValueError: max_waiting is below 1.
    """
    if max_waiting < 1:
      raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
    self.player = player
    # No question of more characters fits: no token has more bytes than the longest.
    longest = max(map(len, player.tokenizer.bytes_of))
    self._most_chars = player.engine.config.max_len * longest
    self.max_waiting = max_waiting
    self._toolbox = toolbox
    self._changed = threading.Condition()
    self._waiting: collections.deque[LiveEpisode] = collections.deque()
    self._running: set[LiveEpisode] = set()
    self._closed = False
    self._thread = threading.Thread(
      target=self._work, args=(params, seed), name="team", daemon=True
    )
    self._thread.start()

  def __enter__(self) -> Team:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Calls off all questions and ends the thread; waits for a tool that runs."""
    with self._changed:
      self._closed = True
      self._changed.notify()
      for episode in self._running:
        episode.cancelled = True
    self._thread.join()

  @property
  def alive(self) -> bool:
    """True while questions can be asked."""
    return not self._closed and self._thread.is_alive()

  @property
  def counts(self) -> tuple[int, int]:
    """(questions that have a slot, questions that wait for one)."""
    with self._changed:
      return len(self._running), len(self._waiting)

  def ask(self, ask: Ask, tell: Tell) -> LiveEpisode:
    """Puts a question; returns at once.

    Args:
      ask: the question and how to sample.
      tell: told of all that happens from now on; see `Tell`.

    Returns:
      What `cancel` takes.

    Raises:
      ValueError: the question leaves no room to answer.
      Busy: too many wait.
      Stopped: the team is closed, or its thread has failed.
    """
    limit, chars = self.player.engine.config.max_len, len(ask.question)
    if chars > self._most_chars:  # to encode it would hold up whoever asks
      raise _too_long(f"a question of {chars} characters", limit)
    episode = LiveEpisode(ask, tell, self.player, self._toolbox)
    length = len(episode.start())
    if length >= limit:
      raise _too_long(f"a prompt of {length} tokens", limit)
    with self._changed:
      if not self.alive:
        raise Stopped("the team has stopped")
      if len(self._waiting) >= self.max_waiting:
        raise Busy(f"{self.max_waiting} questions wait already")
      self._waiting.append(episode)
      self._changed.notify()
    return episode

  def cancel(self, episode: LiveEpisode) -> None:
    """Calls a question off; once it is over this does nothing.

    One that waits is forgotten. One that runs frees its slot after the rest of the
    window that runs and one more token, or when the tool that it waits for is done.
    """
    with self._changed:
      episode.cancelled = True
      if episode in self._waiting:
        self._waiting.remove(episode)

  def warm_up(self) -> None:
    """Has the sampler compiled before the first question is asked.

    Raises:
      ValueError, Stopped: not even a short question can be answered.
    """
    told: queue.SimpleQueue[Piece | Trajectory | None] = queue.SimpleQueue()
    self.ask(Ask("hello", max_tokens=1), told.put)
    while isinstance(what := told.get(), Piece):
      pass
    if what is None:
      raise Stopped("the team failed at its first question")

  def _work(self, params: Any, seed: int) -> None:
    """The thread: plays until the team is closed."""
    try:
      for episode in self.player.engine.run(params, self._next(), seed):
        with self._changed:
          self._running.discard(episode)
        episode.tell(None if episode.cancelled else episode.trajectory)
    finally:  # a failure goes on to threading.excepthook, which prints it
      with self._changed:
        self._closed = True
        left = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
      for episode in left:
        episode.tell(None)

  def _next(self) -> Iterator[LiveEpisode | None]:
    """Questions as they come; None where others run meanwhile."""
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
        episode = None
        if self._closed:
          if not self._running:
            return
        elif self._waiting:
          episode = self._waiting.popleft()
          self._running.add(episode)
      yield episode

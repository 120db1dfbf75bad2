"""Serves concurrent questions, and streams text as it is sampled.

Every question is an engine episode; the engine plays one per slot at once. The sender
gets every window's text, every observation, and the end.
"""

from __future__ import annotations

import codecs
import concurrent.futures
import dataclasses
import functools
import hashlib
import queue
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Status, ToolCall, Trajectory
from coa_jax.rollout.episode import CoAEpisode
from coa_jax.rollout.types import Attempt, Episode
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tools.types import Tools


@dataclasses.dataclass(frozen=True)
class TextDelta:
  """New text of a trajectory; all its pieces, joined, are the trajectory's text.

  Attributes:
    role: the tag of the text's span; "" outside every span.
    text: verbatim; never half a tag, never half a character.
    is_tag: True if the text is the span's opening or closing tag.
  """

  role: str
  text: str
  is_tag: bool = False


# Called in the engine's thread, so it must be quick and not raise. Gets text as it is
# sampled, then the finished trajectory, or None if there is none. If the episode was
# cancelled, text in transit may come after None.
OnEvent = Callable[[TextDelta | Trajectory | None], None]


@dataclasses.dataclass(frozen=True)
class InferenceRequest:
  """One attempt at one question.

  Attributes:
    question: the text put to the model.
    temperature: 0 is greedy.
    seed: the attempt's sampling seed; any integer.
    sample: the attempt's number under one seed.
    max_tokens: maximum tokens to sample; None for all that fit.
    top_p: the attempt's own top_p; None for the config's.
  """

  question: str
  temperature: float = 1.0
  seed: int = 0
  sample: int = 0
  max_tokens: int | None = None
  top_p: float | None = None

  @property
  def sequence(self) -> int:
    """Returns the randomness key, a uint32.

    Two concurrent questions may share a key, because it names no slot: both then draw
    with the same random numbers.
    """
    # Not Python's own hash, which differs between processes.
    key = hashlib.blake2b(f"{self.seed}/{self.sample}".encode(), digest_size=4)
    return int.from_bytes(key.digest(), "little")


class Busy(Exception):
  """Too many questions are waiting."""


class Stopped(RuntimeError):
  """The server is closed, or its engine has failed."""


class Spans:
  """Cuts one author's incremental text into `TextDelta`s."""

  def __init__(self, tags: Sequence[str]):
    """Takes the names of the tags to recognise."""
    self._tag = re.compile(rf"<(/?)({'|'.join(tags)})>")
    self._whole = [roles.open_tag(tag) for tag in tags]
    self._whole += map(roles.close_tag, tags)
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._role = ""
    self._unread = ""  # text that may begin a tag

  def read(self, data: bytes, final: bool = False) -> Iterator[TextDelta]:
    """Yields the pieces known for certain after these bytes; all if `final`.

    A possible beginning of a tag or character is held back.
    """
    text = self._unread + self._decoder.decode(data, final)
    # --- Whole tags, and the text before each.
    at = 0  # start of the pending text
    for match in self._tag.finditer(text):
      if match.start() > at:
        yield TextDelta(self._role, text[at : match.start()])
      closing, role = match.groups()
      yield TextDelta(role, match[0], is_tag=True)
      self._role = "" if closing else role
      at = match.end()
    # --- The rest may end within a tag. Only the last `<` can begin an incomplete one:
    # an earlier one would have been closed, or is text.
    end = len(text)
    tail = text.rfind("<", at)
    if not final and tail >= 0 and any(t.startswith(text[tail:]) for t in self._whole):
      end = tail
    self._unread = text[end:]
    if end > at:
      yield TextDelta(self._role, text[at:end])


class StreamingEpisode(CoAEpisode):
  """An attempt that streams its text and can be cancelled."""

  def __init__(
    self,
    request: InferenceRequest,
    on_event: OnEvent,
    worker: RolloutWorker,
    toolbox: Tools,
  ):
    """Prepares an attempt."""
    attempt = Attempt(
      Task("live", request.question, ()),
      request.sample,
      seed=worker.engine.config.seed,
      sequence=request.sequence,
      temperature=request.temperature,
    )
    super().__init__(attempt, worker.tokenizer, toolbox, worker.episode_config)
    self.on_event = on_event
    self.top_p = request.top_p
    self.cancelled = False  # set by other threads
    self.finished = False  # likewise: the reply is complete
    if request.max_tokens is not None:
      self._max_sampled = min(request.max_tokens, self._max_sampled)
    self._spans = Spans(worker.episode_config.variant.tags)
    self._streamed = 0  # ids streamed in this turn
    self._observation = ""  # appended, not streamed yet

  @property
  def limit(self) -> int:
    """Returns the current token limit; 0 once cancelled or finished."""
    return 0 if self.cancelled or self.finished else super().limit

  def progress(self, ids: list[int]) -> None:
    """Streams the text of a window."""
    super().progress(ids)
    self._stream(ids, final=False)

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future | None:
    """Streams the rest of a turn."""
    # Final: a tag or character cut off here does not continue later.
    self._stream(ids, final=True)
    self._streamed = 0
    is_call = tag != roles.close_tag(roles.ANSWER)
    if is_call and (self.cancelled or self.finished):
      tag = None  # a call with an unusable result is not made
    return super().sampled(ids, logps, tag)

  def observed(self, result: ToolCall | list[ToolCall]) -> list[int] | None:
    """Appends a result; its text is streamed before the next sampled text."""
    ids = super().observed(result)
    if ids is not None or self.continues:
      self._observation = self.trajectory.segments[-1].text
    return ids

  def out_of_room(self) -> None:
    """Drops the observation that does not fit."""
    self._observation = ""
    super().out_of_room()

  def _stream(self, ids: list[int], final: bool) -> None:
    if self.cancelled:
      return
    # Streamed late: an observation without room must never be streamed.
    if self._observation:
      role = roles.OBSERVATION
      text = self._observation
      self._observation = ""
      opening = roles.open_tag(role)
      closing = roles.close_tag(role)
      self.on_event(TextDelta(role, opening, is_tag=True))
      self.on_event(TextDelta(role, text[len(opening) : -len(closing)]))
      self.on_event(TextDelta(role, closing, is_tag=True))
    # Bytes: a character's tokens may be in two windows.
    new = self.tokenizer.raw(ids[self._streamed :])
    self._streamed = len(ids)
    for delta in self._spans.read(new, final):
      self.on_event(delta)


class TooLong(ValueError):
  """A question leaves no room to answer."""


def _too_long(question: str, limit: int) -> TooLong:
  return TooLong(
    f"{question} leaves no room in the {limit} tokens that prompt, observations and "
    "answer may have together"
  )


class InferenceServer:
  """Answers questions with a policy and its tools; close it, or use `with`."""

  def __init__(
    self,
    worker: RolloutWorker,
    params: Any,
    toolbox: Tools,
    max_waiting: int = 64,
  ):
    """Gives the engine the policy; closes neither the worker nor the toolbox.

    Raises:
      ValueError: max_waiting is below 1.
    """
    if max_waiting < 1:
      raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
    self.worker = worker
    self.max_waiting = max_waiting
    # A question with more characters never fits: a token has at most `longest` bytes.
    longest = max(map(len, worker.tokenizer.bytes_of))
    self._most_chars = worker.engine.config.max_len * longest
    self._toolbox = toolbox
    self._lock = threading.Lock()
    self._open: set[StreamingEpisode] = set()  # waiting or running
    self._closed = False
    worker.engine.set_policy(params, 0)

  def __enter__(self) -> InferenceServer:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Cancels all questions."""
    with self._lock:
      self._closed = True
      left = list(self._open)  # a copy: ended episodes leave the set
    for episode in left:
      self.cancel(episode)

  @property
  def alive(self) -> bool:
    """True while questions can be sent."""
    return not self._closed

  @property
  def counts(self) -> tuple[int, int]:
    """Returns (questions with a slot, questions waiting for one)."""
    # Counted without the engine, which leaves no slot idle while a question waits.
    with self._lock:
      running = min(len(self._open), self.worker.engine.capacity)
      return running, len(self._open) - running

  def submit(self, request: InferenceRequest, on_event: OnEvent) -> StreamingEpisode:
    """Sends a question; returns a handle for `cancel` at once.

    Raises:
      TooLong: the question leaves no room to answer.
      ValueError: an environment fails, or the worker has one top_p for all.
      Busy: too many questions are waiting.
      Stopped: the server is closed, or its engine has failed.
    """
    if request.top_p is not None and not self.worker.engine.own_top_p:
      raise ValueError("the worker was made without own_top_p")
    # --- Is there room? Refused here, because the engine would fail for everybody.
    limit = self.worker.engine.config.max_len
    chars = len(request.question)
    if chars > self._most_chars:  # encoding it would delay its sender
      raise _too_long(f"a question of {chars} characters", limit)
    episode = StreamingEpisode(request, on_event, self.worker, self._toolbox)
    length = len(episode.start())
    if length >= limit:
      raise _too_long(f"a prompt of {length} tokens", limit)
    # --- Is there a place?
    with self._lock:
      if self._closed:
        raise Stopped("the server has stopped")
      # Counted here, not by the engine: two senders must not take one place.
      if len(self._open) >= self.worker.engine.capacity + self.max_waiting:
        raise Busy(f"{self.max_waiting} questions wait already")
      self._open.add(episode)
    # --- Without the lock: the callback takes the lock, and may run at once.
    try:
      future = self.worker.engine.submit(episode)
    except RuntimeError as error:  # closed in between
      with self._lock:
        self._open.discard(episode)
      raise Stopped("the server has stopped") from error
    future.add_done_callback(functools.partial(self._ended, episode))
    return episode

  def cancel(self, episode: StreamingEpisode) -> None:
    """Cancels a question; no effect once it is over.

    A waiting question is forgotten. A running one frees its slot after the current
    window; its running tool call is abandoned.
    """
    # The flag first: tokens sampled meanwhile must not start another call.
    episode.cancelled = True
    self.worker.engine.cancel(episode)

  def finish(self, episode: StreamingEpisode) -> None:
    """Ends an episode after the current window; its trajectory arrives as usual."""
    episode.finished = True

  def warm_up(self) -> None:
    """Compiles the sampler with a short question, before the first real one.

    Raises:
      ValueError, Stopped: not even a short question can be answered.
    """
    events: queue.SimpleQueue[TextDelta | Trajectory | None] = queue.SimpleQueue()
    # One token is enough: its window is as long as any.
    self.submit(InferenceRequest("hello", max_tokens=1), events.put)
    event = events.get()
    while isinstance(event, TextDelta):
      event = events.get()
    if event is None:
      raise Stopped("the engine failed at its first question")

  def _ended(
    self, episode: StreamingEpisode, future: concurrent.futures.Future[Episode]
  ) -> None:
    """Begins an episode's next context, or delivers its end.

    An engine failure ends the server.
    """
    error = future.exception()
    if error is None and episode.continues and not episode.cancelled:
      episode.continues = False
      try:
        following = self.worker.engine.submit(episode, first=True)
      except RuntimeError:  # closed in between
        episode.cancelled = True
      else:
        following.add_done_callback(functools.partial(self._ended, episode))
        return
    # A cancelled question says nothing about the others.
    failed = error is not None
    failed = failed and not isinstance(error, concurrent.futures.CancelledError)
    with self._lock:
      self._open.discard(episode)
      is_news = failed and not self._closed  # a failed engine fails all its episodes
      self._closed = self._closed or failed
    if is_news:
      traceback.print_exception(error)
    ended = error is None and episode.trajectory.status != Status.UNGRADED
    episode.on_event(episode.trajectory if ended else None)
    # In a thread: an environment's end may take long, and this is the engine's.
    threading.Thread(target=episode.close, name="close", daemon=True).start()

r"""A trained team in the terminal: ask, and watch it work.

  coa chat --config=configs/evaluate_world.py \
    [--config.init=MODEL_FOLDER] [--temperature=0] [--sampling_seed=0]
  coa chat --config=... --question='...'
  coa chat --config=... < questions.txt

Takes the config of an evaluation, as `coa serve` does. Every role has a
colour, and its text appears as it is written. Questions come from --question, else from
standard input, one a line; a question knows nothing of those before it. Answers go to
standard output and everything else to standard error, so that a script reads answers
alone; --quiet leaves the team's work out. Ctrl-C calls a question off, and ends the
program between two.

The exit status is 1 if a question got no answer.
"""

from __future__ import annotations

import queue
import signal
import sys
import unicodedata
from collections.abc import Iterator

import ml_collections
from absl import flags
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from coa_jax.cli import launch
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Status, Trajectory
from coa_jax.rewards import written_answer
from coa_jax.rollout.streaming import InferenceRequest, InferenceServer, TextDelta
from coa_jax.serve import ServeConfig, open_server

_QUESTION = flags.DEFINE_string("question", None, "Ask this one and stop.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", 0.0, 2.0)
_SEED = flags.DEFINE_integer("sampling_seed", 0, "Of every answer.")
_QUIET = flags.DEFINE_bool("quiet", False, "Print answers only.")

# Readable on black and on white: the terminal's own colour, or one of middle lightness
# of the fixed 256. The 16 named ones are the terminal's to choose, and often are not.
STYLES = {
  roles.THINK: "dim",
  roles.PLAN: "color(32)",
  roles.REFLECTION: "color(133)",
  roles.SUGGESTED_ANSWER: "color(130)",
  roles.DOUBLE_CHECK: "color(98)",
  roles.ANSWER: "bold color(29)",
  roles.OBSERVATION: "default",
}
TOOL_STYLE = "bold color(161)"
_INDENT = "  "
# Of Unicode's categories: control, format, surrogates, line and paragraph separators.
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def clean(text: str) -> str:
  """Text of a model or a tool with nothing in it that steers a terminal.

  Control characters, those that reorder text and other invisible ones are spelt out
  (`\\x1b`); line breaks and tabs stay.
  """
  out = ""
  for c in text:
    if unicodedata.category(c) in _STEERING and c not in "\n\t":
      c = c.encode("unicode_escape").decode("ascii")
    out += c
  return out


class Screen:
  """Shows pieces as they come: a heading for each span, its text below."""

  def __init__(self, console: Console):
    """Args: where to."""
    self._console = console
    self._fresh = True  # nothing of this span's text is shown yet
    self._answer: list[TextDelta] = []  # left to the frame

  def show(self, piece: TextDelta) -> None:
    """Adds a piece; the answer's are left to the frame where there will be one."""
    if piece.role == roles.ANSWER and self._console.is_terminal:
      self._answer.append(piece)
    else:
      self._write(piece)

  def _write(self, piece: TextDelta) -> None:
    style = "red"  # of text outside every span, which breaks the protocol
    if piece.role:
      style = STYLES.get(piece.role, TOOL_STYLE)
    if not piece.is_tag:
      text = piece.text
      start = ""
      if self._fresh:  # the white space after a tag is the protocol's
        text = text.lstrip()
        start = _INDENT
      if text:
        self._print(start + clean(text).replace("\n", "\n" + _INDENT), style)
        self._fresh = False
    elif piece.text == roles.open_tag(piece.role):
      self._print(piece.role + "\n", f"{style} reverse")
      self._fresh = True
    else:
      self._print("\n", style)
      self._fresh = True

  def end(self, trajectory: Trajectory) -> None:
    """Says how it ended; on a terminal a whole answer stands in a frame."""
    answer = answer_of(trajectory)
    if self._console.is_terminal and answer is not None:
      text = Text(clean(answer), STYLES[roles.ANSWER])
      self._console.print(Panel(text, title="answer", expand=False))
    elif self._answer:
      for piece in self._answer:
        self._write(piece)
      self._print("\n", "")
    usage = trajectory.usage
    self._print(
      f"{trajectory.status}: {usage.prompt} tokens asked, {usage.generated} written, "
      f"{usage.observation} observed, {usage.tool_calls} tool calls, "
      f"{usage.seconds:.1f} s\n",
      "dim",
    )

  def _print(self, text: str, style: str) -> None:
    self._console.print(Text(text, style), end="", soft_wrap=True)


def answer_of(trajectory: Trajectory) -> str | None:
  """What the team answered; None where it did not come to an answer."""
  if trajectory.status != Status.ENDED:
    return None
  return written_answer(trajectory.text) or None


def play(
  server: InferenceServer, request: InferenceRequest, screen: Screen | None
) -> Trajectory | None:
  """Plays one question to its end; None where Ctrl-C called it off.

  Raises:
    RuntimeError: the engine has failed.
  """
  # The engine's thread writes, this one shows: only it can be interrupted.
  events: queue.SimpleQueue[TextDelta | Trajectory | None] = queue.SimpleQueue()
  episode = server.submit(request, events.put)
  try:
    event = events.get()
    while isinstance(event, TextDelta):
      if screen:
        screen.show(event)
      event = events.get()
  except KeyboardInterrupt:
    server.cancel(episode)
    return None
  if event is None:
    raise RuntimeError("the engine has failed; the reason stands above")
  if screen:
    screen.end(event)
  return event


def questions(console: Console) -> Iterator[str]:
  """Questions from standard input, asked for where it is a terminal."""
  while True:
    if sys.stdin.isatty():
      console.print("question> ", style="bold", end="")
    line = sys.stdin.readline()
    if not line:
      return
    if line.strip():
      yield line.strip()


def main(config: ml_collections.ConfigDict) -> None:
  """Asks until there is nothing left to ask."""
  # An exit, so that the tools' processes are ended on the way out.
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))
  console = Console(stderr=True, highlight=False)
  failed = False
  with open_server(config) as server:
    # Else the first question would wait for it without a word.
    console.print("compiling the sampler ...", style="dim")
    server.warm_up()
    lines = questions(console)
    if _QUESTION.value is not None:
      lines = iter([_QUESTION.value])
    try:
      for question in lines:
        request = InferenceRequest(question, _TEMPERATURE.value, _SEED.value)
        screen = None
        if not _QUIET.value:
          screen = Screen(console)
        try:
          t = play(server, request, screen)
          if t is None:
            console.print("\ncalled off", style="dim")
        except ValueError as e:  # too long; the next one may be shorter
          console.print(Text(f"error: {e}", "red"))
          t = None
        answer = None
        if t:
          answer = answer_of(t)
        failed |= answer is None
        # On a terminal it stands in the frame; elsewhere each answer is one line.
        if not (sys.stdout.isatty() and sys.stderr.isatty() and not _QUIET.value):
          print(" ".join(clean(answer or "").split()), flush=True)
        if sys.stdin.isatty():
          console.print()
    except KeyboardInterrupt:
      console.print()
  if failed:
    sys.exit(1)


def command() -> None:
  """Runs the command line."""
  launch.start(main, ServeConfig)

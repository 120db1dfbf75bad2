r"""Chat with a trained team in the terminal, and watch the team work.

  coa chat --config=configs/evaluate_world.py \
    [--config.init=MODEL_FOLDER] [--temperature=0] [--sampling_seed=0]
  coa chat --config=... --question='...'
  coa chat --config=... < questions.txt

Takes an evaluation's config, like `coa serve`. Every role has a colour, and its text
appears as it is sampled. Questions come from --question, otherwise from standard input,
one per line; each question is independent. Answers go to standard output and everything
else to standard error, so that a script reads only answers; --quiet hides the team's
work. Ctrl-C cancels the running question; between questions it ends the program.

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
from rich.text import Text

from coa_jax.cli import launch
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Status, Trajectory
from coa_jax.rewards import written_answer
from coa_jax.rollout.streaming import InferenceRequest, InferenceServer, TextDelta
from coa_jax.serve import ServeConfig, open_server

_QUESTION = flags.DEFINE_string("question", None, "Ask this question and end.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", 0.0, 2.0)
_SEED = flags.DEFINE_integer("sampling_seed", 0, "Seed of every answer.")
_QUIET = flags.DEFINE_bool("quiet", False, "Print answers only.")

# Readable on black and on white: the terminal's own colour, or medium lightness from
# the fixed palette of 256. Terminals redefine the 16 named colours, often unreadably.
STYLES = {
  roles.THINK: "dim",
  roles.PLAN: "color(32)",
  roles.REFLECTION: "color(133)",
  roles.SUGGESTED_ANSWER: "color(130)",
  roles.DOUBLE_CHECK: "color(98)",
  roles.ANSWER: "bold color(29)",
  roles.OBSERVATION: "default",
  roles.CONTEXT_SUMMARY: "dim",
}
TOOL_STYLE = "bold color(161)"
_INDENT = "  "
# Unicode's categories: control, format, surrogates, line and paragraph separators.
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def clean(text: str) -> str:
  """Escapes terminal control sequences in a model's or a tool's text.

  Control, reordering and other invisible characters are spelt out (`\\x1b`); line
  breaks and tabs stay.
  """
  out = ""
  for c in text:
    if unicodedata.category(c) in _STEERING and c not in "\n\t":
      c = c.encode("unicode_escape").decode("ascii")
    out += c
  return out


class Screen:
  """Shows text pieces as they arrive: a heading per span, the span's text below."""

  def __init__(self, console: Console):
    """Shows pieces on `console`."""
    self._console = console
    self._fresh = True  # none of this span's text is shown yet

  def show(self, piece: TextDelta) -> None:
    """Shows a piece."""
    style = "red"  # text outside every span violates the protocol
    if piece.role:
      style = STYLES.get(piece.role, TOOL_STYLE)
    if not piece.is_tag:
      text = piece.text
      start = ""
      if self._fresh:  # the white space after a tag belongs to the protocol
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
    """Prints the status and the cost."""
    if not self._fresh:  # the last span was cut off
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
  """Returns the team's answer, or None."""
  if trajectory.status != Status.ENDED:
    return None
  return written_answer(trajectory.text) or None


def play(
  server: InferenceServer, request: InferenceRequest, screen: Screen | None
) -> Trajectory | None:
  """Plays one question to its end; returns None if Ctrl-C cancelled it.

  Raises:
    RuntimeError: the engine has failed.
  """
  # The engine's thread writes, this thread shows: Ctrl-C interrupts only this one.
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
    raise RuntimeError("the engine has failed; the reason is printed above")
  if screen:
    screen.end(event)
  return event


def questions(console: Console) -> Iterator[str]:
  """Yields questions from standard input, with a prompt on a terminal."""
  while True:
    if sys.stdin.isatty():
      console.print("question> ", style="bold", end="")
    line = sys.stdin.readline()
    if not line:
      return
    if line.strip():
      yield line.strip()


def main(config: ml_collections.ConfigDict) -> None:
  """Asks all questions."""
  # A normal exit ends the tools' processes, too.
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))
  console = Console(stderr=True, highlight=False)
  failed = False
  with open_server(config) as server:
    # Otherwise the first question would wait silently for compilation.
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
            console.print("\ncancelled", style="dim")
        except ValueError as e:  # too long; the next may be shorter
          console.print(Text(f"error: {e}", "red"))
          t = None
        answer = None
        if t:
          answer = answer_of(t)
        failed |= answer is None
        # A terminal has shown the answer already; elsewhere each answer is one line.
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

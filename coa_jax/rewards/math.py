r"""Mathematical equivalence between an answer and the gold answers.

Plain numbers are compared in process. Everything else goes to math-verify (sympy) in a
child process: an answer such as `9^{9^{9^9}}` makes sympy compute without end, and
math-verify's own time limit is a signal, which needs the main thread, but a rollout
grades from many threads. A child can be killed, and caps its own memory.

`equivalent` is math-verify with these exceptions. Small numbers are compared relative
to their size (`math_numbers`); a decimal may be a rounding (`notation.same_decimal`).
Accepted in addition: other notations (`notation`), units and number words (`18
dollars`, `5 million`), inequalities for intervals (`math_inside`), clocks and ratios
(`math_text`). Refused in addition: see `math_text`. Like math-verify, it allows a
missing unit or base, and converts neither: 5 is not an answer to 5 in base two.

`math_verify_says` is math-verify as published, for comparison with other projects'
scores.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from coa_jax.rewards import math_text, notation
from coa_jax.rewards.notation import MAX_CHARS, number

# CPU seconds for one comparison (math-verify allows 5 too); beyond them the answer is
# wrong. Not wall time, so that a busy machine cannot change a verdict.
CPU_SECONDS = 5
# Wall seconds for a comparison, or for the child to import sympy, on a busy machine.
_WALL_SECONDS = 120.0

_BOXED = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?=[^\s{])|(?=\d))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# A text's end after an unclosed box.
_LOOSE_END = re.compile(r"(?:\s|\$|\.|\\[\])])+\Z")
# Blanks without meaning: all except blanks between two digit fields, two words or the
# parts of a number list (`1, 234`), or after a backslash.
_IDLE_BLANK = re.compile(r"(?<![\w.,\\])\s+|(?<!\\)\s+(?![\w.,])")


def equivalent(prediction: str, answers: Sequence[str]) -> bool:
  r"""Whether the prediction equals one of the answers mathematically.

  Only the prediction's last `\boxed{}` counts, or else the whole text. Answers are
  plain strings or LaTeX, with or without `$`.

  Raises:
    RuntimeError: the comparing process cannot be started, or gets no CPU time.
  """
  prediction = final_answer(prediction)
  if not prediction or len(prediction) > MAX_CHARS:
    return False
  return any(_equal(prediction, final_answer(gold)) for gold in answers)


def math_verify_says(prediction: str, answers: Sequence[str]) -> bool:
  """Whether math-verify, as published, accepts the prediction for at least one answer.

  Raises:
    RuntimeError: the comparing process cannot be started, or gets no CPU time.
  """
  return any(_BARE_VERIFIER.ask(prediction, gold) for gold in answers)


def final_answer(text: str) -> str:
  r"""Returns the last `\boxed{}`'s content, or the whole `text`, stripped.

  An unclosed box extends to the end of `text`. A full stop, quotes around the answer
  and one pair of `$` are removed: the released prompt asks for `\boxed{'The final
  answer goes here.'}`, and some models copy the quotes.
  """
  text = _last_boxed(text).strip()
  if text.endswith((".", "\u3002")) and not text.endswith(".."):
    text = text[:-1].rstrip()
  # Quotes inside would leave one half of a pair: `$1$ and $2$` stays unchanged.
  for quote in ("$", "'", '"'):
    inner = text[1:-1]
    if len(text) > 1 and text[0] == text[-1] == quote and quote not in inner:
      text = inner.strip()
  return text


def _last_boxed(text: str) -> str:
  boxes = list(_BOXED.finditer(text))
  if not boxes:
    return text
  start = boxes[-1].end()
  if not boxes[-1][0].endswith("{"):  # `\boxed 5`
    return _LOOSE_END.sub("", text[start:].partition("$")[0])
  depth = 1
  for brace in _BRACE.finditer(text, start):
    depth += {"{": 1, "}": -1}.get(brace[0], 0)
    if depth == 0:
      return text[start : brace.start()]
  return _LOOSE_END.sub("", text[start:])


def _equal(prediction: str, gold: str) -> bool:
  # --- The same text.
  if _IDLE_BLANK.sub("", prediction) == _IDLE_BLANK.sub("", gold):
    return True
  # --- Plain numbers, at first without any rewriting: most answers end here.
  ours = number(prediction)
  theirs = number(gold)
  if ours is None or theirs is None:
    prediction = notation.spelled_out(prediction)
    gold = notation.spelled_out(gold)
    if math_text.units_differ(prediction, gold):
      return False
    prediction = notation.without_words(prediction)
    gold = notation.without_words(gold)
    ours = number(prediction)
    theirs = number(gold)
    # Only beside a number: in `5 m^2` and `5m^2`, m may be a variable.
    if ours is None and theirs is not None:
      prediction = notation.without_symbol(prediction)
      ours = number(prediction)
    elif theirs is None and ours is not None:
      gold = notation.without_symbol(gold)
      theirs = number(gold)
  if ours is not None and theirs is not None:
    if "." in prediction + gold:
      return notation.same_decimal(ours, theirs)
    return ours == theirs
  # --- Text that only looks like a formula; then formulas.
  verdict = math_text.verdict(prediction, gold)
  if verdict is not None:
    return verdict
  return _VERIFIER.ask(
    math_text.without_false_units(prediction), math_text.without_false_units(gold)
  )


class _Verifier:
  """A child process for comparisons, started on first use and replaced if it dies."""

  def __init__(self, bare: bool) -> None:
    self._bare = bare
    self._lock = threading.Lock()
    self._child: subprocess.Popen[bytes] | None = None
    atexit.register(self.close)

  def ask(self, prediction: str, gold: str) -> bool:
    """Returns math-verify's verdict; False after more than CPU_SECONDS.

    Raises:
      RuntimeError: the child cannot be started, or gets no CPU time.
    """
    with self._lock:
      # Twice: the first death may be the machine's fault, the second is the answer's. A
      # child that ran out of CPU time is not retried.
      for _ in range(2):
        reply = self._exchange(json.dumps([prediction, gold, CPU_SECONDS]))
        if reply:
          return json.loads(reply)
        # The pipe closes a moment before the return code can be read.
        if self._stop(grace=1.0) == -signal.SIGXCPU:
          break
      return False

  def _exchange(self, request: str) -> bytes:
    """Returns the child's reply; b"" if it died during the request."""
    child = self._child
    if child is None or child.poll() is not None:
      self._stop()
      child = self._start()
    assert child.stdin is not None  # a pipe
    try:
      child.stdin.write(request.encode() + b"\n")
      return _read_line(child)
    except BrokenPipeError:
      return b""
    except TimeoutError:
      self._stop()
      raise RuntimeError(f"math-verify: no verdict in {_WALL_SECONDS} s") from None

  def close(self) -> None:
    """Ends the child."""
    with self._lock:
      self._stop()

  def _start(self) -> subprocess.Popen[bytes]:
    # The child must find this package wherever the parent found it.
    program = (
      f"import sys; sys.path[:] = {sys.path!r}; "
      f"from coa_jax.rewards import math_inside; math_inside.serve({self._bare})"
    )
    child = self._child = subprocess.Popen(
      [sys.executable, "-c", program],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      bufsize=0,
    )
    try:
      ready = _read_line(child)
    except TimeoutError:
      ready = b""
    if not ready:
      self._stop()
      raise RuntimeError(
        "the math-verify process did not start; is math-verify 0.8 or later installed "
        f"for {sys.executable}?"
      )
    return child

  def _stop(self, grace: float = 0.0) -> int | None:
    """Ends the child after `grace` seconds; returns its exit code, None if none ran."""
    child = self._child
    self._child = None
    if child is None:
      return None
    try:
      code = child.wait(grace)
    except subprocess.TimeoutExpired:
      child.kill()
      code = child.wait()
    for pipe in (child.stdin, child.stdout):
      assert pipe is not None
      pipe.close()
    return code


def _read_line(child: subprocess.Popen[bytes]) -> bytes:
  """Reads the child's next line; b"" if it is dead. Raises TimeoutError."""
  # A reply is one short write, so once something can be read the whole line can.
  poll = select.poll()  # not select: a host has descriptors above 1023
  assert child.stdout is not None  # a pipe
  poll.register(child.stdout, select.POLLIN)
  if not poll.poll(_WALL_SECONDS * 1000):
    raise TimeoutError
  return child.stdout.readline()


_VERIFIER = _Verifier(bare=False)
_BARE_VERIFIER = _Verifier(bare=True)

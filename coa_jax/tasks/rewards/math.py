"""Mathematical equivalence of an answer and the gold ones.

Plain numbers are compared exactly, in process. Everything else goes to math-verify
(sympy) in a child process: an answer such as `9^{9^{9^9}}` makes sympy compute without
end, math-verify's own time limit is a signal that only a main thread may use, and a
rollout grades from many threads. A child can be killed; it also caps its own memory.
"""

from __future__ import annotations

import atexit
import fractions
import json
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

# An honest final answer is short; what is longer is refused, not searched.
MAX_CHARS = 1000
# CPU seconds for one comparison (math-verify allows 5 too). Past them the answer is
# wrong; CPU and not wall time, so that a busy machine cannot change a verdict.
CPU_SECONDS = 5
# Wall seconds for a comparison, or for the child to import sympy, on a busy machine.
_WALL_SECONDS = 120.0
_MEMORY_BYTES = 4 << 30

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}|([+-]?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
# "18 dollars": a number and words. Two letters may be `pi`, so words have three.
_WITH_UNIT = re.compile(r"(\S*\d)\s+([A-Za-z]{3,}(?:\s+[A-Za-z]+)?)")
_SCALES = {
  "dozen": 12,
  "hundred": 10**2,
  "thousand": 10**3,
  "lakh": 10**5,
  "million": 10**6,
  "crore": 10**7,
  "billion": 10**9,
  "trillion": 10**12,
  "quadrillion": 10**15,
}
_SCALE = rf"(?:{'|'.join(_SCALES)})"
_SCALED = re.compile(
  rf"(\S*[\d}}])((?:\s+{_SCALE})+)s?\b((?:\s+[A-Za-z]+)*)", re.IGNORECASE
)
# Words after a number that make another one of it. Nouns have no end, so these are
# listed and units are not; a word that is missing here gains an answer nothing that the
# bare number would not.
_NO_UNIT = re.compile(
  rf"""zero | one | two | three | four | five | six | seven | eight | nine | ten
  | eleven | twelve | (thir|four|fif|six|seven|eigh|nine)teen
  | (twen|thir|for|fif|six|seven|eigh|nine)ty | tens | {_SCALE}s?
  | half | halves | thirds? | (eigh|nin|twelf)ths?
  | (four|fif|six|seven|ten|sixteen|twentie|{_SCALE})ths?
  | and | or | not | plus | minus | over | divided | multiplied | raised | choose | mod
  | modulo | squared | cubed | factorial | twice | thrice | sqrt | sin | cos | tan | cot
  | csc | log | exp | lim | det | gcd | lcm | inf | infinity | pi | e | i | x | y | z
  | alpha | beta | gamma | delta | epsilon | theta | lambda | sigma | tau | phi | chi
  | psi | omega""",
  re.VERBOSE | re.IGNORECASE,
)
# What words after a number may be wrapped in: `$5$ \text{ million}`.
_WRAPPING = re.compile(
  r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}|~|\\[ ,;:]|(?<!\\)\$"
)
_PLAIN_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
# What tells that mathematics stands somewhere inside prose.
_INSIDE_PROSE = re.compile(r"\$|\\\(|\\\[|answer is", re.IGNORECASE)


def equivalent(prediction: str, answers: Sequence[str]) -> bool:
  r"""True where the prediction equals one of the answers mathematically.

  Args:
    prediction: the content of an `answer` span; its last `\boxed{}` counts where it has
      one, else all of it.
    answers: gold answers, each a plain string or LaTeX, with or without `$`.

  Raises:
    RuntimeError: the comparing process cannot be started, or gets no CPU time.
  """
  prediction = final_answer(prediction)
  if not prediction or len(prediction) > MAX_CHARS:
    return False
  return any(_equal(prediction, final_answer(gold)) for gold in answers)


def final_answer(text: str) -> str:
  r"""The content of the last balanced `\boxed{}`, or all of `text`, stripped.

  Quotes around it and one pair of `$` are taken off: the released math prompt asks for
  `\boxed{'The final answer goes here.'}`, and some models copy the quotes.
  """
  boxed = _last_boxed(text)
  text = (text if boxed is None else boxed).strip()
  for quote in ("$", "'", '"'):
    inner = text[1:-1]
    if len(text) > 1 and text[0] == text[-1] == quote and quote not in inner:
      text = inner.strip()
  return text


def _last_boxed(text: str) -> str | None:
  start = text.rfind("\\boxed{")
  if start < 0:
    return None
  start += len("\\boxed{")
  depth = 1
  for i in range(start, len(text)):
    depth += {"{": 1, "}": -1}.get(text[i], 0)
    if depth == 0:
      return text[start:i]
  return None


def _equal(prediction: str, gold: str) -> bool:
  if "".join(prediction.split()) == "".join(gold.split()):
    return True
  prediction, gold = _written_out(prediction), _written_out(gold)
  plain = _unwrapped(prediction)
  unit = _WITH_UNIT.fullmatch(plain)
  if unit and any(map(_NO_UNIT.fullmatch, unit[2].split())):
    return _VERIFIER.ask(plain, gold)  # wrapped, it would pass over the words
  ours, theirs = number(unit[1] if unit else prediction), number(gold)
  if ours is not None and theirs is not None:
    if ours == theirs:
      return True
    # A rounded decimal may still stand for a fraction: math-verify decides that.
    if theirs.denominator == 1 and ours.denominator == 1:
      return False
  return _VERIFIER.ask(prediction, gold)


def _written_out(text: str) -> str:
  """`5 million dollars` as `5000000 dollars`; anything else as it is."""
  scaled = _SCALED.fullmatch(_unwrapped(text))
  value = number(scaled[1]) if scaled else None
  if value is None:
    return text
  for word in scaled[2].lower().split():
    value *= _SCALES[word]
  return f"{value}{scaled[3]}"


def _unwrapped(text: str) -> str:
  return " ".join(_WRAPPING.sub(r" \1 ", text).split())


def number(text: str) -> fractions.Fraction | None:
  """The exact value of a plain integer, decimal or fraction; None for all else."""
  text = text.strip().removeprefix("\\$").removeprefix("$").replace(" ", "")
  if _PLAIN_THOUSANDS.fullmatch(text):
    text = _THOUSANDS.sub("", text)
  if _NUMBER.fullmatch(text):
    return fractions.Fraction(text)
  match = _FRACTION.fullmatch(text)
  if match is None:
    return None
  sign = match[1] or match[4]
  over, under = int(match[2] or match[5]), int(match[3] or match[6])
  return fractions.Fraction(-over if sign == "-" else over, under) if under else None


class _Verifier:
  """One child that compares; started on first use, replaced where it dies."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._child: subprocess.Popen[bytes] | None = None
    atexit.register(self.close)

  def ask(self, prediction: str, gold: str) -> bool:
    """math-verify's verdict; False where it takes more than CPU_SECONDS.

    Raises:
      RuntimeError: the child cannot be started, or gets no CPU time.
    """
    with self._lock:
      for _ in range(2):
        reply = self._exchange(json.dumps([prediction, gold, CPU_SECONDS]))
        if reply:
          return json.loads(reply)
        # Its pipe closes a moment before its return code can be read.
        if self._stop(grace=1.0) == -signal.SIGXCPU:
          break
        # Anything else may have been the machine's doing; twice is the answer's.
      return False

  def _exchange(self, request: str) -> bytes:
    """The child's reply; b"" where it died over the request."""
    if self._child is None or self._child.poll() is not None:
      self._stop()
      self._start()
    try:
      self._child.stdin.write(request.encode() + b"\n")
      return _read_line(self._child)
    except BrokenPipeError:
      return b""
    except TimeoutError:
      self._stop()
      raise RuntimeError(f"math-verify: no verdict in {_WALL_SECONDS} s") from None

  def close(self) -> None:
    """Ends the child."""
    with self._lock:
      self._stop()

  def _start(self) -> None:
    # The child must find this package wherever the parent found it.
    program = (
      f"import sys; sys.path[:] = {sys.path!r}; "
      "from coa_jax.tasks.rewards import math; math.serve()"
    )
    self._child = subprocess.Popen(
      [sys.executable, "-c", program],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      bufsize=0,
    )
    try:
      ready = _read_line(self._child)
    except TimeoutError:
      ready = b""
    if not ready:
      self._stop()
      raise RuntimeError(
        "the math-verify process did not start; is math-verify installed for "
        f"{sys.executable}?"
      )

  def _stop(self, grace: float = 0.0) -> int | None:
    """Ends the child after `grace` seconds; its return code, None where none ran."""
    child, self._child = self._child, None
    if child is None:
      return None
    try:
      code = child.wait(grace)
    except subprocess.TimeoutExpired:
      child.kill()
      code = child.wait()
    child.stdin.close()
    child.stdout.close()
    return code


def _read_line(child: subprocess.Popen[bytes]) -> bytes:
  """The child's next line; b"" where it is dead. Raises TimeoutError."""
  # A reply is one short write, so once something can be read the whole line can.
  poll = select.poll()  # not select: a host has descriptors above 1023
  poll.register(child.stdout, select.POLLIN)
  if not poll.poll(_WALL_SECONDS * 1000):
    raise TimeoutError
  return child.stdout.readline()


_VERIFIER = _Verifier()


def serve() -> None:
  """The child: one line [prediction, gold, CPU seconds] in, one boolean out."""
  import resource

  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  import math_verify

  # The CPU limit below bounds the work, so math-verify's own signals are off (None).
  def read(text: str) -> list:
    return math_verify.parse(text, parsing_timeout=None)

  print("ready", flush=True)
  for line in sys.stdin:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    prediction, gold, seconds = json.loads(line)
    limit = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    # A bare formula has no anchor that math-verify would find; a box gives it one.
    prose = _INSIDE_PROSE.search(prediction)
    ours = read(prediction if prose else f"\\boxed{{{prediction}}}")
    theirs = read(f"\\boxed{{{gold}}}")
    verdict = math_verify.verify(theirs, ours, timeout_seconds=None)
    print(json.dumps(bool(verdict)), flush=True)

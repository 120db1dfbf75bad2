"""Extracts an HTML page's main text: a separate program, started once per page.

Markup is hostile: a two-megabyte page can hold trafilatura for a minute, and lxml is C.
So trafilatura runs in its own process with limits on seconds and memory: HTML on
standard input, text on standard output.
"""

from __future__ import annotations

import logging
import resource
import subprocess
import sys

_MEMORY = 1 << 30  # bytes of address space
_CPU_S = 60  # if no parent is left to end the program


def main_text(html: str, seconds: float) -> str:
  """Finds a page's main text, as markdown; "" if none is found in time.

  Args:
    html: the page.
    seconds: the time limit.
  """
  try:
    done = subprocess.run(
      [sys.executable, "-I", __file__],
      input=html.encode("utf-8", "ignore"),
      capture_output=True,
      timeout=seconds,
      env={},  # the program must see none of our variables, above all no keys
      cwd="/",
    )
  except subprocess.TimeoutExpired:
    return ""
  # Ended by a limit or an lxml fault: no text was found.
  if done.returncode != 0:
    return ""
  return done.stdout.decode("utf-8", "ignore")


def _main() -> None:
  import trafilatura  # here, so that importing this module needs no package

  # Before reading the page; the imports until here are trusted.
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
  # trafilatura logs page problems, which nobody reads.
  logging.disable()
  html = sys.stdin.buffer.read().decode("utf-8")
  text = trafilatura.extract(html, output_format="markdown", include_comments=False)
  sys.stdout.buffer.write((text or "").encode("utf-8", "ignore"))


if __name__ == "__main__":
  _main()

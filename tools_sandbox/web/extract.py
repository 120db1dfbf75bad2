"""Extracts the main text of an HTML page: a separate program, started once per page.

Markup is hostile: a page of two megabytes can hold trafilatura for a minute, and lxml
is C. So it runs in its own process with limits on seconds and memory: HTML on standard
input, text on standard output.
"""

from __future__ import annotations

import logging
import resource
import subprocess
import sys

_MEMORY = 1 << 30  # bytes of address space
_CPU_S = 60  # should nobody be there to end it


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
      env={},  # nothing here is its business, keys least of all
      cwd="/",
    )
  except subprocess.TimeoutExpired:
    return ""
  # Ended by a limit, or by a fault of lxml: no text was found.
  if done.returncode != 0:
    return ""
  return done.stdout.decode("utf-8", "ignore")


def _main() -> None:
  import trafilatura  # here, for importing this module needs no package

  # Before reading the page; the imports until here are trusted.
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
  # It logs problems of a page; nobody reads them.
  logging.disable()
  html = sys.stdin.buffer.read().decode("utf-8")
  text = trafilatura.extract(html, output_format="markdown", include_comments=False)
  sys.stdout.buffer.write((text or "").encode("utf-8", "ignore"))


if __name__ == "__main__":
  _main()

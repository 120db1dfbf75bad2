"""Every program's refusal of unusable input."""

from __future__ import annotations

import sys
from typing import NoReturn

_MAX_LINE = 2000  # characters; a value with thousands of digits is cut in its middle


def stop(message: str) -> NoReturn:
  """Ends the program with one line on standard error and exit status 2."""
  line = " ".join(message.split())
  if len(line) > _MAX_LINE:
    line = f"{line[: _MAX_LINE // 2]} ... {line[-_MAX_LINE // 2 :]}"
  print(f"error: {line}", file=sys.stderr)
  sys.exit(2)

"""How every program refuses what it can not use."""

from __future__ import annotations

import sys
from typing import NoReturn


def stop(message: str) -> NoReturn:
  """Ends the program with one line on standard error and exit status 2."""
  print(f"error: {' '.join(message.split())}", file=sys.stderr)
  sys.exit(2)

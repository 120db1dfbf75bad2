"""A chat template's text before and after a user's message.

A template is a program in the model's folder. A process with bounded time and memory
(`template_child`) renders it once, around a probe, before any work on a device. A
template is refused if it fails, or if the probe is missing, changed or repeated.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from coa_jax.protocol import template_child

# Text that no template contains; its characters reveal escaping or splitting. Templates
# may trim white space at the ends, so the probe has none there.
_PROBE = '\ue000 Who\'s <b>"it"</b> & \\n {{x}}?\n\n  \u00e9 \ue000'
_SECONDS = 60  # wall-clock limit; the process's processor time has its own limit


def frame(template: str, special_tokens: Mapping[str, Any]) -> tuple[str, str]:
  """Returns the text before a user's message and the text after it.

  Args:
    template: a Jinja template.
    special_tokens: variables for the template, like `bos_token`.

  Raises:
    ValueError: the template gives no prompt; the message says why.
  """
  text = _render(
    template, json.dumps(dict(special_tokens), sort_keys=True, default=str)
  )
  count = text.count(_PROBE)
  if count != 1:
    if not count and "\ue000" in text:
      raise ValueError("the chat template changes the user's message")
    times = f"{count} times" if count else "nowhere"
    raise ValueError(f"the chat template shows the user's message {times}, not once")
  before, _, after = text.partition(_PROBE)
  return before, after


@functools.cache
def _render(template: str, special_tokens: str) -> str:
  """Renders a template around the probe, in a separate process."""
  variables = {
    **json.loads(special_tokens),
    "messages": [{"role": "user", "content": _PROBE}],
    "add_generation_prompt": True,
    "tools": None,
    "documents": None,
  }
  try:
    done = subprocess.run(
      [sys.executable, "-P", template_child.__file__],
      input=json.dumps({"template": template, "variables": variables}),
      capture_output=True,
      encoding="utf-8",
      timeout=_SECONDS,
      check=False,
    )
    out = json.loads(done.stdout) if done.returncode == 0 else {}
    if done.returncode > 0:  # not ended by a limit
      out = {"error": done.stderr.strip().rpartition("\n")[2]}
  except subprocess.TimeoutExpired:
    out = {"error": f"it takes more than {_SECONDS} s"}
  if "text" in out:
    return out["text"]
  limit = f"{template_child.SECONDS} s or {template_child.BYTES >> 20} MB"
  reason = out.get("error") or f"it takes more than {limit}"
  raise ValueError(f"the chat template cannot be used: {' '.join(reason.split())}")

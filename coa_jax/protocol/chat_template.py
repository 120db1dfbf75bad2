"""A chat template's text: around a user's message, and of whole conversations.

A template is a program in the model's folder. A process with bounded time and memory
(`template_child`) renders it, for `frame` once, around a probe, before any work on a
device. A template is refused if it fails, or if the probe is missing, changed or
repeated.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
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
  text = _framed(
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
def _framed(template: str, special_tokens: str) -> str:
  with Renderer(template, json.loads(special_tokens)) as render:
    return render([{"role": "user", "content": _PROBE}])


class Renderer:
  """Renders conversations with one template, in a separate process; thread-safe."""

  def __init__(self, template: str, special_tokens: Mapping[str, Any]):
    """Starts no process yet; args as in `frame`."""
    self._template = template
    self._special_tokens = dict(special_tokens)
    self._lock = threading.Lock()
    self._process: subprocess.Popen[str] | None = None

  def __enter__(self) -> Renderer:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the process; a later call starts another."""
    with self._lock:
      self._end()

  def _end(self) -> None:
    if self._process is not None:
      self._process.kill()
      self._process.communicate()
      self._process = None

  def __call__(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
  ) -> str:
    """Returns a conversation's text.

    Args:
      messages: OpenAI's messages.
      tools: OpenAI's tools; None for none.
      add_generation_prompt: whether the text ends with the beginning of a reply.

    Raises:
      ValueError: the template fails, or exceeds its limits.
    """
    variables = {
      **self._special_tokens,
      "messages": messages,
      "add_generation_prompt": add_generation_prompt,
      "tools": tools,
      "documents": None,
    }
    line = json.dumps({"template": self._template, "variables": variables}, default=str)
    with self._lock:
      out = self._exchange(line)
    if "text" in out:
      return out["text"]
    limit = f"{template_child.SECONDS} s or {template_child.BYTES >> 20} MB"
    reason = out.get("error") or f"it takes more than {limit}"
    raise ValueError(f"the chat template cannot be used: {' '.join(reason.split())}")

  def _exchange(self, line: str) -> dict[str, str]:
    """Sends a line and reads the answer; {} if the process ended."""
    if self._process is None:
      self._process = subprocess.Popen(
        [sys.executable, "-P", template_child.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
      )
    process = self._process
    assert process.stdin is not None and process.stdout is not None
    late = threading.Timer(_SECONDS, process.kill)
    late.start()
    try:
      process.stdin.write(line + "\n")
      process.stdin.flush()
      answer = process.stdout.readline()
    except BrokenPipeError:
      answer = ""
    finally:
      late.cancel()
    if answer:
      return json.loads(answer)
    self._end()
    return {}

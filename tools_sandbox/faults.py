"""Errors of tools and sandboxes, by their cause."""

from __future__ import annotations


class BadCall(ValueError):
  """The call itself is wrong: the model's fault. The message says how to correct it."""


class ToolFault(Exception):
  """A page or server out there failed, or is refused: the tool's fault."""


class NoJail(RuntimeError):
  """The kernel refuses a jail here: the one reason to advise a weaker wall."""


class Unavailable(Exception):
  """Our own network or service is down: says nothing about the call."""


class SessionEnded(RuntimeError):
  """A program was sent to an ended session; the caller can open a new one."""

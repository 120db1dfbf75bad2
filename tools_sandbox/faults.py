"""Errors of tools and sandboxes, by their cause."""

from __future__ import annotations


class BadCall(ValueError):
  """The call is wrong: the model's fault. The message says how to correct the call."""


class ToolFault(Exception):
  """An outside page or server failed or was refused: the tool's fault."""


class NoJail(RuntimeError):
  """This machine cannot build a jail: the only reason to advise a weaker wall."""


class Unavailable(Exception):
  """Our own network or service is down, which says nothing about the call."""


class Refused(ValueError):
  """A service refuses a request by its own limits."""


class SessionEnded(RuntimeError):
  """A program was sent to an ended session; the caller can open a new one."""

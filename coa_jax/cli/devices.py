"""Refuses devices requested by the environment but missing on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from coa_jax.cli.refusal import stop

_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")


def check_devices(cpu_devices: int = 1) -> None:
  """Makes JAX find its devices, if certain ones are requested.

  Each of several processes calls it after joining the others.

  Args:
    cpu_devices: the flag --cpu_devices.
  """
  asked = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
  if cpu_devices > 1:
    asked.append(f"--cpu_devices={cpu_devices}")
  if not asked:
    return
  import jax

  try:
    jax.devices()
  except (AssertionError, RuntimeError, ValueError) as e:
    # JAX reports a missing GPU by a bare assertion.
    reason = str(e).partition(" (set JAX_PLATFORMS")[0] or "there is no such device"
    stop(
      f"{' '.join(asked)}: {reason.rstrip('.')}. Found: {_found()}; accepted: a "
      "platform that is found, or none of these"
    )


def _found() -> str:
  """Returns the platforms found by JAX without any request."""
  import jax
  from jax.extend import backend

  jax.config.update("jax_platforms", "")
  jax.config.update("jax_platform_name", "")
  jax.config.update("jax_num_cpu_devices", -1)
  with _silent():
    backend.clear_backends()
    try:
      return ", ".join(sorted({device.platform for device in jax.devices()}))
    except (AssertionError, RuntimeError):
      return "nothing"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
  """Discards the output of C++ libraries to standard error."""
  kept = os.dup(2)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)

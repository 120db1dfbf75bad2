"""The objects below one address of a bucket, gs:// or s3://, through fsspec.

An object is written whole or not at all; nothing is ever appended to one (gcsfs would
overwrite it). Faults that pass - a 503, a connection that breaks off - are tried again;
what stays is a `BucketError` of one line.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import fsspec

_EXTRAS = {"gs": "gcs", "s3": "s3"}  # scheme -> extra of setup.py
_TRIES = 6
_FIRST_WAIT_S = 0.2  # doubled from one try to the next
_PATIENCE_S = 300.0  # after which none is begun: the libraries try again, too
_SILENT_S = 120.0  # of a store that has been asked, after which a request has failed
_WHOLE = 1 << 26  # bytes that are read at once: a file that grows meanwhile is no fault
_THREADS = 8


class BucketError(ValueError):
  """A bucket can not be used; the message names the address and what is wrong."""


def is_uri(path: str) -> bool:
  """Says whether a path is an address, of a bucket or of anything else."""
  return "://" in path


@dataclasses.dataclass(frozen=True)
class Stored:
  """What a bucket says of an object.

  Attributes:
    size: in bytes.
    tag: another one whenever the object is written.
  """

  size: int
  tag: str


class Bucket:
  """The objects below one address; names are relative to it."""

  def __init__(self, uri: str):
    """Opens nothing yet.

    Raises:
      BucketError: the scheme is unknown, or its library is not installed.
    """
    scheme, _, path = uri.partition("://")
    self.uri = f"{scheme}://{path.strip('/')}"
    self._root = path.strip("/")
    if scheme not in _EXTRAS or not self._root:
      raise BucketError(f"{uri}: accepted: gs://BUCKET/PATH, s3://BUCKET/PATH, a path")
    try:
      # No cache of listings: other processes write there, too.
      self._fs = fsspec.filesystem(
        scheme, use_listings_cache=False, skip_instance_cache=True, **_timeouts(scheme)
      )
    except ImportError as e:
      extra = _EXTRAS[scheme]
      raise BucketError(
        f"{uri}: {scheme}:// needs extra {extra!r}: pip install -e '.[{extra}]'"
      ) from e
    except Exception as e:  # whatever the search for credentials raises
      raise self._fault(e) from e
    # They tell of every fault that they raise as well, with its traceback.
    for name in ("gcsfs", "google.auth"):
      logging.getLogger(name).setLevel(logging.CRITICAL)

  def list(self, below: str = "") -> dict[str, Stored]:
    """Lists all objects, by name; an object at the very address is called "".

    Args:
      below: only those in this folder.
    """
    found = self._tried(self._fs.find, self._path(below), detail=True)
    out = {}
    for path, details in sorted(found.items()):
      tag = details.get("generation") or details.get("ETag") or details.get("etag")
      name = path.removeprefix(self._root).removeprefix("/")
      if not path.endswith("/"):  # what some tools write for an empty folder
        out[name] = Stored(int(details["size"]), str(tag))
    return out

  def read(self, name: str) -> bytes | None:
    """Reads an object; None where there is none."""
    try:
      return self._tried(self._fs.cat_file, self._path(name))
    except FileNotFoundError:
      return None

  def write(self, name: str, data: bytes) -> None:
    """Writes an object, over one that is there."""
    self._tried(self._fs.pipe_file, self._path(name), data)

  def create(self, name: str, data: bytes) -> bool:
    """Writes an object unless there is one: of several who try, one does.

    Args:
      name: of the object.
      data: no two who try have the same.
    """
    try:
      self._tried(self._fs.pipe_file, self._path(name), data, mode="create")
    except FileExistsError:
      # Ours, where the answer to an earlier try was lost.
      return self.read(name) == data
    return True

  def delete(self, name: str) -> None:
    """Deletes an object; one that is not there is no fault."""
    with contextlib.suppress(FileNotFoundError):
      self._tried(self._fs.rm_file, self._path(name))

  def put(self, path: str, name: str) -> None:
    """Writes a file to an object, as it is now."""

    def write_in_pieces() -> None:
      try:
        self._fs.put_file(path, self._path(name))
      except FileNotFoundError as e:
        if not os.path.exists(path):
          raise
        # A store may lose what it had of the pieces.
        raise ConnectionError(f"the upload of {name} was lost") from e

    if os.path.getsize(path) > _WHOLE:
      self._tried(write_in_pieces)
      return
    with open(path, "rb") as f:
      self.write(name, f.read())

  def get(self, name: str, path: str, size: int) -> None:
    """Reads an object to a file, which is there once it is whole.

    Args:
      name: of the object.
      path: of the file; folders above are made.
      size: that it must have.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    unfinished = f"{path}.tmp"

    def read() -> None:
      self._fs.get_file(self._path(name), unfinished)
      if os.path.getsize(unfinished) != size:
        raise EOFError(f"{os.path.getsize(unfinished)} of {size} bytes came")

    self._tried(read)
    os.replace(unfinished, path)

  def _path(self, name: str) -> str:
    return f"{self._root}/{name}" if name else self._root

  def _tried(self, do: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Does it, again where a fault may pass.

    Raises:
      FileNotFoundError, FileExistsError: of the object.
      BucketError: it can not be done.
    """
    began = time.monotonic()
    for attempt in range(_TRIES):
      try:
        return do(*args, **named)
      except (FileNotFoundError, FileExistsError):
        raise
      except Exception as e:  # each library has errors of its own
        late = time.monotonic() - began > _PATIENCE_S
        if late or attempt + 1 == _TRIES or _is_final(e):
          raise self._fault(e) from e
        time.sleep(_FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")

  def _fault(self, error: Exception) -> BucketError:
    return BucketError(f"{self.uri}: {str(error) or type(error).__name__}")


def _timeouts(scheme: str) -> dict[str, Any]:
  """Options of a client that waits for a silent store, and not for ever.

  By themselves gcsfs waits without end, and s3fs for 15 s: a store may take longer to
  put an object of gigabytes together.
  """
  if scheme == "s3":
    return {"config_kwargs": {"read_timeout": _SILENT_S}}
  import aiohttp  # gcsfs's own way to ask

  # Not for the whole of a request: an object may be of any size.
  timeout = aiohttp.ClientTimeout(sock_connect=_SILENT_S, sock_read=_SILENT_S)
  return {"requests_timeout": timeout}


def _is_final(error: Exception) -> bool:
  """Whether to try again is of no use: what is asked is not allowed."""
  refused = isinstance(error, PermissionError) or str(error).startswith("Forbidden")
  return refused or str(getattr(error, "code", "")) in ("400", "401", "403")


def at_once(do: Callable[[Any], Any], items: Iterable[Any]) -> None:
  """Does it of each item, several at a time; raises what went wrong first."""
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
    list(threads.map(do, items))

"""Reads and writes objects below a bucket address (gs://, s3://), through fsspec.

Objects are written whole or not at all, and never appended to: gcsfs would overwrite
them. Transient faults (a 503, a broken connection) are retried; a lasting fault is a
one-line `BucketError`. A store without any answer at first use is refused within
seconds.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import logging
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fsspec
import fsspec.asyn

from coa_jax.runtime.names import check_name, check_names, path_below

_EXTRAS = {"gs": "gcs", "s3": "s3"}  # scheme -> extra in pyproject.toml
_TRIES = 6
_FIRST_WAIT_S = 0.2  # doubled from one try to the next
_PATIENCE_S = 300.0  # after which no try begins: the libraries retry, too
_SILENT_S = 120.0  # a request fails after this silence from the store
_REACH_S = 10.0  # for a store's answer at first use
_WHOLE = 1 << 26  # bytes read at once: a file growing meanwhile is not a fault
_THREADS = 8
_REACHED: set[str] = set()  # endpoints that have answered this process
# S3 requests that replace or delete an object.
_ENDS_OF_S3 = ("put_object", "complete_multipart_upload", "delete_object")


class BucketError(ValueError):
  """A bucket can not be used; the message names the address and the fault."""


def is_uri(path: str) -> bool:
  """Whether a path is a URI, for a bucket or anything else."""
  return "://" in path


@dataclasses.dataclass(frozen=True)
class Stored:
  """An object's state in the bucket.

  Attributes:
    size: in bytes.
    tag: changes with every write.
  """

  size: int
  tag: str


class Bucket:
  """The objects below one address; object names are relative to that address."""

  def __init__(self, uri: str):
    """Checks once per store that the store answers; opens nothing yet.

    Raises:
      BucketError: the scheme is unknown, its library is not installed, or the store
        can not be reached.
      ValueError: a part of the address is not a valid name.
    """
    scheme, _, path = uri.partition("://")
    self.uri = f"{scheme}://{path.strip('/')}"
    self._root = path.strip("/")
    if scheme not in _EXTRAS or not self._root:
      raise BucketError(f"{uri}: accepted: gs://BUCKET/PATH, s3://BUCKET/PATH, a path")
    check_name(self._root, uri)
    began = time.monotonic()
    try:
      # No listings cache: other processes write there, too.
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
    # These libraries also log the traceback of every fault that they raise.
    for name in ("gcsfs", "google.auth"):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    self._reach(began)

  def list(self, below: str = "") -> dict[str, Stored]:
    """Lists all objects, or those in folder `below`, by name.

    An object exactly at the address has the name "".
    """
    try:
      found = self._tried(self._fs.find, self._path(below), detail=True)
    except FileNotFoundError as e:
      raise BucketError(f"{self.uri}: there is no such bucket ({e})") from e
    out = {}
    for path, details in sorted(found.items()):
      tag = details.get("generation") or details.get("ETag") or details.get("etag")
      name = path.removeprefix(self._root).removeprefix("/")
      if not path.endswith("/"):  # some tools write such objects for empty folders
        out[name] = Stored(int(details["size"]), str(tag))
    return out

  def read(self, name: str) -> bytes | None:
    """Returns an object's bytes; None for a missing object."""
    try:
      return self._tried(self._fs.cat_file, self._path(name))
    except FileNotFoundError:
      return None

  def write(self, name: str, data: bytes) -> None:
    """Writes an object; replaces any existing one."""
    self._tried(self._fs.pipe_file, self._path(name), data)

  def create(self, name: str, data: bytes) -> bool:
    """Writes an object if missing: exactly one of several writers succeeds.

    Each writer needs unique `data`. Returns whether this writer succeeded.
    """
    try:
      self._tried(self._fs.pipe_file, self._path(name), data, mode="create")
    except FileExistsError:
      # The object is ours if the answer to an earlier try was lost.
      return self.read(name) == data
    return True

  def delete(self, name: str, seen: Stored | None = None) -> None:
    """Deletes an object; a missing one is not a fault.

    With `seen` the object must be in that state.

    Raises:
      FileExistsError: the object has changed since `seen`.
    """
    fs = _IfSeen(self._fs, seen) if seen else self._fs
    with contextlib.suppress(FileNotFoundError):
      self._tried(fs.rm_file, self._path(name))

  def put(self, path: str, name: str, seen: Stored | bool | None = True) -> None:
    """Writes a file's current contents to an object.

    Args:
      seen: the object's required state: None for a missing object, True for any.

    Raises:
      FileExistsError: the object has changed since `seen`.
    """
    fs = self._fs if seen is True else _IfSeen(self._fs, seen)

    def write_in_pieces() -> None:
      try:
        fs.put_file(path, self._path(name))
      except FileNotFoundError as e:
        if not os.path.exists(path):
          raise
        # A store may lose uploaded pieces.
        raise ConnectionError(f"the upload of {name} was lost") from e

    if os.path.getsize(path) > _WHOLE:
      self._tried(write_in_pieces)
      return
    with open(path, "rb") as f:
      self._tried(fs.pipe_file, self._path(name), f.read())

  def get_all(self, objects: Mapping[str, Stored], folder: str) -> None:
    """Reads objects into files below a folder private to this process.

    Args:
      objects: objects by name; the object "" becomes the file `folder` itself.
      folder: the files' folder, made here.

    Raises:
      ValueError: a name leads out of the folder, or two names can not both be files.
    """
    check_names(filter(None, objects), self.uri)
    if "" in objects and len(objects) > 1:
      raise BucketError(f"{self.uri}: is an object and a folder of objects")

    def get(name: str) -> None:
      path = path_below(folder, name, self.uri) if name else folder
      os.makedirs(os.path.dirname(path), exist_ok=True)
      self._tried(self._get, name, path, objects[name].size)

    at_once(get, objects)

  def _get(self, name: str, path: str, size: int) -> None:
    self._fs.get_file(self._path(name), path)
    got = os.path.getsize(path)
    if got != size:
      raise EOFError(f"{got} of {size} bytes came")

  def _path(self, name: str) -> str:
    return f"{self._root}/{name}" if name else self._root

  def _tried(self, do: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls `do`, with retries on transient faults.

    Raises:
      FileNotFoundError, FileExistsError: the object is missing, or exists or changed.
      BucketError: the call fails for good.
    """
    began = time.monotonic()
    for attempt in range(_TRIES):
      try:
        return do(*args, **named)
      except (FileNotFoundError, FileExistsError):
        raise
      except Exception as e:  # each library has its own errors
        if "PreconditionFailed" in repr(e.__cause__):
          raise FileExistsError(f"{self.uri}: an object was changed") from e
        late = time.monotonic() - began > _PATIENCE_S
        if late or attempt + 1 == _TRIES or _is_final(e):
          raise self._fault(e) from e
        time.sleep(_FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")

  def _reach(self, began: float) -> None:
    """Raises BucketError unless something answers at the store's endpoint, in time.

    The libraries would try for minutes. Any answer suffices: the request is empty.

    Args:
      began: start of the client's creation, whose search for credentials takes time.
    """
    if "gcs" in self._fs.protocol:
      endpoint = self._fs._location
    else:
      endpoint = self._tried(self._fs.connect).meta.endpoint_url
    if endpoint in _REACHED:
      return
    said = ["it does not answer"]  # the last: "" after an answer, else the reason
    end = max(began + _REACH_S, time.monotonic() + 2)

    def ask() -> None:
      while said[-1] and time.monotonic() < end:
        said.append(_ask(endpoint, _REACH_S / 2))
        time.sleep(0.2 if said[-1] else 0)

    # In a thread: the name server's answer has no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(end - time.monotonic())
    if said[-1]:
      raise BucketError(
        f"{self.uri}: no store can be reached at {endpoint} ({said[-1]})"
      )
    _REACHED.add(endpoint)

  def _fault(self, error: Exception) -> BucketError:
    return BucketError(f"{self.uri}: {str(error) or type(error).__name__}")


class _IfSeen:
  """A client whose uploads and deletes require the object's seen state.

  gcsfs and s3fs can require only a missing object; stores can require any state.
  """

  def __init__(self, fs: Any, seen: Stored | None):
    """Takes the client, and the object's state: None for a missing one."""
    self._fs = fs
    self._seen = seen

  def __getattr__(self, name: str) -> Any:
    return getattr(self._fs, name)

  def put_file(self, path: str, to: str) -> None:
    """Like the client's `put_file`."""
    fsspec.asyn.sync(self._fs.loop, self._method("_put_file"), self, path, to)

  def pipe_file(self, to: str, data: bytes) -> None:
    """Like the client's `pipe_file`."""
    fsspec.asyn.sync(self._fs.loop, self._method("_pipe_file"), self, to, data)

  def rm_file(self, path: str) -> None:
    """Like the client's `rm_file`."""
    fsspec.asyn.sync(self._fs.loop, self._method("_rm_file"), self, path)

  def _method(self, name: str) -> Callable[..., Any]:
    """Returns the client's unbound coroutine method; `self` then sends its requests."""
    if "gcs" in self._fs.protocol:
      import gcsfs.core  # not subclasses for other bucket kinds

      return getattr(gcsfs.core.GCSFileSystem, name)
    return getattr(type(self._fs), name)

  async def _call(self, method: str, path: str, *args: Any, **named: Any) -> Any:
    """Sends a conditional gcsfs request; an upload's later pieces need no condition."""
    if "upload_id=" not in path:
      named["ifGenerationMatch"] = self._seen.tag if self._seen else "0"
    return await self._fs._call(method, path, *args, **named)

  async def _call_s3(self, method: str, *args: Any, **named: Any) -> Any:
    """Sends an s3fs request, conditional if it replaces or deletes an object."""
    if method in _ENDS_OF_S3:
      named |= {"IfMatch": self._seen.tag} if self._seen else {"IfNoneMatch": "*"}
    return await self._fs._call_s3(method, *args, **named)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
  """Treats a redirect as an answer."""

  def redirect_request(self, *unused: Any) -> None:
    """Follows no redirect."""


def _ask(endpoint: str, seconds: float) -> str:
  """Asks an endpoint once; returns "" after any answer, else the reason."""
  # No certificate check here: the client itself makes one.
  context = ssl.create_default_context()
  context.check_hostname = False
  context.verify_mode = ssl.CERT_NONE
  handler = urllib.request.HTTPSHandler(context=context)
  try:
    opener = urllib.request.build_opener(_NoRedirect, handler)
    opener.open(endpoint, timeout=seconds).close()
  except urllib.error.HTTPError:
    return ""
  except urllib.error.URLError as e:
    return str(getattr(e.reason, "strerror", "") or e.reason)
  except (OSError, ValueError, http.client.HTTPException) as e:
    return str(e) or type(e).__name__
  return ""


def _timeouts(scheme: str) -> dict[str, Any]:
  """Returns client options that bound the wait for a silent store.

  By default gcsfs waits forever, and s3fs only 15 s, although a store may need longer
  to assemble an object of several gigabytes.
  """
  if scheme == "s3":
    return {"config_kwargs": {"read_timeout": _SILENT_S}}
  import aiohttp  # gcsfs's own HTTP client

  # No limit for a whole request: an object may have any size.
  timeout = aiohttp.ClientTimeout(sock_connect=_SILENT_S, sock_read=_SILENT_S)
  return {"requests_timeout": timeout}


def _is_final(error: Exception) -> bool:
  """Whether a retry is useless: the store refuses the request."""
  refused = isinstance(error, PermissionError) or str(error).startswith("Forbidden")
  return refused or str(getattr(error, "code", "")) in ("400", "401", "403")


def at_once(do: Callable[[Any], Any], items: Iterable[Any]) -> None:
  """Calls `do` on each item, several at a time; raises the first error."""
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
    list(threads.map(do, items))

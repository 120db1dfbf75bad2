"""A client of one running `vllm serve`, over HTTP: token ids in and out, weights in.

vLLM lives in its own environment and is never imported: with VLLM_SERVER_DEV_MODE=1 it
offers the required functions (completions over ids, reloading weights) over HTTP.
Written against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import shutil
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import httpx

from coa_jax.model.distribution import GREEDY_BELOW, Truncation
from coa_jax.runtime.fields import bounded, check_fields
from tools_sandbox.http_client import Fault, NoReply, Retries

T = TypeVar("T")
# The value of --logits-processors, for `rollout.constrain`.
PROCESSOR = "coa_jax.rollout.vllm.plugin:Grammar"
# Retries after the first attempt, on 408, 409, 429, 5xx, timeouts, cut connections and
# invalid answers.
_RETRIES = 3
_CLOSE_S = 5.0  # `close` waits this long for open connections


@dataclasses.dataclass(frozen=True)
class VllmConfig:
  """Config section `vllm`: trajectories are sampled by `vllm serve`.

  Attributes:
    folder: the policy's export folder, visible to the server under the same absolute
      name; overwritten at every refresh.
    url: a running server's URL, without a path; several processes share the server.
    serve: the `vllm` program in its own environment: instead of using `url`, every
      process starts a server on loopback and ends it with the run.
    flags: additional flags for that server.
    start_s: maximum seconds for its start.
    timeout_s: seconds to wait for one turn of a trajectory, or one weight load.
    request_tokens: maximum tokens per request if the policy changes during rollouts
      (algo.sampling.staleness): the next policy waits for the running requests.
    max_logp_diff: maximum mean difference in nats between the server's and the model's
      log-probs of prompt tokens. 0.05 leaves room for bfloat16; two float32
      programs stay under 1e-4.
  """

  folder: str
  url: str = "http://127.0.0.1:8000"
  serve: str = ""
  flags: tuple[str, ...] = ()
  start_s: float = bounded(600.0, above=0)
  timeout_s: float = bounded(600.0, above=0)
  request_tokens: int = bounded(256, least=1)
  max_logp_diff: float = bounded(0.05, above=0)
  # Seconds before the first retry; doubled for each further one, up to `timeout_s`.
  backoff_s: ClassVar[float] = 1.0

  def __post_init__(self):
    check_fields(self)
    if not self.url.startswith(("http://", "https://")):
      raise ValueError(f"url {self.url!r} must start with http:// or https://")
    if not self.folder:
      raise ValueError("folder: name a folder that the server can read")
    if self.serve and self.url != VllmConfig.url:
      raise ValueError(
        f"serve {self.serve!r} starts a server, url {self.url!r} asks one that runs: "
        "leave one of them out"
      )
    if self.serve and not shutil.which(self.serve):
      raise ValueError(
        f"serve {self.serve!r} is no program; name the bin/vllm of vLLM's environment"
      )
    if self.flags and not self.serve:
      raise ValueError(
        "flags need vllm.serve: they are passed to the server that it starts"
      )


class VllmError(ValueError):
  """The server is unusable in its current state; the message has the remedy.

  A ValueError, so that the launchers report it in one line like other wrong input.
  """


class UnansweredError(VllmError):
  """One request got no usable answer in all its attempts; others may succeed."""


class VllmServer:
  """A client of one server; requests run concurrently on a separate thread.

  `close` ends that thread and disconnects; it also runs after the last reference to the
  client is gone.
  """

  def __init__(
    self,
    config: VllmConfig,
    max_len: int,
    vocab_size: int,
    masks: bool = False,
    samples: bool = True,
  ):
    """Connects and checks the server's model and flags.

    Args:
      vocab_size: V; ids from V on are refused.
      masks: whether the server needs our logits processor.
      samples: False for a server that only scores, which needs no flags.

    Raises:
      VllmError: there is no such server, or it lacks a flag (the message names it).
    """
    self._config = config
    self._vocab_size = vocab_size
    self._client = httpx.AsyncClient(
      base_url=config.url,
      timeout=httpx.Timeout(config.timeout_s, connect=10.0, pool=None),
      # The scheduler bounds concurrent requests.
      limits=httpx.Limits(max_connections=None),
      trust_env=False,  # no proxy for loopback and a cluster's own hosts
    )
    # Not anyio's portal: it cannot be ended from its own thread, which may drop
    # the last reference to this client.
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    self._loop = runner.get_loop()
    thread = threading.Thread(
      target=_work, args=(runner, self._client), name="vllm", daemon=True
    )
    thread.start()
    self.close = weakref.finalize(self, _end, self._loop, thread)
    try:
      self._name = self._meet(max_len, masks, samples)
    except BaseException:
      self.close()
      raise

  def _meet(self, max_len: int, masks: bool, samples: bool) -> str:
    """Returns the served model's name; args as `__init__`."""
    config = self._config
    # --- The served model, and its maximum row length.
    served = self._now("GET", "/v1/models", read=lambda x: x["data"][0])
    longest = served.get("max_model_len") or 0
    if longest < max_len:
      raise VllmError(
        f"{config.url} serves rows of {longest} tokens, rollout.max_len={max_len}: "
        "start it with a larger --max-model-len"
      )
    if not samples:
      return served["id"]
    # --- Its flags.
    model = self._now(
      "GET",
      "/server_info?config_format=json",
      read=lambda x: x["vllm_config"]["model_config"],
    )
    if model.get("logprobs_mode") != "processed_logprobs":
      raise VllmError(
        f"{config.url} reports log-probs in mode {model.get('logprobs_mode')!r}, which "
        "are not those of the distribution it samples from: start it with "
        "--logprobs-mode=processed_logprobs"
      )
    if masks and PROCESSOR not in (model.get("logits_processors") or ()):
      raise VllmError(
        f"rollout.constrain=True: {config.url} does not mask tokens by our grammar; "
        f"start it with --logits-processors={PROCESSOR} and PYTHONPATH naming this "
        "repository, let vllm.serve start one, or set rollout.constrain=False"
      )
    return served["id"]

  def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Starts this client's coroutine; cancelling the future disconnects."""
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

  async def complete(
    self,
    ids: list[int],
    most: int,
    stops: Sequence[str],
    temperature: float,
    truncation: Truncation,
    seed: int,
    grammar: tuple[str, int] | None = None,
  ) -> tuple[list[int], list[float]]:
    """Samples from one to `most` tokens after `ids`.

    budget: the body sets every sampling parameter, field by field.

    Args:
      stops: texts after which the server may stop, or not.
      temperature: below `GREEDY_BELOW`, sampling is greedy.
      grammar: a file of tables and the initial state; see `vllm.plugin`.

    Returns:
      The ids, and each id's log p (nats) under its sampling distribution; for greedy
      ids, under the untruncated distribution at temperature 1.

    Raises:
      UnansweredError: no usable answer in all attempts.
      VllmError: the server refuses the request, or is gone.
    """
    # --- The request's body.
    body = {
      "model": self._name,
      "prompt": ids,
      "max_tokens": most,
      "temperature": temperature if temperature >= GREEDY_BELOW else 0.0,
      "top_k": truncation.top_k,
      "top_p": truncation.top_p,
      # A model folder's generation config would override these.
      "min_p": 0.0,
      "repetition_penalty": 1.0,
      "presence_penalty": 0.0,
      "frequency_penalty": 0.0,
      "seed": seed,
      "stop": list(stops),
      "include_stop_str_in_output": True,
      # Tags may be special tokens, and only a tag stops a trajectory.
      "skip_special_tokens": False,
      "spaces_between_special_tokens": False,
      "ignore_eos": True,
      "add_special_tokens": False,
      "logprobs": 0,
      "return_token_ids": True,
    }
    if grammar:
      body["vllm_xargs"] = {"coa_grammar": grammar[0], "coa_state": grammar[1]}

    # --- The answer's checks.
    def read(answer: Any) -> tuple[list[int], list[float]]:
      # Every answer is checked: a wrong id would enter training.
      choice = answer["choices"][0]
      new = choice["token_ids"]
      logps = choice["logprobs"]["token_logprobs"]
      if choice["prompt_token_ids"] != ids:
        raise ValueError("the prompt it read has other ids")
      if not 1 <= len(new) <= most or len(new) != len(logps):
        raise ValueError(f"{len(new)} ids and {len(logps)} log-probs of {most}")
      for i, logp in zip(new, logps, strict=True):
        if type(i) is not int or not 0 <= i < self._vocab_size:
          raise ValueError(f"ids that are not below {self._vocab_size}")
        # vLLM reports -9999 instead of minus infinity: never a drawn token.
        if not -9999 < logp < 1e-4:
          raise ValueError("numbers that are no log-probs of drawn tokens")
      return new, logps

    # --- The request; without an answer, is the request or the server at fault?
    try:
      return await self._ask("POST", "/v1/completions", body, read)
    except UnansweredError as e:
      # One bad request does not affect the others; a lost server does.
      try:
        await self._ask("GET", "/v1/models", None, lambda x: x["data"][0])
      except UnansweredError:
        raise VllmError(f"the server is gone: {e}") from e
      raise

  def score(self, ids: list[int]) -> list[float]:
    """Returns log p (nats, temperature 1) of all ids but the first, given prefixes."""
    body = {
      "model": self._name,
      "prompt": ids,
      "max_tokens": 1,
      "temperature": 0.0,
      "prompt_logprobs": 0,
      "return_token_ids": True,
      "add_special_tokens": False,
    }

    def read(answer: Any) -> list[float]:
      choice = answer["choices"][0]
      if choice["prompt_token_ids"] != ids:
        raise ValueError("the prompt it read has other ids")
      # One row per token: the likeliest ids and the prompt's own; none for the first.
      logps = []
      for row, i in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True):
        logps.append(float(row[str(i)]["logprob"]))
      return logps

    return self._now("POST", "/v1/completions", body, read)

  def load(self, folder: str) -> None:
    """Loads a model folder of the same architecture and clears cached prefixes.

    Raises:
      VllmError: the server fails to load the folder or to clear the prefixes.
    """
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    self._now("POST", "/collective_rpc", reload, lambda x: x["results"])

    # Otherwise prefixes from the older weights would still be used.
    def read(answer: Any) -> None:
      if answer["success"] is not True:  # running requests hold their blocks
        raise ValueError("cached prefixes are still in use")

    self._now("POST", "/reset_prefix_cache", read=read)

  def _now(
    self,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    read: Callable[[Any], T] = lambda x: x,
  ) -> T:
    return self.submit(self._ask(method, path, body, read)).result()

  async def _ask(
    self,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    read: Callable[[Any], T],
  ) -> T:
    """Returns `read(answer)`; `read` raises on an invalid answer."""
    c = self._config
    retries = Retries(_RETRIES, c.backoff_s, max_pause_s=c.timeout_s)
    # `retries` returns the pause after a fault, and raises NoReply after the last try.
    try:
      while True:
        try:
          response = await self._client.request(method, path, json=body)
          if response.status_code == 200:
            return read(response.json())
          pause = retries.refused(response.status_code, response.headers, response.text)
        except httpx.TimeoutException:
          pause = retries.failed(Fault(f"no reply within {c.timeout_s:g} s"))
        except httpx.RequestError as e:
          pause = retries.failed(Fault(type(e).__name__, str(e)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
          detail = f"{type(e).__name__}: {e}"
          pause = retries.failed(Fault("not what was asked for", detail))
        await asyncio.sleep(pause)
    except NoReply as e:
      if e.refusal:
        raise VllmError(f"{c.url}{path} refuses the request, {e}. {_START}") from None
      raise UnansweredError(
        f"{c.url}{path} gave no usable answer in {len(e.faults)} attempts; the last: "
        f"{e}. {_START}"
      ) from None


def _work(runner: asyncio.Runner, client: httpx.AsyncClient) -> None:
  """Runs a client's thread until `_end` stops its loop."""
  loop = runner.get_loop()
  loop.run_forever()
  loop.run_until_complete(client.aclose())
  runner.close()  # cancels running requests


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
  loop.call_soon_threadsafe(loop.stop)
  # An unreferenced client may be finalized in any thread, including this one.
  if threading.current_thread() is not thread:
    thread.join(_CLOSE_S)


_START = (
  "Is vllm.url right, and does `vllm serve` run there with VLLM_SERVER_DEV_MODE=1 "
  "(docs/vllm.md)?"
)

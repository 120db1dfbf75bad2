"""`coa serve --agents`: the model for agents with loops and tools of their own."""

from __future__ import annotations

import contextlib

import ml_collections
from absl import flags

from coa_jax.rollout.agents import server
from coa_jax.rollout.agents.config import FORMATS
from coa_jax.serve import open_recorder
from tools_sandbox import http_server

FORMAT = flags.DEFINE_enum(
  "agents",
  "",
  ["", *FORMATS],
  "Serve the model to agents with loops and tools of their own: by the folder's chat "
  "template, or by the protocol's spans.",
)
_RECORD = flags.DEFINE_string(
  "record",
  None,
  "With --agents: folder for the trajectories, each named by its requests' header "
  "X-Trajectory.",
)
_GRACE_S = 3


def serve(
  config: ml_collections.ConfigDict,
  host: str,
  port: int,
  name: str,
  allowed_hosts: list[str],
  max_waiting: int,
) -> None:
  """Serves until stopped; the arguments are the flags of `coa serve`."""
  with (
    contextlib.suppress(KeyboardInterrupt),
    http_server.bind(host, port) as sock,
    open_recorder(config, FORMAT.value, _RECORD.value) as recorder,
  ):
    hosts = http_server.open_hosts(host, allowed_hosts, "use the model")
    worker = recorder.worker
    app = server.make_app(
      recorder.find,
      worker.tokenizer,
      list(hosts),
      name,
      recorder.end,
      most=worker.engine.capacity + max_waiting,
    )
    url = http_server.listen(sock, host)
    print(f"serving {config.init} as {name!r} to agents at {url}/v1", flush=True)
    http_server.Server(app, _GRACE_S).run(sockets=[sock])

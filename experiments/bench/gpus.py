"""Describes absent GPUs to XLA's CUDA compiler.

  pip install 'jax[cuda13]'   (the compiler; it needs neither a GPU nor a driver)

Without a GPU, XLA does not autotune kernels: programs use its first choices.
"""

from __future__ import annotations

import importlib.util
import os
import re

import jax
from jax.experimental import topologies

_A_HOST = 8  # GPUs
# XLA's facts about a GPU (GpuTargetConfigProto). Sources: NVIDIA's CUDA programming
# guide, compute capability 9.0, and both data sheets.
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_TARGETS = {
  "h100": _HOPPER.format(
    name="NVIDIA H100 80GB HBM3", bandwidth=3_350_000_000_000, memory=85_520_809_984
  ),
  "h200": _HOPPER.format(
    name="NVIDIA H200", bandwidth=4_800_000_000_000, memory=150_754_820_096
  ),
}


def read_gpus(text: str) -> tuple[str, int] | None:
  """Reads a kind and a number, as in h100:8; None for any other text.

  Raises:
    ValueError: the GPUs are neither within one host nor whole hosts.
  """
  match = re.fullmatch(rf"({'|'.join(_TARGETS)}):(\d+)", text)
  if not match:
    return None
  count = int(match[2])
  if not count or (count > _A_HOST and count % _A_HOST):
    raise ValueError(
      f"--slice={text}: give up to {_A_HOST} of one host, or whole hosts"
    )
  return match[1], count


def gpus(kind: str, count: int) -> list[jax.Device]:
  """Returns `count` GPUs, in hosts with eight each, for the compiler."""
  if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
    raise ValueError("this needs the compiler for GPUs: pip install 'jax[cuda13]'")
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver
  a_host = min(count, _A_HOST)
  described = topologies.get_topology_desc(
    kind,
    platform="cuda",
    target_config=_TARGETS[kind],
    topology=f"1x{count // a_host}x{a_host}",  # groups, hosts, GPUs per host
  )
  return list(described.devices)

"""Loads a model and prints how much memory that took; see test_memory.py.

  python tests/model/read_in_memory.py FOLDER

Prints bytes: all parameters, the largest one, and the maximum growth of the process's
own memory (RssAnon in /proc/self/status, read every millisecond). Pages of a mapped
file do not count: the system takes them back when it needs them.
"""

from __future__ import annotations

import json
import sys
import threading

import jax
import jax.numpy as jnp

from coa_jax.model.hf.io import load_model


def own_memory() -> int:
  """Returns RssAnon in bytes."""
  with open("/proc/self/status", encoding="ascii") as f:
    (line,) = (line for line in f if line.startswith("RssAnon:"))
  return int(line.split()[1]) * 1024


def main(folder: str) -> None:
  """Loads the model while a thread watches the memory."""
  jnp.zeros(8).block_until_ready()  # starts the devices before measuring
  begin, most, over = own_memory(), [], threading.Event()

  def watch() -> None:
    while not over.wait(1e-3):
      most.append(own_memory())

  watching = threading.Thread(target=watch)
  watching.start()
  _, params = load_model(folder)
  jax.block_until_ready(params)
  over.set()
  watching.join()
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  grew = max(most) - begin
  print(json.dumps({"all": sum(sizes), "largest": max(sizes), "grew": grew}))


if __name__ == "__main__":
  main(sys.argv[1])

"""An environment that never answers; it also runs in the sandbox."""

import time


class Sleeper:
  def nap(self):
    time.sleep(60)

  def request(self, method, path):
    return f"{method} {path}"

  def reward(self):
    return 1.0

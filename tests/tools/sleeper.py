"""An environment that never answers; it also runs in the sandbox."""

import time


class Sleeper:
  def nap(self):
    time.sleep(60)

  def reward(self):
    return 1.0

"""Draws the README's two pictures from a finished quickstart.

  python -m experiments.pictures --workdir=runs/quickstart --out=docs/pictures

learning.png: SFT's validation loss, RL's reward and accuracy on development tasks.
trajectory.png: the RL model's greedy trajectory for --task in the viewer, rendered by
Chromium; needs playwright (`pip install playwright`) and Chromium (`apt-get install
chromium` or `playwright install chromium`).
"""

from __future__ import annotations

import os
import shutil
import tempfile

from absl import flags
from PIL import Image

from coa_jax.cli.launch import run_program
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Trajectory, read_trajectories
from coa_jax.report import plots
from coa_jax.report.metrics import read_metrics
from coa_jax.report.viewer import write_page

_WORKDIR = flags.DEFINE_string(
  "workdir", "runs/quickstart", "A finished quickstart's workdir."
)
_OUT = flags.DEFINE_string("out", "docs/pictures", "Folder for the pictures.")
_TASK = flags.DEFINE_string("task", "test-00000", "The trajectory's task.")
_PANELS = {
  "SFT: validation loss (nats per token)": {"validation_loss": "validation"},
  "RL: share of tasks": {"reward": "reward", "dev_accuracy": "greedy accuracy (dev)"},
}
_WIDTH = 1000  # CSS pixels; the picture is 1.4 times as wide
# One trajectory needs neither list nor filter.
_ALONE = """
header, .bar, .legend, #list, .prompt { display: none !important; }
.browser { height: auto; }
#viewer, .panes { display: block; }
"""


def main() -> None:
  """Writes both pictures and prints their paths."""
  os.makedirs(_OUT.value, exist_ok=True)
  sft = read_metrics(os.path.join(_WORKDIR.value, "sft"), "sft")
  rl = read_metrics(os.path.join(_WORKDIR.value, "rl"), "rl")
  learning = os.path.join(_OUT.value, "learning.png")
  plots.write_png(learning, plots.curves([*sft, *rl], _PANELS))
  print(learning)

  file = os.path.join(_WORKDIR.value, "eval_rl", "greedy.jsonl")
  attempts = [t for t in read_trajectories(file) if t.task_id == _TASK.value]
  if not attempts:
    raise ValueError(f"--task={_TASK.value}: {file} has no trajectory of it")
  picture = os.path.join(_OUT.value, "trajectory.png")
  draw_trajectory(picture, attempts[0])
  print(picture)


def draw_trajectory(path: str, trajectory: Trajectory) -> None:
  """Renders the trajectory in the viewer and writes a picture."""
  try:
    from playwright.sync_api import sync_playwright
  except ImportError as e:
    raise FileNotFoundError("a browser is needed: pip install playwright") from e
  with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    page_file = os.path.join(folder, "page.html")
    write_page(page_file, "Trajectory", {"": [trajectory]}, get_variant("unified"))
    program = shutil.which("chromium") or playwright.chromium.executable_path
    if not os.path.exists(program):
      raise FileNotFoundError("a browser is needed: apt-get install chromium")
    browser = playwright.chromium.launch(executable_path=program)
    page = browser.new_page(
      viewport={"width": _WIDTH, "height": 800}, device_scale_factor=1.4
    )
    page.goto(f"file://{page_file}")
    page.add_style_tag(content=_ALONE)
    page.locator("#viewer").screenshot(path=path)
    browser.close()
  # A palette image is a third as large.
  image = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
  image.save(path, optimize=True)


if __name__ == "__main__":
  run_program(main)

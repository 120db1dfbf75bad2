"""Notebook output: figures, trajectories token by token, and the viewer.

Each function returns an object that Jupyter and Colab draw as a cell's result. Each
page has its own frame and is inert towards a model's text: see `page.py`.
"""

from __future__ import annotations

import dataclasses
import html
import math
import os
import tempfile
from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Segment, Trajectory
from coa_jax.report import plots
from coa_jax.report.page import page_html, role_kinds
from coa_jax.report.viewer import write_page

# Adjacent tokens differ in shade, so that each is visible.
_STREAM_STYLE = """
body { padding: 4px 2px; }
p { margin: 0 0 7px; line-height: 1.75; display: grid; }
p { grid-template-columns: 10em auto 7em; }
p > b { color: var(--c); font-size: 13px; }
p > small { color: var(--dim); text-align: right; }
i { font: 13px/1.5 var(--code); white-space: pre-wrap; border-radius: 3px; }
i { padding: 2px 0; background: color-mix(in srgb, var(--c) 13%, transparent); }
i:nth-of-type(even) { background: color-mix(in srgb, var(--c) 30%, transparent); }
.given i { background: none; box-shadow: inset 0 -1px var(--line); }
.given i:nth-of-type(even) { box-shadow: inset 0 -3px var(--line); }
"""


@dataclasses.dataclass(frozen=True)
class Shown:
  """Markup that a notebook draws as a cell's last value."""

  markup: str = dataclasses.field(repr=False)  # stored notebooks keep the repr, too

  def _repr_html_(self) -> str:
    return self.markup


@dataclasses.dataclass(frozen=True)
class Picture:
  """A PNG that a notebook draws as a cell's last value."""

  png: bytes = dataclasses.field(repr=False)

  def _repr_png_(self) -> bytes:
    return self.png


def figure(drawn: Figure) -> Picture:
  """Shows a figure of `plots` as a PNG: sites that render notebooks remove SVG."""
  return Picture(plots.to_png(drawn, dpi=100))


def viewer(
  sources: Mapping[str, Iterable[Trajectory]],
  variant: Variant | None = None,
  tokenizer: Tokenizer | None = None,
  title: str = "Trajectories",
  height: int = 760,
) -> Shown:
  """Shows trajectories in a frame of `height` pixels; see `write_page` for the rest."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "page.html")
    write_page(path, title, sources, variant, tokenizer)
    with open(path, encoding="utf-8") as f:
      return _framed(f.read(), height)


def stream(trajectory: Trajectory, tokenizer: Tokenizer, height: int = 420) -> Shown:
  """Shows each token of a trajectory; only trained tokens have a background.

  A token's tooltip shows its id and, if sampled, its probability.
  """
  kinds = role_kinds()
  parts = []
  for segment in trajectory.segments:
    kind = kinds.get(segment.role, "other")
    given = "" if segment.author == "policy" else " given"
    tokens = "".join(_token(segment, tokenizer))
    about = f"{segment.author.value}, {len(segment.ids)}"
    parts.append(
      f'<p class="r-{kind}{given}"><b>{html.escape(segment.role)}</b>'
      f"<span>{tokens}</span><small>{about}</small></p>"
    )
  page = page_html("Tokens", "".join(parts), "", "stream", _STREAM_STYLE)
  return _framed(page, height)


def _token(segment: Segment, tokenizer: Tokenizer) -> Iterable[str]:
  """Yields each token's markup."""
  for number, i in enumerate(segment.ids):
    # Decoded separately: part of a character becomes a box, a token without text its
    # id.
    text = tokenizer.raw([i]).decode("utf-8", "replace") or f"[{i}]"
    about = f"id {i}"
    if segment.logps:
      about += f", probability {math.exp(segment.logps[number]):.3f}"
    yield f'<i title="{about}">{html.escape(text)}</i>'


def _framed(page: str, height: int) -> Shown:
  """Puts a page into a frame: page and notebook keep their own styles."""
  content = html.escape(page)
  return Shown(
    f'<iframe srcdoc="{content}" width="100%" height="{height}" '
    'style="border: 0" sandbox="allow-scripts"></iframe>'
  )

"""The terminal chat; `chat` and `serve` as processes with real tools and signals."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import forked
import httpx
import pytest
import toy
from programs import config_file
from rich.console import Console
from rich.style import Style

from coa_jax.cli import chat
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.rollout.streaming import TextDelta
from tests.backend import BACKEND
from tools_sandbox import http_server

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  """A folder with the actor's model, a one-page corpus and a config for both."""
  folder = tmp_path_factory.mktemp("served")
  toy.save_policy(str(folder / "model"), toy.actor().params)
  page = {"id": "1", "title": "Ur", "text": "Ur: its capital is Uruk."}
  (folder / "pages.jsonl").write_text(json.dumps(page))
  tools = dict(tools=("wiki_search", "code"), corpus=str(folder / "pages.jsonl"))
  sizes = dict(slots=3, window=4, max_len=128, prefill_rows=3)
  sections = dict(
    init=str(folder / "model"),
    model=dict(remat="none"),
    rollout=dict(variant="unified", style="brief", **sizes),
    tools=tools | dict(top_k=1, sandbox=BACKEND),
    tasks=dict(uri="nothing reads this"),
  )
  config_file(folder / "config.py", sections)
  return folder


def program(folder: pathlib.Path, name: str, *flags: str) -> subprocess.Popen:
  """Starts `experiments.NAME` on the actor, with real tools."""
  command = [sys.executable, "-m", f"experiments.{name}"]
  command += [f"--config={folder / 'config.py'}", "--compile_cache=", *flags]
  return subprocess.Popen(
    command,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )


def children_of(pid: int) -> list[int]:
  """All running descendants of process `pid`."""
  out = []
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    parent, state = stat_of(int(path.name))
    if parent == pid and state != "Z":
      out += [int(path.name), *children_of(int(path.name))]
  return out


def stat_of(pid: int) -> tuple[int, str]:
  """A process's parent and state; Z (zombie) if it is gone."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return 0, "Z"
  state, parent, *_ = stat.rpartition(")")[2].split()
  return int(parent), state


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_all_that_it_started(folder, how):
  process = program(folder, "serve", "--port=0")
  try:
    line = process.stdout.readline()
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/v1", line)
    body = {
      **{"model": "coa", "temperature": 0},
      "messages": [{"role": "user", "content": "2 + 3"}],
    }
    reply = httpx.post(url + "/chat/completions", json=body, timeout=300).json()
    assert reply["choices"][0]["message"]["content"] == "5"
    assert reply["choices"][0]["coa"]["tool_calls"][0]["status"] == "ok"
    started = children_of(process.pid)
    assert started  # the sandbox's processes
    process.send_signal(how)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    # The kernel needs a moment to end them.
    toy.eventually(lambda: all(stat_of(child)[1] == "Z" for child in started))
  finally:
    process.kill()
    process.communicate()


def test_a_question_on_the_command_line_has_its_answer_on_standard_output(folder):
  flags = (f"--config={folder / 'config.py'}", "--compile_cache=")
  done = forked.run("experiments.chat", *flags, "--question=4 * 4 + 1")
  assert (done.returncode, done.stdout) == (0, "17\n"), done.stderr
  lines = done.stderr.splitlines()
  work = [line for line in lines if not line.startswith("[transformers]")]
  assert work[0] == "compiling the sampler ..."
  assert work[1:5] == ["think", "  work it out", "code", "  ```py"]
  assert work[work.index("observation") + 1] == "  16"
  assert "answer" in work and work[-1].startswith("ended: ")


@pytest.mark.slow
def test_questions_come_from_a_pipe_and_a_failure_is_told(folder):
  process = program(folder, "chat", "--quiet")
  out, err = process.communicate(f"2 + 3\n\n{'x' * 900}\ncapital of Ur\n", timeout=300)
  assert out == "5\n\nUruk\n"
  assert process.returncode == 1 and "leaves no room" in err and "think" not in err


def test_a_folder_that_can_not_be_opened_is_one_line(folder):
  flags = (f"--config={folder / 'config.py'}", "--config.init=/nowhere", "--port=0")
  done = forked.run("experiments.serve", *flags)
  assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
  error = done.stderr.splitlines()[-1]
  assert error.startswith("error: ") and "/nowhere" in error


HOSTILE = "\x1b[2J\x9b31m\x07\u202eevil\u200b\r\x00 [red]ok[/red]\ncaf\u00e9 \u4e2d"


def screen_on(out: io.StringIO, **console) -> chat.Screen:
  return chat.Screen(Console(file=out, highlight=False, width=60, **console))


def shown(pieces: list[TextDelta], **console) -> str:
  out = io.StringIO()
  screen = screen_on(out, **console)
  for piece in pieces:
    screen.show(piece)
  return out.getvalue()


def answered(text: str, status: Status = Status.ENDED) -> Trajectory:
  return Trajectory("x", [Segment(Author.POLICY, "answer", text)], status=status)


def test_nothing_that_steers_a_terminal_comes_through():
  assert chat.clean(HOSTILE) == (
    r"\x1b[2J\x9b31m\x07\u202eevil\u200b\r\x00" + " [red]ok[/red]\ncaf\u00e9 \u4e2d"
  )
  assert chat.clean("a\tb") == "a\tb"
  assert chat.clean("\ud800") == r"\ud800"
  for role in ("observation", "think", "", "code"):
    assert shown([TextDelta(role, HOSTILE)]) == "  " + chat.clean(HOSTILE).replace(
      "\n", "\n  "
    )
  # With colours, only rich's own escape codes are written.
  opening = TextDelta("observation", "<observation>", is_tag=True)
  coloured = shown([opening, TextDelta("observation", HOSTILE)], force_terminal=True)
  codes = set(re.findall(r"\x1b.*?m", coloured))
  assert codes and all(re.fullmatch(r"\x1b\[[\d;]*m", c) for c in codes)
  assert "\x1b[2J" not in coloured and "\x9b" not in coloured


def test_an_answer_that_is_cut_off_is_shown_and_is_no_answer():
  out = io.StringIO()
  screen = screen_on(out)
  tag, text = TextDelta("answer", "<answer>", is_tag=True), " Paris is the capi"
  for piece in (tag, TextDelta("answer", text)):
    screen.show(piece)
  cut = answered(tag.text + text, Status.TRUNCATED)
  screen.end(cut)
  assert "  Paris is the capi\ntruncated: " in out.getvalue()
  assert chat.answer_of(cut) is None
  assert chat.answer_of(answered("<answer> Uruk</answer>")) == "Uruk"


def test_a_port_is_not_shared_with_a_server_that_still_loads():
  with http_server.bind("127.0.0.1", 0) as first:
    port = first.getsockname()[1]
    with pytest.raises(ValueError, match=f"--port={port}"):
      http_server.bind("127.0.0.1", port)


def test_every_colour_is_readable_on_black_and_on_white():
  for style in (*chat.STYLES.values(), chat.TOOL_STYLE):
    color = Style.parse(style).color
    if color is None or color.is_default:
      continue
    assert color.number >= 16, f"{style}: a colour that the terminal chooses"
    parts = [x / 255 for x in color.get_truecolor()]
    linear = [
      x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    ]
    luminance = sum(
      a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )
    assert 1.05 / (luminance + 0.05) > 3.8 and (luminance + 0.05) / 0.05 > 3.8, style

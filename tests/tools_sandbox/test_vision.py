"""visual_inspector: accepted images, and requests to the model."""

from __future__ import annotations

import base64
import io
import json
import os

import hypothesis
import hypothesis.strategies as st
import pytest
from http_server import LONG

from tools_sandbox.chat import ChatConfig
from tools_sandbox.faults import BadCall, ToolFault
from tools_sandbox.web.fetch import FetchConfig
from tools_sandbox.web.vision import Image, Inspector, VisionConfig, read_header

KEY = "sk-vision-0123456789"


def picture(kind: str = "PNG", size=(7, 5), **more) -> bytes:
  image = pytest.importorskip("PIL.Image")
  out = io.BytesIO()
  image.new("RGB", size, "red").save(out, kind, **more)
  return out.getvalue()


def ask(path, **more) -> str:
  return f"```json\n{json.dumps({'file_path': path, **more})}\n```"


@pytest.fixture
def server(server):
  reply = {"choices": [{"message": {"content": "a red box"}}]}
  server.actions["/v1/chat/completions"] = lambda r: r.send_json(reply)
  return server


@pytest.fixture
def inspect(server, tmp_path):
  folder = tmp_path / "images"
  folder.mkdir()
  (tmp_path / "key").write_text(KEY)
  (folder / "red.png").write_bytes(picture())
  fetch = FetchConfig(max_bytes=20_000, allow=("127.0.0.1/32",))
  chat = ChatConfig(server.url + "/v1", "eyes", str(tmp_path / "key"))

  def call(content: str, seconds: float = LONG, **changes) -> str:
    values = {"chat": chat, "folder": str(folder), "fetch": fetch, **changes}
    inspector = Inspector(VisionConfig(**values))
    try:
      return inspector(content, seconds)
    finally:
      inspector.close()

  call.folder = folder
  return call


@pytest.mark.parametrize(
  ("kind", "more"),
  [
    ("PNG", {}),
    ("GIF", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True, "exif": b"Exif\x00\x00" + b"x" * 900}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"exif": b"Exif\x00\x00xx"}),
  ],
)
def test_headers_are_read_from_the_bytes(kind: str, more):
  data = picture(kind, (301, 207), **more)
  assert read_header(data) == Image(f"image/{kind.lower()}", 301, 207)
  for end in range(0, 40):
    read_header(data[:end])  # any result, but no exception


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"<svg/>",
    b"\x89PNG\r\n\x1a\n" + bytes(30),
    b"\xff\xd8\xff",
    b"BM" + bytes(99),
    b"\xff\xd8" + b"\xff" * 9999,
    b"\xff\xd8\xff\xe0\x00\x00" * 99,
    b"GIF89a" + bytes(9),
  ],
)
def test_bytes_of_no_image_give_none(data: bytes):
  assert read_header(data) is None


HEADS = [b"\xff\xd8\xff", b"RIFFxxxxWEBPVP8X", b"RIFFxxxxWEBPVP8L\x00\x00\x00\x00\x2f"]


@hypothesis.given(st.sampled_from([*HEADS, b"GIF89a", b""]), st.binary(max_size=99))
def test_any_bytes_are_an_image_with_a_size_or_none(head: bytes, rest: bytes):
  image = read_header(head + rest)
  assert image is None or min(image.width, image.height) > 0


@pytest.mark.parametrize("where", ["file", "url"])
def test_the_model_sees_the_image_and_the_question(server, inspect, where: str):
  server.actions["/x.txt"] = lambda r: r.send(picture(), "image/jpeg")  # a wrong type
  path = "red.png" if where == "file" else server.url + "/x.txt"
  assert inspect(ask(path, question="\ud800 Which colour?")) == "a red box"
  request = server.requests[-1]
  assert request.headers["Authorization"] == f"Bearer {KEY}"
  text, image = request.json["messages"][1]["content"]
  assert text["text"] == "\ud800 Which colour?"
  head, _, data = image["image_url"]["url"].partition(",")
  assert head == "data:image/png;base64" and base64.b64decode(data) == picture()


@pytest.mark.parametrize(
  "path",
  [
    "../secret.png",
    "link.png",
    "linked/secret.png",
    "/etc/passwd",
    "none.png",
    ".",
    "pipe",
    "a\x00b",
    "x" * 5000,
    "/proc/self/environ",
  ],
)
def test_files_outside_the_folder_are_not_there(inspect, path: str):
  secret = inspect.folder.parent / "secret.png"
  secret.write_bytes(picture())
  (inspect.folder / "link.png").symlink_to(secret)
  (inspect.folder / "linked").symlink_to(inspect.folder.parent)
  os.mkfifo(inspect.folder / "pipe")
  with pytest.raises(BadCall, match="there is no file"):
    inspect(ask(path))


def test_absolute_paths_and_links_inside_are_fine(inspect):
  (inspect.folder / "link.png").symlink_to(inspect.folder / "red.png")
  assert inspect(ask(str(inspect.folder / "red.png"))) == "a red box"
  assert inspect(ask("link.png")) == "a red box"
  with pytest.raises(BadCall, match="no files"):
    inspect(ask("red.png"), folder=None)


@pytest.mark.parametrize(
  ("data", "words"),
  [
    (b"<html>", "no PNG"),
    (b"\x7fELF", "no PNG"),
    (b"x" * 20_001, "over 20000 bytes"),
    ("huge", "50000 x 50000 pixels are too many"),
  ],
)
@pytest.mark.parametrize("where", ["file", "url"])
def test_a_file_of_no_image_or_too_large_is_refused(
  server, inspect, where, data, words
):
  if data == "huge":  # a bomb: a small file that unpacks to gigabytes
    size = (50_000).to_bytes(4, "big")
    data = picture()[:16] + size + size + picture()[24:]
  (inspect.folder / "x.png").write_bytes(data)
  server.actions["/x.png"] = lambda r: r.send(data, "image/png")
  with pytest.raises(ToolFault, match=words):
    inspect(ask("x.png" if where == "file" else server.url + "/x.png"))
  assert "/v1/chat/completions" not in [r.path for r in server.requests]


def test_urls_pass_the_same_gate_as_pages(server, inspect):
  server.actions["/t"] = lambda r: r.send(picture(), "text/html")
  with pytest.raises(ToolFault, match="'text/html' cannot be read"):
    inspect(ask(server.url + "/t"))
  for url in ("http://169.254.169.254/a.png", server.url + "/red.png"):
    with pytest.raises(ToolFault, match="may not be connected"):
      inspect(ask(url), fetch=FetchConfig())
  with pytest.raises(BadCall, match="not a URL"):
    inspect(ask("file:///etc/passwd"))


@pytest.mark.parametrize(
  "content",
  [
    "red.png",
    '{"file_path": "red.png"}',
    "```json\n[]\n```",
    "```json\n{}\n```",
    ask(5),
    ask(" "),
    ask("red.png", question=5),
    ask("red.png", question="x" * 3000),
    "```json\n" + "[" * 100_000 + "\n```",
  ],
)
def test_malformed_calls_are_the_models_fault(inspect, content: str):
  with pytest.raises(BadCall):
    inspect(content)


def test_a_folder_that_is_none_is_refused(tmp_path):
  config = VisionConfig(ChatConfig("http://a", "m"), folder=str(tmp_path / "none"))
  with pytest.raises(ValueError, match="is no folder"):
    Inspector(config)

"""External file names become paths below a folder, or are refused in one line."""

from __future__ import annotations

import pytest

from coa_jax.runtime.names import check_name, check_names, path_below

REFUSED = {
  "": "has the part ''",
  "/": "is an absolute path",
  "/etc/passwd": "is an absolute path",
  "..": "has the part '..'",
  "a/../b": "has the part '..'",
  "../../x": "has the part '..'",
  ".": "has the part '.'",
  "./a": "has the part '.'",
  "a//b": "has the part ''",
  "a/": "has the part ''",
  "..\\x": "has a backslash",
  "a\0b": "has a control character",
  "a\nb": "has a control character",
  "a\x7f": "has a control character",
  "\x9b2J": "has a control character",
  "\udcff": "is not UTF-8",
  "\u00fc" * 128: "has a part longer than 255 bytes",
  "a/" * 600 + "b": "is longer than 1024 bytes",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_is_no_file_below_its_folder_is_refused(name, tmp_path):
  with pytest.raises(ValueError, match=r"^there: file name .*; accepted: ") as e:
    path_below(str(tmp_path), name, "there")
  message = str(e.value)
  assert REFUSED[name] in message and len(message) < 300 and message.isprintable()


@pytest.mark.parametrize("name", [5, None, ["a"]])
def test_a_name_is_a_text(name):
  with pytest.raises(ValueError, match="is not a text"):
    check_name(name, "there")


@pytest.mark.parametrize(
  "name",
  ["a", "a/b.json", "...", "..a/b..", "[x]*?", "~", "\u00fc \u4e2d", "-rf", "%2e"],
)
def test_other_names_are_paths(name, tmp_path):
  assert path_below(str(tmp_path), name, "there") == f"{tmp_path}/{name}"


def test_no_symlink_leads_out(tmp_path):
  folder = tmp_path / "folder"
  folder.mkdir()
  (tmp_path / "secret").mkdir()
  (folder / "out").symlink_to(tmp_path / "secret")
  (folder / "file").symlink_to(tmp_path / "secret" / "x")
  (folder / "within").symlink_to(folder)
  for name in ("out", "out/x", "file"):
    with pytest.raises(ValueError, match="leads out of the folder by a symlink"):
      path_below(str(folder), name, "there")
  path_below(str(folder), "within/x", "there")
  (tmp_path / "link").symlink_to(folder)  # the folder itself may be a symlink
  path_below(str(tmp_path / "link"), "x", "there")


def test_names_are_files_of_one_folder():
  check_names(["a", "b/c", "b/d", "A"], "there")
  with pytest.raises(ValueError, match="'a/b' is a file and a folder"):
    check_names(["a/b/c/d", "a/b"], "there")
  with pytest.raises(ValueError, match="Unicode form alone"):
    check_names(["\u00fc", "u\u0308"], "there")

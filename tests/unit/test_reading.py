"""What comes from elsewhere is read whole within a size, or refused in one line that says where and why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hf_osdp.planner.files import write_whole
from hf_osdp.reading import parse_json, read_bytes, read_json


def test_parse_json_takes_any_other_value():
    value = [2**63, 1e300, "x" * 10**5, "ä +:€ \U0001f600", True, None, [[{"a": [1]}]]]
    assert parse_json(json.dumps(value)) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value).encode()) == value  # some editors begin a file so


@pytest.mark.timeout(60)
def test_read_bytes_refuses_other_files_and_read_json_names_them(tmp_path):
    def refused(path, read=read_bytes, **options) -> str:
        with pytest.raises(KeyError) as caught:
            read(path, "plan", error=KeyError, **options)
        return caught.value.args[0]

    assert refused(tmp_path) == f"Cannot read the plan {tmp_path}: Is a directory; give a file that can be read."
    assert "embedded null" in refused("a\0b")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer for ever
    for path in (tmp_path / "pipe", "/dev/zero"):
        assert "it is a pipe or a device; give a file" in refused(path)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 11)
    said = f"{path} has 11 bytes, more than the 10 that a plan may have; it is not a plan."
    assert refused(path, limit_bytes=10) == said
    assert read_bytes(path, "plan", limit_bytes=11) == b"x" * 11
    path.write_text('{"a": NaN}')
    assert refused(path, read_json) == f"{path} has NaN, which is not a number; it is not a plan that can be read."
    path.write_text('{"a": -1e400}')
    assert refused(path, read_json).startswith(f"{path} has -1e400, which is larger than any number that it may have")
    path.write_text('{"a": [1]}')
    assert read_json(path, "plan") == {"a": [1]}


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda self, *_, **__: [self.touch(), os.open("none/such", os.O_RDONLY)])
    with pytest.raises(OSError, match="none/such"):
        write_whole(tmp_path / "plan.json", "{}")
    assert not list(tmp_path.iterdir())

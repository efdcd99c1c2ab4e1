"""What comes from elsewhere is read whole within a size, or refused in one line that says where and why."""

from __future__ import annotations

import json
import os
import time

import pytest

from hf_osdp.reading import parse_json, read_bytes, read_json


class Refused(Exception):
    """What the reader was told to raise."""


def refused(read, *args, **options) -> str:
    """The one line, which comes at once."""
    start = time.monotonic()
    with pytest.raises(Refused) as caught:
        read(*args, error=Refused, **options)
    assert time.monotonic() - start < 5 and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


def test_parse_json_takes_any_other_value():
    value = [2**63, 1e300, "x" * 10**5, "ä +:€ \U0001f600", True, None, [[{"a": [1]}]]]
    assert parse_json(json.dumps(value)) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value).encode()) == value  # some editors begin a file so


def test_read_bytes_refuses_other_files_and_read_json_names_them(tmp_path):
    def of(path, **options) -> str:
        return refused(read_bytes, path, "plan", **options)

    assert of(tmp_path) == f"Cannot read the plan {tmp_path}: Is a directory; give a file that can be read."
    assert "embedded null" in of("a\0b")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer for ever
    assert "it is a pipe or a device; give a file" in of(tmp_path / "pipe")
    assert "it is a pipe or a device" in of("/dev/zero")
    (tmp_path / "large").write_bytes(b"x" * 11)
    assert of(tmp_path / "large", limit_bytes=10) == (
        f"{tmp_path / 'large'} has 11 bytes, more than the 10 that a plan may have; it is not a plan."
    )
    assert read_bytes(tmp_path / "large", "plan", limit_bytes=11) == b"x" * 11
    path = tmp_path / "x.json"
    path.write_text('{"a": NaN}')
    said = f"{path} has NaN, which is not a number; it is not a profile that can be read."
    assert refused(read_json, path, "profile") == said
    path.write_text('{"a": [1]}')
    assert read_json(path, "profile") == {"a": [1]}

"""Where a model's configuration comes from: the hub, of which a server of this test answers, its cache, or the
built-in shapes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from hf_osdp.cli.cases import load_config

LOOKS = """
import json, sys
from hf_osdp.cli.cases import load_config
said = {}
for name in sys.argv[1:]:
    try:
        said[name] = load_config(name).to_dict()
    except ValueError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
CONFIG = json.dumps({"model_type": "gpt2", "n_layer": 7}).encode()


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does, by the owner of the model."""

    def do_HEAD(self):
        owner = self.path.split("/")[1]
        gated, unknown = (403, "GatedRepo"), (404, "RepoNotFound")
        known = {
            "": (200, ""),
            "real": (200, ""),
            "closed": gated,
            "meta-llama": gated,
            "empty": (404, "EntryNotFound"),
        }
        status, error = known.get(owner, unknown)
        self.send_response(status)
        length = str(len(CONFIG) if status == 200 else 0)
        for name, value in {
            "X-Error-Code": error,
            "ETag": '"1"',
            "X-Repo-Commit": "1" * 40,
            "Content-Length": length,
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        if not self.path.startswith(("/unknown", "/closed", "/empty", "/meta-llama")):
            self.wfile.write(CONFIG)

    def log_message(self, *_):
        pass


def looked_up(*names: str, folder, **environment: str):
    """What `load_config` gives or says for each name in a fresh process, and what stood on its stderr."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder), "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, *names], env=variables, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout), done.stderr


def test_load_config_tells_what_the_hub_says(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        names = ("real/model", "unknown/gpt2-xl", "closed/model", "empty/model", "meta-llama/Llama-3.1-8B", "no id")
        said, stderr = looked_up(*names, folder=tmp_path, HF_ENDPOINT=endpoint)
        server.shutdown()
    assert said["real/model"]["n_layer"] == 7
    assert (
        "is not on the hub or is private" in said["unknown/gpt2-xl"] and "(nearest: gpt2-xl" in said["unknown/gpt2-xl"]
    )
    assert "is a gated model: request access" in said["closed/model"]
    assert "has no config.json on the hub" in said["empty/model"]
    assert "not a hub id" in said["no id"]
    assert said["meta-llama/Llama-3.1-8B"]["num_hidden_layers"] == 32
    assert "using the built-in shape of meta-llama/Llama-3.1-8B" in stderr
    said, stderr = looked_up(
        "real/model", "gpt2-xl", folder=tmp_path, HF_ENDPOINT=endpoint
    )  # the server is gone, the cache is not
    assert said["real/model"]["n_layer"] == 7 and said["gpt2-xl"]["n_layer"] == 48
    assert f"the hub ({endpoint}) cannot be reached; using the built-in shape of openai-community/gpt2-xl" in stderr
    assert stderr.count("\n") == 1


def test_load_config_without_a_network_names_the_nearest_shapes(monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'qwen3-8' .*cannot be reached; give a config.json, .* \(nearest: qwen3-8b"):
        load_config("qwen3-8")
    assert load_config("Qwen3-8B").hidden_size == 4096
    assert (
        "using the built-in shape of Qwen/Qwen3-8B, from https://huggingface.co/Qwen/Qwen3-8B/"
        in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"there is no such file or folder"):
        load_config("./gpt2-xl")

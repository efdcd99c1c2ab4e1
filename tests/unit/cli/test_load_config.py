"""A model's configuration comes from the hub (played by a server of this test), its cache, or built-in shapes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from hf_osdp.cli.cases import load_config

CONFIG = json.dumps({"model_type": "gpt2", "n_layer": 7}).encode()


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        gated, known = (403, "GatedRepo"), (200, "")
        answers = {"": known, "real": known, "closed": gated, "meta-llama": gated, "empty": (404, "EntryNotFound")}
        self.status, error = answers.get(self.path.split("/")[1], (404, "RepoNotFound"))
        self.send_response(self.status)
        headers = {"X-Error-Code": error, "ETag": '"1"', "X-Repo-Commit": "1" * 40}
        for name, value in {**headers, "Content-Length": str(len(CONFIG) * (self.status == 200))}.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        if self.status == 200:
            self.wfile.write(CONFIG)

    def log_message(self, *_):
        pass


def looked_up(name: str) -> dict | str:
    try:
        return load_config(name).to_dict()
    except ValueError as error:
        return str(error)


def test_load_config_tells_what_the_hub_says(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
        settings = {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for name, value in {**settings, "ENDPOINT": endpoint}.items():
            monkeypatch.setattr(constants, name, value)
        names = ("real/model", "unknown/gpt2-xl", "closed/model", "empty/model", "meta-llama/Llama-3.1-8B", "no id")
        said = {name: looked_up(name) for name in names}
        server.shutdown()
    assert said["real/model"]["n_layer"] == 7
    assert "is not on the hub or is private" in said["unknown/gpt2-xl"]
    assert "(nearest: gpt2-xl" in said["unknown/gpt2-xl"]
    assert "is a gated model: request access" in said["closed/model"]
    assert "has no config.json on the hub" in said["empty/model"]
    assert "not a hub id" in said["no id"]
    assert said["meta-llama/Llama-3.1-8B"]["num_hidden_layers"] == 32
    assert "using the built-in shape of meta-llama/Llama-3.1-8B" in capsys.readouterr().err
    assert looked_up("real/model")["n_layer"] == 7, "of the cache"
    assert looked_up("gpt2-xl")["n_layer"] == 48, "of a shape"
    stderr = capsys.readouterr().err
    assert f"the hub ({endpoint}) cannot be reached; using the built-in shape of openai-community/gpt2-xl" in stderr
    assert stderr.count("\n") == 1


def test_load_config_without_a_network_names_the_nearest_shapes(monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'qwen3-8' .*cannot be reached; give a config.json, .* \(nearest: qwen3-8b"):
        load_config("qwen3-8")
    assert load_config("Qwen3-8B").hidden_size == 4096
    assert "shape of Qwen/Qwen3-8B, from https://huggingface.co/Qwen/Qwen3-8B/" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"there is no such file or folder"):
        load_config("./gpt2-xl")

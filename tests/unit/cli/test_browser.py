"""The planner's page answers what the command line answers: its handler, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

import pytest
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from tests.helpers.distributed import environment, free_port

if find_spec("gradio") is None:  # which takes seconds to import
    pytest.skip("the page needs the extra app", allow_module_level=True)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHAPE = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64}
FORM = {
    "device": "a100-40", "num_nodes": 1, "devices_per_node": 4, "memory_limit": "30GiB", "precision": "",
    "sequence_length": 32, "global_batch_size": 32, "compile": False,
}  # fmt: skip
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("gpt2") / "config.json"
    file.write_text(json.dumps(SHAPE))
    return str(file)


def answers(hub_id: str | None, file: str | None, **changes: object) -> list[tuple[str, ...]]:
    from hf_osdp.cli.browser import _START, answer

    assert list(_START) == list(FORM)
    return list(answer(hub_id, file, *(FORM | changes).values()))


def test_plan_and_comparison_are_those_of_the_shown_command(config):
    (waiting, *_), first, last = answers(None, config)
    assert "Planning" in waiting and "Comparing" in first[3] and first[:3] == last[:3]
    plan, chart, script, comparison = last
    words = script.splitlines()[0].removeprefix("# hf-osdp ").replace("config.json", config).split()
    said = [CliRunner().invoke(app, [command, *words[1:]]).stdout for command in ("plan", "compare")]
    gains = re.findall(r"\d+\.\d\dx", said[1])
    assert said[0].split()[2] in plan and len(gains) > 4 and gains == re.findall(r"\d+\.\d\dx", comparison)
    assert "<svg" in chart and "OSDPConfig(memory_limit='30GiB', compile=False)" in script
    assert "gradient_accumulation_steps=" in script and "precision bf16" in script


@pytest.mark.parametrize(
    ("hub_id", "changes", "said"),
    [
        (None, {"memory_limit": "41GiB"}, "Memory limit 41GiB is more than the 40.0 GiB of A100-40"),
        (
            None,
            {"devices_per_node": 2.5},
            "Invalid value for &#x27;Devices per node&#x27;: Input should be a valid integer",
        ),
        (None, {"sequence_length": None}, "Missing Sequence length."),
        ("/etc/hosts", {}, "MODEL &#x27;/etc/hosts&#x27; is not a hub id; upload its config.json"),
        ("--json=x", {}, "MODEL &#x27;--json=x&#x27; is not a hub id"),
    ],
)
def test_errors_are_those_of_the_command_line_and_the_page_reads_no_local_file(config, hub_id, changes, said):
    *_, last = answers(hub_id, None if hub_id else config, **changes)
    assert said in " ".join(last[0].split()) and last[1:] == ("", "", "")


def test_wrong_configuration_is_refused_without_its_path_and_names_are_not_run(tmp_path):
    from hf_osdp.cli.browser import _html

    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    *_, last = answers(None, str(tmp_path / "config.json"))
    assert "MODEL &#x27;config.json&#x27; has no configuration" in last[0] and str(tmp_path) not in last[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;[b]" in _html("<script>alert(1)</script>[b]")


def test_app_without_its_extra_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hf_osdp.cli.browser")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(app, ["app"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "hf-osdp: The page needs gradio, which is not installed; run: pip install 'hf_osdp[app]'.\n"


@pytest.fixture
def address():
    address = f"http://127.0.0.1:{(port := free_port())}/"
    command = [sys.executable, "-m", "hf_osdp", "app", "--port", port]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as server:
        try:
            for _ in range(240):
                with suppress(URLError):
                    urllib.request.urlopen(address, timeout=5).close()
                    break
                assert server.poll() is None, server.stderr.read()
                time.sleep(0.25)
            yield address
        finally:
            server.terminate()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_page_plans_by_button_and_enter_without_a_network(address, config):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright reads the page")
    with playwright.sync_playwright() as driver:
        page = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        expect, asked_of = playwright.expect, set()
        page.on("request", lambda request: asked_of.add(request.url.partition("://")[2].partition("/")[0]))

        def fill(file: str | Path) -> None:
            page.goto(address)
            page.locator("#config input[type=file]").set_input_files(file)
            for name in ("device", "devices_per_node", "memory_limit", "sequence_length", "global_batch_size"):
                field = page.locator(f"#{name} :is(input, textarea)").first
                field.fill(str(FORM[name]))
                field.press("Tab")

        fill(config)
        page.click("#ask")
        expect(page.locator("#comparison")).to_contain_text("osdp gain", timeout=PATIENCE_MS)
        expect(page.locator("#plan")).to_contain_text("OSDP plan")
        assert page.locator("#chart svg").evaluate("image => image.getBoundingClientRect().width") > 500
        limit = page.locator("#memory_limit :is(input, textarea)")
        limit.fill("41GiB")
        limit.press("Enter")
        expect(page.locator("#plan")).to_contain_text("Memory limit 41GiB is more", timeout=PATIENCE_MS)
        assert limit.input_value() == "41GiB"
        limit.fill("30GiB")
        page.click("#ask")
        limit.fill("29GiB")  # asked while the other is answered, which does not end with the old answer
        limit.press("Enter")
        expect(page.locator("#script")).to_contain_text("memory_limit='29GiB'", timeout=PATIENCE_MS)
        expect(page.locator("#ask")).to_have_text("Plan", timeout=PATIENCE_MS)
        large = Path(config).with_name("large.json")  # takes seconds
        sizes = {"n_layer": 24, "n_embd": 1024, "n_head": 16}
        large.write_text(json.dumps({**json.loads(Path(config).read_text()), **sizes}))
        fill(large)
        page.click("#ask")
        expect(page.locator("#ask")).to_have_text("Planning ...")
        page.click("#cancel")
        expect(page.locator("#plan")).to_contain_text("Cancelled.")
        expect(page.locator("#ask")).to_have_text("Plan")
        assert asked_of == {address.split("/")[2]}, "the page needs no network"

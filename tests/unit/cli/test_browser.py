"""The planner's page in a real browser: three questions are asked, and the answers are those of the planner."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from urllib.error import URLError

import pytest
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from hf_osdp.cli.question import Planner, Question
from hf_osdp.quantities import format_seconds
from hf_osdp.report.tables import batch_cells, make_table
from tests.helpers.distributed import environment, free_port

gradio = pytest.importorskip("gradio", reason="the page needs the extra app")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright reads the page")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHAPE = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64}
QUESTION = Question(
    model="", config=json.dumps(SHAPE), device="a100-40", devices_per_node=4, sequence_length=32, global_batch_size=32,
    memory_limit="30GiB"
)  # fmt: skip
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def address():
    """Where `hf-osdp app` serves the page."""
    port = free_port()
    command = [sys.executable, "-m", "hf_osdp", "app", "--port", port]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                    break
                except URLError:
                    assert server.poll() is None, server.stderr.read()
                    time.sleep(0.25)
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


def fill(page, question: Question) -> None:
    for name in ("device", "devices_per_node", "memory_limit", "sequence_length", "global_batch_size"):
        field = page.locator(f"#{name} :is(input, textarea)").first
        field.fill(str(getattr(question, name)))
        field.press("Tab")


def held(page, name: str) -> str:
    return page.locator(f"#{name} :is(input, textarea)").first.input_value()


def test_page_answers_three_questions(address, browser, tmp_path):
    expect, planner = playwright.expect, Planner()
    expect.set_options(timeout=PATIENCE_MS)
    page, asked_of = browser.new_page(), set()
    page.on("request", lambda request: asked_of.add(request.url.partition("://")[2].partition("/")[0]))

    def text(name: str) -> playwright.Locator:
        return page.locator(f"#{name}")

    # a config.json that is dropped in, with devices and sizes: the plan, its chart, the comparison, what to copy
    page.goto(address)
    (tmp_path / "config.json").write_text(QUESTION.config)
    page.locator("#file input[type=file]").set_input_files(tmp_path / "config.json")
    expect(page.locator("#config textarea")).to_have_value(QUESTION.config)
    fill(page, QUESTION)
    page.click("#ask")
    planned = planner.plan(QUESTION)
    expect(text("plan")).to_contain_text(f"OSDP plan {planned.plan.fingerprint}")
    for figure in batch_cells(planned.plan):
        expect(text("plan")).to_contain_text(figure)
    assert page.locator("#chart img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 500
    expect(page.locator("#comparison tr")).to_have_count(1 + len(planned.compared))
    for shown, row in zip(page.locator("#comparison tr").all_inner_texts()[1:], planned.compared, strict=True):
        assert shown.split("\t")[0] == row.label and format_seconds(row.result.plan.step_s) in shown
    expect(text("script")).to_contain_text("osdp = OSDPConfig(memory_limit='30GiB')")
    assert held(page, "command") == QUESTION.command and page.url == address + QUESTION.link

    # a limit that the device does not have: one line, and the form is as it was
    fill(page, replace(QUESTION, memory_limit="41GiB"))
    page.click("#ask")
    expect(text("error")).to_contain_text("--memory-limit 41GiB is more than the 40.0 GiB of A100-40")
    expect(text("plan")).to_be_hidden()
    assert held(page, "config") == QUESTION.config and held(page, "memory_limit") == "41GiB"

    # a link with a word that is no part of a question, then one that somebody sent, and the sliders
    page.goto(address + "?devise=h100")
    expect(text("error")).to_contain_text("The link has 'devise', which is not a field of a question")
    expect(text("plan")).to_be_hidden()
    page.goto(address + replace(QUESTION, memory_limit="20GiB", compile=False).link)
    sent = planner.plan(replace(QUESTION, memory_limit="20GiB"))
    expect(text("plan")).to_contain_text(f"OSDP plan {sent.plan.fingerprint}")
    assert (
        held(page, "memory_limit") == "20GiB"
        and held(page, "config") == QUESTION.config
        and held(page, "device") == "a100-40"
    )
    count = page.locator("#devices input[type=number]")
    count.fill("5")
    count.press("Tab")
    changed = planner.what_if(sent.question, "20GiB", 5)[1]
    expect(text("what-if")).to_contain_text("5 devices, 20GiB each, global batch raised from 32 to 35")
    expect(text("what-if")).to_contain_text(batch_cells(changed.plan)[2])
    assert asked_of == {address.split("/")[2]}, "the page needs no network"


def test_tables_show_names_and_run_none_of_them():
    from hf_osdp.cli.browser import _table

    table = make_table("<b>", [["<script>alert(1)</script>", "${x} {{y}}"]], text=["units"], figures=["held"])
    table.caption = "recompute: a & b.\nrecompute: c."
    shown = _table(table)
    assert "<script" not in shown and "<b>" not in shown and "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert shown.endswith("</table><p>recompute: a &amp; b.</p><p>recompute: c.</p>")
    assert '<td class="left">' in shown and '<td class="right">${x} {{y}}</td>' in shown


def test_file_that_is_too_long_is_no_configuration(tmp_path):
    from hf_osdp.cli.browser import _read

    (tmp_path / "model.json").write_bytes(b" " * (2**18 + 1))
    with pytest.raises(gradio.Error, match=r"256\.0 KiB; a config\.json may have at most 256\.0 KiB"):
        _read(str(tmp_path / "model.json"))


def test_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = CliRunner().invoke(app, ["app", "--port", str(taken.getsockname()[1])])
    assert (
        done.exit_code == 2
        and "this address cannot be used; give another" in done.stderr
        and done.stderr.count("\n") == 1
    )

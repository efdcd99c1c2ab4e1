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
from importlib.util import find_spec
from urllib.error import URLError

import pytest
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from hf_osdp.cli.question import Planner, Question
from hf_osdp.quantities import format_seconds
from hf_osdp.report.tables import batch_cells, make_table
from tests.helpers.distributed import environment, free_port

if find_spec("gradio") is None:  # which takes seconds to import
    pytest.skip("the page needs the extra app", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright reads the page")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHAPE = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64}
SIZES = {"device": "a100-40", "devices_per_node": 4, "sequence_length": 32, "global_batch_size": 32}
QUESTION = Question(model="", config=json.dumps(SHAPE), memory_limit="30GiB", **SIZES)
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def address():
    port = free_port()
    command = [sys.executable, "-m", "hf_osdp", "app", "--port", port]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **streams) as server:
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


@pytest.mark.slow
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
    page.click("#or_config button")
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
    expect(text("error")).to_contain_text('"Limit per device" 41GiB is more than the 40.0 GiB of A100-40')
    expect(text("plan")).to_be_hidden()
    assert held(page, "config") == QUESTION.config and held(page, "memory_limit") == "41GiB"

    # nothing fits: the page's fields in place of flags
    fill(page, replace(QUESTION, memory_limit="1GiB"))
    page.click("#ask")
    expect(text("error")).to_contain_text('"Limit per device" 1GiB leaves nothing for tensors')

    # a link with a word that is no part of a question, then one that somebody sent, and the sliders
    page.goto(address + "?devise=h100")
    expect(text("error")).to_contain_text("The link has 'devise', which is not a field of a question")
    expect(text("plan")).to_be_hidden()
    page.goto(address + replace(QUESTION, memory_limit="20GiB", compile=False).link)
    sent = planner.plan(replace(QUESTION, memory_limit="20GiB"))
    expect(text("plan")).to_contain_text(f"OSDP plan {sent.plan.fingerprint}")
    assert held(page, "memory_limit") == "20GiB" and held(page, "config") == QUESTION.config
    assert held(page, "device") == "a100-40"
    count = page.locator("#devices input[type=number]")
    count.fill("5")
    count.press("Tab")
    changed = planner.what_if(sent.question, "20GiB", 5)[1]
    expect(text("what-if")).to_contain_text("5 devices, global batch raised from 32 to 35, 20GiB each")
    expect(text("what-if")).to_contain_text(batch_cells(changed.plan)[2])
    assert asked_of == {address.split("/")[2]}, "the page needs no network"


@pytest.fixture
def answered(address, browser):
    """The page with the answer to QUESTION."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(address + QUESTION.link)
    page.wait_for_selector("#comparison table", timeout=PATIENCE_MS)
    yield page
    page.close()


@pytest.mark.slow
def test_numbers_that_are_not_whole_are_named_and_enter_plans(answered):
    page, expect = answered, playwright.expect
    count, command = page.locator("#devices_per_node input"), page.locator("#command textarea")
    for number, said in (("2.5", '"Devices in each" 2.5 is not a whole number'), ("", '"Devices in each" is empty')):
        count.fill(number)
        count.press("Enter")
        expect(page.locator("#error")).to_contain_text(said, timeout=PATIENCE_MS)
        expect(page.locator("#plan")).to_be_hidden()
    count.fill("7")
    count.press("ArrowUp")
    assert count.input_value() == "8"
    count.press("Enter")
    asked = replace(QUESTION, devices_per_node=8)
    expect(command).to_have_value(asked.command, timeout=PATIENCE_MS)
    for name, value in (("memory_limit", "20GiB"), ("device", "a100-80")):
        field = page.locator(f"#{name} :is(input, textarea)")
        field.fill(value)
        field.press("Enter")
        asked = replace(asked, **{name: value})
        expect(command).to_have_value(asked.command, timeout=PATIENCE_MS)


@pytest.mark.slow
def test_pasted_configuration_and_chosen_model_replace_each_other(address, browser):
    page, expect = browser.new_page(), playwright.expect
    page.goto(address)
    page.click("#or_config button")
    assert held(page, "model") == Question().model
    config, model = page.locator("#config textarea"), page.locator("#model input")
    config.fill(QUESTION.config)
    expect(model).to_have_value("")
    model.focus()
    model.press("Tab")
    fill(page, QUESTION)
    expect(config).to_have_value(QUESTION.config)
    page.click("#ask")
    expect(page.locator("#command textarea")).to_have_value(QUESTION.command, timeout=PATIENCE_MS)
    model.fill("openai-community/gpt2")
    model.press("Tab")
    expect(config).to_have_value("")
    page.close()


@pytest.mark.slow
def test_what_if_follows_keys(answered):
    slider, number = (answered.locator(f"#limit input[type={kind}]") for kind in ("range", "number"))
    for field, key, limit in ((slider, "ArrowLeft", 29), (number, "ArrowDown", 28), (number, "Enter", 20)):
        if key == "Enter":
            field.fill("20")
        field.press(key)
        said = f"4 devices, {limit}GiB each"
        playwright.expect(answered.locator("#what-if")).to_contain_text(said, timeout=PATIENCE_MS)


def test_tables_show_names_and_run_none_of_them():
    from hf_osdp.cli.browser import _table

    table = make_table("<b>", [["<script>alert(1)</script>", "${x} {{y}}"]], text=["units"], figures=["held"])
    table.caption = "recompute: a & b.\nrecompute: c."
    shown = _table(table)
    assert "<script" not in shown and "<b>" not in shown and "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert shown.endswith("</table><p>recompute: a &amp; b.</p><p>recompute: c.</p>")
    assert '<td class="left" data-name="units">' in shown
    assert '<td class="right" data-name="held">${x} {{y}}</td>' in shown


def test_long_configuration_and_taken_port_are_refused_in_one_line(tmp_path):
    import gradio

    from hf_osdp.cli.browser import _read

    (tmp_path / "model.json").write_bytes(b" " * (2**18 + 1))
    with pytest.raises(gradio.Error, match=r"256\.0 KiB; a config\.json may have at most 256\.0 KiB"):
        _read(str(tmp_path / "model.json"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = CliRunner().invoke(app, ["app", "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 2 and "this address cannot be used; give another" in done.stderr
    assert done.stderr.count("\n") == 1

"""The planner's page as a Hugging Face Space has it: `from hf_osdp.app import demo`, then `demo.launch()`. Needs the extra `app`."""

from .cli.browser import build

demo = build()

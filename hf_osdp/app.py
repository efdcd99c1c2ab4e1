"""The planner's page for a Hugging Face Space: `from hf_osdp.app import demo`, then `demo.launch()`.

Needs the extra `app`.
"""

from .cli.browser import build

demo = build()

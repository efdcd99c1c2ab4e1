"""A model that one command has traced is not traced by the next, as on a user's machine."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def traced_once(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSDP_CACHE", str(tmp_path_factory.mktemp("traces")))
        yield

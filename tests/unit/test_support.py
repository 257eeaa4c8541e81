"""`kvrelay models`: one source for the command and its page, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.family.allowed import check_family
from engine.support.matrix import CHECKS, FORMATS, NAMED, support_matrix
from kvrelay.errors import ModelError
from tests.families.page import PAGE, renewed


def test_the_page_has_the_matrix() -> None:
    text = PAGE.read_text()
    assert renewed(text) == text, "renew it: python -m tests.families.page"
    matrix = support_matrix()
    total = len(matrix.families)
    said = f"Of the {total} causal families of transformers {matrix.transformers}, {matrix.served} "
    assert said in text
    assert f"and {total - matrix.served} are refused" in text


def test_each_refused_family_has_a_reason() -> None:
    matrix = support_matrix()
    for family in matrix.families:
        assert family.is_served != bool(family.why)
        assert family.is_served or family.check in CHECKS
    assert FORMATS.keys() <= {family.name for family in matrix.families}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_what_the_list_says_of_a_name_the_check_says(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with pytest.raises(ModelError, match=NAMED[name]):
        check_family(CONFIG_MAPPING[name]())


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['kvrelay', 'models', '--served', '--format', 'json']\n"
        "from cluster.cli.main import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    families = {one["family"]: one for one in told["families"]}
    assert families["llama"]["tool_formats"] == ["llama3"]
    assert {one["state"] for one in families.values()} == {"exact"}
    assert len(families) == support_matrix().served

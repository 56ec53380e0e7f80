"""What the tests of whole runs have in common."""

import pytest

from tests.training.micro import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a text, a tokenizer and a model's configuration."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))

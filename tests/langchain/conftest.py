from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.scripted import Make, make_ensembles


@pytest.fixture
def make_engine() -> Iterator[Make]:
    yield from make_ensembles()

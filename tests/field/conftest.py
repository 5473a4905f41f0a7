"""Rows of the field list, see `field_ranks`."""

import pytest
from field_ranks import OneRank, Processes, Virtual, make_ranks


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> OneRank | Virtual | Processes:
    return make_ranks(request.param)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Rows of several processes run there, all that were selected from a file at once."""
    ranks = pyfuncitem.funcargs.get("ranks")
    if not isinstance(ranks, Processes):
        return None
    place = pyfuncitem.callspec.params["ranks"]
    names = tuple(
        item.function.__name__
        for item in pyfuncitem.session.items
        if item.module is pyfuncitem.module
        and getattr(item, "callspec", None) is not None
        and item.callspec.params.get("ranks") == place
    )
    ranks.report(pyfuncitem.function, pyfuncitem.module.__name__, names)
    return True

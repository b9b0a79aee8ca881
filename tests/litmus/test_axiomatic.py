"""The enumerator against outcomes whose answer is known, and every litmus program through it."""

import pytest
from axiomatic import (
    Access,
    Litmus,
    ProxyFence,
    Thread,
    allowed_outcomes,
    is_allowed,
)
from cases import cases

from weft.base.errors import UsageError
from weft.base.vocabulary import Order, Scope

# The weak outcome of these is forbidden; of all others in `cases`, allowed.
FORBIDDEN = {
    "mp-push-na+rel+acq",
    "mp-push-rlx+rel+acq",
    "mp-pull-na+rel+acq",
    "mp-push-na+rel+acq+gpu",
    "mp-push-rlx+rel+acq+gpu",
    "lb-acq+rel",
    "wrc-acq+rel+acq",
    "wrc-rlx+rel+acq",
    "isa2-na+rel+acq",
    "isa2-rlx+rel+acq",
    "corr-rlx",
    "corr2-rlx",
    "cowr-rlx",
    "add-add",
    # The adds of 0 are writes too: one exchange reads the other thread's add, and acquires.
    "sb-exchange-ar",
}
# Device scope orders nothing for another rank.
ONLY_WITHIN = {"mp-push-na+rel+acq+gpu", "mp-push-rlx+rel+acq+gpu"}


@pytest.mark.parametrize("test", cases(), ids=lambda test: test.name)
def test_what_the_model_forbids(test):
    name, across = test.name.removesuffix("+across"), test.name.endswith("+across")
    forbidden = name in FORBIDDEN and not (across and name in ONLY_WITHIN)
    assert is_allowed(test) == (not forbidden)


def passing(*, write_proxy="generic", complete=False, read_proxy="generic", fence=False):
    """Message passing whose data goes through other proxies."""
    first = [Access("store", "x", 1, proxy=write_proxy)]
    second = [Access("wait", "y", 1, order=Order.ACQUIRE)]
    if complete:
        first.append(ProxyFence(completes=True))
    if fence:
        second.append(ProxyFence())
    first.append(Access("exchange", "y", 1, order=Order.RELEASE))
    second.append(Access("load", "x", register="r0", proxy=read_proxy))
    return Litmus("mp", (Thread(0, tuple(first)), Thread(1, tuple(second))), {}, {"r0": 0})


def test_proxies_need_their_fences():
    assert not is_allowed(passing())
    assert is_allowed(passing(write_proxy="async"))
    assert not is_allowed(passing(write_proxy="async", complete=True))
    assert is_allowed(passing(read_proxy="async"))
    assert not is_allowed(passing(read_proxy="async", fence=True))
    assert not is_allowed(passing(write_proxy="engine"))
    assert is_allowed(passing(write_proxy="engine", read_proxy="async"))
    assert not is_allowed(passing(write_proxy="engine", read_proxy="async", fence=True))


def test_a_wait_that_nobody_satisfies_has_no_outcome():
    thread = Thread(0, (Access("wait", "x", 1, order=Order.ACQUIRE),))
    assert allowed_outcomes(Litmus("stuck", (thread,))) == set()


def test_one_thread_reads_its_own_writes():
    steps = (
        Access("store", "x", 1),
        Access("load", "x", register="r0"),
        Access("add", "x", 4, "r1", Order.RELAXED, Scope.BLOCK),
        Access("load", "x", register="r2"),
    )
    assert allowed_outcomes(Litmus("own", (Thread(0, steps),))) == {(1, 1, 5)}


def test_a_register_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match="'r7'.*no registers"):
        is_allowed(Litmus("x", (Thread(0, (Access("load", "x", register="r0"),)),), {}, {"r7": 1}))

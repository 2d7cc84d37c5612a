"""On the real network in float64: with equal prefix hits a batch answers what its requests answer
alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.network import Network
from tests.python_backend.real_core import (
    Alone,
    Drawn,
    bounds_of,
    cases,
    core_of,
    drawn_sizes,
    serve,
    stream,
)


def test_with_equal_prefix_hits(network64: Network) -> None:
    """Everybody shares a cached prefix and differs right behind it; hits must be equal, and then
    so are the tokens."""

    @cases(16)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        drawn = Drawn(data)
        sizes = drawn_sizes(data) | {"global_page_tokens": 16}
        blocks = data.draw(st.integers(0, 3), label="cached blocks")
        prefix = np.arange(100, 100 + 16 * blocks, dtype=np.int32)
        for i, prompt in enumerate(drawn.prompts):
            prompt[0] = 400 + i
        primer = np.append(prefix, np.int32(399))
        core = core_of(network64, bounds_of(**sizes))
        serve(core, [stream("primer", primer, 1, False, 99)], [0])
        together = drawn.streams(prefix)
        serve(core, together, drawn.arrivals)
        alone = Alone(network64, prefix)
        for one in together:
            assert one.cached_tokens == 16 * blocks
            alone.assert_answers(core, one)

    check()

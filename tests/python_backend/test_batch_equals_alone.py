"""On the real network in float64: a batch answers what each of its requests answers alone.

Arrivals, chunk sizes, page sizes, batch limits and preemptions are drawn at random; with the prefix
cache off the tokens must not depend on any of them.
"""

from __future__ import annotations

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
)


def test_without_prefix_cache(network64: Network) -> None:
    """Random pools, down to what one request needs, so that decoding requests are preempted."""
    alone = Alone(network64)

    @cases(30)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        drawn = Drawn(data)
        sizes = drawn_sizes(data)
        page = sizes["global_page_tokens"]
        wholes = [
            -(-(len(prompt) + new) // page)
            for prompt, new in zip(drawn.prompts, drawn.max_tokens, strict=True)
        ]
        together = data.draw(st.integers(2, drawn.count), label="prompts that fit together")
        prompts = sum(-(-len(prompt) // page) for prompt in drawn.prompts[:together])
        pages = 1 + max(*wholes, prompts)
        small = bounds_of(prefix_cache=False, num_global_pages=pages, **sizes)
        streams = drawn.streams()
        core = core_of(network64, small)
        serve(core, streams, drawn.arrivals)
        for one in streams:
            alone.assert_answers(core, one)

    check()

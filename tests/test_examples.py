"""The examples that a reader copies: they run, and do what they say."""

import jax_serving as loop

from jaxpaged.demo.jax_engine import dense_choices
from jaxpaged.demo.scheduler import Request
from jaxpaged.demo.text import encode
from jaxpaged.testing.compilations import compilations


def test_the_serving_loop_says_what_dense_attention_says():
    head = "import os\n" * 3
    first, second = Request("first", encode(head + "def f("), 40), Request("second", encode(head), 20, temperature=1.0)
    fork = Request("fork", [], 20, temperature=1.0, seed=4)
    ended = dict((request.name, number) for number, request in loop.serve({0: first, 2: second}, {8: (first, fork)}))
    assert set(ended) == {"first", "second", "fork"}
    assert second.num_shared == 16
    assert fork.num_shared > 16
    for request in (first, second, fork):
        assert len(request.generated) == request.max_new_tokens
        assert request.generated == dense_choices(loop.config, loop.params, request)
    assert ended["first"] < 39, "no guess was right"
    with compilations() as again:
        more = Request("more", encode("def g(x):\n" * 12), 30)
        assert [request for _, request in loop.serve({0: more}, {})] == [more]
    assert again.count == 0

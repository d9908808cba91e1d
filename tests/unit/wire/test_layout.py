"""Where the tensors of a model lie, which models have no layout, and how two signatures differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.errors import Rejected
from rudra_zmq.wire.layout import Layout, Slice, diff
from rudra_zmq.wire.messages.data import Attach, TensorSpec


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, list(shape), dtype)


def attach(**parts: list[TensorSpec]) -> Attach:
    return Attach(**({"params": [spec("w", 2, 3), spec("b", 3)]} | parts))


class TestLayout:
    def test_parts_follow_each_other(self) -> None:
        layout = Layout.of(
            attach(float_buffers=[spec("mean", 3), spec("var", 3)], int_buffers=[spec("steps", dtype="int64")])
        )
        assert layout.params == (Slice("w", (2, 3), "float32", 0, 6), Slice("b", (3,), "float32", 6, 9))
        assert layout.float_buffers[1] == Slice("var", (3,), "float32", 3, 6)
        assert layout.int_buffers == (Slice("steps", (), "int64", 0, 1),)
        assert (layout.P, layout.BF, layout.BI) == (9, 6, 1)
        assert (layout.int_offset, layout.nbytes) == (64, 72)  # 15 floats end at 60

    @given(
        st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8), st.integers(0, 5), st.integers(0, 5)
    )
    def test_arithmetic(self, shapes: list[list[int]], floats: int, ints: int) -> None:
        model = Attach(
            params=[spec("first", 1), *(spec(f"p{i}", *shape) for i, shape in enumerate(shapes))],
            float_buffers=[spec("f", floats)],
            int_buffers=[spec("i", ints, dtype="int32")],
        )
        layout = Layout.of(model)
        assert layout.params[0].start == 0 and layout.params[-1].stop == layout.P
        for one, following in zip(layout.params, layout.params[1:], strict=False):
            assert one.stop == following.start
        for one in layout.params:
            size = 1
            for n in one.shape:
                size *= n
            assert one.stop - one.start == size
        assert layout.int_offset % 8 == 0
        assert 0 <= layout.int_offset - 4 * (layout.P + floats) < 8
        assert layout.nbytes == (layout.int_offset + 8 * ints if ints else 4 * (layout.P + floats))

    @pytest.mark.parametrize(
        ("model", "named"),
        [
            (Attach(params=[]), "no parameters"),
            (Attach(params=[spec("w", 0)]), "no parameters"),
            (attach(params=[spec("w", 1), spec("w", 2)]), "w is named twice"),
            (attach(float_buffers=[spec("b", 1)]), "b is named twice"),
            (attach(params=[spec("w", 2, dtype="complex64")]), "complex64"),
            (attach(int_buffers=[spec("n", 1, dtype="float32")]), "integer buffer n"),
            (attach(params=[spec("w", 2**40), spec("v", 1)]), "v takes the model past"),
            (attach(params=[spec("w", 2**53, 2**53, 2**53)]), "w takes the model past"),
            (Attach(params=[spec("w", 1)], tied=[("head", "body")]), "tied name head"),
            (Attach(params=[spec("w", 1), spec("v", 1)], tied=[("v", "w")]), "tied name v"),
            (Attach(params=[spec("w", 1)], tied=[("head", "w"), ("head", "w")]), "tied name head"),
            (Attach(params=[spec("w", 1)], tied=[("", "w")]), "tied name ''"),
            (Attach(params=[spec("w", 1)], frozen=["x"]), "frozen parameter x"),
            (attach(float_buffers=[spec("__metadata__", 1)]), "buffer '__metadata__'"),
            (attach(int_buffers=[spec("a\nb", 1, dtype="int8")]), r"integer buffer 'a\\nb'"),
            (
                Attach(
                    params=[spec("w", 2**39)], float_buffers=[spec("f", 2**39)], int_buffers=[spec("i", dtype="bool")]
                ),
                "1099511627777 elements",
            ),
        ],
    )
    def test_no_layout(self, model: Attach, named: str) -> None:
        with pytest.raises(Rejected, match=named) as caught:
            Layout.of(model)
        assert "Fix: " in str(caught.value)

    def test_tied_and_frozen(self) -> None:
        model = Attach(params=[spec("w", 4)], tied=[("head", "w")], frozen=["w"])
        assert Layout.of(model).P == 4


class TestDiff:
    def test_equal(self) -> None:
        assert diff(attach(), attach()) == []

    def test_each_kind_of_difference(self) -> None:
        here = Attach(
            params=[spec("w", 2, 3), spec("b", 3), spec("extra", 1)], float_buffers=[spec("mean", 3, dtype="float16")]
        )
        there = Attach(
            params=[spec("w", 2, 4), spec("b", 3)], float_buffers=[spec("mean", 3)], int_buffers=[spec("n", 1)]
        )
        assert diff(here, there) == [
            "parameter w: shape [2, 3] here, [2, 4] there",
            "parameter extra: here alone",
            "buffer mean: float16 here, float32 there",
            "integer buffer n: there alone",
        ]

    def test_order(self) -> None:
        there = attach(params=[spec("b", 3), spec("w", 2, 3)])
        assert diff(attach(), there) == ["parameters in another order from number 0 on: w here, b there"]

    def test_ties_and_frozen(self) -> None:
        tied = Attach(params=[spec("w", 4)], tied=[("head", "w")])
        plain = Attach(params=[spec("w", 4)])
        assert diff(tied, plain) == ["tied parameters: head=w here, none there"]
        assert diff(plain, Attach(params=[spec("w", 4)], frozen=["w"])) == ["frozen parameters: none here, w there"]

    def test_a_quite_different_model_is_short(self) -> None:
        here = Attach(params=[spec(f"a{i}", 1) for i in range(100)])
        there = Attach(params=[spec(f"b{i}", 1) for i in range(50)])
        lines = diff(here, there)
        assert len(lines) == 13
        assert lines[-1] == "and 138 more"

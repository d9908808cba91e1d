"""Weights on their way to a state_dict file and back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rudra_zmq.errors import NotFound, Rejected
from rudra_zmq.node import export
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, TensorSpec

ATTACH = Attach(
    params=[
        TensorSpec("emb.weight", [2, 3], "float32"),
        TensorSpec("b", [], "float16"),
        TensorSpec("c", [2], "bfloat16"),
    ],
    float_buffers=[TensorSpec("bn.mean", [2], "float64")],
    int_buffers=[TensorSpec("bn.steps", [], "int64"), TensorSpec("mask", [2], "bool")],
    tied=[("head.weight", "emb.weight")],
)
LAYOUT = Layout.of(ATTACH)


def _vector() -> Vector:
    vector = Vector(LAYOUT)
    vector.params[:] = np.arange(9, dtype=np.float32) + 1
    vector.floats[:] = [0.5, 0.25]
    vector.ints[:] = [7, 1, 0]
    return vector


def test_every_key_with_its_shape_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    size = export.write(path, ATTACH, LAYOUT, _vector(), {"job": "abc", "update": "9"})
    assert size == path.stat().st_size
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"job": "abc", "update": "9"}
        assert set(file.keys()) == {"emb.weight", "head.weight", "b", "c", "bn.mean", "bn.steps", "mask"}
        for name in ("emb.weight", "head.weight"):
            np.testing.assert_array_equal(file.get_tensor(name), np.arange(1.0, 7.0).reshape(2, 3))
        assert file.get_tensor("b").dtype == np.float16 and file.get_tensor("b").shape == ()
        assert file.get_slice("c").get_dtype() == "BF16"
        assert file.get_tensor("bn.mean").dtype == np.float64
        assert file.get_tensor("bn.steps") == 7
        np.testing.assert_array_equal(file.get_tensor("mask"), [True, False])


def test_what_was_written_is_version_0(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    export.write(path, ATTACH, LAYOUT, _vector(), {})
    back = Vector(LAYOUT)
    export.load(path, ATTACH, LAYOUT, back)
    assert bytes(back.data) == bytes(_vector().data)


def test_a_tied_name_will_do_and_buffers_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    values = {
        "head.weight": np.ones((2, 3), np.float32), "b": np.array(2.0), "c": np.zeros(2, np.float32),
    }  # fmt: skip
    safetensors.numpy.save_file(values, path)
    back = Vector(LAYOUT)
    export.load(path, ATTACH, LAYOUT, back)
    np.testing.assert_array_equal(back.params, [1, 1, 1, 1, 1, 1, 2, 0, 0])
    assert not back.floats.any() and not back.ints.any()


def test_another_models_weights_are_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"emb.weight": np.ones((3, 2), np.float32), "b": np.array(2.0), "x": np.array(1)}, path)
    with pytest.raises(Rejected) as error:
        export.load(path, ATTACH, LAYOUT, Vector(LAYOUT))
    text = str(error.value)
    for part in (
        "emb.weight has shape [3, 2], the model's [2, 3]",
        "c is missing",
        "x is no tensor",
        str(path),
        "Fix:",
    ):
        assert part in text


def test_no_such_file_no_such_format_no_such_number(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="No such file"):
        export.load(tmp_path / "absent", ATTACH, LAYOUT, Vector(LAYOUT))
    (tmp_path / "text").write_text("hello, this is text")
    with pytest.raises(Rejected, match="not a safetensors file"):
        export.load(tmp_path / "text", ATTACH, LAYOUT, Vector(LAYOUT))
    bad = _vector()
    bad.params[0] = np.nan
    export.write(tmp_path / "nan", ATTACH, LAYOUT, bad, {})
    assert export.first_bad(LAYOUT, bad) == "emb.weight" and export.first_bad(LAYOUT, _vector()) == ""
    with pytest.raises(Rejected, match="NaN"):
        export.load(tmp_path / "nan", ATTACH, LAYOUT, Vector(LAYOUT))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    export.write(path, ATTACH, LAYOUT, _vector(), {})
    before = path.read_bytes()

    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError):
        export.write(path, ATTACH, LAYOUT, Vector(LAYOUT), {})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]

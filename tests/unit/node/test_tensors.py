"""Files of tensors: what we write the safetensors package reads, and the other way round."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rudra_zmq.node import tensors


def _rows() -> list[tensors.Tensor]:
    rng = np.random.Generator(np.random.PCG64(1))
    return [
        tensors.Tensor("w", "F32", (3, 5), rng.standard_normal(15).astype(np.float32)),
        tensors.Tensor("n", "I64", (), np.array([7], np.int64)),
        tensors.Tensor("none", "F32", (0, 4), np.zeros(0, np.float32)),
        tensors.Tensor("half", "F16", (2,), tensors.stored(np.array([0.1, -3.0], np.float32), "F16")),
    ]


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written = tensors.write(path, _rows(), {"job": "abc"})
    assert written.nbytes == path.stat().st_size
    assert written == tensors.crc_of(path)
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == {"w", "n", "none", "half"}
    np.testing.assert_array_equal(loaded["w"], _rows()[0].data.reshape(3, 5))
    assert loaded["n"].shape == () and loaded["n"] == 7
    assert loaded["none"].shape == (0, 4)
    np.testing.assert_array_equal(loaded["half"], np.array([0.1, -3.0], np.float16))
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"job": "abc"}


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    values = {"a": np.arange(6, dtype=np.float64).reshape(2, 3), "b": np.array([True, False])}
    safetensors.numpy.save_file(values, path, {"k": "v"})
    found, metadata = tensors.read_header(path)
    assert metadata == {"k": "v"}
    assert found["a"].shape == (2, 3)
    np.testing.assert_array_equal(tensors.read(path, found["a"]), np.arange(6.0))
    np.testing.assert_array_equal(tensors.read(path, found["b"]), [True, False])


def test_bfloat16_rounds_to_nearest_even(tmp_path: Path) -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3.0e38, np.inf, np.nan], np.float32)
    path = tmp_path / "a.safetensors"
    tensors.write(path, [tensors.Tensor("b", "BF16", (7,), tensors.stored(values, "BF16"))], {})
    back = tensors.read(path, tensors.read_header(path)[0]["b"])
    # ties: 1 + 2**-8 goes down to 1, 1 + 3*2**-8 up to 1 + 2**-6, whose last bits are even
    np.testing.assert_array_equal(back[:4], np.array([1.0, 1.0, 1.015625, -2.5], np.float32))
    assert abs(back[4] / 3.0e38 - 1) < 2**-8
    assert np.isinf(back[5]) and np.isnan(back[6])


def test_a_nan_with_low_bits_stays_a_nan() -> None:
    low = np.array([0x7F800001], np.uint32).view(np.float32)
    assert tensors.stored(low, "BF16")[0] & 0x7F != 0


@pytest.mark.parametrize("name", ["float32", "torch.float32"])
def test_dtype_names(name: str) -> None:
    assert tensors.dtype_of(name) == "F32"


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"complex64.*known: float64"):
        tensors.dtype_of("torch.complex64")


def test_a_wrong_size_or_a_name_twice_is_refused(tmp_path: Path) -> None:
    short = tensors.Tensor("w", "F32", (4,), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"'w': 12 bytes, expected 16"):
        tensors.write(tmp_path / "a", [short], {})
    twice = tensors.Tensor("w", "F32", (1,), np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="named twice"):
        tensors.write(tmp_path / "a", [twice, twice], {})


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.safetensors"
    tensors.write(path, _rows(), {})
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(ValueError):
        tensors.read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]      ", b'{"a": 1}', b'{"a":{}}', b"\xff\xfe    ",
        b'{"a":{"dtype":"X","shape":[],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[100],"data_offsets":[0,400]}}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(ValueError):
        tensors.read_header(path)


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors.write(path, _rows(), {})
    found, _ = tensors.read_header(path)
    os.truncate(path, found["w"].offset + 8)
    with pytest.raises(ValueError, match="shorter"):
        tensors.read(path, found["w"])

"""Every kernel compiles for three generations of GPU, and none of its arithmetic is fused or flushes subnormals.

NVRTC needs neither a GPU nor a driver for it. That the machine code computes what the text says is for tests/gpu.
"""

from __future__ import annotations

import re

import pytest

from rudra_zmq.update import cuda
from rudra_zmq.update.cuda import text_of
from rudra_zmq.update.gpu import KERNELS as STEP_KERNELS
from rudra_zmq.update.gpu_codecs import KERNELS as CODEC_KERNELS
from rudra_zmq.update.rules import RULES

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra dev: cuda-core, nvidia-cuda-nvrtc")
core = pytest.importorskip("cuda.core", reason="needs the extra dev: cuda-core, nvidia-cuda-nvrtc")

PROGRAMS = [*(("step", rule) for rule in RULES), ("codecs", "")]


def compiled(name: str, rule: str, arch: str) -> bytes:
    """Machine code, by the options that jobs use."""
    text, options = text_of(name, rule)
    flags = dict(option.lstrip("-").split("=", 1) for option in options if not option.startswith("-D"))
    defines = [tuple(option[2:].split("=")) for option in options if option.startswith("-D")]
    assert flags == {"std": "c++17", "fmad": "false", "ftz": "false", "prec-div": "true", "prec-sqrt": "true"}
    chosen = core.ProgramOptions(
        std="c++17", arch=arch, fma=False, ftz=False, prec_div=True, prec_sqrt=True, define_macro=defines
    )
    return bytes(core.Program(text, "c++", chosen).compile("cubin").code)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("name", "rule"), PROGRAMS)
def test_every_kernel_compiles(name: str, rule: str, arch: str) -> None:
    code = compiled(name, rule, arch)
    for kernel in STEP_KERNELS if name == "step" else CODEC_KERNELS:
        assert f".text.{kernel}\0".encode() in code


@pytest.mark.parametrize(("name", "rule"), PROGRAMS)
def test_each_operation_is_rounded_once(name: str, rule: str) -> None:
    """In PTX: `.rn` forbids the driver to fuse, no `.ftz`, no `fma`, no approximate division or root."""
    text, options = text_of(name, rule)
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"text.cu", 0, [], [])
    flags = [option.encode() for option in (*options, "-arch=compute_80")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    assert status == 0
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    used = set(re.findall(r"\b(?:add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt)\.\w*\.?\w*\.?f(?:32|64)\b", ptx.decode()))
    allowed = {f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div", "sqrt")} | {
        "add.rn.f64",
        "mul.rn.f64",
    }
    assert used and used <= allowed
    assert b".ftz" not in ptx
    assert ("div.rn.f32" in used) == (name == "codecs" or RULES[rule].normalised)


def test_by_the_compiler_that_cupy_brings() -> None:
    """As a job does it; its binding needs no driver either."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not here; NVRTC itself was asked above")
    for name, rule in PROGRAMS:
        code, suffix = cuda.compiled(cupy.cuda.nvrtc, *text_of(name, rule), name, 90)
        assert code[:4] == b"\x7fELF" and suffix == ".cubin"


def test_a_text_that_fuses_is_seen() -> None:
    _, program = nvrtc.nvrtcCreateProgram(
        b'extern "C" __global__ void f(float *x) { *x = x[1] * x[2] + x[3]; }', b"text.cu", 0, [], []
    )
    nvrtc.nvrtcCompileProgram(program, 2, [b"--ftz=true", b"-arch=compute_80"])
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    assert b"fma.rn.ftz.f32" in ptx

"""``rudra bench update --device cuda``: one update on a GPU, against what its memory gives and against torch.optim.

Owns: the cases, their vectors, the contenders, the rows. All vectors lie on the device; each contender waits for the
device before its time is taken. A case's traffic is the least that an update can move: w, c gradients and the state
read, state and new weights written, and what is sent down. The limit is a copy on the device that moves as many bytes,
half of them read and half written; its time is the floor.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rudra_zmq.bench.rows import figure
from rudra_zmq.bench.timing import Times, in_turns
from rudra_zmq.bench.update import Alternating
from rudra_zmq.errors import RudraError
from rudra_zmq.update.codecs import Quantised, Sparse
from rudra_zmq.update.cuda import Device
from rudra_zmq.update.gpu import GpuUpdate
from rudra_zmq.update.gpu_codecs import GpuCodecs
from rudra_zmq.update.rules import RULES, GroupSpan, RuleSpec
from rudra_zmq.wire.compress import BLOCK

ENCODINGS = ("float32", "float16", "bfloat16", "int8", "topk")
SENT = ("float32", "float16", "bfloat16", "int8")
LIMIT = "device copy"
ENOUGH = 0.9
"""Of the copy's speed: below it, a line of advice."""

_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
_PLAIN_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1 + 4 / BLOCK}
_SHARE = 100
"""topk sends one entry of so many."""

_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
}


@dataclass(frozen=True)
class CudaCase:
    """What is timed. size: bytes of the model in float32. sent: how the new weights go down."""

    rule: str
    c: int
    size: int
    encoding: str = "float32"
    clip: bool = False
    sent: str = "float32"

    @property
    def elements(self) -> int:
        """Of the model."""
        return max(1, self.size // 4)

    @property
    def entries(self) -> int:
        """That topk sends."""
        return -(-self.elements // _SHARE)

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient."""
        return 8 * self.entries if self.encoding == "topk" else int(self.elements * _PLAIN_BYTES[self.encoding])

    @property
    def traffic(self) -> int:
        """Bytes of one update; the second sweep of clipping is not counted, nor what decodes topk."""
        sent = 0 if self.sent == "float32" else int(self.elements * _PLAIN_BYTES[self.sent])
        return self.elements * 4 * (2 + 2 * len(RULES[self.rule].state)) + self.c * self.gradient_bytes + sent

    def device_bytes(self, torch: bool) -> int:
        """What all of it takes of the device: versions, scratch, state, gradients, the copy; torch's two ways."""
        state, gradients = GpuUpdate.nbytes(self.rule, self.elements), self.c * self.gradient_bytes
        vectors = 2 + (3 if self.encoding == "topk" else 0) + (1 if self.sent != "float32" else 0)
        ours = 4 * self.elements * vectors + state + gradients + self.traffic
        return ours + (gradients + 2 * (state + 8 * self.elements) if torch else 0)


@dataclass(frozen=True)
class CudaRow:
    """A line of the result. floor_ms: the traffic over the copy's bandwidth; ratio: the other's time over ours."""

    what: str
    rule: str
    c: int
    size: int
    device: str
    backend: str
    encoding: str
    clip: bool
    sent: str
    median_ms: float
    gb_per_s: float
    floor_ms: float
    against: str
    ratio: float

    def as_object(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def measure(case: CudaCase, turns: int, device: Device) -> list[CudaRow]:
    """A row against the copy, and one against each way of torch.optim that there is. RudraError of the device."""
    torch = torch_on_cuda() if case.encoding in _DTYPES and not case.clip else None
    device.need(case.device_bytes(torch is not None))
    with device.errors():
        times = _times(case, turns, device, torch)
        device.xp.get_default_memory_pool().free_all_blocks()
    median = times.median("ours")
    return [
        CudaRow(
            what="update",
            rule=case.rule,
            c=case.c,
            size=4 * case.elements,
            device=device.name,
            backend="cuda",
            encoding=case.encoding,
            clip=case.clip,
            sent=case.sent,
            median_ms=1e3 * median,
            gb_per_s=case.traffic / median / 1e9,
            floor_ms=1e3 * times.median(LIMIT),
            against=name,
            ratio=times.ratio("ours", name),
        )
        for name in times.seconds
        if name != "ours"
    ]


def _times(case: CudaCase, turns: int, device: Device, torch: Any) -> Times:
    xp = device.xp
    source, target = (xp.zeros(case.traffic // 2, np.uint8) for _ in range(2))

    def copy() -> None:
        xp.copyto(target, source)
        device.synchronize()

    contenders: dict[str, Callable[[], object]] = {"ours": _ours(case, device), LIMIT: copy}
    if torch is not None:
        contenders.update(torch_contenders(torch, case, device.name))
    return in_turns(contenders, time.perf_counter, turns)


def _ours(case: CudaCase, device: Device) -> Callable[[], object]:
    n, xp = case.elements, device.xp
    values = np.random.default_rng(1).standard_normal(n, dtype=np.float32)
    versions = xp.asarray(values), xp.zeros(n, np.float32)
    codecs = GpuCodecs(device, n)
    terms = [(1.0 / case.c, g) for g in _gradients(case, codecs, versions[0])]
    spec = RuleSpec.of(case.rule, [GroupSpan(0, n, 1.0, 1e-4)], 1.0 if case.clip else None)
    update = GpuUpdate(spec, n, device)
    sent = xp.zeros(n, _DTYPES[case.sent]) if case.sent in ("float16", "bfloat16") else None
    blocks = _quantised(xp, n) if case.sent == "int8" else None

    def step(w: Any, out: Any) -> None:
        update.step(w, terms, None, 1.0, 1.0, 1e-3, out, sent)
        if blocks is not None:
            codecs.encode_int8(out, blocks)

    return Alternating(step, versions)


def _quantised(xp: Any, n: int) -> Quantised:
    return Quantised(xp.zeros(-(-n // BLOCK), np.float32), xp.zeros(n, np.int8))


def _gradients(case: CudaCase, codecs: GpuCodecs, values: Any) -> Iterator[Any]:
    """c of the same values, each in memory of its own."""
    n, xp = case.elements, codecs.device.xp
    for _ in range(case.c):
        if case.encoding == "float32":
            g = xp.zeros(n, np.float32)
            xp.copyto(g, values)
            yield g
        elif case.encoding == "int8":
            quantised = _quantised(xp, n)
            codecs.encode_int8(values, quantised)
            yield quantised
        elif case.encoding == "topk":
            sparse = Sparse(xp.zeros(case.entries, np.uint32), xp.zeros(case.entries, np.float32), n)
            codecs.encode_topk(values, xp.zeros(n, np.float32), xp.zeros(n, np.float32), sparse)
            yield sparse
        else:
            halves = xp.zeros(n, _DTYPES[case.encoding])
            codecs.encode_halves(values, halves)
            yield halves


# ---- torch.optim


def torch_on_cuda() -> Any:
    """torch where it is installed and sees a GPU, else None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def torch_contenders(torch: Any, case: CudaCase, where: str) -> dict[str, Callable[[], object]]:
    """The c - 1 additions and the optimiser's step on one flat parameter, fused and foreach, where torch has them.

    That parameter is its best case; the gradients are not weighted, and the weights are changed in place.
    """
    if case.rule not in _TORCH:
        return {}
    name, settings = _TORCH[case.rule]
    gradients = [torch.ones(case.elements, dtype=getattr(torch, case.encoding), device=where) for _ in range(case.c)]
    made: dict[str, Callable[[], object]] = {}
    for how in ("fused", "foreach"):
        parameter = torch.nn.Parameter(torch.zeros(case.elements, device=where))
        parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer = getattr(torch.optim, name)([parameter], lr=1e-3, weight_decay=1e-4, **settings, **{how: True})
            work = _torch_work(torch, optimizer, parameter, gradients, where)
            work()
        except (TypeError, RuntimeError) as error:  # this optimiser, or this version, has no such way
            if "out of memory" in str(error):
                fix = "see with nvidia-smi who holds it"
                raise RudraError("the GPU's memory is taken: torch got none", where=where, fix=fix) from None
            continue
        made[f"torch {how}"] = work
    return made


def _torch_work(torch: Any, optimizer: Any, parameter: Any, gradients: Sequence[Any], where: str) -> Callable[[], None]:
    def work() -> None:
        if len(gradients) > 1:
            torch.add(gradients[0], gradients[1], out=parameter.grad)
            for g in gradients[2:]:
                parameter.grad.add_(g)
        elif gradients[0].dtype == parameter.dtype:
            parameter.grad = gradients[0]
        else:
            parameter.grad.copy_(gradients[0])
        optimizer.step()
        if where != "cpu":
            torch.cuda.synchronize(where)

    return work


# ---- words


def line(row: CudaRow, head: bool) -> str:
    """A line of the table, the first one under the names of the columns."""
    text = "{:<14}{:>3}{:>9}  {:<9}{:<9}{:>9}{:>8}{:>10}  {:<14}{:>6}"
    cells = (row.rule, str(row.c), f"{row.size / 1e6:.2f}", row.encoding, row.sent)
    figures = (figure(row.median_ms), figure(row.gb_per_s), figure(row.floor_ms), row.against, f"{row.ratio:.2f}")
    told = text.format(*cells, *figures)
    heads = ("RULE", "C", "MB", "GRADIENT", "SENT", "MS", "GB/S", "FLOOR MS", "AGAINST", "RATIO")
    return f"{text.format(*heads)}\n{told}" if head else told


def advice(rows: Sequence[CudaRow]) -> list[str]:
    """A line for each thing that the rows lack or show."""
    lines = []
    limits = [row for row in rows if row.against == LIMIT]
    slow = [row for row in limits if row.ratio < ENOUGH]
    if slow:
        lines.append(f"note: {len(slow)} of {len(limits)} cases below {ENOUGH} of what a copy on the device gives")
    if torch_on_cuda() is None:
        lines.append("note: torch is not here, or sees no GPU: nothing is held against torch.optim")
    return lines

"""The limit of an update: a kernel that moves as much memory and does next to nothing with it.

Owns: its text for LLVM, in several shapes, and running it on several threads. It reads R vectors, adds to S vectors in
place and writes one out of place: with R = c + 1, the traffic of an update of c gradients and S vectors of state.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import pairwise

from rudra_zmq.update.jit import Module, address_of
from rudra_zmq.update.llvm_text import Text
from rudra_zmq.update.rules import F32, Gradient
from rudra_zmq.update.team import Team

SHAPES = ((16, False), (64, False), (16, True), (64, True))
"""(elements per turn, whether the output passes the cache by). Which is best depends on the machine."""

MULTIPLE = 64
"""Sizes are multiples of this many elements."""

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def stream_ir(reads: int, halves: int, states: int, lanes: int, past_cache: bool) -> str:
    """i32 @stream(table of addresses: reads in float32, reads of 16 bits, states, output; start; stop)."""
    t = Text()
    t.lanes = lanes
    pointers = []
    for index in range(reads + halves + states + 1):
        pointers.append(t.value(f"load ptr, ptr {t.at('%table', str(index), 'ptr')}"))
    t.put("br label %head")
    t.label("%head")
    t.put("%i = phi i64 [ %start, %entry ], [ %i.next, %inside ]")
    t.put("%more = icmp ult i64 %i, %stop")
    t.put("br i1 %more, label %inside, label %end")
    t.label("%inside")
    total = t.load(pointers[0], "%i")
    for pointer in pointers[1:reads]:
        total = t.add(total, t.load(pointer, "%i"))
    for pointer in pointers[reads : reads + halves]:
        wide = t.value(f"zext {t.type('i16')} {t.load(pointer, '%i', 'i16')} to {t.type('i32')}")
        total = t.add(total, t.value(f"bitcast {t.type('i32')} {wide} to {t.type('float')}"))
    for pointer in pointers[reads + halves : -1]:
        total = t.add(total, t.load(pointer, "%i"))
        t.store(total, pointer, "%i")
    how = f"align {4 * lanes}, !nontemporal !0" if past_cache else "align 4"
    t.put(f"store {t.type('float')} {total}, ptr {t.at(pointers[-1], '%i', 'float')}, {how}")
    t.put(f"%i.next = add i64 %i, {lanes}")
    t.put("br label %head")
    t.label("%end")
    t.put("fence seq_cst")
    t.put("ret i32 0")
    return t.function("i32 @stream(ptr %table, i64 %start, i64 %stop)") + "\n!0 = !{i32 1}\n"


class Stream:
    """One shape of the kernel, with so many threads. jit.Unavailable where nothing can be compiled."""

    def __init__(
        self, gradients: Sequence[Gradient], states: Sequence[F32], threads: int, shape: tuple[int, bool]
    ) -> None:
        """All vectors have the same number of elements, a multiple of MULTIPLE, and begin at a cache line."""
        whole = [vector for vector in gradients if vector.itemsize == 4]
        halves = [vector for vector in gradients if vector.itemsize == 2]
        text = stream_ir(1 + len(whole), len(halves), len(states), *shape)
        self._module = Module(text, {"stream": _ARGUMENTS})
        self._call = self._module.functions["stream"]
        self._hold = [*whole, *halves, *states]
        self._addresses = [address_of(vector) for vector in self._hold]
        turns = gradients[0].size // MULTIPLE
        cuts = [turns * i // threads * MULTIPLE for i in range(threads + 1)]
        self._shares = list(pairwise(cuts))
        self._team = Team(threads)

    def __call__(self, w: F32, out: F32) -> None:
        """Once over all vectors."""
        addresses = (address_of(w), *self._addresses, address_of(out))
        table = struct.pack(f"={len(addresses)}q", *addresses)

        def part(share: tuple[int, int]) -> bool:
            return self._call(table, *share) == 0

        self._team.run(part, self._shares)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

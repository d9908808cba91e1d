"""The sum of an update's gradients as text for LLVM, and the loops over elements that all its functions have.

Owns: decoding, the order of the sum, its squares. Must not know: rules, who compiles the text, threads.

Vectors are explicit, so no optimiser has a say: `fmul` and `fadd` without flags are never fused, and each is rounded
once. An element's result is the same in a vector of 32, of 16 or alone, so bits do not depend on where a loop begins.
The sum is in registers while the gradients are read: each vector in memory is touched once.

In the text, `gradients` is a table of `c` rows {address, index in ENCODINGS, coefficient} (:data:`ROW`). `plain` is c
where all are in the one encoding that the text was made for and c is one of :data:`PLAIN`, else 0: those sums are
written out, without a loop over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rudra_zmq.update.llvm_text import Text
from rudra_zmq.update.rules import CACHE_LINE, ENCODINGS, NORM_BLOCK

LANES = (32, 16, 1)
"""Elements per turn of the loops over a span: the first takes what it can, the next ones what is left."""

PLAIN = (1, 2, 3, 4)

ROW = "{ i64, i32, float }"

RUN = 128
"""Elements that NumPy's pairwise sum adds as 8 sums side by side."""

ABREAST = 4
"""Runs at a time: an addition takes several cycles, and the next one of the same run waits for it."""

GRADIENTS = "ptr %gradients, i64 %c, i32 %plain"
"""The arguments that every function begins with."""


def _load(t: Text, base: str, i: str, encoding: str) -> str:
    """Element i of a gradient, decoded. The processor converts float16 itself (jit.converts_float16)."""
    if encoding == "float32":
        return t.load(base, i)
    if encoding == "float16":
        return t.value(f"fpext {t.type('half')} {t.load(base, i, 'half')} to {t.type('float')}")
    wide = t.value(f"zext {t.type('i16')} {t.load(base, i, 'i16')} to {t.type('i32')}")
    bits = t.op("shl", wide, t.number("16", "i32"), "i32")
    return t.value(f"bitcast {t.type('i32')} {bits} to {t.type('float')}")


def _row(t: Text, k: str) -> tuple[str, str, str]:
    """Address, encoding and coefficient of a gradient."""
    row = t.value(f"getelementptr {ROW}, ptr %gradients, i64 {k}")
    fields = []
    for index, kind in enumerate(("i64", "i32", "float")):
        field = t.value(f"getelementptr {ROW}, ptr {row}, i64 0, i32 {index}")
        fields.append(t.value(f"load {kind}, ptr {field}"))
    return t.value(f"inttoptr i64 {fields[0]} to ptr"), fields[1], fields[2]


def _term(t: Text, base: str, encoding: str, i: str) -> tuple[str, str]:
    """Element i of a gradient in any encoding, and the block that this ends in."""
    labels = [t.name(name) for name in ENCODINGS]
    join, nowhere = t.name("decoded"), t.name("nowhere")
    cases = " ".join(f"i32 {index}, label {label}" for index, label in enumerate(labels))
    t.put(f"switch i32 {encoding}, label {nowhere} [ {cases} ]")
    ways = []
    for name, label in zip(ENCODINGS, labels, strict=True):
        t.label(label)
        ways.append(f"[ {_load(t, base, i, name)}, {label} ]")
        t.put(f"br label {join}")
    t.label(nowhere)
    t.put("unreachable")
    t.label(join)
    return t.value(f"phi {t.type('float')} {', '.join(ways)}"), join


def _general_sum(t: Text, i: str, entry: str) -> tuple[str, str]:
    """Any c, any encodings. It starts at -0.0, which leaves the first product as it is."""
    loop, done, k, k_next, acc, acc_next = (t.name(stem) for stem in ("term", "summed", "k", "k", "acc", "acc"))
    mark = len(t.lines)
    t.label(loop)
    base, encoding, b = _row(t, k)
    value, last = _term(t, base, encoding, i)
    t.put(f"{acc_next} = fadd {t.type('float')} {acc}, {t.mul(value, t.splat(b))}")
    t.put(f"{k_next} = add i64 {k}, 1")
    more = t.value(f"icmp ult i64 {k_next}, %c")
    t.put(f"br i1 {more}, label {loop}, label {done}")
    t.label(done)
    t.lines[mark : mark + 1] = [  # the phis come first, and name what the body computes
        f"  br label {loop}",
        f"{loop[1:]}:",
        f"  {k} = phi i64 [ 0, {entry} ], [ {k_next}, {last} ]",
        f"  {acc} = phi {t.type('float')} [ {t.number('-0.0', 'float')}, {entry} ], [ {acc_next}, {last} ]",
    ]
    return acc_next, done


def _plain_sum(t: Text, i: str, c: int, encoding: str) -> str:
    acc = ""
    for k in range(c):
        base, _, b = _row(t, str(k))
        product = t.mul(_load(t, base, i, encoding), t.splat(b))
        acc = t.add(acc, product) if acc else product
    return acc


def emit_sum(t: Text, i: str, encoding: str) -> tuple[str, str]:
    """The sum of the gradients at element i, and the block that this ends in.

    The loops over what is left of a span make do with the general sum: the bits are the same.
    """
    general, join = t.name("general"), t.name("sum")
    if t.lanes != LANES[0]:
        t.put(f"br label {general}")
        t.label(general)
        return _general_sum(t, i, general)
    labels = {c: t.name(f"plain{c}_") for c in PLAIN}
    cases = " ".join(f"i32 {c}, label {label}" for c, label in labels.items())
    t.put(f"switch i32 %plain, label {general} [ {cases} ]")
    t.label(general)
    ways = [_general_sum(t, i, general)]
    t.put(f"br label {join}")
    for c, label in labels.items():
        t.label(label)
        ways.append((_plain_sum(t, i, c, encoding), label))
        t.put(f"br label {join}")
    t.label(join)
    return t.value(f"phi {t.type('float')} " + ", ".join(f"[ {value}, {block} ]" for value, block in ways)), join


def emit_loops(t: Text, start: str, stop: str, out: str, body: Callable[[str], str]) -> None:
    """body at each element of [start, stop), several at a time; it gets the element, and gives its last block.

    One at a time until ``out`` is at a cache line, so that whole lines are written.
    """
    address = t.value(f"ptrtoint ptr {t.at(out, start, 'float')} to i64")
    short = t.value(f"and i64 {t.value(f'sub i64 0, {address}')}, {CACHE_LINE - 1}")
    line = t.value(f"add i64 {start}, {t.value(f'lshr i64 {short}, 2')}")
    line = t.value(f"call i64 @llvm.umin.i64(i64 {line}, i64 {stop})")
    at, entry = start, t.name("from")
    t.put(f"br label {entry}")
    t.label(entry)
    for lanes, end in [(1, line), *((lanes, stop) for lanes in LANES)]:
        t.lanes = lanes
        head, inside, after = (t.name(stem) for stem in ("head", "inside", "after"))
        i, i_next = t.name("i"), t.name("i")
        mark = len(t.lines)
        t.label(inside)
        last = body(i)
        t.put(f"{i_next} = add i64 {i}, {lanes}")
        t.put(f"br label {head}")
        t.lines[mark : mark + 1] = [
            f"  br label {head}",
            f"{head[1:]}:",
            f"  {i} = phi i64 [ {at}, {entry} ], [ {i_next}, {last} ]",
            f"  {i}.end = add i64 {i}, {lanes}",
            f"  {i}.fits = icmp ule i64 {i}.end, {end}",
            f"  br i1 {i}.fits, label {inside}, label {after}",
            f"{inside[1:]}:",
        ]
        t.label(after)
        at, entry = i, after
    t.lanes = 1


def sum_ir(encoding: str) -> str:
    """i32 @sum(gradients, c, plain, out, start, stop): out = the sum. It may be written over one of them."""
    t = Text()

    def body(i: str) -> str:
        g, last = emit_sum(t, i, encoding)
        t.store(g, "%out", i)
        return last

    emit_loops(t, "%start", "%stop", "%out", body)
    t.put("ret i32 0")
    return t.function(f"i32 @sum({GRADIENTS}, ptr %out, i64 %start, i64 %stop)")


def sum_squares_ir() -> str:
    """i32 @sum_squares(gradients, c, plain, out, start, stop, squares): @sum, and the squares of the sum.

    start and stop are multiples of NORM_BLOCK; squares[i] becomes the float64 sum of squares of out's i-th NORM_BLOCK,
    added as NumPy's pairwise sum adds them: 8 sums side by side over 128 numbers, then neighbours, again and again.
    """
    t = Text()
    t.put(f"%runs = alloca [{NORM_BLOCK // RUN} x double], align 64")
    t.put("br label %blocks")
    t.label("%blocks")
    t.put("%i = phi i64 [ %start, %entry ], [ %i.next, %block.end ]")
    t.put("%more = icmp ult i64 %i, %stop")
    t.put("br i1 %more, label %block, label %end")
    t.label("%block")
    t.put(f"%i.next = add i64 %i, {NORM_BLOCK}")
    t.put(f"call i32 @sum({GRADIENTS}, ptr %out, i64 %i, i64 %i.next)")
    t.put("br label %run")
    t.label("%run")
    t.put("%j = phi i64 [ %i, %block ], [ %j.next, %run ]")
    t.put("%r = phi i64 [ 0, %block ], [ %r.next, %run ]")
    t.put(f"%j.next = add i64 %j, {ABREAST * RUN}")
    t.put(f"%r.next = add i64 %r, {ABREAST}")
    for index, total in enumerate(_runs_of_squares(t, "%j")):
        place = t.at("%runs", t.value(f"add i64 %r, {index}"), "double")
        t.put(f"store double {total}, ptr {place}, align 8")
    t.put("%again = icmp ult i64 %j.next, %i.next")
    t.put("br i1 %again, label %run, label %block.end")
    t.label("%block.end")
    sums = []
    for run in range(NORM_BLOCK // RUN):
        sums.append(t.value(f"load double, ptr {t.at('%runs', str(run), 'double')}, align 8"))
    block = t.value(f"udiv i64 %i, {NORM_BLOCK}")
    t.put(f"store double {_neighbours(t, sums)}, ptr {t.at('%squares', block, 'double')}, align 8")
    t.put("br label %blocks")
    t.label("%end")
    t.put("ret i32 0")
    return t.function(f"i32 @sum_squares({GRADIENTS}, ptr %out, i64 %start, i64 %stop, ptr %squares)")


def _runs_of_squares(t: Text, start: str) -> list[str]:
    """The float64 sums of squares of ABREAST runs of %out. The squares are exact."""
    t.lanes = 8
    totals = [""] * ABREAST
    for offset in range(0, RUN, 8):
        for run, total in enumerate(totals):
            part = t.load("%out", t.value(f"add i64 {start}, {run * RUN + offset}"))
            wide = t.value(f"fpext <8 x float> {part} to <8 x double>")
            square = t.op("fmul", wide, wide, "double")
            totals[run] = t.op("fadd", total, square, "double") if total else square
    t.lanes = 1
    return [
        _neighbours(t, [t.value(f"extractelement <8 x double> {total}, i64 {lane}") for lane in range(8)])
        for total in totals
    ]


def _neighbours(t: Text, sums: Sequence[str]) -> str:
    while len(sums) > 1:
        sums = [t.op("fadd", a, b, "double") for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]

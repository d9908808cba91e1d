"""The fused pass as text for LLVM: one function per rule, and the sum of gradients alone.

Owns: the loops and the order of operations, which is that of rules.py. Must not know: who compiles the text,
threads, protocols, clocks.

Vectors are explicit, so no optimiser has a say: `fmul` and `fadd` without flags are never fused, and each is rounded
once. An element's result is the same in a vector of 64, of 16 or alone, so bits do not depend on where a loop begins.
The sum is in registers while all c gradients of 64 elements are read: each vector in memory is touched once. It
starts at -0.0, which leaves every first product as it is.

In the text, `gradients` is a table of c rows {address, index in ENCODINGS, coefficient} (:data:`ROW`); `spans` one
of rows {start, stop, kind} of int64; `scalars` one of rows {step, decay, eps} of float32 by kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from rudra_zmq.update.llvm_text import Text
from rudra_zmq.update.rules import ENCODINGS, NORM_BLOCK

LANES = (64, 16, 1)
"""Elements per turn of the loops over a span: the first takes what it can, the next ones what is left."""

ROW = "{ i64, i32, float }"

RUN = 128
"""Elements that NumPy's pairwise sum adds as 8 sums side by side."""

CONSTANTS = ("momentum", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "rho", "one_minus_rho")


# ---- the rules: (text, constants, step, decay or "", eps, state, w, g) -> (new state, what is taken off w)

Parts = tuple[list[str], str]


def _sgd(t: Text, c: Mapping[str, str], p: Mapping[str, str], state: Sequence[str], g: str) -> Parts:
    return [], t.mul(g, p["step"])


def _velocity(t: Text, c: Mapping[str, str], v: str, g: str) -> str:
    return t.add(t.mul(c["momentum"], v), g)


def _momentum(t: Text, c: Mapping[str, str], p: Mapping[str, str], state: Sequence[str], g: str) -> Parts:
    v = _velocity(t, c, state[0], g)
    return [v], t.mul(v, p["step"])


def _nesterov(t: Text, c: Mapping[str, str], p: Mapping[str, str], state: Sequence[str], g: str) -> Parts:
    v = _velocity(t, c, state[0], g)
    return [v], t.mul(_velocity(t, c, v, g), p["step"])


def _normalised(t: Text, p: Mapping[str, str], s: str, numerator: str) -> str:
    return t.mul(t.div(numerator, t.add(t.sqrt(s), p["eps"])), p["step"])


def _adagrad(t: Text, c: Mapping[str, str], p: Mapping[str, str], state: Sequence[str], g: str) -> Parts:
    s = t.add(state[0], t.mul(g, g))
    return [s], _normalised(t, p, s, g)


def _rudra_adagrad(t: Text, c: Mapping[str, str], p: Mapping[str, str], state: Sequence[str], g: str) -> Parts:
    s = t.add(state[0], t.mul(g, g))
    v = _velocity(t, c, state[1], t.div(g, t.sqrt(t.add(s, t.number("1.0", "float")))))
    return [s, v], t.mul(v, p["step"])


def _rmsprop(t: Text, c: Mapping[str, str], p: Mapping[str, str], state: Sequence[str], g: str) -> Parts:
    s = t.add(t.mul(c["rho"], state[0]), t.mul(c["one_minus_rho"], t.mul(g, g)))
    return [s], _normalised(t, p, s, g)


def _adam(t: Text, c: Mapping[str, str], p: Mapping[str, str], state: Sequence[str], g: str) -> Parts:
    m = t.add(t.mul(c["beta1"], state[0]), t.mul(c["one_minus_beta1"], g))
    v = t.add(t.mul(c["beta2"], state[1]), t.mul(c["one_minus_beta2"], t.mul(g, g)))
    return [m, v], _normalised(t, p, v, m)


Rule = Callable[[Text, Mapping[str, str], Mapping[str, str], Sequence[str], str], Parts]

RULES_IR: Mapping[str, Rule] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adagrad": _adagrad,
    "rudra-adagrad": _rudra_adagrad,
    "rmsprop": _rmsprop,
    "adam": _adam,
    "adamw": _adam,
}
"""One for each name of RULES; adamw's decay is added where the weights are at hand."""


# ---- one gradient, decoded; the sum of all


def _decode_float16(t: Text, h: str) -> str:
    """Bits of float16 to float32 in integers: exact, subnormals too, with or without the processor's help."""
    wide = t.value(f"zext {t.type('i16')} {h} to {t.type('i32')}")
    number = {n: t.number(str(n), "i32") for n in (13, 16, 0x7FFF, 0x8000, 112 << 23, 113 << 23, 31 << 23, 1 << 23)}
    sign = t.op("shl", t.op("and", wide, number[0x8000], "i32"), number[16], "i32")
    body = t.op("shl", t.op("and", wide, number[0x7FFF], "i32"), number[13], "i32")
    normal = t.op("add", body, number[112 << 23], "i32")
    endless = t.op("add", normal, number[112 << 23], "i32")
    above = t.value(f"icmp uge {t.type('i32')} {body}, {number[31 << 23]}")
    below = t.value(f"icmp ult {t.type('i32')} {body}, {number[1 << 23]}")
    lifted = t.value(f"bitcast {t.type('i32')} {t.op('add', body, number[113 << 23], 'i32')} to {t.type('float')}")
    tiny = t.sub(lifted, t.number("0x3F10000000000000", "float"))  # 2^-14
    tiny = t.value(f"bitcast {t.type('float')} {tiny} to {t.type('i32')}")
    magnitude = t.pick(f"{t.type('i1')} {above}", endless, normal, "i32")
    magnitude = t.pick(f"{t.type('i1')} {below}", tiny, magnitude, "i32")
    bits = t.op("or", magnitude, sign, "i32")
    return t.value(f"bitcast {t.type('i32')} {bits} to {t.type('float')}")


def _decode_bfloat16(t: Text, h: str) -> str:
    wide = t.value(f"zext {t.type('i16')} {h} to {t.type('i32')}")
    bits = t.op("shl", wide, t.number("16", "i32"), "i32")
    return t.value(f"bitcast {t.type('i32')} {bits} to {t.type('float')}")


def _sum(t: Text, i: str, entry: str) -> tuple[str, str]:
    """The sum of %c gradients at element i; ``entry`` is the block that this follows. Gives sum, last block."""
    loop, whole, half, sixteen, brain, join, done = (
        t.name(stem) for stem in ("term", "f32_", "half", "f16_", "bf16_", "join", "summed")
    )
    k, acc, k_next, acc_next = (t.name(stem) for stem in ("k", "acc", "k", "acc"))
    real = t.type("float")
    t.put(f"br label {loop}")
    t.label(loop)
    t.put(f"{k} = phi i64 [ 0, {entry} ], [ {k_next}, {join} ]")
    t.put(f"{acc} = phi {real} [ {t.number('-0.0', 'float')}, {entry} ], [ {acc_next}, {join} ]")
    row = t.value(f"getelementptr {ROW}, ptr %gradients, i64 {k}")
    fields = []
    for index, kind in enumerate(("i64", "i32", "float")):
        field = t.value(f"getelementptr {ROW}, ptr {row}, i64 0, i32 {index}")
        fields.append(t.value(f"load {kind}, ptr {field}"))
    base = t.value(f"inttoptr i64 {fields[0]} to ptr")
    t.put(f"switch i32 {fields[1]}, label {half} [ i32 0, label {whole} ]")
    t.label(whole)
    plain = t.load(base, i)
    t.put(f"br label {join}")
    t.label(half)
    short = t.load(base, i, "i16")
    is_brain = t.value(f"icmp eq i32 {fields[1]}, {ENCODINGS.index('uint16')}")
    t.put(f"br i1 {is_brain}, label {brain}, label {sixteen}")
    t.label(sixteen)
    from_16 = _decode_float16(t, short)
    t.put(f"br label {join}")
    t.label(brain)
    from_brain = _decode_bfloat16(t, short)
    t.put(f"br label {join}")
    t.label(join)
    value = t.value(f"phi {real} [ {plain}, {whole} ], [ {from_16}, {sixteen} ], [ {from_brain}, {brain} ]")
    t.put(f"{acc_next} = fadd {real} {acc}, {t.mul(value, t.splat(fields[2]))}")
    t.put(f"{k_next} = add i64 {k}, 1")
    more = t.value(f"icmp ult i64 {k_next}, %c")
    t.put(f"br i1 {more}, label {loop}, label {done}")
    t.label(done)
    return acc_next, done


# ---- loops


def _over(t: Text, start: str, stop: str, body: Callable[[str, str], str]) -> None:
    """body at each element of [start, stop), 64, 16 or 1 at a time; it gets (element, its block), gives its last."""
    at, entry = start, t.name("from")
    t.put(f"br label {entry}")
    t.label(entry)
    for lanes in LANES:
        t.lanes = lanes
        head, inside, out = (t.name(stem) for stem in ("head", "inside", "out"))
        i, i_next = t.name("i"), t.name("i")
        mark = len(t.lines)
        t.put("")  # the branch into the loop and its phi are known once the body is
        t.label(inside)
        last = body(i, inside)
        t.put(f"{i_next} = add i64 {i}, {lanes}")
        t.put(f"br label {head}")
        t.lines[mark : mark + 1] = [
            f"  br label {head}",
            head[1:] + ":",
            f"  {i} = phi i64 [ {at}, {entry} ], [ {i_next}, {last} ]",
            f"  {i}.end = add i64 {i}, {lanes}",
            f"  {i}.fits = icmp ule i64 {i}.end, {stop}",
            f"  br i1 {i}.fits, label {inside}, label {out}",
        ]
        t.label(out)
        at, entry = i, out
    t.lanes = 1


def _note_largest(t: Text, g: str) -> None:
    """Keep the largest magnitude of this width, as bits: NaN and infinity are above all finite ones."""
    kind = t.type("i32")
    bits = t.value(f"bitcast {t.type('float')} {g} to {kind}")
    bits = t.op("and", bits, t.number(str(0x7FFFFFFF), "i32"), "i32")
    top = t.value(f"load {kind}, ptr %top{t.lanes}")
    larger = t.value(f"icmp ugt {kind} {bits}, {top}")
    top = t.pick(f"{t.type('i1')} {larger}", bits, top, "i32")
    t.put(f"store {kind} {top}, ptr %top{t.lanes}")


def step_ir(rule: str, states: int, decoupled: bool) -> str:
    """i32 @step(...): the update of all elements of the spans; 1 where the sum was finite throughout."""
    t = Text()
    for lanes in LANES:
        t.lanes = lanes
        t.put(f"%top{lanes} = alloca {t.type('i32')}, align 64")
        t.put(f"store {t.type('i32')} {t.number('0', 'i32')}, ptr %top{lanes}")
    t.lanes = 1
    constants = {}
    for index, name in enumerate(CONSTANTS):
        constants[name] = t.load("%constants", str(index))
    t.put("br label %spans.head")
    t.label("%spans.head")
    t.put("%j = phi i64 [ 0, %entry ], [ %j.next, %spans.tail ]")
    t.put("%j.more = icmp ult i64 %j, %m")
    t.put("br i1 %j.more, label %span, label %end")
    t.label("%span")
    row = t.value("getelementptr { i64, i64, i64 }, ptr %spans, i64 %j")
    fields = []
    for index in range(3):
        field = t.value(f"getelementptr i64, ptr {row}, i64 {index}")
        fields.append(t.value(f"load i64, ptr {field}"))
    table = t.value(f"getelementptr {{ float, float, float }}, ptr %scalars, i64 {fields[2]}")
    scalars = {name: t.load(table, str(index)) for index, name in enumerate(("step", "decay", "eps"))}
    decays = t.value(f"fcmp une float {scalars['decay']}, 0.0")

    def body(i: str, entry: str) -> str:
        c = {name: t.splat(value) for name, value in constants.items()}
        p = {name: t.splat(value) for name, value in scalars.items()}
        g, last = _sum(t, i, entry)
        _note_largest(t, g)
        w = t.load("%w", i)
        if not decoupled:
            g = t.pick(f"i1 {decays}", t.add(g, t.mul(p["decay"], w)), g)
        state, d = RULES_IR[rule](t, c, p, [t.load(f"%s{k}", i) for k in range(states)], g)
        if decoupled:
            d = t.pick(f"i1 {decays}", t.add(d, t.mul(p["decay"], w)), d)
        for k, vector in enumerate(state):
            t.store(vector, f"%s{k}", i)
        t.store(t.sub(w, d), "%out", i)
        return last

    _over(t, fields[0], fields[1], body)
    t.put("br label %spans.tail")
    t.label("%spans.tail")
    t.put("%j.next = add i64 %j, 1")
    t.put("br label %spans.head")
    t.label("%end")
    tops = []
    for lanes in LANES:
        t.lanes = lanes
        top = t.value(f"load {t.type('i32')}, ptr %top{lanes}")
        tops.append(
            top if lanes == 1 else t.value(f"call i32 @llvm.vector.reduce.umax.v{lanes}i32({t.type('i32')} {top})")
        )
    t.lanes = 1
    finite = [t.value(f"icmp ult i32 {top}, {0x7F800000}") for top in tops]
    verdict = functools.reduce(lambda a, b: t.op("and", a, b, "i1"), finite)
    t.put(f"ret i32 {t.value(f'zext i1 {verdict} to i32')}")
    arguments = "ptr %w, ptr %out, ptr %s0, ptr %s1, ptr %gradients, i64 %c, ptr %spans, i64 %m, ptr %scalars"
    return t.function(f"i32 @step({arguments}, ptr %constants)")


def sum_ir() -> str:
    """i32 @sum(gradients, c, out, start, stop): out = the sum. It may be written over one of them."""
    t = Text()

    def body(i: str, entry: str) -> str:
        g, last = _sum(t, i, entry)
        t.store(g, "%out", i)
        return last

    _over(t, "%start", "%stop", body)
    t.put("ret i32 0")
    return t.function("i32 @sum(ptr %gradients, i64 %c, ptr %out, i64 %start, i64 %stop)")


def sum_squares_ir() -> str:
    """i32 @sum_squares(gradients, c, out, start, stop, squares): @sum, with the squares of what it wrote.

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
    t.put("br label %run")
    t.label("%run")
    t.put("%j = phi i64 [ %i, %block ], [ %j.next, %run ]")
    t.put("%r = phi i64 [ 0, %block ], [ %r.next, %run ]")
    t.put(f"%j.next = add i64 %j, {RUN}")
    t.put("%r.next = add i64 %r, 1")
    t.put("call i32 @sum(ptr %gradients, i64 %c, ptr %out, i64 %j, i64 %j.next)")
    t.put(f"store double {_run_of_squares(t, '%j')}, ptr {t.at('%runs', '%r', 'double')}, align 8")
    t.put("%again = icmp ult i64 %j.next, %i.next")
    t.put("br i1 %again, label %run, label %block.end")
    t.label("%block.end")
    sums = []
    for run in range(NORM_BLOCK // RUN):
        sums.append(t.value(f"load double, ptr {t.at('%runs', str(run), 'double')}, align 8"))
    index = t.value(f"udiv i64 %i, {NORM_BLOCK}")
    t.put(f"store double {_neighbours(t, sums)}, ptr {t.at('%squares', index, 'double')}, align 8")
    t.put("br label %blocks")
    t.label("%end")
    t.put("ret i32 0")
    return t.function("i32 @sum_squares(ptr %gradients, i64 %c, ptr %out, i64 %start, i64 %stop, ptr %squares)")


def _run_of_squares(t: Text, start: str) -> str:
    """The float64 sum of squares of RUN elements of %out. The squares are exact."""
    t.lanes = 8
    total = ""
    for offset in range(0, RUN, 8):
        part = t.load("%out", t.value(f"add i64 {start}, {offset}"))
        wide = t.value(f"fpext <8 x float> {part} to <8 x double>")
        square = t.op("fmul", wide, wide, "double")
        total = t.op("fadd", total, square, "double") if total else square
    t.lanes = 1
    return _neighbours(t, [t.value(f"extractelement <8 x double> {total}, i64 {lane}") for lane in range(8)])


def _neighbours(t: Text, sums: Sequence[str]) -> str:
    while len(sums) > 1:
        sums = [t.op("fadd", a, b, "double") for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def module_ir(rule: str, states: int, decoupled: bool) -> str:
    """All that one rule needs: step, sum, sum_squares."""
    declared = []
    for lanes in LANES[:-1]:
        declared.append(f"declare <{lanes} x float> @llvm.sqrt.v{lanes}f32(<{lanes} x float>)")
        declared.append(f"declare i32 @llvm.vector.reduce.umax.v{lanes}i32(<{lanes} x i32>)")
    declared.append("declare float @llvm.sqrt.f32(float)")
    return "\n\n".join([*declared, step_ir(rule, states, decoupled), sum_ir(), sum_squares_ir()]) + "\n"

"""The fused pass as text for LLVM: one function per rule.

Owns: the rules, in the order of operations of rules.py, and the walk over the groups. Must not know: who compiles the
text, threads, protocols, clocks. How gradients are summed: ir_sum.py.

In the text, `spans` is a table of `m` rows {start, stop, kind} of int64; `scalars` one of rows {step, decay, eps} of
float32 by kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from rudra_zmq.update.ir_sum import GRADIENTS, LANES, emit_loops, emit_sum, sum_ir, sum_squares_ir
from rudra_zmq.update.llvm_text import Text
from rudra_zmq.update.rules import CACHE_LINE, RULES

CONSTANTS = ("momentum", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "rho", "one_minus_rho")

Parts = tuple[list[str], str]
"""The new state, and what is taken off the weights."""


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

RULES_TEXT: Mapping[str, Rule] = {
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


def _note_largest(t: Text, g: str) -> None:
    """Keep the largest magnitude of this width, as bits: NaN and infinity are above all finite ones."""
    kind = t.type("i32")
    bits = t.value(f"bitcast {t.type('float')} {g} to {kind}")
    bits = t.op("and", bits, t.number(str(0x7FFFFFFF), "i32"), "i32")
    top = t.value(f"load {kind}, ptr %top{t.lanes}")
    larger = t.value(f"icmp ugt {kind} {bits}, {top}")
    top = t.pick(f"{t.type('i1')} {larger}", bits, top, "i32")
    t.put(f"store {kind} {top}, ptr %top{t.lanes}")


def _store_weights(t: Text, value: str, i: str) -> str:
    """Write to %out, where %past says so past the cache; the last block. Single elements go through it in any case."""
    if t.lanes == 1:
        t.store(value, "%out", i)
        done = t.name("written")
        t.put(f"br label {done}")
        t.label(done)
        return done
    through, by, done = (t.name(stem) for stem in ("through", "by", "written"))
    past = t.value("icmp ne i32 %past, 0")
    t.put(f"br i1 {past}, label {by}, label {through}")
    t.label(by)
    where = t.at("%out", i, "float")
    t.put(f"store {t.type('float')} {value}, ptr {where}, align {CACHE_LINE}, !nontemporal !0")
    t.put(f"br label {done}")
    t.label(through)
    t.store(value, "%out", i)
    t.put(f"br label {done}")
    t.label(done)
    return done


def step_ir(rule: str, encoding: str) -> str:
    """i32 @step(...): the update of all elements of the spans; 1 where the sum was finite throughout.

    past: whether the new weights pass the cache by.
    """
    states, decoupled = len(RULES[rule].state), RULES[rule].decoupled_decay
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

    def body(i: str) -> str:
        c = {name: t.splat(value) for name, value in constants.items()}
        p = {name: t.splat(value) for name, value in scalars.items()}
        g, _ = emit_sum(t, i, encoding)
        _note_largest(t, g)
        w = t.load("%w", i)
        if not decoupled:
            g = t.pick(f"i1 {decays}", t.add(g, t.mul(p["decay"], w)), g)
        state, d = RULES_TEXT[rule](t, c, p, [t.load(f"%s{k}", i) for k in range(states)], g)
        if decoupled:
            d = t.pick(f"i1 {decays}", t.add(d, t.mul(p["decay"], w)), d)
        for k, vector in enumerate(state):
            t.store(vector, f"%s{k}", i)
        return _store_weights(t, t.sub(w, d), i)

    emit_loops(t, fields[0], fields[1], "%out", body)
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
    t.put("fence seq_cst")  # lines that passed the cache by are in memory before anybody is told of them
    t.put(f"ret i32 {t.value(f'zext i1 {verdict} to i32')}")
    arguments = "ptr %w, ptr %out, ptr %s0, ptr %s1, ptr %spans, i64 %m, ptr %scalars, ptr %constants"
    return t.function(f"i32 @step({GRADIENTS}, {arguments}, i32 %past)")


def module_ir(rule: str, encoding: str) -> str:
    """All that one rule needs: step, sum, sum_squares; quickest for gradients in the encoding."""
    declared = []
    for lanes in LANES[:-1]:
        declared.append(f"declare <{lanes} x float> @llvm.sqrt.v{lanes}f32(<{lanes} x float>)")
        declared.append(f"declare i32 @llvm.vector.reduce.umax.v{lanes}i32(<{lanes} x i32>)")
    declared += ["declare float @llvm.sqrt.f32(float)", "declare i64 @llvm.umin.i64(i64, i64)"]
    return "\n\n".join([*declared, step_ir(rule, encoding), sum_ir(encoding), sum_squares_ir(), "!0 = !{i32 1}"]) + "\n"

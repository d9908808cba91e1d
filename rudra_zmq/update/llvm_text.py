"""Lines of one function for LLVM, with names for its values.

Owns: the spelling of vectors, loads, stores and arithmetic. Must not know: rules, updates.
"""

from __future__ import annotations


class Text:
    """A function's body as it grows. ``lanes``: the width of what the methods emit, 1 for a plain number."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lanes = 1
        self._names = 0

    def name(self, stem: str = "v") -> str:
        self._names += 1
        return f"%{stem}{self._names}"

    def put(self, line: str) -> None:
        self.lines.append("  " + line)

    def label(self, name: str) -> None:
        self.lines.append(name[1:] + ":")

    def value(self, operation: str) -> str:
        out = self.name()
        self.put(f"{out} = {operation}")
        return out

    def type(self, element: str) -> str:
        return element if self.lanes == 1 else f"<{self.lanes} x {element}>"

    def splat(self, scalar: str, element: str = "float") -> str:
        """A scalar in every lane."""
        if self.lanes == 1:
            return scalar
        first = self.value(f"insertelement {self.type(element)} poison, {element} {scalar}, i64 0")
        return self.value(
            f"shufflevector {self.type(element)} {first}, {self.type(element)} poison, "
            f"<{self.lanes} x i32> zeroinitializer"
        )

    def number(self, value: str, element: str) -> str:
        """A literal in every lane."""
        if self.lanes == 1:
            return value
        return "<" + ", ".join([f"{element} {value}"] * self.lanes) + ">"

    def at(self, base: str, index: str, element: str) -> str:
        return self.value(f"getelementptr {element}, ptr {base}, i64 {index}")

    def load(self, base: str, index: str, element: str = "float") -> str:
        size = {"i16": 2, "half": 2, "float": 4}[element]
        return self.value(f"load {self.type(element)}, ptr {self.at(base, index, element)}, align {size}")

    def store(self, value: str, base: str, index: str) -> None:
        self.put(f"store {self.type('float')} {value}, ptr {self.at(base, index, 'float')}, align 4")

    def op(self, operation: str, a: str, b: str, element: str = "float") -> str:
        return self.value(f"{operation} {self.type(element)} {a}, {b}")

    def mul(self, a: str, b: str) -> str:
        return self.op("fmul", a, b)

    def add(self, a: str, b: str) -> str:
        return self.op("fadd", a, b)

    def sub(self, a: str, b: str) -> str:
        return self.op("fsub", a, b)

    def div(self, a: str, b: str) -> str:
        return self.op("fdiv", a, b)

    def sqrt(self, a: str) -> str:
        suffix = "f32" if self.lanes == 1 else f"v{self.lanes}f32"
        return self.value(f"call {self.type('float')} @llvm.sqrt.{suffix}({self.type('float')} {a})")

    def pick(self, condition: str, a: str, b: str, element: str = "float") -> str:
        """Lane by lane a where the condition (an i1 or a vector of them) holds, else b."""
        return self.value(f"select {condition}, {self.type(element)} {a}, {self.type(element)} {b}")

    def function(self, head: str) -> str:
        """The whole definition; ``head``: type, name and arguments."""
        return "\n".join([f"define {head} {{", "entry:", *self.lines, "}"])

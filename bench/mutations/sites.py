"""Where a module can be mutated, and how. Pure.

Not mutated: annotations, decorators, docstrings, texts, asserts, what is raised, patterns of
`match`, and functions named `validate`, whose laws only tests read.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass

FLIPPED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
SWAPPED = {"min": "max", "max": "min"}
RETURNED = {"bool": ("True", "False"), "int": ("0", "1"), "float": ("0.0", "1.0"), "str": ("''",)}
UNTOUCHED_FUNCTION = "validate"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationSite:
    """A piece of source that could read otherwise, in one of the ways `after`. `function` is its
    qualified name, empty outside of functions. `key` finds the same piece in another tree."""

    path: str
    line: int
    function: str
    kind: str
    before: str
    after: tuple[str, ...]
    start: int  # bytes
    end: int
    key: tuple[str, str, str, int]


def sites_of(path: str, source: bytes) -> list[MutationSite]:
    collector = _Collector(path, source)
    collector.visit(ast.parse(source))
    return collector.sites


def mutated(source: bytes, site: MutationSite, after: str) -> bytes:
    """Raises SyntaxError where that is no Python."""
    text = source[: site.start] + after.encode() + source[site.end :]
    ast.parse(text)
    return text


def common(sites: Iterable[MutationSite], others: Iterable[MutationSite]) -> list[MutationSite]:
    """Those of `sites` that stand exactly once in each of the two trees."""
    here, there = list(sites), Counter(site.key for site in others)
    counted = Counter(site.key for site in here)
    return [site for site in here if counted[site.key] == there[site.key] == 1]


class _Collector(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.sites: list[MutationSite] = []
        self._path = path
        self._source = source
        self._starts = [0, *(at + 1 for at, byte in enumerate(source) if byte == ord("\n"))]
        self._names: list[str] = []
        self._functions: list[Function] = []
        self._statement = ""
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _text(self, node: ast.expr | ast.stmt) -> tuple[int, int, str]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno, node.end_col_offset)
        return start, end, self._source[start:end].decode()

    def _add(self, kind: str, node: ast.expr | ast.stmt, after: Iterable[str]) -> None:
        start, end, before = self._text(node)
        name = self._functions[-1].name if self._functions else ""
        known = (kind, name, f"{self._statement} :: {ast.unparse(node)}")
        self.sites.append(
            MutationSite(
                path=self._path,
                line=node.lineno,
                function=".".join(self._names) if self._functions else "",
                kind=kind,
                before=before,
                after=tuple(after),
                start=start,
                end=end,
                key=(*known, self._seen[known]),
            )
        )
        self._seen[known] += 1

    def _negate(self, test: ast.expr) -> None:
        self._add("negated condition", test, [f"(not ({self._text(test)[2]}))"])

    # --- what is left alone -----------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise | ast.pattern):
            return
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            self._statement = ast.unparse(node)
        super().visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        if node.name == UNTOUCHED_FUNCTION:
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        if self._functions:
            self._names.append("<locals>")
        self._names.append(node.name)
        self._functions.append(node)
        self._visit_all(node.body)
        self._functions.pop()
        self._names.pop()
        if self._functions:
            self._names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self._visit_all(node.body)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # --- mutations --------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._statement = f"if {ast.unparse(node.test)}"
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._statement = f"while {ast.unparse(node.test)}"
        self._negate(node.test)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._statement = f"for {ast.unparse(node.iter)}"
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._add("comparison", node, self._flips(node))
        self.generic_visit(node)

    def _flips(self, node: ast.Compare) -> Iterator[str]:
        for other in FLIPPED[type(node.ops[0])]:
            flipped = copy(node)
            flipped.ops = [other()]
            yield f"({ast.unparse(flipped)})"

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = copy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("and/or", node, [f"({ast.unparse(other)})"])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            self._add("constant", node, [f"({node.value + 1!r})", f"({node.value - 1!r})"])

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
            swapped = copy(node)
            swapped.func = ast.Name(id=SWAPPED[node.func.id])
            self._add("min/max", node, [ast.unparse(swapped)])
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("removed statement", node, ["pass"])
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets):
            self._add("removed statement", node, ["pass"])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("removed statement", node, ["pass"])
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("removed statement", node, ["pass"])

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        text = ast.unparse(node.value)
        returns = self._functions[-1].returns
        declared = ast.unparse(returns) if returns is not None else ""
        constants = [one for one in RETURNED.get(declared, ("None",)) if one != text]
        if constants:
            self._add("returned constant", node, [f"return {one}" for one in constants])
        self.generic_visit(node)

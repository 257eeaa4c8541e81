"""Writes a captured graph as one flat Python function, without modules, wrappers or look-ups."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from engine.compiled.fusing import attend_rotating
from engine.compiled.graph import Captured
from engine.model.capture import Forward
from engine.model.interface import OPERATOR, Scores, current_state

aten = torch.ops.aten

_METHODS = {  # a view in the capture may need a copy here: strides differ
    aten.view.default: "reshape",
    aten.reshape.default: "reshape",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.permute.default: "permute",
    aten.expand.default: "expand",
}
_SIGNS = {aten.add.Tensor: "+", aten.mul.Tensor: "*", aten.sub.Tensor: "-"}


def write_forward(made: Captured) -> Forward:
    """A function of token ids, positions and rows."""
    writer = _Writer(made)
    text = writer.text()
    names: dict[str, Any] = writer.known
    exec(compile(text, "<kvrelay forward>", "exec"), names)
    return names["forward"]


class _Writer:
    def __init__(self, made: Captured) -> None:
        self._made = made
        self._lasts = _last_uses(made)
        self.known: dict[str, Any] = {"current_state": current_state}
        """The names in the function's text."""

    def text(self) -> str:
        inputs = [node.name for node in self._made.graph.find_nodes(op="placeholder")]
        lines = [f"def forward({', '.join(inputs)}):", "    state = current_state()"]
        for node in self._made.graph.nodes:
            lines += [f"    {line}" for line in self._lines(node)]
        return "\n".join(lines)

    def _lines(self, node: Node) -> list[str]:
        if node.op == "placeholder":
            return []
        if node.op == "get_attr":
            self.known[node.name] = self._made.constants[str(node.target)]
            return []
        if node.op == "output":
            return [f"return {self._word(node.args[0])}"]
        free = self._lasts.get(node, [])
        return [f"{node.name} = {self._call(node)}", *([f"del {', '.join(free)}"] if free else [])]

    def _call(self, node: Node) -> str:
        args = [self._word(arg) for arg in node.args]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:])})"
        if node.target is OPERATOR:
            return f"state.attend({self._attention(args[:3], *node.args[3:])})"
        if node.target is attend_rotating:
            rotate, *angles = args[:3]
            parts = self._attention([*args[3:6], *angles], *node.args[6:])
            return f"{self._name(node.target)}(state, {rotate}, {parts})"
        args += [f"{name}={self._word(arg)}" for name, arg in node.kwargs.items()]
        plain = _plain(node, args)
        return plain or f"{self._name(node.target)}({', '.join(args)})"

    def _attention(self, tensors: list[str], layer: Any, *how: Any) -> str:
        """The arguments of a call, from the operator's after its tensors."""
        scaling, window, softcap, sinks = how
        if isinstance(sinks, Node):
            sinks = self._made.constant(sinks)
        scores = Scores(scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        return ", ".join([str(layer), *tensors, self._name(scores)])

    def _word(self, arg: Any) -> str:
        if isinstance(arg, Node):
            return arg.name
        if isinstance(arg, list | tuple):
            return f"[{', '.join(map(self._word, arg))}]"
        if arg is None or isinstance(arg, bool | int | str):
            return repr(arg)
        return self._name(arg)

    def _name(self, content: object) -> str:
        """A new name for a value that isn't written out."""
        name = f"_{len(self.known)}"
        self.known[name] = content
        return name


def _plain(node: Node, args: list[str]) -> str | None:
    """A shorter and faster form than the operator's own call, if there is one."""
    target = node.target
    if target is operator.getitem or target is aten.sym_size.int:
        return f"{args[0]}{'' if target is operator.getitem else '.shape'}[{args[1]}]"
    if target is operator.call:
        return f"{args[0]}({', '.join(args[1:])})"
    if target in _METHODS and not node.kwargs:
        return f"{args[0]}.{_METHODS[target]}({', '.join(args[1:])})"
    if target in _SIGNS and not node.kwargs and isinstance(node.args[0], Node):
        return f"{args[0]} {_SIGNS[target]} {args[1]}"
    return None


def _last_uses(made: Captured) -> dict[Node, list[str]]:
    """# node |-> the names that no later node needs"""
    found: dict[Node, list[str]] = {}
    seen: set[Node] = set()
    for node in reversed(made.graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen and used.op != "get_attr" and node.op != "output":
                found.setdefault(node, []).append(used.name)
            seen.add(used)
    return found

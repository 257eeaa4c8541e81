"""A captured graph as text, so that the next start of the same model needn't capture it again.

Constants are named as in the model. Those without a name there are small and written out.
Recordings are kept in the user's cache folder, under a digest of all that decides their content.
"""

from __future__ import annotations

import gc
import hashlib
import json
import keyword
import logging
import operator
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from engine.compiled.fusing import whole_rotaries
from engine.compiled.graph import Captured, TensorKind
from engine.device.kept_files import NotKept, alone, cache_folder, checked, keep, own_folder
from engine.model import capture as capturing
from engine.model import interface
from engine.model.capture import capture
from engine.model.model import Model

log = logging.getLogger(__name__)


_MOST_VALUES = 4096
_OPERATORS = frozenset(
    (
        *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg"),
        *("and_", "or_", "eq", "ne", "lt", "le", "gt", "ge"),
    )
)


class NotRecorded(Exception):
    """The graph holds something that can't be written or read again."""


def record(made: GraphModule, model: torch.nn.Module) -> str:
    """Raises NotRecorded."""
    names = {id(tensor): name for name, tensor in _tensors(model).items()}
    rows = []
    for node in made.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            target = _constant_name(getattr(made, target), names)
        elif node.op == "call_function":
            target = _function_name(node.target)
        kwargs = {name: _written(arg) for name, arg in node.kwargs.items()}
        args = [_written(arg) for arg in node.args]
        rows.append([node.name, node.op, target, args, kwargs, _kind(node)])
    return json.dumps(rows)


def replay(text: str, model: torch.nn.Module) -> Captured:
    """The graph again, over the model's own tensors. Raises NotRecorded."""
    try:
        return _Reader(model).read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotRecorded(f"not a recording of this model: {error}") from error


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _constant_name(content: object, names: Mapping[int, str]) -> Any:
    """The model's name, or dtype, shape, device and values."""
    if not isinstance(content, torch.Tensor):
        raise NotRecorded(f"a constant of type {type(content).__name__}")
    if id(content) in names:
        return names[id(content)]
    if content.numel() > _MOST_VALUES:
        raise NotRecorded(f"a constant of {content.numel()} values that the model doesn't name")
    kind = _short(content.dtype), list(content.shape), str(content.device)
    return [*kind, content.flatten().tolist()]


def _function_name(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is not target:
        raise NotRecorded(f"a call of {target}")
    return f"operator.{name}"


def _short(content: object) -> str:
    return str(content).removeprefix("torch.")


def _written(arg: Any) -> Any:
    match arg:
        case None | bool() | int() | float() | str():
            return arg
        case Node():
            return {"node": arg.name}
        case list() | tuple():
            return [_written(one) for one in arg]
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": _short(arg)}
        case torch.device():
            return {"device": str(arg)}
    raise NotRecorded(f"an argument of type {type(arg).__name__}")


def _kind(node: Node) -> list[Any] | None:
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        return None
    return [_short(found.dtype), _sizes(found.shape), _sizes(found.stride())]


def _sizes(sizes: Any) -> list[int | str]:
    return [size if isinstance(size, int) else str(size) for size in sizes]


@dataclass(slots=True)
class _Reader:
    model: torch.nn.Module

    def read(self, rows: list[list[Any]]) -> Captured:
        known, tensors = Captured(Graph(), {}), _tensors(self.model)
        nodes: dict[str, Node] = {}
        for name, op, target, args, kwargs, made in rows:
            found = target
            if op == "get_attr":
                found = _add(known, tensors, target)
            elif op == "call_function":
                found = _function(target)
            elif op == "call_method":
                _check_method(target)
            _check_names(name, *kwargs)
            plain = tuple(_read(arg, nodes) for arg in args)
            named = {key: _read(arg, nodes) for key, arg in kwargs.items()}
            node = known.graph.create_node(op, found, plain, named, name)
            node.meta["kind"] = None if made is None else _read_kind(*made)
            nodes[name] = node
        return known


def _add(known: Captured, tensors: Mapping[str, torch.Tensor], target: Any) -> str:
    """Adds it under its own name, even if other tensors of the model are the same."""
    if isinstance(target, str):
        known.constants[target] = tensors[target]
        return target
    dtype, shape, device, values = target
    name = f"value_{len(known.constants)}"
    content = torch.tensor(values, dtype=_torch_kind(dtype), device=device)
    known.constants[name] = content.reshape(shape)
    return name


def _check_names(*names: str) -> None:
    """They become part of a function's text."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise NotRecorded(f"the name {name!r}")


def _check_method(name: str) -> None:
    _check_names(name)
    if name.startswith("_") or not callable(getattr(torch.Tensor, name, None)):
        raise NotRecorded(f"the method {name!r}")


def _function(name: str) -> Any:
    """An operator of torch or a plain one of Python's, and nothing else that has a name."""
    space, *path = name.split(".")
    if space == "operator":
        if path not in [[one] for one in _OPERATORS]:
            raise NotRecorded(f"the function {name!r}")
        return getattr(operator, path[0])
    found: Any = getattr(torch.ops, space)
    for part in path:
        found = getattr(found, part)
    if not isinstance(found, torch._ops.OpOverload):
        raise NotRecorded(f"the function {name!r}")
    return found


def _read(arg: Any, nodes: Mapping[str, Node]) -> Any:
    match arg:
        case {"node": name}:
            return nodes[name]
        case {"torch": name}:
            return _torch_kind(name)
        case {"device": name}:
            return torch.device(name)
        case list():
            return [_read(one, nodes) for one in arg]
    return arg


def _torch_kind(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise NotRecorded(f"torch.{name}")
    return found


def _read_kind(dtype: str, shape: list[int | str], strides: list[int | str]) -> TensorKind:
    return TensorKind(_torch_kind(dtype), tuple(shape), tuple(strides))


def recorded(model: Model) -> Captured:
    """The graph from its recording, else captured and recorded. Of processes that start together
    one captures, and the others wait. Raises NotCaptured."""
    path = cache_folder() / f"graph-{model.recording or recording_name(model)}.json"
    try:
        path = own_folder(path.parent) / path.name
    except OSError as error:
        log.warning("compile: %s is made again: %s", path, error)
        return _record(model, path)
    if found := _kept(model, path):
        return found
    if model.recording is not None:
        raise capturing.NotCaptured("its recording is gone")
    with alone(path):
        return _kept(model, path) or _record(model, path)


def _kept(model: Model, path: Path) -> Captured | None:
    try:
        return replay(checked(path).decode(), model.module)
    except NotKept:
        pass
    except (OSError, NotRecorded) as error:
        log.warning("compile: %s is made again: %s", path, error)
    return None


def _record(model: Model, path: Path) -> Captured:
    started_s = time.monotonic()
    try:
        made = _captured(model)
        text = record(made, model.module)
    except NotRecorded as error:
        raise capturing.NotCaptured(str(error)) from error
    try:
        keep(path, text.encode())
        log.info("compile: captured in %.1f s, once: %s", time.monotonic() - started_s, path)
    except OSError as error:
        log.warning("compile: the graph is not kept, so the next start takes as long: %s", error)
    del made
    gc.collect()  # it is held in circles, and the weights with it
    return replay(text, model.module)


def _captured(model: Model) -> GraphModule:
    if model.longrope is None:
        return capture(model.whole, model.device)
    with whole_rotaries(model.module, model.dtype):
        return capture(model.whole, model.device)


def recording_name(model: Model) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key[0] != "_"}
    files = (interface.__file__, capturing.__file__, __file__)
    sources = [Path(str(file)).read_text() for file in files]
    versions = (torch.__version__, version("transformers"), model.dtype_name, str(model.device))
    shapes = [(name, *part.shape) for name, part in model.module.named_parameters()]
    text = json.dumps([config, versions, sources, shapes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Values that are made many times in each step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A frozen dataclass to the type checker, with slots and keywords only. Nothing guards it at
    run time: making a frozen one takes twice as long."""
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)

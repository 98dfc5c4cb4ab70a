"""Running a model in float64 even where its code names another floating point dtype."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Widen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces every floating point dtype that an operation names by float64."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {key: _widen(value) for key, value in (kwargs or {}).items()}
        return func(*(_widen(value) for value in args), **kwargs)


def _widen(value: Any) -> Any:
    wide = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if wide else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Make floating point results float64, whatever dtype the code that is run asks for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _Widen():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)

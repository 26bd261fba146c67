"""The GPUs that llama.cpp's library sees, and their free memory. Its Python package tells neither."""

from __future__ import annotations

import ctypes
from typing import Any

_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


class GgmlGpus:
    """The devices of ggml that are GPUs, in llama.cpp's order; none if the library has no such functions.

    `library` is llama.cpp as ctypes has loaded it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        try:
            self._devices = self._find()
        except AttributeError:
            self._devices = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._devices)

    def free_bytes(self, index: int) -> int | None:
        """Memory that is free on one of them; None if it is not known."""
        if index >= len(self._devices):
            return None
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.ggml_backend_dev_memory(
            ctypes.c_void_p(self._devices[index]), ctypes.byref(free), ctypes.byref(total)
        )
        return free.value

    def _find(self) -> list[int]:
        count, get, kind = (getattr(self._library, f"ggml_backend_dev_{name}") for name in ("count", "get", "type"))
        count.restype, get.restype = ctypes.c_size_t, ctypes.c_void_p
        devices = [get(ctypes.c_size_t(number)) for number in range(count())]
        return [device for device in devices if kind(ctypes.c_void_p(device)) == _GPU]
